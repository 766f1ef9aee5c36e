"""Which source each sample of a blend comes from: exact proportions, after any number of samples.

After any ``n`` samples, source ``i`` has contributed ``floor(n w_i)`` or ``ceil(n w_i)`` of them. (The rule
of the largest deficit, Megatron's, can deviate by more than one with many sources.) Sample ``j`` of a source
must fall between ``floor(j / w_i)`` and ``ceil((j + 1) / w_i)``; earliest deadline first always succeeds, as
for any unit jobs on one processor whose rates add up to one (S. Baruah et al., "Proportionate progress",
Algorithmica 15, 1996).

The weights are taken as the decimals the user wrote, so that everything is integer arithmetic without drift,
and the order repeats after ``period`` samples (the sum of the weights in lowest terms). Random access inside
the period uses counts stored every 16384 samples, computed in order, at about two microseconds per sample.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 14


class Blend:
    """The order in which sources alternate.

    Args:
        weights: positive, in any unit; only their ratios count.

    Attributes:
        shares: the weights in lowest terms.
        period: their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(repr(weight)) for weight in weights]
        if not exact or min(exact) <= 0:
            raise ValueError(f"weights {list(weights)} are not all positive")
        scale = lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self.shares = tuple(share // gcd(*whole) for share in whole)
        self.period = sum(self.shares)
        # Counts of every source at the beginning of each block found so far.
        self._counts: list[list[int]] = [[0] * len(self.shares)]
        self._blocks: OrderedDict[int, tuple[NDArray[np.int32], NDArray[np.int64]]] = OrderedDict()

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Where samples come from.

        Args:
            samples: int64 ``[n]``, counted from 0 over the whole run.

        Returns:
            The source of each, int32 ``[n]``, and its number in that source, int64 ``[n]``.
        """
        if len(self.shares) == 1:
            return np.zeros(len(samples), dtype=np.int32), samples.copy()
        source = np.empty(len(samples), dtype=np.int32)
        number = np.empty(len(samples), dtype=np.int64)
        # Sixteen-digit weights give periods beyond int64, which no run reaches the end of.
        repeats = self.period < 1 << 62
        rounds, inside = np.divmod(samples, self.period) if repeats else (np.zeros_like(samples), samples)
        blocks = inside // _BLOCK
        for block in np.unique(blocks):
            rows = np.flatnonzero(blocks == block)
            sources, numbers = self._block(int(block))
            at = inside[rows] - block * _BLOCK
            source[rows] = sources[at]
            number[rows] = numbers[at]
        if rounds.any():
            number += rounds * np.array(self.shares)[source]
        return source, number

    def _block(self, block: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        while block not in self._blocks:
            # New blocks must be computed in order.
            number = min(block, len(self._counts) - 1)
            self._blocks[number] = self._walk(number)
            while len(self._blocks) > 2:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block)
        return self._blocks[block]

    def _walk(self, block: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """One block: of the sources whose next sample is due to be released, the earliest deadline first."""
        period, shares = self.period, self.shares
        counts = list(self._counts[block])
        first = block * _BLOCK
        length = min(_BLOCK, period - first)
        sources = np.empty(length, dtype=np.int32)
        numbers = np.empty(length, dtype=np.int64)
        # Per source its next sample: (release, source) until released, then (deadline, source).
        waiting = [(counts[i] * period // share, i) for i, share in enumerate(shares)]
        heapify(waiting)
        ready: list[tuple[int, int]] = []
        for at in range(length):
            while waiting and waiting[0][0] <= first + at:
                i = heappop(waiting)[1]
                heappush(ready, (-(-(counts[i] + 1) * period // shares[i]), i))
            i = heappop(ready)[1]
            sources[at], numbers[at] = i, counts[i]
            counts[i] += 1
            heappush(waiting, (counts[i] * period // shares[i], i))
        if block == len(self._counts) - 1 and first + length < period:
            self._counts.append(counts)
        return sources, numbers
