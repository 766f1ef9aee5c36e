"""A pool of worker processes that form worlds of any size, over gloo, started once per test session.

Workers are forks of a server that has imported torch (:mod:`tests.forks`). After each job the garbage
collector sets aside what imports have left: to visit it would take 0.1 s per job.
"""

import gc
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection, wait
from typing import Any

from .forks import call, status_of

MAX_RANKS = 8
TIMEOUT = 120.0


def uncollected() -> AbstractContextManager[Callable[[int], object]]:
    """In place of :func:`hexad.training.pace.collected_by_step`, after which collections visit all objects
    again: half a million of a session of tests, or all that a worker has imported."""
    return nullcontext(lambda step: None)


def work(descriptor: int) -> None:
    """Do one job after the other, as they come over a pipe."""
    from hexad.training import loop

    loop.collected_by_step = uncollected  # type: ignore[assignment]
    pipe = Connection(descriptor)
    with suppress(EOFError, BrokenPipeError):  # the tests have ended
        while True:
            _answer(pipe, *pipe.recv())


def _answer(
    pipe: Connection,
    rank: int,
    world: int,
    store: str | None,
    kept: bool,
    backend: str,
    timeout: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Call a function as a rank of a world, or of one that it makes itself, and send what it returns. A world
    that is ``kept`` is that of the next job too, if it comes with the same store."""
    global _joined
    try:
        if store != _joined:
            _leave()
            if store is not None and world > 1:
                _join(rank, world, store, backend, timedelta(seconds=timeout))
        pipe.send((True, function(*arguments)))
    except BaseException as error:
        kept = False
        pipe.send((False, (error.__class__.__name__, str(error), traceback.format_exc())))
    finally:
        _joined = store
        if not kept:
            _leave()
        gc.collect()  # an engine is a web of references that would keep its groups' threads
        gc.freeze()


_joined: str | None = None
"""The store of the world that this process is a rank of."""
in_world: dict[str, Any] = {}
"""What its jobs leave to each other."""


def _join(rank: int, world: int, store: str, backend: str, limit: timedelta) -> None:
    import torch.distributed as dist

    if backend == "staged":
        from . import staged  # noqa: F401  # registers it
    meeting = _meeting(store, limit)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world, timeout=limit)
    # A rank whose function fails at once would leave while others still connect to it.
    meeting.set(f"joined {rank}", "")
    meeting.wait([f"joined {other}" for other in range(world)], limit)


_clients: dict[int, Any] = {}
"""Connections to stores, by port."""


def _meeting(address: str, limit: timedelta) -> Any:
    """The store at ``port/name``: a part of one that all jobs of a pool share."""
    import torch.distributed as dist

    port, name = address.split("/")
    if int(port) not in _clients:
        _clients[int(port)] = dist.TCPStore("localhost", int(port), timeout=limit)
    return dist.PrefixStore(name, _clients[int(port)])


def _leave() -> None:
    global _joined
    import torch.distributed as dist

    _joined = None
    in_world.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    else:  # a world that was not set up has counted as a group, and groups meet by their number
        dist.distributed_c10d._world.group_count = 0


class _Worker:
    """A worker process, as the pool sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._ending, self._process = call("tests.pool:work", theirs.fileno())
        self.pipe = Connection(ours.detach())

    @cached_property
    def status(self) -> int:
        """The exit status, once it has ended."""
        return status_of(self._ending)

    def kill(self) -> None:
        """End it, and wait until it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        assert self.status is not None
        self.pipe.close()


class RankError(Exception):
    """A function raised on at least one rank."""


class Pool:
    """Runs a function on N ranks at once and returns every rank's result.

    Args:
        backend: of the ranks' process group: ``gloo``, or that of :mod:`tests.staged`.
        timeout: of its collectives, seconds; ranks that have not answered after twice as long are given up.
    """

    def __init__(self, backend: str = "gloo", timeout: float = TIMEOUT) -> None:
        self._backend, self._timeout = backend, timeout
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="hexad-pool-")
        self._jobs = 0
        self._server: Any = None  # of a store in which the ranks of a world find each other
        self._kept: tuple[int, Any, str] | None = None  # a world: its size, what it is kept for, its store

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, keep: Any = None) -> list[Any]:
        """Call ``function(*arguments)`` on ranks 0..world-1 of a fresh world, or of the last job's, where the
        same is given to ``keep`` for both.

        Raises:
            RankError: with every failing rank's traceback.
        """
        again = keep is not None and self._kept is not None and self._kept[:2] == (world, keep)
        if not again:
            self.leave()
        store = self._kept[2] if self._kept is not None else self._address()
        self._kept = None
        results = self._run(
            [(rank, world, store, keep is not None, function, arguments) for rank in range(world)]
        )
        if keep is not None:
            self._kept = world, keep, store
        return results

    def leave(self) -> None:
        """End a world that is kept: its threads wake up a hundred times a second."""
        if self._kept is not None:
            size, self._kept = self._kept[0], None
            self._run([(rank, size, None, False, int, ()) for rank in range(size)])

    def _address(self) -> str:
        """Where a world meets. A store in a file would be asked every 10 ms."""
        import torch.distributed as dist

        if self._server is None:
            self._server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._jobs += 1
        return f"{self._server.port}/{self._jobs}"

    def store(self) -> str:
        """A file through which a world may meet. It stays as long as the pool: torch's store writes to it
        when it is freed, after its rank has answered."""
        self._jobs += 1
        return os.path.join(self._directory.name, str(self._jobs))

    def apart(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, world, *arguments)`` on each rank, which makes its world itself.

        Raises:
            RankError: with every failing rank's traceback.
        """
        self.leave()
        jobs = [(rank, world, None, False, function, (rank, world, *arguments)) for rank in range(world)]
        return self._run(jobs)

    def _run(self, jobs: list[tuple[Any, ...]]) -> list[Any]:
        world = len(jobs)
        if world > MAX_RANKS:
            raise ValueError(f"{world} ranks: at most {MAX_RANKS}")
        while len(self._workers) < world:
            self._workers.append(_Worker())
        waiting = {worker.pipe: rank for rank, worker in enumerate(self._workers[:world])}
        ended: dict[int, int | None] = {}
        for pipe, (rank, _, store, kept, function, arguments) in zip(list(waiting), jobs):
            try:
                pipe.send((rank, world, store, kept, self._backend, self._timeout, function, arguments))
            except BrokenPipeError:  # since its last answer
                ended[waiting.pop(pipe)] = self._workers[rank].status
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + (0 if ended else 2 * self._timeout)
        while waiting and (ready := wait([*waiting], end - time.monotonic())):
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ended[rank] = self._workers[rank].status
        failures = [f"--- rank {rank}: {value[2]}" for rank, (good, value) in answers.items() if not good]
        failures += [f"--- rank {rank}: its process ended with status {ended[rank]}" for rank in ended]
        if waiting and not ended:
            late = ", ".join(map(str, sorted(waiting.values())))
            failures.insert(0, f"ranks {late} of {world} did not answer within {2 * self._timeout:.0f} s")
        if waiting or ended:
            self.close()
        if failures:
            raise RankError("\n".join(failures))
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
