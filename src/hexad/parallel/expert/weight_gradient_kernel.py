"""Weight gradients of experts, added to their bucket by one kernel on GPUs.

PyTorch's grouped product cannot add to what is there, nor return float32: its result would be written, read
and added in passes of their own. Here one program computes a tile of one expert's matrix, over all rows of
the expert, and adds it in place. Offsets are read on the device, and each sum has one order.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE, ROWS = 128, 64
"""Outputs and inputs of a tile, and rows that are multiplied at a time."""


@triton.jit
def weight_gradients(  # type: ignore[no-untyped-def]
    gradient,
    inputs,
    offsets,
    total,
    outs,
    ins,
    fresh: tl.constexpr,
    tile: tl.constexpr,
    rows: tl.constexpr,
):
    """One tile of ``total[expert] (+)= gradient[rows of the expert].T @ inputs[rows of the expert]``.

    Programs are numbered ``[tiles of outputs, tiles of inputs, experts]``. Operands and total are contiguous;
    sums are float32.
    """
    expert = tl.program_id(2)
    first = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    out = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    partial = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(first, end, rows):
        row = (start + tl.arange(0, rows)).to(tl.int64)
        inside = row < end
        left = tl.load(
            gradient + row[None, :] * outs + out[:, None],
            mask=inside[None, :] & (out < outs)[:, None],
            other=0.0,
        )
        right = tl.load(
            inputs + row[:, None] * ins + column[None, :],
            mask=inside[:, None] & (column < ins)[None, :],
            other=0.0,
        )
        partial = tl.dot(left, right, partial)
    place = total + (expert.to(tl.int64) * outs + out[:, None]) * ins + column[None, :]
    known = (out < outs)[:, None] & (column < ins)[None, :]
    if not fresh:
        partial += tl.load(place, mask=known, other=0.0).to(tl.float32)
    tl.store(place, partial.to(total.dtype.element_ty), mask=known)


def add_weight_gradients(
    total: Tensor, gradient: Tensor, inputs: Tensor, offsets: Tensor, fresh: bool
) -> None:
    """Add every expert's ``gradient.T @ inputs`` of its rows to ``total``, or overwrite it.

    Args:
        total: ``[experts, out, in]``, contiguous.
        gradient: ``[rows, out]``.
        inputs: ``[rows, in]``.
        offsets: int32 ``[experts]``, where the rows of each expert end.
        fresh: overwrite.
    """
    experts, outs, ins = total.shape
    grid = (triton.cdiv(outs, TILE), triton.cdiv(ins, TILE), experts)
    weight_gradients[grid](
        gradient.contiguous(), inputs.contiguous(), offsets, total, outs, ins, fresh, TILE, ROWS, num_warps=8
    )
