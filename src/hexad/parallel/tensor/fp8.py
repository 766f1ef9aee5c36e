"""Products in 8-bit floating point (Micikevicius et al., arXiv 2209.05433), with one scale per tensor.

Inputs and weights are rounded to e4m3 (3 bits of fraction, up to 448), gradients of outputs to e5m2 (2 bits,
up to 57344), each after a multiplication that brings its largest magnitude just under the format's ("current
scaling": nothing is remembered from step to step). Sums are float32, results in the operands' format, weight
gradients in that in which they are accumulated.

A weight is rounded once per step where it stays in memory, and transposed once for backward passes; in every
pass in ZeRO 3 and under ``run.compile: full``.

Scales are powers of two: multiplying by them is exact even in bf16, results scale with their operands to the
last bit, and a tensor's maximum matters only to the rounding of numbers too small for the format.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..derived import derived
from ..pointwise import maybe_compiled

_SMALLEST = 2.0**-100  # maxima below it are scaled like it, so that scales and their reciprocals are finite
_EXPONENT = 0x7F800000  # of a float32


Narrow = tuple[Tensor, Tensor]
"""An operand in 8 bits, and the number that undoes its scale."""


def _narrowed(x: Tensor, dtype: torch.dtype) -> Narrow:
    """``x`` times a power of two, rounded to ``dtype``; and the float32 number that undoes it.

    A value that is not finite makes products NaN, never a large number.
    """
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32).clamp(min=_SMALLEST)
    # The largest power of two that keeps the maximum inside the format. An infinite maximum gives 0: 0 * inf
    # is NaN, whereas casts of infinities saturate in some versions of PyTorch.
    scale = ((torch.finfo(dtype).max / largest).view(torch.int32) & _EXPONENT).view(torch.float32)
    return (x.contiguous() * scale).to(dtype), scale.reciprocal()


def _transposed(x: Tensor, dtype: torch.dtype) -> Narrow:
    """The contiguous transpose of ``[rows, columns]``, narrowed by :func:`_narrowed`."""
    values, undo = _narrowed(x, dtype)
    return values.t().contiguous(), undo


def _narrowed_weight(weight: Tensor, compiled: bool) -> Narrow:
    """A weight in e4m3: made once for the microbatches of a step, their forward and backward passes."""
    narrow: Callable[..., Narrow] = maybe_compiled(_narrowed, compiled)
    return derived(weight, "e4m3", lambda: narrow(weight.detach(), torch.float8_e4m3fn))


def _transposed_weight(weight: Tensor, compiled: bool) -> Narrow:
    """A weight ``[out, in]`` narrowed by :func:`_narrowed_weight`, whose columns are contiguous: the units
    multiply rows by columns that are both contiguous along the sum."""

    def transposed() -> Narrow:
        narrow, undo = _narrowed_weight(weight, compiled)
        return narrow.t().contiguous().t(), undo

    return derived(weight, "e4m3 transposed", transposed)


def _multiply(
    left: Narrow,
    right: Narrow,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``left @ right + bias`` in ``dtype``, in ``out`` where given; ``fast``: partial sums may be kept with
    fewer bits.

    Some CPUs' kernels multiply an operand by its scale before they multiply operands, which overflows: there
    one scale stands for both.
    """
    (x, scale), (y, other) = left, right
    if x.device.type == "cpu":
        scale, other = scale * other, torch.ones_like(other)
    return torch._scaled_mm(
        x, y, scale_a=scale, scale_b=other, bias=bias, out_dtype=dtype, use_fast_accum=fast, out=out
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, compiled: bool = False) -> Tensor:
    """``x W^T + b`` of ``[tokens, in]`` and ``[out, in]``; every size a multiple of 16.

    Partial sums may be kept with fewer bits ("fast accumulation"), as forward passes tolerate. ``compiled``:
    operands are scaled and rounded in one pass, after one for their maximum.
    """
    narrow = maybe_compiled(_narrowed, compiled)(x, torch.float8_e4m3fn)
    narrow_weight, undo = _narrowed_weight(weight, compiled)
    return _multiply(narrow, (narrow_weight.t(), undo), x.dtype, True, bias)


def input_gradient(gradient: Tensor, weight: Tensor, compiled: bool = False) -> Tensor:
    """``gradient W`` of ``[tokens, out]`` and ``[out, in]``; every size a multiple of 16."""
    narrow = maybe_compiled(_narrowed, compiled)(gradient, torch.float8_e5m2)
    return _multiply(narrow, _transposed_weight(weight, compiled), gradient.dtype, False)


def add_weight_gradient(
    total: Tensor, gradient: Tensor, inputs: Tensor, fresh: bool, compiled: bool = False
) -> None:
    """Add ``gradient^T inputs`` of ``[tokens, out]`` and ``[tokens, in]`` to ``total [out, in]``, or
    overwrite it; every size a multiple of 16."""
    narrow = maybe_compiled(_transposed, compiled)
    left, (rows, undo) = narrow(gradient, torch.float8_e5m2), narrow(inputs, torch.float8_e4m3fn)
    product = _multiply(left, (rows.t(), undo), total.dtype, False, out=total if fresh else None)
    if not fresh:
        total += product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, narrow: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.narrow = bias is not None, narrow
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ctx.narrow:
            grad_weight = torch.empty_like(weight)
            add_weight_gradient(grad_weight, gradient, x, fresh=True)
        else:
            grad_weight = gradient.t() @ x
        return input_gradient(gradient, weight), grad_weight, gradient.sum(0) if ctx.bias else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, weight_gradients: bool = False) -> Tensor:
    """:func:`product` under plain autograd; the weight's gradient is computed in the operands' format, or
    with ``weight_gradients`` in 8 bits too."""
    return _Linear.apply(x, weight, bias, weight_gradients)
