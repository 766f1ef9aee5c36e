"""The mixture of experts, in place of a feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexad.parallel.expert.dispatch import Dispatcher, combine, dispatch
from hexad.parallel.expert.grouped import grouped_linear, on_device
from hexad.parallel.expert.kinds import check_kind
from hexad.parallel.sharding import Shard, ShardedModule
from hexad.parallel.tensor.regions import gather_first, mapped, slice_first
from hexad.topology.mesh import Axis

from . import exact_ops, ops
from .experts_inventory import ExpertsSpec, GateSpec
from .feedforward import FeedForward
from .positions import Geometry
from .recompute import recomputable
from .router import Router, Routing, TokenRows, logits


class Experts(ShardedModule):
    """This rank's experts, and its rows' way to those of other ranks."""

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, inventory: ExpertsSpec, shard: Shard, layer: int) -> None:
        super().__init__(shard)
        self.declare(*inventory.matrices)
        lora = inventory.layer.lora
        self.scale = 1.0 if lora is None else lora.scale
        self.adapters = {
            stack.name.rpartition(".")[2]: stack.adapter_names for stack in inventory.stacks if stack.rank
        }
        self.layer, self.gated = layer, inventory.gated
        settings = inventory.settings
        self.arithmetic = shard.arithmetic.unrounded
        static = on_device(shard.device, shard.dtype) and self.arithmetic.batched
        ranks = shard.experts
        kind = inventory.routing.dispatcher(ranks.axis.size, ranks.slices, shard.exact)
        if ranks.axis.size > 1:
            check_kind(kind, shard.device)
        self.dispatcher = Dispatcher(
            kind, settings.experts, ranks, settings.room if static else None, shard.exact, shard.compiled
        )

    def forward(self, x: Tensor, routing: Routing, where: Geometry, most: int, unused: bool) -> Tensor:
        """``x [rows, hidden]`` -> the sum of its experts' outputs.

        Args:
            x: this rank's rows.
            routing: of these.
            where: the tokens' geometry.
            most: rows of any rank.
            unused: the result is not used but for its shape.
        """
        counted = where.auxiliary is not None
        route = self.dispatcher.route(routing.experts, routing.complete, most, bounded=counted)
        rows, of_rows = dispatch(x, routing.weights, route)
        if where.auxiliary is not None:
            counts = routing.counts
            if counts is not None and route.missed is not None:
                counts[-1] += route.missed
            of_rows = where.auxiliary.attach(of_rows, routing.losses, self.layer, counts, unused)
        functions = exact_ops if self.shard.exact else ops
        activation = functions.weighted_swiglu if self.gated else functions.weighted_gelu
        inner = self._product("gate_up", rows, route.offsets)
        activated = recomputable("moe_act", activation, inner, of_rows, self.shard.compiled)
        return combine(self._product("down", activated, route.offsets, unused), route, x, unused)

    def _product(self, part: str, x: Tensor, offsets: Tensor, unused: bool = False) -> Tensor:
        """Rows times the matrices of their experts, and what the adapters of these add."""
        arithmetic = self.arithmetic
        y = grouped_linear(x, getattr(self, part), offsets, arithmetic, unused)
        if part not in self.adapters:
            return y
        a, b = (getattr(self, name) for name in self.adapters[part])
        between = grouped_linear(x, a, offsets, arithmetic)
        return torch.add(y, grouped_linear(between, b, offsets, arithmetic, unused), alpha=self.scale)


class SharedGate(ShardedModule):
    """The factor of the shared experts' output for each token."""

    weight: nn.Parameter

    def __init__(self, inventory: GateSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.declare(*inventory.parameters)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, hidden]`` -> ``[rows, 1]``."""
        scores = logits(x, self.weight, self.shard.wide, self.shard.arithmetic.unrounded)
        return (exact_ops.sigmoid(scores) if self.shard.exact else scores.sigmoid()).to(x.dtype)


def _unfilled(x: Tensor, axis: Axis) -> Tensor:
    """A tensor of the shape that :func:`gather_first` returns, with any values; nothing is sent."""
    return x.new_empty((axis.size * len(x), *x.shape[1:]))


class MixtureOfExperts(nn.Module):
    """A router, the experts that it chooses for each token, and shared ones (arXiv 2401.06066).

    Tensor ranks divide the tokens among themselves, also where activations are not divided otherwise.

    Attributes:
        unused: the output is not used, as when a forward pass is repeated for its activations: the last
            products are neither computed nor sent.
    """

    def __init__(self, inventory: ExpertsSpec, shard: Shard, layer: int) -> None:
        super().__init__()
        self.shard = shard
        self.router = Router(inventory.routing.router, shard, layer)
        self.experts = Experts(inventory, shard, layer)
        self.shared: FeedForward | None = None
        self.shared_gate: SharedGate | None = None
        if inventory.shared is not None:
            self.shared = FeedForward(inventory.shared, shard, layer)
        if inventory.gate is not None:
            self.shared_gate = SharedGate(inventory.gate, shard)

    @property
    def unused(self) -> bool:
        """Whether the output is unused; see the class."""
        return self._unused

    @unused.setter
    def unused(self, unused: bool) -> None:
        self._unused = unused
        if self.shared is not None and self.shared_gate is None:  # whose gradient needs the output
            self.shared.down.unused = unused

    _unused = False

    @property
    def last(self) -> MixtureOfExperts:
        """The module that makes the branch's result."""
        return self

    def forward(self, x: Tensor, where: Geometry) -> Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        divides = self.shard.tensor.size > 1 and not self.shard.sequence
        part, rows = self._part(x, where, divides)
        y = self.experts(part, self.router(part, where, rows), where, rows.most, self.unused)
        if divides:
            gather = _unfilled if self.unused else gather_first
            y = mapped(y, self.shard.tensor, gather, slice_first)[: len(x)]
        if self.shared is None:
            return y
        shared = self.shared(x, where)
        return y + (shared if self.shared_gate is None else self.shared_gate(x) * shared)

    def _part(self, x: Tensor, where: Geometry, divides: bool) -> tuple[Tensor, TokenRows]:
        """This rank's rows of ``x``, and which tokens they are."""
        axis, spans = self.shard.tensor, where.spans
        numbers = spans.numbers
        if numbers is None:
            numbers = torch.arange(spans.tokens, device=x.device)
        share = -(-len(numbers) // axis.size)
        most = share if spans.most is None else -(-spans.most // axis.size)
        first = axis.rank * share
        rows = TokenRows(numbers[first : first + share], first, most)
        if not divides:
            return x, rows
        x = F.pad(x, (0, 0, 0, share * axis.size - len(x)))
        return mapped(x, axis, slice_first, gather_first), rows
