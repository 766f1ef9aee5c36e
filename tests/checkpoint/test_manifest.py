"""Manifests that Hexad has not written: nothing outside the checkpoint is read, memory stays bounded."""

import json
import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hexad.checkpoint.directory import write_manifest
from hexad.checkpoint.manifest import _END, _PREFIX, MANIFEST_FILE, DamagedCheckpoint, _guarded
from hexad.checkpoint.reader import Checkpoint
from hexad.cli.main import run as command
from hexad.model.configuration import load_config

from ..weights import chunk as chunk_of
from ..weights import written

NAME = "model.w"


def checkpoint(directory: Path) -> Path:
    """One tensor in one file."""
    path = directory / "step-00000001"
    path.mkdir()
    index = written(path, [[chunk_of(NAME, (3, 2), (0, 0), torch.arange(6.0).view(3, 2))]])
    origin = {"world": 1, "layout": {}, "reason": "test", "saved_at": 0.0, "hexad": "", "torch": ""}
    write_manifest(path, index, {NAME: (3, 2)}, load_config(), {"step": 1, "samples": 1}, origin)
    return path


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest; its checksum matches afterwards."""
    file = path / MANIFEST_FILE
    body = json.loads(file.read_bytes()[_PREFIX : -len(_END)])
    edit(body)
    file.write_bytes(_guarded(json.dumps(body, separators=(",", ":")).encode()))


def pack(rows: list[list[int]]) -> str:
    return b64encode(zlib.compress(np.array(rows, dtype="<i8").tobytes(), 9)).decode()


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/hostname", "a/../../b", "", "a//b", ".", "a\\b", "a\0b"]
)
def test_a_file_name_that_leads_out_of_the_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = checkpoint(tmp_path)
    (tmp_path / "outside.safetensors").write_bytes((path / "rank-00000.safetensors").read_bytes())

    def rename(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop("rank-00000.safetensors")

    change(path, rename)
    with pytest.raises(DamagedCheckpoint, match="expected one inside the checkpoint"):
        Checkpoint(path)
    assert command(["checkpoint", "verify", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("hexad: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("files",), None),
        (("files",), []),
        (("files", "rank-00000.safetensors"), [1]),
        (("files", "rank-00000.safetensors"), [[[1]], 8, ""]),
        (("files", "rank-00000.safetensors"), [[["a", ""]], 8, ""]),
        (("files", "rank-00000.safetensors"), [[], 8, 3]),
        (("files", "rank-00000.safetensors"), [[[float("inf"), ""]], 8, ""]),
        (("files", "rank-00000.safetensors"), [[[-1, ""], [90, ""]], 8, ""]),
        (("files", "rank-00000.safetensors"), [[[80, ""]], -8, ""]),
        (("files", "rank-00000.safetensors"), [[[80, ""]], 2**50, ""]),
        (("tensors", NAME), ["float32", 3, ""]),
        (("tensors", NAME), [5, [3, 2], ""]),
        (("tensors", NAME), ["float32", [-3, 2], ""]),
        (("tensors", NAME), ["float32", [3, 2], [[0, 1, 8, 0, 0, 3, 2]]]),
        (("tensors", NAME), ["float32"]),
        (("tensors",), 5),
        (("progress",), {}),
        (("progress", "step"), None),
        (("progress",), [1, 2, 3]),
        (("config",), 7),
        (("origin",), "text"),
    ],
)
def test_entries_of_another_kind_are_damage(tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    path = checkpoint(tmp_path)

    def set_value(body: dict[str, Any]) -> None:
        for key in place[:-1]:
            body = body[key]
        body[place[-1]] = value

    change(path, set_value)
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json: "):
        Checkpoint(path)


@pytest.mark.parametrize(
    "row", [(1, 1, 8, 0, 0, 3, 10**12), (1, 1, 8, 2, 0, 2, 2), (1, 1, 8, 2**62, 0, 2**62, 2)]
)
def test_rectangles_beyond_their_tensor_are_damage(tmp_path: Path, row: tuple[int, ...]) -> None:
    path = checkpoint(tmp_path)
    packed = b64encode(zlib.compress(np.array(row, dtype="<i8").tobytes())).decode()

    def exceed(body: dict[str, Any]) -> None:
        body["tensors"][NAME][2] = packed

    change(path, exceed)
    with pytest.raises(DamagedCheckpoint, match=f"tensor {NAME}: a rectangle exceeds its tensor's shape"):
        Checkpoint(path)


@pytest.mark.parametrize("gone", ["files", "tensors", "progress", "config", "origin"])
def test_missing_entries_are_damage(tmp_path: Path, gone: str) -> None:
    path = checkpoint(tmp_path)
    change(path, lambda body: body.pop(gone))
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json: an entry is missing"):
        Checkpoint(path)


def test_a_folder_inside_the_checkpoint_is_allowed(tmp_path: Path) -> None:
    """Imported models have their tokenizer's files in one."""
    path = checkpoint(tmp_path)
    (path / "folder").mkdir()
    (path / "rank-00000.safetensors").rename(path / "folder" / "any")

    def rename(body: dict[str, Any]) -> None:
        body["files"]["folder/any"] = body["files"].pop("rank-00000.safetensors")

    change(path, rename)
    with Checkpoint(path) as opened:
        assert torch.equal(opened.read(NAME), torch.arange(6.0).view(3, 2))


def test_rectangles_cannot_ask_for_more_memory_than_the_files_have_blocks(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    bomb = b64encode(zlib.compress(bytes(64 * 2**20), 9)).decode()

    def inflate(body: dict[str, Any]) -> None:
        body["tensors"][NAME][2] = bomb

    change(path, inflate)
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint, match="rectangles of more than"):
        Checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    "row",
    [[2, 1, 0, 0, 0, 3, 2], [-1, 1, 0, 0, 0, 3, 2], [1, 2, 0, 0, 0, 3, 2], [1, 1, -8, 0, 0, 3, 2]],
    ids=["no such file", "a file counted from the end", "no such block", "before the file's first byte"],
)
def test_a_rectangle_that_is_in_no_file_is_refused(tmp_path: Path, row: list[int]) -> None:
    path = checkpoint(tmp_path)

    def move(body: dict[str, Any]) -> None:
        body["tensors"][NAME][2] = pack([row])

    change(path, move)
    with pytest.raises(DamagedCheckpoint, match="in no block of the files"):
        Checkpoint(path)


@pytest.mark.parametrize(
    ("shape", "row", "says"),
    [
        ((10**6, 10**6), None, "takes more bytes than all files have"),
        ((2**40, 2**40), None, "takes more bytes than all files have"),
        ((10**300, 2), None, "takes more bytes than all files have"),
        ((4, 2), None, "found 6 values, expected 8"),
        ((1,) * 200, [1, 1, 0, *[0] * 200, *[1] * 200], "200 dims, expected at most 16"),
        ((3, 2), [1, 1, 10**6, 0, 0, 3, 2], "a rectangle ends after its file"),
        ((3, 2), [1, 1, 2**62, 0, 0, 3, 2], "a rectangle ends after its file"),
        ((0, 2**62, 2**62), [1, 1, 0, *[0] * 3, 0, 2**62, 2**62], ""),
    ],
)  # fmt: skip
def test_a_shape_is_compared_with_the_file_before_memory_is_allocated(
    tmp_path: Path, shape: tuple[int, ...], row: list[int] | None, says: str
) -> None:
    path = checkpoint(tmp_path)

    def grow(body: dict[str, Any]) -> None:
        names = list(body["files"])
        entry = body["tensors"][NAME]
        entry[1] = list(shape)
        if row is not None:
            entry[2] = pack([[names.index("rank-00000.safetensors"), *row[1:]]])

    change(path, grow)
    if says:
        with pytest.raises(DamagedCheckpoint, match=says):
            Checkpoint(path)
    else:
        Checkpoint(path)


def test_a_forged_size_of_a_file_is_compared_with_it(tmp_path: Path) -> None:
    """A manifest in which shape, rectangle and size of the file agree, and the file is small."""
    path = checkpoint(tmp_path)

    def grow(body: dict[str, Any]) -> None:
        number = list(body["files"]).index("rank-00000.safetensors")
        body["files"]["rank-00000.safetensors"][0][0][0] = 2**50
        body["tensors"][NAME][1] = [2**24, 2**20]
        body["tensors"][NAME][2] = pack([[number, 1, 0, 0, 0, 2**24, 2**20]])

    change(path, grow)
    with (
        Checkpoint(path) as opened,
        pytest.raises(DamagedCheckpoint, match="bytes of 1125899906842624"),
    ):
        opened.read(NAME)


def test_a_manifest_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    (path / MANIFEST_FILE).write_bytes(_guarded(b"[" * 100_000 + b"]" * 100_000))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: nested too deeply"):
        Checkpoint(path)
