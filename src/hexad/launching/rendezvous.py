"""Rendezvous: the store through which process groups are connected, and idle ranks, for which the layout has
no work, wait for the end of the run."""

import logging
import os
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hexad.comm import CommError
from hexad.config import AgreedError, Config, HexadError

from .environment import DEFAULT_PORT, Environment, first_host
from .stop import STOP_SIGNALS

_POLL = 0.05  # seconds
_EVERY = 10.0  # seconds between messages
_UNKNOWN_HOST = 60.0  # seconds in which the first rank's host may become known
_OTHER_FILES = 512
"""Files of rank 0 beside the connections of its store: those of process groups, data and checkpoints."""
_ASKS, _JOINED, _COMPLETE = "hexad/asks", "hexad/joined", "hexad/complete"


def meet(here: Environment, members: int, timeout: float) -> dist.Store:
    """The store of this world's ranks, the same and fresh for all of them; all ``here.world`` ranks call this
    together. The first ``members`` of them create process groups; others are waited for ``timeout`` seconds.

    Raises:
        HexadError: the port is in use or does not answer, at an address that the user or SLURM has set.
        CommError: the same if an elastic agent has started the ranks: it may restart them.
    """
    address = os.environ.get("MASTER_ADDR") or _slurm_first_host()
    port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
    limit = timedelta(seconds=timeout)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return _fresh(here, lambda: dist.TCPStore(address, port, timeout=limit, wait_for_workers=False))
        if here.rank:
            _reach(address, port, here, timeout)
        else:
            allow_connections(here.world)
        store = _store(address, port, here, limit)
        # Idle ranks may connect at any time: only members are waited for.
        if here.rank < members:
            _wait_for_members(store, f"{address}:{port}", here, members, timeout)
        return store
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        text = str(error)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise CommError(f"rendezvous at {address}:{port} failed ({timeout:.0f} s): {text}") from error
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise HexadError(
                f"port {port} of {address} is in use; set another with torchrun --master-port or MASTER_PORT"
            ) from error
        raise HexadError(f"rendezvous at {address}:{port} failed ({timeout:.0f} s): {text}") from error


def _store(address: str, port: int, here: Environment, limit: timedelta) -> dist.TCPStore:
    """The store of the ranks, which the first one serves. It accepts what anyone sends who can connect: where
    all ranks are on one host, it listens at their address only, which :mod:`hexad.launching.local` sets to
    the loopback interface's."""
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
    listener = None
    if here.rank == 0 and here.alone_on_host:
        with suppress(OSError):  # an address that is another machine's, which forwards to this one
            listener = socket.create_server((address, port), backlog=max(128, here.world))
            options["master_listen_fd"] = listener.detach()
    try:
        return dist.TCPStore(address, port, None, here.rank == 0, limit, **options)
    except BaseException:
        if listener is not None:
            os.close(options["master_listen_fd"])
        raise


def allow_connections(ranks: int) -> None:
    """Raise this process's limit of open files, so that the store can serve a connection of each rank.

    Raises:
        HexadError: the system's limit is too low.
    """
    needed = ranks + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise HexadError(
                f"rank 0 may open {hard} files, but needs {needed} for connections of {ranks} ranks; raise "
                "the limit on its host (ulimit -Hn, systemd's LimitNOFILE)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _reach(address: str, port: int, here: Environment, timeout: float) -> None:
    """Wait until the first rank listens, and say so; torch's store would report in its own way that it does
    not yet.

    Raises:
        DistNetworkError: its host is unknown, or it does not answer in time.
    """
    begin = said = time.monotonic()
    while True:
        unknown = False
        try:
            socket.create_connection((address, port), timeout=max(1.0, timeout / 60)).close()
            return
        except OSError as error:
            problem, unknown = error.strerror or str(error), isinstance(error, socket.gaierror)
        now = time.monotonic()
        # Names of containers may become known a little later.
        if now - begin > (min(timeout, _UNKNOWN_HOST) if unknown else timeout):
            raise dist.DistNetworkError(f"{problem}; {_origin(here)}")
        if now - said >= _EVERY and here.local_rank == 0:
            said = now
            _say(f"rank {here.rank} waits for rank 0 at {address}:{port}: {problem} ({_origin(here)})")
        time.sleep(0.2)


def _wait_for_members(
    store: dist.TCPStore, place: str, here: Environment, members: int, timeout: float
) -> None:
    """Wait until all ranks that create process groups have joined; the first one says who is missing.

    Raises:
        DistStoreError: they have not, in time.
    """
    begin = said = time.monotonic()
    joined = store.add(_JOINED, 1)
    if here.rank:  # one rank counts, so that thousands do not ask
        try:
            store.wait([_COMPLETE], timedelta(seconds=timeout))
        except dist.DistStoreError:
            joined = store.add(_JOINED, 0)
            raise dist.DistStoreError(f"{joined} of {members} ranks have joined; {_origin(here)}") from None
        return
    while joined < members:
        now = time.monotonic()
        if now - begin > timeout:
            raise dist.DistStoreError(f"{joined} of {members} ranks have joined; {_origin(here)}")
        if now - said >= _EVERY:
            said = now
            _say(f"{joined} of {members} ranks have joined at {place}; waiting ({_origin(here)})")
        time.sleep(_POLL)
        joined = store.add(_JOINED, 0)
    store.set(_COMPLETE, "")


def _origin(here: Environment) -> str:
    """The source of the number of ranks."""
    if here.launcher == "slurm":
        return f"SLURM_NTASKS={here.world}"
    return f"WORLD_SIZE={here.world} is set in the environment; unset it to run alone"


def _say(message: str) -> None:
    print(f"hexad: {message}", file=sys.stderr, flush=True)


def _fresh(here: Environment, connect: Callable[[], dist.TCPStore]) -> dist.Store:
    """A prefix of torchrun's store that only the ranks of this start use.

    The store outlives the ranks: restarted ranks would find the addresses of dead ones in it and wait for
    them (pytorch issue 135712). torchrun provides no identifier of a start that is common to all hosts. So
    each rank sends a request under a random key, and the first rank answers all with one random prefix.
    """
    store = connect()
    if here.rank == 0:
        name = secrets.token_hex(8)
        answering = (connect(), name, here.world - 1)
        threading.Thread(target=_answer, args=answering, name="hexad-meet", daemon=True).start()
    else:
        question = secrets.token_hex(8)
        store.append(_ASKS, f"{question} ")  # type: ignore[attr-defined]  # missing in torch's stubs
        name = store.get(f"hexad/answer/{question}").decode()
        store.add(f"{name}/met", 1)
    return dist.PrefixStore(name, store)


def _answer(store: dist.Store, name: str, others: int) -> None:
    """Answer until all other ranks of this start have confirmed; requests of earlier starts are harmless."""
    answered: set[str] = set()
    try:
        while store.add(f"{name}/met", 0) < others:
            asked = store.get(_ASKS).decode().split() if store.check([_ASKS]) else []
            for question in asked:
                if question not in answered:
                    store.set(f"hexad/answer/{question}", name)
                    answered.add(question)
            time.sleep(_POLL)
    except (dist.DistNetworkError, dist.DistStoreError):
        return  # the store is gone: the ranks get this error themselves


def _slurm_first_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    return socket.gethostname() if "SLURM_PROCID" in os.environ else "localhost"


log = logging.getLogger("hexad")

_END, _LEFT = "hexad/end", "hexad/left"

_POLL_END = 0.2  # seconds

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
            time.sleep(_POLL_END)
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
        time.sleep(_POLL_END / 10)
