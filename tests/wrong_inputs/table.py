"""Writes ``docs/wrong-inputs.md`` from a run of all wrong inputs: ``python -m tests.wrong_inputs.table``."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from .cases import GROUPS, Case
from .places import clear, make, outcome

PAGE = Path(__file__).parents[2] / "docs" / "wrong-inputs.md"

_HEAD = """\
<!-- Written by 'python -m tests.wrong_inputs.table'. Do not edit. -->

# Wrong inputs and what is said about them

{count} wrong inputs, each with the line that `hexad` prints after `hexad: error: `, and the seconds it takes
to refuse it, without those in which Python and torch are imported. The exit status is 2. The slowest took
{slowest:.1f} s. `run.yaml` is correct; the names of other files say what is wrong with them
(`tests/wrong_inputs/places.py`). The last three of the environment wait for other ranks, here for a
`run.timeout` of half a second.
"""


def row(directory: Path, case: Case) -> tuple[str, float]:
    """The line of the table, and seconds."""
    clear()
    result, seconds = outcome(case)
    line = result.error.replace(f"{directory}/", "").replace("|", "\\|").replace("<", "&lt;")
    command = case.command.replace("|", "\\|")
    return f"| `{command}` | {line} | {seconds:.2f} |", seconds


def page(directory: Path) -> str:
    """Run everything and describe it."""
    lines: list[str] = []
    times: list[float] = []
    for name, cases in GROUPS.items():
        lines += ["", f"## {name}", "", "| hexad | error | seconds |", "|---|---|---|"]
        for case in cases:
            line, seconds = row(directory, case)
            lines.append(line)
            times.append(seconds)
    return _HEAD.format(count=len(times), slowest=max(times)) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        where = Path(name).resolve()
        make(where)
        with contextlib.chdir(where):
            text = page(where)
    PAGE.write_text(text, encoding="utf-8")
