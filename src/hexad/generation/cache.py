"""Keys and values of sequences of different lengths, kept from one token to the next."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


class Lengths:
    """How many tokens of each sequence, at first its prompt's, are kept, the same for all layers.

    Attributes:
        capacity: tokens of the longest sequence in the end.
        now: int64 ``[sequences]``, tokens kept, and so the position of each sequence's next token.
        bounds: where prompts begin in their concatenation, and its end.
    """

    def __init__(self, lengths: Sequence[int], capacity: int, device: torch.device) -> None:
        self.now = torch.tensor(lengths, dtype=torch.int64, device=device)
        self.bounds = (0, *torch.tensor(lengths).cumsum(0).tolist())
        self.capacity = capacity
        self._longest, self._even = max(lengths), len(set(lengths)) == 1
        self.masks: dict[int | None, Tensor | None] = {}

    def advance(self) -> None:
        """Count one more token of every sequence."""
        self.now += 1
        self._longest += 1
        self.masks.clear()

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences."""
        self.now = self.now[rows]
        self.masks.clear()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, the new one included."""
        return self._longest + 1

    def mask(self, window: int | None) -> Tensor | None:
        """bool ``[sequences, 1, 1, longest]``: the tokens that each new one sees; None if it sees all."""
        if window not in self.masks:
            if self._even and (window is None or window >= self.longest):
                self.masks[window] = None
            else:
                place, last = torch.arange(self.longest, device=self.now.device), self.now[:, None]
                seen = place <= last
                if window is not None:
                    seen &= place > last - window
                self.masks[window] = seen[:, None, None]
        return self.masks[window]


class KeyValueCache:
    """Keys and values of one layer, of sequences with these lengths."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.filled = False
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Store keys and values of the prompts, ``[all their tokens, heads, width]``; the rest is padding."""
        bounds, (_, heads, width) = self.lengths.bounds, keys.shape
        shape = (len(bounds) - 1, heads, self.lengths.capacity, width)
        self._keys, self._values = keys.new_zeros(shape), values.new_zeros(shape)
        for row, (begin, end) in enumerate(pairwise(bounds)):
            self._keys[row, :, : end - begin] = keys[begin:end].transpose(0, 1)
            self._values[row, :, : end - begin] = values[begin:end].transpose(0, 1)
        self.filled = True

    def extend(
        self, keys: Tensor, values: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append one token of each sequence, ``[sequences, heads, width]``.

        Returns:
            all keys and values, ``[sequences, heads, longest, width]``, and which of them each new token
            sees, see :meth:`Lengths.mask`.
        """
        rows = torch.arange(len(keys), device=keys.device)
        self._keys[rows, :, self.lengths.now] = keys
        self._values[rows, :, self.lengths.now] = values
        longest = self.lengths.longest
        return self._keys[:, :, :longest], self._values[:, :, :longest], self.lengths.mask(window)

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences."""
        self._keys, self._values = self._keys[rows], self._values[rows]
