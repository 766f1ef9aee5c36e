"""The pointwise operations of a transformer in ``precision.exact``: those of :mod:`hexad.model.ops`, with the
same arguments, by :mod:`hexad.parallel.exact`. A token's results are the same bits whatever is computed
beside it, and wherever.

Backward passes are the ordinary ones, of the ordinary functions computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hexad.parallel import exact
from hexad.parallel.contributions import applied

from . import ops


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], usual: Callable[..., Tensor], *rest: Any
    ) -> Tensor:
        # Gradients of parameters are contributed by what they are found in.
        ctx.places = [place for place, part in enumerate(rest) if type(part) is Tensor]
        ctx.save_for_backward(*(rest[place] for place in ctx.places))
        ctx.usual = usual
        ctx.rest = [None if type(part) is Tensor else part for part in rest]
        return function(*rest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        arguments, needed = list(ctx.rest), ctx.needs_input_grad[2:]
        for place, tensor in zip(ctx.places, ctx.saved_tensors):
            arguments[place] = tensor.detach().requires_grad_(needed[place])
        with torch.enable_grad():
            result = ctx.usual(*arguments)
        inputs = [argument for argument, differentiated in zip(arguments, needed) if differentiated]
        gradients = iter(torch.autograd.grad(result, inputs, gradient, allow_unused=True))
        return None, None, *(next(gradients) if differentiated else None for differentiated in needed)


def replaced(function: Callable[..., Tensor], usual: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The result of ``function``; the backward pass runs ``usual`` again, which computes the same but for
    rounding, and differentiates that."""
    result: Tensor = applied(_Replaced, function, usual, *arguments)
    return result


# Norms


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    def normalised(x: Tensor) -> Tensor:
        wide = x.double()
        scale = 1.0 / (exact.mean(wide * wide) + eps).sqrt()
        return (wide * scale).to(x.dtype) * weight

    return exact.by_rows(normalised, x)


def rms_norm(x: Tensor, weight: Tensor, eps: float, compiled: bool = False) -> Tensor:
    """RMS norm in exact arithmetic; see :func:`hexad.model.ops.rms_norm`."""
    return replaced(_rms, ops.rms_norm, x, weight, eps)


def _layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    def normalised(x: Tensor) -> Tensor:
        wide = x.double()
        wide = wide - exact.mean(wide)
        scale = 1.0 / (exact.mean(wide * wide) + eps).sqrt()
        return (wide * scale * weight.double() + bias.double()).to(x.dtype)

    return exact.by_rows(normalised, x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm in exact arithmetic; see :func:`hexad.model.ops.layer_norm`."""
    return replaced(_layer, ops.layer_norm, x, weight, bias, eps)


# Activations and rotary positions


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * exact.sigmoid(gate) * up).to(gate_up.dtype)


def swiglu(gate_up: Tensor, compiled: bool = False) -> Tensor:
    """SwiGLU in exact arithmetic; see :func:`hexad.model.ops.swiglu`."""
    return replaced(partial(exact.by_rows, _swiglu), ops.swiglu, gate_up)


def _gelu(x: Tensor) -> Tensor:
    wide = x.float()
    # tanh(u) = 2 sigmoid(2 u) - 1
    inner = (wide + wide * wide * wide * 0.044715) * (2 * math.sqrt(2 / math.pi))
    return (wide * exact.sigmoid(inner)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """GELU in exact arithmetic; see :func:`hexad.model.ops.gelu`."""
    return replaced(partial(exact.by_rows, _gelu), ops.gelu, x)


def _weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * exact.sigmoid(gate) * up * weights[:, None]).to(gate_up.dtype)


def weighted_swiglu(gate_up: Tensor, weights: Tensor, compiled: bool = False) -> Tensor:
    """SwiGLU of rows, each times its weight, in exact arithmetic."""
    return replaced(partial(exact.by_rows, _weighted_swiglu), ops.weighted_swiglu, gate_up, weights)


def _weighted_gelu(x: Tensor, weights: Tensor) -> Tensor:
    return (_gelu(x.float()) * weights[:, None]).to(x.dtype)


def weighted_gelu(x: Tensor, weights: Tensor, compiled: bool = False) -> Tensor:
    """GELU of rows, each times its weight, in exact arithmetic."""
    return replaced(partial(exact.by_rows, _weighted_gelu), ops.weighted_gelu, x, weights)


def _softmax(scores: Tensor) -> Tensor:
    exponentials = exact.exp(scores - scores.amax(-1, keepdim=True)).double()
    unit = 2.0 ** (exact.digits_of(scores.shape[-1]) + 1 - exact.DIGITS)
    return (exponentials / exact.row_sum(exponentials, unit)).to(scores.dtype)


def softmax(scores: Tensor) -> Tensor:
    """The softmax over the last dim of float32 ``[tokens, experts]``."""
    return replaced(partial(exact.by_rows, _softmax), partial(torch.softmax, dim=-1), scores)


def sigmoid(scores: Tensor) -> Tensor:
    """The sigmoid of float32."""
    return replaced(partial(exact.by_rows, exact.sigmoid), torch.sigmoid, scores)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].float().chunk(2, dim=-1)
    cos, sin = cos.float(), sin.float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., width:]), dim=-1)


def _rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return ops._turned_pairs(x.float(), cos.float(), sin.float()).to(x.dtype)


Rotation = Callable[..., Tensor]


class _ExactRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, compiled: bool, rotated: Rotation, usual: Rotation
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.compiled, ctx.usual = compiled, usual
        return exact.by_rows(rotated, x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.usual(gradient, cos, -sin, ctx.compiled), None, None, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, compiled: bool = False) -> Tensor:
    """Rotation in exact arithmetic; see :func:`hexad.model.ops.rotate`."""
    result: Tensor = applied(_ExactRotate, x, cos, sin, compiled, _rotated, ops.rotate)
    return result


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, compiled: bool = False) -> Tensor:
    """Rotation of neighbouring elements, in exact arithmetic."""
    result: Tensor = applied(_ExactRotate, x, cos, sin, compiled, _rotated_pairs, ops.rotate_pairs)
    return result
