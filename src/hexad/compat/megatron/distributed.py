"""Megatron-Core's ``DistributedDataParallel`` over Hexad's buckets, for scripts with their own optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hexad.comm import broadcast
from hexad.config import HexadError
from hexad.engine.modules import placed
from hexad.parallel.data.buckets import Bucket, BufferPool, Formats, StateSharding, make_buckets
from hexad.parallel.data.gradients import Gradients
from hexad.parallel.inventory import Grid
from hexad.parallel.sharding import Declared, declared_parameters
from hexad.parallel.tensor.embedding_inventory import TIE
from hexad.topology.mesh import Mesh

from . import parallel_state
from .installed import check_arguments
from .settings import DistributedDataParallelConfig

_BUCKET = 40_000_000
"""Megatron-Core's default of a bucket's parameters."""


class DistributedDataParallel(nn.Module):
    """A module whose gradients are means over data ranks, summed in buckets.

    They are in ``main_grad`` of the parameters once :meth:`finish_grad_sync` has been called, and in
    ``grad``, which an optimizer of ``torch.optim`` reads. What ranks compute in parts is summed too:
    gradients of norms in sequence parallel, and of tied embeddings in a pipeline. Gradients add up until
    :meth:`zero_grad_buffer`, or until the ``zero_grad`` of an optimizer or a module discards them.

    Args:
        config: of the module.
        ddp_config: Megatron-Core's settings; gradients are reduced while the backward pass runs with
            ``overlap_grad_reduce``. The optimizer is the script's: nothing is sharded over data ranks.
        module: :class:`GPTModel`, or any module, with parameters of one format.
        disable_bucketing: use one bucket.
        others: Megatron-Core's, without effect.

    Raises:
        HexadError: parameters of several formats, or settings without an equivalent.
    """

    def __init__(
        self, config: Any, ddp_config: Any, module: nn.Module, disable_bucketing: bool = False, **others: Any
    ) -> None:
        super().__init__()
        check_arguments("DistributedDataParallel", others, "pg_collection data_parallel_group param_indices")
        self.config, self.module = config, module
        self.ddp_config = ddp_config or DistributedDataParallelConfig()
        self.mesh = parallel_state.get_mesh()
        trained = [found for found in declared_parameters(module) if found.parameter.requires_grad]
        self._dtype = _common_dtype(trained)
        wide = torch.promote_types(self._dtype, torch.float32)
        accumulated = wide if getattr(self.ddp_config, "grad_reduce_in_fp32", False) else self._dtype
        formats = Formats(self._dtype, accumulated, accumulated, self._dtype)
        elements = getattr(self.ddp_config, "bucket_size", None) or _BUCKET
        limit = float("inf") if disable_bucketing else float(elements * accumulated.itemsize)
        self._buckets = _buckets(trained, limit, formats, self.mesh)
        self.gradients = _gradients(self._buckets, formats, self.mesh)
        self._accumulating = self._discards = False
        self._before: list[Tensor] | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module computes."""
        if torch.is_grad_enabled():
            self.expect(None)
        return self.module(*inputs, **named)

    def expect(self, passes: int | None) -> None:
        """Begin to accumulate gradients, unless that has been done: of so many backward passes at least,
        after which buckets are reduced; None: of any number, reduced by :meth:`finish_grad_sync`."""
        if self._accumulating:
            return
        self._accumulating = True
        members = [declared.parameter for bucket in self._buckets for declared in bucket.members]
        keeps = not self._discards and any(parameter.grad is not None for parameter in members)
        self._before = [bucket.gradient.clone() for bucket in self._buckets] if keeps else None
        self._discards = False
        for parameter in members:
            parameter.grad = None
        overlaps = getattr(self.ddp_config, "overlap_grad_reduce", False)
        self.gradients.begin(passes if overlaps else None)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish the reduction of gradients, and hand them to the parameters; all ranks together. A gradient
        that nothing contributed to is zero."""
        self.expect(None)
        self.gradients.finish()
        for before, bucket in zip(self._before or (), self._buckets):
            bucket.gradient.add_(before)
        self._before, self._accumulating = None, False
        self._hand_over()

    def _hand_over(self) -> None:
        """Give the parameters their gradients."""
        for bucket in self._buckets:
            for declared, gradient in zip(bucket.members, bucket.views(bucket.gradient)):
                parameter: Any = declared.parameter
                parameter.main_grad, parameter.grad = gradient, gradient.to(parameter.dtype)

    def start_grad_sync(self, *_: Any) -> None:
        """No-op: :meth:`finish_grad_sync` reduces what has not been reduced."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate inside without a reduction, as outside until :meth:`finish_grad_sync`."""
        self.expect(None)
        yield

    def zero_grad_buffer(self) -> None:
        """Discard the gradients."""
        self._accumulating, self._discards, self._before = False, True, None
        self.zero_grad()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply the gradients, after :meth:`finish_grad_sync`."""
        for bucket in self._buckets:
            bucket.gradient.mul_(scaling_factor)
        self._hand_over()

    def broadcast_params(self) -> None:
        """Give all data ranks the first one's parameters."""
        for parameter in self.module.parameters():
            values = parameter.data.contiguous()
            broadcast(values.view(-1).view(torch.uint8), self.mesh.gradient_axis())
            parameter.data.copy_(values)

    def state_dict(self, *inputs: Any, **named: Any) -> Any:
        """That of the module."""
        return self.module.state_dict(*inputs, **named)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """That of the module."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, prefix: str = "", *inputs: Any, **named: Any) -> Any:
        """That of the module."""
        return self.module.sharded_state_dict(prefix, *inputs, **named)  # type: ignore[operator]

    def load_state_dict(self, *inputs: Any, **named: Any) -> Any:
        """Load the module's."""
        return self.module.load_state_dict(*inputs, **named)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """That of the module."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]


def _common_dtype(trained: Sequence[Declared]) -> torch.dtype:
    """The format of all parameters.

    Raises:
        HexadError: there is none, or they have several.
    """
    dtypes = sorted({str(declared.parameter.dtype) for declared in trained})
    if len(dtypes) != 1:
        found = ", ".join(dtypes) or "no parameter that requires a gradient"
        raise HexadError(
            f"DistributedDataParallel: found {found}; pass a module with parameters of one format"
        )
    return trained[0].parameter.dtype


def _shardings(grids: set[Grid], mesh: Mesh) -> dict[Grid, StateSharding]:
    """Every data rank holds everything."""
    return {grid: StateSharding.create(0, 1, mesh, grid) for grid in sorted(grids)}


def _buckets(trained: Sequence[Declared], limit: float, formats: Formats, mesh: Mesh) -> list[Bucket]:
    """The parameters in buckets, with the values that they have."""
    members = [(0, placed(declared, mesh.tensor)) for declared in trained]
    grids = {declared.declaration.weights[0].grid for _, declared in members}
    buckets = make_buckets(members, limit, formats, 0, _shardings(grids, mesh))
    for bucket in buckets:
        bucket.allocate(formats, host=False)
        for declared in bucket.members:  # what is computed from weights would not follow the script's updates
            vars(declared.parameter).pop("derived", None)
    return buckets


def _gradients(buckets: Sequence[Bucket], formats: Formats, mesh: Mesh) -> Gradients:
    """Accumulates in the buckets: means over data ranks."""
    shardings = _shardings({bucket.traits.grid for bucket in buckets}, mesh)
    tied = {TIE: parallel_state.embedding_axis()} if any(bucket.traits.tied for bucket in buckets) else {}
    pool = BufferPool(mesh.device)
    gradients = Gradients(buckets, shardings, mesh.axes, tied, pool, formats.reduced)
    gradients.extends = True
    gradients.factor = 1.0 / mesh.gradient_axis().size
    return gradients


def finalize_model_grads(model: Sequence[Any], num_tokens: Any = None, *_: Any, **__: Any) -> None:
    """Reduce the gradients of wrapped modules: see :meth:`DistributedDataParallel.finish_grad_sync`;
    all ranks together. Other arguments have no effect.

    Raises:
        HexadError: a module that is not wrapped, or a number of tokens.
    """
    if num_tokens is not None:
        raise HexadError(
            "finalize_model_grads: found num_tokens; losses are averaged over microbatches: leave it out"
        )
    for chunk in model:
        if not isinstance(chunk, DistributedDataParallel):
            raise HexadError(
                f"finalize_model_grads: found a {type(chunk).__name__}; wrap it in DistributedDataParallel"
            )
        chunk.finish_grad_sync()


def unwrapped(model: Any) -> Any:
    """The module in a :class:`DistributedDataParallel`, or the model itself; of a list each."""
    if isinstance(model, list):
        return [unwrapped(chunk) for chunk in model]
    return unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model
