"""Inputs: compressed files, patterns, and what is not text in directories."""

import bz2
import gzip
import json
import lzma
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hexad.config import HexadError
from hexad.dataset.build.builder import build
from hexad.dataset.indexed import IndexedDataset
from hexad.dataset.text.tokenizer import load_tokenizer

from ..training.command import call


def _zstd(content: bytes) -> bytes:
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    half = len(content) // 2
    return b"".join(map(zstd.compress, (content[:half], content[half:])))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": _zstd,
}
LINES = "".join(json.dumps({"text": f"line {n} 🙂 " + "x" * (n % 70)}) + "\n" for n in range(3000)).encode()


def texts_of(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    return [load_tokenizer("byte").decode(data[i]) for i in range(len(data))]


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_compressed_files_give_the_same_data(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in blocks of lines, whatever their size."""
    monkeypatch.setattr("hexad.dataset.build.sources._JSONL_PIECE", 10_007)
    monkeypatch.setattr("hexad.dataset.build.builder._TASK_BYTES", 30_000)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / f"b.jsonl.{kind}").write_bytes(COMPRESSORS[kind](LINES))
    (tmp_path / "t.txt").write_text("größe\n")
    (tmp_path / f"u.txt.{kind}").write_bytes(COMPRESSORS[kind]("größe\n".encode()))
    done: list[tuple[int, int]] = []
    build([tmp_path / "a.jsonl", tmp_path / "t.txt"], tmp_path / "plain", "byte", workers=1)
    inputs = [tmp_path / f"b.jsonl.{kind}", tmp_path / f"u.txt.{kind}"]
    build(inputs, tmp_path / "packed", "byte", workers=1, progress=lambda *at: done.append(at))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"plain.{ending}").read_bytes() == (tmp_path / f"packed.{ending}").read_bytes()
    assert len(done) > 3 and done[-1][0] == done[-1][1]


def test_named_json_files_are_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"text": "one"}, {"text": "two\nlines"}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "a.ndjson").write_text(lines)
    (tmp_path / "a.ndjson.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps(records, indent=2))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    for name in ("a.ndjson", "a.ndjson.gz", "a.json", "a.json.gz"):
        build([tmp_path / name], tmp_path / "d", "byte", workers=1)
        assert texts_of(tmp_path / "d") == ["one", "two\nlines"], name
    # One of a directory is text, as source code is; lines are lines there too.
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "package.json").write_text('{"name": 1}')
    (folder / "b.ndjson").write_text('{"text": "three"}')
    build([folder], tmp_path / "d", "byte", workers=1)
    assert texts_of(tmp_path / "d") == ["three", '{"name": 1}']
    wrong = {
        json.dumps(records[0]): "found an object, expected an array of records",
        lines: "if it has a record per line, name it .jsonl",
        '[{"text": "a"}, "b"]': "wrong.json: record 2: found text, expected an object",
        '[{"text": "a"}, {"text": null}]': "wrong.json: record 2: 'text' is null, expected text",
        " " * 2000: f"as .jsonl: jq -c '.[]' {tmp_path}/wrong.json > {tmp_path}/wrong.jsonl",
    }
    monkeypatch.setattr("hexad.dataset.build.sources._LARGEST_ARRAY", 1999)
    for content, says in wrong.items():
        (tmp_path / "wrong.json").write_text(content)
        with pytest.raises(HexadError, match=re.escape(says)):
            build([tmp_path / "wrong.json"], tmp_path / "e", "byte", workers=1)


def test_a_large_array_is_divided_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That can be pasted; none for a compressed file."""
    monkeypatch.setattr("hexad.dataset.build.sources._LARGEST_ARRAY", 1999)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my data.v2.json").write_text(" " * 2000)
    with pytest.raises(HexadError, match=re.escape(": jq -c '.[]' 'my data.v2.json' > 'my data.v2.jsonl'")):
        build(["my data.v2.json"], tmp_path / "e", "byte", workers=1)
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(b" " * 2000))
    with pytest.raises(HexadError, match=r"; write a record per line, as \.jsonl$"):
        build(["packed.json.gz"], tmp_path / "e", "byte", workers=1)


@pytest.mark.slow
def test_compressed_lines_are_shared_among_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexad.dataset.build.sources._JSONL_PIECE", 10_007)
    monkeypatch.setattr("hexad.dataset.build.builder._TASK_BYTES", 10_000)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    for workers in (1, 2):
        build([tmp_path / "b.jsonl.gz"], tmp_path / str(workers), "byte", workers=workers)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("inner", ["jsonl", "txt"])
def test_damaged_archives_are_refused(tmp_path: Path, kind: str, inner: str) -> None:
    path = tmp_path / f"a.{inner}.{kind}"
    whole = COMPRESSORS[kind](LINES)
    changed = whole[: len(whole) // 2] + b"\0\0\0\0" + whole[len(whole) // 2 + 4 :]
    for content in (whole[:-20], whole[: len(whole) // 2], b"no archive", changed):
        path.write_bytes(content)
        if content is changed and kind == "zst":
            continue  # its frames have no checksum by default
        with pytest.raises(HexadError, match=rf"a\.{inner}\.{kind}: damaged or not a \.{kind} file") as error:
            build([path], tmp_path / "out" / "d", "byte", workers=1)
        assert "\n" not in str(error.value)
        assert list((tmp_path / "out").iterdir()) == []


def _frame(log: int, content: bytes) -> bytes:
    """A Zstandard frame with a window of 2**log bytes (RFC 8878) and one block, as ``zstd --long=LOG`` writes
    of text that it cannot compress."""
    header = b"\x28\xb5\x2f\xfd" + bytes([0, (log - 10) << 3])
    return header + (len(content) << 3 | 1).to_bytes(3, "little") + content


def test_zstandard_windows_up_to_the_largest_are_read(tmp_path: Path) -> None:
    """One that no library reads is refused in one line."""
    _zstd(b"")
    content = LINES[: LINES.index(b"\n", 10_000) + 1]
    for log in (27, 31):
        (tmp_path / f"{log}.jsonl.zst").write_bytes(_frame(log, content))
        build([tmp_path / f"{log}.jsonl.zst"], tmp_path / str(log), "byte", workers=1)
        assert texts_of(tmp_path / str(log)) == [json.loads(line)["text"] for line in content.splitlines()]
    path = tmp_path / "32.jsonl.zst"
    path.write_bytes(_frame(32, content))
    result = call(
        "data", "build", "--input", str(path), "--output", str(tmp_path / "d"), "--tokenizer", "byte"
    )
    assert result.status == 2 and "memory" in result.error and str(path) in result.error


def test_wrong_lines_of_compressed_files_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hexad.dataset.build.sources._JSONL_PIECE", 100)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n\n' * 20 + b'{"text": 5}\n'))
    with pytest.raises(HexadError, match=r"a\.jsonl\.gz:41: 'text' is a number \(5\)"):
        build([tmp_path / "a.jsonl.gz"], tmp_path / "d", "byte", workers=1)


def test_archives_of_files_and_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.tar.gz", "a.zip", "a.tgz"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(HexadError, match=rf"{name}: an archive of files; extract it"):
            build([tmp_path / name], tmp_path / "d", "byte")
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    for package in ("backports", "compression"):
        monkeypatch.setitem(sys.modules, f"{package}.zstd", None)
    with pytest.raises(HexadError, match=r"pip install 'hexad\[zstd\]'"):
        build([tmp_path / "a.jsonl.zst"], tmp_path / "d", "byte", workers=1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "build").mkdir()
    (root / "readme.md").write_text("readme")
    (root / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (root / "latin.txt").write_bytes("größe".encode("latin-1"))
    (root / "empty.txt").write_bytes(b"")
    (root / "src" / "a.py").write_text("a")
    (root / "src" / "deep" / "b.py").write_text("b")
    (root / "build" / "c.py").write_text("c")
    return root


def test_what_is_not_text_in_a_directory_is_skipped_and_counted(tree: Path, tmp_path: Path) -> None:
    summary = build([tree], tmp_path / "d", "byte", workers=1)
    assert texts_of(tmp_path / "d") == ["readme", "c", "a", "b"]
    assert summary.skipped == 3
    assert summary.skipped_kinds == {"binary": 1, "not UTF-8": 1, "empty": 1}
    options = ["build", "--input", str(tree), "--output", str(tmp_path / "d"), "--tokenizer", "byte"]
    assert "; skipped: 1 without text, 1 binary, 1 not UTF-8" in call("data", *options, "--workers", "1").out
    for name, says in (
        ("latin.txt", ":1: byte 0x.. is not UTF-8"),
        ("picture.png", ": binary, byte 8 is NUL"),
    ):
        with pytest.raises(HexadError, match=name + says):
            build([tree, tree / name], tmp_path / "d", "byte", workers=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--include", "*.py"], ["c", "a", "b"]),
        (["--include", "*.py", "*.md"], ["readme", "c", "a", "b"]),
        (["--include", "*.py", "--exclude", "build"], ["a", "b"]),
        (["--exclude", "*.md", "--exclude", "src/deep/*"], ["c", "a"]),
        (["--include", "src/*"], ["a", "b"]),
    ],
)
def test_patterns(tree: Path, tmp_path: Path, options: list[str], expected: list[str]) -> None:
    arguments = ["build", "--output", str(tmp_path / "d"), "--tokenizer", "byte", "--workers", "1", "--json"]
    result = call("data", *arguments, "--input", str(tree), *options)
    assert texts_of(tmp_path / "d") == expected
    summary = json.loads(result.out)
    assert summary["documents"] + summary["skipped"] + summary["left_out"] == 7


@pytest.mark.parametrize("option", ["--input", "--include", "--exclude"])
def test_options_without_a_value_are_refused(tree: Path, option: str) -> None:
    given = ["data", "build", "--input", str(tree), "--output", "d", "--tokenizer", "byte"]
    for arguments in ([*given, option], [*given[:2], option, *given[4:]]):
        assert call(*arguments).error.startswith(f"Option '{option}' requires an argument.")


def test_patterns_that_match_nothing_are_named(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(HexadError, match=r"in: --include and --exclude leave out all there is, 7 files"):
        build([tree], tmp_path / "d", "byte", include=["*.rs"])
