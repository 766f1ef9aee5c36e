"""Runs in stages: evaluation, own schedules, timelines; every one with the losses of one rank."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexad.parallel.pipeline.schedule import Schedule, forward_schedule, write_schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.simulate import TIMELINE
from hexad.parallel.pipeline.validate import validate

from ..pool import Pool
from .command import RunFile, call
from .conftest import MakeRun

TIED: dict[str, Any] = {"layers": 3, "tied_embeddings": True}


def reversed_ranks(schedule: Schedule) -> Schedule:
    """The last rank first: the embedding lies on the last one."""
    placement = tuple(schedule.pipeline - 1 - rank for rank in schedule.placement)
    return Schedule("mine", schedule.microbatches, placement, schedule.ranks[::-1])


def one_stage_after_another(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """All forwards, then all backwards, for stages that lie anywhere."""
    forward = forward_schedule(placement, microbatches)
    ranks = [
        (*actions, *(action._replace(kind="BW") for action in reversed(actions))) for actions in forward.ranks
    ]
    return Schedule("mine", microbatches, placement, tuple(ranks))


OWN = {
    "the last rank first": reversed_ranks(build_schedule("zb_h1", 3, 4)),
    "neighbours together": one_stage_after_another((0, 0, 1, 2), 4),
    "to and fro": one_stage_after_another((1, 0, 2, 1, 0), 4),
}


def same_numbers(run: RunFile, other: RunFile) -> None:
    for name in ("loss", "grad_norm", "validation_loss"):
        values, wanted = ([line[name] for line in one.metrics if name in line] for one in (run, other))
        assert values == pytest.approx(wanted, rel=1e-10)
    assert "validation_loss" in run.metrics[1]


Pair = Callable[..., tuple[RunFile, RunFile]]


@pytest.fixture
def pair(make_run: MakeRun, data: str) -> Pair:
    """Makes a run, still to be started, and the same one done on one rank, evaluating every other step."""
    groups: dict[str, dict[str, Any]] = {
        "run": {"steps": 4},
        "model": TIED,
        "data": {"validation": data.removesuffix("train") + "validation"},
        "validate": {"every": 2, "batches": 3},
    }

    def make(**more: dict[str, Any]) -> tuple[RunFile, RunFile]:
        run, alone = make_run(**groups, **more), make_run(**groups, **more)
        assert alone.train().status == 0
        return run, alone

    return make


@pytest.mark.parametrize(
    "name", [name if name == "to and fro" else pytest.param(name, marks=pytest.mark.slow) for name in OWN]
)
def test_own_schedules(name: str, pair: Pair, pool: Pool, tmp_path: Path) -> None:
    run, alone = pair()
    path = tmp_path / "mine.json"
    validate(OWN[name])
    write_schedule(OWN[name], path)
    assert call("show", "schedule", "--file", str(path), "--json").status == 0
    assert run.world(pool, 3, "parallel.pipeline=3", f"parallel.schedule={path}") == [(0, "")] * 3
    same_numbers(run, alone)


INTERLEAVED = ("parallel.schedule=interleaved", "parallel.virtual_stages=2")


@pytest.mark.parametrize(
    ("ranks", "overrides", "more"),
    [
        (2, ("parallel.pipeline=2", "parallel.schedule=zb_v"), {}),
        # More sends than are ever left unconfirmed.
        (4, ("parallel.pipeline=4",), {"batch": {"micro": 1, "global": 16}}),
        (4, ("parallel.pipeline=2", "parallel.data=2", *INTERLEAVED), {}),
    ],
)
def test_evaluation(
    ranks: int, overrides: tuple[str, ...], more: dict[str, Any], pair: Pair, pool: Pool
) -> None:
    run, alone = pair(**more)
    assert run.world(pool, ranks, *overrides) == [(0, "")] * ranks
    same_numbers(run, alone)


def test_a_timeline(make_run: MakeRun, pool: Pool, tmp_path: Path) -> None:
    run = make_run(run={"steps": 3}, model=TIED, log={"timeline": 2})
    overrides = ("parallel.pipeline=2", "parallel.schedule=zb_h1", "parallel.tensor=2")
    assert run.world(pool, 4, *overrides) == [(0, "")] * 4
    tree = json.loads((run.directory / TIMELINE).read_text())
    assert tree["step"] == 2
    planned, measured = tree["planned"], tree["measured"]
    schedule = build_schedule("zb_h1", 2, 4)
    for one in (planned, measured):
        for actions, wanted in zip(one["ranks"], schedule.ranks):
            assert [(a["kind"], a["stage"], a["microbatch"]) for a in actions] == [tuple(a) for a in wanted]
            times = [time for action in actions for time in (action["start"], action["end"])]
            assert times == sorted(times) and times[0] >= 0
        # A forward begins after that of the stage before has ended.
        ends = {a["microbatch"]: a["end"] for a in one["ranks"][0] if a["kind"] == "F"}
        assert all(a["start"] >= ends[a["microbatch"]] for a in one["ranks"][1] if a["kind"] == "F")

    def busy(one: dict[str, Any]) -> float:
        return sum(action["end"] - action["start"] for actions in one["ranks"] for action in actions)

    assert busy(planned) == pytest.approx(busy(measured))
    assert measured["makespan"] <= run.metrics[1]["step_seconds"]
    picture = tmp_path / "timeline.svg"
    assert call("show", "schedule", str(run.directory), "--output", str(picture)).status == 0
    assert picture.stat().st_size > 1000


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no stage on a rank": ({"ranks": [[["F", 0, 0], ["BW", 0, 0]], []]}, "rank 1 of 2 has no stage"),
    "a gap": ({"ranks": [[["F", 0, 7], ["BW", 0, 7]]]}, "found microbatch 7 but no microbatch 0"),
    "a huge number": ({"ranks": [[["F", 0, 10**12]]]}, "found microbatch 1000000000000 but no"),
    "backward first": ({"ranks": [[["BW", 0, 0], ["F", 0, 0]]]}, "rank 0"),
    "another placement": (
        {"ranks": [[["F", 0, 0], ["BW", 0, 0]]], "placement": [1]},
        "placement: found [1]",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_schedules(name: str, make_run: MakeRun, tmp_path: Path) -> None:
    tree, says = BROKEN[name]
    keys = ("kind", "stage", "microbatch")
    ranks = [[dict(zip(keys, action)) for action in actions] for actions in tree["ranks"]]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({**tree, "ranks": ranks}))
    result = make_run().train(f"parallel.schedule={path}", f"parallel.pipeline={len(ranks)}")
    assert result.status == 2
    assert result.error.startswith(f"parallel.schedule: {path}: ") and says in result.error
    shown = call("show", "schedule", "--file", str(path))
    assert shown.status == 2 and str(path) in shown.error and says in shown.error


def test_a_schedule_of_another_size(make_run: MakeRun, tmp_path: Path) -> None:
    path = str(tmp_path / "mine.json")
    write_schedule(build_schedule("1f1b", 2, 8), path)
    run = make_run(model=TIED)
    refused = run.train(f"parallel.schedule={path}", "parallel.pipeline=2", "--nproc", "2")
    assert refused.status == 2
    assert refused.error.startswith("batch.global: found 4") and "use 8" in refused.error
    refused = run.train(f"parallel.schedule={path}", "parallel.pipeline=3", "--nproc", "3")
    assert refused.status == 2 and refused.error.startswith("parallel.pipeline: found 3")
