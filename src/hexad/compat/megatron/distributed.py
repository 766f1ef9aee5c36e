"""Megatron-Core's ``DistributedDataParallel`` over Hexad's buckets, for scripts with their own optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hexad.comm import all_reduce, broadcast
from hexad.config import HexadError
from hexad.engine.modules import placed
from hexad.model.transformer import Transformer
from hexad.parallel.data.buckets import BufferPool, Formats, Shardings, StateSharding, make_buckets
from hexad.parallel.data.gradients import Gradients
from hexad.parallel.inventory import Grid
from hexad.parallel.sharding import Declared, declared_parameters
from hexad.parallel.tensor.embedding_inventory import TIE
from hexad.topology.mesh import Mesh

from ..facade.foreign_names import check_arguments
from . import parallel_state
from .settings import DistributedDataParallelConfig, check_reduction
from .tables import ARGUMENTS

_BUCKET = 40_000_000
"""Megatron-Core's default of a bucket's parameters."""


class Wrapper(nn.Module):
    """A module around another one, whose state is that of the inner one."""

    module: nn.Module

    def state_dict(self, *inputs: Any, **named: Any) -> Any:
        """The state of the module."""
        return self.module.state_dict(*inputs, **named)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state of the module, for a checkpoint."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, prefix: str = "", *inputs: Any, **named: Any) -> Any:
        """The sharded state of the module."""
        return self.module.sharded_state_dict(prefix, *inputs, **named)  # type: ignore[operator]

    def load_state_dict(self, *inputs: Any, **named: Any) -> Any:
        """Load the state of the module."""
        return self.module.load_state_dict(*inputs, **named)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the input of the module."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]


class Float16Module(Wrapper):
    """A module in 16 bits, which takes and returns float32 too.

    Args:
        config: with ``bf16`` or ``fp16``.
        module: which is converted; a :class:`GPTModel` has the format of ``params_dtype``.

    Raises:
        HexadError: neither, or a model of another format.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__()
        flags = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        dtypes = [dtype for dtype, name in flags.items() if getattr(config, name, False)]
        if not dtypes:
            raise HexadError("Float16Module: found neither config.bf16 nor config.fp16; leave it out")
        self._dtype = dtypes[0]
        dtype = next((parameter.dtype for parameter in module.parameters()), self._dtype)
        if isinstance(module, Transformer) and dtype != self._dtype:
            raise HexadError(
                f"Float16Module: found a model in {dtype}; make it with TransformerConfig(params_dtype="
                f"{self._dtype})"
            )
        self.config, self.module = config, module.to(self._dtype)

    def forward(self, *inputs: Any, fp32_output: bool = True, **named: Any) -> Any:
        """What the module computes; the last stage's result in float32."""
        if parallel_state.is_pipeline_first_stage():
            inputs = tree_map(partial(_converted, torch.float32, self._dtype), inputs)
        result = self.module(*inputs, **named)
        if fp32_output and parallel_state.is_pipeline_last_stage():
            result = tree_map(partial(_converted, self._dtype, torch.float32), result)
        return result


def _converted(source: torch.dtype, target: torch.dtype, value: Any) -> Any:
    return value.to(target) if isinstance(value, Tensor) and value.dtype == source else value


class DistributedDataParallel(Wrapper):
    """A module whose gradients are means over data ranks, summed in buckets.

    They are in ``main_grad`` of the parameters once :meth:`finish_grad_sync` has been called, and in
    ``grad``, which an optimizer of ``torch.optim`` reads. What ranks compute in parts is summed too:
    gradients of norms in sequence parallel, and of tied embeddings in a pipeline. Gradients add up until
    :meth:`zero_grad_buffer`, or until the ``zero_grad`` of an optimizer or a module discards them.

    Args:
        config: of the module.
        ddp_config: Megatron-Core's settings; gradients are reduced while the backward pass runs with
            ``overlap_grad_reduce``. With an optimizer of ``torch.optim`` nothing is sharded over data ranks;
            with that of ``get_megatron_optimizer`` ``use_distributed_optimizer`` shards its state, ZeRO 1.
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
        check_arguments("DistributedDataParallel", others, ARGUMENTS["DistributedDataParallel"])
        if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
            kind = "None" if module is None else f"a {type(module).__name__}"
            raise HexadError(f"DistributedDataParallel: found {kind}; pass a module that is not wrapped")
        check_averaged(config)
        check_reduction(ddp_config)
        self.config, self.module = config, module
        self.ddp_config = ddp_config or DistributedDataParallelConfig()
        self.mesh = parallel_state.get_mesh()
        self._trained = [one for one in declared_parameters(module) if one.parameter.requires_grad]
        dtype = _common_dtype(self._trained)
        wide = torch.promote_types(dtype, torch.float32)
        accumulated = wide if getattr(self.ddp_config, "grad_reduce_in_fp32", False) else dtype
        self.formats = Formats(dtype, accumulated, accumulated, dtype)
        elements = getattr(self.ddp_config, "bucket_size", None) or _BUCKET
        self._limit = float("inf") if disable_bucketing else float(elements * accumulated.itemsize)
        self.grids = {one.declaration.weights[0].grid for one in self._trained}
        self.accumulating = self._finished = self._discards = False
        self._before: list[Tensor] | None = None
        self._allocate(shardings(self.grids, self.mesh, 0), 0)

    def _allocate(self, sharding: Shardings, zero: int) -> None:
        """Put the parameters into buckets, with the values that they have, and accumulate gradients there:
        means over data ranks."""
        members = [(0, placed(declared, self.mesh.tensor)) for declared in self._trained]
        self.buckets = make_buckets(members, self._limit, self.formats, zero, sharding)
        for bucket in self.buckets:
            bucket.allocate(self.formats, host=False)
            for declared in bucket.members:  # what is computed from weights would not follow updates
                vars(declared.parameter).pop("derived", None)
        ties = {TIE: parallel_state.embedding_axis()} if any(b.traits.tied for b in self.buckets) else {}
        pool = BufferPool(self.mesh.device)
        factor, reduced = 1.0 / self.mesh.gradient_axis().size, self.formats.reduced
        self.gradients = Gradients(self.buckets, sharding, self.mesh.axes, ties, pool, reduced, True, factor)
        self._hands_over = zero == 0

    def shard(self, sharding: Shardings, zero: int) -> None:
        """Keep master values in at least float32, and shard them and the gradients' sums as ``zero`` says,
        for an optimizer of Hexad's; gradients are discarded."""
        self.zero_grad_buffer()
        self.gradients.detach()
        for bucket in self.buckets:
            bucket.give_back(self.mesh.device)
        wide = torch.promote_types(self.formats.parameters, torch.float32)
        self.formats = replace(self.formats, master=wide)
        self._allocate(sharding, zero)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module computes."""
        if torch.is_grad_enabled():
            self.expect(None)
        return self.module(*inputs, **named)

    def expect(self, passes: int | None) -> None:
        """Begin to accumulate gradients, unless that has been done: of so many backward passes at least,
        after which buckets are reduced; None: of any number, reduced by :meth:`finish_grad_sync`."""
        if self.accumulating:
            return
        self._before = self._kept() if self.has_gradients else None
        self.accumulating, self._discards = True, False
        for bucket in self.buckets:
            for declared in bucket.members:
                declared.parameter.grad = None
        overlaps = getattr(self.ddp_config, "overlap_grad_reduce", False)
        self.gradients.begin(passes if overlaps else None)

    @property
    def has_gradients(self) -> bool:
        """Whether there are reduced gradients, which :meth:`zero_grad_buffer` has not discarded."""
        return self._finished and not self.accumulating and not self._discards

    @torch.no_grad()
    def _kept(self) -> list[Tensor] | None:
        """The gradients of each bucket, zero where the script has discarded those of a parameter; None if it
        has discarded all."""
        members = [declared.parameter for bucket in self.buckets for declared in bucket.members]
        if self._hands_over and all(parameter.grad is None for parameter in members):
            return None
        kept = [bucket.gradient.clone() for bucket in self.buckets]
        for bucket, values in zip(self.buckets, kept) if self._hands_over else ():
            for declared, view in zip(bucket.members, bucket.views(values)):
                gradient = declared.parameter.grad
                if gradient is None:
                    view.zero_()
                elif gradient.dtype != view.dtype:  # a copy, perhaps zeroed in place
                    view.copy_(torch.where(gradient.any(), view, 0.0))
        return kept

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Finish the reduction of gradients, and hand them to the parameters; all ranks together. A gradient
        that nothing contributed to is zero."""
        self.expect(None)
        self.gradients.finish()
        if getattr(self.ddp_config, "check_for_nan_in_grad", False):
            self._check_finite()
        for before, bucket in zip(self._before or (), self.buckets):
            bucket.gradient.add_(before)
        self._before, self.accumulating, self._finished = None, False, True
        self._hand_over()

    def _check_finite(self) -> None:
        """Refuse gradients that are not finite on any rank, on all of them.

        Raises:
            HexadError: there are some.
        """
        norms = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        for bucket in self.buckets:
            norms += bucket.gradient.norm()
        if all_reduce((~norms.isfinite()).double(), self.mesh.world, "max").item():
            raise HexadError(
                "DistributedDataParallelConfig.check_for_nan_in_grad: found gradients that are not finite; "
                "look for a too high learning rate, or leave the setting out"
            )

    def _hand_over(self) -> None:
        """Give the parameters their gradients, unless these are sharded."""
        for bucket in self.buckets if self._hands_over else ():
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
        self.accumulating, self._discards, self._before = False, True, None
        self.zero_grad()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply the gradients, after :meth:`finish_grad_sync`."""
        for bucket in self.buckets:
            bucket.gradient.mul_(scaling_factor)
        self._hand_over()

    def broadcast_params(self) -> None:
        """Give all data ranks the first one's parameters."""
        for parameter in self.module.parameters():
            values = parameter.data.contiguous()
            broadcast(values.view(-1).view(torch.uint8), self.mesh.gradient_axis())
            parameter.data.copy_(values)


def _common_dtype(trained: Sequence[Declared]) -> torch.dtype:
    """The format of all parameters.

    Raises:
        HexadError: there is none, or they have several.
    """
    dtypes = sorted({str(declared.parameter.dtype) for declared in trained})
    if len(dtypes) != 1:
        formats = ", ".join(dtypes) or "no parameter that requires a gradient"
        raise HexadError(
            f"DistributedDataParallel: found {formats}; pass a module with parameters of one format"
        )
    return trained[0].parameter.dtype


def shardings(grids: set[Grid], mesh: Mesh, zero: int) -> dict[Grid, StateSharding]:
    """How ``zero`` shards state; all ranks call this together."""
    return {grid: StateSharding.create(zero, 1, mesh, grid) for grid in sorted(grids)}


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
    for chunk in wrapped_chunks("finalize_model_grads", model):
        chunk.finish_grad_sync()


def wrapped_chunks(function: str, model: Any) -> list[DistributedDataParallel]:
    """This rank's stages, which a function has been called with.

    Raises:
        HexadError: no list of stages, or a module that is not wrapped.
    """
    if not isinstance(model, list | tuple) or not model:
        kind = "none" if isinstance(model, list | tuple) else f"a {type(model).__name__}"
        raise HexadError(f"{function}: found {kind}; pass a list of this rank's stages")
    for chunk in model:
        if not isinstance(chunk, DistributedDataParallel):
            raise HexadError(
                f"{function}: found a {type(chunk).__name__}; wrap it in DistributedDataParallel"
            )
    return list(model)


def check_averaged(config: Any) -> None:
    """Refuse a configuration whose losses are not averaged over microbatches and data ranks.

    Raises:
        HexadError: ``calculate_per_token_loss``.
    """
    if getattr(config, "calculate_per_token_loss", False):
        raise HexadError(
            "TransformerConfig.calculate_per_token_loss: found True; losses are averaged over microbatches: "
            "leave it out"
        )


def unwrapped(model: Any) -> Any:
    """The module in its wrappers, or the model itself; of a list each."""
    if isinstance(model, list):
        return [unwrapped(chunk) for chunk in model]
    return unwrapped(model.module) if isinstance(model, Wrapper) else model
