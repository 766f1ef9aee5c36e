"""A random permutation of ``0 .. size - 1`` that is computed, not stored.

Why not ``numpy.random.permutation``: it needs memory and time for every element before the first is known
(8 bytes for each of up to a billion documents or samples, per epoch and process), and NumPy does not promise
the same stream in its next version (NEP 19), so that an upgrade would silently reorder a resumed run. A
keyed bijection needs no setup, computes element ``i`` alone, and is defined by this file alone.

It is a generalised Feistel network on mixed radix, with cycle walking (J. Black, P. Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002); the round function is the finaliser of SplitMix64.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

import numpy as np
from numpy.typing import NDArray

_HALF_ROUNDS = 8


def permute(index: NDArray[np.int64], size: int, *words: int | str) -> NDArray[np.int64]:
    """Where the permutation named by ``words`` takes each index.

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
