"""A run continues with its own directory, data and checkpoints, or is refused: never silently with others."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hexad.checkpoint.directory import CheckpointDirectory
from hexad.config import read_tree
from hexad.config.schema import CheckpointSettings
from hexad.dataset.files import exclusive
from hexad.dataset.indexed import IndexedDataset, IndexedWriter
from hexad.dataset.sidecar import bin_path, sidecar_path

from .command import Result, RunFile, call, write_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """A run of two steps on the data ``d``, beside ``d2``."""
    directory = tmp_path_factory.mktemp("trained") / "work"
    for name in ("d", "d2"):
        rebuilt(directory / name, name)
    run = write_run(directory, str(directory / "d"), run={"steps": 2}, checkpoint={"every": 1})
    assert run.train().status == 0
    shutil.copytree(directory, directory.with_name("before"))
    return run


@pytest.fixture
def original(trained: RunFile) -> RunFile:
    """The run as it was, whatever other tests have done to it."""
    directory = trained.path.parent
    shutil.rmtree(directory)
    shutil.copytree(directory.with_name("before"), directory)
    return trained


def rebuilt(prefix: Path, word: str, documents: int = 20, masked: bool = False) -> None:
    with IndexedWriter(prefix, np.uint16) as writer:
        for number in range(documents):
            ids = np.frombuffer(f"{word} {number} and {number * number}; {word}".encode() * 3, np.uint8)
            writer.add_document(ids, None, np.arange(len(ids)) > 5 if masked else None)


def resumed(run: RunFile, *overrides: str) -> Result:
    return call("train", str(run.path), "run.steps=3", *overrides)


Move = Callable[[Path, Path], object]


@pytest.mark.parametrize(
    ("move", "file"),
    [(shutil.move, "config.yaml"), (shutil.copytree, "checkpoints/step-00000002/config.yaml")],
    ids=["moved", "copied, a checkpoint's file"],
)
def test_a_run_directory_is_resumed_where_it_is(
    original: RunFile, tmp_path: Path, move: Move, file: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    before = original.directory / "metrics.jsonl"
    content = before.read_bytes()
    there = RunFile(tmp_path / "elsewhere" / "run" / file, tmp_path / "elsewhere" / "run")
    move(original.directory, there.directory)
    assert resumed(there).status == 0
    assert len(there.losses) == 3
    assert not before.exists() or before.read_bytes() == content
    written = yaml.safe_load((there.directory / "config.yaml").read_text())
    assert written["run"]["dir"] == str(there.directory)
    assert written["data"]["train"] == str(original.path.parent / "d")
    # The directory that an override names counts, as ever.
    assert resumed(there, f"run.dir={tmp_path / 'new'}", "run.steps=1").status == 0
    assert (tmp_path / "new" / "metrics.jsonl").exists()


def test_paths_inside_a_moved_run_are_followed(tmp_path: Path) -> None:
    """Those of the copy of the tokenizer, too, which are written without links."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "link" / "run")},
        "data": {"train": [[1.0, str(tmp_path / "link" / "run" / "d")], [1.0, "/data/x"]]},
        "checkpoint": {"load": str(tmp_path / "link" / "run-2")},
    }
    tree["data"]["tokenizer"] = str(tmp_path / "disk" / "run" / "tokenizer")
    directory = tmp_path / "moved"
    directory.mkdir()
    (directory / "config.yaml").write_text(yaml.safe_dump(tree))
    assert read_tree(directory / "config.yaml") == tree  # no run was here
    (directory / "metrics.jsonl").touch()
    read = read_tree(directory / "config.yaml")
    assert read["run"]["dir"] == str(directory) and read["checkpoint"] == tree["checkpoint"]
    assert read["data"]["train"] == [[1.0, str(directory / "d")], [1.0, "/data/x"]]
    assert read["data"]["tokenizer"] == str(directory / "tokenizer")
    shutil.copy(directory / "config.yaml", directory / "mine.yaml")
    assert read_tree(directory / "mine.yaml") == tree


def test_a_configuration_elsewhere_names_its_run(original: RunFile, tmp_path: Path) -> None:
    """One that was copied out of the run directory, and one beside another tool's checkpoints."""
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(original.directory / "config.yaml", tmp_path / "config.yaml")
    assert resumed(RunFile(tmp_path / "config.yaml", original.directory)).status == 0
    assert len(original.losses) == 3


def _tokens_changed(prefix: Path) -> None:
    """By another tool, which leaves no sidecar; the same length."""
    content = bytearray(bin_path(prefix).read_bytes())
    content[10], content[20] = content[20], content[10]
    bin_path(prefix).write_bytes(content)
    sidecar_path(prefix).unlink()


def _replaced(prefix: Path) -> None:
    for ending in (".bin", ".idx", ".hexad.json"):
        shutil.copy(f"{prefix}2{ending}", f"{prefix}{ending}")


@pytest.mark.parametrize(
    "change",
    [
        lambda prefix: rebuilt(prefix, "e"),
        lambda prefix: rebuilt(prefix, "d", 21),
        lambda prefix: rebuilt(prefix, "d", 19),
        lambda prefix: rebuilt(prefix, "d", masked=True),
        _tokens_changed,
        _replaced,
    ],
    ids=["other text", "one more", "one less", "a mask", "tokens changed", "replaced"],
)
def test_other_data_under_the_same_name_are_refused(
    original: RunFile, change: Callable[[Path], None]
) -> None:
    prefix, before = original.path.parent / "d", original.losses
    change(prefix)
    error = resumed(original, "data.packing=cut").error
    assert f"data: found {prefix}, which was rebuilt or replaced since" in error and "step-00000002" in error
    assert original.losses == before and original.checkpoints == [1, 2]


def test_the_same_data_are_accepted(original: RunFile) -> None:
    prefix = original.path.parent / "d"
    rebuilt(prefix, "d")
    sidecar_path(prefix).unlink()
    for ending in (".bin", ".idx"):
        shutil.move(f"{prefix}{ending}", f"{prefix}-moved{ending}")
    result = resumed(original, f"data.train={prefix}-moved")
    assert result.status == 0 and "continues with other data" not in result.err


def test_other_data_that_are_named_are_reported(original: RunFile) -> None:
    result = resumed(original, f"data.train={original.path.parent / 'd2'}")
    assert result.status == 0 and len(original.losses) == 3
    assert "continues with other data: samples from 8 on" in result.err


@pytest.mark.parametrize("which", ["a blend's", "validation"])
def test_every_data_set_of_the_run_counts(original: RunFile, which: str) -> None:
    first, second = original.path.parent / "d", original.path.parent / "d2"
    blend = (f"data.train=[[1, {first}], [1, {second}]]",)
    validation = (f"data.validation={second}", "validate.every=1", "validate.batches=1")
    overrides = blend if which == "a blend's" else validation
    assert resumed(original, *overrides).status == 0
    assert len(IndexedDataset(second).tokens) > 0
    rebuilt(second, "e")
    error = call("train", str(original.path), "run.steps=4", *overrides).error
    assert f"found {second}, which was rebuilt" in error


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: (path.mkdir(), (path / "notes.txt").write_text("mine")),
        lambda path: path.write_text("mine"),
        lambda path: os.symlink("/nonexistent", path),
        lambda path: os.symlink(path.parent.parent, path),
    ],
    ids=["empty", "notes", "file", "dangling link", "link"],
)
def test_what_only_has_the_name_of_a_checkpoint_is_ignored(
    tmp_path: Path, make: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path)
    real = directory.path / "step-00000002"
    real.mkdir(parents=True)
    (real / "manifest.json").touch()
    for name in ("step-99999999", "step-100000000", "step-00000003.replaced"):
        make(directory.path / name)
        assert directory.newest() == directory.start(CheckpointSettings()) == real
        assert f"{name}: no checkpoint, as it has no manifest.json; ignored" in caplog.text


def test_a_run_resumes_beside_such_a_directory(original: RunFile) -> None:
    stray = original.directory / "checkpoints" / "step-99999999"
    stray.mkdir()
    assert resumed(original).status == 0 and len(original.losses) == 3
    assert original.newest.name == "step-00000003" and stray.is_dir()


def test_a_checkpoint_that_lost_its_manifest_is_damaged(original: RunFile) -> None:
    (original.newest / "manifest.json").unlink()
    assert "damaged: manifest.json is missing" in resumed(original).error
    assert resumed(original, "checkpoint.damaged=previous").status == 0
    assert len(original.losses) == 3


def test_one_process_adds_texts_to_a_file(tmp_path: Path) -> None:
    from hexad.config import HexadError
    from hexad.generation.files import TextFile

    message = r"output: .*out\.jsonl: another process adds texts to it"
    with TextFile(tmp_path / "out.jsonl"), pytest.raises(HexadError, match=message):
        TextFile(tmp_path / "out.jsonl")
    TextFile(tmp_path / "out.jsonl").__exit__(None)


def test_one_process_writes_scores(original: RunFile, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    output = tmp_path / "out.jsonl"
    files = ("--input", str(tmp_path / "in.jsonl"), "--output", str(output))
    with exclusive(output, "another"):
        error = call("score", str(original.directory), *files).error
    assert f"--output: {output}: process {os.getpid()} on " in error and not output.exists()
    assert call("score", str(original.directory), *files).status == 0 and output.exists()


def test_one_process_writes_a_directory(tmp_path: Path) -> None:
    from hexad.checkpoint.hugging_face.files import appearing
    from hexad.config import HexadError

    message = r"to: .*model: process \d+ on \S+ is writing it; wait"
    with appearing(tmp_path / "a" / "model", "to") as first:
        (first / "config.json").write_text("{}")
        with pytest.raises(HexadError, match=message), appearing(tmp_path / "a" / "model", "to"):
            pass
    assert [path.name for path in (tmp_path / "a" / "model").iterdir()] == ["config.json"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model"]
