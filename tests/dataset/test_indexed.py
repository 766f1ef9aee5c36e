"""Token files: the same bytes as megatron-core's, atomic, and every kind of damage named."""

import json
import signal
import struct
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.config import HexadError
from hexad.dataset.built import open_built
from hexad.dataset.indexed import HEADER, IndexedDataset, IndexedWriter, dtype_for
from hexad.dataset.sidecar import (
    Sidecar,
    bin_path,
    chat_templates,
    idx_path,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)

# Documents as lists of sequences.
corpora = st.lists(
    st.lists(st.lists(st.integers(0, 60000), max_size=9), min_size=1, max_size=3), min_size=1, max_size=12
).filter(lambda corpus: any(sequence for document in corpus for sequence in document))


@pytest.fixture(scope="module")
def megatron():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core")


def flat(document: list[list[int]]) -> list[int]:
    return [token for sequence in document for token in sequence]


def write(prefix: Path, corpus: list[list[list[int]]], dtype: type = np.uint16) -> None:
    with IndexedWriter(prefix, dtype) as writer:
        for document in corpus:
            writer.add_document(flat(document), [len(sequence) for sequence in document])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write(tmp_path / "small", [[[1, 2, 3]], [[4, 5], [6]], [[7]]])
    return tmp_path / "small"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8, np.int64])
@settings(max_examples=20)
@given(corpus=corpora)
def test_same_bytes_as_megatron_both_ways(megatron, tmp_path_factory, dtype, corpus) -> None:
    import torch

    if dtype is np.uint8:
        corpus = [[[token % 256 for token in sequence] for sequence in document] for document in corpus]
    directory = tmp_path_factory.mktemp("both")
    ours, theirs = directory / "ours", directory / "theirs"
    write(ours, corpus, dtype)
    builder = megatron.IndexedDatasetBuilder(str(bin_path(theirs)), dtype=dtype)
    for document in corpus:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(idx_path(theirs)))
    assert idx_path(ours).read_bytes() == idx_path(theirs).read_bytes()
    assert bin_path(ours).read_bytes() == bin_path(theirs).read_bytes()

    read_back = megatron.IndexedDataset(str(ours))
    sequences = [sequence for document in corpus for sequence in document]
    assert len(read_back) == len(sequences)
    for i, sequence in enumerate(sequences):
        np.testing.assert_array_equal(read_back[i], sequence)
    ours_of_theirs = IndexedDataset(theirs)
    assert ours_of_theirs.dtype == dtype
    assert [list(ours_of_theirs[i]) for i in range(len(ours_of_theirs))] == [flat(d) for d in corpus]


@pytest.mark.parametrize("vocab", [1, 65499, 65500, 65535, 65536, 128256])
def test_dtype_follows_megatrons_rule(megatron, vocab: int) -> None:
    assert dtype_for(vocab) == megatron.DType.optimal_dtype(vocab)


def test_many_documents_at_once_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    write(tmp_path / "one", [[[1, 2]], [[]], [[3]]])
    with IndexedWriter(tmp_path / "many", np.uint16) as writer:
        writer.add_documents([1, 2], [2, 0])
        writer.add_documents([3], [1])
    assert writer.documents == 3 and writer.tokens == 3 and writer.max_token == 3
    for path in (bin_path, idx_path):
        assert path(tmp_path / "one").read_bytes() == path(tmp_path / "many").read_bytes()


def test_empty_documents_are_read_as_nothing(tmp_path: Path) -> None:
    write(tmp_path / "d", [[[]], [[1]], [[], []], [[2, 3]], [[]]])
    data = IndexedDataset(tmp_path / "d")
    assert [list(data[i]) for i in range(len(data))] == [[], [1], [], [2, 3], []]
    assert list(data.starts(np.arange(6))) == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize("ids", [[70000], [-1]])
def test_writer_refuses_ids_that_do_not_fit(tmp_path: Path, ids: list[int]) -> None:
    with (
        pytest.raises(HexadError, match="expected 0 to 65535 of dtype uint16"),
        IndexedWriter(tmp_path / "d", np.uint16) as writer,
    ):
        writer.add_document(ids)
    assert list(tmp_path.iterdir()) == []


def test_writer_refuses_lengths_that_do_not_add_up(tmp_path: Path) -> None:
    expected = "lengths: found 3 tokens in 2 sequences, .* the number of tokens, 2"
    with pytest.raises(HexadError, match=expected), IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 2], [1, 2])


def test_failed_rewrite_leaves_the_old_dataset(small: Path) -> None:
    before = {path.name: path.read_bytes() for path in small.parent.iterdir()}
    with pytest.raises(RuntimeError), IndexedWriter(small, np.uint16) as writer:
        writer.add_document([9])
        raise RuntimeError
    assert {path.name: path.read_bytes() for path in small.parent.iterdir()} == before


def test_old_index_is_never_found_with_new_tokens(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between the two renames: the sizes agree, so that nothing else could tell."""
    rename = Path.replace

    def stop_at_index(self: Path, target: Path) -> Path:
        if target == idx_path(small):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", stop_at_index)
    with pytest.raises(KeyboardInterrupt):
        write(small, [[[9, 9, 9, 9, 9, 9, 9]]])
    with pytest.raises(HexadError, match=r"small\.idx: no such file"):
        IndexedDataset(small)


def test_killed_writer_leaves_nothing_under_the_names(tmp_path: Path) -> None:
    script = (
        "import sys, time, numpy as np\nfrom hexad.dataset.indexed import IndexedWriter\n"
        "with IndexedWriter(sys.argv[1], np.uint16) as w:\n"
        "    w.add_document(np.zeros(1 << 20, np.uint16)); print('half', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "d")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    names = [path.name for path in tmp_path.iterdir()]
    assert names and all(name.startswith(".") and name.endswith((".tmp", ".lock")) for name in names)
    with pytest.raises(HexadError, match="no such file"):
        IndexedDataset(tmp_path / "d")
    write(tmp_path / "d", [[[1]]])  # the lock ended with its process


def patch(path: Path, offset: int, raw: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(raw)] = raw
    path.write_bytes(content)


DAMAGE = {
    "no idx": (lambda p: idx_path(p).unlink(), "small.idx: no such file"),
    "no bin": (lambda p: bin_path(p).unlink(), "small.bin: no such file"),
    "magic": (lambda p: patch(idx_path(p), 0, b"X"), "not a Megatron index"),
    "empty idx": (lambda p: idx_path(p).write_bytes(b""), "not a Megatron index"),
    "header": (lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:20]), "inside the header"),
    "version": (lambda p: patch(idx_path(p), 9, struct.pack("<Q", 2)), "format version 2, expected 1"),
    "float": (lambda p: patch(idx_path(p), 17, b"\x06"), r"dtype code 6 \(float64\)"),
    "dtype": (lambda p: patch(idx_path(p), 17, b"\x63"), "unknown dtype code 99"),
    "short idx": (lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:-1]), "truncated: 113 bytes"),
    "long idx": (lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes() + b"\0"), "too long"),
    "modes": (lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes() + b"\0" * 4), "multimodal"),
    "short bin": (lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes()[:-1]), "truncated: 13 bytes"),
    "long bin": (lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes() * 2), "longer than its index"),
    "length": (lambda p: patch(idx_path(p), HEADER.size, struct.pack("<i", -3)), "sequence 0 does not start"),
    "pointer": (lambda p: patch(idx_path(p), HEADER.size + 16 + 8, b"\x07"), "sequence 1 does not start"),
    "boundary": (lambda p: patch(idx_path(p), HEADER.size + 48 + 8, b"\x09"), "document boundaries"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(small: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    damage(small)
    with pytest.raises(HexadError, match=message) as error:
        IndexedDataset(small)
    assert "\n" not in str(error.value) and str(small) in str(error.value)


def test_dataset_without_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "none", [])
    write(tmp_path / "hollow", [[[]]])
    for name in ("none", "hollow"):
        with pytest.raises(HexadError, match="holds no tokens"):
            IndexedDataset(tmp_path / name)


def test_ending_given_with_the_prefix(small: Path) -> None:
    with pytest.raises(HexadError, match=r"leave out the '\.bin'"):
        IndexedDataset(bin_path(small))


def recorded(prefix: Path) -> Sidecar:
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    return sidecar


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("chat_templates", [5, [1], {"default": 5}, "text"]),
        ("max_token", ["5", None, 1.5]),
        ("bos", [5, ["a"]]),
        ("tokenizer", [5]),
        ("unknown", [5]),
    ],
)
def test_a_malformed_sidecar_is_refused(small: Path, field: str, values: list[Any]) -> None:
    """Also where it has no checksum of itself, as those of earlier versions."""
    good = replace(recorded(small), bos=[1], chat_templates={"default": "a"}, checksums=None)
    for value in values:
        sidecar_path(small).write_text(json.dumps({**asdict(good), field: value}))
        with pytest.raises(HexadError, match=r"small\.hexad\.json: damaged, or of another version"):
            open_built(str(small), 300, None, [1])
        with pytest.raises(HexadError, match="damaged"):
            chat_templates([str(small)])
    write_sidecar(small, good)
    assert read_sidecar(small) == good
    earlier = {name: value for name, value in asdict(good).items() if name != "checksums"}
    sidecar_path(small).write_text(json.dumps(earlier))
    assert read_sidecar(small) == good
    sidecar_path(small).unlink()
    assert read_sidecar(small) is None


@pytest.mark.parametrize("kind", ["length", "pointer", "boundary"])
def test_large_index_is_checked_by_who_reads_all_of_it(
    small: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Opening looks at both ends only; the check of the whole index finds the same damage as that of a small
    one."""
    monkeypatch.setattr("hexad.dataset.indexed.SMALL", 2)
    if kind == "length":  # not the first: opening looks at that
        patch(idx_path(small), HEADER.size + 4, struct.pack("<i", -3))
        message = "sequence 1 does not start"
    else:
        damage, message = DAMAGE[kind]
        damage(small)
    data = IndexedDataset(small)
    with pytest.raises(HexadError, match=message):
        data.verify()


@pytest.mark.parametrize(
    ("offset", "raw", "message"),
    [
        (HEADER.size, struct.pack("<i", -3), "sequence 0 does not start"),
        (HEADER.size + 16 + 24, b"\x07", "sequence 3 does not start"),
        (HEADER.size + 48, b"\x01", "document boundaries run from 1 to 4"),
        (HEADER.size + 48 + 24, b"\x03", "document boundaries run from 0 to 3"),
    ],
)
def test_ends_of_a_large_index_are_checked(
    small: Path, monkeypatch: pytest.MonkeyPatch, offset: int, raw: bytes, message: str
) -> None:
    monkeypatch.setattr("hexad.dataset.indexed.SMALL", 2)
    patch(idx_path(small), offset, raw)
    with pytest.raises(HexadError, match=message):
        IndexedDataset(small)
