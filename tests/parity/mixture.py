"""A small mixture of experts in place of the feed-forward layer.

It is written only in what the model offers to any branch: a specification and its module, weights on the
expert grid, a product of uneven sizes, an auxiliary loss. Every token passes the expert that the router finds
likeliest.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.nn import functional as F

from hexad.comm import all_gather, reduce_scatter
from hexad.model import transformer
from hexad.model.block_inventory import BranchSpec, LayerTraits
from hexad.model.inventory import ModelInventory
from hexad.model.positions import Geometry
from hexad.parallel.contributions import weight_gradient
from hexad.parallel.inventory import Execution, Moment, Parameter, Product, Weight
from hexad.parallel.sharding import Shard, ShardedModule
from hexad.planning.checks import SUPPORTED
from hexad.topology.mesh import Axis

EXPERTS = 4


@dataclass(frozen=True)
class MixtureSpec(BranchSpec):
    """What a mixture of experts declares.

    Attributes:
        layer: see :class:`BranchSpec`.
        width: inner features of an expert.
    """

    kind: ClassVar[str] = "feed_forward"
    losses: ClassVar[tuple[str, ...]] = ("router",)

    layer: LayerTraits
    width: int

    @property
    def name(self) -> str:
        return f"{self.layer.prefix}ffn"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        layer, width = self.layer, self.width
        partial = frozenset({"tensor"} if layer.sequence else ())

        def weight(name: str, rows: int, columns: int, **traits: Any) -> Parameter:
            name, std = f"{self.name}.{name}", 0.5
            weight = Weight(name, (rows, columns), decay=True, std=std, unit=layer.unit, **traits)
            return Parameter(name, (weight,))

        experts: dict[str, Any] = {"divided": {"expert": 0}, "grid": "expert"}
        return (
            weight("router", EXPERTS, layer.hidden, partial=partial),
            weight("up", EXPERTS * width, layer.hidden, **experts),
            weight("down", EXPERTS * layer.hidden, width, **experts),
        )

    @property
    def keeps_input(self) -> bool:
        return True

    def products(self, run: Execution) -> list[Product]:
        rows, hidden, width = run.rows, self.layer.hidden, self.width
        sizes = ((rows, EXPERTS, hidden), (rows, width, hidden), (rows, hidden, width))
        return [
            product
            for m, n, k in sizes
            for product in (Product("F", m, n, k), Product("B", m, k, n), Product("W", n, k, m))
        ]

    def kept(self, run: Execution, selective: bool) -> int:
        return run.expert * run.rows * run.byte * (2 * self.layer.hidden + 2 * self.width)

    def operands(self, run: Execution) -> int:
        return run.expert * run.rows * run.byte * 2 * (self.layer.hidden + self.width)

    def backward(self, run: Execution, selective: bool, split: bool) -> list[Moment]:
        stream = run.expert * run.rows * run.byte * self.layer.hidden
        return [Moment(2 * stream, stream, self.parameters)]

    def weight_moments(self, run: Execution) -> list[Moment]:
        return [Moment(0, 0, self.parameters)]


class Mixture(ShardedModule):
    """This rank's experts."""

    router: torch.nn.Parameter
    up: torch.nn.Parameter
    down: torch.nn.Parameter
    last = None

    def __init__(self, inventory: MixtureSpec, shard: Shard, layer: int) -> None:
        super().__init__(shard)
        self.declare(*inventory.parameters)
        self.axis = shard.axes.get("expert") or Axis("expert")
        self.experts = EXPERTS // self.axis.size

    def forward(self, x: torch.Tensor, where: Geometry, store: Any = None) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), hidden]`` -> the same."""
        logits = _Grouped.apply(x, self.router, [len(x)])
        chosen, expert = logits.softmax(1).max(1)
        if where.auxiliary is not None:
            # Of all tokens of the microbatch: the parts of its ranks add up.
            loss = 0.3 * logits.logsumexp(1).square().sum() / where.spans.tokens
            x = where.auxiliary.attach(x, "router", loss)
        tokens, expert = _Gather.apply(x, self.axis), all_gather(expert, self.axis)
        local = expert - self.axis.rank * self.experts
        counts = torch.bincount(local[(local >= 0) & (local < self.experts)], minlength=self.experts)
        order = torch.cat([(local == number).nonzero().flatten() for number in range(self.experts)])
        inner = F.silu(_Grouped.apply(tokens[order], self.up, counts.tolist()))
        results = _Grouped.apply(inner, self.down, counts.tolist())
        out = torch.zeros_like(tokens).index_add(0, order, results)
        return _Scatter.apply(out, self.axis) * chosen[:, None]


class _Grouped(torch.autograd.Function):
    """The products of runs of rows with the matrices of a stack."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.rows = weight, rows
        pairs = zip(x.split(rows), _stack(weight, rows))
        return torch.cat([part @ matrix.t() for part, matrix in pairs])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        pairs = zip(gradient.split(ctx.rows), _stack(ctx.weight, ctx.rows))
        grad_x = torch.cat([part @ matrix for part, matrix in pairs])
        return grad_x, weight_gradient(ctx.weight, gradient, x, rows=ctx.rows), None


def _stack(weight: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return weight.detach().unflatten(0, (len(rows), -1))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return reduce_scatter(gradient.contiguous(), ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return reduce_scatter(x.contiguous(), axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather(gradient.contiguous(), ctx.axis), None


@contextmanager
def in_place_of_feed_forward() -> Iterator[None]:
    """Models have mixtures while inside, and the expert degree is a free setting."""

    def feed_forward(self: ModelInventory, layer: LayerTraits) -> BranchSpec:
        return MixtureSpec(layer, int(self.settings.ffn_hidden))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ModelInventory, "_feed_forward", feed_forward))
        stack.enter_context(mock.patch.dict(transformer.BRANCHES, {MixtureSpec: Mixture}))
        stack.enter_context(mock.patch.dict(SUPPORTED, clear=True))
        yield
