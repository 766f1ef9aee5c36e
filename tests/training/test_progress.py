"""The progress bar on a terminal: drawn once, below the log."""

import contextlib
import io
import logging
import re
from typing import Any

import pytest

from hexad.model.configuration import load_config
from hexad.training.callbacks import Callback
from hexad.training.loop import train

from .conftest import MakeRun

WIDTH = 100


class Terminal(io.StringIO):
    """What was written to it, and the screen that a terminal shows of that."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines, after line feeds, carriage returns, and the codes for moving up and erasing a line."""
        lines, row, column = [""], 0, 0
        for code, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", self.getvalue()):
            if text:
                line = lines[row].ljust(column)
                lines[row], column = line[:column] + text + line[column + len(text) :], column + len(text)
            elif code == "\r":
                column = 0
            elif code == "\n":
                row, column = row + 1, 0  # terminals return the carriage too
                lines += [""] * (row == len(lines))
            elif code == "\x1b[2K":
                lines[row] = ""
            elif code.endswith("A"):
                row = max(0, row - int(code[2:-1] or 1))
            else:  # colours; the cursor's visibility
                assert code.endswith("m") or code in ("\x1b[?25l", "\x1b[?25h"), repr(code)
        return [line.rstrip() for line in lines]


class Saying(Callback):
    """Logs a line after each step, and stops the run after one of them."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_step(self, run: Any, metrics: Any) -> None:
        logging.getLogger("hexad").info("said after step %d", run.engine.step)
        print("printed", run.engine.step)
        if run.engine.step == self.last:
            run.stop()


@pytest.mark.parametrize("last", [4, 2])
def test_log_lines_and_the_progress_bar_do_not_mix(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Also in a run that is stopped, whose last line follows the bar."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(WIDTH))):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    run = make_run(run={"steps": 4})
    terminal, output = Terminal(), io.StringIO()
    with contextlib.redirect_stderr(terminal), contextlib.redirect_stdout(output):
        outcome = train(load_config(run.path), [Saying(last)])
    screen = [line for line in terminal.screen() if line]
    bars = [number for number, line in enumerate(screen) if line.startswith("step ")]
    said = [number for number, line in enumerate(screen) if "said after step" in line]
    assert len(bars) == 1 and f" {outcome.step}/4 " in screen[bars[0]], screen
    for number, line in enumerate(screen):
        assert number in bars or re.fullmatch(r"\d\d:\d\d:\d\d \S.*", line), screen
    assert [screen[number].split(maxsplit=1)[1] for number in said] == [
        f"said after step {step}" for step in range(1, outcome.step + 1)
    ]
    assert max(said) < bars[0]
    # Standard output is no terminal here: what is printed stays there.
    assert output.getvalue().splitlines() == [f"printed {step}" for step in range(1, outcome.step + 1)]
