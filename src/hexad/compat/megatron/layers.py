"""Megatron-LM's parallel layers over Hexad's: its signatures, its ``[s, b, h]`` tensors.

They are :class:`~hexad.parallel.sharding.ShardedModule`, so that :class:`hexad.Engine` trains models made of
them; a weight is named by where its module is in the model. An engine draws initial values itself, with
standard deviation ``--init-method-std``; without an engine ``init_method`` does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hexad.config import HexadError
from hexad.parallel.inventory import Parameter, Weight
from hexad.parallel.sharding import Shard, ShardedModule
from hexad.parallel.tensor import embedding
from hexad.parallel.tensor.embedding_inventory import EmbeddingSpec
from hexad.parallel.tensor.linear import column_linear, row_linear

from ..facade.foreign_names import check_arguments
from . import parallel_state
from .mappings import gather_from_tensor_model_parallel_region, scatter_to_tensor_model_parallel_region
from .settings import ModelParallelConfig
from .tables import ARGUMENTS

Initialise = Callable[[Tensor], object]
Output = tuple[Tensor, Tensor | None]
"""A layer's output, and the bias that it has not added."""

_STD = ModelParallelConfig.init_method_std


class _Layer(ShardedModule):
    """The base class of the parallel linear layers."""

    weight: nn.Parameter

    def __init__(self, config: Any, group: dist.ProcessGroup | None, others: dict[str, Any]) -> None:
        check_arguments(type(self).__name__, others, ARGUMENTS["ParallelLinear"])
        super().__init__(_shard(self, config, group, getattr(config, "sequence_parallel", False)))
        self.config, self.group = config, group

    def _weight(self, shape: tuple[int, int], dim: int, init_method: Initialise | None) -> None:
        """Create the matrix, sharded along ``dim``."""
        std = getattr(self.config, "init_method_std", _STD)
        weight = Weight("weight", shape, {"tensor": dim}, decay=True, std=std)
        self._divisible(shape[dim])
        self.declare(Parameter("weight", (weight,)))
        _describe(self.weight, dim)
        if getattr(self.config, "perform_initialization", True):
            _initialise(self.weight, shape, dim, std, init_method, self.shard)

    def _bias(self, size: int, divided: bool) -> None:
        """Create the bias, initialised with 0."""
        partial = frozenset({"tensor"} if self.shard.sequence and not divided else ())
        weight = Weight("bias", (size,), {"tensor": 0} if divided else {}, partial)
        self.declare(Parameter("bias", (weight,)))
        nn.init.zeros_(self.get_parameter("bias"))

    def _divisible(self, size: int) -> None:
        ranks = self.shard.tensor.size
        if size % ranks:
            raise HexadError(
                f"{type(self).__name__}: found {size}, which does not divide by {ranks} tensor ranks"
            )


def _shard(layer: nn.Module, config: Any, group: dist.ProcessGroup | None, sequence: bool) -> Shard:
    """This rank's shard of a layer; ``sequence``: with its tokens too. Refuses a ``config`` that is none, or
    of another number of tensor ranks than the mesh's."""
    name, mesh, axis = type(layer).__name__, parallel_state.get_mesh(), parallel_state.axis_of(group)
    if not (hasattr(config, "params_dtype") and hasattr(config, "sequence_parallel")):
        raise HexadError(
            f"{name}: config: found {'None' if config is None else type(config).__name__}; pass a "
            "ModelParallelConfig or get_args()"
        )
    wanted, ranks = getattr(config, "tensor_model_parallel_size", None), mesh.tensor.size
    if group is None and wanted not in (None, 1, ranks):
        raise HexadError(
            f"{name}: config.tensor_model_parallel_size: found {wanted}, but the mesh has {ranks} tensor "
            "ranks; make them equal"
        )
    return Shard({"tensor": axis}, bool(sequence) and axis.size > 1, config.params_dtype, mesh.device)


def _describe(parameter: nn.Parameter, dim: int) -> None:
    """Set the attributes by which Megatron-LM's scripts recognise sharded parameters."""
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        setattr(parameter, name, value)


class ColumnParallelLinear(_Layer):
    """``Y = X A + b`` with the columns of ``A`` (rows of ``weight``) sharded over the tensor ranks.

    Args:
        input_size, output_size: global features.
        config: dtype of parameters, and whether the input is sharded over tokens (``sequence_parallel``).
        init_method: fills a float32 tensor ``[output_size, input_size]``; None: normal.
        bias: whether there is one.
        gather_output: return all outputs on every rank.
        skip_bias_add: return the bias instead of adding it.
        skip_weight_param_allocation: the weight is an argument of every call.
        tp_group: of :mod:`~hexad.compat.megatron.parallel_state`.
        others: Megatron-LM's, with their defaults or without effect.

    Attributes:
        weight: ``[output_size / size, input_size]``; None with ``skip_weight_param_allocation``.
        bias: ``[output_size / size]``, or None.

    Raises:
        HexadError: sizes that do not divide, or arguments that are not supported.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Initialise | None = None,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **others: Any,
    ) -> None:
        super().__init__(config, tp_group, others)
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = output_size // self.shard.tensor.size
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        if skip_weight_param_allocation:
            self._divisible(output_size)
            self.register_parameter("weight", None)
        else:
            self._weight((output_size, input_size), 0, init_method)
        if bias:
            self._bias(output_size, divided=True)
            _describe(self.get_parameter("bias"), 0)
        else:
            self.register_parameter("bias", None)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Output:
        """``[s (/ size in sequence parallel), b, input_size]`` -> (``[s, b, output_size (/ size)]``, bias).

        Args:
            input_: in ``config.params_dtype``.
            weight: in place of the module's.
            runtime_gather_output: in place of ``gather_output``.

        Raises:
            HexadError: a weight that is missing, or of another shape.
        """
        weight = self.weight if weight is None else weight
        shape = self.output_size_per_partition, self.input_size
        if weight is None or tuple(weight.shape) != shape:
            given_shape = None if weight is None else tuple(weight.shape)
            raise HexadError(f"ColumnParallelLinear: found a weight of shape {given_shape}, expected {shape}")
        added = None if self.skip_bias_add else self.bias
        y = column_linear(_rows(input_), weight, added, self.shard)
        y = y.unflatten(0, (-1, *input_.shape[1:-1]))
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = gather_from_tensor_model_parallel_region(y, self.group)
        return y, self.bias if self.skip_bias_add else None


class RowParallelLinear(_Layer):
    """``Y = X A + b`` with the rows of ``A`` (columns of ``weight``) sharded over the tensor ranks.

    Args:
        input_size, output_size: global features.
        config: as of :class:`ColumnParallelLinear`; in sequence parallel the output is sharded over tokens.
        bias: whether there is one; it is added after the sum.
        input_is_parallel: the input is this rank's features; otherwise all, of which it takes its own.
        init_method, skip_bias_add, tp_group, others: as of :class:`ColumnParallelLinear`.

    Attributes:
        weight: ``[output_size, input_size / size]``.
        bias: ``[output_size]``, or None. In sequence parallel its gradient is that of this rank's tokens,
            which ``bias.sequence_parallel`` says; an engine sums it.

    Raises:
        HexadError: sizes that do not divide, or arguments that are not supported.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Initialise | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **others: Any,
    ) -> None:
        super().__init__(config, tp_group, others)
        if self.shard.sequence and not input_is_parallel:
            raise HexadError("RowParallelLinear: sequence parallel needs input_is_parallel True")
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = input_size // self.shard.tensor.size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self._weight((output_size, input_size), 1, init_method)
        if bias:
            self._bias(output_size, divided=False)
            self.get_parameter("bias").sequence_parallel = self.shard.sequence  # type: ignore[attr-defined]
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> Output:
        """``[s, b, input_size (/ size)]`` -> (``[s (/ size), b, output_size]``, bias)."""
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.group)
        y = row_linear(_rows(input_), self.weight, self.shard).unflatten(0, (-1, *input_.shape[1:-1]))
        if self.skip_bias_add or self.bias is None:
            return y, self.bias
        return y + self.bias, None


@dataclass(frozen=True)
class _Table(EmbeddingSpec):
    """A table whose rows divide by the ranks, without padding."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        weight = Weight("weight", (self.vocab, self.hidden), {"tensor": 0}, decay=True, std=self.std)
        return (Parameter("weight", (weight,)),)


class VocabParallelEmbedding(embedding.VocabParallelEmbedding):
    """An embedding with its rows sharded over the tensor ranks.

    Args:
        num_embeddings, embedding_dim: of the global table; the former divides by the tensor degree.
        init_method: fills a float32 tensor ``[num_embeddings, embedding_dim]``; None: normal.
        reduce_scatter_embeddings: return ``[s / size, b, h]`` for sequence parallel.
        config: as of :class:`ColumnParallelLinear`.
        tp_group: of :mod:`~hexad.compat.megatron.parallel_state`.

    Attributes:
        weight: ``[num_embeddings / size, embedding_dim]``.

    Raises:
        HexadError: rows that do not divide.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        config: Any,
        init_method: Initialise | None = None,
        reduce_scatter_embeddings: bool = False,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        shard = _shard(self, config, tp_group, reduce_scatter_embeddings)
        ranks = shard.tensor.size
        if num_embeddings % ranks:
            raise HexadError(
                f"VocabParallelEmbedding: found {num_embeddings} rows, which {ranks} ranks do not divide"
            )
        std = getattr(config, "init_method_std", _STD)
        super().__init__(_Table(num_embeddings, embedding_dim, shard.sequence, std), shard)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        _describe(self.weight, 0)
        if getattr(config, "perform_initialization", True):
            _initialise(self.weight, (num_embeddings, embedding_dim), 0, std, init_method, self.shard)

    def forward(self, input_: Tensor) -> Tensor:
        """int64 ``[b, s]`` -> ``[b, s, h]``, or ``[s / size, b, h]`` with ``reduce_scatter_embeddings``."""
        if not self.reduce_scatter_embeddings:
            return super().forward(input_.flatten()).unflatten(0, tuple(input_.shape))
        sequence_first = input_.t().contiguous()
        return super().forward(sequence_first.flatten()).unflatten(0, (-1, len(input_)))


def _rows(x: Tensor) -> Tensor:
    """``[..., h]`` -> ``[tokens, h]``, contiguous: collectives move memory."""
    return x.flatten(0, -2).contiguous()


@torch.no_grad()
def _initialise(
    parameter: nn.Parameter,
    shape: tuple[int, int],
    dim: int,
    std: float,
    init_method: Initialise | None,
    shard: Shard,
) -> None:
    """Set this rank's shard of the values that ``init_method`` draws.

    All values are drawn on every rank, as Megatron-LM does on CPUs: the same values for any number of ranks.
    """
    whole = torch.empty(shape, dtype=torch.float32)
    if init_method is None:
        nn.init.normal_(whole, std=std)
    else:
        init_method(whole)
    parameter.copy_(whole.chunk(shard.tensor.size, dim)[shard.tensor.rank])
