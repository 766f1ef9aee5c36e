"""Who may ask a server, and how much: keys, names of the host, bytes of a request."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hexad.dataset.build.sources import kind_of

from .errors import RequestError, too_many
from .metrics import ServerMetrics

log = logging.getLogger("hexad")

PUBLIC = ("/", "/health", "/metrics")
"""Paths that need no key."""
SMALL = 64 * 2**10
"""Bytes of a request that is read however much others hold."""
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^\[\]:]*))(?::\d*)?")
_MOST_PARTS = 250_000
"""Lists, objects and names of a request: Python takes longer for them than for their bytes."""


class Guard:
    """Refuses requests without a key, or, where there are no keys, those that a browser was led to send;
    counts all, and answers those that fail.

    A page of another site cannot read the answers of this server, unless its name is made to lead here (DNS
    rebinding): such requests have a ``Host`` that is not this machine's. Requests that the page sends without
    reading the answers have the other site's ``Origin``.

    Args:
        app: what answers.
        metrics: of the server.
        paths: that are counted by their names.
        keys: one of which requests must have, if there are any.
        hosts: names under which clients know this machine, besides addresses and ``localhost``.
        timeout: seconds that a client may take to accept a part of an answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        paths: Collection[str],
        keys: Sequence[str] = (),
        hosts: Collection[str] = (),
        timeout: float = 30.0,
    ) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)
        self._keys, self._timeout = [key.encode() for key in keys], timeout
        names = {*hosts, "localhost", socket.gethostname(), socket.getfqdn()}
        self._hosts = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, begun, status = scope["path"], False, 500

        async def sent(message: Message) -> None:
            nonlocal begun, status
            if message["type"] == "http.response.start":
                begun, status = True, message["status"]
            try:
                async with asyncio.timeout(self._timeout):
                    await send(message)
            except TimeoutError:
                raise ClientTooSlow from None

        try:
            self._check(scope)
            await self._app(scope, receive, sent)
        except RequestError as error:
            await error.response()(scope, receive, sent)
        except ClientTooSlow:
            raise
        except Exception:
            log.exception("%s %s", scope["method"], path)
            if begun:
                raise
            failed = RequestError(500, "the server has failed to answer", "server_error")
            await failed.response()(scope, receive, sent)
        finally:
            if path not in PUBLIC:
                self._metrics.requests.labels(path if path in self._paths else "other", status).inc()

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        # Not the URL: that is composed of the Host that the client sends.
        if self._keys:
            if scope["path"] not in PUBLIC and not self._known(headers.get("authorization", "")):
                raise RequestError(401, "Incorrect API key provided", code="invalid_api_key")
        elif scope["path"] != "/health":
            host, origin = headers.get("host", ""), headers.get("origin")
            if not self._own(host):
                hint = "use its address, start it with --allow-host NAME, or with a key"
                raise RequestError(
                    403, f"found Host {host[:60]!r}, which is not a name of this server; {hint}"
                )
            if origin is not None and not self._own(origin.partition("://")[2]):
                hint = "start the server with --allow-host NAME, or with a key"
                raise RequestError(403, f"found Origin {origin[:60]!r}, a page of another site; {hint}")

    def _known(self, header: str) -> bool:
        """Whether a request has one of the keys; takes as long for any that is wrong."""
        key = header.removeprefix("Bearer ").encode(errors="surrogateescape")
        return sum(hmac.compare_digest(key, known) for known in self._keys) > 0

    def _own(self, host: str) -> bool:
        """Whether a host, with or without port, is an address or a name of this machine."""
        match = _HOST.fullmatch(host)
        name = "" if match is None else match[1] or match[2]
        with suppress(ValueError):
            ip_address(name)
            return True
        name = name.lower().rstrip(".")
        return name in self._hosts or name.endswith(".localhost")


class ClientTooSlow(Exception):
    """A client has not accepted a part of its answer in time."""


class RequestMemory:
    """The memory that requests may take, from their first byte to the end of their answers.

    Attributes:
        used: bytes that are taken.

    Args:
        limit: bytes of all requests.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Take so many bytes meanwhile.

        Raises:
            Refused: so many are not left, or never will be.
        """
        self.check(size)
        self.used += size
        try:
            yield
        finally:
            self.used -= size

    def check(self, size: int) -> None:
        """Refuse more than is left; small requests always have room."""
        if size > max(self.limit, SMALL):
            text = f"needs {size:,} bytes, more than the {self.limit:,} of inference.held_mib"
            raise RequestError(400, text, code="request_too_large")
        if size > SMALL and self.used + size > self.limit:
            raise too_many(f"the requests under way hold {self.used:,} of {self.limit:,} bytes")


@asynccontextmanager
async def body(scope: Scope, receive: Receive, largest: int, room: RequestMemory) -> AsyncIterator[bytes]:
    """The bytes of a request, which take room until the caller has used them.

    Args:
        largest: bytes of a request.

    Raises:
        Refused: it is too large, or has no length; or there is no room for it now.
        ClientLeft: before its last byte.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":  # which pages of other sites cannot send
        raise RequestError(415, f"found Content-Type {kind[:60]!r}, expected application/json")
    if "content-length" not in headers or "transfer-encoding" in headers:
        raise RequestError(411, "found no Content-Length, or a Transfer-Encoding")
    if int(headers["content-length"]) > largest:
        hint = "send fewer prompts in a request, or raise inference.body_mib"
        raise RequestError(413, f"found more than {largest:,} bytes; {hint}")
    parts: list[bytes] = []
    size, more = 0, True
    try:
        while more:  # what has arrived takes room, not what a client has announced
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            room.used += len(parts[-1])
            more = message.get("more_body", False)
            if size > SMALL and room.used > room.limit:
                raise too_many(f"the requests under way hold {room.used:,} of {room.limit:,} bytes")
        yield b"".join(parts)
    finally:
        room.used -= size


class ClientLeft(Exception):
    """A client has left before its request was complete."""


def parsed(content: bytes) -> dict[str, Any]:
    """The fields of a request.

    Raises:
        Refused: it is not a JSON object, or has too many lists.
    """
    if sum(map(content.count, (b"[", b"{", b'":'))) > _MOST_PARTS:
        text = f"found more than {_MOST_PARTS:,} brackets and names; send fewer prompts in a request"
        raise RequestError(400, text)
    try:
        tree = json.loads(content, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(tree, dict):
        raise RequestError(400, f"the request is {kind_of(tree)}, expected an object")
    return tree


def _no_number(name: str) -> None:
    raise ValueError(f"found {name}, which is no number of JSON")
