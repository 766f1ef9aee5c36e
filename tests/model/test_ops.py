"""Hand-written element-wise operations against autograd's."""

import pytest
import torch
from torch.nn import functional as F

from hexad.model import ops


def _gradients(output: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # Drawn in one dtype: which numbers a seed gives differs among dtypes, and among versions of PyTorch.
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    return torch.autograd.grad((output * weights).sum(), inputs)


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 6), (1, 1)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = _random(*shape), _random(shape[-1])
    normed, wanted = ops.rms_norm(x, weight, 1e-3), F.rms_norm(x, (shape[-1],), weight, 1e-3)
    torch.testing.assert_close(normed, wanted)
    torch.testing.assert_close(_gradients(normed, x, weight), _gradients(wanted, x, weight))


def test_swiglu() -> None:
    x = _random(5, 14)
    gate, up = x.chunk(2, dim=-1)
    result, wanted = ops.swiglu(x), F.silu(gate) * up
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(_gradients(result, x), _gradients(wanted, x))


def test_rotate() -> None:
    x, angles = _random(5, 3, 8), torch.arange(20, dtype=torch.float64).view(5, 1, 4)
    cos, sin = angles.cos(), angles.sin()
    as_complex = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos, sin)
    wanted = torch.cat((as_complex.real, as_complex.imag), dim=-1)
    rotated = ops.rotate(x, cos, sin)
    torch.testing.assert_close(rotated, wanted)
    torch.testing.assert_close(_gradients(rotated, x), _gradients(wanted, x))


def test_rotate_pairs() -> None:
    """Of the last elements, neighbours as real and imaginary parts."""
    x, angles = _random(5, 3, 11), torch.arange(20, dtype=torch.float64).view(5, 1, 4)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.view_as_complex(x[..., 3:].unflatten(-1, (4, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    wanted = torch.cat((x[..., :3], turned), dim=-1)
    rotated = ops.rotate_pairs(x, cos, sin)
    torch.testing.assert_close(rotated, wanted)
    torch.testing.assert_close(_gradients(rotated, x), _gradients(wanted, x))
    torch.testing.assert_close(ops._turned_pairs(x, cos, sin), wanted)


@pytest.mark.parametrize("value", [3, 9, 11])
def test_keys_and_values(value: int) -> None:
    """Against plain operations: values narrower than keys, as wide, and wider."""
    widths = ops.Widths(5, 4, value, max(9, value))
    kv, key = _random(6, 3, 5 + value), _random(6, 1, 4)
    keys = torch.cat((kv[..., :5], key.expand(-1, 3, -1)), dim=-1)
    padded = [F.pad(x, (0, widths.padded - x.shape[-1])) for x in (keys, kv[..., 5:])]
    wanted, result = torch.cat(padded, dim=1), ops.keys_and_values(kv, key, widths)
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(_gradients(result, kv, key), _gradients(wanted, kv, key))


def test_bf16_norm_is_computed_in_float32() -> None:
    x, weight = _random(64, 512, dtype=torch.bfloat16), _random(512, dtype=torch.bfloat16)
    wide_x, wide_weight = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    wanted, normed = F.rms_norm(wide_x, (512,), wide_weight, 1e-5), ops.rms_norm(x, weight, 1e-5)
    results = zip(
        (normed, *_gradients(normed, x, weight)), (wanted, *_gradients(wanted, wide_x, wide_weight))
    )
    for name, (ours, theirs), roundings in zip(("y", "dx", "dw"), results, (2, 2, 2)):
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert error < roundings * 2**-9, name  # a rounding to 8 bits is off by 2^-9 at most


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 7), (13, 11), (301, 701), (3, 300_000)])
def test_weighted_swiglu(rows: int, width: int) -> None:
    """Against autograd, in one block of rows, in several, and in blocks of one row."""
    gate_up, weights = _random(rows, 2 * width), _random(rows)
    gate, up = gate_up.chunk(2, dim=-1)
    wanted, result = F.silu(gate) * up * weights[:, None], ops.weighted_swiglu(gate_up, weights)
    torch.testing.assert_close(result, wanted)
    gradient = torch.randn_like(wanted)
    found = torch.autograd.grad(result, (gate_up, weights), gradient)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, (gate_up, weights), gradient))


def test_the_weight_comes_first_in_fp16() -> None:
    """Gradients are finite where they are without it not: 30000 x 4 is above fp16's largest number."""
    gate_up = torch.tensor([[-8.0, 4.0], [1.0, 40.0]], dtype=torch.float16, requires_grad=True)
    weights = torch.tensor([0.1, 0.05], requires_grad=True)
    gradient = torch.tensor([[30000.0], [3000.0]], dtype=torch.float16)
    result = ops.weighted_swiglu(gate_up, weights)
    (found,) = torch.autograd.grad(result, gate_up, gradient)
    gate, up = (part.double() for part in gate_up.detach().chunk(2, dim=-1))
    weighted = gradient.double() * weights.detach().double()[:, None]
    sigmoid = gate.sigmoid()
    wanted = torch.cat((weighted * up * sigmoid * (1 + gate * (1 - sigmoid)), weighted * gate * sigmoid), 1)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=0)
