"""The blocks of the cache: no two sequences write to one, contents are found again, neighbours where
possible."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.generation.blocks import BlockPool, BlockTable, SlotRun


def slots(pool: BlockPool, table: BlockTable, tokens: int) -> list[int]:
    """Where the tokens of a sequence are, but for those of dropped blocks."""
    return [slot + place for slot, count in pool.runs(table, tokens) for place in range(count)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(3, 40), st.booleans(), st.booleans())
def test_contents_are_those_of_the_sequences(
    seed: int, size: int, blocks: int, neighbours: bool, windows: bool
) -> None:
    """A model of the cache: each slot holds the tokens up to its own. Sequences come, grow, and go."""
    chance = random.Random(seed)
    pool = BlockPool(blocks, size, neighbours)
    contents: dict[int, tuple[int, ...]] = {}
    running: list[tuple[BlockTable, list[int], int]] = []
    for _ in range(120):
        action = chance.random()
        if action < 0.4:
            ids = [chance.randrange(2) for _ in range(chance.randint(1, 3 * size))]
            table = pool.start(ids, len(ids) + chance.randrange(2 * size))
            reused = len(table.blocks) * size
            assert reused < len(ids)
            running.append((table, ids, reused))
        elif running and action < 0.85:
            place = chance.randrange(len(running))
            table, ids, computed = running.pop(place)
            end = min(len(ids), computed + chance.randint(1, 2 * size))
            before = pool.available, list(table.blocks)
            if not pool.extend(table, end):
                assert (pool.available, table.blocks) == before
                running.append((table, ids, computed))
                continue
            held = slots(pool, table, end)
            first = table.dropped * size
            assert len(held) == end - first
            for position in range(computed, end):
                contents[held[position - first]] = tuple(ids[: position + 1])
            pool.keep(table, ids, end)
            if windows:
                pool.drop(table, max(0, end - 2 * size))
            ids += [chance.randrange(2)] * (end == len(ids))
            running.append((table, ids, end))
        elif running:
            pool.release(running.pop(chance.randrange(len(running)))[0])
        for table, ids, computed in running:
            first = table.dropped * size
            for position, slot in enumerate(slots(pool, table, computed), first):
                assert contents[slot] == tuple(ids[: position + 1])
        holders = [block for table, *_ in running for block in table.blocks]
        assert pool.available == blocks - len(set(holders))
    for table, *_ in running:
        pool.release(table)
    assert pool.available == blocks


def grown(pool: BlockPool, ids: list[int], longest: int) -> BlockTable:
    table = pool.start(ids, longest)
    assert pool.extend(table, len(ids))
    pool.keep(table, ids, len(ids))
    return table


def test_the_contents_used_longest_ago_go_first() -> None:
    pool = BlockPool(4, 2)
    for first in (0, 10, 20):
        pool.release(grown(pool, [first, first + 1], 2))
    pool.release(pool.start([0, 1, 2], 3))  # used once more
    table = pool.start([], 9)
    assert pool.extend(table, 4)  # the block that was never used, and that of 10
    assert [len(pool.start([first, first + 1, 0], 3).blocks) for first in (0, 10, 20)] == [1, 0, 1]


def test_of_a_sequence_the_end_goes_first() -> None:
    """Without its beginning nothing of it could be used again."""
    pool = BlockPool(4, 2)
    ids = [1, 2, 3, 4, 5, 6]
    pool.release(grown(pool, ids, 6))
    assert pool.extend(pool.start([], 9), 4)  # the block that was never used, and one of these
    assert len(pool.start([*ids, 7], 7).blocks) == 2


def test_other_regimes_and_weights_are_not_used_again() -> None:
    pool = BlockPool(8, 2)
    ids = [1, 2, 3, 4, 5]
    table = pool.start(ids, 5, b"long")
    pool.extend(table, 5)
    pool.keep(table, ids, 5, b"long")
    assert len(pool.start(ids, 5).blocks) == 0
    assert len(pool.start(ids, 5, b"long", reuse=False).blocks) == 0
    assert len(pool.start(ids, 5, b"long").blocks) == 2
    pool.forget()
    assert len(pool.start(ids, 5, b"long").blocks) == 0


@pytest.mark.parametrize("others", [1, 3])
def test_growing_sequences_stay_in_one_run(others: int) -> None:
    """As long as there is room for what each may come to have."""
    pool = BlockPool(10 * (others + 1), 4, neighbours=True)
    tables = [pool.start([number], 40) for number in range(others + 1)]
    for tokens in range(1, 41):
        for table in tables:
            assert pool.extend(table, tokens)
    assert [len(pool.runs(table, 40)) for table in tables] == [1] * (others + 1)


def test_claimed_blocks_are_given_to_others_when_no_other_is_left() -> None:
    pool = BlockPool(6, 4, neighbours=True)
    first, second = pool.start([1], 24), pool.start([2], 24)
    assert pool.extend(first, 4) and pool.extend(second, 20)
    assert not pool.extend(first, 8)
    assert pool.runs(first, 3) == (SlotRun(0, 3),)
