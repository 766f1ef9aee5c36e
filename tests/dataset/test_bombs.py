"""Compressed files that are larger than they look: a line or text is bounded by the size of its file."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from hexad.config import HexadError
from hexad.dataset.build import compressed, sources
from hexad.dataset.build.builder import build
from hexad.dataset.build.inputs import InputFile
from hexad.dataset.indexed import IndexedDataset

COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd.compress}


def records(path: Path) -> list[Any]:
    pieces = sources.streamed(sources.cut([InputFile(path, True)]))
    return [record.content for piece in pieces for record in sources.read(piece)]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, name: str) -> None:
    monkeypatch.setattr(compressed, "LARGEST_RECORD", 1 << 20)
    path = tmp_path / f"{name}{ending}"
    text = json.dumps([{"text": "a" * (12 << 20)}] if name == "a.json" else {"text": "a" * (12 << 20)})
    path.write_bytes(COMPRESS[ending](text.encode()))
    with pytest.raises(HexadError, match=rf"{name}{ending}: found a line or text of more than 1,"):
        records(path)
    path.write_bytes(COMPRESS[ending](text.replace("a" * (23 << 19), "").encode()))
    assert len(records(path)) == 1


def test_a_record_of_a_large_file_may_be_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "LARGEST_RECORD", 1000)
    path = tmp_path / "a.jsonl.gz"
    text = "".join(f"{number:x}" for number in range(100_000))
    path.write_bytes(gzip.compress(json.dumps({"text": text}).encode()))
    assert records(path) == [{"text": text}]


def test_the_memory_of_a_decoder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"some text", preset=9))
    assert records(path) == ["some text"]
    monkeypatch.setattr(compressed, "_DICTIONARY", 1 << 20)
    with pytest.raises(HexadError, match="its dictionary takes more than 1,048,576 bytes; compress"):
        records(path)


def test_a_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_LONGEST_LINE", 1000)
    monkeypatch.setattr(sources, "_JSONL_PIECE", 64)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + json.dumps({"text": "b" * 900}) + '\n{"text": "c"}\n')
    assert [record["text"][0] for record in records(path)] == ["a", "b", "c"]
    path.write_text('{"text": "a"}\n' + json.dumps({"text": "b" * 1000}) + '\n{"text": "c"}\n')
    with pytest.raises(HexadError, match=r"a\.jsonl:2: a line of more than 1,000 bytes; write a record per"):
        records(path)


def test_a_value_for_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text that a column's dictionary has once is read for a few rows at a time."""
    path, sizes = tmp_path / "a.parquet", []
    pq.write_table(pa.table({"text": ["a" * 20_000] * 500}), path)
    assert path.stat().st_size < 10_000
    monkeypatch.setattr(sources, "_BATCH_BYTES", 100_000)
    read = pq.ParquetFile.iter_batches

    def iter_batches(file: Any, *arguments: Any, **named: Any) -> Any:
        for batch in read(file, *arguments, **named):
            sizes.append(batch.nbytes)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    build([path], tmp_path / "out", "byte", workers=1)
    assert len(IndexedDataset(tmp_path / "out")) == 500
    assert max(sizes) < 200_000
