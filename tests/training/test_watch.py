"""What the watch says of collectives that a device carries out after they were waited for, and the launcher
of a rank that torch's watchdog has aborted."""

import io
import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hexad.comm import Pending, Trace
from hexad.comm.collectives import _start
from hexad.launching import watch
from hexad.launching.local import LocalOutcome, _Agent
from hexad.launching.watch import Watch
from hexad.topology.mesh import Axis

from .command import LONGEST

TIMEOUT = 0.5
AXIS = "data (ranks 0,1)"


class Work:
    """NCCL's: to wait for it returns at once."""

    def __init__(self) -> None:
        self.done, self.asked = False, 0

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        self.asked += 1
        return self.done


def enqueue(trace: Trace, operation: str = "all_reduce", axis: str = "data") -> Work:
    """Start a collective on a device and wait for it."""
    work, tensor = Work(), torch.zeros(2)
    place = Axis(axis, (0, 1), trace=trace)
    pending: Pending = _start(operation, place, tensor.nbytes, tensor, lambda: work)
    pending.wait()
    return work


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_what_was_only_enqueued_is_not_finished(tmp_path: Path) -> None:
    trace = Trace(step=3)
    watch = Watch(trace, 60, io.StringIO(), 0, tmp_path)
    first, second, other = enqueue(trace), enqueue(trace), enqueue(trace, axis="tensor")

    def words() -> str:
        watch._unfinished = trace.unfinished()
        return watch.words()

    assert "last finished" not in words() and words().count("not completed by the device") == 2
    assert trace.waiting is None and trace.finished is None
    first.done = True
    assert f"all_reduce over axis {AXIS}" in words()  # there is still the second
    second.done = other.done = True
    assert words().startswith("step 3, last finished all_reduce over axis ")
    assert all(entry.work is None for entry in trace._enqueued.values())  # no result is kept in memory


def test_the_training_thread_does_not_ask_for_completion() -> None:
    """A query of an event would end the capture of a graph."""
    trace = Trace()
    assert enqueue(trace).asked == 0
    assert [call.kind.what for call in trace.unfinished()] == [f"all_reduce over axis {AXIS}"]


def test_the_watch_uses_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask on the first GPU, which a new thread has, would start CUDA there on behalf of every rank."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    gpu = torch.device("cuda", 3)
    with (tmp_path / "log").open("w+") as file, Watch(Trace(), 60, file, 0, tmp_path, gpu):
        until(lambda: bool(chosen))
    assert chosen == [gpu]


def test_the_device_s_progress_counts(tmp_path: Path) -> None:
    trace = Trace()
    works = [enqueue(trace) for _ in range(3)]
    assert trace.unfinished()
    changes = trace.changes
    for work in works:
        work.done = True
    assert not trace.unfinished() and trace.changes > changes


def test_words_record_and_message_are_written_before_the_watchdog_aborts(
    tmp_path: Path, error_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pickle.dumps({"entries": [{"state": "started"}], "version": "2.10", "pg_config": {}})
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: content, raising=False)
    trace = Trace()
    enqueue(trace).done = True
    with (tmp_path / "log").open("w+") as file, Watch(trace, TIMEOUT, file, 3, tmp_path) as watch:
        assert watch._limit < TIMEOUT  # when torch aborts
        stuck = enqueue(trace, "all_gather")
        record = tmp_path / "flight-recorder/rank_3"
        until(record.exists)
        message = json.loads(error_file.read_text())["message"]["message"]
        assert message == f"CommError: all_gather over axis {AXIS} timed out: not completed within 0 s"
        assert record.read_bytes() == content
        file.seek(0)
        text = file.read()
        assert f"step 0, not completed by the device: all_gather over axis {AXIS}, 8 bytes" in text
        assert "most recent call first" in text
        stuck.done = True  # in the last moment: what happens later is another failure
        until(lambda: not error_file.exists())


def test_torch_s_own_dump_goes_to_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"TORCH_FR_BUFFER_SIZE": "7"})
    watch.enable_flight_recorder(tmp_path, 100_000, timeout=900.5)
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight-recorder" / "rank_")
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"  # the user's
    assert int(os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) == 1021  # above the collectives' timeout
    assert os.environ["TORCH_NCCL_COORD_CHECK_MILSEC"] == "100000"  # 1,000 calls of the store per second


def agent(tmp_path: Path, ends: dict[int, tuple[int, str]], **state: set[int]) -> LocalOutcome:
    """What a launcher says of ranks that ended with these statuses and messages."""
    failures = {}
    for rank, (status, message) in ends.items():
        path = tmp_path / f"error{rank}.json"
        path.write_text(json.dumps({"message": {"message": message}}) if message else "")
        failures[rank] = SimpleNamespace(exitcode=status, pid=100 + rank, error_file=path, timestamp=rank)
    made: Any = object.__new__(_Agent)
    made._ended_by_us, made._stopped, made._killed = set(), set(), set()
    made._run_dir = str(tmp_path)
    vars(made).update({f"_{name}": value for name, value in state.items()})
    return made.failure(SimpleNamespace(failures=failures))


def test_an_abort_after_a_timeout_is_reported_as_a_timeout(tmp_path: Path) -> None:
    message = f"CommError: all_reduce over axis {AXIS} timed out: not completed within 600 s"
    ends = {0: (-signal.SIGABRT, message), 1: (-signal.SIGKILL, "")}
    failure = agent(tmp_path, ends, ended_by_us={1}, killed={1})
    assert failure.message is not None and failure.status == 1
    assert failure.message.startswith(f"rank 0 (process 100) was aborted by torch's watchdog: {message}")
    assert "; rank 1 hung; " in failure.message and "SIGABRT" not in failure.message
    assert "log-rank" not in failure.message
    (tmp_path / "log-rank1.txt").touch()
    failure = agent(tmp_path, ends, ended_by_us={1}, killed={1})
    assert failure.message is not None and f"(log-rank*.txt in {tmp_path})" in failure.message
    # A rank that was killed is what the others waited for.
    failure = agent(tmp_path, {0: ends[0], 1: (-signal.SIGSEGV, "")})
    assert failure.message is not None and "rank 1 (process 101) was killed by SIGSEGV" in failure.message
    # One that notices the abort, and has written its message first, is not the cause.
    lost = (1, "CommError: all_reduce failed: connection closed by peer")
    failure = agent(tmp_path, {0: lost, 1: ends[0]})
    assert failure.message is not None and failure.message.startswith("rank 1 (process 101) was aborted")
    # Without the message it is any abort.
    failure = agent(tmp_path, {0: (-signal.SIGABRT, "")})
    assert failure.message is not None and "was killed by SIGABRT" in failure.message
