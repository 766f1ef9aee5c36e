"""The output head and the loss in slices of tokens, forward and backward at once.

Logits are by far the largest tensor of a model with a large vocabulary. Here they exist for one slice of
tokens at a time: as soon as a slice has its loss, its logits become their own gradient and are multiplied
into the gradients of the hidden states and of the weight, so that nothing of vocabulary size outlives the
slice and the head is multiplied no more often than otherwise. The idea is that of Liger kernel's fused linear
cross-entropy (arXiv 2410.10989); the gradient at which backward will begin must be known beforehand.
"""

from __future__ import annotations

from typing import Any

import torch

from hexad.comm import Pending, all_gather_async, all_reduce_async, reduce_scatter_async

from ..contributions import WeightGradient, accumulator_of
from ..sharding import Shard
from .cross_entropy import compiled_cross_entropy_sum_, cross_entropy_sum_
from .embedding_inventory import loss_rows


def head_loss_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab: int,
    shard: Shard,
    scale: float | None = 1.0,
) -> torch.Tensor:
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
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _HeadLoss.apply(x, weight, labels, vocab, shard, scale if wanted else None)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        vocab: int,
        shard: Shard,
        scale: float | None,
    ) -> torch.Tensor:
        total, grad_x, grad_weight = _slices(x, weight, labels, vocab, shard, scale)
        ctx.scale = scale
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = gradient / ctx.scale
        scaled = (None if tensor is None else tensor * factor for tensor in ctx.saved_tensors)
        return (*scaled, None, None, None, None)


def _slices(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab: int,
    shard: Shard,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
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
    grad_weight: torch.Tensor | None = None
    total: torch.Tensor | float = 0.0
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
    assert isinstance(total, torch.Tensor)
    return total, grad_x, grad_weight


def _gather(rows: torch.Tensor, shard: Shard) -> Pending:
    return all_gather_async(rows, shard.tensor) if shard.sequence else Pending(rows)


def _leave(gradient: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, shard: Shard) -> Pending:
    """Start summing the gradient of a slice's input, into ``rows`` unless it is scattered."""
    if shard.sequence:
        return reduce_scatter_async(gradient @ weight, shard.tensor)
    return all_reduce_async(torch.mm(gradient, weight, out=rows), shard.tensor)


def _logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab: int,
    shard: Shard,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(loss, gradient of the logits) of one slice; statistics are in at least float32."""
    logits = x @ weight.t()
    if shard.compiled:
        loss = compiled_cross_entropy_sum_(logits, labels, vocab, shard.tensor, scale)
        return loss, None if scale is None else logits
    wide = logits.float() if logits.dtype.itemsize == 2 else logits
    del logits
    loss = cross_entropy_sum_(wide, labels, vocab, shard.tensor, scale)
    return loss, None if scale is None else wide.to(x.dtype)
