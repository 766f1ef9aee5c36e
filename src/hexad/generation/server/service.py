"""The generator of a server: it runs on a thread of its own, and its updates go to the requests' streams."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hexad.comm import CommError

from ..generator import Generator
from ..requests import Request, RequestUpdate
from .metrics import ServerMetrics

log = logging.getLogger("hexad")

_TURN = 0.5
"""Seconds after which an idle generator looks whether it is to stop."""


class Busy(Exception):
    """The queue of requests is full."""


class Unavailable(Exception):
    """The generator has stopped, or a rank is lost."""


@dataclass(frozen=True)
class Interrupted:
    """The last message to a stream that is not complete: the generator has stopped or failed."""


class Failed(Exception):
    """A request that cannot be completed: its logits are not finite, or its grammar is too complex."""


class Service:
    """Computes requests for streams, on the first rank.

    Attributes:
        generator: of all ranks.
        metrics: of what it does.
        failure: what ended it early; None if nothing did.

    Args:
        queue: requests that may wait.
    """

    def __init__(self, generator: Generator, metrics: ServerMetrics, queue: int) -> None:
        self.generator, self.metrics = generator, metrics
        self.failure: BaseException | None = None
        self._most = queue
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[int, asyncio.Queue[RequestUpdate | Interrupted]] = {}
        self._running = self._stopping = False
        self._failed: list[asyncio.Event] = []
        self._thread = threading.Thread(target=self._work, name="hexad-generator", daemon=True)

    @property
    def most(self) -> int:
        """Texts that may be under way: those that run, and those that wait."""
        return self.generator.sequences + self._most

    @property
    def room(self) -> int:
        """Texts that are accepted now."""
        return self.most - self.generator.front.unfinished

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self._running and not self._stopping and self.failure is None

    def start(self) -> None:
        """Start computing; called by the event loop that streams run in."""
        self._loop = asyncio.get_running_loop()
        self._running = True
        self._thread.start()

    async def failed(self) -> None:
        """Wait until the generator fails."""
        event = asyncio.Event()
        self._failed.append(event)
        if self.failure is None:
            await event.wait()

    def stop(self) -> None:
        """Accept no more, and end when nothing is left to compute."""
        self._stopping = True
        self.generator.front.wake()

    def abandon(self) -> None:
        """End the streams that are open, with an error; called by the event loop."""
        self._end()

    def join(self) -> None:
        """Wait until the generator has stopped on all ranks."""
        self._thread.join()

    async def stream(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, RequestUpdate]]:
        """Compute requests; yields the number of each among them, with its updates. A caller that does not
        take all of them cancels the requests.

        Raises:
            Busy: too many wait.
            Unavailable: the generator is not running, or has failed meanwhile.
            Failed: a request has.
        """
        front = self.generator.front
        if not self.ready:
            raise Unavailable("the server is stopping or has failed")
        if len(requests) > self.room:
            raise Busy
        queue: asyncio.Queue[RequestUpdate | Interrupted] = asyncio.Queue()
        numbers: dict[int, int] = {}
        for place, request in enumerate(requests):
            number = front.submit(request)
            numbers[number] = place
            self._queues[number] = queue
        began = before = time.monotonic()
        try:
            while numbers:
                update = await queue.get()
                if isinstance(update, Interrupted):
                    stopping = self.failure is None
                    raise Unavailable("the server is stopping" if stopping else "the server has failed")
                now = time.monotonic()
                self.metrics.update(update, now - before, first=before == began)
                before = now
                place = numbers[update.number]
                if update.ended == "failed":
                    raise Failed(f"request: {update.text}")
                if update.ended is not None:
                    del numbers[update.number], self._queues[update.number]
                yield place, update
        finally:
            for number in numbers:
                self._queues.pop(number, None)
                front.cancel(number)

    def _work(self) -> None:
        try:
            _, self.failure = self.generator.lead(self._serve)
        except BaseException as error:
            if not isinstance(error, CommError):  # of a lost rank, the message says it all
                log.exception("the generator has failed")
            self.failure = error
        self._running = False
        assert self._loop is not None
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end)

    def _serve(self) -> None:
        front, loop = self.generator.front, self._loop
        assert loop is not None
        while not self._stopping or front.unfinished:
            updates = front.turn(_TURN)
            self.metrics.state(front, self.generator)
            if updates:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            if (queue := self._queues.get(update.number)) is not None:
                queue.put_nowait(update)

    def _end(self) -> None:
        """Let all streams end, after a failure or a stop."""
        for queue in {id(queue): queue for queue in self._queues.values()}.values():
            queue.put_nowait(Interrupted())
        if self.failure is not None:
            for event in self._failed:
                event.set()
