"""Column- and row-parallel linear layers (Shoeybi et al., arXiv 1909.08053), with sequence parallel
(Korthikanti et al., arXiv 2205.05198), and low-rank adapters inside them (LoRA: Hu et al., arXiv 2106.09685).

Activations are ``[tokens, features]``: batch and sequence flattened, so that sequence-parallel gathers and
scatters act on dim 0 and move contiguous memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

from .. import exact
from ..contributions import applied, bias_gradient, deferred, meanwhile, weight_gradient
from ..sharding import Shard, ShardedModule
from . import fp8, packed
from .linear_inventory import LinearSpec, b_name

Drop = Callable[[Tensor], Tensor]
"""Drops elements of a layer's input ``[tokens, inputs on this rank]``: multiplies it by a mask that is the
same whenever it is called, also with a gradient."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of one layer in one pass: ``output += scale * drop(x) A^T B^T``.

    Attributes:
        a: ``[adapters * rank, inputs on this rank]``.
        b: of every adapter, ``[outputs on this rank, rank]``.
        columns: of every adapter, (first column, columns) of the layer's output on this rank.
        scale: alpha / rank.
        drop: of the input, in training with dropout.
    """

    a: nn.Parameter
    b: tuple[nn.Parameter, ...]
    columns: tuple[tuple[int, int], ...]
    scale: float
    drop: Drop | None = None

    @property
    def tensors(self) -> tuple[nn.Parameter, ...]:
        """All parameters of the adapters."""
        return (self.a, *self.b)

    def dropped(self, x: Tensor) -> Tensor:
        """Values, or their gradient, with elements dropped."""
        return x if self.drop is None else self.drop(x)

    def _parts(self, inner: Tensor) -> tuple[Tensor, ...]:
        return inner.split(self.b[0].shape[1], dim=1)

    def inner(self, x: Tensor) -> Tensor:
        """``[tokens, adapters * rank]``: what lies between ``A`` and ``B``."""
        return F.linear(self.dropped(x), self.a)

    def add_(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the adapters' outputs of ``x [tokens, inputs]`` to ``y [tokens, outputs]``, in place; returns
        :meth:`inner`, for backward."""
        inner = self.inner(x)
        for part, b, (start, width) in zip(self._parts(inner), self.b, self.columns):
            y.narrow(1, start, width).addmm_(part, b.t(), alpha=self.scale)
        return inner

    def add_exactly_(self, y: Tensor, x: Tensor, shard: Shard | None = None) -> Tensor:
        """As :meth:`add_`, in exact arithmetic; with a shard, ``y`` is complete, and ``x`` and ``A`` are
        summed over its tensor ranks."""
        dropped = self.dropped(x)
        if shard is None:
            whole = exact.product(dropped, self.a)
        else:
            whole = exact.product(dropped, self.a, axis=shard.tensor, total=partial(_over_ranks, shard=shard))
        for part, b, (start, width) in zip(self._parts(whole), self.b, self.columns):
            y.narrow(1, start, width).add_(exact.product(part, b).mul_(self.scale))
        return whole

    def inner_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of :meth:`inner`, given ``[tokens, outputs]``, that of the layer's output."""
        parts = [gradient.narrow(1, start, width) @ b for b, (start, width) in zip(self.b, self.columns)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).mul_(self.scale)

    def add_input_gradient_(self, total: Tensor, inner: Tensor) -> None:
        """Add to ``total [tokens, inputs]``, the layer's input gradient, given :meth:`inner_gradient`."""
        if self.drop is None:
            total.addmm_(inner, self.a)
        else:
            total += self.drop(inner @ self.a)

    def weight_gradients(
        self, gradient: Tensor, inner_gradient: Tensor, inner: Tensor, x: Tensor, gather: Axis | None = None
    ) -> list[Tensor | None]:
        """Gradients of ``A`` and every ``B``, each contributed (None) or returned.

        Args:
            gradient: ``[tokens, outputs]``, of the layer's output.
            inner_gradient: see :meth:`inner_gradient`.
            inner: what :meth:`add_` returned.
            x: ``[tokens, inputs]``, the layer's input, without elements dropped.
            gather: the axis over which ``x`` is still divided; without dropout only.
        """
        gradients = [weight_gradient(self.a, inner_gradient, self.dropped(x), gather)]
        for part, b, (start, width) in zip(self._parts(inner * self.scale), self.b, self.columns):
            gradients.append(weight_gradient(b, gradient.narrow(1, start, width), part))
        return gradients

    def added(self, y: Tensor, x: Tensor) -> Tensor:
        """As :meth:`add_`, to a new tensor under plain autograd."""
        outputs, end = [], 0
        for part, b, (start, width) in zip(self._parts(self.inner(x)), self.b, self.columns):
            outputs += [y[:, end:start], y[:, start : start + width] + F.linear(part, b) * self.scale]
            end = start + width
        return torch.cat([*outputs, y[:, end:]], dim=1)


class AdaptedLinear(ShardedModule):
    """A linear layer's parameters, and those of its adapters."""

    lora_a: nn.Parameter

    def __init__(self, inventory: LinearSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.declare(*inventory.parameters)
        self._adapted = inventory.adapters
        if self._adapted is not None:
            self._columns = _columns(inventory, shard)

    def adapters(self, drop: Drop | None = None) -> Adapters | None:
        """The layer's adapters for one pass; None if it has none."""
        if self._adapted is None:
            return None
        b = tuple(getattr(self, b_name(name)) for name in self._adapted.outputs)
        return Adapters(self.lora_a, b, self._columns, self._adapted.kind.scale, drop)


def _columns(inventory: LinearSpec, shard: Shard) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of each adapted output on this rank."""
    columns, start = [], 0
    for parameter in inventory.layers:
        for weight in parameter.weights if parameter.matrix else ():
            width = weight.local_shape(shard.positions)[0]
            if weight.name.removesuffix(".weight") in inventory.adapted:
                columns.append((start, width))
            start += width
    return tuple(columns)


Fused = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, shard: Shard) -> Tensor:
    """``x [tokens, in]``, ``weight [out, in]`` -> ``x W^T + b`` of this rank, in the layer's format."""
    if shard.exact:
        return exact.product(x, weight, bias)
    if weight.is_mkldnn:
        return packed.product(x, weight, bias)
    return fp8.product(x, weight, bias, shard.compiled) if shard.fp8 else F.linear(x, weight, bias)


def _input_gradient(gradient: Tensor, weight: Tensor, shard: Shard) -> Tensor:
    """``gradient [tokens, out]``, ``weight [out, in]`` -> ``gradient W`` of this rank, in its format."""
    return fp8.input_gradient(gradient, weight, shard.compiled) if shard.fp8 else gradient @ weight


def _weight_gradient(
    weight: Tensor,
    gradient: Tensor,
    inputs: Tensor,
    shard: Shard,
    gather: Axis | None = None,
    aside: bool = False,
) -> Tensor | None:
    """As :func:`weight_gradient`, in the layer's format."""
    if not (shard.fp8 and shard.fp8_weight_gradients):
        return weight_gradient(weight, gradient, inputs, gather, aside=aside)
    add = partial(fp8.add_weight_gradient, compiled=shard.compiled)
    return weight_gradient(weight, gradient, inputs, gather, add=add, aside=aside)


def _products(x: Tensor, layers: Sequence[Fused], shard: Shard) -> Tensor:
    """The products of all layers, side by side: ``[tokens, sum of outputs]``."""
    if len(layers) == 1:
        return _product(x, *layers[0], shard)
    widths = [weight.shape[0] for weight, _ in layers]
    y = x.new_empty((x.shape[0], sum(widths)))
    for part, (weight, bias) in zip(y.split_with_sizes(widths, 1), layers):
        if shard.exact or shard.fp8 or weight.is_mkldnn:
            part.copy_(_product(x, weight, bias, shard))
        elif bias is None:
            torch.mm(x, weight.t(), out=part)
        else:
            torch.addmm(bias, x, weight.t(), out=part)
    return y


def _chunks(rows: int, shard: Shard, adapters: Adapters | None) -> list[int]:
    """How many rows of a rank are in each run that has its own message."""
    if shard.tensor.size == 1 or adapters is not None or shard.fp8 or shard.exact:  # one mask, one scale
        return [rows]
    count = max(1, min(shard.chunks, rows))
    return [rows * (number + 1) // count - rows * number // count for number in range(count)]


def _gathered_products(x: Tensor, layers: Sequence[Fused], shard: Shard, chunks: Sequence[int]) -> Tensor:
    """:func:`_products` of all ranks' ``x [tokens / size, in]``, of one chunk while the next is gathered."""
    axis, ranks = shard.tensor, shard.tensor.size
    widths = [weight.shape[0] for weight, _ in layers]
    y = x.new_empty((ranks, x.shape[0], sum(widths)))
    weights = [weight.t().expand(ranks, -1, -1) for weight, _ in layers]
    given, made = x.split_with_sizes(chunks), y.split_with_sizes(chunks, 1)
    gathering = all_gather_async(given[0], axis)
    for rows, following in zip_longest(made, given[1:]):
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
    turned = weight.t()
    if shard.sequence:
        given = x.view(ranks, y.shape[0], -1).split_with_sizes(chunks, 1)
        turned = turned.expand(ranks, -1, -1)
    else:
        given = x.split_with_sizes(chunks)
    summing = Pending(y)
    for rows, out in zip(given, y.split_with_sizes(chunks)):
        if shard.sequence:
            part = torch.bmm(rows, turned).view(-1, y.shape[1])
        else:
            part = torch.mm(rows, turned, out=out)
        summing.wait()
        summing = reduce_scatter_async(part, axis, out) if shard.sequence else all_reduce_async(part, axis)
    summing.wait()
    return y


def _over_ranks(y: Tensor, shard: Shard) -> Tensor:
    """``y [tokens, out]``, of exact arithmetic, summed over the tensor ranks, and scattered over tokens in
    sequence parallel."""
    return (reduce_scatter if shard.sequence else all_reduce)(y, shard.tensor)


def _input_gradients(gradients: Sequence[Tensor], layers: Sequence[Fused], shard: Shard) -> Tensor:
    """The sum of all layers' gradients of their input, ``[tokens, in]``."""
    total = _input_gradient(gradients[0], layers[0][0], shard)
    for gradient, (weight, _) in zip(gradients[1:], layers[1:]):
        if shard.fp8:
            total += _input_gradient(gradient, weight, shard)
        else:
            total.addmm_(gradient, weight)
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
        ctx: Any, x: Tensor, shard: Shard, adapters: Adapters | None, *tensors: Tensor | None
    ) -> Tensor:
        fused = tensors if adapters is None else tensors[: -len(adapters.tensors)]
        ctx.layers, ctx.shard, ctx.adapters = list(zip(fused[::2], fused[1::2])), shard, adapters
        chunks = _chunks(x.shape[0], shard, adapters) if shard.sequence else []
        inner = None
        if len(chunks) > 1:
            y = _gathered_products(x, ctx.layers, shard, chunks)
        else:
            whole = all_gather(x, shard.tensor) if shard.sequence else x
            y = _products(whole, ctx.layers, shard)
            if adapters is not None:
                inner = (adapters.add_exactly_ if shard.exact else adapters.add_)(y, whole)
        ctx.save_for_backward(None if _trained(ctx.layers, adapters) is None else x, inner)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, inner = ctx.saved_tensors
        gradient = gradient.contiguous()
        axis, sequence, adapters = ctx.shard.tensor, ctx.shard.sequence, ctx.adapters
        widths = [weight.shape[0] for weight, _ in ctx.layers]
        gradients = (gradient,) if len(widths) == 1 else gradient.split_with_sizes(widths, 1)
        trained = _trained(ctx.layers, adapters)
        # The mask of dropout is that of all tokens.
        later = trained is not None and deferred(trained) and (adapters is None or adapters.drop is None)
        gathering = all_gather_async(x, axis) if sequence and trained is not None and not later else None
        inner_gradient = None if adapters is None else adapters.inner_gradient(gradient)
        reducing = None
        if ctx.needs_input_grad[0]:
            partial = _input_gradients(gradients, ctx.layers, ctx.shard)
            if adapters is not None:
                adapters.add_input_gradient_(partial, inner_gradient)
            reduce = reduce_scatter_async if sequence else all_reduce_async
            reducing = reduce(partial, axis)
        if gathering is not None:
            x = gathering.wait()
        gather = axis if sequence and later else None
        results: list[Tensor | None] = []
        for part, (weight, bias) in zip(gradients, ctx.layers):
            results += [_weight_gradient(weight, part, x, ctx.shard, gather), bias_gradient(bias, part)]
        if adapters is not None:
            results += adapters.weight_gradients(gradient, inner_gradient, inner, x, gather)
        # In sequence parallel the next gather has nothing else beside it.
        if reducing is not None and not sequence and axis.size > 1:
            meanwhile(trained)
        return (None if reducing is None else reducing.wait()), None, None, *results


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
        unused: bool,
        adapters: Adapters | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.weight, ctx.shard, ctx.adapters = weight, shard, adapters
        kept = None if _trained([(weight, None)], adapters) is None else x
        rows = x.shape[0] // (shard.tensor.size if shard.sequence else 1)
        if unused:
            ctx.save_for_backward(kept, None if adapters is None else adapters.inner(x))
            return x.new_empty((rows, weight.shape[0]))
        chunks = _chunks(rows, shard, adapters)
        if len(chunks) > 1:
            ctx.save_for_backward(kept, None)
            return _summed_product(x, weight, shard, chunks)
        if shard.exact:
            y = exact.product(x, weight, axis=shard.tensor, total=partial(_over_ranks, shard=shard))
            if adapters is not None:
                adapters.add_exactly_(y, x, shard)
            ctx.save_for_backward(kept, None)
            return y
        y = _product(x, weight, None, shard)
        ctx.save_for_backward(kept, None if adapters is None else adapters.add_(y, x))
        return (reduce_scatter if shard.sequence else all_reduce)(y, shard.tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, inner = ctx.saved_tensors
        gradient, adapters = gradient.contiguous(), ctx.adapters
        if ctx.shard.sequence:
            gathering = all_gather_async(gradient, ctx.shard.tensor)
            meanwhile(_trained([(ctx.weight, None)], adapters))
            gradient = gathering.wait()
        grad_x = _input_gradient(gradient, ctx.weight, ctx.shard) if ctx.needs_input_grad[0] else None
        aside = ctx.shard.tensor.size > 1
        results = [_weight_gradient(ctx.weight, gradient, x, ctx.shard, aside=aside), None, None, None]
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
    x: Tensor, weight: Tensor, bias: Tensor | None, shard: Shard, adapters: Adapters | None = None
) -> Tensor:
    if shard.fp8:
        y = fp8.linear(x, weight, bias, shard.fp8_weight_gradients)
    else:
        y = F.linear(x, weight, bias)
    return y if adapters is None else adapters.added(y, x)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, shard: Shard) -> Tensor:
    """``x W^T + b`` for this rank's rows of ``W [out / size, in]``; see :class:`ColumnParallelLinear`."""
    if _plain(shard):
        return _plain_linear(x, weight, bias, shard)
    return applied(_ColumnLinear, x, shard, None, weight, bias)


def row_linear(x: Tensor, weight: Tensor, shard: Shard) -> Tensor:
    """``x W^T`` for this rank's columns of ``W [out, in / size]``, summed over the ranks; see
    :class:`RowParallelLinear`."""
    if _plain(shard):
        return _plain_linear(x, weight, None, shard)
    return applied(_RowLinear, x, weight, shard, False, None)


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
            return _plain_linear(x, self.weight, self.bias, shard, adapters)
        copied = (self.copied_weight, self.copied_bias) if self.copied else ()
        tensors = self.weight, self.bias, *copied, *(() if adapters is None else adapters.tensors)
        return applied(_ColumnLinear, x, shard, adapters, *tensors)


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
            return _plain_linear(x, self.weight, self.bias, self.shard, adapters)
        tensors = () if adapters is None else adapters.tensors
        y = applied(_RowLinear, x, self.weight, self.shard, self.unused, adapters, *tensors)
        return y if self.bias is None else y + self.bias
