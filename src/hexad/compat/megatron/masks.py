"""Masks and positions of tokens, as Megatron-LM's data sets have them."""

import torch
from torch import Tensor


def positions_from(starts: Tensor) -> Tensor:
    """Positions ``[b, s]`` that begin again where ``starts`` is true."""
    places = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return places - torch.where(starts, places, 0).cummax(1).values


def ltor_mask(starts: Tensor, documents: bool) -> Tensor:
    """The causal mask ``[b or 1, 1, s, s]``, true where attention is masked; with ``documents`` also between
    them, whose first tokens ``starts`` marks."""
    length = starts.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=starts.device).triu(1)[None, None]
    if not documents:
        return mask
    numbers = starts.cumsum(1)
    return mask | (numbers[:, None, :, None] != numbers[:, None, None, :])


def masks_and_positions(
    data: Tensor,
    eod_token: int | None,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks and positions of tokens ``[b, s]``: the attention mask ``[b or 1, 1, s, s]``, true where masked,
    the loss mask ``[b, s]`` and the position ids ``[b, s]``. A document ends with ``eod_token``."""
    ends = torch.zeros_like(data, dtype=torch.bool) if eod_token is None else data == eod_token
    starts = torch.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    loss_mask = torch.ones_like(data, dtype=torch.float32)
    if eod_mask_loss:
        loss_mask[ends] = 0.0
    position_ids = positions_from(starts if reset_position_ids else torch.zeros_like(starts))
    return ltor_mask(starts, reset_attention_mask), loss_mask, position_ids
