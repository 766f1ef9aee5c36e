"""Tests of another project's repository, each in a process of its own, and how their results are counted."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE = 5.0
"""Seconds that the other ranks of a test have after one has failed."""

_MARK = "\x1e"


class OneProcessEach:
    """A plugin of pytest that forks a process for each test and reports a line of JSON for each.

    Args:
        chosen: the tests to run, of those collected.
        timeout: seconds of a test.
        before: called in the process of a test, before it.
    """

    def __init__(
        self,
        chosen: Callable[[list[Any]], list[Any]],
        timeout: float,
        before: Callable[[Any], None] = lambda item: None,
    ) -> None:
        self.chosen, self.timeout, self.before = chosen, timeout, before

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Choose the tests."""
        emit({"collected": len(items)})
        items[:] = self.chosen(items)

    def pytest_collectreport(self, report: Any) -> None:
        """Report files that cannot be imported."""
        if report.failed:
            emit({"test": report.nodeid, "outcome": "failed", "error": str(report.longrepr).splitlines()[-1]})

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """Run a test."""
        with tempfile.TemporaryDirectory() as directory:
            os.environ["HEXAD_REPORTS"] = directory
            begin, folder = time.monotonic(), Path(directory)
            child = os.fork()
            if not child:
                os.setsid()
                self._run(item, folder)
            report = self._wait(child, folder)
            emit({"test": item.nodeid, **report, "seconds": round(time.monotonic() - begin, 1)})
        return True

    def _run(self, item: Any, folder: Path) -> None:
        """A test, in its own process; does not return."""
        silence = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        self.before(item)
        (folder / "partial").write_text(json.dumps(outcome_of(item)))
        (folder / "partial").rename(folder / "report")
        os._exit(0)

    def _wait(self, child: int, folder: Path) -> dict[str, Any]:
        end, ended, failing = time.monotonic() + self.timeout, False, False
        while not ended and time.monotonic() < end:
            time.sleep(0.02)
            ended = bool(os.waitpid(child, os.WNOHANG)[0])
            if not failing and any(folder.glob("rank*")):
                failing, end = True, time.monotonic() + GRACE
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        errors = [path.read_text() for path in sorted(folder.glob("rank*"))]
        if errors:  # the first of those that are no consequence of another rank's end
            own = [error for error in errors if "onnection" not in error] or errors
            return {"outcome": "failed", "error": own[0]}
        if (folder / "report").exists():
            return dict(json.loads((folder / "report").read_text()))
        return {
            "outcome": "failed",
            "error": "the process ended" if ended else f"no end in {self.timeout:g} s",
        }


def outcome_of(item: Any) -> dict[str, Any]:
    """Run a test in this process: its outcome, and its error or why it is skipped."""
    from _pytest.runner import runtestprotocol

    report = {"outcome": "passed", "error": ""}
    try:
        for phase in runtestprotocol(item, log=False, nextitem=None):
            if phase.failed:
                crash = getattr(phase.longrepr, "reprcrash", None)
                return {"outcome": "failed", "error": short(crash.message if crash else str(phase.longrepr))}
            if phase.skipped:
                reason = phase.longrepr[-1] if isinstance(phase.longrepr, tuple) else str(phase.longrepr)
                report = {"outcome": "skipped", "error": short(reason.removeprefix("Skipped: "))}
    except BaseException as error:  # of the harness
        return {"outcome": "failed", "error": short(f"{type(error).__name__}: {error}")}
    return report


def report_rank(rank: str, error: str) -> None:
    """Report that a rank of a test has failed, which ends the test."""
    path = Path(os.environ["HEXAD_REPORTS"]) / f"rank{rank}"
    path.with_name(f".{path.name}").write_text(error)
    path.with_name(f".{path.name}").rename(path)


def short(message: str) -> str:
    """One line of an error; of a process that another one has started, its last."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if "ProcessRaisedException" in message:
        lines = lines[-1:]
    return " / ".join(lines[:2])[:300] if lines else ""


def emit(line: Mapping[str, Any]) -> None:
    """To the process that writes the results."""
    print(_MARK + json.dumps(line), file=sys.__stdout__, flush=True)


def reported(command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> Iterator[Any]:
    """What a process and its tests have passed to :func:`emit`."""
    path = os.pathsep.join([str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment
    process = subprocess.Popen(
        command, cwd=directory, env=variables, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    assert process.stdout is not None
    for line in process.stdout:
        if _MARK in line:
            yield json.loads(line.partition(_MARK)[2])
    process.wait()


def explain(result: dict[str, Any], reasons: Iterable[tuple[str, str, str, str]]) -> None:
    """Add the kind of a failure, and its reason.

    Args:
        result: of a test.
        reasons: pattern of the test's name, pattern of its error, kind, reason.
    """
    if result["outcome"] != "failed":
        return
    for test, error, kind, reason in reasons:
        if re.search(test, result["test"]) and re.search(error, result["error"]):
            result |= {"kind": kind, "reason": reason}
            return
    result |= {"kind": "unexplained", "reason": ""}


def kind_of(result: Mapping[str, Any]) -> str:
    """How a test is counted."""
    if result["outcome"] == "failed":
        return "fails with the package" if result.get("package") == "failed" else str(result["kind"])
    return str(result["outcome"])


def summary(results: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Numbers of tests; ``applicable`` are those that passed or differ."""
    counts = Counter(kind_of(result) for result in results)
    applicable = counts["passed"] + counts["differs"] + counts["unexplained"]
    return {"applicable": applicable, **dict(sorted(counts.items()))}


def commit_of(source: Path) -> str:
    """Of a checkout."""
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
