"""Samples, permutations and blends: every token once, exact proportions, the same order for ever."""

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hexad.config import HexadError
from hexad.dataset.files import lock
from hexad.dataset.indexed import IndexedDataset, IndexedWriter
from hexad.dataset.load.order import Blend, permute
from hexad.dataset.load.samples import SampleSource


def numbered(directory: Path, lengths: list[int]) -> IndexedDataset:
    """A dataset whose every token is its own position, so that tokens tell where they are from."""
    with IndexedWriter(directory / "d", np.int32) as writer:
        writer.add_documents(np.arange(sum(lengths)), lengths)
    return IndexedDataset(directory / "d")


lengths_of_documents = st.lists(
    st.one_of(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=30
).filter(lambda lengths: sum(lengths) > 0)


@settings(max_examples=150)
@given(lengths=lengths_of_documents, sequence=st.integers(1, 25), seed=st.integers(0, 9), data=st.data())
def test_every_token_of_an_epoch_is_an_input_once(tmp_path_factory, lengths, sequence, seed, data) -> None:
    dataset = numbered(tmp_path_factory.mktemp("d"), lengths)
    total = sum(lengths)
    if total < sequence + 1:
        with pytest.raises(HexadError, match=f"holds {total} tokens, expected at least .* {sequence + 1}"):
            SampleSource(dataset, sequence=sequence, seed=seed)
        return
    source = SampleSource(dataset, sequence=sequence, seed=seed)
    assert source.per_epoch == (total - 1) // sequence
    epoch = data.draw(st.integers(0, 5))
    tokens, begins, _ = source.read(epoch * source.per_epoch + np.arange(source.per_epoch))
    used = Counter(tokens[:, :-1].reshape(-1).tolist())
    assert max(used.values()) == 1
    assert len(used) == total - 1 - (total - 1) % sequence
    # A token is followed by the next of its document, unless a document begins there.
    starts = {start for start, length in zip(np.cumsum([0, *lengths]).tolist(), lengths) if length}
    np.testing.assert_array_equal(begins, np.isin(tokens, list(starts)))
    inside = ~begins[:, 1:]
    np.testing.assert_array_equal(tokens[:, 1:][inside], tokens[:, :-1][inside] + 1)
    # Joined in stream order, consecutive samples share their boundary token.
    lasts, firsts = tokens[:, -1].tolist(), tokens[:, 0].tolist()
    assert len(set(lasts) & set(firsts)) >= source.per_epoch - 1


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=20), sequence=st.integers(3, 15))
def test_random_access_gives_what_reading_in_order_gives(tmp_path_factory, lengths, sequence) -> None:
    dataset = numbered(tmp_path_factory.mktemp("d"), [*lengths, sequence + 1])
    in_order = SampleSource(dataset, sequence=sequence, seed=3)
    count = 3 * in_order.per_epoch
    expected = in_order.read(np.arange(count))
    other = SampleSource(dataset, sequence=sequence, seed=3)
    for i in np.random.default_rng(0).permutation(count):
        tokens, begins, _ = other.read(np.array([i]))
        np.testing.assert_array_equal(tokens[0], expected[0][i])
        np.testing.assert_array_equal(begins[0], expected[1][i])


def test_seed_source_and_epoch_each_change_the_order(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, [7] * 50)

    def order(seed: int, source: int, epoch: int) -> tuple[int, ...]:
        samples = SampleSource(dataset, sequence=10, seed=seed, source=source)
        first = epoch * samples.per_epoch + np.arange(samples.per_epoch)
        return tuple(samples.read(first)[0].reshape(-1).tolist())

    assert len({order(0, 0, 0), order(1, 0, 0), order(0, 1, 0), order(0, 0, 1)}) == 4
    assert order(5, 0, 0) == order(5, 0, 0)


def test_samples_of_one_document_are_shuffled_anew_each_epoch(tmp_path: Path) -> None:
    samples = SampleSource(numbered(tmp_path, [1001]), sequence=10, seed=0)
    orders = [samples.read(epoch * 100 + np.arange(100))[0][:, 0].tolist() for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(0, 1000, 10))
    assert orders[0] != orders[1] and sorted(orders[0]) not in orders


def test_order_of_a_seed_never_changes(tmp_path: Path) -> None:
    """A resumed run depends on it: if this fails, the order of every existing run has changed."""
    tokens, *_ = SampleSource(numbered(tmp_path, [3, 1, 4, 1, 5, 9]), sequence=4, seed=1234).read(
        np.arange(5)
    )
    assert tokens.tolist() == GOLDEN


GOLDEN = [[17, 18, 19, 20, 21], [0, 1, 2, 8, 4], [3, 14, 15, 16, 17], [21, 22, 9, 10, 11], [4, 5, 6, 7, 3]]


@pytest.mark.parametrize("unwritable", [False, True])
def test_large_indexes_are_kept_on_disk(tmp_path: Path, unwritable: bool) -> None:
    dataset = numbered(tmp_path, list(range(1, 60)))
    beside, fallback = tmp_path / "d.cache", tmp_path / "run" / "index-cache"
    if unwritable:
        beside.write_text("in the way: even root cannot make a directory here")
    expected = SampleSource(dataset, sequence=8, seed=1).read(np.arange(400))
    kept = fallback if unwritable else beside
    for _ in range(2):
        stored = SampleSource(dataset, sequence=8, seed=1, cache_dir=fallback, in_memory=5)
        np.testing.assert_array_equal(stored.read(np.arange(400))[0], expected[0])
        files = sorted(kept.iterdir())
        assert len(files) == 400 // stored.per_epoch + 1 and all(path.suffix == ".npy" for path in files)
    # A truncated file is computed again, not used.
    os.truncate(files[0], 200)
    again = SampleSource(dataset, sequence=8, seed=1, cache_dir=fallback, in_memory=5)
    np.testing.assert_array_equal(again.read(np.arange(400))[0], expected[0])
    assert sorted(kept.iterdir()) == files and files[0].stat().st_size == files[1].stat().st_size


def test_large_index_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks belong to open files, so that threads stand for the processes of several hosts."""
    dataset = numbered(tmp_path, list(range(1, 60)))
    written: list[int] = []
    write = SampleSource._write
    begun = Barrier(4)

    def slow(self: SampleSource, path: Path, epoch: int) -> None:
        written.append(epoch)
        time.sleep(0.3)  # meanwhile the others arrive
        write(self, path, epoch)

    def first_sample() -> list[int]:
        samples = SampleSource(dataset, sequence=8, seed=1, in_memory=5)
        begun.wait()
        samples.prepare(0)
        return samples.read(np.arange(1))[0].tolist()

    monkeypatch.setattr(SampleSource, "_write", slow)
    with ThreadPoolExecutor(4) as ranks:
        firsts = [future.result() for future in [ranks.submit(first_sample) for _ in range(4)]]
    assert written == [0] and firsts == [firsts[0]] * 4
    assert [path.suffix for path in (tmp_path / "d.cache").iterdir()] == [".npy"]


def test_wait_for_a_large_index_is_bounded(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, list(range(1, 60)))
    complete = SampleSource(dataset, sequence=8, seed=1, in_memory=5)
    complete.prepare(0)
    (index,) = (tmp_path / "d.cache").iterdir()
    content = index.read_bytes()
    index.unlink()
    source = SampleSource(dataset, sequence=8, seed=1, in_memory=5, patience=0.2)
    with index.with_name(f".{index.name}.lock").open("a+", encoding="utf-8") as held:
        assert lock(held, 0) is True
        with pytest.raises(
            HexadError, match=rf"not complete after 0 s .* process {os.getpid()} on .*run.tim"
        ):
            source.prepare(0)
    source.prepare(0)  # its holder is gone
    assert index.read_bytes() == content


def test_nowhere_to_keep_a_large_index(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, list(range(1, 60)))
    (tmp_path / "d.cache").write_text("")
    with pytest.raises(HexadError, match=r"59 documents cannot be stored in .*d\.cache"):
        SampleSource(dataset, sequence=8, seed=1, in_memory=5).read(np.arange(1))


@settings(max_examples=100)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64))
def test_permutation_is_one(size: int, key: int) -> None:
    everything = permute(np.arange(size), size, key)
    assert sorted(everything.tolist()) == list(range(size))
    some = np.arange(0, size, 7)
    np.testing.assert_array_equal(permute(some, size, key), everything[some])


@pytest.mark.parametrize("size", [2, 3, 7, 10, 30])
def test_permutation_is_uniform(size: int) -> None:
    """Where pairs of neighbours go, over many keys: chi-square per cell near 1."""
    keys = 3000
    drawn = np.array([permute(np.arange(size), size, key) for key in range(keys)])
    counts = np.zeros((size, size))
    for row in drawn:
        counts[row[0], row[1]] += 1
    expected = keys / (size * (size - 1))
    off = ~np.eye(size, dtype=bool)
    assert (counts[~off] == 0).all()
    chi = ((counts[off] - expected) ** 2 / expected).sum()
    freedom = size * (size - 1) - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom)


def test_permutation_handles_huge_sizes() -> None:
    size = 10**15 + 37
    places = permute(np.array([0, 1, size - 1]), size, 1)
    assert len(set(places.tolist())) == 3 and (places >= 0).all() and (places < size).all()


weights = st.lists(
    st.one_of(
        st.integers(1, 50).map(float),
        st.floats(0.01, 1.0).map(lambda w: round(w, 3)),
        st.floats(1e-3, 1e3),
        st.just(1e-6),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(given_weights=weights)
@example(given_weights=[1.0] * 3 + [2.0] * 6 + [6.0] * 10 + [9.0] * 40)  # the largest deficit strays to 1.04
@example(given_weights=[0.0010000000000000002, 1.0])  # a period beyond int64
def test_blends_are_exact_after_every_sample(given_weights: list[float]) -> None:
    blend = Blend(given_weights)
    count = 1500
    sources, numbers = blend.locate(np.arange(count))
    taken = np.zeros((count + 1, len(given_weights)), dtype=np.int64)
    for source in range(len(given_weights)):
        taken[1:, source] = np.cumsum(sources == source)
        # A source's samples are used in order, none twice and none left out.
        np.testing.assert_array_equal(numbers[sources == source], np.arange(taken[-1, source]))
    due = np.arange(count + 1)[:, None] * np.array(blend.shares, dtype=float) / blend.period
    assert np.abs(taken - due).max() < 1 + 1e-9
    np.testing.assert_allclose(
        np.array(blend.shares, float) / blend.period, np.array(given_weights) / sum(given_weights)
    )


@pytest.mark.parametrize(
    "shares", [(0.3, 0.7), (5.0, 1.0, 1.0, 1.0), (0.123457, 0.5, 0.376543), (7919.0, 104729.0)]
)
def test_blends_are_random_access(shares: tuple[float, ...]) -> None:
    in_order = Blend(shares)
    count = 150_000  # more than two blocks, and more than a period
    sources, numbers = in_order.locate(np.arange(count))
    assert (
        np.bincount(sources[: in_order.period]).tolist() == list(in_order.shares)[: len(shares)]
        or count < in_order.period
    )
    for i in (149_999, 3, 16_384, 16_383, 131_072, 77_777):
        source, number = Blend(shares).locate(np.array([i]))
        assert (source[0], number[0]) == (sources[i], numbers[i])


def test_proportions_hold_for_ever() -> None:
    blend = Blend([0.1, 0.2, 0.7])
    far = 10**12
    sources, numbers = blend.locate(far + np.arange(10))
    assert Counter(sources.tolist()) == {0: 1, 1: 2, 2: 7}
    assert numbers[sources == 0][0] == far // 10


@pytest.mark.parametrize("bad", [[], [0.0, 1.0], [-1.0]])
def test_weights_must_be_positive(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Blend(bad)
