"""Progress of commands that work through tokens."""

from __future__ import annotations

import time


class TokenProgress:
    """A bar on stderr of things that have tokens, with tokens per second; hidden where that is no terminal.

    Attributes:
        done: how many are done, without those that were before.

    Args:
        what: things in the plural, as in ``texts``.
        total: their number.
        before: of those that were done already.
        shown: False on ranks that show nothing.
    """

    def __init__(self, what: str, total: int, before: int = 0, shown: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
        hidden = not (shown and console.is_terminal)
        self._bar = Progress(*columns, console=console, disable=hidden, transient=True)
        self._task = self._bar.add_task(what, total=total, completed=before, rate="")
        self._what, self._began, self._tokens, self._before = what, time.monotonic(), 0, before
        self.done = 0

    def add(self, count: int, tokens: int) -> None:
        """Count some that are done, and their tokens."""
        self._tokens += tokens
        self.done += count
        self._bar.update(self._task, advance=count, rate=f"{self._rate():,.0f} tokens/s")

    def _rate(self) -> float:
        return self._tokens / max(1e-9, time.monotonic() - self._began)

    def summary(self, path: str) -> str:
        """What was done, for the end."""
        before = f" ({self._before:,} were there)" if self._before else ""
        numbers = f"{self._tokens:,} tokens, {self._rate():,.0f} tokens/s"
        return f"{path}: {self.done:,} {self._what}{before}, {numbers}"

    def __enter__(self) -> TokenProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
