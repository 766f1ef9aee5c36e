"""The order of samples, computed and not stored: a random permutation of ``0 .. size - 1``, and the source of
each sample of a blend, in exact proportions after any number of samples.

Why not ``numpy.random.permutation``: it needs memory and time for every element before the first is known
(8 bytes for each of up to a billion documents or samples, per epoch and process), and NumPy does not promise
the same stream in its next version (NEP 19), so that an upgrade would silently reorder a resumed run. A
keyed bijection needs no setup, computes element ``i`` alone, and is defined by this file alone.

It is a generalised Feistel network on mixed radix, with cycle walking (J. Black, P. Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002); the round function is the finaliser of SplitMix64.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from math import gcd, isqrt, lcm

import numpy as np
from numpy.typing import NDArray

_HALF_ROUNDS = 8


def permute(index: NDArray[np.int64], size: int, *words: int | str) -> NDArray[np.int64]:
    """Apply the permutation named by ``words`` to each index.

    Args:
        index: int64 ``[n]``, each in ``0 .. size - 1``.
        size: how many elements are permuted.
        words: the key, such as a seed, an epoch and a purpose; other words give an unrelated permutation.

    Returns:
        int64 ``[n]``, each in ``0 .. size - 1``.
    """
    # The domain is left * right >= size with less than one row too many: almost no cycle walking.
    left = isqrt(size - 1) + 1 if size > 1 else 1
    right = -(-size // left)
    digest = blake2b(repr(words).encode(), digest_size=8 * _HALF_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    position = _encipher(index.astype(np.uint64), left, right, keys)
    while (outside := np.flatnonzero(position >= size)).size:
        position[outside] = _encipher(position[outside], left, right, keys)
    return position.astype(np.int64)


def _encipher(
    position: NDArray[np.uint64], left: int, right: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """One pass of the network over ``position`` = high * right + low."""
    rows, columns = np.uint64(left), np.uint64(right)
    high, low = position // columns, position % columns
    for i in range(0, _HALF_ROUNDS, 2):
        high = (high + _mix(low, keys[i]) % rows) % rows
        low = (low + _mix(high, keys[i + 1]) % columns) % columns
    return high * columns + low


def _mix(value: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser of ``value + key`` (G. Steele, D. Lea, C. Flood, OOPSLA 2014)."""
    mixed = value + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


_BLOCK = 1 << 14


class Blend:
    """The order in which sources alternate by positive weights, of which only the ratios count.

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
        self._block = lru_cache(maxsize=2)(self._computed)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The source of each sample, and its number there.

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

    def _computed(self, block: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        while len(self._counts) <= block:  # new blocks must be computed in order
            self._walk(len(self._counts) - 1)
        return self._walk(block)

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
