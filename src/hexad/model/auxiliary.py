"""Auxiliary losses: what layers add to the token losses, such as a loss that balances experts.

A layer attaches a loss to its activations: the backward pass through these begins the loss's own, whatever
the schedule. Its branch declares the name (``BranchSpec.losses``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Auxiliary:
    """Where the layers of a rank add losses of their own.

    A loss is averaged over the microbatches of the global batch. Ranks with other tokens of a microbatch
    (context ranks, in sequence parallel tensor ranks) add their parts of it.

    Attributes:
        names: of the losses of all layers.
        sums: float64 ``[names]``, over this rank's layers and microbatches so far, each counted when its
            backward pass begins.
        scale: what the mean over all microbatches is multiplied by before it is differentiated.
    """

    names: Sequence[str]
    sums: Tensor
    scale: float

    def scaled(self, factor: float) -> Auxiliary:
        """The same sums with another scale."""
        return replace(self, scale=self.scale * factor)

    def attach(self, x: Tensor, name: str, loss: Tensor) -> Tensor:
        """``x`` as it is; its backward pass adds ``loss`` to what is minimised.

        Args:
            x: activations that the token losses depend on.
            name: of the loss.
            loss: scalar, with its coefficient: this rank's part, of one microbatch.
        """
        return _Attach.apply(x, loss, self, self.names.index(name))


class _Attach(torch.autograd.Function):
    """Begins the backward pass of a loss in that of activations, as Megatron-Core's
    ``MoEAuxLossAutoScaler``. A layer that is recomputed attaches it twice; only one of both has a backward
    pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, auxiliary: Auxiliary, place: int) -> Tensor:
        ctx.auxiliary, ctx.place, ctx.loss = auxiliary, place, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.auxiliary.sums[ctx.place] += ctx.loss.double()
        return gradient, torch.full_like(ctx.loss, ctx.auxiliary.scale), None, None
