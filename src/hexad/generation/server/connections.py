"""Connections of a server: so many at once, each with so much time for its part."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .access import ClientTooSlow

log = logging.getLogger("hexad")

_QUIET = 60.0
"""Seconds after which a message about connections may be repeated."""
_OTHER_FILES = 128
"""Files that are left for everything but connections."""
_MOST = 65_536
_SLOWEST = 64 * 2**10
"""Bytes of a request that arrive in a second, at least."""


class Limits:
    """The limits that all connections of a server share.

    Args:
        connections: open at once.
        timeout: seconds that a client may take to send the header of a request, and about as many for what
            follows.
    """

    def __init__(self, connections: int, timeout: float) -> None:
        self.connections, self.timeout = connections, timeout
        self.open = 0
        # Those whose clients have a request to complete, by when it began.
        self.waiting: OrderedDict[Connection, None] = OrderedDict()
        self._said: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Log a message about clients, at most once a minute."""
        now = time.monotonic()
        if now - self._said.get(text, -_QUIET) >= _QUIET:
            self._said[text] = now
            log.warning("%s", text)


def most_connections() -> int:
    """Connections for which this process may have files, having raised its limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        files = len(list(Path("/proc/self/fd").iterdir()))
    except OSError:
        files = _OTHER_FILES
    return max(1, min(soft, _MOST) - files - _OTHER_FILES)


class Connection(H11Protocol):
    """A connection of HTTP/1.1 whose client has to complete what it begins.

    A client that sends nothing, or a request byte by byte, is disconnected after a time. Where there are as
    many connections as may be, the one that has waited longest for its client makes place for a new one.
    """

    limits: Limits

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _QuietLogger(self)  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None
        self._part = ""

    def connection_made(self, transport: Any) -> None:
        limits = self.limits
        limits.open += 1
        super().connection_made(transport)
        if limits.open > limits.connections:
            limits.say(
                f"{limits.connections:,} connections are open (inference.connections): some are closed"
            )
            oldest = next(iter(limits.waiting), self)
            if oldest is self:
                transport.write(_BUSY)
                transport.close()
            else:
                oldest.abort()
        if not transport.is_closing():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.open -= 1
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, and end the request that is being answered, if there is one: its
        answer has no place any more."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.abort()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def abort(self) -> None:
        """Close the connection at once, whatever the client has not read."""
        self._end()
        self.transport.abort()

    def _watch(self) -> None:
        """Give the client time for the part of a request that comes next."""
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and not self.cycle.more_body:
            self._end()
            return
        part = "body" if answering else "header"
        if part != self._part:
            self._end()
            self._part = part
            self.limits.waiting[self] = None
            self._timer = self.loop.call_later(self._seconds(), self._late)

    def _seconds(self) -> float:
        """How long the client may take for the part."""
        length = 0
        if self._part == "body":
            length = int(dict(self.headers).get(b"content-length", b"0"))
        return self.limits.timeout + length / _SLOWEST

    def _end(self) -> None:
        self._part = ""
        self.limits.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._part == "body":
            self.limits.say(f"clients have not sent their requests in {self.limits.timeout:g} s")
        self.abort()


_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
)


class _QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs uvicorn's messages about a connection, at most one a minute."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.getLogger("uvicorn.error"))
        self._connection, self._limits = connection, connection.limits
        self.level = logging.INFO

    def warning(self, msg: object, *arguments: Any, **_: Any) -> None:
        self._limits.say(f"a client: {str(msg) % arguments if arguments else msg}")

    def error(self, msg: object, *arguments: Any, exc_info: Any = None, **_: Any) -> None:
        if isinstance(exc_info, ClientTooSlow):
            self._limits.say("clients have not accepted their answers in time (inference.client_timeout)")
            self._connection.abort()
        elif not isinstance(exc_info, asyncio.CancelledError):  # the server ends
            super().error(msg, *arguments, exc_info=exc_info)
