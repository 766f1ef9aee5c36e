"""Megatron-LM's ``vocab_parallel_cross_entropy`` over Hexad's."""

from __future__ import annotations

from typing import Any

import torch

from hexad.config import HexadError
from hexad.parallel.tensor.cross_entropy import token_losses_
from hexad.topology.mesh import Axis

from . import parallel_state


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The loss of every token, in nats, in at least float32; the same on all tensor ranks.

    Args:
        vocab_parallel_logits: ``[s, b, vocab / size]``, this rank's columns; any leading dims.
        target: int64 ``[s, b]``, the leading dims; -100 for no loss.
        label_smoothing: 0.

    Returns:
        ``[s, b]``.

    Raises:
        HexadError: label smoothing, or shapes that do not fit.
    """
    if label_smoothing:
        raise HexadError(f"label_smoothing: found {label_smoothing}; it is not supported: use 0")
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise HexadError(
            f"target: found shape {tuple(target.shape)} with logits of shape "
            f"{tuple(vocab_parallel_logits.shape)}; expected all but the last dim"
        )
    axis = parallel_state.get_mesh().tensor
    losses: torch.Tensor = _CrossEntropy.apply(vocab_parallel_logits, target, axis)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, axis: Axis) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = logits.flatten(0, -2).to(wide, copy=True, memory_format=torch.contiguous_format)
        wanted = ctx.needs_input_grad[0]
        losses = token_losses_(
            rows, target.flatten(), rows.shape[1] * axis.size, axis, 1.0 if wanted else None
        )
        ctx.dtype = logits.dtype
        ctx.save_for_backward(rows if wanted else None)  # they are the losses' gradient now
        return losses.view(target.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        found = rows * gradient.reshape(-1, 1)
        return found.view(*gradient.shape, -1).to(ctx.dtype), None, None
