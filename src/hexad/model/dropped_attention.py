"""Which attention probabilities are dropped, exactly as :mod:`.dropout` says."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hexad.parallel.context.rounds import Tile

from .dropout import Dropper


@dataclass(frozen=True)
class DroppedTiles:
    """Factors of the probabilities of one tile of attention; see
    :data:`hexad.parallel.context.kernels.Drop`.

    Attributes:
        dropper: the layer's.
        queries: int32 ``[2, tokens, heads]``, keys of this rank's queries for all layers.
        kv_heads: by which heads are grouped.
        length: tokens of a sequence; an element's column is its key's place in it.
    """

    dropper: Dropper
    queries: torch.Tensor
    kv_heads: int
    length: int

    def __call__(self, tile: Tile, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """``[kv heads, group, queries, keys]``."""
        begin, number = tile.queries[0], tile.first + columns.start
        keys = self.dropper.keys(self.queries[:, begin + rows.start : begin + rows.stop])
        grouped = keys.transpose(1, 2).unflatten(1, (self.kv_heads, -1))
        count = columns.stop - columns.start
        return self.dropper.factors(grouped, number % self.length, count, dtype)
