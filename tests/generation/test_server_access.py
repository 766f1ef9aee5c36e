"""Who may ask a server, and how long: keys, hosts, sizes, connections. Without a model."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2 as httpx
import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hexad.generation.server.access import Guard, RequestMemory, body, parsed
from hexad.generation.server.connections import Connection, Limits
from hexad.generation.server.errors import RequestError
from hexad.generation.server.forms import EventStream
from hexad.generation.server.metrics import ServerMetrics


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with its path."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


async def asked(guard: Guard, path: str, headers: dict[str, str], method: str = "GET") -> int:
    """The status of a request, whose URL and headers a server passes on as they are."""
    statuses = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": raw, "query_string": b""}
    await guard(scope, receive, send)
    (status,) = statuses
    return status


def status(guard: Guard, path: str, **headers: str) -> int:
    return asyncio.run(asked(guard, path, headers))


PRIVATE = [
    "/v1/completions",
    "/v1/models",
    "/v1/models/a",
    "//v1/completions",
    "/V1/completions",
    "/v1",
    "/x",
]
HOSTS = ["a", "a?", "a#", "a/health?", "a:80?/health", "/health?", "[::1]?", "", "a\\health", "é"]


@pytest.mark.parametrize("path", PRIVATE)
@pytest.mark.parametrize("host", HOSTS)
def test_no_host_gets_past_the_keys(path: str, host: str) -> None:
    guard = Guard(app, ServerMetrics(), PRIVATE, ["secret"])
    assert status(guard, path, Host=host) == 401
    assert status(guard, path, Host=host, Authorization="Bearer secret") == 200
    assert status(guard, path, Host=host, Authorization="Bearer secre") == 401
    assert status(guard, "/health", Host=host) == 200


def test_without_keys_names_are_those_of_this_machine() -> None:
    """Or a page of another site could read answers, by making its name lead here."""
    guard = Guard(app, ServerMetrics(), PRIVATE, hosts=["given.example"])
    own = ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "10.1.2.3:1"]
    own += ["model.localhost", "given.example:9", "localhost."]
    others = [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "a?",
    ]
    others += ["[::1].evil.example", "127.0.0.1@evil.example", "evil.example#localhost"]
    assert [host for host in own if status(guard, "/v1/models", Host=host) != 200] == []
    assert [host for host in others if status(guard, "/v1/models", Host=host) != 403] == []
    assert status(guard, "/health", Host="evil.example") == 200
    assert status(guard, "/v1/models", Host="localhost", Origin="http://localhost:8000") == 200
    for origin in ("http://evil.example", "null", "https://evil.example:8000"):
        assert status(guard, "/v1/models", Host="localhost", Origin=origin) == 403


def test_what_fails_is_counted_and_answered() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError

    metrics = ServerMetrics()
    guard = Guard(failing, metrics, ["/v1/models"], ["secret"])
    assert status(guard, "/v1/models", Authorization="Bearer secret") == 500
    assert status(guard, "/v1/models") == 401 and status(guard, "/v1/else") == 401
    lines = metrics.text().decode()
    assert 'hexad_requests_total{path="/v1/models",status="500"} 1.0' in lines
    assert 'hexad_requests_total{path="other",status="401"} 1.0' in lines


def read(parts: list[bytes], headers: dict[str, str], room: RequestMemory, largest: int = 10**6) -> bytes:
    """The body that a client sends in parts."""

    before = room.used

    async def reading() -> bytes:
        messages = [
            {"type": "http.request", "body": part, "more_body": n + 1 < len(parts)}
            for n, part in enumerate(parts)
        ]

        async def receive() -> Any:
            return messages.pop(0)

        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        async with body({"type": "http", "headers": raw}, receive, largest, room) as content:
            assert room.used == before + len(content)
            return content

    return asyncio.run(reading())


def test_bodies_take_room_until_they_are_used() -> None:
    room = RequestMemory(200_000)
    assert read([b"a" * 50_000] * 3, {"Content-Length": "150000"}, room) == b"a" * 150_000
    assert room.used == 0
    with room.taken(150_000):
        with pytest.raises(RequestError) as full:
            read([b"a" * 50_000] * 2, {"Content-Length": "100000"}, room)
        assert full.value.status == 429 and room.used == 150_000
        assert read([b"a" * 1000], {"Content-Length": "1000"}, room)  # a small one always has room
        with pytest.raises(RequestError, match="hold 150,000 of 200,000") as full, room.taken(100_000):
            pass
        assert full.value.status == 429
    with pytest.raises(RequestError, match="more than the 200,000") as never, room.taken(300_000):
        pass
    assert never.value.status == 400 and room.used == 0


@pytest.mark.parametrize(
    ("headers", "number"),
    [
        ({"Content-Length": "1000001"}, 413),
        ({}, 411),
        ({"Content-Length": "3", "Transfer-Encoding": "chunked"}, 411),
        ({"Content-Length": "3", "Content-Type": "text/plain"}, 415),
        ({"Content-Length": "3", "Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
    ids=str,
)
def test_bodies_that_are_not_read(headers: dict[str, str], number: int) -> None:
    with pytest.raises(RequestError) as refused:
        read([b"{}"], headers, RequestMemory(10**6))
    assert refused.value.status == number


def test_json_is_bounded_by_its_parts() -> None:
    assert parsed(b'{"a": [1, "b"]}') == {"a": [1, "b"]}
    wrong = [
        b"[1]",
        b"3",
        b"{",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"[" * 10_000,
        b'{"a": ' * 10_000,
        b"\xff",
    ]
    wrong += [b'{"a": ' + b"9" * 10_000 + b"}", b'"' + b"a" * 10**6 + b'"']
    for content in wrong:
        with pytest.raises(RequestError) as refused:
            parsed(content)
        assert refused.value.status == 400 and len(str(refused.value)) < 300
    lists = b'{"a": [' + b"[]," * 250_000 + b"[]]}"
    with pytest.raises(RequestError, match="more than 250,000 brackets and names"):
        parsed(lists)


def served(
    limits: Limits, client: Callable[[int], Awaitable[None]], application: ASGIApp | None = None
) -> None:
    """Run a client of a server with such connections."""

    async def run() -> None:
        import uvicorn

        protocol = type("Bounded", (Connection,), {"limits": limits})
        config = uvicorn.Config(
            application or answering,
            port=0,
            http=protocol,
            ws="none",
            lifespan="off",
            log_level="error",
            timeout_keep_alive=1,
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            await client(port)
        finally:
            server.force_exit = True
            await server.shutdown()

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        if message["type"] != "http.disconnect":
            await app(scope, receive, send)

    asyncio.run(run())


HALF = b"GET / HTTP/1.1\r\nHost: a\r\n"


def test_connections_that_wait_make_place_for_others(caplog: pytest.LogCaptureFixture) -> None:
    """And no more is logged about a hundred of them than about one."""

    async def client(port: int) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        for _, writer in opened:
            writer.write(HALF)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HALF + b"\r\n")
        assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 60)
        assert await asyncio.wait_for(opened[0][0].read(), 60) == b""
        assert limits.open <= 8
        for _, writer in opened:
            writer.close()

    limits = Limits(8, 60.0)
    served(limits, client)
    assert [record.message for record in caplog.records].count(
        "8 connections are open (inference.connections): some are closed"
    ) == 1


@pytest.mark.parametrize(
    "sent", [b"", HALF, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{", HALF + b"\r\n"]
)
def test_clients_that_do_not_go_on_are_disconnected(sent: bytes) -> None:
    """Before a request, in its header, in its body, and after one."""

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 60)
        assert (b" 200 OK" in answer) == sent.endswith(b"\r\n\r\n")
        writer.close()

    served(Limits(8, 0.2), client)


def test_clients_that_do_not_read_are_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of a stream, whose generator is closed."""
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"a" * 2**16
        finally:
            closed.set()

    async def stream(_: Request) -> EventStream:
        return EventStream(endless())

    async def client(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(closed.wait(), 60)
        async with asyncio.timeout(60):
            while limits.open:
                await asyncio.sleep(0.01)
        writer.close()

    limits = Limits(8, 60.0)
    guard = Guard(Starlette(routes=[Route("/", stream)]), ServerMetrics(), ["/"], timeout=0.2)
    served(limits, client, guard)
    text = "clients have not accepted their answers in time (inference.client_timeout)"
    assert [record.message for record in caplog.records] == [text]


def test_errors_of_clients_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def client(port: int) -> None:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
            assert b"400" in await asyncio.wait_for(reader.read(), 60)
            writer.close()

    served(Limits(100, 60.0), client)
    assert [record.message for record in caplog.records] == ["a client: Invalid HTTP request received."]


def test_messages_are_json() -> None:
    async def client() -> httpx.Response:
        guard = Guard(app, ServerMetrics(), PRIVATE, ["secret"])
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as session:
            return await session.get("/v1/models")

    answer = asyncio.run(client())
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert json.loads(answer.content)["error"]["code"] == "invalid_api_key"
