"""Predictions beside published measurements: errors by source, of step time and of memory. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hexad.config import HexadError

from .other_memory import fits, peak_bytes, state_bytes
from .published import Published, Uncovered, published, zero_level
from .published_times import positive
from .step_time import Predictor


@dataclass(frozen=True)
class Compared:
    """One row of measurements beside its predictions.

    Attributes:
        row: as published.
        seconds: (predicted, measured) of a step; None where not measured, or not covered.
        memory: (predicted, measured) peak bytes; the same.
        oom: whether the row ran out of memory by the prediction; None unless it did when it was measured.
        reasons: why a measurement, or all of the row, is not covered.
    """

    row: Mapping[str, Any]
    seconds: tuple[float, float] | None = None
    memory: tuple[float, float] | None = None
    oom: bool | None = None
    reasons: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The source, without the names of the files that it was read from."""
        return str(self.row.get("source") or "not stated").split(" results (")[0]


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of the calibration format, one JSON object a line; empty lines are skipped.

    Raises:
        HexadError: the file cannot be read, or a line is not a JSON object: names the file and the line.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise HexadError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def _row(line: str, name: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HexadError(f"{name}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise HexadError(f"{name}: found {line.strip():.60}, expected a JSON object")
    for name_of_part in ("model", "measured"):
        if not isinstance(row.get(name_of_part, {}), dict):
            value = json.dumps(row[name_of_part])
            raise HexadError(f"{name}: {name_of_part}: found {value:.60}, expected a JSON object")
    return row


def compare(row: Mapping[str, Any]) -> Compared:
    """A row beside its predictions."""
    stated = positive(row.get("measured") or {}, "model_state_gb")
    parameters, shards = positive(row.get("model") or {}, "params"), positive(row, "dp")
    if stated and parameters and shards:  # of mixed precision with Adam, by level of sharding
        predicted = state_bytes(parameters, 2.0, 2.0, 12.0, zero_level(row), shards)
        return Compared(row, memory=(predicted, stated * 1e9))
    try:
        case = published(row)
    except Uncovered as reason:
        return Compared(row, reasons=(str(reason),))
    seconds = memory = oom = None
    reasons: list[str] = []
    if case.seconds is not None:
        try:
            seconds = Predictor(case.job, case.cluster, case.system).step.total, case.seconds
        except HexadError as error:
            reasons.append(f"time: {error}")
    if case.memory is not None or case.out_of_memory:
        try:
            memory, oom = _memory(case)
        except Uncovered as reason:
            reasons.append(f"memory: {reason}")
    covered = seconds is not None or memory is not None or oom is not None
    if not covered and not reasons:
        reasons.append(case.unmeasured or "neither a step time, a throughput nor a peak of memory is stated")
    if not covered:
        reasons = [
            reason.split(": ", 1)[1] if reason.startswith(("time: ", "memory: ")) else reason
            for reason in reasons[:1]
        ]
    return Compared(row, seconds, memory, oom, tuple(reasons))


def _memory(case: Published) -> tuple[tuple[float, float] | None, bool | None]:
    """Predicted and measured peak, and whether an out-of-memory row is predicted not to fit."""
    compared = None if case.memory is None else (peak_bytes(case), case.memory)
    return compared, not fits(case) if case.out_of_memory else None


@dataclass
class Errors:
    """Errors of predictions, as fractions of what was measured."""

    values: list[float] = field(default_factory=list)

    def add(self, pair: tuple[float, float] | None) -> None:
        """Count a prediction beside its measurement."""
        if pair is not None:
            self.values.append(pair[0] / pair[1] - 1)

    def as_tree(self) -> dict[str, Any]:
        """How many, the mean of their sizes, their mean, and the largest; None where there are none."""
        count = len(self.values)
        mape = sum(map(abs, self.values)) / count if count else None
        bias = sum(self.values) / count if count else None
        return {
            "covered": count,
            "mape": mape,
            "bias": bias,
            "worst": max(self.values, key=abs, default=None),
        }


@dataclass
class PredictionErrors:
    """Prediction errors of several rows."""

    rows: int = 0
    time: Errors = field(default_factory=Errors)
    memory: Errors = field(default_factory=Errors)
    oom: list[bool] = field(default_factory=list)
    uncovered: Counter[str] = field(default_factory=Counter)

    def add(self, row: Compared) -> None:
        """Count a row."""
        self.rows += 1
        self.time.add(row.seconds)
        self.memory.add(row.memory)
        self.oom += [] if row.oom is None else [row.oom]
        self.uncovered.update(row.reasons)

    def as_tree(self) -> dict[str, Any]:
        """The score as JSON."""
        return {
            "rows": self.rows,
            "time": self.time.as_tree(),
            "memory": self.memory.as_tree(),
            "oom": {"rows": len(self.oom), "right": sum(self.oom)},
            "uncovered": dict(self.uncovered.most_common()),
        }


def validate_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The errors of all rows and of each source, as ``hexad plan validate --json`` prints them."""
    overall, sources = PredictionErrors(), dict[str, PredictionErrors]()
    for row in rows:
        compared = compare(row)
        overall.add(compared)
        sources.setdefault(compared.source, PredictionErrors()).add(compared)
    parts = [{"source": source, **score.as_tree()} for source, score in sources.items()]
    return {"sources": parts, "overall": overall.as_tree()}
