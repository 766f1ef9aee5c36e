"""Files that a user names."""

import errno
import os
import stat
from pathlib import Path

_PIPES_OF_COMMANDS = ("/proc/", "/dev/fd/")
"""Where ``/dev/stdin`` and a shell's ``<(command)`` are links to."""


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
