"""Samples of whole documents: none is cut or lost, padding has no loss, masks reach the labels."""

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hexad.config import ConfigError, HexadError
from hexad.dataset.build.builder import inspect
from hexad.dataset.indexed import IndexedDataset, IndexedWriter
from hexad.dataset.load.loader import DataLoader, loader_from_config
from hexad.dataset.load.microbatch import IGNORED
from hexad.dataset.load.whole_samples import PADDING, WholeSamples, assigned, placements
from hexad.dataset.masks import mask_path
from hexad.dataset.sidecar import bin_path, identity
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.model.configuration import load_config
from hexad.planning import resolve
from hexad.topology.layout import Layout


def write(prefix: Path, lengths: list[int], first: int = 1, masked: bool = True) -> IndexedDataset:
    """Every token is its own position plus ``first``; of masked data every third one is not trained."""
    tokens = first + np.arange(sum(lengths))
    with IndexedWriter(prefix, np.int32) as writer:
        writer.add_documents(tokens, lengths, tokens % 3 != 0 if masked else None)
    return IndexedDataset(prefix)


def best_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """The number of samples, one document after another: into one with the least room that takes it; of
    documents of one length all samples with that room get one before any gets a second."""
    room: list[int] = []
    for length, waiting in sorted(Counter(n for n in lengths if n).items(), reverse=True):
        while waiting and any(left >= length for left in room):
            least = min(left for left in room if left >= length)
            for sample in [sample for sample, left in enumerate(room) if left == least][:waiting]:
                room[sample] -= length
                waiting -= 1
        for number in range(waiting):
            if number % (capacity // length) == 0:
                room.append(capacity)
            room[-1] -= length
    return len(room)


@settings(max_examples=200)
@example(lengths=[6] * 5 + [8] * 3 + [13] * 5 + [27] + [29] * 3 + [37] * 2, capacity=55)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=80), capacity=st.integers(40, 60))
def test_packing_is_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    histogram = np.bincount(lengths, minlength=capacity + 1)
    histogram[0] = 0
    count = sum(placed.samples for placed in placements(histogram, capacity) if placed.fresh)
    assert count == best_fit_decreasing(lengths, capacity)
    samples = assigned(histogram, capacity)
    used = np.array(sorted((n for n in lengths if n), reverse=True), dtype=np.int64)
    filled = np.bincount(samples, weights=used, minlength=count) if len(used) else np.zeros(0)
    assert len(filled) == count and (filled <= capacity).all() and (filled > 0).all()


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any),
    sequence=st.integers(20, 30),
    epoch=st.integers(0, 3),
)
def test_every_document_is_in_one_sample_of_an_epoch(
    tmp_path_factory, lengths: list[int], sequence: int, epoch: int
) -> None:
    data = write(tmp_path_factory.mktemp("d") / "d", lengths)
    source = WholeSamples(data, sequence=sequence, seed=7)
    samples = source.read(epoch * source.per_epoch + np.arange(source.per_epoch))
    starts = np.cumsum([1, *lengths])
    documents = {int(a): int(b - a) for a, b in pairwise(starts) if b > a}
    seen: list[int] = []
    assert samples.trained is not None
    for tokens, begins, trained in zip(samples.tokens, samples.begins, samples.trained):
        bounds = [*np.flatnonzero(begins).tolist(), sequence + 1]
        assert bounds[0] == 0
        for a, b in pairwise(bounds):
            if tokens[a] == PADDING:
                assert b == sequence + 1 and not tokens[a:b].any() and not trained[a:b].any()
                continue
            seen.append(int(tokens[a]))
            assert tokens[a:b].tolist() == list(range(tokens[a], tokens[a] + documents[int(tokens[a])]))
            assert trained[a:b].tolist() == [token % 3 != 0 for token in tokens[a:b].tolist()]
        assert begins[sequence] or tokens[sequence] == PADDING
    assert Counter(seen) == Counter(list(documents))
    assert source.facts.tokens == sum(lengths) and source.facts.documents == len(documents)


def batches(data: object, consumed: int = 0, **options: object) -> list[tuple]:
    given = {"sequence": 30, "micro": 2, "global_batch": 4, "seed": 3, **options}
    with DataLoader(data, **given) as loader:  # type: ignore[arg-type]
        microbatches = loader.step(consumed)
    return [(batch.tokens, batch.labels, batch.documents) for batch in microbatches]


LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 31, 60)]


def test_labels_are_those_of_the_document_and_masked_ones_ignored(tmp_path: Path) -> None:
    write(tmp_path / "d", LENGTHS)
    starts = set(np.cumsum([1, *LENGTHS]).tolist())
    targets = 0
    for consumed in range(0, 40, 4):
        for tokens, labels, documents in batches(str(tmp_path / "d"), consumed):
            flat, wanted = tokens.flatten().tolist(), labels.flatten().tolist()
            for place, (token, label) in enumerate(zip(flat, wanted)):
                target = token + 1
                known = token != PADDING and target not in starts and target % 3 != 0
                assert label == (target if known else IGNORED)
                begins = token in starts or (token == PADDING and flat[place - 1] != PADDING)
                assert (place in documents) == (begins or place % 30 == 0)
            targets += sum(label != IGNORED for label in wanted)
    assert targets > 300


@pytest.mark.parametrize("packing", ["cut", "whole"])
@pytest.mark.parametrize("documents", ["join", "isolate"])
def test_masks_hold_in_every_packing_and_blend(tmp_path: Path, packing: str, documents: str) -> None:
    """Also beside data without a mask, of which every token is trained."""
    write(tmp_path / "d", LENGTHS)
    write(tmp_path / "plain", LENGTHS, first=10_000, masked=False)
    blend = [(1.0, str(tmp_path / "d")), (1.0, str(tmp_path / "plain"))]
    kinds = Counter()
    for tokens, labels, _ in batches(blend, packing=packing, documents=documents):
        for token, label in zip(tokens.flatten().tolist(), labels.flatten().tolist()):
            if label != IGNORED:
                plain = label >= 10_000
                assert plain or label % 3 != 0
                kinds[plain, label == token + 1] += 1
    joined = packing == "cut" and documents == "join"
    assert kinds[True, True] > 20 and kinds[False, True] > 20
    assert (kinds[True, False] + kinds[False, False] > 0) == joined


def test_auto_takes_whole_documents_of_masked_data_only(tmp_path: Path) -> None:
    write(tmp_path / "d", LENGTHS)
    write(tmp_path / "plain", [100, 100], first=10_000, masked=False)  # longer than a sample: these are cut
    blend = [(1.0, str(tmp_path / "d")), (1.0, str(tmp_path / "plain"))]
    for tokens, _, documents in batches(blend):
        assert documents is not None
        for row, sample in enumerate(tokens):
            inside = [place for place in documents if row * 30 < place < (row + 1) * 30]
            if int(sample[0]) >= 10_000:
                assert not inside  # documents: join
            else:
                assert len(inside) >= 1
    assert batches(str(tmp_path / "plain"))[0][2] is None


@settings(max_examples=12)
@given(data_size=st.sampled_from([2, 3, 6]), micro=st.sampled_from([1, 2]), consumed=st.integers(0, 200))
def test_samples_do_not_depend_on_the_layout(
    tmp_path_factory, data_size: int, micro: int, consumed: int
) -> None:
    prefix = tmp_path_factory.mktemp("d") / "d"
    write(prefix, LENGTHS)
    common = {"sequence": 30, "global_batch": 12, "seed": 5}

    def rows(size: int, length: int) -> list[tuple[list[int], list[int]]]:
        loaders = [
            DataLoader(str(prefix), micro=length, data_rank=rank, data_size=size, **common)  # type: ignore[arg-type]
            for rank in range(size)
        ]
        steps = [loader.step(consumed) for loader in loaders]
        for loader in loaders:
            loader.close()
        return [
            (tokens.tolist(), labels.tolist())
            for parts in zip(*steps)
            for part in parts
            for tokens, labels in zip(part.tokens, part.labels)
        ]

    assert rows(data_size, micro) == rows(1, 12)


def test_large_data_has_its_index_in_a_file(tmp_path: Path) -> None:
    data = write(tmp_path / "d", LENGTHS)
    small = WholeSamples(data, sequence=30, seed=1)
    large = WholeSamples(data, sequence=30, seed=1, in_memory=10)
    large.prepare(0)
    (file,) = (tmp_path / "d.cache").glob("*.npy")
    numbers = np.arange(2 * small.per_epoch)
    for stored, wanted in zip(large.read(numbers), small.read(numbers)):
        np.testing.assert_array_equal(stored, wanted)
    file.write_bytes(file.read_bytes()[:-8])
    again = WholeSamples(data, sequence=30, seed=1, in_memory=10)
    np.testing.assert_array_equal(again.read(numbers).tokens, small.read(numbers).tokens)
    first, second = np.split(small.read(numbers).tokens, 2)
    assert not np.array_equal(first, second)  # another order in each epoch


def test_documents_that_are_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write(tmp_path / "d", [5, 31, 12, 40])
    message = (
        r"2 of 4 documents are longer than data\.sequence 30, the longest has 40 tokens; .*data\.too_long"
    )
    with pytest.raises(HexadError, match=message):
        WholeSamples(data, sequence=30, seed=0)
    truncated = WholeSamples(data, sequence=30, seed=0, too_long="truncate")
    skipped = WholeSamples(data, sequence=30, seed=0, too_long="skip")
    assert (truncated.per_epoch, skipped.per_epoch) == (3, 1)
    assert set(truncated.read(np.arange(3)).tokens[:, 0].tolist()) == {6, 49, 37}
    assert truncated.facts.efficiency == pytest.approx(77 / 90)
    with caplog.at_level(logging.INFO, logger="hexad"):
        batches(str(tmp_path / "d"), too_long="skip")
    assert "2 documents in 1 samples per epoch, 56.7 % of their positions" in caplog.text
    assert "2 documents are longer than data.sequence 30: 0 truncated, 2 skipped" in caplog.text
    with pytest.raises(HexadError, match="no document is left"):
        WholeSamples(write(tmp_path / "e", [40]), sequence=30, seed=0, too_long="skip")


def config_on(prefix: Path, *overrides: str):
    tree = {"model": {"vocab": 60_000}, "data": {"train": str(prefix), "sequence": 30}}
    return load_config({**tree, "batch": {"micro": 2, "global": 4}}, overrides)


def test_settings_reach_the_loader(tmp_path: Path) -> None:
    write(tmp_path / "d", LENGTHS)
    tokenizer = load_tokenizer("byte")
    for overrides, whole in (((), True), (("data.packing=cut",), False)):
        resolved = resolve(config_on(tmp_path / "d", *overrides), Layout(world=1)).config
        assert resolved.data.documents == ("isolate" if whole else "join")
        with loader_from_config(resolved, 0, 1, tokenizer) as loader:
            (first, *_) = loader.step(0)
        assert (first.documents is not None) == whole
    write(tmp_path / "long", [50, 3])
    with pytest.raises(ConfigError, match=r"data\.train: .*1 of 2 documents are longer"):
        loader_from_config(config_on(tmp_path / "long"), 0, 1, tokenizer)
    loader_from_config(config_on(tmp_path / "long", "data.too_long=truncate"), 0, 1, tokenizer).close()


def test_a_mask_is_never_applied_to_other_data_nor_left_out(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    data = write(prefix, LENGTHS)
    whole, before = mask_path(prefix).read_bytes(), identity(prefix)
    assert inspect(prefix)["trained"] == int((data.tokens % 3 != 0).sum())

    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=rf"data\.train: .*d\.mask: {message}"):
            loader_from_config(config_on(prefix), 0, 1, load_tokenizer("byte"))

    mask_path(prefix).unlink()
    refused("missing: .* was built with a loss mask")
    mask_path(prefix).write_bytes(whole[:-1])
    refused("truncated: ")
    mask_path(prefix).write_bytes(b"something else")
    refused("not a loss mask")
    mask_path(prefix).write_bytes(whole[:-2] + b"\0" + whole[-1:])
    refused("damaged: not what was written")
    assert identity(prefix) != before
    with pytest.raises(HexadError, match=r"d\.mask: damaged"):
        inspect(prefix)
    mask_path(prefix).write_bytes(whole)
    raw = bytearray(bin_path(prefix).read_bytes())
    raw[0] ^= 1
    bin_path(prefix).write_bytes(raw)
    refused("the loss mask of other data")
    # A new dataset of that name has its own mask, or none.
    write(prefix, LENGTHS, masked=False)
    assert not mask_path(prefix).exists() and IndexedDataset(prefix).mask is None


def test_the_first_documents_of_a_mask_may_be_trained_completely(tmp_path: Path) -> None:
    """The file begins only where it is needed, at any bit of a byte."""
    wanted = np.random.default_rng(1).random(1000) < 0.5
    wanted[:203] = True
    with IndexedWriter(tmp_path / "d", np.int32) as writer:
        for start in range(0, 1000, 29):
            part = wanted[start : start + 29]
            writer.add_document(np.arange(len(part)), trained=None if part.all() else part)
    mask = IndexedDataset(tmp_path / "d").mask
    assert mask is not None and mask.trained == int(wanted.sum())
    np.testing.assert_array_equal(mask.at(np.arange(1000)), wanted)
    mask.verify()


def test_packing_of_a_million_documents() -> None:
    """In operations on arrays: the number of steps does not grow with the number of documents."""
    lengths = np.random.default_rng(0).integers(1, 2049, 1_000_000)
    histogram = np.bincount(lengths, minlength=2049)
    filled = np.bincount(assigned(histogram, 2048), weights=np.sort(lengths)[::-1])
    assert filled.max() <= 2048 and filled.sum() / (2048 * len(filled)) > 0.99


def test_padding_is_a_valid_token_for_any_model() -> None:
    assert PADDING == 0 and torch.tensor(PADDING).dtype == torch.int64


def test_documents_cut_before_their_first_trained_token_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch of them would have no target, again after each resume."""
    lengths, sequence = [50, 7, 40, 31], 30
    trained = np.zeros(sum(lengths), dtype=np.bool_)
    trained[[45, 52, 57 + 29, 97 + 30]] = True  # of the first after the cut, of the last right behind it
    with IndexedWriter(tmp_path / "long", np.int32) as writer:
        writer.add_documents(1 + np.arange(sum(lengths)), lengths, trained)
    caplog.set_level(logging.INFO, "hexad")
    options = {"sequence": sequence, "micro": 1, "global_batch": 1, "seed": 3, "too_long": "truncate"}
    with DataLoader(str(tmp_path / "long"), **options) as loader:
        targets = [int((loader.step(index)[0].labels != IGNORED).sum()) for index in range(loader.samples)]
    assert targets == [1, 1]  # of the documents of 7 and of 40 tokens
    assert "3 documents are longer than data.sequence 30: 1 truncated, 2 skipped" in caplog.text
