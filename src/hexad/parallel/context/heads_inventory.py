"""How many heads a rank has where heads are exchanged for tokens. No torch."""

from __future__ import annotations


def heads_of(kv_heads: int, size: int) -> int:
    """Key/value heads of one of ``size`` ranks; at least one, which several then have."""
    return max(1, kv_heads // size)


def divides_heads(size: int, heads: int, kv_heads: int) -> bool:
    """Whether ``size`` ranks can share a rank's heads."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def largest_group(ranks: int, heads: int, kv_heads: int) -> int:
    """The most of ``ranks`` ranks, in groups of one size, that can share heads."""
    return max(n for n in range(1, ranks + 1) if ranks % n == 0 and divides_heads(n, heads, kv_heads))
