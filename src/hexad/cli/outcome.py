"""How a rank's work ends: exit status and message, and who prints it."""

import os
import sys
import traceback
from collections.abc import Callable

import click
import torch.distributed as dist

from hexad.comm import CommError
from hexad.config import USER_ERROR, AgreedError, ConfigError, HexadError

from .options import fail, fail_once, in_options


def attempt(action: Callable[[], None]) -> tuple[int, str, bool]:
    """Do this rank's work; returns (exit status, message with marked names, whether all ranks have the same
    message)."""
    try:
        action()
    except HexadError as error:
        return USER_ERROR, error.marked, isinstance(error, AgreedError | ConfigError)
    except CommError as error:  # a peer is lost; its own message has the reason
        return 1, f"CommError: {error}", False
    except KeyboardInterrupt:  # a second one: the first stops gracefully
        return 130, "interrupted", True
    except Exception as error:
        traceback.print_exc()
        return 1, f"{type(error).__name__}: {error}", False
    return 0, "", True


def work(action: Callable[[], None]) -> int:
    """Do this rank's work without a parent that collects messages; one rank of a host prints a common one."""
    status, message, same = attempt(action)
    if status:
        context = click.get_current_context(silent=True)
        message = in_options(message, None if context is None else context.command)
        (fail_once if same else fail)(message, status=status)
    if status == 1 and dist.is_initialized():
        # Threads may be waiting for lost peers, and would keep the process alive until run.timeout.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
