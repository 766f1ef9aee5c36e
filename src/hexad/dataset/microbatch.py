"""What the loader passes to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from hexad.parallel.tensor.cross_entropy import IGNORED

__all__ = ["IGNORED", "Microbatch"]


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of one data rank.

    Attributes:
        tokens: int64 ``[sequences, sequence]``, input token ids.
        labels: int64 ``[sequences, sequence]``, the target at each position (already shifted: the label of
            position ``i`` is the token at ``i + 1``), or ``IGNORED``.
        documents: None where each sequence is one document; else the start offsets of all documents in
            the flattened ``[sequences * sequence]`` tokens, in order, beginning with 0 and ending with the
            total (``cu_seqlens``). Every sequence's start is among them. Attention and positions are then
            confined to each document.
        offsets: int32, ``documents`` on the device, made by :meth:`to`.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: tuple[int, ...] | None = None
    offsets: torch.Tensor | None = None

    def targets(self) -> int:
        """Number of positions that have a target."""
        return int((self.labels != IGNORED).sum())

    def pairs(self) -> int:
        """Pairs of tokens of one document: the sum of the squares of the documents' lengths."""
        if self.documents is None:
            return self.tokens.shape[0] * self.tokens.shape[1] ** 2
        return sum((end - begin) ** 2 for begin, end in pairwise(self.documents))

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on ``device``."""
        offsets = None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32)
        tokens, labels, offsets = (
            None if each is None else _moved(each, device) for each in (self.tokens, self.labels, offsets)
        )
        assert tokens is not None and labels is not None
        return Microbatch(tokens, labels, self.documents, offsets)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device; from page-locked memory, without which the host would wait for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
