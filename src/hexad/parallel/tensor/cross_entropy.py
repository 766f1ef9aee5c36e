"""Vocabulary-parallel cross-entropy (Shoeybi et al., arXiv 1909.08053, section 3).

No rank ever holds full logits: only each token's maximum, sum of exponentials and target logit cross the
tensor axis.
"""

from __future__ import annotations

import torch

from hexad.comm import all_reduce
from hexad.topology.mesh import Axis

from ..pointwise import maybe_compiled

IGNORED = -100
"""Label of a position that has no target (the convention of torch and Hugging Face)."""
_CACHED_ELEMENTS = 1 << 20  # on a CPU, rows are worked on in slices of about this many logits


def _exponentials(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite ``[tokens, columns]`` with ``exp(logits - highest)``; return each row's highest and sum."""
    if logits.device.type != "cpu":
        highest = logits.amax(dim=1).clamp_(min=torch.finfo(logits.dtype).min)
        return highest, logits.sub_(highest[:, None]).exp_().sum(dim=1)
    highest = logits.new_empty(logits.shape[0])
    sums = torch.empty_like(highest)
    rows = max(1, _CACHED_ELEMENTS // logits.shape[1])
    for block, high, total in zip(logits.split(rows), highest.split(rows), sums.split(rows)):
        torch.amax(block, dim=1, out=high)
        high.clamp_(min=torch.finfo(logits.dtype).min)  # a rank may hold padding only
        torch.sum(block.sub_(high[:, None]).exp_(), dim=1, out=total)
    return highest, sums


@torch.no_grad()
def cross_entropy_sum_(
    logits: torch.Tensor, labels: torch.Tensor, vocab: int, axis: Axis, scale: float | None
) -> torch.Tensor:
    """Sum of :func:`token_losses_`: a scalar, equal on all ranks of the axis."""
    return token_losses_(logits, labels, vocab, axis, scale).sum()


@torch.no_grad()
def token_losses_(
    logits: torch.Tensor, labels: torch.Tensor, vocab: int, axis: Axis, scale: float | None
) -> torch.Tensor:
    """``-log softmax(logits)[label]`` of every token, in nats; 0 where it has no label.

    Each rank works relative to its own maximum, so that its logits are read once before anything is sent.

    Args:
        logits: float32 or float64 ``[tokens, padded vocab / size]``, this rank's columns. **Overwritten**,
            with the gradient of ``scale`` times the sum; where that is None, with nothing of use.
        labels: int64 ``[tokens]``, global token ids; -100 marks a token without a target.
        vocab: real vocabulary size; columns beyond it are ignored.
        axis: the tensor axis.
        scale: see ``logits``.

    Returns:
        ``[tokens]`` in the logits' format, equal on all ranks of the axis.
    """
    first = axis.rank * logits.shape[1]
    real = min(max(vocab - first, 0), logits.shape[1])
    logits[:, real:] = -torch.inf  # padding takes no part
    rows = labels - first
    ignored = labels == IGNORED
    here = (rows >= 0) & (rows < real) & ~ignored
    rows = rows.masked_fill_(~here, 0)
    targets = logits.gather(1, rows[:, None]).squeeze(1).masked_fill_(~here, 0)
    local_highest, sums = _exponentials(logits)
    highest = all_reduce(local_highest.clone(), axis, "max")
    shift = (local_highest - highest).exp_()
    sums, targets = all_reduce(torch.stack([sums * shift, targets]), axis)
    if scale is not None:
        weight = torch.full_like(sums, scale).masked_fill_(ignored, 0)
        logits.mul_((shift / sums).mul_(weight)[:, None])
        # One element of each row: no need to add by atomic operations, as scatter_add_ does.
        at = rows[:, None]
        logits.scatter_(1, at, logits.gather(1, at).sub_(weight.mul_(here)[:, None]))
    return (sums.log() + highest - targets).masked_fill_(ignored, 0)


@torch.no_grad()
def compiled_cross_entropy_sum_(
    logits: torch.Tensor, labels: torch.Tensor, vocab: int, axis: Axis, scale: float | None
) -> torch.Tensor:
    """As :func:`cross_entropy_sum_`, in compiled passes over logits of any format: one reads them, the other
    overwrites them with the gradient. Nothing else of their size is made."""
    first = axis.rank * logits.shape[1]
    real = min(max(vocab - first, 0), logits.shape[1])
    highest, sums, targets = maybe_compiled(_statistics, True)(logits, labels, first, real)
    if axis.size > 1:
        local = highest
        highest = all_reduce(local.clone(), axis, "max")
        sums, targets = all_reduce(maybe_compiled(_relative, True)(sums, targets, local, highest), axis)
    if scale is not None:
        # A tensor, because a new number would be compiled anew.
        factor = torch.full((), scale, dtype=sums.dtype, device=sums.device)
        maybe_compiled(_gradient_, True)(logits, labels, first, real, highest, sums, factor)
    loss: torch.Tensor = maybe_compiled(_loss, True)(labels, highest, sums, targets)
    return loss


def _statistics(
    logits: torch.Tensor, labels: torch.Tensor, first: int, real: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token: the highest logit, the sum of exponentials relative to it, the target's logit (0 where
    it is on another rank), in at least float32."""
    wide = _real_columns(logits, real)
    highest = wide.amax(dim=1).clamp(min=torch.finfo(wide.dtype).min)
    sums = (wide - highest[:, None]).exp().sum(dim=1)
    rows, here = _rows(labels, first, real)
    targets = logits.gather(1, rows.masked_fill(~here, 0)[:, None]).squeeze(1).to(wide.dtype)
    return highest, sums, targets.masked_fill(~here, 0)


def _real_columns(logits: torch.Tensor, real: int) -> torch.Tensor:
    """In at least float32, and -inf in the padding."""
    wide = logits.float() if logits.dtype.itemsize == 2 else logits
    if real == logits.shape[1]:
        return wide
    columns = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(columns < real, wide, -torch.inf)


def _rows(labels: torch.Tensor, first: int, real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's column, and whether it is on this rank."""
    rows = labels - first
    return rows, (rows >= 0) & (rows < real) & (labels != IGNORED)


def _relative(
    sums: torch.Tensor, targets: torch.Tensor, local: torch.Tensor, highest: torch.Tensor
) -> torch.Tensor:
    """Sums relative to the highest of all ranks, and targets, in one tensor."""
    return torch.stack([sums * (local - highest).exp(), targets])


def _gradient_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first: int,
    real: int,
    highest: torch.Tensor,
    sums: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """Overwrite logits with their gradient."""
    wide = _real_columns(logits, real)
    rows, here = _rows(labels, first, real)
    weight = scale.expand_as(sums).masked_fill(labels == IGNORED, 0)
    target = (torch.arange(logits.shape[1], device=logits.device) == rows[:, None]) & here[:, None]
    probabilities = (wide - highest[:, None]).exp() / sums[:, None]
    logits.copy_((probabilities - target.to(wide.dtype)) * weight[:, None])


def _loss(
    labels: torch.Tensor, highest: torch.Tensor, sums: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    return (sums.log() + highest - targets).masked_fill(labels == IGNORED, 0).sum()
