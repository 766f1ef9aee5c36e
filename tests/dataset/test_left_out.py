"""Inputs that exist are read, or named as left out, or stop the build: streams of compressed files, links,
what cannot be listed."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexad.config import HexadError
from hexad.dataset.build.builder import build
from hexad.dataset.build.compressed import opened
from hexad.dataset.build.inputs import find_files
from hexad.dataset.text.tokenizer_training import training_texts

from ..training.command import call


def _zstd(content: bytes) -> bytes:
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    frame: bytes = zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1})
    return frame


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": _zstd,
}
TOOLS = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}
FIRST, SECOND = (f"{word} text of some length\n".encode() * 3 for word in ("the first", "another"))


def content_of(path: Path) -> bytes | None:
    """All of a compressed file; None if it is refused, by its name."""
    try:
        with opened(path) as (stream, _):
            return stream.read()
    except HexadError as error:
        assert str(error).startswith(f"{path}: damaged") and "\n" not in str(error)
        return None


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_no_stream_of_a_file_is_lost(tmp_path: Path, kind: str) -> None:
    """Whatever byte of the second stream is damaged, and wherever the file ends."""
    compress, path = COMPRESSORS[kind], tmp_path / f"a.{kind}"
    first, second = compress(FIRST), compress(SECOND)
    for place in range(len(second)):
        damaged = bytearray(first + second)
        damaged[len(first) + place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert content_of(path) in (None, FIRST + SECOND), place
        if place:
            path.write_bytes(first + second[:place])
            assert content_of(path) is None, place
    for count, content in enumerate((b"", FIRST, FIRST + SECOND, FIRST + SECOND + FIRST)):
        path.write_bytes(b"".join((first, second, first)[:count]))
        assert content_of(path) == (content if count else None)


TAILS = {f"{count} zeros": bytes(count) for count in (1, 2, 3, 4, 5, 8, 64, 20_000)}
TAILS |= {"garbage": b"garbage", "a letter": b"x", "zeros and garbage": bytes(8) + b"garbage"}


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("another", [False, True], ids=["end", "between"])
def test_what_follows_a_stream_is_as_the_tool_says(
    tmp_path: Path, kind: str, tail: str, another: bool
) -> None:
    if shutil.which(TOOLS[kind]) is None:
        pytest.skip(f"{TOOLS[kind]} is not installed")
    path, compress = tmp_path / f"a.{kind}", COMPRESSORS[kind]
    path.write_bytes(compress(FIRST) + TAILS[tail] + (compress(SECOND) if another else b""))
    tool = subprocess.run([TOOLS[kind], "-dc", str(path)], capture_output=True)
    content = content_of(path)
    if content is None:
        # bzip2 ignores what is no stream, and says so.
        assert tool.returncode or tool.stderr
    elif content != tool.stdout:
        # gzip ends with the padding of the first stream.
        assert kind == "gz" and another and content == FIRST + SECOND
    else:
        assert tool.returncode == 0


def test_lines_of_all_streams_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexad.dataset.build.sources._JSONL_PIECE", 100)
    lines = "".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(50)).encode()
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines) + bytes(8) + lzma.compress(lines))
    assert build([tmp_path / "a.jsonl.xz"], tmp_path / "d", "byte", workers=1).documents == 100
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines) + b"\0" + lzma.compress(lines)[1:])
    with pytest.raises(HexadError, match=r"a\.jsonl\.xz: damaged"):
        build([tmp_path / "a.jsonl.xz"], tmp_path / "d", "byte", workers=1)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """``corpus/a/1.txt``, and outside ``elsewhere/b/2.txt``."""
    for name in ("corpus/a/1.txt", "elsewhere/b/2.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"the text of {name}")
    return tmp_path / "corpus"


def links(**targets: str) -> Callable[[Path], None]:
    """Makes links in a directory: name (with ``__`` for ``/``) -> target."""

    def make(directory: Path) -> None:
        for name, target in targets.items():
            path = directory / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
            if not (path.parent / "beside.txt").exists():
                (path.parent / "beside.txt").write_text(f"beside {name}")

    return make


def _socket(directory: Path) -> None:
    where = Path.cwd()
    os.chdir(directory)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s")
    finally:
        os.chdir(where)


CASES: dict[str, tuple[Callable[[Path], Any], dict[str, str]]] = {
    "directory": (links(b="../elsewhere/b"), {}),
    "directory of directories": (links(b="../elsewhere"), {}),
    "file": (links(f="../elsewhere/b/2.txt"), {}),
    "link to a link": (links(one="../elsewhere", two="one"), {}),
    "hidden target": (lambda d: ((d.parent / ".h").mkdir(), links(h="../.h")(d)), {}),
    "twice": (links(again="a"), {}),
    "dangling": (links(gone="/nonexistent"), {"gone": "a dangling link"}),
    "dangling, relative": (links(a__gone="../no/such"), {"a/gone": "a dangling link"}),
    "to itself": (links(me="me"), {"me": "a link to itself"}),
    "each other": (links(one="two", two="one"), {"one": "a link to itself", "two": "a link to itself"}),
    "parent": (links(a__up=".."), {"a/up": "a link to a directory that it is in"}),
    "own directory": (links(a__here="."), {"a/here": "a link to a directory that it is in"}),
    "directories that hold each other": (
        links(x__y="../y", y__x="../x"),
        {f"{path}": "a link to a directory that it is in" for path in ("x/y/x", "y/x/y")},
    ),
    "deep": (links(p__q__r="../../p"), {"p/q/r": "a link to a directory that it is in"}),
    "pipe": (lambda d: os.mkfifo(d / "pipe"), {"pipe": "a device, pipe or socket"}),
    "device": (links(zero="/dev/zero"), {"zero": "a device, pipe or socket"}),
    "socket": (_socket, {"s": "a device, pipe or socket"}),
    "hidden": (lambda d: ((d / ".git").mkdir(), (d / ".git" / "x").write_text("x")), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_links_are_followed_and_what_is_no_file_is_named(corpus: Path, name: str) -> None:
    make, unread = CASES[name]
    make(corpus)
    found = find_files([corpus])
    paths = subprocess.run(
        ["find", "-L", str(corpus), "-type", "f", "-not", "-path", "*/corpus/.*"],
        capture_output=True, text=True,
    ).stdout.split("\n")[:-1]  # fmt: skip
    assert sorted(str(file.path) for file in found.files) == sorted(paths)
    assert found.unread == {str(corpus / path): why for path, why in unread.items()}
    assert found.hidden == (name == "hidden") and not found.left_out


def test_names_are_in_the_summary(corpus: Path, tmp_path: Path) -> None:
    links(gone="/nonexistent")(corpus)
    (corpus / ".hidden").write_text("x")
    (tmp_path / "none").mkdir()
    options = ("--output", str(corpus / "d"), "--tokenizer", "byte", "--workers", "1")
    result = call("data", "build", "--input", str(corpus), str(tmp_path / "none"), *options, "--json")
    summary = json.loads(result.out)
    assert (summary["documents"], summary["hidden"]) == (2, 1)
    unread = {corpus / "gone": "a dangling link", tmp_path / "none": "an empty directory"}
    assert summary["unread"] == {str(path): why for path, why in unread.items()}
    plain = call("data", "build", "--input", str(corpus), *options)
    assert f"; 1 hidden; not read: {corpus / 'gone'} (a dangling link)" in plain.out
    only = call("data", "build", "--input", str(tmp_path / "none"), *options)
    assert "none: no files found" in only.error


@pytest.mark.parametrize("function", ["listdir", "stat"])
def test_what_cannot_be_listed_stops_the_build(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Unless a pattern leaves it out. (Root may list everything.)"""
    real = getattr(os, function)

    def refuse(path: Any, *rest: Any, **options: Any) -> Any:
        if str(path).endswith("/closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **options)

    (corpus / "closed").mkdir()
    monkeypatch.setattr(os, function, refuse)
    for include in ([], ["*.txt"]):
        with pytest.raises(HexadError, match=r"closed: cannot be read: Permission denied"):
            find_files([corpus], include)
    assert len(find_files([corpus], exclude=["closed"]).files) == 1


def test_many_names_are_shortened(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    links(**{f"gone{number:02}": "/nonexistent" for number in range(20)})(corpus)
    assert len(find_files([corpus]).unread) == 20
    assert len(list(training_texts([corpus]))) == 2
    assert "gone07 (a dangling link) and 12 more" in caplog.text


def test_a_stream_is_read_line_by_line_too(tmp_path: Path) -> None:
    (tmp_path / "a.bz2").write_bytes(bz2.compress(FIRST) + bz2.compress(SECOND))
    with opened(tmp_path / "a.bz2") as (stream, _):
        assert list(iter(stream.readline, b"")) == list(io.BytesIO(FIRST + SECOND))
