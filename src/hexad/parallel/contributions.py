"""How layers contribute to the gradients of their parameters.

A layer computes contributions, :class:`~hexad.parallel.data.gradients.Gradients` adds them up: weight
gradients are multiplied straight into the place where they are accumulated, at once or in an action of their
own. Under plain autograd, without such an accumulator, the same functions return gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hexad.topology.mesh import Axis

if TYPE_CHECKING:
    from .data.gradients import Gradients


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply an autograd function; where no gradient is needed, without autograd's bookkeeping, which costs
    the host more than a small kernel."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*arguments)
    return function.forward(_NoBackward(), *arguments)


class _NoBackward:
    """The context of a forward pass that no backward pass follows."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""


class Dense(NamedTuple):
    """A gradient of the parameter's shape: ``factor * values``."""

    values: Tensor
    factor: float = 1.0

    def add_to(self, total: Tensor, fresh: bool) -> None:
        """Add to ``total``; overwrite what it holds where that is ``fresh`` memory."""
        if not fresh:
            total.add_(self.values, alpha=self.factor)
        elif self.factor == 1:
            total.copy_(self.values)
        elif self.values.dtype == total.dtype:
            torch.mul(self.values, self.factor, out=total)  # no pass more than a copy
        else:  # out= would compute in the format of the values
            total.copy_(self.values).mul_(self.factor)

    def scaled(self, factor: float) -> Dense:
        """The contribution multiplied by a factor."""
        return self._replace(factor=self.factor * factor)


def add_product(total: Tensor, gradient: Tensor, inputs: Tensor, fresh: bool) -> None:
    """Add ``gradient.T @ inputs`` to ``total [out, in]``, or overwrite it: a float32 total of 16-bit operands
    in one product where the device has it, elsewhere through a 16-bit temporary."""
    left = gradient.t()
    if left.dtype == total.dtype:
        if fresh:
            torch.mm(left, inputs, out=total)
        else:
            total.addmm_(left, inputs)
    elif total.dtype == torch.float32 and widening_products(total.device):
        if fresh:
            torch.mm(left, inputs, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, inputs, out_dtype=total.dtype, out=total)
    else:
        Dense(left @ inputs).add_to(total, fresh)


AddProduct = Callable[[Tensor, Tensor, Tensor, bool], None]
"""Adds ``gradient.T @ inputs`` to a total, given total, gradient and inputs; or overwrites it."""


class WeightGradient(NamedTuple):
    """A weight gradient to be computed: ``output_gradient.T @ inputs``, or what ``add`` makes of both.

    Attributes:
        output_gradient: ``[tokens, out]``.
        inputs: ``[tokens, in]``, or this rank's tokens of them where ``gather`` is given.
        gather: the axis over which the inputs are divided; only of products that are deferred.
        add: computes the product, in the operands' format or another, or those of a stack of matrices.
    """

    output_gradient: Tensor
    inputs: Tensor
    gather: Axis | None = None
    add: AddProduct = add_product

    def add_to(self, total: Tensor, fresh: bool) -> None:
        """Add to ``total``, or overwrite it if it is ``fresh`` memory."""
        self.add(total, self.output_gradient, self.inputs, fresh)

    def scaled(self, factor: float) -> WeightGradient:
        """The contribution multiplied by a factor."""
        return self._replace(output_gradient=self.output_gradient * factor)


@cache
def widening_products(device: torch.device) -> bool:
    """Whether the device adds products of 16-bit matrices to float32 ones: GPUs from torch 2.8 on."""
    total = torch.ones((16, 16), dtype=torch.float32, device=device)
    operand = torch.ones((16, 16), dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, operand, operand, out_dtype=torch.float32, out=total)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return device.type == "meta" or total[0, 0].item() == 17.0


class EmbeddingRows(NamedTuple):
    """``values[i]`` for row ``rows[i]`` of the parameter: the gradient of an embedding.

    Attributes:
        rows: int64 ``[tokens]``.
        values: ``[tokens, columns]``.
    """

    rows: Tensor
    values: Tensor

    def add_to(self, total: Tensor, fresh: bool) -> None:
        """Add to ``total``, or overwrite it if it is ``fresh`` memory."""
        if fresh:
            total.zero_()
        values = self.values.to(total.dtype)
        if torch.are_deterministic_algorithms_enabled():
            # Where a row is named several times, index_add_ on a GPU adds in any order, by atomic operations;
            # index_put_ sorts the rows first.
            total.index_put_((self.rows,), values, accumulate=True)
        else:
            total.index_add_(0, self.rows, values)

    def scaled(self, factor: float) -> EmbeddingRows:
        """The contribution multiplied by a factor."""
        return self._replace(values=self.values * factor)


Contribution = Dense | WeightGradient | EmbeddingRows


def accumulator_of(parameter: Tensor) -> Gradients | None:
    """The accumulator of the parameter's gradient, to which layers contribute; None where they hand it to
    autograd."""
    return getattr(parameter, "gradient_accumulator", None)


def attach(parameter: nn.Parameter, accumulator: Gradients, direct: bool) -> RemovableHandle:
    """Accumulate the parameter's gradient there, until :func:`detach`. ``direct``: each layer that uses it
    contributes, and so does what autograd computes; otherwise layers hand their gradients to autograd, whose
    sum is one contribution, however often the layers of a user's module are called."""
    if direct:
        parameter.gradient_accumulator = accumulator  # type: ignore[attr-defined]
    parameter.autograd_accumulator = accumulator  # type: ignore[attr-defined]
    return parameter.register_post_accumulate_grad_hook(_move)


def detach(parameter: nn.Parameter, hook: RemovableHandle) -> None:
    """End what :func:`attach` began."""
    hook.remove()
    for name in ("gradient_accumulator", "autograd_accumulator"):
        if hasattr(parameter, name):
            delattr(parameter, name)


def attached(parameter: Tensor) -> bool:
    """Whether an engine accumulates the parameter's gradient."""
    return hasattr(parameter, "autograd_accumulator")


def _move(parameter: Tensor) -> None:
    # A function that held the accumulator itself would close a reference cycle through the hook, which is
    # never collected: buffers and process groups would outlive their engine.
    accumulator: Gradients = parameter.autograd_accumulator  # type: ignore[attr-defined]
    if parameter.grad is not None:  # None where a layer has contributed by itself
        accumulator.contribute(parameter, Dense(parameter.grad))
        parameter.grad = None


def deferred(weight: Tensor) -> bool:
    """Whether the weight's gradient will be computed later."""
    accumulator = accumulator_of(weight)
    return accumulator is not None and accumulator.deferring


def weight_gradient(
    weight: Tensor,
    output_gradient: Tensor,
    inputs: Tensor,
    gather: Axis | None = None,
    add: AddProduct = add_product,
    aside: bool = False,
) -> Tensor | None:
    """``output_gradient [tokens, out].T @ inputs [tokens, in]``: contributed (returning None), or
    returned; None for frozen weights.

    ``gather`` is the axis over which the inputs are still divided; only where the product is deferred.
    ``add`` computes the product, see :class:`WeightGradient`. With
    ``aside`` it is computed while the next collective is under way that calls :func:`meanwhile`.
    """
    if not weight.requires_grad:
        return None
    if inputs.requires_grad:  # what autograd saved knows its graph, which would keep the stage's input
        inputs = inputs.detach()
    product = WeightGradient(output_gradient, inputs, gather, add)
    accumulator = accumulator_of(weight)
    if aside and accumulator is not None:
        accumulator.set_aside(weight, product)
        return None
    return contributed(weight, product)


def meanwhile(parameter: Tensor | None) -> None:
    """Compute the products that were set aside: a collective is under way, for which the backward pass would
    only wait. ``parameter`` is one of a layer that is trained, if it has one."""
    accumulator = None if parameter is None else accumulator_of(parameter)
    if accumulator is not None:
        accumulator.compute_aside()


def bias_gradient(bias: Tensor | None, output_gradient: Tensor) -> Tensor | None:
    """The sum of ``[tokens, out]`` over tokens: contributed (returning None), or returned; None if frozen."""
    if bias is None or not bias.requires_grad:
        return None
    return contributed(bias, Dense(output_gradient.sum(0)))


def contributed(parameter: Tensor, contribution: Contribution) -> Tensor | None:
    """A gradient: contributed (returning None), or returned; None for a frozen parameter."""
    if not parameter.requires_grad:
        return None
    accumulator = accumulator_of(parameter)
    if accumulator is not None:
        accumulator.contribute(parameter, contribution)
        return None
    if isinstance(contribution, Dense):
        return contribution.values
    gradient = torch.empty_like(parameter)
    contribution.add_to(gradient, fresh=True)
    return gradient
