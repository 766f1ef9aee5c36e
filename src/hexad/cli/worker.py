"""One rank of a command, as :mod:`hexad.launching.local` starts it: ``python -m hexad.cli.worker PARENT
SCRATCH COMMAND REQUEST``: PARENT is the command's process id, SCRATCH its directory of temporary files, and
REQUEST what it asks for, in JSON."""

import atexit
import json
import os
import signal
import sys

from hexad.launching.environment import end_with, hold_back_notice

if __name__ == "__main__":
    # The imports below take seconds. Until the run handles signals, Ctrl-C ends a rank without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    hold_back_notice()
    end_with(int(sys.argv[1]), sys.argv[2])

from hexad.launching.files import write_error

from .options import rank_of
from .outcome import attempt


def main() -> None:
    """Entry point of a rank that ``hexad`` itself has started: the message goes to torchrun's error file,
    from which the parent process prints one line."""
    command, request = sys.argv[3:]
    status, message, _ = attempt(rank_of(command, json.loads(request)))
    if status:
        write_error(message)
    sys.stdout.flush()
    sys.stderr.flush()
    if status != 1:  # after a failure among several ranks, what they call may wait for lost peers
        atexit._run_exitfuncs()
    # Python's own end would stop background threads wherever they are, which in C++ is an abort.
    os._exit(status)


if __name__ == "__main__":
    main()
