"""The weights of a generator's stage: as they are kept and transferred, and in the form in which products
read them fastest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hexad.checkpoint.tensor_file import Chunk
from hexad.model.latent_attention import LatentAttention
from hexad.model.transformer import Transformer
from hexad.parallel import exact
from hexad.parallel.rectangle import Rectangle
from hexad.parallel.sharding import declared_parameters
from hexad.parallel.tensor.embedding import VocabParallelHead
from hexad.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from hexad.parallel.tensor.packed import packable, packed
from hexad.topology.mesh import Axis


class StageWeights:
    """The weights of a stage. Only its forward passes can use them after :meth:`pack`.

    Args:
        model: the stage.
    """

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._declared = declared_parameters(model)
        self._shapes = [declared.parameter.shape for declared in self._declared]
        self._linears = [*_linears(model)]
        latent = (module for module in model.modules() if isinstance(module, LatentAttention))
        self._absorbed = {attention.kv_up for attention in latent}
        self._alone = Axis("tensor")

    def pieces(self) -> Iterator[tuple[Rectangle, Tensor, bool]]:
        """(part of a global tensor, this rank's values of it, whether it is frozen) of everything; zeros
        where the values were given up by :meth:`pack`, which has to follow."""
        for module, name, weight in self._linears:
            setattr(module, name, weight)  # its other form goes first
        for declared, shape in zip(self._declared, self._shapes):
            parameter = declared.parameter
            if parameter.shape != shape:  # its place was given up
                parameter.data = parameter.data.new_zeros(shape)
            for start, rectangle, _ in declared.pieces:
                if rectangle.numel:
                    values = parameter.data.narrow(0, start, rectangle.sizes[0])
                    yield rectangle, values, declared.declaration.frozen

    def chunks(self) -> list[Chunk]:
        """The pieces, as a checkpoint fills them. They are rounded to their format, as for evaluation."""
        return [
            Chunk(rectangle.named(f"model.{rectangle.name}"), values.zero_(), rounded=True)
            for rectangle, values, _ in self.pieces()
        ]

    def pack(self) -> None:
        """Convert the weights of all linear layers to what products read fastest, where there is such a form:
        a CPU's of few tokens, or exact ones. The ranks of a stage call this together."""
        shard, dtype = self._model.shard, self._model.dtype
        if not shard.exact and (shard.device.type != "cpu" or not packable(dtype)):
            return
        embedding = self._model.embedding
        tied = None if embedding is None else embedding.weight
        for module, name, weight in self._linears:
            if not shard.exact and module in self._absorbed:
                continue  # of which attention reads heads
            axis = shard.tensor if isinstance(module, RowParallelLinear) else self._alone
            form = exact.weight_on_grid(weight.data, dtype, axis) if shard.exact else packed(weight.data)
            setattr(module, name, nn.Parameter(form, requires_grad=False))
            if weight is not tied:
                weight.data = weight.data.new_empty(0)


def _linears(model: Transformer) -> Iterator[tuple[Any, str, nn.Parameter]]:
    """(module, name, weight) of every product."""
    for module in model.modules():
        names: tuple[str, ...] = ()
        if isinstance(module, ColumnParallelLinear):
            names = ("weight", "copied_weight") if module.copied else ("weight",)
        elif isinstance(module, RowParallelLinear | VocabParallelHead):
            names = ("weight",)  # the embedding keeps a tied one as it is
        for name in names:
            yield module, name, getattr(module, name)
