"""The rounds of a ring: what a rank computes with the keys of each rank, and the messages. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from .slice import Slice, TokenRun, joined, token_count

SCORES = 1 << 24
"""Scores that exist at a time where no kernel computes them in parts."""


@dataclass(frozen=True)
class Tile:
    """Blocks of queries, each with a block of keys. Blocks follow each other in both.

    Attributes:
        queries, keys: where blocks begin, and the end: rows of this rank's queries, of available keys.
        causal: the n-th query of a block sees the first n keys of its block; else all of them.
        low: the n-th query of the one block sees keys from number ``n + low`` on; None: from the first on.
        first: number of the first key's token, of tiles of one run of tokens each.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    low: int | None = None
    first: int = 0

    @property
    def rows(self) -> TokenRun:
        """The first query and the last + 1."""
        return self.queries[0], self.queries[-1]

    @property
    def columns(self) -> TokenRun:
        """The first key and the last + 1."""
        return self.keys[0], self.keys[-1]


@dataclass(frozen=True)
class Round:
    """The computation and messages of a rank in one round: rank ``r`` sends keys and values to ``r + n``, and
    computes with those of ``r - n``.

    Attributes:
        distance: ``n``.
        source, target: ``r - n`` and ``r + n``.
        send: runs of this rank's rows that the target needs.
        receive: runs of the source's rows that this rank needs.
        tiles: what is computed with them; their keys are rows of what is received.
    """

    distance: int
    source: int
    target: int
    send: tuple[TokenRun, ...]
    receive: tuple[TokenRun, ...]
    tiles: tuple[Tile, ...]

    @property
    def sent(self) -> int:
        """The number of tokens sent."""
        return token_count(self.send)

    @property
    def received(self) -> int:
        """The number of tokens received."""
        return token_count(self.receive)


class Segment(NamedTuple):
    """Tokens of one run in one document.

    Attributes:
        document: its number.
        begin, end: numbers of the tokens.
        row: of the first, on its rank.
    """

    document: int
    begin: int
    end: int
    row: int


@lru_cache(maxsize=256)
def rounds(
    slice_: Slice, rank: int, window: int | None = None, contiguous: bool = False, complete: bool = False
) -> tuple[Round, ...]:
    """The rounds of a rank, its own keys first.

    Keys that no query of a rank sees are neither sent nor computed.

    Args:
        slice_: of the ring's ranks.
        rank: of the ring.
        window: keys that a query sees; None for all before it.
        contiguous: the keys of a tile are one run of tokens, as where dropout numbers them.
        complete: every rank receives all keys of the others.
    """
    if window is not None and window >= max(end - begin for begin, end in pairwise(slice_.bounds)):
        window = None
    all_rounds, everything = [], ((0, slice_.share),)
    for distance in range(slice_.ranks):
        source, target = (rank - distance) % slice_.ranks, (rank + distance) % slice_.ranks
        tiles = _tiles(slice_, rank, source, window, contiguous)
        if distance == 0:
            all_rounds.append(Round(0, rank, rank, (), (), tiles))
            continue
        receive = everything if complete else _needed(tiles)
        send = everything if complete else _needed(_tiles(slice_, target, rank, window, contiguous))
        placed = tuple(_placed(tile, receive) for tile in tiles)
        all_rounds.append(Round(distance, source, target, send, receive, placed))
    return tuple(all_rounds)


def _needed(tiles: Sequence[Tile]) -> tuple[TokenRun, ...]:
    """The rows of keys that some tiles read, joined into runs."""
    return joined(sorted(tile.columns for tile in tiles))


def _placed(tile: Tile, received: Sequence[TokenRun]) -> Tile:
    """The tile, with keys numbered as in what is received."""
    before = 0
    for begin, end in received:
        if begin <= tile.keys[0] < end:
            return replace(tile, keys=tuple(key - begin + before for key in tile.keys))
        before += end - begin
    raise ValueError(f"{tile} is not received")


@lru_cache(maxsize=1024)
def segments(slice_: Slice, rank: int) -> tuple[Segment, ...]:
    """The tokens of a rank, by document."""
    runs, row, document = [], 0, 0
    bounds = slice_.bounds
    for begin, end in slice_.runs[rank]:
        while begin < end:
            while bounds[document + 1] <= begin:
                document += 1
            last = min(end, bounds[document + 1])
            runs.append(Segment(document, begin, last, row))
            begin, row = last, row + last - begin
    return tuple(runs)


@lru_cache(maxsize=1024)
def _tiles(slice_: Slice, rank: int, source: int, window: int | None, contiguous: bool) -> tuple[Tile, ...]:
    queries, keys = segments(slice_, rank), segments(slice_, source)
    if window is not None or contiguous:
        by_document: dict[int, list[Segment]] = {}
        for key in keys:
            by_document.setdefault(key.document, []).append(key)
        pairs = [(query, key) for query in queries for key in by_document.get(query.document, ())]
        tiles = [_between(query, key, window) for query, key in pairs if key.begin <= query.begin]
        return tuple(tile for tile in tiles if tile is not None)
    return _own(queries) if rank == source else _others(queries, keys)


def _own(parts: Sequence[Segment]) -> tuple[Tile, ...]:
    """A rank's queries with its own keys: those of one document are neighbours in ascending order, so that a
    causal block for each document is right, whatever other ranks have between them."""
    total = parts[-1].row + parts[-1].end - parts[-1].begin
    first = {part.document: part.row for part in reversed(parts)}
    rows = sorted(first.values())
    return (Tile((*rows, total), (*rows, total), True),)


def _others(queries: Sequence[Segment], keys: Sequence[Segment]) -> tuple[Tile, ...]:
    """A rank's queries with the keys of another: runs of queries that see the same keys are one tile."""
    tiles: list[Tile] = []
    at = 0
    for query in queries:
        while at < len(keys) and keys[at].document < query.document:
            at += 1
        seen = at
        while seen < len(keys) and keys[seen].document == query.document and keys[seen].end <= query.begin:
            seen += 1
        if seen == at:
            continue
        columns = keys[at].row, keys[seen - 1].row + keys[seen - 1].end - keys[seen - 1].begin
        rows = query.row, query.row + query.end - query.begin
        if tiles and tiles[-1].keys == columns and tiles[-1].queries[-1] == rows[0]:
            rows = tiles.pop().queries[0], rows[1]
        tiles.append(Tile(rows, columns, False))
    return tuple(tiles)


def _between(query: Segment, key: Segment, window: int | None) -> Tile | None:
    """One run of queries with one run of keys; None where they do not see each other."""
    behind = query.begin - key.begin
    rows, columns = query.end - query.begin, key.end - key.begin
    skipped, low = 0, None
    if window is not None:
        skipped = max(0, behind - window + 1)  # keys that not even the first query sees
        rows = min(rows, columns - behind - 1 + window)  # the last query that sees the last key
        if skipped >= columns or rows <= 0:
            return None
        low = behind - window + 1 - skipped
        if rows - 1 + low <= 0:  # a limit that the last query does not reach is none
            low = None
    queries, keys = (query.row, query.row + rows), (key.row + skipped, key.row + columns)
    return Tile(queries, keys, behind == 0, low, key.begin + skipped)
