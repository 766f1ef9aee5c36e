"""Normal random numbers by their place in a global tensor: the same in every layout, host and device.

A value is a function of (seed, name, global index) alone, in the manner of the counter-based generators of
Salmon et al. (SC 2011), so that a rank draws only what it keeps. Bits come from SplitMix64 (Steele, Lea and
Flood, OOPSLA 2014), normal values from them by the method of Box and Muller: one hash gives the values of one
column in two neighbouring rows.

Only operations are used whose results integer arithmetic or IEEE 754 prescribes, one at a time: they agree to
the last bit on every processor. A library's logarithms, sines and fused products differ between the vector
units of CPUs, and between CPUs and GPUs; so do square roots of float32 (MKL rounds one in six wrongly).
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from .rectangle import Rectangle

_PAIRS_PER_THREAD = 1 << 16
_PAIRS_ON_GPU = 1 << 20
"""Pairs drawn at a time, with 32 bytes of temporaries each."""

# SplitMix64's constants, as signed numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)

# Polynomials that interpolate at Chebyshev's nodes, with errors below those of float32.
_SINE = (
    *(0.999999995698809, -0.1666665794784598, 0.008333050170671296),
    *(-0.0001980901740866993, 2.605107635354352e-06),
)
"""``sin(x) / x`` in ``x * x``, up to ``pi / 2``."""
_COSINE = (
    *(0.9999999997791541, -0.49999999355437885, 0.041666636159724685),
    *(-0.0013888360284408654, 2.4760109672914352e-05, -2.605065748304502e-07),
)
"""``cos(x)`` in ``x * x``, up to ``pi / 2``."""
_ATANH = (-3.999999997262637, -1.3333363067630422, -0.7994970103596671, -0.5984878094578581)
"""``-4 atanh(s) / s`` in ``s * s``, for mantissas between ``sqrt(1/2)`` and ``sqrt(2)``."""
_SQRT_HALF = 0x3F3504F3  # as a float32's bits
_TWO_LN_2 = 1.3862943611198906
_PI = 3.141592653589793


@torch.no_grad()
def fill_normal(target: Tensor, rectangle: Rectangle, std: float, seed: int) -> None:
    """Set part of a global tensor to its initial values, drawn in float32.

    Args:
        target: of the rectangle's sizes, contiguous, in any floating-point format.
        rectangle: which part it is.
        std: standard deviation.
        seed: of the run.
    """
    digest = hashlib.blake2b(f"{seed}/{rectangle.name}".encode(), digest_size=16).digest()
    start, key = struct.unpack("<2q", digest)
    width, left, count = rectangle.shape[-1], rectangle.offset[-1], rectangle.sizes[-1]
    if not rectangle.numel:
        return
    draw = _Pairs(target.device, key, std, rectangle.numel)
    for first, part in _runs(rectangle, target):
        low, high = first // 2, -(-(first + part.shape[0]) // 2)
        breadth = min(count, draw.most)
        height = max(1, draw.most // breadth)
        for top, side in product(range(low, high, height), range(0, count, breadth)):
            pairs = torch.arange(top, min(top + height, high), device=target.device)
            columns = torch.arange(left + side, left + min(side + breadth, count), device=target.device)
            places = (pairs.mul_(width).mul_(_GAMMA).add_(start)[:, None], columns.mul_(_GAMMA))
            for parity, values in enumerate(draw(*places)):
                # Of the first and of the last pair perhaps only one row belongs to the part.
                begin = max(top, -(-(first - parity) // 2))
                end = min(top + len(values), -(-(first + part.shape[0] - parity) // 2))
                rows = slice(2 * begin + parity - first, max(0, 2 * end + parity - first), 2)
                part[rows, side : side + len(columns)] = values[begin - top : end - top]


def _runs(rectangle: Rectangle, target: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A rectangle as runs of neighbouring rows of its tensor flattened to a matrix: (number of the first,
    view of the target). A matrix is one run."""
    outer, extents, sizes = rectangle.offset[:-1], rectangle.shape[:-1], rectangle.sizes[:-1]
    along = next((dim for dim in range(len(sizes)) if sizes[dim + 1 :] == extents[dim + 1 :]), 0)
    strides = [prod(extents[dim + 1 :]) for dim in range(len(extents))]
    for index in product(*(range(size) for size in sizes[:along])):
        place = [begin + at for begin, at in zip(outer, (*index, *(0 for _ in sizes[along:])))]
        yield (
            sum(at * stride for at, stride in zip(place, strides)),
            target[index].view(-1, target.shape[-1]),
        )


class _Pairs:
    """Draws pairs of values, no more than ``needed``, in memory that is used again.

    Attributes:
        most: pairs that may be drawn at a time.
    """

    def __init__(self, device: torch.device, key: int, std: float, needed: int) -> None:
        most = _PAIRS_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else _PAIRS_ON_GPU
        self.most = min(most, needed)
        self.key, self.std = key, std
        self._integers = torch.empty(2, self.most, dtype=torch.int64, device=device)
        self._floats = torch.empty(4, self.most, dtype=torch.float32, device=device)

    def __call__(self, rows: Tensor, columns: Tensor) -> Tensor:
        """float32 ``[2, rows, columns]`` of pairs at ``rows [rows, 1] + columns [columns]``, valid until the
        next call."""
        shape = (len(rows), len(columns))
        count = prod(shape)
        z, t = self._integers[:, :count]
        torch.add(rows, columns, out=z.view(shape))
        _xor_shift(z, 30, t)
        z.mul_(_FIRST).bitwise_xor_(self.key)
        _xor_shift(z, 27, t)
        z.mul_(_SECOND)
        _xor_shift(z, 31, t)
        a, b, c, d = self._floats[:, :count]
        a.copy_(torch.bitwise_right_shift(z, 40, out=t).bitwise_and_(0xFFFFFF).bitwise_or_(1))
        b.copy_(z.bitwise_left_shift_(24).bitwise_right_shift_(40).bitwise_or_(1))
        # What held the bits holds more temporaries from here on.
        e = t.view(torch.float32)[:count]
        radius = _radius(a, c, d, e, z.view(torch.float64)).mul_(self.std)
        angle = b.mul_(_PI / (1 << 24))  # half of it: up to pi / 2
        torch.mul(angle, angle, out=c)
        sine, cosine = _polynomial(c, _SINE, a).mul_(angle), _polynomial(c, _COSINE, d)
        out = z.view(torch.float32)[: 2 * count].view(2, count)
        torch.mul(cosine.mul_(sine), torch.add(radius, radius, out=b), out=out[0])
        torch.mul(sine.mul_(sine).mul_(-2.0).add_(1.0), radius, out=out[1])
        return out.view(2, *shape)


def _xor_shift(z: Tensor, by: int, temporary: Tensor) -> None:
    """``z ^= z >> by``, shifting in zeros."""
    torch.bitwise_right_shift(z, by, out=temporary)
    z.bitwise_xor_(temporary.bitwise_and_((1 << (64 - by)) - 1))


def _radius(k: Tensor, c: Tensor, d: Tensor, out: Tensor, wide: Tensor) -> Tensor:
    """``sqrt(-2 ln(k / 2^24))`` of integers; overwrites all arguments."""
    bits, exponent = k.view(torch.int32), c.view(torch.int32)
    torch.bitwise_right_shift(bits.sub_(_SQRT_HALF), 23, out=exponent)
    d.copy_(exponent).sub_(24.0).mul_(-_TWO_LN_2)
    bits.bitwise_and_(0x7FFFFF).add_(_SQRT_HALF)  # k is the mantissa now
    torch.add(k, 1.0, out=c)
    k.sub_(1.0).div_(c)
    square = _polynomial(torch.mul(k, k, out=c), _ATANH, out).mul_(k).add_(d)
    # The root of a float32 is never so near the middle of two that an error in float64's last bits matters.
    return out.copy_(wide.copy_(square).sqrt_())


def _polynomial(x: Tensor, coefficients: Sequence[float], out: Tensor) -> Tensor:
    """A polynomial by Horner's rule, without fused products."""
    torch.mul(x, coefficients[-1], out=out)
    for coefficient in coefficients[-2:0:-1]:
        out.add_(coefficient).mul_(x)
    return out.add_(coefficients[0])
