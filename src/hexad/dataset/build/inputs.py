"""The files that a user's inputs name: directories, links, patterns, and what is left out."""

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import NamedTuple

from hexad.config.errors import HexadError, counted, one_line


class InputFile(NamedTuple):
    """A file to read.

    Attributes:
        path: the file.
        named: whether the user gave its path, and not that of a directory in which it is: it is then an error
            if it is not text.
    """

    path: Path
    named: bool


class InputFiles(NamedTuple):
    """The result of :func:`find_files`.

    Attributes:
        files: to read.
        left_out: how many the patterns leave out.
        hidden: how many files and directories of directories are hidden, and left out.
        unread: path -> why it is left out, of all others.
    """

    files: list[InputFile]
    left_out: int
    hidden: int
    unread: dict[str, str]


def find_files(
    inputs: Sequence[str | Path], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> InputFiles:
    """The files named by ``inputs``, directories recursed in sorted order, links followed; hidden files are
    left out.

    Args:
        inputs: files or directories.
        include: glob patterns; if there are any, a file must match one of them.
        exclude: glob patterns of files to leave out. A pattern with a ``/`` is compared with the path below
            the directory given, one without with the file's name and those of the directories it is in; ``*``
            matches any characters.

    Raises:
        HexadError: an input does not exist, cannot be listed, or is a device or pipe, or nothing is found.
    """
    input_files = InputFiles([], 0, 0, {})
    for path in map(Path, inputs):
        if os.path.isdir(path):
            entries = [(entry, entry.path.relative_to(path)) for entry in _walk(path)]
            if not entries:
                input_files.unread[str(path)] = "an empty directory"
        elif os.path.isfile(path):
            entries = [(_Entry(path), path)]
        elif os.path.exists(path):
            raise HexadError(f"{path}: found a device, pipe or socket, expected a file or directory")
        else:
            raise HexadError(f"{path}: no such file or directory")
        for entry, inside in entries:
            excluded = _matches(inside, exclude)
            if entry.hidden:
                input_files = input_files._replace(hidden=input_files.hidden + 1)
            elif entry.error is not None and not excluded:  # whatever is in it may be included
                raise HexadError(
                    f"{entry.path}: cannot be read: {one_line(entry.error)} (``exclude`` leaves it out)"
                )
            elif excluded or (include and not _matches(inside, include)):
                input_files = input_files._replace(left_out=input_files.left_out + 1)
            elif entry.problem is not None:
                input_files.unread[str(entry.path)] = entry.problem
            else:
                input_files.files.append(InputFile(entry.path, not os.path.isdir(path)))
    if not input_files.files:
        what = f"--include and --exclude leave out all there is, {counted(input_files.left_out, 'file')}"
        raise HexadError(
            f"{', '.join(map(str, inputs))}: {what if input_files.left_out else 'no files found'}"
        )
    return input_files


def listed(unread: Mapping[str, str], most: int = 8) -> str:
    """The first of some paths, each with why it is not read, and how many more there are."""
    names = [f"{path} ({problem})" for path, problem in unread.items()]
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def _matches(path: PurePath, patterns: Sequence[str]) -> bool:
    return any(
        fnmatchcase(path.as_posix(), pattern)
        if "/" in pattern
        else any(fnmatchcase(part, pattern) for part in path.parts)
        for pattern in patterns
    )


class _Entry(NamedTuple):
    """An entry of a directory, at any depth, that is not a directory to descend into.

    Attributes:
        path: of it.
        problem: why it is not read; None for a file.
        error: with which it cannot be read.
        hidden: whether it is a hidden file or directory.
    """

    path: Path
    problem: str | None = None
    error: OSError | None = None
    hidden: bool = False


def _walk(top: Path) -> Iterator[_Entry]:
    """The entries of a directory and of those in it, links followed, as ``find -L`` does: the files of a
    directory before its directories, both sorted. A link to a directory that it is in ends there."""
    waiting: list[tuple[Path, tuple[tuple[int, int], ...]]] = [(top, ())]
    while waiting:
        directory, above = waiting.pop()
        try:
            status, names = directory.stat(), sorted(os.listdir(directory))
        except OSError as error:
            yield _Entry(directory, error=error)
            continue
        here = (*above, (status.st_dev, status.st_ino))
        inner = []
        for path in (directory / name for name in names):
            if (entry := _entry(path, here)) is None:
                inner.append((path, here))
            else:
                yield entry
        waiting += reversed(inner)


def _entry(path: Path, above: Sequence[tuple[int, int]]) -> _Entry | None:
    """An entry of a directory; None for a directory to descend into. ``above``: those that it is in."""
    if path.name.startswith("."):
        return _Entry(path, hidden=True)
    try:
        status = path.stat()
    except OSError as error:
        if error.errno == errno.ENOENT and path.is_symlink():
            return _Entry(path, "a dangling link")
        return _Entry(path, "a link to itself") if error.errno == errno.ELOOP else _Entry(path, error=error)
    if stat.S_ISDIR(status.st_mode):
        above_itself = (status.st_dev, status.st_ino) in above
        return _Entry(path, "a link to a directory that it is in") if above_itself else None
    return _Entry(path) if stat.S_ISREG(status.st_mode) else _Entry(path, "a device, pipe or socket")
