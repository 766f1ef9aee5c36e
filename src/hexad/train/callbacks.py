"""Code of the user's own, called during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .evaluation import Score
    from .loop import Outcome, Trainer

Metrics = Mapping[str, Any]


class Callback:
    """Base of callbacks: override what is needed and pass instances to :func:`hexad.train`.

    Every method is called on every rank, with the same numbers; ``trainer.first`` is true on the one that
    writes. ``trainer.config`` is resolved, ``trainer.engine`` and ``trainer.mesh`` may be read, and
    ``trainer.stop()``, on any rank, ends the run after the step, with a checkpoint; so does an exception, but
    without one.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step of this process, with the state loaded."""

    def on_step(self, trainer: Trainer, metrics: Metrics) -> None:
        """After each step: what ``metrics.jsonl`` holds of it, also of steps that are not logged."""

    def on_evaluation(self, trainer: Trainer, scores: Mapping[str, Score]) -> None:
        """After each evaluation (``validate.every``): the score of each validation set, by name."""

    def on_checkpoint(self, trainer: Trainer, step: int) -> None:
        """After the state has been copied for the checkpoint of ``step``, which may still be written."""

    def on_end(self, trainer: Trainer, outcome: Outcome) -> None:
        """After the last step, or an early stop, when all is saved; not after an error."""


class Callbacks(Callback):
    """Several, called in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def on_start(self, trainer: Trainer) -> None:
        for each in self._callbacks:
            each.on_start(trainer)

    def on_step(self, trainer: Trainer, metrics: Metrics) -> None:
        for each in self._callbacks:
            each.on_step(trainer, metrics)

    def on_evaluation(self, trainer: Trainer, scores: Mapping[str, Score]) -> None:
        for each in self._callbacks:
            each.on_evaluation(trainer, scores)

    def on_checkpoint(self, trainer: Trainer, step: int) -> None:
        for each in self._callbacks:
            each.on_checkpoint(trainer, step)

    def on_end(self, trainer: Trainer, outcome: Outcome) -> None:
        for each in self._callbacks:
            each.on_end(trainer, outcome)
