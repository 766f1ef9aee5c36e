"""The element-wise operations of a transformer.

On a GPU they are PyTorch's own (fused, or left to ``torch.compile``). On a CPU, where eager PyTorch makes a
pass over memory per arithmetic operation, RMSNorm, SwiGLU and rotary positions have hand-written backward
passes that make fewer; ``tests/model/test_ops.py`` holds them to autograd's results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from hexad.parallel.gradients import own_gradient

from .recompute import recomputable


def _by_hand(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        weight = ctx.weight
        wide = x.to(scale.dtype)
        product = gradient * wide
        flat = product.view(-1, x.shape[-1])
        grad_weight = own_gradient(weight, (scale.view(1, -1) @ flat).view(-1))
        # d/dx of x * scale(x): the part along x shrinks by scale^3 / width.
        along = (flat @ weight.to(scale.dtype)).view_as(scale) * scale.pow(3) / -x.shape[-1]
        grad_x = (gradient.to(scale.dtype) * weight).mul_(scale).addcmul_(wide, along)
        return grad_x.to(x.dtype), grad_weight, None


@recomputable
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim (Zhang & Sennrich, arXiv 1910.07467), computed in at least float32."""
    if _by_hand(x):
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(F.silu(gate), gradient, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=grad_gate)
        return result


@recomputable
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[tokens, 2 * width]`` = ``[gate | up]`` (Shazeer, arXiv 2002.05202)."""
    if _by_hand(gate_up):
        return _SwiGlu.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@recomputable
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dim (Ba et al., arXiv 1607.06450)."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@recomputable
def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form (Hendrycks & Gimpel, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float) -> torch.Tensor:
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
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1.0), None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864), pairing element ``i`` with ``i + rotary width / 2``.

    Args:
        x: ``[tokens, heads, width]``, of which the first ``rotary width`` elements are rotated.
        cos, sin: ``[tokens, 1, rotary width / 2]``.
    """
    if _by_hand(x):
        return _Rotate.apply(x, cos, sin)
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., width:]), dim=-1)
