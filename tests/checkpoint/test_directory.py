"""Names, replacement and retention; where a checkpoint comes from."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import torch

from hexad import __version__
from hexad.checkpoint.directory import CheckpointDirectory, find_checkpoint, origin_of, write_manifest
from hexad.checkpoint.manifest import MANIFEST_FILE, read_manifest
from hexad.config import HexadError
from hexad.model.configuration import load_config

from ..weights import chunk as chunk_of
from ..weights import written


def save(run: CheckpointDirectory, step: int, value: float = 0.0) -> Path:
    partial = run.begin(step)
    index = written(partial, [[chunk_of("model.w", (3,), (0,), torch.full((3,), value))]])
    progress = {"step": step, "samples": step}
    write_manifest(partial, index, {"model.w": (3,)}, load_config(), progress, {})
    final = run.commit(partial, step)
    run.tidy(100)
    return final


def steps(run: CheckpointDirectory) -> list[int]:
    return [step for step, _ in run.complete()]


def test_a_source_tree_that_is_not_installed_saves_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", classmethod(lambda *_, **__: iter(())))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("hexad")
    assert origin_of("test", "2.13")["hexad"] == __version__
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hexad.version.__version__"}


def test_the_last_good_checkpoint_is_never_removed(tmp_path: Path) -> None:
    run = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3, 4):
        save(run, step)
    (run.path / "step-00000004" / "rank-00000.safetensors").write_bytes(b"")
    (run.path / "step-00000003" / "manifest.json").write_bytes(b"{}")
    run.tidy(1)
    assert steps(run) == [2, 3, 4]  # the newest good one, and the damaged ones, which do not count
    save(run, 5)
    run.tidy(1)
    assert steps(run) == [3, 4, 5]


def test_a_checkpoint_that_is_replaced_is_there_until_its_successor_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CheckpointDirectory(tmp_path)
    save(run, 7, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr("hexad.checkpoint.directory.make_visible", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # a kill between the two renames
            save(run, 7, 2.0)
    assert steps(run) == [7]
    newest = run.newest()
    assert newest is not None and read_manifest(newest).step == 7
    assert newest.name == "step-00000007.replaced"
    save(run, 7, 3.0)
    assert [path.name for path in sorted(run.path.iterdir())] == ["latest", "step-00000007"]


def test_a_directory_that_is_no_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    for tag in ("global_step1", "global_step2"):
        (tmp_path / "saved" / tag).mkdir(parents=True)
        (tmp_path / "saved" / tag / MANIFEST_FILE).touch()
    with pytest.raises(HexadError, match=r"name one, such as .*saved/global_step2$"):
        find_checkpoint(tmp_path / "saved")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    with pytest.raises(HexadError, match=r"a Hugging Face model is named hf:.*/model$"):
        find_checkpoint(tmp_path / "model")
    with pytest.raises(HexadError, match=r"with a complete checkpoint$"):
        find_checkpoint(tmp_path)


def test_find_checkpoint(tmp_path: Path) -> None:
    run = CheckpointDirectory(tmp_path)
    with pytest.raises(HexadError, match="neither a checkpoint nor a run directory"):
        find_checkpoint(tmp_path)
    first, second = save(run, 9), save(run, 100_000_000)
    assert find_checkpoint(tmp_path) == second and find_checkpoint(first) == first
    assert run.set_aside(second).name == "damaged-step-100000000"
    save(run, 100_000_000)
    assert run.set_aside(second).name == "damaged-step-100000000-1"
    assert find_checkpoint(tmp_path) == first
