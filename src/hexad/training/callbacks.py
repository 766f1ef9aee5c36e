"""A user's code, called during a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hexad.config import Config, HexadError, did_you_mean
from hexad.engine.engine import Engine
from hexad.engine.evaluation import Score
from hexad.topology.mesh import Mesh

Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last step, and what ended it early, if anything: the name of a signal,
    ``callback``, or ``patience`` (``validate.patience``)."""

    step: int
    stopped_by: str | None


class TrainerState(Protocol):
    """The state of a run that callbacks may use.

    Attributes:
        config: resolved.
        mesh: of the run.
        first: this rank is the one that writes.
        engine: the model, its gradients and optimizer.
    """

    config: Config
    mesh: Mesh
    first: bool
    engine: Engine

    def stop(self) -> None:
        """End the run after this step, with a checkpoint; on any rank."""


class Callback:
    """Base of callbacks: override what is needed and pass instances to :func:`hexad.train`.

    Every method is called on every rank, with the same numbers. An exception ends the run, without a
    checkpoint.
    """

    def on_start(self, trainer: TrainerState) -> None:
        """Called before the first step of this process, with the state loaded."""

    def on_step(self, trainer: TrainerState, metrics: Metrics) -> None:
        """Called after each step: what ``metrics.jsonl`` holds of it, also of steps that are not logged."""

    def on_evaluation(self, trainer: TrainerState, scores: Mapping[str, Score]) -> None:
        """Called after each evaluation (``validate.every``): the score of each validation set, by name."""

    def on_checkpoint(self, trainer: TrainerState, step: int) -> None:
        """Called after the state has been copied for the checkpoint of ``step``, which may still be
        written."""

    def on_end(self, trainer: TrainerState, outcome: Outcome) -> None:
        """Called after the last step, or an early stop, when all is saved; not after an error."""


def checked_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """The callbacks, if they are some.

    Raises:
        HexadError: one that is no instance of :class:`Callback`, or has a method of another name that begins
            with ``on_``.
    """
    known = [name for name in vars(Callback) if name.startswith("on_")]
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise HexadError(f"callbacks: found a {type(callbacks).__name__}, expected a list of hexad.Callback")
    checked = tuple(callbacks)
    for callback in checked:
        if not isinstance(callback, Callback):
            kind = callback.__name__ if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise HexadError(f"callbacks: found {kind}, expected instances of hexad.Callback")
        for name in dir(callback):
            if name.startswith("on_") and name not in known and callable(getattr(callback, name)):
                hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
                raise HexadError(
                    f"callbacks: {type(callback).__name__} has {name}, which is never called{hint}"
                )
    return checked
