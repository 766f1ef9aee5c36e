"""Column- and row-parallel linear layers (Shoeybi et al., arXiv 1909.08053), with sequence parallel
(Korthikanti et al., arXiv 2205.05198), and low-rank adapters inside them (LoRA: Hu et al., arXiv 2106.09685).

Activations are ``[tokens, features]``: batch and sequence flattened, so that sequence-parallel gathers and
scatters act on dim 0 and move contiguous memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from hexad.comm import (
    Pending,
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    reduce_scatter,
    reduce_scatter_async,
)
from hexad.topology.mesh import Axis

from ..arithmetic import Arithmetic
from ..contributions import applied, bias_gradient, deferred, meanwhile, weight_gradient
from ..sharding import Shard, ShardedModule
from .adapters import Adapters, Drop, adapted_columns
from .linear_inventory import LinearSpec, b_name


class AdaptedLinear(ShardedModule):
    """A linear layer's parameters, and those of its adapters."""

    lora_a: nn.Parameter

    def __init__(self, inventory: LinearSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.declare(*inventory.parameters)
        self._adapted = inventory.adapters
        if self._adapted is not None:
            self._columns = adapted_columns(inventory, shard)

    def adapters(self, drop: Drop | None = None) -> Adapters | None:
        """The layer's adapters for one pass; None if it has none."""
        if self._adapted is None:
            return None
        b = tuple(getattr(self, b_name(name)) for name in self._adapted.outputs)
        return Adapters(self.lora_a, b, self._columns, self._adapted.kind.scale, drop)


Fused = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


def _products(x: Tensor, layers: Sequence[Fused], arithmetic: Arithmetic) -> Tensor:
    """The products of all layers, side by side: ``[tokens, sum of outputs]``."""
    if len(layers) == 1:
        return arithmetic.product(x, *layers[0])
    widths = [weight.shape[0] for weight, _ in layers]
    y = x.new_empty((x.shape[0], sum(widths)))
    for part, (weight, bias) in zip(y.split_with_sizes(widths, 1), layers):
        arithmetic.product(x, weight, bias, part)
    return y


def _chunks(rows: int, shard: Shard, arithmetic: Arithmetic, adapters: Adapters | None) -> list[int]:
    """How many rows of a rank are in each chunk that has a message of its own."""
    if shard.tensor.size == 1 or adapters is not None or not arithmetic.batched:  # a mask is that of all rows
        return [rows]
    count = max(1, min(shard.chunks, rows))
    return [rows * (number + 1) // count - rows * number // count for number in range(count)]


def _gathered_products(x: Tensor, layers: Sequence[Fused], shard: Shard, chunks: Sequence[int]) -> Tensor:
    """:func:`_products` of all ranks' ``x [tokens / size, in]``, of one chunk while the next is gathered."""
    axis, ranks = shard.tensor, shard.tensor.size
    widths = [weight.shape[0] for weight, _ in layers]
    y = x.new_empty((ranks, x.shape[0], sum(widths)))
    weights = [weight.t().expand(ranks, -1, -1) for weight, _ in layers]
    inputs, outputs = x.split_with_sizes(chunks), y.split_with_sizes(chunks, 1)
    gathering = all_gather_async(inputs[0], axis)
    for rows, following in zip_longest(outputs, inputs[1:]):
        whole = gathering.wait().view(ranks, rows.shape[1], -1)
        if following is not None:
            gathering = all_gather_async(following, axis)
        parts = (rows,) if len(layers) == 1 else rows.split_with_sizes(widths, 2)
        for part, weight, (_, bias) in zip(parts, weights, layers):
            if bias is None:
                torch.bmm(whole, weight, out=part)
            else:
                torch.baddbmm(bias, whole, weight, out=part)
    return y.view(-1, y.shape[2])


def _summed_product(x: Tensor, weight: Tensor, shard: Shard, chunks: Sequence[int]) -> Tensor:
    """``x [tokens, in / size] W^T`` summed over the ranks, and scattered over tokens in sequence parallel:
    one chunk while the next is multiplied."""
    axis, ranks = shard.tensor, shard.tensor.size
    y = x.new_empty((sum(chunks), weight.shape[0]))
    transposed = weight.t()
    if shard.sequence:
        inputs = x.view(ranks, y.shape[0], -1).split_with_sizes(chunks, 1)
        transposed = transposed.expand(ranks, -1, -1)
    else:
        inputs = x.split_with_sizes(chunks)
    summing = Pending(y)
    for rows, out in zip(inputs, y.split_with_sizes(chunks)):
        if shard.sequence:
            part = torch.bmm(rows, transposed).view(-1, y.shape[1])
        else:
            part = torch.mm(rows, transposed, out=out)
        summing.wait()
        summing = reduce_scatter_async(part, axis, out) if shard.sequence else all_reduce_async(part, axis)
    summing.wait()
    return y


def _over_ranks(y: Tensor, shard: Shard) -> Tensor:
    """``y [tokens, out]`` summed over the tensor ranks, and scattered over tokens in sequence parallel."""
    return (reduce_scatter if shard.sequence else all_reduce)(y, shard.tensor)


def _input_gradients(gradients: Sequence[Tensor], layers: Sequence[Fused], arithmetic: Arithmetic) -> Tensor:
    """The sum of all layers' gradients of their input, ``[tokens, in]``."""
    total = arithmetic.input_gradient(gradients[0], layers[0][0])
    for gradient, (weight, _) in zip(gradients[1:], layers[1:]):
        arithmetic.add_input_gradient_(total, gradient, weight)
    return total


class _ColumnLinear(torch.autograd.Function):
    """``y = x W^T + b`` with W's rows divided over the axis; several layers' outputs side by side.

    In sequence parallel a chunk of the input is gathered while the one before is multiplied.

    Backward: the input gradient's reduction runs while the weight gradient is computed, and in sequence
    parallel the input is gathered again (it is not kept) while the input gradient is computed. Where the
    weight gradient is deferred, so is that gathering. Where all weights are frozen, the input is not kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shard: Shard,
        arithmetic: Arithmetic,
        adapters: Adapters | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        fused = tensors if adapters is None else tensors[: -len(adapters.tensors)]
        ctx.layers, ctx.shard, ctx.adapters = list(zip(fused[::2], fused[1::2])), shard, adapters
        ctx.arithmetic = arithmetic
        chunks = _chunks(x.shape[0], shard, arithmetic, adapters) if shard.sequence else []
        inner = None
        if len(chunks) > 1:
            y = _gathered_products(x, ctx.layers, shard, chunks)
        else:
            whole = all_gather(x, shard.tensor) if shard.sequence else x
            y = _products(whole, ctx.layers, arithmetic)
            if adapters is not None:
                inner = adapters.add_(y, whole, arithmetic)
        ctx.save_for_backward(None if _trained(ctx.layers, adapters) is None else x, inner)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, inner = ctx.saved_tensors
        gradient = gradient.contiguous()
        axis, sequence = ctx.shard.tensor, ctx.shard.sequence
        arithmetic, adapters = ctx.arithmetic, ctx.adapters
        widths = [weight.shape[0] for weight, _ in ctx.layers]
        gradients = (gradient,) if len(widths) == 1 else gradient.split_with_sizes(widths, 1)
        trained = _trained(ctx.layers, adapters)
        # The mask of dropout is that of all tokens.
        later = trained is not None and deferred(trained) and (adapters is None or adapters.drop is None)
        gathering = all_gather_async(x, axis) if sequence and trained is not None and not later else None
        inner_gradient = None if adapters is None else adapters.inner_gradient(gradient)
        reducing = None
        if ctx.needs_input_grad[0]:
            input_gradient = _input_gradients(gradients, ctx.layers, arithmetic)
            if adapters is not None:
                adapters.add_input_gradient_(input_gradient, inner_gradient)
            reduce = reduce_scatter_async if sequence else all_reduce_async
            reducing = reduce(input_gradient, axis)
        if gathering is not None:
            x = gathering.wait()
        gather = axis if sequence and later else None
        results: list[Tensor | None] = []
        for part, (weight, bias) in zip(gradients, ctx.layers):
            product = weight_gradient(weight, part, x, gather, add=arithmetic.add_weight_gradient)
            results += [product, bias_gradient(bias, part)]
        if adapters is not None:
            results += adapters.weight_gradients(gradient, inner_gradient, inner, x, gather)
        # In sequence parallel the next gather has nothing else beside it.
        if reducing is not None and not sequence and axis.size > 1:
            meanwhile(trained)
        return (None if reducing is None else reducing.wait()), None, None, None, *results


def _trained(layers: Sequence[Fused], adapters: Adapters | None) -> Tensor | None:
    """A weight whose gradient needs the layer's input; None if there is none."""
    if adapters is not None:
        return adapters.a
    return next((weight for weight, _ in layers if weight.requires_grad), None)


class _RowLinear(torch.autograd.Function):
    """``y = sum over ranks of x_r W_r^T`` with W's columns divided over the axis; y is scattered over tokens
    in sequence parallel. A chunk is summed while the next one is multiplied.

    Backward: the weight gradient is set aside. It is computed while the backward pass would wait for the next
    collective that nothing else covers: in sequence parallel the gather of the next row-parallel layer's
    output gradient, else the reduction of the column-parallel layer's input gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        shard: Shard,
        arithmetic: Arithmetic,
        unused: bool,
        adapters: Adapters | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.weight, ctx.shard, ctx.arithmetic, ctx.adapters = weight, shard, arithmetic, adapters
        kept = None if _trained([(weight, None)], adapters) is None else x
        rows = x.shape[0] // (shard.tensor.size if shard.sequence else 1)
        if unused:
            ctx.save_for_backward(kept, None if adapters is None else adapters.inner(x))
            return x.new_empty((rows, weight.shape[0]))
        chunks = _chunks(rows, shard, arithmetic, adapters)
        if len(chunks) > 1:
            ctx.save_for_backward(kept, None)
            return _summed_product(x, weight, shard, chunks)
        total = partial(_over_ranks, shard=shard)
        y, inner = arithmetic.summed_product(x, weight, shard.tensor, total, adapters)
        ctx.save_for_backward(kept, inner)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, inner = ctx.saved_tensors
        gradient, arithmetic, adapters = gradient.contiguous(), ctx.arithmetic, ctx.adapters
        if ctx.shard.sequence:
            gathering = all_gather_async(gradient, ctx.shard.tensor)
            meanwhile(_trained([(ctx.weight, None)], adapters))
            gradient = gathering.wait()
        grad_x = arithmetic.input_gradient(gradient, ctx.weight) if ctx.needs_input_grad[0] else None
        add, aside = arithmetic.add_weight_gradient, ctx.shard.tensor.size > 1
        results = [weight_gradient(ctx.weight, gradient, x, add=add, aside=aside), None, None, None, None]
        if adapters is not None:
            inner = adapters.inner(x) if inner is None else inner  # this rank's part
            inner_gradient = adapters.inner_gradient(gradient)
            if grad_x is not None:
                adapters.add_input_gradient_(grad_x, inner_gradient)
            results += adapters.weight_gradients(gradient, inner_gradient, inner, x)
        return grad_x, *results


def _plain(shard: Shard) -> bool:
    """Under ``torch.compile`` on one tensor rank PyTorch's own layer serves: accumulating into gradient slots
    is a side effect that would break the graph."""
    return shard.tensor.size == 1 and torch.compiler.is_compiling()


def _plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic, adapters: Adapters | None = None
) -> Tensor:
    y = arithmetic.by_autograd(x, weight, bias)
    return y if adapters is None else adapters.added(y, x)


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, shard: Shard, arithmetic: Arithmetic | None = None
) -> Tensor:
    """``x W^T + b`` for this rank's rows of ``W [out / size, in]``; see :class:`ColumnParallelLinear`.
    ``arithmetic``: the shard's where it is None."""
    arithmetic = shard.arithmetic if arithmetic is None else arithmetic
    if _plain(shard):
        return _plain_linear(x, weight, bias, arithmetic)
    return applied(_ColumnLinear, x, shard, arithmetic.reading(weight), None, weight, bias)


def row_linear(x: Tensor, weight: Tensor, shard: Shard) -> Tensor:
    """``x W^T`` for this rank's columns of ``W [out, in / size]``, summed over the ranks; see
    :class:`RowParallelLinear`."""
    if _plain(shard):
        return _plain_linear(x, weight, None, shard.arithmetic)
    return applied(_RowLinear, x, weight, shard, shard.arithmetic.reading(weight), False, None)


class ColumnParallelLinear(AdaptedLinear):
    """Linear layers that share an input, fused into one multiplication, with the outputs divided over the
    tensor axis: each by itself, so that this rank's output is ``[first's shard | second's shard | ...]``.
    Outputs that are copied come last, and are a second multiplication.

    Attributes:
        applied_over: the shard over whose tensor ranks the outputs are divided.

    Args:
        inventory: what it holds.
        shard: in sequence parallel the input is divided over tokens and is gathered first.

    Raises:
        ValueError: an output that does not divide by the axis's size.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    copied_weight: nn.Parameter
    copied_bias: nn.Parameter | None

    def __init__(self, inventory: LinearSpec, shard: Shard) -> None:
        super().__init__(inventory, shard)
        self.copied, self.applied_over = bool(inventory.copied), shard
        if not inventory.bias:
            self.bias = self.copied_bias = None

    def forward(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """``[tokens (/ size in sequence parallel), inputs]`` -> ``[tokens, this rank's outputs]``; ``drop``
        drops elements of the adapters' input, of all tokens."""
        adapters, shard = self.adapters(drop), self.applied_over
        if not self.copied and _plain(shard):
            return _plain_linear(x, self.weight, self.bias, shard.arithmetic, adapters)
        copied = (self.copied_weight, self.copied_bias) if self.copied else ()
        tensors = self.weight, self.bias, *copied, *(() if adapters is None else adapters.tensors)
        arithmetic = shard.arithmetic.reading(self.weight)
        return applied(_ColumnLinear, x, shard, arithmetic, adapters, *tensors)


class ReplicatedLinear(ColumnParallelLinear):
    """Linear layers that share an input and of which every tensor rank holds all, fused into one
    multiplication of this rank's rows of the residual stream: ``[rows, inputs]`` -> ``[rows, outputs]``."""

    def __init__(self, inventory: LinearSpec, shard: Shard) -> None:
        super().__init__(inventory, shard)
        alone = {**shard.axes, "tensor": Axis("tensor")}
        self.applied_over = replace(shard, axes=alone, sequence=False)


class RowParallelLinear(AdaptedLinear):
    """A linear layer with the inputs divided over the tensor axis; outputs are summed over it.

    The bias is added once, after the sum. In sequence parallel the output is divided over tokens.

    Attributes:
        unused: the output is not used, as when a forward pass is repeated for its activations: it is neither
            multiplied nor summed.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, inventory: LinearSpec, shard: Shard) -> None:
        super().__init__(inventory, shard)
        self.unused = False
        if not inventory.bias:
            self.bias = None

    def forward(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """``[tokens, inputs / size]`` -> ``[tokens (/ size in sequence parallel), outputs]``; ``drop`` drops
        elements of the adapter's input, of this rank's features."""
        adapters = self.adapters(drop)
        if _plain(self.shard):
            return _plain_linear(x, self.weight, self.bias, self.shard.arithmetic, adapters)
        tensors = () if adapters is None else adapters.tensors
        arithmetic = self.shard.arithmetic.reading(self.weight)
        y = applied(_RowLinear, x, self.weight, self.shard, arithmetic, self.unused, adapters, *tensors)
        return y if self.bias is None else y + self.bias
