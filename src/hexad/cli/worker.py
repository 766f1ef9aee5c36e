"""One rank of a command, as torchrun starts it: ``python -m hexad.cli.worker train run.yaml key=value``."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from hexad.comm import CommError
from hexad.config import HexadError

from .main import fail

USER_ERROR = 2


def attempt(action: Callable[[], None]) -> tuple[int, str]:
    """Do this rank's work; returns (exit status, message)."""
    try:
        action()
    except HexadError as error:
        return USER_ERROR, str(error)
    except CommError as error:  # a peer is gone; its own message says why
        return 1, f"CommError: {error}"
    except KeyboardInterrupt:  # a second one: the first asks politely
        return 130, "interrupted"
    except Exception as error:
        traceback.print_exc()
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def _end_with(parent: int) -> None:
    """End this rank when the command that started it is gone: kill -9 leaves it no chance to say so."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def work(action: Callable[[], None]) -> int:
    """Do this rank's work where nobody collects messages; a user's error, being the same on all ranks, is
    printed by the first rank of each host."""
    status, message = attempt(action)
    if status and (status != USER_ERROR or os.environ.get("LOCAL_RANK", "0") == "0"):
        fail(message, status=status)
    return status


def main() -> None:
    """Entry point of a rank that ``hexad`` itself has started: the message goes to torchrun's error file,
    from which the parent process prints one line."""
    command, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="hexad-parent").start()
    if command == "train":
        from .train import train_here

        action = lambda: train_here(arguments)  # noqa: E731
    elif command == "generate":
        from .generate import generate_here

        action = lambda: generate_here(json.loads(arguments[0]))  # noqa: E731
    else:
        raise SystemExit(f"unknown worker command {command!r}")
    status, message = attempt(action)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if status and error_file:
        with open(error_file, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}, file)
    sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    main()
