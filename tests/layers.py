"""Layers and models by themselves, without an engine."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from hexad.comm import all_gather
from hexad.config.model import ModelSettings
from hexad.model.attention import dropped_tiles
from hexad.model.dropout import Dropper
from hexad.model.inventory import ModelInventory
from hexad.model.recompute_inventory import Recompute
from hexad.model.transformer import Transformer
from hexad.parallel.context.attention import KeyExchange, attention_over_ranks
from hexad.parallel.context.kernels import Plain
from hexad.parallel.context.rounds import rounds
from hexad.parallel.context.spans import Spans
from hexad.parallel.contributions import Contribution, WeightGradient, attach
from hexad.parallel.sharding import Shard, declared_parameters
from hexad.topology.mesh import Axis

CPU = torch.device("cpu")


def shard_of(
    axis: Axis | None = None, sequence: bool = False, dtype: torch.dtype = torch.float64, **how: bool
) -> Shard:
    """This rank's shard on a tensor axis."""
    return Shard({"tensor": axis or Axis("tensor")}, sequence, dtype, CPU, **how)


def whole_model(model: ModelSettings, shard: Shard, recompute: Recompute = Recompute()) -> Transformer:  # noqa: B008
    """All of a model in one stage."""
    stage = ModelInventory(model, shard.sequence, shard.tensor.size).stage(range(model.layers))
    return Transformer(stage, shard, recompute)


def dropped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Spans,
    queries: torch.Tensor,
    dropper: Dropper,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention with dropped probabilities on one rank."""
    slice_ = spans.undivided
    exchange = KeyExchange(rounds(slice_, 0, window, contiguous=True), Axis("context"))
    drop = dropped_tiles(dropper, queries, k.shape[1], slice_.length)
    return attention_over_ranks(q, k, v, exchange, Plain(scale, drop))


@torch.no_grad()
def load_global(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill every parameter with its slices of complete global tensors, given by name."""
    for declared in declared_parameters(model):
        declared.parameter.zero_()
        for start, rectangle, _ in declared.pieces:
            whole = tensors[rectangle.name]
            assert tuple(whole.shape) == rectangle.shape, rectangle.name
            declared.parameter.narrow(0, start, rectangle.sizes[0]).copy_(whole[rectangle.slices])


class Sums:
    """Accumulates the gradients of one microbatch in tensors that a test can see.

    Attributes:
        totals: by parameter.
        complete: for every parameter the number of complete contributions.
    """

    def __init__(self, totals: Mapping[nn.Parameter, torch.Tensor]) -> None:
        self.totals = dict(totals)
        self.complete = dict.fromkeys(totals, 0)
        self._touched: set[torch.Tensor] = set()
        self._deferred: deque[tuple[torch.Tensor, WeightGradient]] | None = None
        for parameter in totals:
            attach(parameter, self, direct=True)

    @property
    def deferring(self) -> bool:
        return self._deferred is not None

    def set_aside(self, parameter: torch.Tensor, product: WeightGradient) -> None:
        """Contribute it at once."""
        self.contribute(parameter, product)

    def compute_aside(self) -> None:
        """No-op: nothing is set aside."""

    def contribute(self, parameter: torch.Tensor, contribution: Contribution, last: bool = True) -> None:
        if self._deferred is not None and isinstance(contribution, WeightGradient):
            self._deferred.append((parameter, contribution))
            return
        contribution.add_to(self.totals[parameter], parameter not in self._touched)
        self._touched.add(parameter)
        self.complete[parameter] += last

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Compute products of weight gradients at the end."""
        self._deferred = products = deque()
        yield
        self._deferred = None
        with torch.no_grad():
            for parameter, product in products:
                inputs = product.inputs
                if product.gather is not None:
                    inputs = all_gather(inputs, product.gather)
                self.contribute(parameter, product._replace(inputs=inputs, gather=None))
