"""Figures of a step, written as they are measured, so that a kill at any moment loses none of them."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file in one step: a reader, or a kill, finds the old one or the new one."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """As :func:`write_json`, of any text."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def read_json(path: Path) -> dict[str, Any]:
    """What the file holds; nothing if it is not there."""
    with suppress(FileNotFoundError):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document
    return {}


class Record:
    """The file of one step.

    Args:
        path: of the file.
        seconds: in which the step has to end.
        pretend: the step runs on a CPU at toy sizes.

    Attributes:
        document: what the file holds: ``state`` (``running``, ``finished``, ``failed``, ``out of time``),
            ``pretend``, ``seconds``, ``figures``, ``reasons`` for figures that are null, and ``errors``: of
            parts that failed.
    """

    def __init__(self, path: Path, seconds: float, pretend: bool) -> None:
        self.path, self.pretend = path, pretend
        self._begin, self._limit = time.monotonic(), seconds
        self.document: dict[str, Any] = {"state": "running", "pretend": pretend, "limit_seconds": seconds}
        self.document |= {"seconds": 0.0, "figures": {}, "reasons": {}, "errors": {}}
        self._write()

    def left(self) -> float:
        """Seconds until the step is killed."""
        return self._limit - (time.monotonic() - self._begin)

    def put(self, name: str, value: Any) -> None:
        """A figure, or a group of them."""
        self.document["figures"][name] = value
        self._write()

    def add(self, name: str, row: dict[str, Any]) -> None:
        """One more row of a table."""
        self.document["figures"].setdefault(name, []).append(row)
        self._write()

    def absent(self, name: str, why: str) -> None:
        """A figure that does not exist here: null, with the reason."""
        self.document["figures"].setdefault(name, None)
        self.document["reasons"][name] = why
        self._write()

    def failed(self, part: str, why: str) -> None:
        """A part of the step has failed; the step will have, too."""
        self.document["errors"][part] = why[-1500:]
        self._write()

    @contextmanager
    def attempt(self, part: str) -> Iterator[None]:
        """Around a part of the step, whose failure does not keep the others from being tried."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed(part, f"{type(error).__name__}: {error}")

    def end(self) -> str:
        """The step is over; returns the state it is left in."""
        self.document["state"] = "failed" if self.document["errors"] else "finished"
        self._write()
        return str(self.document["state"])

    def _write(self) -> None:
        self.document["seconds"] = round(time.monotonic() - self._begin, 2)
        write_json(self.path, self.document)


def tables(record: dict[str, Any]) -> list[str]:
    """The figures of a step as Markdown: a table per list of rows, a list of the others."""
    errors = record.get("errors", {})
    lines = [f"- **failed: {part}**: {' / '.join(why.splitlines()[-4:])}" for part, why in errors.items()]
    for name, value in record.get("figures", {}).items():
        title = name.replace("_", " ")
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = list(dict.fromkeys(key for row in value for key in row))
            lines += [
                "",
                f"{title}:",
                "",
                f"| {' | '.join(column.replace('_', ' ') for column in columns)} |",
            ]
            lines.append("|---" * len(columns) + "|")
            lines += [f"| {' | '.join(_cell(row.get(key, '')) for key in columns)} |" for row in value]
            lines.append("")
        elif isinstance(value, dict):
            lines.append(f"- {title}: " + "; ".join(f"{key} {_cell(entry)}" for key, entry in value.items()))
        elif value is None:
            lines.append(f"- {title}: none: {record['reasons'].get(name, 'no reason given')}")
        else:
            lines.append(f"- {title}: {_cell(value)}")
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if value in (None, [], {}):
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")
