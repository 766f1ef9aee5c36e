"""A plugin of pytest that writes every test's outcome as soon as it is known, one JSON line each."""

import json
import os
from pathlib import Path
from typing import Any

LENGTH = 600
"""Characters of what is said of a test."""


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test that begins."""
    _write({"test": nodeid, "outcome": "running", "seconds": 0.0, "why": ""})


def pytest_runtest_logreport(report: Any) -> None:
    """A test's outcome, and what was asserted, with its values, or why it was skipped."""
    if report.when != "call" and report.outcome == "passed":
        return
    _write(
        {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "why": _why(report)}
    )


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported."""
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "why": _why(report)})


def _why(report: Any) -> str:
    """The error's message, on one line."""
    said = report.longrepr
    if isinstance(said, tuple):  # of a skipped test: path, line, reason
        said = said[2]
    crash = getattr(said, "reprcrash", None)
    text = " ".join(str(crash.message if crash else said or "").split())
    return text if len(text) <= LENGTH else f"{text[: LENGTH // 2]} ... {text[-LENGTH // 2 :]}"


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ["HEXAD_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
