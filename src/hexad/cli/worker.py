"""One rank of a command, as :mod:`hexad.train.local` starts it: ``python -m hexad.cli.worker PARENT train
run.yaml key=value``, where PARENT is the process id of the command."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable

from hexad.train.environment import end_with, hold_back_notice

if __name__ == "__main__":
    # The imports below take seconds.
    hold_back_notice()
    end_with(int(sys.argv[1]))

import torch.distributed as dist

from hexad.comm import CommError
from hexad.config import USER_ERROR, AgreedError, ConfigError, HexadError

from .main import fail, speaks


def attempt(action: Callable[[], None]) -> tuple[int, str, bool]:
    """Do this rank's work; returns (exit status, message, whether all ranks have the same message)."""
    try:
        action()
    except (AgreedError, ConfigError) as error:
        return USER_ERROR, str(error), True
    except HexadError as error:
        return USER_ERROR, str(error), False
    except CommError as error:  # a peer is lost; its own message says why
        return 1, f"CommError: {error}", False
    except KeyboardInterrupt:  # a second one: the first stops gracefully
        return 130, "interrupted", True
    except Exception as error:
        traceback.print_exc()
        return 1, f"{type(error).__name__}: {error}", False
    return 0, "", True


def work(action: Callable[[], None]) -> int:
    """Do this rank's work without a parent that collects messages; one rank prints a common message."""
    status, message, same = attempt(action)
    if status and (speaks() or not same):
        fail(message, status=status)
    _end_if_deserted(status)
    return status


def _end_if_deserted(status: int) -> None:
    """After a failure among several ranks, end at once: threads may be waiting for lost peers, and would keep
    the process alive until run.timeout."""
    if status == 1 and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Entry point of a rank that ``hexad`` itself has started: the message goes to torchrun's error file,
    from which the parent process prints one line."""
    command, *arguments = sys.argv[2:]
    if command == "train":
        from .train import train_here

        action = lambda: train_here(arguments)  # noqa: E731
    elif command == "generate":
        from .generate import generate_here

        action = lambda: generate_here(json.loads(arguments[0]))  # noqa: E731
    else:
        raise SystemExit(f"unknown worker command {command!r}")
    status, message, _ = attempt(action)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if status and error_file:
        # By one rename: the parent may end this rank at any moment, and cannot read half a file.
        with open(f"{error_file}.partial", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}, file)
        os.replace(f"{error_file}.partial", error_file)
    sys.stdout.flush()
    _end_if_deserted(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
