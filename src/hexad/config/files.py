"""Files that a user names."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

_PIPES_OF_COMMANDS = ("/proc/", "/dev/fd/")
"""Targets of the links ``/dev/stdin`` and a shell's ``<(command)``."""


def readable(path: str | Path) -> Path:
    """The path of a file that can be read to its end.

    Raises:
        OSError: there is none, or a device, or a named pipe, which may never have one.
    """
    mode = os.stat(path).st_mode
    pipe = stat.S_ISFIFO(mode) and os.path.realpath(path).startswith(_PIPES_OF_COMMANDS)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or pipe):
        raise OSError(errno.EINVAL, "found a device, pipe or socket, expected a file", str(path))
    return Path(path)


LARGEST_JSON = 256 << 20
"""Bytes of a JSON file, all of which is in memory: the index of a model with a million tensors has 100 MB."""


def read_bounded(path: str | Path, most: int) -> bytes:
    """The content of a file.

    Raises:
        OSError: as for :func:`readable`, or it has more than ``most`` bytes.
    """
    with open(readable(path), "rb") as file:
        content = file.read(min(most, max(os.fstat(file.fileno()).st_size, 1 << 16)) + 1)
        if len(content) <= most:
            content += file.read(most + 1 - len(content))  # of a pipe, which has no size
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def read_json(path: str | Path, most: int = LARGEST_JSON) -> Any:
    """The content of a JSON file from elsewhere.

    Raises:
        OSError: as for :func:`read_bounded`.
        ValueError: it is not JSON in UTF-8, nested too deeply, or has a number of too many digits.
    """
    try:
        return json.loads(read_bounded(path, most).decode("utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
