"""The ten checks. Each trains scenarios on ranks, and compares one figure of each with a closed formula or
with the float64 reference."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .playing import Bench, Disagreement, assembled, kept_bytes, resume, save
from .reference import error
from .scenario import Degrees, NotPossible, Played, Scenario, Sizes


class Finding(NamedTuple):
    """One scenario's result.

    Attributes:
        scenario: in words.
        outcome: ``passed``, ``failed`` or ``not possible``.
        figure: what was measured; None where nothing was.
        note: what differs, or cannot be done.
    """

    scenario: str
    outcome: str
    figure: float | None
    note: str


class Judged(NamedTuple):
    """A figure, the largest that is right, and what it says if it is not."""

    figure: float
    limit: float
    note: str


Judge = Callable[[Bench, Scenario], Judged]


@dataclass(frozen=True)
class Check:
    """A failure that is looked for.

    Attributes:
        number: of the list.
        title: the failure.
        figure: what is measured.
        scenarios: in which; the first are enough to notice it.
        judge: measures one.
    """

    number: int
    title: str
    figure: str
    scenarios: tuple[Scenario, ...]
    judge: Judge

    def findings(self, bench: Bench, scenarios: Iterable[Scenario] | None = None) -> list[Finding]:
        """Try scenarios, by default all."""
        return [self._finding(bench, scenario) for scenario in scenarios or self.scenarios]

    def _finding(self, bench: Bench, scenario: Scenario) -> Finding:
        try:
            figure, limit, note = self.judge(bench, scenario)
        except NotPossible as refusal:
            return Finding(str(scenario), "not possible", None, str(refusal))
        except (Disagreement, *bench.failures) as failure:
            text = (str(failure).strip() or failure.__class__.__name__).splitlines()[0]
            return Finding(str(scenario), "failed", None, text)
        good = figure <= limit
        return Finding(str(scenario), "passed" if good else "failed", figure, "" if good else note)


def outcome(findings: list[Finding]) -> str:
    """Of a check: failed where a scenario failed, passed where one passed, else not possible."""
    outcomes = {finding.outcome for finding in findings}
    return next((name for name in ("failed", "passed") if name in outcomes), "not possible")


def _ratio(found: np.ndarray, wanted: np.ndarray) -> float:
    """The multiple of ``wanted`` that is nearest to ``found``."""
    return float((found * wanted).sum() / max((wanted * wanted).sum(), 1e-300))


def _worst(found: dict[str, Any], wanted: dict[str, Any], floor: float, part: str = "") -> tuple[float, str]:
    """(largest relative error of the tensors whose names contain ``part``, the tensor and its multiple)."""
    missing = [name for name in wanted if part in name and name not in found]
    if missing:
        return float("inf"), f"{missing[0]} has no value"
    errors = {name: error(found[name], wanted[name], floor) for name in wanted if part in name}
    name = max(errors, key=lambda name: errors[name])
    return errors[name], f"{name}: {_ratio(found[name], wanted[name]):.4g} times the reference"


def _numbers(played: Played, wanted: Played, what: str) -> tuple[float, str]:
    """(largest relative error of a number that is reported in each step, in words)."""
    worst, note = 0.0, ""
    for outcome, expected in zip(played.outcomes, wanted.outcomes, strict=True):
        found, right = getattr(outcome, what), getattr(expected, what)
        if found is not None:
            worst = max(worst, error(np.array(found), np.array(right), 1e-30))
            note = f"{what} {found:.6g}, reference {right:.6g}"
    return worst, note


def _judged(bench: Bench, *parts: tuple[float, str]) -> Judged:
    figure, note = max(parts, key=lambda part: part[0])
    return Judged(figure, bench.adapter.tolerance, note)


def _floor(wanted: Played) -> float:
    return 1e-6 * (wanted.outcomes[-1].norm or 1.0)


def _expert_gradients(bench: Bench, scenario: Scenario) -> Judged:
    played, (wanted, _) = bench.played(scenario), bench.reference(scenario)
    gradients = _worst(played.gradients, wanted.gradients, _floor(wanted), "experts.")
    return _judged(bench, gradients, _numbers(played, wanted, "norm"))


def _router_gradients(bench: Bench, scenario: Scenario) -> Judged:
    played, (wanted, _) = bench.played(scenario), bench.reference(scenario)
    gradients = _worst(played.gradients, wanted.gradients, _floor(wanted), ".router")
    return _judged(bench, gradients, _numbers(played, wanted, "loss"))


def _without_tokens(bench: Bench, scenario: Scenario) -> Judged:
    """Experts without tokens: no gradient, and after one step ``1 - lr * decay`` of what they were."""
    played, (wanted, _) = bench.played(scenario), bench.reference(scenario)
    initial, keep = scenario.weights(), 1 - scenario.lr * scenario.decay
    decayed, gradient = (0.0, ""), (0.0, "")
    for name in (name for name in initial if "experts." in name):
        idle = slice(scenario.sizes.top_k, None)
        found = error(played.weights[name][idle], keep * initial[name][idle])
        decay = _ratio(played.weights[name][idle], initial[name][idle])
        decayed = max(decayed, (found, f"{name}: {decay:.6g} of its value without tokens, not {keep:.6g}"))
        largest = float(np.abs(played.gradients[name][idle]).max())
        gradient = max(gradient, (largest, f"{name}: gradient {largest:.3g} without tokens"))
    return _judged(bench, decayed, gradient, _worst(played.weights, wanted.weights, 1e-3))


def _auxiliary(bench: Bench, scenario: Scenario) -> Judged:
    """The multiple of the auxiliary loss's gradient that the routers' gradients have, less 1."""
    played, (wanted, added) = bench.played(scenario), bench.reference(scenario)
    routers = [name for name in added if ".router" in name]
    missing = [name for name in routers if name not in played.gradients]
    if missing:
        return Judged(float("inf"), bench.adapter.tolerance, f"{missing[0]} has no gradient")
    part = np.concatenate([added[name].ravel() for name in routers])
    tokens = np.concatenate([(wanted.gradients[name] - added[name]).ravel() for name in routers])
    found = np.concatenate([played.gradients[name].ravel() for name in routers])
    times = _ratio(found - tokens, part)
    of_gradient = abs(times - 1), f"{times:.4g} times the auxiliary loss's gradient"
    everything = _worst(played.gradients, wanted.gradients, _floor(wanted))
    return _judged(bench, of_gradient, everything, _numbers(played, wanted, "auxiliary"))


def _biases(bench: Bench, scenario: Scenario) -> Judged:
    """Changes of the biases, in multiples of their rate."""
    played, (wanted, _) = bench.played(scenario), bench.reference(scenario)
    worst: tuple[float, str] = 0.0, ""
    for name in (name for name in wanted.weights if name.endswith("bias")):
        if name not in played.weights:
            return Judged(float("inf"), 0.0, f"{name} has no value")
        found, right = (
            (run.weights[name] - scenario.bias) / scenario.sizes.bias_rate for run in (played, wanted)
        )
        note = f"{name} changed by {_listed(found)} times the rate, not by {_listed(right)}"
        worst = max(worst, (float(np.abs(found - right).max()), note))
    for step, (outcome, expected) in enumerate(zip(played.outcomes, wanted.outcomes, strict=True)):
        for layer, load in (outcome.loads or {}).items() if scenario.dtype == "float64" else ():
            right = (expected.loads or {})[layer]
            note = f"step {step}: loads {_listed(load)}, not {_listed(right)}"
            worst = max(worst, (float(np.abs(np.array(load) - right).max()), note))
    return Judged(worst[0], 1e-2, worst[1])  # float32 keeps 1 and a change of 1e-3 to 1e-4 of the change


def _listed(values: Iterable[float]) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values) + "]"


def _everything(bench: Bench, scenario: Scenario) -> Judged:
    played, (wanted, _) = bench.played(scenario), bench.reference(scenario)
    return _judged(
        bench,
        _numbers(played, wanted, "loss"),
        _numbers(played, wanted, "norm"),
        _worst(played.gradients, wanted.gradients, _floor(wanted)),
        _worst(played.weights, wanted.weights, 1e-3),
    )


def _clipping(bench: Bench, scenario: Scenario) -> Judged:
    played, (wanted, _) = bench.played(scenario), bench.reference(scenario)
    if played.outcomes[0].norm is None:
        raise NotPossible("reports no norm")
    return _judged(bench, _numbers(played, wanted, "norm"), _worst(played.weights, wanted.weights, 1e-3))


_LOADED = (Degrees(data=2, expert=2), Degrees(), Degrees(data=4, expert=4))
"""Layouts that load what the scenario's has saved."""


def _checkpoint(bench: Bench, scenario: Scenario) -> Judged:
    """Elements that are not the same bits after loading; and the step after."""
    tolerance, wanted = bench.adapter.tolerance, bench.reference(replace(scenario, steps=2))[0]
    with tempfile.TemporaryDirectory() as directory:
        parts = bench.on_ranks(scenario, save, directory)
        saved = assembled([part.weights for part in parts], scenario, 0.0)
        possible, different, after = 0, (0, ""), (0.0, "")
        for degrees in _LOADED:
            other = replace(scenario, degrees=degrees)
            if bench.adapter.refusal(other) is not None:
                continue
            possible += 1
            results = bench.on_ranks(other, resume, directory)
            loaded = assembled([weights for weights, _ in results], other, 0.0)
            for name, values in saved.items():
                count = int((loaded[name] != values).sum()) if name in loaded else values.size
                different = max(different, (count, f"{degrees}: {count} elements of {name} differ"))
            played = bench.together(other, [part for _, part in results])
            after = max(after, _worst(played.weights, wanted.weights, 1e-3))
    if different[0]:
        return Judged(float(different[0]), 0.0, different[1])
    return Judged(after[0], tolerance, f"the step after loading: {after[1]}")


def _memory(bench: Bench, scenario: Scenario) -> Judged:
    """Buffers of ``[pairs, hidden]`` that are alive after a layer's forward pass, beside: its output, the
    experts' inputs, both inner results of width ``ffn`` and their product, eight numbers for each pair of a
    token and an expert, and twelve of 8 bytes for each chosen pair. By the difference of two lengths, summed
    over ranks."""
    sizes, size = scenario.sizes, bench.adapter.itemsize
    lengths = scenario.lengths[0], 2 * scenario.lengths[0]
    totals = [sum(bench.on_ranks(replace(scenario, lengths=(length,)), kept_bytes)) for length in lengths]
    pair = (sizes.hidden + 3 * sizes.ffn) * size + 12 * 8
    token = (sizes.hidden + 8 * sizes.experts) * size
    tokens = (lengths[1] - lengths[0]) * scenario.degrees.data
    surplus = (totals[1] - totals[0]) / tokens - token - sizes.top_k * pair
    buffers = surplus / (sizes.top_k * sizes.hidden * size)
    return Judged(buffers, 0.5, f"{buffers:.2f} buffers of [pairs, hidden] more than the formula's")


ONE = Degrees()
EXPERTS = Degrees(data=2, expert=2)
REPLICATED = Degrees(data=4, expert=2)
TENSOR = Degrees(tensor=2, expert=2)
TENSOR_DATA = Degrees(data=2, tensor=2, expert=2)
ZERO = Degrees(data=4, expert=2, zero=1)
STAGES = Degrees(data=2, pipeline=2, expert=2)
BALANCED = Sizes(aux_loss=0.5)
BIASED = Sizes(score="sigmoid", bias_rate=1e-3)
WIDE = Sizes(layers=1, hidden=64, ffn=64, vocab=32)


def _in(*degrees: Degrees, **settings: Any) -> tuple[Scenario, ...]:
    return tuple(Scenario(degrees=each, **settings) for each in degrees)


CHECKS = (
    Check(
        1,
        "expert gradients doubled, not reduced over expert-data ranks, or missing in the norm",
        "relative error of the experts' gradients and of the norm",
        _in(REPLICATED, EXPERTS, TENSOR_DATA, ZERO, STAGES, ONE),
        _expert_gradients,
    ),
    Check(
        2,
        "router gradient partial over tensor ranks, or detached",
        "relative error of the routers' gradients and of the loss",
        _in(TENSOR, EXPERTS, TENSOR_DATA, Degrees(tensor=2, sequence=False, expert=2), ONE),
        _router_gradients,
    ),
    Check(
        3,
        "experts without tokens hang a rank, or skip weight decay",
        "relative error of the weights of experts without tokens",
        _in(EXPERTS, Degrees(data=4, expert=4), ZERO, STAGES, ONE, skewed=True),
        _without_tokens,
    ),
    Check(
        4,
        "auxiliary loss not attached, of a rank's tokens, blind to accumulation, or too small",
        "relative error of the auxiliary loss's gradient and value",
        _in(EXPERTS, TENSOR_DATA, STAGES, ONE, sizes=BALANCED)
        + _in(ONE, sizes=BALANCED, microbatches=1)
        + _in(ONE, EXPERTS, sizes=BALANCED, recompute=True),
        _auxiliary,
    ),
    Check(
        5,
        "bias counted twice by recompute, changed per microbatch, or kept in 16 bits",
        "error of the biases' changes, in steps of their rate, and of loads",
        _in(EXPERTS, ONE, sizes=BIASED, steps=2, recompute=True)
        + _in(EXPERTS, ONE, sizes=BIASED, steps=3, bias=1.0, dtype="bfloat16", skewed=True)
        + _in(EXPERTS, TENSOR_DATA, STAGES, sizes=BIASED, steps=2),
        _biases,
    ),
    Check(
        6,
        "rows of the grouped product that nothing has written are read",
        "relative error of everything, with memory filled with NaN",
        _in(EXPERTS, ONE, sizes=Sizes(capacity=0.7), poison=True)
        + _in(EXPERTS, ONE, skewed=True, poison=True)
        + _in(TENSOR, sizes=Sizes(capacity=0.7), poison=True),
        _everything,
    ),
    Check(
        7,
        "a checkpoint loses experts, or transposes square ones",
        "elements that differ after loading in another layout; relative error of the step after",
        _in(REPLICATED, TENSOR_DATA, ZERO, ONE),
        _checkpoint,
    ),
    Check(
        8,
        "documents or sequences of different lengths hang a pipeline, or change its numbers",
        "relative error of everything",
        _in(STAGES, ONE, EXPERTS, documents=True) + _in(STAGES, EXPERTS, ONE, lengths=(8, 12, 6, 10)),
        _everything,
    ),
    Check(
        9,
        "clipping with a norm of one grid, or counted twice",
        "relative error of the norm and of the clipped update",
        _in(REPLICATED, TENSOR_DATA, ZERO, STAGES, Degrees(data=4, expert=4), ONE, clip=0.1),
        _clipping,
    ),
    Check(
        10,
        "memory of the dispatcher kept between forward and backward",
        "buffers of [pairs, hidden] beyond the formula",
        _in(EXPERTS, Degrees(data=4, expert=4), ONE, sizes=WIDE, microbatches=4, lengths=(64,)),
        _memory,
    ),
)

__all__ = ["CHECKS", "Check", "Disagreement", "Finding", "outcome"]
