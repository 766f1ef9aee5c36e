"""A plugin of pytest that writes every test's outcome as soon as it is known, one JSON line each."""

import json
import os
from pathlib import Path
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """A test's outcome, and the last line of what went wrong or why it was skipped."""
    if report.when != "call" and report.outcome == "passed":
        return
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    _write(line | {"why": why.strip().splitlines()[-1][:300] if why.strip() else ""})


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed", "why": str(report.longrepr).splitlines()[-1]})


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ["HEXAD_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
