"""Tensors without values in the place of a device's: shapes, formats and memory are those of a real step.

They are torch's on ``meta``, which stands for a GPU: every branch that a GPU takes is taken. For a CPU they
report the CPU as their device, so that its branches are; numbers that are no fractions, such as token ids and
the counts of experts, are few, known and computed for real there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hexad.config import HexadError, one_line
from hexad.parallel.pointwise import Fusing

from .ledger import Ledger

META, CPU = torch.device("meta"), torch.device("cpu")
_ATEN = torch.ops.aten
_READ = _ATEN._local_scalar_dense.default
_COPY = _ATEN._to_copy.default
_LAYER_NORM = _ATEN.native_layer_norm.default
_SCALED = _ATEN._scaled_mm.out
_FACTORIES = {
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.zeros.default,
    _ATEN.ones.default,
    _ATEN.full.default,
}


class DryTensors(Fusing):
    """The mode in which a dry run's tensors are made and counted.

    Args:
        ledger: counts their memory.
        cpu: the device that is planned for is a CPU.
    """

    def __init__(self, ledger: Ledger, cpu: bool) -> None:
        super().__init__()
        self.ledger, self.cpu = ledger, cpu
        self._fused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _READ and args[0].is_meta:
            raise WithoutValues("a number is read from the device")
        if self.cpu:
            args, kwargs = self._as_on_cpu(function, args, kwargs)
        host = False
        if function is _COPY and args[0].is_meta and _is_cpu(kwargs.get("device")):
            kwargs, host = {**kwargs, "device": META}, not self.cpu
        # Which has no rule for meta.
        result = kwargs["out"] if function is _SCALED else function(*args, **kwargs)
        if self.cpu and function is _LAYER_NORM and result[0].is_meta:
            result = (result[0], *(part.to(args[2].dtype) for part in result[1:]))  # meta's are a GPU's
        if not self._fused:
            self._see(result, host or self._from_host(args))
        return result

    def fused(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a fused function (:class:`Fusing`): values that generated code keeps in registers take no
        memory."""
        if self._fused:
            return function(*arguments)
        self._fused = True
        try:
            result = function(*arguments)
        finally:
            self._fused = False
        self._see(result, False)
        return result

    def _see(self, result: Any, host: bool) -> None:
        if isinstance(result, Tensor):
            self._see_one(result, host)
        elif result is not None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._see_one(leaf, host)

    def _see_one(self, tensor: Tensor, host: bool) -> None:
        if self.cpu or tensor.is_meta:  # else the host's own, beside a GPU
            self.ledger.see(tensor, host)

    def _from_host(self, args: Any) -> bool:
        """Whether an operator's tensors are all in the host's memory, and so its result."""
        if self.cpu:
            return False
        first = next((leaf for leaf in args if isinstance(leaf, Tensor)), None)
        return first is not None and self.ledger.on_host(first)

    def _as_on_cpu(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call on a CPU: fractions have no values, nor has what is computed of them."""
        if function in _FACTORIES:
            number = args[1] if function is _ATEN.full.default else 0.0
            dtype = kwargs.get("dtype") or (torch.get_default_dtype() if type(number) is float else None)
            if dtype is not None and dtype.is_floating_point and _is_cpu(kwargs.get("device") or CPU):
                return args, {**kwargs, "device": META}
            return args, kwargs
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors) and not all(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, _without_values, (args, kwargs))
        return args, kwargs


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _without_values(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(META)


class WithoutValues(HexadError):
    """A step asks for values that a dry run does not have."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"dry run: this step cannot be run without values: {what}; run it on a device, with as few ranks "
            "as it needs"
        )


class _Functions(TorchFunctionMode):
    """The kernels that the planned device would choose, where ``meta`` takes none; and for a CPU the device's
    name."""

    def __init__(self, cpu: bool) -> None:
        super().__init__()
        self._cpu = cpu

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._cpu and function == _DEVICE:
            device = function(*args)
            return CPU if device.type == "meta" else device
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            return _attention(self._cpu, *args, **(kwargs or {}))
        if function is F.rms_norm and args[0].is_meta and not self._cpu:
            return _rms_norm(*args, **(kwargs or {}))
        if function is torch.autograd.backward:
            return self._backward(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _backward(self, tensors: Any, grad_tensors: Any, **options: Any) -> None:
        """A backward pass in which this mode is active, as it is not while it handles a function."""
        roots, gradients = (
            argument if isinstance(argument, tuple) else (argument,) for argument in (tensors, grad_tensors)
        )
        with self:
            _engine_run_backward(
                roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )


_DEVICE: Any = torch.Tensor.device.__get__


class _DryRmsNorm(torch.autograd.Function):
    """RMS norm with the memory of PyTorch's GPU kernel; on ``meta`` it is a chain of operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, _: Any, weight: Tensor, eps: float) -> Any:
    return _DryRmsNorm.apply(x, weight)


def _attention(
    cpu: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention by the fused kernel of a device, as PyTorch would choose it; on ``meta`` it takes none."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=META)
    if q.shape[-1] != v.shape[-1] or dropout_p:
        plain = partial(F.scaled_dot_product_attention, attn_mask=mask, dropout_p=dropout_p)
        return plain(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if cpu:
        flash = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
        return flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
    if mask is None and q.dtype.itemsize == 2:
        return _ATEN._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, False, scale=scale)[
            0
        ]
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    return _ATEN._scaled_dot_product_efficient_attention.default(
        q, k, v, mask, q.requires_grad, 0.0, is_causal, scale=scale
    )[0]


@contextmanager
def dry_tensors(ledger: Ledger, cpu: bool) -> Iterator[None]:
    """Make all tensors inside a dry run's."""
    try:
        with _Functions(cpu), DryTensors(ledger, cpu):
            yield
    except NotImplementedError as error:  # of an operator that has no rule for meta
        raise WithoutValues(one_line(error)) from error
