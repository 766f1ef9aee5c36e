"""Fit the constants of training systems on published step times, with cross-validation.

Every system has few constants, each of which stands for a mechanism (:mod:`hexad.planning.implementation`).
They are fitted on all rows of files of the calibration format that measured it, robustly: errors are ratios,
those above some 10 % count less, settings that were measured often count as few, and constants are drawn to
their defaults. Cross-validation predicts each group of rows (a model, a kind of GPU, a source) with constants
that were fitted without it, by their derivatives at the constants that were fitted on all rows.

    python -m benchmarks.fit_implementations FILE.jsonl... [--system NAME] [--write]
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares

from hexad.config import HexadError
from hexad.planning.implementation import Implementation, implementation
from hexad.planning.published import Published, Uncovered, published
from hexad.planning.step_time import Predictor
from hexad.planning.validation import read_rows

DENSE = {"products": 1.0, "attention": 1.0, "passes": 1.5, "calls": 4.0}
"""Constants of all systems, and where the fit begins."""
OLD = {
    "products": 1.0,
    "passes": 2.0,
    "scores": 11.0,
    "calls": 4.0,
    "collectives": 1.1,
    "collective_calls": 1.0,
    "message_us": 100.0,
    "step_us": 3000.0,
}
FITTED: dict[str, dict[str, float]] = {
    "vtrain": OLD,
    "megatron-2022": {"products": 1.0, "passes": 2.0, "scores": 11.0},
    "megatron-deepspeed": {"products": 1.0},
    "megatron-core": {**DENSE, "quantise": 0.5},
    "megatron-lm": {**DENSE, "step_us": 3000.0},
    "maxtext": {"products": 1.0, "passes": 1.5, "quantise": 0.5},
    "torchtitan": {"products": 1.0, "attention": 1.0, "passes": 1.5, "uncompiled": 2.0},
    "llm-foundry": {"products": 1.0, "attention": 1.0, "passes": 3.0},
    "automodel": {"products": 1.0},
}
"""The constants of each system that are fitted, and where the fit begins."""
SCALE = 0.1
"""Error from which on a row counts less."""
PRIOR = 0.15
"""How strongly constants are drawn to where the fit begins: the error in the mean row that a factor of e is
worth, by the root of the number of settings."""


STEP = 0.05
"""Step of derivatives, in logarithms of constants."""
FAR = 0.5
"""How far derivatives are trusted, in logarithms of constants."""
OF_A_SETTING = 2
"""Rows of a setting that are fitted on."""


@dataclass
class Fit:
    """Rows of one system and its constants."""

    system: str
    rows: list[tuple[Mapping[str, Any], Published]]
    start: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = FITTED[self.system]

    def errors(self, constants: Mapping[str, float], rows: Sequence[int] | None = None) -> np.ndarray:
        """Predicted over measured step time, less one."""
        chosen = range(len(self.rows)) if rows is None else rows
        return np.array([predicted(self.rows[number][1], constants) - 1 for number in chosen])

    def values(self, logs: np.ndarray) -> dict[str, float]:
        """Constants, given the logarithms of their ratios to the beginning."""
        return {name: float(start * np.exp(log)) for (name, start), log in zip(self.start.items(), logs)}

    def residuals(self, errors: np.ndarray, logs: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        """What is minimised, given the logarithms of predicted over measured times."""
        settings = [self.settings[number] for number in rows]
        counts = Counter(settings)
        weights = np.array([counts[each] ** -0.5 for each in settings])
        robust = np.sign(errors) * SCALE * np.sqrt(2 * (np.sqrt(1 + (errors / SCALE) ** 2) - 1))
        return np.concatenate([weights * robust, PRIOR * SCALE * len(counts) ** 0.5 * logs])

    @cached_property
    def settings(self) -> list[tuple[Any, ...]]:
        """The setting of every row."""
        return [setting(row) for row, _ in self.rows]

    @cached_property
    def fitted(self) -> np.ndarray:
        """Logarithms of the constants fitted on all rows."""
        rows = self.thinned

        def residuals(logs: np.ndarray) -> np.ndarray:
            return self.residuals(np.log1p(self.errors(self.values(logs), rows)), logs, rows)

        return least_squares(residuals, np.zeros(len(self.start)), diff_step=0.02, max_nfev=8).x

    @cached_property
    def thinned(self) -> list[int]:
        """The rows that are fitted on: few of a setting."""
        seen: Counter[tuple[Any, ...]] = Counter()
        kept = []
        for number, of_setting in enumerate(self.settings):
            seen[of_setting] += 1
            if seen[of_setting] <= OF_A_SETTING:
                kept.append(number)
        return kept

    @cached_property
    def linear(self) -> tuple[np.ndarray, np.ndarray]:
        """Logarithmic errors of the thinned rows with the fitted constants, and their derivatives."""
        errors = np.log1p(self.errors(self.values(self.fitted), self.thinned))
        columns = []
        for number in range(len(self.start)):
            moved = self.fitted.copy()
            moved[number] += STEP
            columns.append((np.log1p(self.errors(self.values(moved), self.thinned)) - errors) / STEP)
        return errors, np.stack(columns, axis=1)

    def without(self, members: Sequence[int]) -> dict[str, float]:
        """Constants fitted without some rows, by derivatives at those that were fitted on all."""
        chosen = [place for place, number in enumerate(self.thinned) if number not in set(members)]
        rows = [self.thinned[place] for place in chosen]
        errors, derivatives = (part[chosen] for part in self.linear)

        def residuals(logs: np.ndarray) -> np.ndarray:
            return self.residuals(errors + derivatives @ (logs - self.fitted), logs, rows)

        bounds = self.fitted - FAR, self.fitted + FAR
        return self.values(least_squares(residuals, self.fitted, bounds=bounds).x)

    def left_out(self, group: Callable[[Mapping[str, Any]], str]) -> np.ndarray | None:
        """Errors of every group with constants that were fitted on the others; None if there is only one."""
        groups = defaultdict(list)
        for number, (row, _) in enumerate(self.rows):
            groups[group(row)].append(number)
        if len(groups) < 2:
            return None
        errors = np.zeros(len(self.rows))
        for members in groups.values():
            errors[members] = self.errors(self.without(members), members)
        return errors


def predicted(case: Published, constants: Mapping[str, float]) -> float:
    """Predicted over measured step time."""
    system = case.system.model_copy(update=dict(constants))
    assert case.seconds is not None
    return Predictor(case.job, case.cluster, system).step.total / case.seconds


def model_of(row: Mapping[str, Any]) -> str:
    """The model's shape."""
    model = row["model"]
    return f"{model.get('hidden')}x{model.get('ffn')}, {bool(model.get('moe'))}"


def gpu_of(row: Mapping[str, Any]) -> str:
    """The kind of GPU."""
    case = published(row)
    return case.cluster.hardware.names[0]


def source_of(row: Mapping[str, Any]) -> str:
    """The source."""
    return str(row["source"]).split(" results (")[0]


def setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What similar rows have in common: those that differ in the number of GPUs alone are one setting."""
    names = ("tp", "pp", "vp", "cp", "ep", "micro_batch", "precision", "recompute")
    return (model_of(row), gpu_of(row), *(row.get(name) for name in names))


GROUPS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "model": model_of,
    "GPU": gpu_of,
    "source": source_of,
}


def read(files: Sequence[str]) -> dict[str, list[tuple[Mapping[str, Any], Published]]]:
    """The rows with a step time, by system."""
    rows = defaultdict(list)
    for file in files:
        for row in read_rows(file):
            try:
                case = published(row)
            except Uncovered:
                continue
            if case.seconds is not None and case.system.name in FITTED:
                try:
                    predicted(case, {})
                except HexadError:
                    continue
                rows[case.system.name].append((row, case))
    return rows


def summary(errors: np.ndarray | None) -> str:
    """MAPE, bias and worst error."""
    if errors is None:
        return f"{'':>24s}"
    worst = errors[abs(errors).argmax()]
    return f"{abs(errors).mean():7.1%} {errors.mean():+7.1%} {worst:+8.1%}"


def report(fit: Fit, every: Sequence[int], cross: bool) -> dict[str, float]:
    """Print a system's constants and errors by source; returns the constants."""
    constants = fit.values(fit.fitted)
    print(f"\n{fit.system}: {', '.join(f'{name} {value:.4g}' for name, value in constants.items())}")
    errors = fit.errors(constants)
    left = {name: fit.left_out(group) if cross else None for name, group in GROUPS.items()}
    print(f"{'':46s} rows  {'fitted':>22s}" + "".join(f"  {'without its ' + name:>24s}" for name in GROUPS))
    sources = defaultdict(list)
    for number, (row, _) in enumerate(fit.rows):
        sources[source_of(row)].append(number)
    for source, members in [*sources.items(), ("all", list(every))]:
        parts = [errors[members], *(None if each is None else each[members] for each in left.values())]
        print(f"  {source[:44]:44s} {len(members):4d}  " + "  ".join(map(summary, parts)))
    return constants


def write(name: str, constants: Mapping[str, float]) -> None:
    """Write the constants to the system's file, beside what is not fitted."""
    path = Path(str(resources.files("hexad.planning") / "implementations" / f"{name}.yaml"))
    kept = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    kept = {key: value for key, value in kept.items() if key not in FITTED[name]}
    rounded = {key: float(f"{value:.3g}") for key, value in constants.items()}
    Implementation.model_validate({"name": name, **kept, **rounded})
    text = "".join(f"{key}: {yaml.safe_dump(value).split(chr(10))[0]}\n" for key, value in kept.items())
    text += "# Fitted by benchmarks/fit_implementations.py on published step times.\n"
    text += "".join(f"{key}: {value:g}\n" for key, value in rounded.items())
    path.write_text(text, encoding="utf-8")
    implementation.cache_clear()


def main() -> None:
    """Fit, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE.jsonl", help="measurements")
    parser.add_argument("--system", action="append", help="only these systems")
    parser.add_argument("--no-cross", action="store_true", help="without cross-validation")
    parser.add_argument("--write", action="store_true", help="write the constants to the systems' files")
    options = parser.parse_args()
    for name, rows in sorted(read(options.files).items()):
        if options.system is None or name in options.system:
            constants = report(Fit(name, rows), range(len(rows)), not options.no_cross)
            if options.write:
                write(name, constants)


if __name__ == "__main__":
    main()
