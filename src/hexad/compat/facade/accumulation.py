"""Backward passes that a script makes one by one, counted into steps of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hexad.config import HexadError
from hexad.parallel.contributions import Dense

if TYPE_CHECKING:
    from hexad.engine.engine import Engine


class Update(NamedTuple):
    """The result of a step.

    Attributes:
        passes: backward passes that were counted.
        norm: of the gradients, before clipping.
        applied: the weights were updated: the gradients were finite.
    """

    passes: int
    norm: float
    applied: bool


class Accumulation:
    """The backward passes since an engine's last update.

    Args:
        engine: that accumulates their gradients.

    Attributes:
        passes: how many there were.
        discarded: gradients were discarded since the last update.
        reduced: gradients have been reduced, and there was no backward pass since.
        synchronised: False inside :meth:`no_sync`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limit: int | None = None
        self.passes = 0
        self.discarded = self.reduced = False
        self.synchronised = True

    @property
    def pending(self) -> bool:
        """Whether gradients wait for an update, of these passes or of a loss that another engine
        differentiates."""
        return self._engine.gradients.contributed

    def begin(self, limit: int | None) -> None:
        """Accept gradients from now on; what was accumulated is discarded. Buckets are reduced after
        ``limit`` passes, though more are possible; None: by the update only."""
        self._limit = limit if self.synchronised else None
        self.reduced = False
        self._engine.begin(self._limit)

    def expect(self, limit: int | None) -> None:
        """Prepare for a backward pass that the script makes itself: of a step of ``limit`` passes, as of
        :meth:`begin`, unless it has begun."""
        if self.reduced:
            self._engine.extend()
            self.reduced = False
        elif not self.pending and (limit if self.synchronised else None) != self._limit:
            self.begin(limit)
        self.passes += 1

    def reduce(self) -> None:
        """Sum the gradients accumulated so far over ranks, unless that has been done; all ranks together."""
        if not self.reduced:
            self._engine.reduce()
            self.reduced = True

    def update(self, limit: int | None, divisor: float) -> Update:
        """Reduce, clip and update, and begin the next step, of ``limit`` passes.

        Args:
            limit: as of :meth:`begin`.
            divisor: what the losses have not been divided by yet.
        """
        passes, before = self.finish(), self._engine.updates
        self.reduce()
        norm = self._engine.update(None, divisor=divisor)
        self.begin(limit)
        return Update(passes, norm, self._engine.updates > before)

    def backward(self, loss: Tensor, divisor: int = 1, retain_graph: bool = False) -> Tensor:
        """Differentiate a loss over ``divisor``, multiplied by the engine's loss scale; returns the loss over
        ``divisor``, without its graph.

        Raises:
            HexadError: it is no scalar with a graph.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = type(loss).__name__
            if isinstance(loss, Tensor):
                kind = f"shape {tuple(loss.shape)}, requires_grad {loss.requires_grad}"
            raise HexadError(f"backward: found {kind}, expected a scalar loss with a graph")
        if self._limit is not None and self.passes >= self._limit:
            self._engine.extend()
        self.passes += 1
        loss, scaler = loss / divisor, self._engine.scaler
        (loss.float() * scaler.scale if scaler.active else loss).backward(retain_graph=retain_graph)
        return loss.detach()

    def take_assigned(self, hint: str) -> None:
        """Take the gradients that a script has assigned (``parameter.grad = ...``): a backward pass leaves
        none there. ``hint`` says how those of a backward pass can be changed.

        Raises:
            HexadError: there have been backward passes, whose gradients they would replace.
        """
        members = [declared.parameter for bucket in self._engine.trained for declared in bucket.members]
        assigned = [parameter for parameter in members if parameter.grad is not None]
        if assigned and self.pending:
            raise HexadError(
                f"step: found {len(assigned)} parameters with an assigned .grad after a backward pass, which "
                f"has accumulated their gradients; change these {hint}"
            )
        for parameter in assigned:
            assert parameter.grad is not None
            self._engine.gradients.contribute(parameter, Dense(parameter.grad))
            parameter.grad = None

    def discard(self, limit: int | None) -> None:
        """Discard the gradients accumulated so far, if any, and begin again."""
        if self.pending:
            self.passes, self.discarded = 0, True
            self.begin(limit)

    def finish(self) -> int:
        """End the step's accumulation; returns the number of its passes."""
        passes, self.passes, self.discarded = self.passes, 0, False
        return passes

    @contextmanager
    def no_sync(self, zero: int) -> Iterator[None]:
        """Accumulate any number of passes, which the update reduces, outside; ``zero`` is the level of
        sharding.

        Raises:
            HexadError: with ZeRO 2 or 3, which reduce in every backward pass, or inside another one.
        """
        if zero >= 2:
            raise HexadError(
                f"no_sync: found zero_optimization.stage {zero}, which shards gradients; use 0 or 1"
            )
        if not self.synchronised:
            raise HexadError("no_sync: found inside another no_sync")
        self.synchronised = False
        if not self.pending:
            self.begin(None)
        try:
            yield
        finally:
            self.synchronised = True
