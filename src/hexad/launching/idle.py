"""Idle ranks, for which the layout has no work: they wait for the launcher's next restart."""

from __future__ import annotations

import logging
import signal
import time

import torch.distributed as dist

from hexad.comm import CommError
from hexad.config import AgreedError, Config

from .environment import Environment
from .rendezvous import meet
from .stop import STOP_SIGNALS

log = logging.getLogger("hexad")

_END, _LEFT = "hexad/end", "hexad/left"
_POLL = 0.2  # seconds
_FAREWELL = 10.0  # seconds


def wait_idle(config: Config, here: Environment, members: int) -> None:
    """Wait until the run has ended. Stop signals are handled by the training ranks, which end the run.

    Raises:
        AgreedError: the run ended with it.
        CommError: the run ended without a message.
    """
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        store = meet(here, members, config.run.timeout)
        while not store.check([_END]):
            time.sleep(_POLL)
        error = store.get(_END).decode()
        store.add(_LEFT, 1)
    except (dist.DistNetworkError, dist.DistStoreError) as gone:
        raise CommError(f"idle rank {here.rank} lost its connection to the run: {gone}") from gone
    finally:
        for number, action in previous.items():
            signal.signal(number, action)
    if error:
        raise AgreedError(error)


def dismiss(store: dist.Store, idle: int, error: str) -> None:
    """Notify idle ranks that the run has ended, and how; the store may end with this process."""
    store.set(_END, error)
    end = time.monotonic() + _FAREWELL
    while store.add(_LEFT, 0) < idle and time.monotonic() < end:
        time.sleep(_POLL / 10)
