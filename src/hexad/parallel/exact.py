"""Sums and functions whose results depend neither on the order of additions nor on what is computed beside
them (``precision.exact``): the same bits in every layout, for every batch, by any library's products.

A floating-point sum depends on its order because it is rounded on the way. So terms are first rounded to
multiples of a common unit, small enough for the result's accuracy and so large that every partial sum is a
whole number of units below 2^53: then float64 adds without rounding, in any order, in whatever tiles a matrix
product works, on however many ranks (the error-free splitting of Ozaki et al., Numer. Algorithms 59, 2012;
reproducible sums: Demmel & Nguyen, ARITH 2013). Units follow from maxima, which have no order either.

Functions are made of additions, multiplications, divisions and roots, one PyTorch operator each, whose
results IEEE 754 defines: PyTorch's own ``exp`` differs in its last bit between the elements of a vector
register and those that are left over at the end of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hexad.comm import all_reduce
from hexad.config import ConfigError
from hexad.topology.mesh import Axis

from .exact_inventory import blocks, columns_at_a_time, parts_of
from .pointwise import widened

DIGITS = 53
"""Binary digits of a float64."""
_ALONE = Axis("tensor")

Total = Callable[[Tensor], Tensor]
"""Adds up what the ranks of an axis have."""


def check_arithmetic(device: torch.device) -> None:
    """Refuse arithmetic whose results are not those of IEEE 754, and products of float64 that are emulated
    with fewer digits.

    Raises:
        ConfigError: naming what was found.
    """
    if device.type == "meta":
        return
    for dtype in (torch.float32, torch.float64):
        least = torch.tensor([torch.finfo(dtype).smallest_normal], dtype=dtype, device=device)
        if not bool(least * 0.5):
            problem = f"found that {str(dtype).removeprefix('torch.')} numbers near 0 are flushed to it"
            raise ConfigError(
                "precision.exact", f"{problem}; call torch.set_flush_denormal(False), or set false"
            )
    size = 16 if device.type == "cpu" else 256  # large products only are emulated
    numbers = torch.arange(size * size).view(size, size) * 31_337 % 2**22 + 1
    product = torch.mm(numbers.to(device, torch.float64), numbers.t().to(device, torch.float64))
    if not torch.equal(product.cpu().long(), numbers @ numbers.t()):
        raise ConfigError(
            "precision.exact",
            f"found that products of float64 on this device ({device.type}) are not exact; if they are "
            "emulated, turn that off (CUBLAS_EMULATE_DOUBLE_PRECISION=0), or set false",
        )


def by_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply ``function`` to the rows of all tensors (the independent elements of their first dim), some at a
    time, so that its temporary memory stays small."""
    first = tensors[0]
    rows = max(1, blocks(first.device.type == "cpu").elements // max(1, first[:1].numel()))
    if first.dim() == 1 or rows >= len(first):
        return function(*tensors)
    y: Tensor | None = None
    for begin in range(0, len(first), rows):
        part = function(*(tensor[begin : begin + rows] for tensor in tensors))
        y = part.new_empty((len(first), *part.shape[1:])) if y is None else y
        y[begin : begin + rows] = part
        del part
    assert y is not None
    return y


def digits_of(number: int) -> int:
    """The least ``n`` with ``2^n >= number``: by so many binary digits a sum of ``number`` terms grows."""
    return max(0, number - 1).bit_length()


def power(x: Tensor) -> Tensor:
    """The largest powers of two not above the absolute values of float64 ``x``; 0 of 0, and not a number
    where ``x`` is none, or infinite."""
    exponent = x.view(torch.int64) & 0x7FF0000000000000
    return exponent.view(torch.float64) + (x - x)


def rounded(x: Tensor, unit: Tensor | float) -> Tensor:
    """Float32 or float64 ``x`` as multiples of ``unit``, powers of two in float64: the nearest ones, of two
    as near the even. ``x`` has less than ``2^22`` or ``2^51`` units."""
    shift = unit * (1.5 * 2.0 ** (23 if x.dtype == torch.float32 else DIGITS - 1))
    shift = shift.to(x.dtype) if isinstance(shift, Tensor) else shift
    return x.add(shift).sub_(shift)


def top(x: Tensor, axis: Axis = _ALONE) -> Tensor:
    """``[..., 1]`` float64: the power of two of each row's largest absolute value, over an axis's ranks."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1), dtype=torch.float64)
    largest = by_rows(_largest, x)
    return power(all_reduce(largest, axis, "max") if axis.size > 1 else largest)


def _largest(x: Tensor) -> Tensor:
    return widened(x).abs().amax(-1, keepdim=True).double()  # twice as fast as the norm


MOST_DIGITS = 21
"""Binary digits of numbers that are rounded in float32."""


def split(x: Tensor, unit: Tensor, smaller: Tensor | float, parts: int) -> list[Tensor]:
    """Float32 ``x`` as a sum of parts: the first of multiples of ``unit``, a second one of those of ``unit *
    smaller``; what remains is dropped.

    Args:
        x: less than ``2^21`` units, and than ``2^115``, above which parts are no numbers.
        unit: float64, broadcast.
        smaller: a power of two, broadcast: ``2^-n`` where the first part has ``n`` digits.
        parts: one or two.
    """
    first = rounded(x, unit)
    if parts == 1:
        return [first]
    return [first, rounded(x - first, unit * smaller)]


# Sums


def row_sum(x: Tensor, unit: Tensor | float) -> Tensor:
    """``[..., 1]``: the sums of float64 rows. ``unit`` is that of the terms: no sum has ``2^53`` of them."""
    return rounded(x, unit).sum(-1, keepdim=True)


def mean(x: Tensor) -> Tensor:
    """``[..., 1]``: the means of float64 rows."""
    count = x.shape[-1]
    return row_sum(x, top(x) * 2.0 ** (digits_of(count) + 2 - DIGITS)) / count


# Products


class Digits(NamedTuple):
    """Into how many binary digits the operands of a product are rounded, relative to the largest element of a
    row. What a sum of products needs is divided among them; inputs, whose elements differ more, get more.

    Attributes:
        weight: of a weight.
        part: of each part of an input.
        parts: of an input.
    """

    weight: int
    part: int
    parts: int

    @classmethod
    def of(cls, dtype: torch.dtype, features: int) -> Digits:
        """The digits for inputs of a format, and sums of so many terms."""
        room = DIGITS - digits_of(features)
        parts = parts_of(dtype.itemsize)
        part = min(MOST_DIGITS, (room + 3) // (parts + 1))
        return cls(room - part, part, parts)


def weight_on_grid(weight: Tensor, dtype: torch.dtype, axis: Axis = _ALONE) -> Tensor:
    """``[out, in]`` float64: the weight as products of inputs in ``dtype`` use it. With an axis, ``weight``
    has this rank's columns."""
    digits = Digits.of(dtype, weight.shape[1] * axis.size)
    return by_rows(_rounded, weight, top(weight, axis) * 2.0 ** (1 - digits.weight))


def _rounded(x: Tensor, unit: Tensor) -> Tensor:
    return rounded(x.double(), unit)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    axis: Axis = _ALONE,
    total: Total | None = None,
) -> Tensor:
    """``x [tokens, in]``, ``weight [out, in]`` -> ``x W^T + b`` in the format of ``x``, with an error like
    that of a product in float32, or for 16-bit formats below that of rounding the result.

    Args:
        x: float32, bfloat16 or float16.
        weight: in that format, or float64 from :func:`weight_on_grid`.
        bias: ``[out]``.
        axis: whose ranks have other columns of ``x`` and ``weight``.
        total: adds up their products, float64 ``[tokens, out]``, where the axis has several ranks; may keep
            only some of the tokens.
    """
    if total is None or axis.size == 1:
        y = x.new_empty((len(x), len(weight)))

        def finish(rows: slice, columns: slice, parts: Sequence[Tensor]) -> None:
            y[rows, columns] = _added(parts, None if bias is None else bias[columns])

        _multiply(x, weight, axis, finish)
        return y
    shape = len(x), len(weight)
    sums = [x.new_empty(shape, dtype=torch.float64) for _ in range(parts_of(x.itemsize))]

    def place(rows: slice, columns: slice, parts: Sequence[Tensor]) -> None:
        for whole, part in zip(sums, parts):
            whole[rows, columns] = part

    _multiply(x, weight, axis, place)
    return _added([total(sums.pop(0)) for _ in range(len(sums))], bias).to(x.dtype)


def _multiply(
    x: Tensor, weight: Tensor, axis: Axis, take: Callable[[slice, slice, Sequence[Tensor]], None]
) -> None:
    """Give ``take`` the rows and columns of each block of a product, and in float64 the products of each part
    of the input."""
    digits = Digits.of(x.dtype, x.shape[1] * axis.size)
    unit = top(x, axis) * 2.0 ** (1 - digits.part)
    tops = None if weight.dtype == torch.float64 else top(weight, axis) * 2.0 ** (1 - digits.weight)
    cpu = x.device.type == "cpu"
    step, rows_at_a_time = columns_at_a_time(weight.shape[1], cpu), blocks(cpu).rows
    for begin in range(0, len(weight), step):
        columns = slice(begin, begin + step)
        turned = (weight[columns] if tops is None else _rounded(weight[columns], tops[columns])).t()
        for first in range(0, len(x), rows_at_a_time):
            rows = slice(first, first + rows_at_a_time)
            pieces = _pieces(x[rows], unit[rows], digits)
            take(rows, columns, torch.mm(pieces, turned).chunk(digits.parts))
            del pieces
        del turned


def _pieces(x: Tensor, unit: Tensor, digits: Digits) -> Tensor:
    """float64 ``[parts * tokens, in]``: the parts of the input, one after the other."""
    parts = split(x.float(), unit, 2.0**-digits.part, digits.parts)
    pieces = x.new_empty((len(parts) * len(x), x.shape[1]), dtype=torch.float64)
    for piece, part in zip(pieces.chunk(len(parts)), parts):
        piece.copy_(part)
    return pieces


def _added(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The sum of a product's parts, and the bias, in this order, in the place of the first part."""
    whole, *others = parts
    for part in others:
        whole.add_(part)
    return whole if bias is None else whole.add_(bias.double())


# Functions

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the first has few digits: n * it is not rounded
_MAGIC = 1.5 * 2.0**23  # added to a float32, it leaves the nearest whole number in the last digits
_EXP = (
    0.0013814570338171275,
    0.008368745847070565,
    0.041668390268595666,
    0.16666520391106657,
    0.4999999343412745,
)
"""Coefficients of ``(e^r - 1 - r) / r^2``, the highest power first: the least largest error, ``2^-28``."""


def exp(x: Tensor) -> Tensor:
    """``e^x`` of float32, to about one unit in the last place; of less than -87 and more than 88 that of
    these. By Cody and Waite's reduction to ``2^n e^r``, ``|r| <= ln(2) / 2``, and a polynomial."""
    r = x.clamp(-87.0, 88.0)
    n = r.mul(_LOG2_E).add_(_MAGIC)
    bits = n.view(torch.int32) << 23
    n.sub_(_MAGIC)
    r.sub_(n * _LN2_HIGH).sub_(n.mul_(_LN2_LOW))
    y = r * _EXP[0]
    for coefficient in _EXP[1:]:
        y.add_(coefficient).mul_(r)
    y.mul_(r).add_(r).add_(1.0)
    y.view(torch.int32).add_(bits)
    return y


_SQRT_HALF = math.sqrt(0.5)


def log(x: Tensor) -> Tensor:
    """The natural logarithm of positive float64, to about ``2^-50``: of ``2^n m``, ``n ln(2)`` and the series
    of ``2 artanh((m - 1) / (m + 1))``."""
    whole = power(x)
    m = x / whole  # [1, 2)
    n = ((whole.view(torch.int64) >> 52) - 1023).double()
    large = m > 2 * _SQRT_HALF
    m, n = torch.where(large, m * 0.5, m), torch.where(large, n + 1, n)
    u = (m - 1) / (m + 1)
    square = u * u
    y = torch.full_like(u, 1 / 25)
    for odd in range(23, 0, -2):
        y = y * square + 1 / odd
    return n * math.log(2) + y * u * 2


_QUARTERS = float.fromhex("0x1.45f306dc9c883p-1")  # 2 / pi
_HALF_PI = tuple(
    map(
        float.fromhex,
        ("0x1.921fb54p+0", "0x1.10b46p-30", "0x1.1a6263p-54", "0x1.8a2e03707344ap-81"),
    )
)
"""``pi / 2`` as a sum; the first three have 27 digits, so that multiples of them below ``2^26`` are exact."""
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)
"""Coefficients of fdlibm's polynomials of sine and cosine up to ``pi / 4`` (Sun Microsystems, 1993), the
highest power first."""


def cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of float64 angles up to ``2^26``, to about one unit in the last place: C libraries
    differ between versions."""
    shift = 1.5 * 2.0 ** (DIGITS - 1)
    n = x.mul(_QUARTERS).add_(shift).sub_(shift)
    r = x.clone()
    for part in _HALF_PI:
        r.sub_(n * part)
    square = r * r
    sine, cosine = square * _SIN[0], square * _COS[0]
    for place in range(1, len(_SIN)):
        sine.add_(_SIN[place]).mul_(square)
        cosine.add_(_COS[place]).mul_(square)
    sine.mul_(r).add_(r)
    cosine.mul_(square).sub_(square * 0.5).add_(1.0)
    quarter = n.long() & 3
    odd = (quarter & 1).bool()
    swapped_cos, swapped_sin = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    negative_cos, negative_sin = ((quarter + 1) & 2).bool(), (quarter & 2).bool()
    return (
        torch.where(negative_cos, -swapped_cos, swapped_cos),
        torch.where(negative_sin, -swapped_sin, swapped_sin),
    )


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e^-x)`` of float32."""
    return 1.0 / (exp(-x) + 1.0)


# Softmax over a vocabulary


def log_normaliser(
    logits: Tensor, vocab: int, axis: Axis = _ALONE, overwrite: bool = False
) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of exponentials of logits, over all columns.

    Args:
        logits: float32 ``[tokens, columns]``, this rank's of an axis; -inf in padding.
        vocab: real columns of all ranks.
        axis: of the ranks.
        overwrite: the logits become exponentials, relative to the highest logit of each token.

    Returns:
        float64 ``[tokens, 1]``: the logarithm of the sum of all exponentials (a token's log-probability is
        its logit less that), and the sum of those relative to the highest logit.
    """
    highest = all_reduce(logits.amax(-1, keepdim=True), axis, "max")
    total, unit = highest.double(), 2.0 ** (digits_of(vocab) + 1 - DIGITS)
    rows = max(1, blocks(logits.device.type == "cpu").elements // max(1, logits.shape[1]))
    for part, high, sums in zip(logits.split(rows), highest.split(rows), total.split(rows)):
        exponentials = exp(part - high)
        sums.copy_(row_sum(exponentials.double(), unit))
        if overwrite:
            part.copy_(exponentials)
        del exponentials
    total = all_reduce(total, axis)
    return highest.double() + log(total), total


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities of all columns of float32 ``[tokens, vocab]``."""
    return (logits.double() - log_normaliser(logits, logits.shape[1])[0]).float()
