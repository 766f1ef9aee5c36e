"""Column- and row-parallel linear layers (Shoeybi et al., arXiv 1909.08053), with sequence parallel
(Korthikanti et al., arXiv 2205.05198).

Activations are ``[tokens, features]``: batch and sequence flattened, so that sequence-parallel gathers and
scatters act on dim 0 and move contiguous memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hexad.comm import (
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    reduce_scatter,
    reduce_scatter_async,
)

from ..sharding import Declaration, Piece, Placement, ShardedModule, replicated
from ..slot import bias_gradient, deferred, weight_gradient
from . import fp8


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Placement
) -> torch.Tensor:
    """``x W^T + b`` on this rank, in the layer's format for products."""
    return fp8.product(x, weight, bias) if place.fp8 else F.linear(x, weight, bias)


def _input_gradient(gradient: torch.Tensor, weight: torch.Tensor, place: Placement) -> torch.Tensor:
    """``gradient W`` on this rank, in the layer's format for products."""
    return fp8.input_gradient(gradient, weight) if place.fp8 else gradient @ weight


class _ColumnLinear(torch.autograd.Function):
    """``y = x W^T + b`` with W's rows divided over the axis.

    Backward: the input gradient's reduction runs while the weight gradient is computed, and in sequence
    parallel the input is gathered again (it is not kept) while the input gradient is computed. Where the
    weight gradient is put off, so is that gathering.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Placement
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.place = weight, bias, place
        return _product(all_gather(x, place.axis) if place.sequence else x, weight, bias, place)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        axis, sequence = ctx.place.axis, ctx.place.sequence
        later = deferred(ctx.weight)
        gathering = all_gather_async(x, axis) if sequence and not later else None
        reducing = None
        if ctx.needs_input_grad[0]:
            share = _input_gradient(gradient, ctx.weight, ctx.place)
            reduce = reduce_scatter_async if sequence else all_reduce_async
            reducing = reduce(share, axis)
        if gathering is not None:
            x = gathering.wait()
        grad_weight = weight_gradient(ctx.weight, gradient, x, gather=axis if sequence and later else None)
        grad_bias = bias_gradient(ctx.bias, gradient)
        grad_x = None if reducing is None else reducing.wait()
        return grad_x, grad_weight, grad_bias, None


class _RowLinear(torch.autograd.Function):
    """``y = sum over ranks of x_r W_r^T`` with W's columns divided over the axis; y is scattered over tokens
    in sequence parallel."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, place: Placement, unused: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.place = weight, place
        if unused:
            rows = x.shape[0] // (place.axis.size if place.sequence else 1)
            return x.new_empty((rows, weight.shape[0]))
        y = _product(x, weight, None, place)
        return (reduce_scatter if place.sequence else all_reduce)(y, place.axis)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ctx.place.sequence:
            gradient = all_gather(gradient, ctx.place.axis)
        grad_x = _input_gradient(gradient, ctx.weight, ctx.place) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(ctx.weight, gradient, x), None, None


def _plain(place: Placement) -> bool:
    """Under ``torch.compile`` on one tensor rank PyTorch's own layer serves: accumulating into gradient slots
    is a side effect that would break the graph."""
    return place.axis.size == 1 and torch.compiler.is_compiling()


def _plain_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Placement
) -> torch.Tensor:
    return (fp8.linear if place.fp8 else F.linear)(x, weight, bias)


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Placement
) -> torch.Tensor:
    """``x W^T + b`` for this rank's rows of W; see :class:`ColumnParallelLinear`."""
    if _plain(place):
        return _plain_linear(x, weight, bias, place)
    return _ColumnLinear.apply(x, weight, bias, place)


class ColumnParallelLinear(ShardedModule):
    """A linear layer, or several fused ones that share an input, with the outputs divided over the axis.

    Args:
        inputs: input features.
        outputs: name -> global output features. One entry named ``""`` is a plain layer; several are fused
            into one multiplication, and each is divided over the axis by itself, so that this rank's output
            is ``[first's share | second's share | ...]``.
        place: in sequence parallel the input is divided over tokens and is gathered first.
        bias: add a bias.
        std: standard deviation of the initial weights.

    Raises:
        ValueError: an output that does not divide by the axis's size.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: dict[str, int],
        place: Placement,
        *,
        bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.place = place
        ranks = place.axis.size
        for name, size in outputs.items():
            if size % ranks:
                raise ValueError(f"output '{name}' of {size} features does not divide by {ranks} ranks")
        self.widths = tuple(size // ranks for size in outputs.values())
        weight = place.parameter(sum(self.widths), inputs)
        self.declare("weight", weight, self._declaration("weight", outputs, (inputs,), std, decay=True))
        if bias:
            values = place.parameter(sum(self.widths))
            self.declare("bias", values, self._declaration("bias", outputs, (), 0.0, decay=False))
        else:
            self.bias = None

    def _declaration(
        self, kind: str, outputs: dict[str, int], rest: tuple[int, ...], std: float, decay: bool
    ) -> Declaration:
        pieces, start = [], 0
        for (name, size), width in zip(outputs.items(), self.widths):
            offset = (self.place.axis.rank * width, *(0 for _ in rest))
            full_name = f".{name}.{kind}" if name else kind
            pieces.append(Piece(full_name, (size, *rest), offset, (width, *rest), start, std))
            start += width
        return Declaration(tuple(pieces), sharded=self.place.axis.size > 1, partial=False, decay=decay)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens (/ size in sequence parallel), inputs]`` -> ``[tokens, this rank's outputs]``."""
        return column_linear(x, self.weight, self.bias, self.place)


class RowParallelLinear(ShardedModule):
    """A linear layer with the inputs divided over the axis; outputs are summed over it.

    The bias is added once, after the sum. In sequence parallel the output is divided over tokens.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        place: Placement,
        *,
        bias: bool,
        std: float,
    ) -> None:
        super().__init__()
        self.place = place
        axis = place.axis
        if inputs % axis.size:
            raise ValueError(f"{inputs} input features do not divide by {axis.size} ranks")
        width = inputs // axis.size
        piece = Piece("weight", (outputs, inputs), (0, axis.rank * width), (outputs, width), std=std)
        weight = place.parameter(outputs, width)
        self.declare("weight", weight, Declaration((piece,), axis.size > 1, partial=False, decay=True))
        if bias:
            values = place.parameter(outputs)
            # In sequence parallel each rank sees the gradient of its own tokens only.
            self.declare("bias", values, replicated("bias", (outputs,), partial=place.sequence))
        else:
            self.bias = None

    def forward(self, x: torch.Tensor, unused: bool = False) -> torch.Tensor:
        """``[tokens, inputs / size]`` -> ``[tokens (/ size in sequence parallel), outputs]``.

        ``unused``: nobody looks at the result, as when a forward pass is repeated for its activations; it is
        neither multiplied nor summed.
        """
        if _plain(self.place):
            return _plain_linear(x, self.weight, self.bias, self.place)
        y = _RowLinear.apply(x, self.weight, self.place, unused)
        return y if self.bias is None else y + self.bias
