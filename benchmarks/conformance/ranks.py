"""Ranks as forks of this process, with a deadline: ranks that hang are an outcome."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

DEADLINE = 120.0


class Hang(Exception):
    """Ranks did not answer."""


class RankFailed(Exception):
    """A rank raised an exception; the text is the last line of its message."""


def run(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on the ranks of a new gloo world; returns each rank's result.

    Raises:
        Hang: not all have answered before the deadline.
        RankFailed: one raised an exception.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(False)
            place = rank, world, f"file://{directory}/store", theirs
            process = context.Process(target=_rank, args=(place, function, arguments))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _answers(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + DEADLINE
    while len(results) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in results]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            raise Hang(f"{len(waiting)} of {len(pipes)} ranks without an answer after {DEADLINE:.0f} s")
        for pipe in ready:
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, "a rank ended without an answer"
            if not good:
                raise RankFailed(value)
            results[pipes.index(pipe)] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(place: tuple[int, int, str, Connection], function: Callable[..., Any], arguments: Any) -> None:
    import torch.distributed as dist

    rank, world, store, pipe = place
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=DEADLINE)
        )
        answer = True, function(*arguments)
    except BaseException as exception:
        if os.environ.get("CONFORMANCE_TRACEBACK"):
            traceback.print_exc()
        lines = str(exception).strip().splitlines() or [""]
        answer = False, f"{exception.__class__.__name__}: {lines[-1][:160]}"
    pipe.send(answer)
    # The others may still be reading from this rank's sockets.
    time.sleep(0.2 if world > 1 else 0)
    os._exit(0)
