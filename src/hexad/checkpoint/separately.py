"""Long calculations in a process of their own. No torch.

To check, compress and encode millions of rectangles takes a minute of Python, in which a background thread
would hold up the training of its rank, and with it that of all others.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable

_COMMAND = "from hexad.checkpoint.separately import main; main()"


def separately(action: Callable[[], None]) -> None:
    """Do something picklable in another process, and wait for it without holding this one's interpreter.

    Raises:
        Exception: what the action raised.
        OSError: the process ended in another way.
    """
    command = [sys.executable, "-c", _COMMAND]
    ended = subprocess.run(command, input=pickle.dumps(action), stdout=subprocess.PIPE, check=False)
    if ended.returncode == 0:
        return
    try:
        error = pickle.loads(ended.stdout)
    except (EOFError, pickle.UnpicklingError):
        error = OSError(0, f"the process that writes the manifest ended with status {ended.returncode}")
    raise error


def main() -> None:
    """The process: an action on stdin; its error, if there is one, on stdout."""
    try:
        pickle.load(sys.stdin.buffer)()
    except Exception as error:
        pickle.dump(error, sys.stdout.buffer)
        sys.exit(1)
