"""Products of runs of rows, each with the matrix of its expert, and their weights' gradients.

Where runs end is a tensor on the device. On GPUs of compute capability 8.0 and later one kernel of PyTorch
multiplies all runs in bf16, and one of our own (:mod:`.weight_gradient_kernel`) adds weight gradients to
their bucket. Elsewhere the host reads the offsets and multiplies run by run, which on a CPU is three times
as fast as PyTorch's grouped product.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import USUAL, Arithmetic
from ..contributions import add_product, applied, weight_gradient


@cache
def on_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this format are grouped on the device, without the host reading offsets."""
    if device.type == "meta":
        return dtype == torch.bfloat16
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def runs(offsets: Tensor) -> Iterator[tuple[int, int]]:
    """(first row, end) of each expert's run; the host waits for the device."""
    first = 0
    for end in offsets.tolist():
        yield first, end
        first = end


def product(x: Tensor, weight: Tensor, offsets: Tensor, arithmetic: Arithmetic = USUAL) -> Tensor:
    """Products of runs of rows with the matrices of a stack.

    Args:
        x: ``[rows, in]``.
        weight: ``[experts, out, in]``.
        offsets: int32 ``[experts]``, where the rows of each expert end.
        arithmetic: of the products.

    Returns:
        ``[rows, out]``; what stands beyond the last offset has no meaning.
    """
    if arithmetic.batched and on_device(x.device, x.dtype):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    y = x.new_empty((len(x), weight.shape[1]))
    end = 0
    for matrix, (first, end) in zip(weight, runs(offsets)):
        if first < end:
            arithmetic.product(x[first:end], matrix, out=y[first:end])
    y[end:].zero_()
    return y


def add_gradients(total: Tensor, gradient: Tensor, inputs: Tensor, fresh: bool, offsets: Tensor) -> None:
    """Add the weight gradients of every expert, ``gradient.T @ inputs`` of its rows, or overwrite.

    Args:
        total: ``[experts, ..., in]``, contiguous; the dims between are the outputs.
        gradient: ``[rows, out]``.
        inputs: ``[rows, in]``.
        fresh: overwrite.
        offsets: int32 ``[experts]``, where the rows of each expert end.
    """
    matrices = total.view(len(offsets), gradient.shape[1], inputs.shape[1])
    if gradient.is_meta:  # the kernel writes to the total alone
        return
    if on_device(gradient.device, gradient.dtype):
        from .weight_gradient_kernel import add_weight_gradients  # Triton comes with PyTorch for GPUs

        add_weight_gradients(matrices, gradient, inputs, offsets, fresh)
        return
    for matrix, (first, end) in zip(matrices, runs(offsets)):
        add_product(matrix, gradient[first:end], inputs[first:end], fresh)


class _GroupedLinear(torch.autograd.Function):
    """Products of runs of rows with the matrices of a stack; the weight's gradient is a contribution."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, arithmetic: Arithmetic, unused: bool
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, offsets)
        ctx.weight = weight
        matrices = _matrices(weight)
        if unused:
            return x.new_empty((len(x), matrices.shape[1]))
        return product(x, matrices, offsets, arithmetic)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets = ctx.saved_tensors
        gradient = gradient.contiguous()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(gradient, _matrices(ctx.weight).transpose(1, 2), offsets)
        add = partial(add_gradients, offsets=offsets)
        grad_weight = None if x is None else weight_gradient(ctx.weight, gradient, x, add=add)
        return grad_x, grad_weight, None, None, None


def _matrices(weight: Tensor) -> Tensor:
    """``[experts, ..., in]`` as ``[experts, out, in]``."""
    return weight.detach().flatten(1, -2)


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, arithmetic: Arithmetic = USUAL, unused: bool = False
) -> Tensor:
    """``[rows, in]`` -> ``[rows, out]``, each row by the matrix of its expert.

    Args:
        x: rows sorted by expert.
        weight: ``[experts, ..., in]``; the dims between are the outputs.
        offsets: int32 ``[experts]``, where the rows of each expert end.
        arithmetic: of the forward products.
        unused: the result is not used, as where a forward pass is repeated for its activations.
    """
    result: Tensor = applied(_GroupedLinear, x, weight, offsets, arithmetic, unused)
    return result
