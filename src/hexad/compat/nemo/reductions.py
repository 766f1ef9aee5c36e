"""NeMo 2's loss reductions: the loss of a microbatch, and what is logged of a step's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..megatron import parallel_state

DataT = TypeVar("DataT")
ReductionT = TypeVar("ReductionT")


class MegatronLossReduction(nn.Module):
    """The base class of loss reductions."""

    def forward(self, batch: Any, forward_out: Any) -> tuple[Any, ...]:
        """The loss of a microbatch, and what :meth:`reduce` is given of it: ``(loss, reported)``; or ``(sum,
        count, reported)``, whose quotient is the loss. Losses are averaged over microbatches and data ranks.

        Args:
            batch: what ``data_step`` has returned.
            forward_out: what ``training_step`` has returned.
        """
        raise NotImplementedError("override forward")

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Any]) -> Any:
        """What is logged, given what is reported of a data rank's microbatches: a scalar, or a dictionary
        with ``loss``."""
        raise NotImplementedError("override reduce")


class MaskedTokenLossReduction(MegatronLossReduction):
    """The mean of token losses where ``batch["loss_mask"]`` is 1.

    Args:
        validation_step, val_drop_last: accepted without effect.
    """

    def __init__(self, validation_step: bool = False, val_drop_last: bool = True) -> None:
        super().__init__()

    def forward(
        self, batch: dict[str, Tensor], forward_out: Tensor | tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum of a microbatch's losses, and the number of tokens.

        Args:
            batch: with ``loss_mask``, of the losses' shape.
            forward_out: token losses of any shape; or a pair of them and a mask in place of the batch's.
        """
        losses, mask = forward_out if isinstance(forward_out, tuple) else (forward_out, batch["loss_mask"])
        mask = mask.reshape(-1).to(torch.promote_types(losses.dtype, torch.float32))
        total, count = (losses.reshape(-1).to(mask.dtype) * mask).sum(), mask.sum()
        return total, count, {"loss_sum_and_ub_size": torch.stack([total.detach(), count])}

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The mean over all microbatches and data ranks; their last stages' ranks together."""
        sums = torch.stack([item["loss_sum_and_ub_size"] for item in losses_reduced_per_micro_batch]).sum(0)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        return sums[0] / sums[1].clamp(min=1)
