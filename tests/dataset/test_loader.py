"""The loader: the same samples in every layout, labels and document offsets, reading ahead."""

import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.config import ConfigError
from hexad.dataset.indexed import (
    HEADER,
    MAGIC,
    VERSION,
    IndexedWriter,
)
from hexad.dataset.load.loader import DataLoader, loader_from_config
from hexad.dataset.load.microbatch import IGNORED, Microbatch
from hexad.dataset.sidecar import Sidecar, bin_path, idx_path, read_sidecar, sidecar_path, write_sidecar
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.model.configuration import load_config
from hexad.parallel.context.slice import Balance, Slicing


def make(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Every token is its own position plus ``first``."""
    with IndexedWriter(prefix, np.int32) as writer:
        writer.add_documents(first + np.arange(sum(lengths)), lengths)
    return str(prefix)


def rows(loaders: list[DataLoader], consumed: int) -> list[list[int]]:
    """The step's rows in the order of samples, from the microbatches of all data ranks."""
    steps = [loader.step(consumed) for loader in loaders]
    return [row.tolist() for parts in zip(*steps) for part in parts for row in part.tokens]


@pytest.mark.parametrize("documents", ["join", "isolate"])
@pytest.mark.parametrize("balance", ["zigzag", "work", "none"])
def test_context_ranks_get_their_own_tokens(tmp_path: Path, balance: Balance, documents: Any) -> None:
    """Together those of the microbatch, each with its number, label and the offsets of all documents."""
    prefix = make(tmp_path / "data", [50, 1, 7, 200, 33, 1, 1, 90])
    options: dict[str, Any] = {"sequence": 12, "micro": 2, "global_batch": 4, "seed": 3}
    options |= {"documents": documents, "data_size": 2, "data_rank": 1}
    slicing = Slicing(3, balance)
    with DataLoader(prefix, **options) as whole:
        wanted = whole.step(4)
    parts = []
    for rank in range(3):
        with DataLoader(prefix, slicing=slicing, context_rank=rank, **options) as loader:
            parts.append(loader.step(4))
    for microbatch, *held in zip(wanted, *parts):
        numbers = torch.cat([own.numbers for own in held if own.numbers is not None])
        assert sorted(numbers.tolist()) == list(range(24))
        for own in held:
            assert own.numbers is not None and own.tokens.shape == own.labels.shape == (1, 8)
            assert torch.equal(own.tokens[0], microbatch.tokens.flatten()[own.numbers])
            assert torch.equal(own.labels[0], microbatch.labels.flatten()[own.numbers])
            assert (own.documents, own.sequences, own.length) == (microbatch.documents, 2, 12)
            assert own.pairs() == microbatch.pairs()
        assert sum(own.targets() for own in held) == microbatch.targets()
        cut = [own.without_targets_from(1) for own in held]
        assert sum(own.targets() for own in cut) == int((microbatch.labels[0] != IGNORED).sum())


@pytest.mark.parametrize("weights", [(0.3, 0.7), (0.9, 0.1), (1, 1)])
def test_the_samples_of_a_blend_end_where_a_member_is_used_up(
    tmp_path: Path, weights: tuple[float, float]
) -> None:
    """No sample is taken twice; of other members the rest is left out."""
    lengths = [61, 43]  # 10 and 7 samples, whose tokens are all different
    paths = [make(tmp_path / str(n), [length], first=1000 * n) for n, length in enumerate(lengths)]
    blend = list(zip(weights, paths))
    with DataLoader(blend, sequence=6, micro=1, global_batch=1, seed=5) as loader:
        samples = [tuple(row) for step in range(loader.samples) for row in rows([loader], step)]
    counts = [sum(row[0] // 1000 == n for row in samples) for n in (0, 1)]
    assert len(set(samples)) == len(samples)
    assert counts[0] == 10 or counts[1] == 7
    assert len(samples) < 17


@settings(max_examples=25)
@given(
    data_size=st.sampled_from([1, 2, 3, 6]),
    micro=st.sampled_from([1, 2]),
    documents=st.sampled_from(["join", "isolate"]),
    consumed=st.integers(0, 90),
    blend=st.booleans(),
)
def test_samples_do_not_depend_on_the_layout(
    tmp_path_factory, data_size: int, micro: int, documents: str, consumed: int, blend: bool
) -> None:
    directory = tmp_path_factory.mktemp("d")
    data: object = make(directory / "a", [5, 1, 17, 3, 3, 9, 28])
    if blend:
        data = [(0.3, data), (0.7, make(directory / "b", [40, 2], first=1000))]

    def loader(size: int, rank: int, rows_each: int) -> DataLoader:
        return DataLoader(
            data,  # type: ignore[arg-type]
            sequence=6,
            documents=documents,  # type: ignore[arg-type]
            micro=rows_each,
            global_batch=12,
            seed=5,
            data_rank=rank,
            data_size=size,
        )

    with loader(1, 0, 12) as whole:
        expected = rows([whole], consumed)
        assert rows([whole], consumed + 12) != expected
    parts = [loader(data_size, rank, micro) for rank in range(data_size)]
    assert rows(parts, consumed) == expected
    assert all(part.microbatches(0) == 12 // (micro * data_size) for part in parts)
    for part in parts:
        part.close()


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=3, max_size=12),
    sequence=st.integers(1, 20),
    micro=st.integers(1, 3),
)
def test_isolated_documents(tmp_path_factory, lengths: list[int], sequence: int, micro: int) -> None:
    lengths = [*lengths, sequence + 1]
    prefix = make(tmp_path_factory.mktemp("d") / "a", lengths)
    starts = set(np.cumsum([0, *lengths])[:-1].tolist())
    settings_ = {"sequence": sequence, "micro": micro, "global_batch": 2 * micro, "seed": 1}
    with (
        DataLoader(prefix, documents="isolate", **settings_) as isolating,
        DataLoader(prefix, **settings_) as joining,
    ):
        isolated, joined = isolating.step(0), joining.step(0)
    for batch, plain in zip(isolated, joined):
        assert plain.documents is None
        assert torch.equal(batch.tokens, plain.tokens)
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert batch.tokens.shape == batch.labels.shape == (micro, sequence)
        assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
        flat = batch.tokens.reshape(-1).tolist()
        expected = [i for i, token in enumerate(flat) if i % sequence == 0 or token in starts]
        assert batch.documents == (*expected, micro * sequence)
        for token, label, joined_label in zip(flat, batch.labels.reshape(-1), plain.labels.reshape(-1)):
            assert joined_label != IGNORED
            assert label == (IGNORED if int(joined_label) in starts else token + 1)
        # Joined: the label is the next input.
        assert torch.equal(plain.labels[:, :-1], plain.tokens[:, 1:])


def test_blend_takes_from_every_source_in_proportion(tmp_path: Path) -> None:
    data = [(3, make(tmp_path / "a", [30])), (1, make(tmp_path / "b", [30], first=1000))]
    with DataLoader(data, sequence=4, micro=8, global_batch=8, seed=0) as loader:
        for consumed in range(0, 80, 8):  # goes round both sources' epochs
            (batch,) = loader.step(consumed)
            assert int((batch.tokens[:, 0] >= 1000).sum()) == 2


def test_steps_in_any_order_are_the_same(tmp_path: Path) -> None:
    prefix = make(tmp_path / "a", [13] * 20)
    with DataLoader(prefix, sequence=5, micro=2, global_batch=6, seed=0) as loader:
        in_order = {consumed: rows([loader], consumed) for consumed in range(0, 120, 6)}
        for consumed in (60, 6, 6, 12, 114, 0):
            assert rows([loader], consumed) == in_order[consumed]


@pytest.mark.parametrize("size", [None, lambda consumed: 4 if consumed else 2])
def test_next_step_is_read_ahead(size: Callable[[int], int] | None, tmp_path: Path) -> None:
    class Counting(DataLoader):
        def _read(self, consumed: int) -> list[Microbatch]:
            asked.append(consumed)
            return super()._read(consumed)

    asked: list[int] = []
    steps = [0, 4, 8] if size is None else [0, 2, 6]
    options: dict[str, Any] = {"sequence": 5, "micro": 2, "global_batch": 4, "seed": 0}
    with Counting(make(tmp_path / "a", [99]), **options, size=size) as loader:
        read = [loader.step(consumed) for consumed in steps]
    assert asked[:3] == steps and all(asked.count(consumed) == 1 for consumed in steps)
    assert [len(microbatches) for microbatches in read] == ([2, 2, 2] if size is None else [1, 2, 2])


def test_errors_of_reading_ahead_surface_at_the_step(tmp_path: Path) -> None:
    class Failing(DataLoader):
        def _read(self, consumed: int) -> list[Microbatch]:
            if consumed == 4:
                raise OSError("the disk is gone")
            return super()._read(consumed)

    with Failing(make(tmp_path / "a", [99]), sequence=5, micro=2, global_batch=4, seed=0) as loader:
        loader.step(0)
        with pytest.raises(OSError, match="the disk is gone"):
            loader.step(4)


def config(prefix: object, *overrides: str):
    data = {"train": prefix, "sequence": 8}
    return load_config({"model": {"vocab": 257}, "data": data, "batch": {"micro": 2, "global": 8}}, overrides)


def test_from_config(tmp_path: Path) -> None:
    prefix = make(tmp_path / "a", [50] * 5)
    tokenizer = load_tokenizer("byte")
    with loader_from_config(config(prefix), 1, 2, tokenizer) as loader:
        batches = loader.step(0)
    assert len(batches) == 2 and batches[0].tokens.shape == (2, 8) and batches[0].documents is None
    with loader_from_config(config(prefix, "data.documents=isolate"), 0, 1, tokenizer) as loader:
        assert loader.step(0)[0].documents is not None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train=null"], "data.train: found null"),
        (
            ["data.train=nowhere/x"],
            "data.train: nowhere/x.idx: no such file.*directory nowhere does not exist",
        ),
        (["data.train=[]"], r"data.train: found \[\], expected a prefix"),
        (["batch.global=6"], r"batch.global: 6 is not divisible by batch.micro 2 x 2 data ranks"),
        (["data.sequence=250"], "data.train: .*holds 250 tokens, expected at least data.sequence . 1 = 251"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    prefix = make(tmp_path / "a", [50] * 5)
    with pytest.raises(ConfigError, match=message):
        loader_from_config(config(prefix, *overrides), 0, 2, load_tokenizer("byte"))


def test_validation_is_its_own_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation: found null"):
        loader_from_config(config("x"), 0, 1, load_tokenizer("byte"), which="validation")


def recorded(prefix: str) -> Sidecar:
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    return sidecar


def test_damage_is_found_at_the_start(tmp_path: Path) -> None:
    prefix = make(tmp_path / "a", [50] * 5)
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"data\.train: .*a\.bin: truncated: 996 bytes, expected 1000"):
        loader_from_config(config(prefix), 0, 1, load_tokenizer("byte"))


def test_ids_beyond_the_vocabulary_are_found_from_the_sidecar_alone(tmp_path: Path) -> None:
    """Without one no token is read: those of a microbatch are checked when it is."""
    prefix = make(tmp_path / "a", [50] * 5)
    sidecar = replace(recorded(prefix), tokenizer="other", vocab=300)
    sidecar_path(prefix).unlink()
    loader_from_config(config(prefix, "model.vocab=200"), 0, 1, load_tokenizer("byte")).close()
    write_sidecar(prefix, sidecar)
    with pytest.raises(ConfigError, match=r"data.train: .*a holds token id 249 .*other.*expected 0 to 199"):
        loader_from_config(config(prefix, "model.vocab=200"), 0, 1, load_tokenizer("byte"))


def test_opening_and_reading_touch_few_pages(tmp_path: Path) -> None:
    """Six billion tokens, in a sparse file, with no sidecar."""
    lengths = [2**31 - 1] * 3
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_documents(np.zeros(3, np.uint16), [1, 1, 1])
    sidecar_path(tmp_path / "a").unlink()
    header = HEADER.pack(MAGIC, VERSION, 8, 3, 4)
    pointers = 2 * np.cumsum([0, *lengths[:2]])
    tables = (np.array(lengths, "<i4"), pointers.astype("<i8"), np.arange(4, dtype="<i8"))
    idx_path(tmp_path / "a").write_bytes(header + b"".join(table.tobytes() for table in tables))
    os.truncate(bin_path(tmp_path / "a"), 2 * sum(lengths))

    def faults() -> int:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_minflt + used.ru_majflt

    before = faults()
    loader = loader_from_config(config(str(tmp_path / "a")), 0, 1, load_tokenizer("byte"))
    with loader:
        loader.prepare(0)
        loader.step(0)
    assert faults() - before < 20_000  # of 3 million pages


def test_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    prefix = make(tmp_path / "a", [50] * 5)
    write_sidecar(prefix, replace(recorded(prefix), tokenizer="other", vocab=300, eod=0))
    with pytest.raises(ConfigError, match="built with tokenizer other, whose end of document is 0"):
        loader_from_config(config(prefix), 0, 1, load_tokenizer("byte"))
