"""Resuming: from where, in another layout, after a crash anywhere in a save, and from damaged files."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hexad.checkpoint.directory import CheckpointDirectory
from hexad.checkpoint.manifest import read_manifest, verify_files

from .. import forks
from ..pool import Pool
from .command import FOUR, RunFile, write_run
from .conftest import MakeRun
from .crash import POINTS


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["asynchronous", "synchronous"],
)
def crashed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """A run per crash point, killed there."""
    directory = tmp_path_factory.mktemp("crashes")
    for point in POINTS:
        checkpoint = {"asynchronous": request.param, "keep": 1}
        write_run(directory / point, data, checkpoint=checkpoint)
    command = [sys.executable, "-m", "tests.training.crash", str(directory)]
    result = forks.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return directory


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_anywhere_in_a_save_loses_nothing_but_steps(crashed: Path, alone: RunFile, point: str) -> None:
    run = RunFile(crashed / point / "run.yaml", crashed / point / "run")
    done = point in ("after rename", "before latest", "after latest", "in retention")
    assert run.checkpoints[-1] == (8 if done else 4)
    if point != "in retention":  # the older one is on its way out, and latest names the newer
        assert run.newest.name == ("step-00000008" if point == "after latest" else "step-00000004")
    assert not verify_files(run.newest, read_manifest(run.newest))
    result = run.train()
    assert result.status == 0 and f"step {8 if done else 4}," in result.err
    assert run.losses == alone.losses[:12]
    # Nothing half-written is left, and keep is honoured.
    assert sorted(p.name for p in (run.directory / "checkpoints").iterdir()) == ["latest", "step-00000012"]
    assert run.newest.name == "step-00000012"


def test_resume_auto_never_must(make_run: MakeRun, alone: RunFile) -> None:
    run = make_run()
    result = run.train("checkpoint.resume=must")
    assert result.status == 2
    assert result.error.startswith("checkpoint.resume: found must, but ")
    assert not run.losses
    assert run.train("checkpoint.resume=never", "run.steps=5").status == 0
    result = run.train("checkpoint.resume=never")
    assert result.status == 2
    assert result.error.startswith("checkpoint.resume: found never, but ") and "run.dir" in result.error
    assert len(run.losses) == 5
    assert run.train("checkpoint.resume=must", "run.steps=7").status == 0
    assert run.train("checkpoint.resume=auto").status == 0
    assert run.losses == alone.losses[:12]
    assert run.checkpoints == [7, 8, 12]
    assert "nothing to do" in run.train().err
    assert run.losses == alone.losses[:12]


def test_load_starts_from_a_checkpoint_of_another_run(make_run: MakeRun, alone: RunFile) -> None:
    from_run, from_checkpoint = make_run(), make_run()
    assert from_run.train(f"checkpoint.load={alone.directory}", "run.steps=26").status == 0
    assert [line["step"] for line in from_run.metrics] == [25, 26]
    path = alone.directory / "checkpoints" / "step-00000016"
    assert from_checkpoint.train(f"checkpoint.load={path}", "run.steps=20").status == 0
    assert [line["loss"] for line in from_checkpoint.metrics] == alone.losses[16:20]
    # From now on its own checkpoints count.
    assert from_checkpoint.train(f"checkpoint.load={path}", "run.steps=24").status == 0
    assert [line["loss"] for line in from_checkpoint.metrics] == alone.losses[16:24]
    result = make_run().train("checkpoint.load=nowhere")
    assert result.status == 2 and result.error.startswith("checkpoint.load: nowhere: neither a checkpoint")


def test_the_layout_may_change_between_stop_and_resume(make_run: MakeRun, alone: RunFile, pool: Pool) -> None:
    run = make_run()
    assert run.train("run.steps=4").status == 0
    assert run.world(pool, 4, *FOUR, "run.steps=8") == [(0, "")] * 4
    assert run.world(pool, 2, "parallel.tensor=2", "run.steps=12") == [(0, "")] * 2
    assert run.world(pool, 2, "run.steps=16") == [(0, "")] * 2
    assert run.train("run.steps=20").status == 0
    pipeline = ("parallel.pipeline=2", "parallel.schedule=zb_h1", "parallel.tensor=2")
    assert run.world(pool, 4, *pipeline, "run.steps=22") == [(0, "")] * 4
    assert run.world(pool, 3, "parallel.pipeline=3", "run.steps=23") == [(0, "")] * 3
    assert run.train("run.steps=24").status == 0
    np.testing.assert_allclose(run.losses, alone.losses[:24], rtol=1e-9)
    assert run.losses != alone.losses[:24]  # other orders of summation: it did run in other layouts


def test_a_decoupled_learning_rate_resumes(make_run: MakeRun, pool: Pool) -> None:
    given = ("optimizer.decoupled_lr=1e-4", "lr_schedule.decoupled_min_lr=5e-5")
    alone, run = make_run(), make_run()
    assert alone.train(*given, "run.steps=6", "lr_schedule.decay_steps=6").status == 0
    layout = ("parallel.zero=3", "parallel.pipeline=2", "run.steps=3", "lr_schedule.decay_steps=6")
    assert run.world(pool, 4, *given, *layout) == [(0, "")] * 4
    assert run.train(*given, "run.steps=6", "lr_schedule.decay_steps=6").status == 0
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-9)


@pytest.mark.slow
def test_the_division_of_state_may_change_too(make_run: MakeRun, alone: RunFile, pool: Pool) -> None:
    """A share of a bucket is rectangles of global tensors like everything else."""
    run, step = make_run(), 0
    for ranks, settings in (
        (3, ("parallel.zero=1",)),
        (2, ("parallel.zero=3",)),
        (1, ()),
        (4, ("parallel.zero=2", "parallel.replicas=2")),
        (4, ("parallel.zero=3", "parallel.tensor=2", "memory.recompute=full")),
        (
            4,
            ("parallel.zero=2", "parallel.pipeline=2", "parallel.schedule=zb_h1", "memory.offload=optimizer"),
        ),
        (2, ("parallel.zero=1", "memory.offload=optimizer")),
    ):
        step += 3
        assert run.world(pool, ranks, *settings, "batch.global=12", f"run.steps={step}") == [(0, "")] * ranks
    other = make_run()
    assert other.train("batch.global=12", f"run.steps={step}").status == 0
    np.testing.assert_allclose(run.losses, other.losses, rtol=1e-9)
    assert run.losses != other.losses


def test_changed_settings_are_told(make_run: MakeRun) -> None:
    run = make_run()
    assert run.train("run.steps=2").status == 0
    result = run.train(
        "run.steps=4", "run.seed=5", "optimizer.lr=0.02", "parallel.zero=1", "lr_schedule.decay_steps=auto"
    )
    changes = [line.partition("changed since: ")[2] for line in result.err.splitlines()]
    assert [line for line in changes if line] == [
        "run.seed: 1234 -> 5",
        "parallel.zero: 0 -> 1",
        "optimizer.lr: 0.01 -> 0.02",
        "lr_schedule.decay_steps: 40 -> 4",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden=32", "model.hidden: found 32, but checkpoint "),
        ("model.layers=2", "model.layers: found 2, but checkpoint "),
        ("model.family=qwen3", "model.family: found 'qwen3', but checkpoint "),
        ("precision.dtype=fp32", "precision.dtype: "),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(alone: RunFile, override: str, message: str) -> None:
    before = alone.losses
    result = alone.train(override, "run.steps=30")
    assert result.status == 2 and result.error.startswith(message)
    assert alone.losses == before


DAMAGES = {
    "a cut tensor file": ("rank-00000.safetensors", lambda data: data[: len(data) // 2]),
    "no tensor file": ("rank-00000.safetensors", lambda data: None),
    "a changed value": ("rank-00000.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "no manifest": ("manifest.json", lambda data: None),
    "a cut manifest": ("manifest.json", lambda data: data[:20]),
    "another manifest": ("manifest.json", lambda data: b"[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_ends_in_one_line(alone: RunFile, make_run: MakeRun, tmp_path: Path, damage: str) -> None:
    run = make_run()
    shutil.copytree(alone.directory, run.directory)
    name, change = DAMAGES[damage]
    path = run.newest / name
    changed = change(path.read_bytes())
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)
    result = run.train("run.steps=26")
    assert result.status == 2
    assert "step-00000024" in result.error and "Traceback" not in result.err
    # As the message says: without it, the run goes on from the one before.
    shutil.rmtree(run.newest)
    assert run.train("run.steps=26").status == 0
    assert run.losses[:24] == alone.losses


def test_damage_is_told_alike_by_all_ranks(alone: RunFile, make_run: MakeRun, pool: Pool) -> None:
    run = make_run()
    shutil.copytree(alone.directory, run.directory)
    path = run.newest / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16  # in what one of the two ranks reads
    path.write_bytes(content)
    outcomes = run.world(pool, 2, "parallel.tensor=2", "run.steps=26")
    assert {status for status, _ in outcomes} == {2}
    assert len({message for _, message in outcomes}) == 1
    assert "damaged" in outcomes[0][1]


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_save_that_fails_ends_the_run_in_one_line(make_run: MakeRun, asynchronous: str) -> None:
    run = make_run()
    run.directory.mkdir()
    (run.directory / "checkpoints").symlink_to(run.directory / "no" / "such")
    result = run.train(f"checkpoint.asynchronous={asynchronous}")
    assert result.status == 2
    assert result.error.startswith("checkpoint of step 4: cannot be written to ")


def test_a_damaged_checkpoint_is_set_aside_where_the_settings_say_so(
    alone: RunFile, make_run: MakeRun, pool: Pool
) -> None:
    run = make_run()
    shutil.copytree(alone.directory, run.directory)
    for step in (24, 20):
        path = run.directory / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    settings = ("parallel.tensor=2", "checkpoint.damaged=previous", "run.steps=24")
    assert run.world(pool, 2, *settings) == [(0, "")] * 2
    assert [line["step"] for line in run.metrics] == list(range(1, 25))
    np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-9)
    names = {path.name for path in (run.directory / "checkpoints").iterdir()}
    assert names == {
        "latest", "step-00000016", "step-00000020", "step-00000024",
        "damaged-step-00000020", "damaged-step-00000024",
    }  # fmt: skip
    # With no other left, nothing is started from damaged values or from the beginning.
    shutil.rmtree(run.directory / "checkpoints")
    shutil.copytree(alone.newest, run.directory / "checkpoints" / "step-00000024")
    (run.directory / "checkpoints" / "step-00000024" / "manifest.json").write_bytes(b"?")
    outcomes = run.world(pool, 2, *settings)
    assert {status for status, _ in outcomes} == {2} and "damaged: manifest.json" in outcomes[0][1]


@pytest.fixture
def small_disk(make_run: MakeRun) -> Iterator[tuple[RunFile, Callable[[str], None]]]:
    """A run whose checkpoints are on a disk with room for one and a half, and how to resize it."""
    run = make_run()
    assert run.train("run.steps=4").status == 0
    folder = run.directory / "checkpoints"
    need = sum(path.stat().st_size + 4096 for path in run.newest.iterdir())
    shutil.rmtree(folder)
    folder.mkdir()

    def mount(options: str) -> int:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        return subprocess.run(command, capture_output=True).returncode

    if shutil.which("mount") is None or mount(f"size={need * 3 // 2}"):
        pytest.skip("mounting a file system needs privileges")
    yield run, lambda options: mount(f"remount,{options}") and None
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk(
    small_disk: tuple[RunFile, Callable[[str], None]], alone: RunFile, pool: Pool, asynchronous: str
) -> None:
    run, resize = small_disk
    settings = ("parallel.data=2", f"checkpoint.asynchronous={asynchronous}", "checkpoint.keep=1")
    stopped = run.world(pool, 2, *settings)
    assert {status for status, _ in stopped} == {2} and len(set(stopped)) == 1
    assert "checkpoint of step 8: cannot be written" in stopped[0][1] and "No space left" in stopped[0][1]
    assert run.checkpoints == [4] and not verify_files(run.newest, read_manifest(run.newest))
    # As configured, training goes on; but a run whose last checkpoint is missing has not succeeded.
    outcomes = run.world(pool, 2, *settings, "checkpoint.on_failure=continue")
    assert {status for status, _ in outcomes} == {2}
    assert "checkpoint of step 12: cannot be written" in outcomes[0][1]
    assert len(run.losses) == 12 and run.checkpoints == [4]
    log = (run.directory / "log-rank0.txt").read_text()
    assert "checkpoint of step 8: cannot be written" in log and "continuing (checkpoint.on_failure)" in log
    assert {path.name for path in run.newest.parent.iterdir()} == {"latest", "step-00000004"}
    resize("size=100m")
    assert run.world(pool, 2, *settings) == [(0, "")] * 2
    assert run.checkpoints == [12]
    np.testing.assert_allclose(run.losses, alone.losses[:12], rtol=1e-9)


def test_verification_can_be_turned_off(alone: RunFile, make_run: MakeRun) -> None:
    run = make_run()
    shutil.copytree(alone.directory, run.directory)
    path = run.newest / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert run.train("run.steps=25").status == 2
    assert run.train("run.steps=25", "checkpoint.verify=false").status == 0


def test_the_batch_may_change_and_the_samples_follow_on(
    make_run: MakeRun, alone: RunFile, pool: Pool
) -> None:
    """The same 24 samples in the same order, however cut into steps, microbatches and ranks: with next
    to no learning rate a sample's loss does not depend on the step it is in."""
    still = ("optimizer.lr=1e-30", "lr_schedule.min_lr=0", "lr_schedule.kind=constant")
    run, reference = make_run(), make_run()
    assert reference.train(*still, "batch.global=1", "run.steps=24").status == 0
    losses = reference.losses
    assert run.train(*still, "run.steps=2").status == 0  # samples 0 to 7
    settings = (*still, "batch.global=6", "batch.micro=3", "run.steps=4", "parallel.data=2")
    assert run.world(pool, 2, *settings) == [(0, "")] * 2  # 8 to 19
    assert run.train(*still, "batch.global=2", "batch.micro=2", "run.steps=6").status == 0  # 20 to 23
    assert [line["samples"] for line in run.metrics] == [4, 8, 14, 20, 22, 24]
    ends = [0, *(line["samples"] for line in run.metrics)]
    expected = [float(np.mean(losses[begin:end])) for begin, end in pairwise(ends)]
    np.testing.assert_allclose(run.losses, expected, rtol=1e-9)


def test_a_vanished_run_directory_is_told(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unmounted disk must not be replaced by a folder of its name."""
    run, begin = make_run(), CheckpointDirectory.begin

    def unmounted(self: CheckpointDirectory, step: int) -> Path:
        if step == 8:
            shutil.rmtree(self.path.parent)
        return begin(self, step)

    monkeypatch.setattr(CheckpointDirectory, "begin", unmounted)
    result = run.train()
    assert result.status == 2 and result.error.startswith("checkpoint of step 8: cannot be written to ")
    assert "No such file or directory" in result.error and not run.directory.exists()
