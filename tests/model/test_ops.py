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
