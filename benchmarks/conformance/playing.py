"""Scenarios on ranks: what each rank does, and what the ranks' parts are together."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import reference
from .ranks import Hang, RankFailed
from .scenario import Adapter, NotPossible, Outcome, Piece, Played, Scenario, Tensors

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.memory.live import Live

Factory = Callable[[], Adapter]
Runner = Callable[..., list[Any]]
"""Calls a function on the ranks of a world: ``run(world, function, *arguments)``."""


class Disagreement(Exception):
    """Ranks have different values of one thing, or none has it."""


class Part(NamedTuple):
    """What a rank answers."""

    outcomes: list[Outcome]
    gradients: list[Piece]
    weights: list[Piece]


@contextmanager
def poisoned(poison: bool) -> Iterator[None]:
    """Memory that is allocated is filled with NaN."""
    torch.use_deterministic_algorithms(poison, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def train(make: Factory, scenario: Scenario) -> Part:
    """The steps of a scenario on this rank."""
    adapter = make()
    with poisoned(scenario.poison):
        adapter.build(scenario)
        adapter.set_weights(scenario.weights())
        outcomes = [adapter.step(scenario.batch(step)) for step in range(scenario.steps)]
    return Part(outcomes, adapter.gradients(), adapter.weights())


def save(make: Factory, scenario: Scenario, directory: str) -> Part:
    """A step, and a checkpoint after it."""
    adapter = make()
    adapter.build(scenario)
    adapter.set_weights(scenario.weights())
    outcome = adapter.step(scenario.batch(0))
    adapter.save(directory)
    return Part([outcome], [], adapter.weights())


def resume(make: Factory, scenario: Scenario, directory: str) -> tuple[list[Piece], Part]:
    """(the weights that are loaded, the step after)."""
    adapter = make()
    adapter.build(scenario)
    adapter.load(directory)
    loaded = adapter.weights()
    outcome = adapter.step(scenario.batch(1))
    return loaded, Part([outcome], adapter.gradients(), adapter.weights())


def kept_bytes(make: Factory, scenario: Scenario) -> int:
    """Bytes that the forward pass of this rank's first mixture of experts has left alive when it ends, in the
    first microbatch."""
    adapter = make()
    adapter.build(scenario)
    adapter.set_weights(scenario.weights())
    live, seen = Live(), list[int]()
    first = adapter.mixtures()[0]

    def read(*_: Any) -> None:
        gc.collect()  # cycles end when they are collected
        seen.append(live.bytes)

    handles = [first.register_forward_pre_hook(read), first.register_forward_hook(read)]
    with live:
        adapter.step(scenario.batch(0))
    for handle in handles:
        handle.remove()
    return seen[1] - seen[0]


def assembled(parts: Sequence[Sequence[Piece]], scenario: Scenario, tolerance: float) -> Tensors:
    """Global tensors of all ranks' pieces.

    Raises:
        Disagreement: copies differ, or an element is on no rank.
    """
    shapes, whole = scenario.sizes.shapes(), dict[str, np.ndarray]()
    known = {name: np.zeros(shape, bool) for name, shape in shapes.items()}
    for name, offset, values in (piece for pieces in parts for piece in pieces):
        place = tuple(slice(start, start + size) for start, size in zip(offset, values.shape, strict=True))
        target = whole.setdefault(name, np.full(shapes[name], np.nan))[place]
        copied = known[name][place]
        if not np.allclose(target[copied], values[copied], rtol=tolerance, atol=tolerance, equal_nan=True):
            raise Disagreement(f"copies of {name} differ between ranks")
        target[...] = values
        known[name][place] = True
    lost = [name for name in whole if not known[name].all()]
    if lost:
        raise Disagreement(f"parts of {lost[0]} are on no rank")
    return whole


def agreed(outcomes: Sequence[Outcome], tolerance: float) -> Outcome:
    """What the ranks report of a step.

    Raises:
        Disagreement: different numbers.
    """
    values: list[Any] = []
    for name in ("loss", "auxiliary", "norm"):
        reported = [value for outcome in outcomes if (value := getattr(outcome, name)) is not None]
        if reported and not np.allclose(reported, reported[0], rtol=tolerance, atol=0, equal_nan=True):
            raise Disagreement(f"ranks report {name} {', '.join(f'{value:.6g}' for value in reported)}")
        values.append(reported[0] if reported else None)
    return Outcome(*values, outcomes[0].loads)


@dataclass
class Bench:
    """A framework, and how its ranks are run.

    Attributes:
        adapter: the framework's.
        run: calls a function on ranks.
        make: an adapter of a rank; by default the class.
        failures: what ``run`` raises where a rank fails or hangs.
    """

    adapter: type[Adapter]
    run: Runner
    make: Factory | None = None
    failures: tuple[type[Exception], ...] = (Hang, RankFailed)
    _references: dict[Scenario, tuple[Played, Tensors]] = field(default_factory=dict)

    @cached_property
    def factory(self) -> Factory:
        """What makes an adapter on a rank."""
        return self.make or self.adapter

    def reference(self, scenario: Scenario) -> tuple[Played, Tensors]:
        """See :func:`reference.play`."""
        if scenario not in self._references:
            self._references[scenario] = reference.play(scenario, self.adapter.balance)
        return self._references[scenario]

    def on_ranks(self, scenario: Scenario, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Each rank's result of ``function(factory, scenario, *arguments)``.

        Raises:
            NotPossible: the framework refuses the scenario.
        """
        refusal = self.adapter.refusal(scenario)
        if refusal is not None:
            raise NotPossible(refusal)
        return self.run(scenario.degrees.world, function, self.factory, scenario, *arguments)

    def played(self, scenario: Scenario) -> Played:
        """The scenario on its ranks."""
        return self.together(scenario, self.on_ranks(scenario, train))

    def together(self, scenario: Scenario, parts: Sequence[Part]) -> Played:
        """What the ranks' parts are together."""
        tolerance = self.adapter.tolerance
        steps = zip(*(part.outcomes for part in parts), strict=True)
        return Played(
            [agreed(outcomes, tolerance) for outcomes in steps],
            assembled([part.gradients for part in parts], scenario, tolerance),
            assembled([part.weights for part in parts], scenario, tolerance),
        )
