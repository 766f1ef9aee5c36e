"""The pointwise operations of a transformer, with hand-written backward passes.

Each is a forward and a backward half. On a GPU both are compiled, each into one or two kernels; on a CPU,
where eager PyTorch makes a pass over memory per arithmetic operation, they are written to make few.
``tests/model/test_ops.py`` holds both to autograd's results. Inside a graph of ``run.compile: full``, and on
a GPU without compilation, PyTorch's own functions serve.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hexad.parallel.contributions import Dense, applied, contributed
from hexad.parallel.pointwise import maybe_compiled, widened

from .experts_inventory import ACTIVATED


def by_hand(x: Tensor, compiled: bool) -> bool:
    """Whether the hand-written halves serve."""
    return (compiled or x.device.type == "cpu") and not torch.compiler.is_compiling()


# RMSNorm


def rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised ``x [..., width]``, each row's factor ``[..., 1]`` in at least float32)."""
    wide = widened(x)
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight), scale


def rms_backward(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of ``x [..., width]``, of ``weight [width]`` in at least float32)."""
    wide = x.to(scale.dtype)
    product = gradient * wide
    flat = product.view(-1, x.shape[-1])
    if torch.compiler.is_compiling():
        along = (product * weight).sum(-1, keepdim=True)
        grad_weight = (flat * scale.view(-1, 1)).sum(0)
    else:  # sums as products, which make no copy
        along = (flat @ weight.to(scale.dtype)).view_as(scale)
        grad_weight = (scale.view(1, -1) @ flat).view(-1)
    # d/dx of x * scale(x): the part along x shrinks by scale^3 / width.
    along = along * scale.pow(3) / -x.shape[-1]
    grad_x = (gradient.to(scale.dtype) * weight).mul_(scale).addcmul_(wide, along)
    return grad_x.to(x.dtype), grad_weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, compiled: bool) -> Tensor:
        y, scale = maybe_compiled(rms_forward, compiled)(x, weight.detach(), eps)
        ctx.save_for_backward(x, scale)
        ctx.weight, ctx.compiled = weight, compiled
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        backward = maybe_compiled(rms_backward, ctx.compiled)
        grad_x, grad_weight = backward(gradient, x, scale, ctx.weight.detach())
        return grad_x, contributed(ctx.weight, Dense(grad_weight)), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, compiled: bool = False) -> Tensor:
    """RMSNorm of ``x [..., width]`` (Zhang & Sennrich, arXiv 1910.07467), computed in at least float32."""
    if by_hand(x, compiled):
        return applied(_RmsNorm, x, weight, eps, compiled)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


# LayerNorm


def layer_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised ``x [..., width]``, each row's mean ``[..., 1]``, its reciprocal deviation)."""
    return torch.native_layer_norm(x, (x.shape[-1],), weight, bias, eps)


def layer_backward(
    gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x [..., width]``, ``weight [width]`` and ``bias [width]``."""
    return torch.ops.aten.native_layer_norm_backward(
        gradient, x, (x.shape[-1],), mean, deviation, weight, bias, [True, True, True]
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x [..., width]`` (Ba et al., arXiv 1607.06450), one kernel on every device."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


# Activations


def _swiglu_forward(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """``[tokens, width]``, ``[tokens, 2 * width]`` -> the gradient of ``gate_up``."""
    gate, up = gate_up.chunk(2, dim=-1)
    if torch.compiler.is_compiling():
        sigmoid = gate.sigmoid()
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((gradient * up * slope, gradient * gate * sigmoid), dim=-1)
    result = torch.empty_like(gate_up)
    grad_gate, grad_up = result.chunk(2, dim=-1)
    torch.mul(F.silu(gate), gradient, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=grad_gate)
    return result


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.compiled = compiled
        return maybe_compiled(_swiglu_forward, compiled)(gate_up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return maybe_compiled(_swiglu_backward, ctx.compiled)(gradient, gate_up), None


def swiglu(gate_up: Tensor, compiled: bool = False) -> Tensor:
    """``silu(gate) * up`` of ``[tokens, 2 * width]`` = ``[gate | up]`` (Shazeer, arXiv 2002.05202)."""
    if not torch.compiler.is_compiling():  # autograd would keep silu(gate)
        return applied(_SwiGlu, gate_up, compiled)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _weighted_forward(gate_up: Tensor, weights: Tensor) -> Tensor:
    return _swiglu_forward(gate_up).mul_(weights[:, None])


def _weighted_backward(gradient: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``gate_up [rows, 2 * width]`` and of ``weights [rows]``."""
    if torch.compiler.is_compiling() or gate_up.device.type != "cpu":
        of_weights = (gradient * _swiglu_forward(gate_up)).sum(-1, dtype=weights.dtype)
        return _swiglu_backward((gradient * weights[:, None]).to(gradient.dtype), gate_up), of_weights
    result, of_weights = torch.empty_like(gate_up), torch.empty_like(weights)
    step = max(1, ACTIVATED // max(1, gate_up.shape[1]))
    for first in range(0, len(gate_up), step):
        rows = slice(first, first + step)
        (gate, up), (grad_gate, grad_up) = (whole[rows].chunk(2, dim=-1) for whole in (gate_up, result))
        inner, activated = gradient[rows], F.silu(gate)
        torch.sum((activated * up).mul_(inner), -1, dtype=weights.dtype, out=of_weights[rows])
        # The weight first: in fp16 the product without it may be too large.
        weighted = torch.mul(inner, weights[rows, None], out=grad_up)
        torch.ops.aten.silu_backward.grad_input(weighted * up, gate, grad_input=grad_gate)
        weighted.mul_(activated)
    return result, of_weights


class _WeightedSwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.compiled = compiled
        return maybe_compiled(_weighted_forward, compiled)(gate_up, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return *maybe_compiled(_weighted_backward, ctx.compiled)(gradient, *ctx.saved_tensors), None


def weighted_swiglu(gate_up: Tensor, weights: Tensor, compiled: bool = False) -> Tensor:
    """:func:`swiglu` of ``[rows, 2 * width]``, each row times its weight ``[rows]``, which may be wider:
    what an expert multiplies next is weighted, so that its output is not kept."""
    return applied(_WeightedSwiGlu, gate_up, weights, compiled)


def weighted_gelu(x: Tensor, weights: Tensor, compiled: bool = False) -> Tensor:
    """:func:`gelu` of ``[rows, width]``, each row times its weight ``[rows]``."""
    return (F.gelu(x, approximate="tanh") * weights[:, None]).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks & Gimpel, arXiv 1606.08415), one kernel on every device."""
    return F.gelu(x, approximate="tanh")


# Rotary positions


def _pairs(x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of what :func:`rotate_pairs` leaves alone, and of the first and second elements of its pairs."""
    return x[..., :-width], x[..., -width::2], x[..., 1 - width :: 2]


def _turned_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate_pairs` by plain autograd."""
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].unflatten(-1, (-1, 2))
    signs = torch.arange(-1, 2, 2, device=x.device, dtype=x.dtype)  # compiled, one kernel with all the rest
    turned = pairs * cos.unsqueeze(-1) + pairs.flip(-1) * (sin.unsqueeze(-1) * signs)
    return torch.cat((x[..., :-width], turned.flatten(-2)), dim=-1)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    if torch.compiler.is_compiling():
        return _turned_pairs(x, cos, sin * direction)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (rest, first, second), (out_rest, out_first, out_second) = (
        _pairs(part, 2 * cos.shape[-1]) for part in (x, out)
    )
    out_rest.copy_(rest)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate` by plain autograd."""
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., width:]), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    if torch.compiler.is_compiling():
        return _turned(x, cos, sin * direction)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    out_first, out_second = out[..., :width].chunk(2, dim=-1)
    out[..., width:] = x[..., width:]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, compiled: bool, turn: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turn = maybe_compiled(turn, compiled)
        return ctx.turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return ctx.turn(gradient, cos, sin, -1.0), None, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, compiled: bool = False) -> Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864), pairing element ``i`` with ``i + rotary width / 2``.

    Args:
        x: ``[tokens, heads, width]``, of which the first ``rotary width`` elements are rotated.
        cos, sin: ``[tokens, 1, rotary width / 2]``.
        compiled: see :mod:`hexad.parallel.pointwise`.
    """
    if by_hand(x, compiled):
        return applied(_Rotate, x, cos, sin, compiled, _turn)
    return _turned(x, cos, sin)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, compiled: bool = False) -> Tensor:
    """Rotate the last ``rotary width`` elements, in pairs of neighbours."""
    if by_hand(x, compiled):
        return applied(_Rotate, x, cos, sin, compiled, _turn_pairs)
    return _turned_pairs(x, cos, sin)


# Keys and values of latent attention


class Widths(NamedTuple):
    """Elements of a head in latent attention.

    Attributes:
        nope, rope: of its query and key: without positions, and rotated.
        value: of its value.
        padded: of all three as attention computes them, whose kernels take one width: the rest are zeros.
    """

    nope: int
    rope: int
    value: int
    padded: int


def _assemble(kv: Tensor, key: Tensor, widths: Widths) -> Tensor:
    heads, (nope, rope, value, padded) = kv.shape[1], widths
    out = kv.new_empty((len(kv), 2 * heads, padded))
    keys, values = out.split(heads, dim=1)
    keys[..., :nope], values[..., :value] = kv[..., :nope], kv[..., nope:]
    keys[..., nope : nope + rope] = key
    for part, end in ((keys, nope + rope), (values, value)):
        if end < padded:
            part[..., end:] = 0
    return out


def _disassemble(gradient: Tensor, widths: Widths) -> tuple[Tensor, Tensor]:
    """``[tokens, 2 * heads, padded]`` -> the gradients of :func:`keys_and_values`' ``kv`` and ``key``."""
    heads, (nope, rope, value, _) = gradient.shape[1] // 2, widths
    keys, values = gradient.split(heads, dim=1)
    kv = torch.cat((keys[..., :nope], values[..., :value]), dim=-1)
    return kv, keys[..., nope : nope + rope].sum(1, keepdim=True)


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv: Tensor, key: Tensor, widths: Widths) -> Tensor:
        ctx.widths = widths
        return _assemble(kv, key, widths)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_disassemble(gradient, ctx.widths), None


def keys_and_values(kv: Tensor, key: Tensor, widths: Widths) -> Tensor:
    """The keys of all heads, then their values: ``[tokens, 2 * heads, padded width]``.

    Args:
        kv: ``[tokens, heads, nope + value]``.
        key: ``[tokens, 1, rope]``, rotated: the part that all heads' keys have in common.
        widths: of a head.
    """
    if not torch.compiler.is_compiling():
        return applied(_KeysAndValues, kv, key, widths)
    nope, rope, value, padded = widths
    keys = torch.cat((kv[..., :nope], key.expand(-1, kv.shape[1], -1)), dim=-1)
    parts = (keys, padded - nope - rope), (kv[..., nope:], padded - value)
    return torch.cat([F.pad(part, (0, missing)) for part, missing in parts], dim=1)
