"""Detection of faulty steps: gradients that are not finite, loss spikes. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hexad.config.schema import FaultSettings

if TYPE_CHECKING:
    from .experts import Reports

Fault = Literal["not_finite", "spike"]


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        step: its number, counted from 1.
        loss: mean cross-entropy per target token over the global batch before the update, in nats; NaN
            without a target.
        grad_norm: global gradient norm before clipping.
        lr: learning rate applied; of an optimizer with groups that of the first.
        targets: target tokens in the global batch.
        pairs: pairs of tokens of one document in the global batch, see :meth:`Microbatch.pairs`.
        skipped: nothing was updated: the gradient was not finite, the loss a spike, or there was no target.
        loss_scale: what the loss was multiplied by in the backward pass.
        fault: why it was skipped; None where only the loss scale was too large, or there was no target.
        limit: the largest loss that would have been no spike; None without a limit.
        auxiliary: the layers' own losses by name, means over the microbatches of the global batch.
        experts: by layer, the loads of its experts.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    targets: int
    pairs: int
    skipped: bool
    loss_scale: float
    fault: Fault | None = None
    limit: float | None = None
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    experts: Reports = field(default_factory=dict)


class Streak(NamedTuple):
    """Consecutive faults: how many, and the largest number of a step among them."""

    length: int = 0
    last: int = 0


class FaultGuard:
    """Keeps the losses of applied updates, and the number of consecutive faults.

    Its state is part of checkpoints: a resumed run decides as the run that wrote it.

    Attributes:
        streak: the faults since the last update beyond the last of them.
    """

    def __init__(self, settings: FaultSettings) -> None:
        self.settings = settings
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self.streak = Streak()

    @property
    def limit(self) -> float | None:
        """The largest loss that is not a spike, in nats; None while there is no detection."""
        if self.settings.spike is None or len(self._losses) < self.settings.spike_window:
            return None
        return self.settings.spike * median(self._losses)

    def record(self, step: int, loss: float, updated: bool, fault: Fault | None) -> None:
        """Record a step: whether its update was applied, and why not (None: the loss scale overflowed)."""
        if updated:
            if self.settings.spike is not None:
                self._losses.append(loss)
            if step > self.streak.last:
                self.streak = Streak()
        elif fault is not None:
            self.streak = Streak(self.streak.length + 1, max(self.streak.last, step))

    def action(self, fault: Fault) -> Literal["stop", "skip", "roll_back"]:
        """The configured reaction to a fault."""
        return self.settings.on_spike if fault == "spike" else self.settings.not_finite

    @property
    def exhausted(self) -> bool:
        """Whether more consecutive steps have failed than ``faults.most``."""
        return self.streak.length > self.settings.most

    def state(self) -> dict[str, Any]:
        """The guard's state for a checkpoint, in JSON's types."""
        return {"losses": list(self._losses), "row": list(self.streak)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`."""
        self._losses = deque(state.get("losses", []), maxlen=self.settings.spike_window)
        self.streak = Streak(*state.get("row", []))

    def describe(self, step: int, loss: float, fault: Fault, limit: float | None) -> str:
        """A message about a faulty step."""
        if fault == "not_finite":
            return f"step {step}: the loss is {loss:g} and the gradient is not finite"
        settings = self.settings
        return (
            f"step {step}: the loss {loss:g} is a spike, above {limit:g}, which is faults.spike "
            f"{settings.spike:g} x the median of {settings.spike_window} losses"
        )
