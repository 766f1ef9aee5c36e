"""Vocabulary-parallel cross-entropy (Shoeybi et al., arXiv 1909.08053, section 3), and the output head and
the loss in slices of tokens, forward and backward at once.

No rank ever holds full logits: only each token's maximum, sum of exponentials and target logit cross the
tensor axis.

Logits are by far the largest tensor of a model with a large vocabulary. Here they exist for one slice of
tokens at a time: as soon as a slice has its loss, its logits become their own gradient and are multiplied
into the gradients of the hidden states and of the weight, so that nothing of vocabulary size outlives the
slice and the head is multiplied no more often than otherwise. The idea is that of Liger kernel's fused linear
cross-entropy (arXiv 2410.10989); the gradient at which backward will begin must be known beforehand.
"""

from typing import Any

import torch
from torch import Tensor

from hexad.comm import Pending, all_gather_async, all_reduce, all_reduce_async, reduce_scatter_async
from hexad.topology.mesh import Axis

from .. import exact
from ..contributions import WeightGradient, accumulator_of
from ..pointwise import maybe_compiled, widened
from ..sharding import Shard
from .embedding_inventory import loss_rows

IGNORED = -100
"""Label of a position that has no target (the convention of torch and Hugging Face)."""
_CACHED_ELEMENTS = 1 << 20  # on a CPU, rows are worked on in slices of about this many logits


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
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
def token_losses_(
    logits: Tensor, labels: Tensor, vocab: int, axis: Axis, scale: float | None, exactly: bool = False
) -> Tensor:
    """``-log softmax(logits)[label]`` of every token, in nats; 0 where it has no label.

    Each rank works relative to its own maximum, so that its logits are read once before anything is sent.

    Args:
        logits: float32 or float64 ``[tokens, padded vocab / size]``, this rank's columns. **Overwritten**,
            with the gradient of ``scale`` times the sum; where that is None, with nothing of use.
        labels: int64 ``[tokens]``, global token ids; -100 marks a token without a target.
        vocab: real vocabulary size; columns beyond it are ignored.
        axis: the tensor axis.
        scale: see ``logits``.
        exactly: the losses depend neither on the ranks nor on other tokens, see :mod:`hexad.parallel.exact`.

    Returns:
        ``[tokens]`` in the logits' format, equal on all ranks of the axis.
    """
    first = axis.rank * logits.shape[1]
    real = min(max(vocab - first, 0), logits.shape[1])
    logits[:, real:] = -torch.inf  # padding takes no part
    rows, here = _rows(labels, first, real)
    rows, ignored = rows.masked_fill_(~here, 0), labels == IGNORED
    targets = logits.gather(1, rows[:, None]).squeeze(1).masked_fill_(~here, 0)
    if exactly:
        normaliser, total = exact.log_normaliser(logits, vocab, axis, overwrite=scale is not None)
        logits[:, real:] = 0.0
        losses = (normaliser.squeeze(1) - all_reduce(targets, axis).double()).to(logits.dtype)
        sums, shift = total.squeeze(1).to(logits.dtype), torch.ones_like(losses)
    else:
        local_highest, sums = _exponentials(logits)
        highest = all_reduce(local_highest.clone(), axis, "max")
        shift = (local_highest - highest).exp_()
        sums, targets = all_reduce(torch.stack([sums * shift, targets]), axis)
        losses = sums.log() + highest - targets
    if scale is not None:
        weight = torch.full_like(sums, scale).masked_fill_(ignored, 0)
        logits.mul_((shift / sums).mul_(weight)[:, None])
        # One element of each row: no need to add by atomic operations, as scatter_add_ does.
        at = rows[:, None]
        logits.scatter_(1, at, logits.gather(1, at).sub_(weight.mul_(here)[:, None]))
    return losses.masked_fill_(ignored, 0)


@torch.no_grad()
def compiled_cross_entropy_sum_(
    logits: Tensor, labels: Tensor, vocab: int, axis: Axis, scale: float | None
) -> Tensor:
    """The sum of :func:`token_losses_`, in compiled passes over logits of any format: one reads them, the
    other overwrites them with the gradient. Nothing else of their size is made."""
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
    return maybe_compiled(_loss, True)(labels, highest, sums, targets)


def _statistics(logits: Tensor, labels: Tensor, first: int, real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the tokens, ``[tokens]`` in at least float32: highest logit, sum of exponentials relative
    to it, the target's logit (0 where it is on another rank)."""
    wide = _real_columns(logits, real)
    highest = wide.amax(dim=1).clamp(min=torch.finfo(wide.dtype).min)
    sums = (wide - highest[:, None]).exp().sum(dim=1)
    rows, here = _rows(labels, first, real)
    targets = logits.gather(1, rows.masked_fill(~here, 0)[:, None]).squeeze(1).to(wide.dtype)
    return highest, sums, targets.masked_fill(~here, 0)


def _real_columns(logits: Tensor, real: int) -> Tensor:
    """``[tokens, columns]`` in at least float32, and -inf in the padding."""
    wide = widened(logits)
    if real == logits.shape[1]:
        return wide
    columns = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(columns < real, wide, -torch.inf)


def _rows(labels: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """``[tokens]``: each target's column, and whether it is on this rank."""
    rows = labels - first
    return rows, (rows >= 0) & (rows < real) & (labels != IGNORED)


def _relative(sums: Tensor, targets: Tensor, local: Tensor, highest: Tensor) -> Tensor:
    """``[2, tokens]``: sums relative to the highest of all ranks, and targets."""
    return torch.stack([sums * (local - highest).exp(), targets])


def _gradient_(
    logits: Tensor, labels: Tensor, first: int, real: int, highest: Tensor, sums: Tensor, scale: Tensor
) -> None:
    """Overwrite ``logits [tokens, columns]`` with their gradient; ``highest`` and ``sums [tokens]``."""
    wide = _real_columns(logits, real)
    rows, here = _rows(labels, first, real)
    weight = scale.expand_as(sums).masked_fill(labels == IGNORED, 0)
    target = (torch.arange(logits.shape[1], device=logits.device) == rows[:, None]) & here[:, None]
    probabilities = (wide - highest[:, None]).exp() / sums[:, None]
    logits.copy_((probabilities - target.to(wide.dtype)) * weight[:, None])


def _loss(labels: Tensor, highest: Tensor, sums: Tensor, targets: Tensor) -> Tensor:
    return (sums.log() + highest - targets).masked_fill(labels == IGNORED, 0).sum()


def head_loss_sum(
    x: Tensor, weight: Tensor, labels: Tensor, vocab: int, shard: Shard, scale: float | None = 1.0
) -> Tensor:
    """Sum of the token losses ``-log softmax(x W^T)[label]``, in nats; in at least float32.

    With gradients, the weight's is contributed when this returns, if an engine accumulates it: computed for
    ``scale``, it is then right only if the sum's gradient in the backward pass is exactly that. Under plain
    autograd any gradient is.

    Args:
        x: ``[tokens (/ size in sequence parallel), hidden]``.
        weight: ``[padded vocab / size, hidden]``, this rank's rows.
        labels: int64 ``[tokens]``, -100 for none.
        vocab: real vocabulary size.
        shard: of the head.
        scale: the gradient of the sum (the loss scale over the number of targets), not 0; None where no
            gradients are wanted.
    """
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _HeadLoss.apply(x, weight, scale if needs_gradient else None, labels, vocab, shard)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float | None, *rest: Any) -> Tensor:
        total, *gradients = _slices(x, weight, scale, *rest)
        ctx.scale = scale
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        factor = gradient / ctx.scale
        scaled = (None if tensor is None else tensor * factor for tensor in ctx.saved_tensors)
        return (*scaled, None, None, None, None)


def _slices(
    x: Tensor, weight: Tensor, scale: float | None, labels: Tensor, vocab: int, shard: Shard
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, gradient of ``x``, gradient of ``weight`` unless it is accumulated or the weight is frozen);
    gradients times ``scale``.

    In sequence parallel a slice has the same rows of every rank's shard, so that it is gathered, and its
    gradient scattered, by itself: the next slice arrives, and the gradients of the last one leave, while a
    slice is computed.
    """
    ranks = shard.tensor.size if shard.sequence else 1
    accumulator = accumulator_of(weight)
    rows = -(-loss_rows(labels.numel(), x.shape[1], weight.shape[0], x.element_size()) // ranks)
    inputs = x.detach().split(rows)
    targets = [part.flatten() for part in labels.reshape(ranks, -1).split(rows, dim=1)]
    grad_x = None if scale is None else torch.empty_like(x)
    outputs = [] if grad_x is None else list(grad_x.split(rows))
    grad_weight: Tensor | None = None
    total: Tensor | float = 0.0
    leaving: Pending | None = None
    arriving = _gather(inputs[0], shard)
    for index, target in enumerate(targets):
        rows_in = arriving.wait()
        if index + 1 < len(inputs):
            arriving = _gather(inputs[index + 1], shard)
        loss, gradient = _logits(rows_in, weight, target, vocab, shard, scale)
        total = total + loss
        if gradient is None:
            continue
        if leaving is not None:
            outputs[index - 1].copy_(leaving.wait())
        leaving = _leave(gradient, weight, outputs[index], shard)
        if accumulator is not None:
            accumulator.contribute(weight, WeightGradient(gradient, rows_in), last=index + 1 == len(targets))
        elif weight.requires_grad:
            product = gradient.t() @ rows_in
            grad_weight = product if grad_weight is None else grad_weight.add_(product)
        del rows_in, gradient
    if leaving is not None:
        outputs[-1].copy_(leaving.wait())
    assert isinstance(total, Tensor)
    return total, grad_x, grad_weight


def _gather(rows: Tensor, shard: Shard) -> Pending:
    return all_gather_async(rows, shard.tensor) if shard.sequence else Pending(rows)


def _leave(gradient: Tensor, weight: Tensor, rows: Tensor, shard: Shard) -> Pending:
    """Start summing the gradient of a slice's input, given ``[tokens, columns]`` of its logits, into
    ``rows [tokens, hidden]`` unless it is scattered."""
    if shard.sequence:
        return reduce_scatter_async(gradient @ weight, shard.tensor)
    return all_reduce_async(torch.mm(gradient, weight, out=rows), shard.tensor)


def _logits(
    x: Tensor, weight: Tensor, labels: Tensor, vocab: int, shard: Shard, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """(loss, gradient of the logits ``[tokens, columns]``) of one slice; statistics in at least float32."""
    logits = shard.arithmetic.unrounded.product(x, weight)
    if shard.compiled:
        loss = compiled_cross_entropy_sum_(logits, labels, vocab, shard.tensor, scale)
        return loss, None if scale is None else logits
    wide = widened(logits)
    del logits
    loss = token_losses_(wide, labels, vocab, shard.tensor, scale, shard.exact).sum()
    return loss, None if scale is None else wide.to(x.dtype)


def cross_entropy(logits: Tensor, labels: Tensor, vocab: int, axis: Axis, exactly: bool = False) -> Tensor:
    """The loss of every token by plain autograd, in nats, in at least float32; the same on all tensor ranks.

    Args:
        logits: ``[..., columns]``, this rank's columns, of as many on every rank.
        labels: int64 ``[...]``, global token ids; -100 marks a token without a target.
        vocab: real vocabulary size; columns beyond it are ignored.
        axis: the tensor axis.
        exactly: see :func:`token_losses_`.

    Returns:
        ``[...]``; 0 where there is no target.
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels, vocab, axis, exactly)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, vocab: int, axis: Axis, exactly: bool) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = logits.flatten(0, -2).to(wide, copy=True, memory_format=torch.contiguous_format)
        needs_gradient = ctx.needs_input_grad[0]
        losses = token_losses_(rows, target.flatten(), vocab, axis, 1.0 if needs_gradient else None, exactly)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(rows if needs_gradient else None)  # they are the losses' gradient now
        return losses.view(target.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        scaled = rows * gradient.reshape(-1, 1)
        return scaled.view(*gradient.shape, -1).to(ctx.dtype), None, None, None, None
