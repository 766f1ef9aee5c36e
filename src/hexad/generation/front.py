"""The front of a model's replicas on the first rank: it sends each request to the replica that has the least
to do, and collects the updates of all."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice
from multiprocessing.connection import Client, Connection, Listener, wait
from queue import SimpleQueue
from typing import Any

from hexad.comm import CommError, from_first
from hexad.topology.mesh import Mesh

from .messages import Add, Cancel, RequestUpdates, Stop, Stopped
from .replica import Replica
from .requests import Request, RequestUpdate

_AHEAD = 2
"""A replica is given so many times the sequences that it can run at once."""


_PATIENCE = 5.0
"""Seconds that the last messages may take."""


class Link:
    """A connection to another process. Messages are sent by a thread: a sender does not wait for a receiver
    that is sending itself."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="hexad-link", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Send a message; one that the receiver, being lost, does not get is noticed by :meth:`received`."""
        self._messages.put(message)

    def received(self) -> Iterator[Any]:
        """The messages that have arrived.

        Raises:
            CommError: the other process is lost.
        """
        try:
            while self.connection.poll():
                yield self.connection.recv()
        except (EOFError, OSError) as error:
            raise CommError("the leader of another replica, or the first rank, is lost") from error

    def wait(self) -> None:
        """Wait until a message arrives, or the other process is lost."""
        wait([self.connection])

    def close(self) -> None:
        """Close the connection, after what is still to be sent, if the other process takes it."""
        self._messages.put(None)
        self._thread.join(_PATIENCE)
        self.connection.close()

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self.connection.send(message)


def connected(mesh: Mesh) -> list[Link]:
    """The connections between the first rank and the leaders of other replicas; all ranks call this together.

    Returns:
        on the first rank one for each of the others, on another leader that to the first rank, else none.
    """
    leaders = mesh.layout.group(0, "data")
    if len(leaders) == 1:
        return []
    listeners: list[Listener] = []

    def listen() -> tuple[tuple[str, int], bytes]:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        key = os.urandom(32)
        listeners.append(Listener((host, 0), backlog=len(leaders), authkey=key))
        address: Any = listeners[0].address
        return (host, address[1]), key

    address, key = from_first(listen, mesh.world)
    if mesh.rank == 0:
        links = [Link(listeners[0].accept()) for _ in leaders[1:]]
        listeners[0].close()
        return links
    return [Link(Client(address, authkey=key))] if mesh.rank in leaders else []


def serve_link(replica: Replica, link: Link) -> None:
    """Compute what the first rank sends to another replica's leader, until it stops.

    Raises:
        CommError: the first rank is lost.
    """
    while True:
        if replica.idle:
            link.wait()
        for message in link.received():
            if isinstance(message, Stop):
                replica.stop()
                link.put(Stopped())
                return
            replica.receive(message)
        updates = replica.advance()
        if updates:
            link.put(RequestUpdates(tuple(updates)))


class Front:
    """Distributes requests. :meth:`submit` and :meth:`cancel` may be called by other threads than
    :meth:`turn`.

    Args:
        replica: the first rank's own.
        links: to the others' leaders, see :func:`connected`.
    """

    def __init__(self, replica: Replica, links: Sequence[Link] = ()) -> None:
        self._replica, self._links = replica, list(links)
        self._numbers = count(1)
        self._inbox: deque[Add | Cancel] = deque()
        self._waiting: dict[int, Request] = {}
        self._places: dict[int, tuple[int, int]] = {}  # by request: its replica, and tokens it may take
        self._loads = [0] * (1 + len(self._links))
        self._counts = [0] * (1 + len(self._links))
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        os.set_blocking(self._reading, False)

    @property
    def unfinished(self) -> int:
        """Requests that are not complete."""
        return len(self._places) + len(self._waiting) + len(self._inbox)

    def submit(self, request: Request) -> int:
        """Accept a request; returns its number, which updates have."""
        number = next(self._numbers)
        self._inbox.append(Add(number, request))
        self.wake()
        return number

    def cancel(self, number: int) -> None:
        """Forget a request; no update follows but those that have come already."""
        self._inbox.append(Cancel(number))
        self.wake()

    def wake(self) -> None:
        """Let a waiting :meth:`turn` return."""
        with suppress(BlockingIOError):  # it will wake up anyway
            os.write(self._writing, b".")

    def turn(self, timeout: float | None = None) -> list[RequestUpdate]:
        """Compute a step of this rank's replica, if it has something to do, and return what all replicas have
        brought; else wait for them, or for requests, so many seconds at most.

        Raises:
            CommError: a rank is lost.
        """
        self._receive()
        self._distribute()
        idle = self._replica.idle
        updates = [] if idle else self._replica.advance()
        connections = [link.connection for link in self._links]
        if self._reading in wait([*connections, self._reading], timeout if idle else 0):
            _drain(self._reading)
        for link in self._links:
            for message in link.received():
                if isinstance(message, RequestUpdates):
                    updates += message.updates
        for update in updates:
            if update.ended is not None:
                self._forget(update.number)
        return updates

    def completed(self, requests: Iterable[Request]) -> Iterator[tuple[int, list[RequestUpdate]]]:
        """Compute requests, and yield the number of each among them, from 0, with its updates, as they end;
        no more are taken from the iterable than replicas are busy with."""
        numbered = enumerate(requests)
        pending: dict[int, tuple[int, list[RequestUpdate]]] = {}
        most = _AHEAD * self._replica.scheduler.most * len(self._loads)
        while True:
            for place, request in islice(numbered, most - len(pending)):
                pending[self.submit(request)] = place, []
            if not pending:
                return
            for update in self.turn():
                if update.number not in pending:
                    continue
                pending[update.number][1].append(update)
                if update.ended is not None:
                    yield pending.pop(update.number)

    def stop(self) -> None:
        """Forget all requests, and let all other ranks return."""
        self._inbox.clear()
        self._waiting.clear()
        for number in list(self._places):
            self._forget(number)
        for link in self._links:
            link.put(Stop())
        self._replica.stop()
        for link in self._links:
            stopped = False
            while not stopped:
                link.wait()
                stopped = any(isinstance(message, Stopped) for message in link.received())

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reading)
        os.close(self._writing)

    def _receive(self) -> None:
        while self._inbox:
            match message := self._inbox.popleft():
                case Add(number, request):
                    self._waiting[number] = request
                case Cancel(number):
                    if self._waiting.pop(number, None) is None and number in self._places:
                        self._send(self._places[number][0], message)
                        self._forget(number)

    def _distribute(self) -> None:
        most = _AHEAD * self._replica.scheduler.most
        for number in list(self._waiting):
            free = [place for place, requests in enumerate(self._counts) if requests < most]
            if not free:
                return
            request = self._waiting.pop(number)
            place = min(free, key=lambda place: self._loads[place])
            self._places[number] = place, request.longest
            self._loads[place] += request.longest
            self._counts[place] += 1
            self._send(place, Add(number, request))

    def _forget(self, number: int) -> None:
        if number in self._places:
            place, tokens = self._places.pop(number)
            self._loads[place] -= tokens
            self._counts[place] -= 1

    def _send(self, place: int, message: Add | Cancel) -> None:
        if place == 0:
            self._replica.receive(message)
        else:
            self._links[place - 1].put(message)


def _drain(descriptor: int) -> None:
    """Read what :meth:`Front.wake` has written."""
    with suppress(BlockingIOError):
        while len(os.read(descriptor, 4096)) == 4096:
            pass
