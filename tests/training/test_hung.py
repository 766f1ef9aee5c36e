"""Ranks that hang: found by run.timeout, told in words, ended soon."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .command import Process, RunFile, wait_until_gone
from .conftest import MakeRun

Start = Callable[..., Process]
TIMEOUT = 8.0

# Imported by every process whose PYTHONPATH has its folder. Rank 1 hangs in step 6, once per run.dir.
HANG = """
import ctypes, os, pathlib, sys, threading, time
once = pathlib.Path(__file__).with_name("hung")
class Work:  # NCCL's, of a peer that hangs
    wait = is_completed = lambda self: False
def abort(trace):  # as torch's watchdog does
    from hexad.comm.trace import Call, Kind
    work = Work()
    kind = Kind("all_reduce over axis tensor (ranks 0,1)", "", "tensor")
    trace.wait(Call(kind, 8, time.time()), work.wait, work)
    while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]):
        time.sleep(0.01)
    os.abort()
def watch():
    while True:
        module = sys.modules.get("hexad.engine.engine")
        if module is not None and hasattr(module, "Engine"):
            break
        threading.Event().wait(0.01)
    made = module.Engine.train_step
    def step(engine, *arguments):
        if engine.step == 5 and not once.exists():
            once.touch()
            while True:
                if "{how}" == "abort":
                    abort(engine.mesh.trace)
                if "{how}" == "lock":
                    ctypes.PyDLL(None).sleep(3600)  # holds Python's lock
        return made(engine, *arguments)
    module.Engine.train_step = step
if os.environ.get("RANK") == "1":
    threading.Thread(target=watch, daemon=True).start()
"""


def begin(how: str, run: RunFile, start: Start, tmp_path: Path, *overrides: str) -> Process:
    """A run on two ranks, the second of which will hang."""
    variables = {}
    if how != "stop":
        folder = tmp_path / "hang"
        folder.mkdir()
        # In front of the site's own, if there is one: none of it is needed.
        (folder / "sitecustomize.py").write_text(HANG.replace("{how}", how))
        path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(path)
    layout = ("parallel.tensor=2", f"run.timeout={TIMEOUT}")
    process = start(run.arguments(*layout, *overrides), **variables)
    process.wait_for_step(run, 5)
    if how == "stop":
        os.kill(process.ranks()[1], signal.SIGSTOP)
    return process


@pytest.mark.parametrize(
    "how", ["stop", *(pytest.param(how, marks=pytest.mark.slow) for how in ("loop", "lock"))]
)
def test_a_hung_rank_ends_the_run_and_leaves_its_stacks(
    make_run: MakeRun, start: Start, tmp_path: Path, how: str
) -> None:
    run = make_run(run={"steps": 10**6})
    process = begin(how, run, start, tmp_path)
    ranks = process.ranks()
    result = process.wait()
    wait_until_gone(ranks.values())
    assert result.status == 1
    assert re.fullmatch(
        r"rank 0 \(process \d+\) failed with exit status 1: CommError: .* over axis \w+ .*; rank 1 hung; .*",
        result.error,
    )
    waiting, hung = ((run.directory / f"log-rank{rank}.txt").read_text() for rank in range(2))
    call = r"\w+ over axis (tensor|world) \(ranks 0,1\), \d+ bytes, started at \d\d:\d\d:\d\d"
    words = rf"step [1-9]\d*, (waiting in|last finished) {call}"
    for text in (waiting, hung):
        assert "most recent call first" in text
    assert re.search(rf"no progress for \d+ s \(run.timeout is 8 s\); {words}", waiting)
    if how == "stop":  # told once it runs again, although it is about to end
        assert re.search(rf"no progress for \d+ s, in which no Python ran .*; {words}", hung)
    elif how == "lock":  # no Python could run there
        assert re.search(rf'File "as last seen: {words}"', hung) and "sitecustomize.py" in hung
    elif how == "loop":
        assert re.search(rf"no progress for \d+ s .*; {words}", hung) and "sitecustomize.py" in hung


@pytest.mark.slow
def test_an_abort_by_torch_s_watchdog_is_a_timeout(make_run: MakeRun, start: Start, tmp_path: Path) -> None:
    run = make_run(run={"steps": 10**6})
    result = begin("abort", run, start, tmp_path).wait()
    call = r"all_reduce over axis tensor \(ranks 0,1\)"
    assert result.status == 1
    assert re.match(
        rf"rank 1 \(process \d+\) was aborted by torch's watchdog: CommError: {call} timed out", result.error
    )
    log = (run.directory / "log-rank1.txt").read_text()
    assert re.search(rf"step \d+, not completed by the device: {call}, 8 bytes", log)


@pytest.mark.slow
def test_a_hung_rank_is_restarted(make_run: MakeRun, start: Start, tmp_path: Path) -> None:
    run = make_run(run={"steps": 10})
    result = begin("loop", run, start, tmp_path, "faults.restarts=1").wait()
    assert result.status == 0, result.err
    assert "rank 1 hung" in result.err and "restart 1 of 1: resuming after step 4" in result.err
    assert len(run.losses) == 10
