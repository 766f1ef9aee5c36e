"""Auxiliary losses and statistics: what layers add to the token losses, such as a loss that balances experts,
and what they count.

A layer attaches both to its activations: the backward pass through these begins the losses' own, whatever the
schedule, and counts once, also where the forward pass is repeated. Activations of which nothing is trained
have no backward pass; there the forward pass counts. The layer's branch declares the names of the losses
(``BranchSpec.losses``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Auxiliary:
    """Collects the additional losses and the counts of a rank's layers.

    A loss is averaged over the microbatches of the global batch. Ranks with other tokens of a microbatch
    (context ranks, and tensor ranks, among which a mixture of experts divides tokens) add their parts of it.

    Attributes:
        names: of the losses of all layers.
        sums: float64 ``[names]``, over this rank's layers and microbatches so far, each counted when its
            backward pass begins, or in the forward pass where there is none.
        scale: what the mean over all microbatches is multiplied by before it is differentiated.
        counts: float64 ``[layers, statistics]``, sums of this rank's, counted likewise; None where no layer
            counts.
        loads: float64 ``[layers, experts]``, of each layer the experts' parts of the step before, over all
            ranks; None where no layer needs them.
    """

    names: Sequence[str]
    sums: Tensor
    scale: float
    counts: Tensor | None = None
    loads: Tensor | None = None

    def scaled(self, factor: float) -> Auxiliary:
        """These sums with another scale."""
        return replace(self, scale=self.scale * factor)

    def attach(
        self,
        x: Tensor,
        losses: Mapping[str, Tensor],
        layer: int = 0,
        counts: Tensor | None = None,
        repeated: bool = False,
    ) -> Tensor:
        """``x`` as it is; its backward pass adds ``losses`` to what is minimised, and ``counts`` to the
        layer's.

        Args:
            x: activations that the token losses depend on.
            losses: by name; scalars, with their coefficients: this rank's part, of one microbatch.
            layer: that attaches them.
            counts: float64 ``[statistics]``.
            repeated: this forward pass is a repetition, for its activations.
        """
        places = tuple(map(self.names.index, losses))
        result: Tensor = _Attach.apply(x, self, places, layer, counts, *losses.values())
        if not result.requires_grad and not repeated:
            self.add(places, list(losses.values()), layer, counts)
        return result

    def add(self, places: Sequence[int], losses: Sequence[Tensor], layer: int, counts: Tensor | None) -> None:
        """Add losses, by their places in :attr:`names`, and a layer's counts."""
        for place, loss in zip(places, losses):
            self.sums[place] += loss.double()
        if counts is not None:
            assert self.counts is not None
            self.counts[layer] += counts


class _Attach(torch.autograd.Function):
    """Begins the backward pass of losses in that of activations, as Megatron-Core's
    ``MoEAuxLossAutoScaler``. A layer that is recomputed attaches them twice; only one of both has a backward
    pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        auxiliary: Auxiliary,
        places: tuple[int, ...],
        layer: int,
        counts: Tensor | None,
        *losses: Tensor,
    ) -> Tensor:
        ctx.auxiliary, ctx.places, ctx.layer, ctx.counts = auxiliary, places, layer, counts
        ctx.losses = [loss.detach() for loss in losses]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        auxiliary: Auxiliary = ctx.auxiliary
        auxiliary.add(ctx.places, ctx.losses, ctx.layer, ctx.counts)
        scales = [torch.full_like(loss, auxiliary.scale) for loss in ctx.losses]
        return gradient, None, None, None, None, *scales
