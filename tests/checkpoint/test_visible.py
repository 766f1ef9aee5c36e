"""Which checkpoint is resumed from is the first rank's choice; listings of other hosts may lag behind."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hexad.checkpoint import reader
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.manifest import read_manifest
from hexad.config import HexadError
from hexad.model.configuration import load_config
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..pool import Pool
from ..training.command import RunFile, free_port, rank_variables, train_rank, write_run
from ..training.conftest import data as data
from ..training.test_guard import NAN, spoilt
from .test_directory import CheckpointDirectory, save

LAG = 0.7  # seconds


@contextmanager
def working_directory(path: Path) -> Iterator[None]:
    """Each rank's: the same relative run.dir is then another view of it."""
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def _found(directory: str, how: str) -> tuple[Path | None, str]:
    """What a rank finds where the view of rank 1 lags behind, and the error."""
    mesh = Mesh.create(Layout(world=2), torch.device("cpu"))
    view = Path(directory) / str(mesh.rank)
    reader._LONGEST_LAG = 30 * LAG if how == "late" else LAG
    timer = threading.Timer(LAG, lambda: os.rename(view / "late", view / "run/checkpoints/step-00000002"))
    if mesh.rank == 1 and how == "late":
        timer.start()
    with working_directory(view):
        saved = Checkpointer(load_config({"run": {"dir": "run"}}), mesh)
        try:
            checkpoint = saved.find()
            if checkpoint is not None:
                read_manifest(checkpoint)
            assert saved.newest() == checkpoint
        except HexadError as error:
            return None, str(error)
        finally:
            saved.close()
    return checkpoint, ""


def views(directory: Path) -> None:
    """Two checkpoints, of which rank 1 does not see the second."""
    for rank in range(2):
        run = CheckpointDirectory(directory / str(rank) / "run")
        run.path.parent.mkdir(parents=True)
        save(run, 1)
        path = save(run, 2)
        if rank == 1:
            path.rename(directory / "1/late")


def test_ranks_wait_until_they_see_the_first_ranks_choice(pool: Pool, tmp_path: Path) -> None:
    views(tmp_path)
    begin = time.monotonic()
    assert pool.run(2, _found, str(tmp_path), "late") == [(Path("run/checkpoints/step-00000002"), "")] * 2
    assert time.monotonic() - begin > LAG


def test_a_rank_that_never_sees_it_is_named_with_path_and_seconds(pool: Pool, tmp_path: Path) -> None:
    views(tmp_path)
    text = (
        "rank 1: checkpoint run/checkpoints/step-00000002 is not visible after 1 s, but on rank 0 it is; "
        "use a file system that all hosts share"
    )
    assert pool.run(2, _found, str(tmp_path), "never") == [(None, text)] * 2


def test_an_older_checkpoint_of_the_same_name_is_not_taken_for_it(pool: Pool, tmp_path: Path) -> None:
    """As after a roll back, when a step is saved again."""
    views(tmp_path)
    other = save(CheckpointDirectory(tmp_path / "1" / "run"), 2, value=1.0)
    assert (other / "manifest.json").stat().st_size
    checkpoints = pool.run(2, _found, str(tmp_path), "never")
    assert "not visible after" in checkpoints[0][1] and checkpoints[0] == checkpoints[1]


def _with_old_listings(rank: int, world: int, arguments: list[str], port: int) -> tuple[int, str]:
    """A rank of a run whose step 11 fails; all but the first see an old listing of the checkpoints."""
    complete = CheckpointDirectory.complete
    if rank:
        CheckpointDirectory.complete = lambda self: complete(self)[:-1]  # type: ignore[method-assign]
    try:
        with rank_variables(rank, world, port), spoilt("nan", NAN):
            return train_rank(arguments)
    finally:
        CheckpointDirectory.complete = complete  # type: ignore[method-assign]


def _train(run: RunFile, pool: Pool, *overrides: str) -> list[tuple[int, str]]:
    arguments = [str(run.path), "parallel.data=2", *overrides]
    return pool.apart(2, _with_old_listings, arguments, free_port())


def test_a_run_resumes_and_rolls_back_where_listings_are_old(pool: Pool, tmp_path: Path, data: str) -> None:
    run = write_run(tmp_path, data)
    assert _train(run, pool, "run.steps=8") == [(0, "")] * 2
    options = ("run.steps=12", "checkpoint.resume=must", "faults.not_finite=roll_back")
    assert _train(run, pool, *options) == [(0, "")] * 2
    assert run.checkpoints == [4, 8, 12] and len(run.losses) == 12
    assert "rolled back to step 8" in run.metrics[8]["fault"]


@pytest.mark.parametrize("damaged", ["stop", pytest.param("previous", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_set_aside_where_listings_are_old(
    pool: Pool, tmp_path: Path, data: str, damaged: str
) -> None:
    run = write_run(tmp_path, data)
    assert _train(run, pool, "run.steps=8") == [(0, "")] * 2
    (run.newest / "rank-00000.safetensors").write_bytes(b"")
    outcomes = _train(run, pool, "run.steps=8", f"checkpoint.damaged={damaged}")
    if damaged == "stop":
        assert [status for status, _ in outcomes] == [2, 2] and "move it away" in outcomes[1][1]
    else:
        assert outcomes == [(0, "")] * 2 and len(run.losses) == 8
