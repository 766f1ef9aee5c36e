"""A run and a checkpoint as they were written before inventories declared the weights: format2/ holds the
run.yaml, the resolved config.yaml and the checkpoint of step 2 of a run on two tensor ranks."""

import json
import shutil
from pathlib import Path

import pytest

from hexad.model.configuration import load_config
from hexad.planning import resolve
from hexad.topology.layout import Layout

from ..pool import Pool
from ..training.command import RunFile, call

SAVED = Path(__file__).parent / "format2"
LOSSES = [5.362857499374244, 5.236710897848803]
"""Of steps 3 and 4, made by the version that wrote it."""


@pytest.mark.parametrize(("world", "overrides"), [(1, ()), (2, ("parallel.zero=3",))])
def test_a_run_resumes_from_a_checkpoint_of_before(
    world: int, overrides: tuple[str, ...], tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(f"line {n}: {n * n} is the square of {n}" for n in range(60))
    Path("text.txt").write_text(text)
    options = ("--output", "data", "--tokenizer", "byte", "--workers", "1")
    assert call("data", "build", "--input", "text.txt", *options).status == 0
    shutil.copytree(SAVED / "step-00000002", tmp_path / "run" / "checkpoints" / "step-00000002")
    shutil.copy(SAVED / "run.yaml", "run.yaml")
    run = RunFile(tmp_path / "run.yaml", tmp_path / "run")
    paths = (f"run.dir={tmp_path / 'run'}", f"data.train={tmp_path / 'data'}")
    layout = ("parallel.tensor=1", *overrides)
    assert run.world(pool, world, "run.steps=4", *paths, *layout) == [(0, "")] * world
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx(LOSSES, rel=1e-12)


def test_a_resolved_configuration_of_before_means_the_same() -> None:
    layout = Layout(world=2, tensor=2)
    before = load_config(SAVED / "config.yaml")
    given = load_config(SAVED / "run.yaml", overrides=["run.compile=none"])  # the default was false
    assert resolve(before, layout) == resolve(given, layout)
