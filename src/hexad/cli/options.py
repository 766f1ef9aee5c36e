"""Options, output and messages on stderr that several commands share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.progress import Progress

Command = TypeVar("Command", bound=Callable[..., Any])

overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


exact_option = click.option(
    "--exact",
    is_flag=True,
    help="The same bits in every layout and batch, those of training: precision.exact=true.",
)


def exactly(overrides: tuple[str, ...], exact: bool) -> tuple[str, ...]:
    """The overrides, with what ``--exact`` stands for."""
    return (*overrides, "precision.exact=true") if exact else overrides


def nproc_option(axis: str) -> Callable[[Command], Command]:
    """``--nproc`` of commands that start one rank by default and divide more along ``axis``."""
    return click.option(
        "--nproc",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help=f"Ranks: {axis}-parallel unless overridden.",
    )


def ranks_option(name: str, purpose: str) -> Callable[[Command], Command]:
    """``--nproc`` or ``--world`` of commands that take as few ranks as the degrees allow by default."""
    text = f"{purpose}. [default: as few as the degrees allow]"
    return click.option(name, type=click.IntRange(1), help=text)


def is_override(text: str) -> bool:
    """Whether an argument is a setting, ``KEY=VALUE``, and not a path with a ``=``: no key has a ``/``."""
    key, equals, _ = text.partition("=")
    return bool(equals) and "/" not in key and not os.path.exists(text)


def split_settings(command: str, settings: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """(path of a configuration or run, if given; ``KEY=VALUE`` overrides) of a command's arguments.

    Raises:
        HexadError: there are several paths.
    """
    from hexad.config import HexadError

    overrides = [text for text in settings if is_override(text)]
    paths = [text for text in settings if text not in overrides]
    if len(paths) > 1:
        raise HexadError(f"{command}: found several paths ({', '.join(paths)}); give one")
    return next(iter(paths), None), overrides


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    from hexad.config import json_text

    click.echo(json_text(document))


def answer(as_json: bool, document: Any, *lines: str) -> None:
    """Print a command's result on stdout: one JSON document, or lines of text."""
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(lines))


def progress_bar() -> Progress:
    """A progress bar of bytes on stderr; hidden where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def rank_of(command: str, request: dict[str, Any]) -> Callable[[], None]:
    """The work of one rank of a command: ``COMMAND_here(request)`` of its module."""
    return partial(getattr(import_module(f"hexad.cli.{command}"), f"{command}_here"), request)


def run_ranks(
    command: str, request: dict[str, Any], ranks: int, restarts: int = 0, run_dir: str | None = None
) -> int:
    """Run the ranks of a command and return the exit status; ``run_dir`` is the directory of their logs.

    Under a launcher, or as the only rank, this process is one; otherwise :func:`start_local` is called.
    """
    from hexad.launching.environment import environment

    if environment().joined or (ranks == 1 and not restarts):
        from .outcome import work

        return work(rank_of(command, request))
    return start_local(command, request, ranks, restarts, run_dir)


def start_local(
    command: str, request: dict[str, Any], ranks: int, restarts: int = 0, run_dir: str | None = None
) -> int:
    """Run a command on local ranks, restarted up to ``restarts`` times if they fail; returns the exit status.

    Args:
        command: see :mod:`hexad.cli.worker`.
        request: argument of :func:`rank_of`, representable in JSON.
        run_dir: the directory of the ranks' logs, if they write some.
    """
    from hexad.launching.local import run_local

    outcome = run_local([command, json.dumps(request)], ranks, restarts, run_dir)
    message = in_options(outcome.message or "", click.get_current_context().command)
    return fail(message, status=outcome.status) if message else outcome.status


def option(name: str) -> str:
    """The option for an argument of a Python function."""
    return f"--{name.replace('_', '-')}"


def in_options(message: str, command: click.Command | None) -> str:
    """A message with ``--top-k`` for the name ``top_k``, see :class:`~hexad.config.HexadError`; of a group
    with the options of all its commands."""
    from hexad.config import worded  # which takes a while

    commands, options = [] if command is None else [command], dict[str, str]()
    for command in commands:  # those of a group are added
        commands += command.commands.values() if isinstance(command, click.Group) else ()
        names = (option for param in command.params for option in param.opts if option.startswith("--"))
        options |= {option.removeprefix("--").replace("-", "_"): option for option in names}
    return worded(message, lambda name: options.get(name, name))


_RECENT = 60.0
"""Seconds for which a message counts as one of the same start."""


def fail(message: str, debug: bool = False, status: int = 2) -> int:
    """Print ``hexad: error: ...`` and return the exit status."""
    if debug:
        traceback.print_exc()
    print(f"hexad: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return status


def fail_once(message: str, debug: bool = False, status: int = 2) -> int:
    """Report an error that all ranks of this start have, as :func:`fail` does; see :func:`print_once`."""
    return print_once(message, lambda: fail(message, debug), status)


def print_once(message: str, say: Callable[[], object], status: int = 2) -> int:
    """Print a message that all ranks of this start have, once per host, and return the exit status: the first
    rank prints it, the others return afterwards. A launcher that ends all when one has ended cannot cut it
    off."""
    path = _shared_file(message)
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", ""))
    with suppress(OSError):
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                old = time.time() - os.fstat(descriptor).st_mtime > _RECENT
                been = file.read().split()
                if rank in been or old:  # of an earlier start by the same parent
                    file.seek(0)
                    file.truncate(0)
                    been = []
                if not been:
                    say()
                file.write(f"{rank}\n")
            return status
    say()
    return status


def _shared_file(message: str) -> Path | None:
    """A file that ranks of one start on this host have in common; None for a process by itself."""
    count = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else os.environ.get("SLURM_NTASKS")
    if count is None or not count.isdigit() or int(count) < 2:
        return None
    parts = [str(os.getppid()), *map(os.environ.get, ("TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")), message]
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    directory = Path(tempfile.gettempdir()) / f"hexad-{os.getuid()}"
    with suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return directory / name
    return None
