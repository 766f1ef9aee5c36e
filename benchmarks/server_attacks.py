"""A server under attack: how long each hostile request keeps `/health` and another client's tokens waiting.

    python benchmarks/server_attacks.py SOURCE [--only NAME ...] [--output FILE.json] [KEY=VALUE ...]

SOURCE is a run whose tokenizer has a chat template. For each attack: the seconds until it was answered, its
status, and the longest time that `/health` and that the next token of a stream took meanwhile (seconds as a
client sees them, which shares the processor with the server; the row "nothing" says what that amounts to).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from facts import facts

MB = 10**6
HALF_OPEN = 1100
SECONDS = 3.0
"""How long the rows without a large request last."""


def filled(begin: str, unit: str, end: str, size: float) -> bytes:
    """JSON text of about this size whose middle repeats a unit."""
    return (begin + unit * int((size - len(begin) - len(end)) / len(unit)) + end).encode()


def completion(prompt: str, unit: str, end: str, size: float) -> bytes:
    """A completion whose prompt is JSON text of about this size."""
    return filled(f'{{"model": "model", "max_tokens": 1, "prompt": {prompt}', unit, end + "}", size)


def schema(properties: int) -> bytes:
    """A chat whose answer has a schema of so many properties, each with a type of its own."""
    tree = {f"property {n}": {"type": "string", "maxLength": n + 1} for n in range(properties)}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    form["json_schema"]["schema"]["properties"] = tree  # type: ignore[index]
    messages = [{"role": "user", "content": "a"}]
    return json.dumps({"model": "model", "messages": messages, "response_format": form}).encode()


BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "ids and a text, 0.2 MB": lambda: ("completions", completion("[0", ", 0", ', "a"]', 0.2 * MB)),
    "ids and a text, 2 MB": lambda: ("completions", completion("[0", ", 0", ', "a"]', 2 * MB)),
    "ids, 8 MB": lambda: ("completions", completion("[0", ",0", "]", 8 * MB)),
    "ids, 32 MB": lambda: ("completions", completion("[0", ",0", "]", 32 * MB)),
    "lists of ids, 8 MB": lambda: ("completions", completion("[[0]", ",[0]", "]", 8 * MB)),
    "empty lists, 2 MB": lambda: ("completions", completion("[[]", ",[]", "]", 2 * MB)),
    "a text, 8 MB": lambda: ("completions", completion('"', "what ", '"', 8 * MB)),
    "texts, 8 MB": lambda: ("completions", completion('["a"', ',"a"', "]", 8 * MB)),
    "a name of 30 MB": lambda: (
        "completions",
        filled('{"model": "model", "prompt": "a", "user": "', "a", '"}', 30 * MB),
    ),
    "fields, 8 MB": lambda: (
        "completions",
        (
            '{"model": "model", "prompt": "a", ' + ",".join(f'"{n}":0' for n in range(8 * MB // 11)) + "}"
        ).encode(),
    ),
    "messages, 8 MB": lambda: (
        "chat/completions",
        filled(
            '{"model": "model", "messages": [{"role": "user", "content": "a"}',
            ',{"role":"user","content":"a"}',
            "]}",
            8 * MB,
        ),
    ),
    "nested lists, 1 MB": lambda: ("completions", completion("", "[", "", MB)),
    "schema, 0.2 MB": lambda: ("chat/completions", schema(3_400)),
    "schema, 1 MB": lambda: ("chat/completions", schema(17_000)),
}


class Watch:
    """The longest times that other clients wait."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.health = self.token = 0.0

    async def __aenter__(self) -> Watch:
        self._tasks = [asyncio.create_task(self._ask()), asyncio.create_task(self._read())]
        await asyncio.sleep(0.5)
        self.health = self.token = 0.0
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        while True:
            begin = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with self._lasting("health", begin):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))  # type: ignore[index]
            await asyncio.sleep(0.01)

    async def _read(self) -> None:
        text = {"model": "model", "prompt": "what", "max_tokens": 40, "stream": True, "temperature": 1}
        content = json.dumps({**text, "logit_bias": {"0": -100}}).encode()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        while True:
            begin = time.perf_counter()
            writer.write(request("completions", content))
            line = b""
            while line != b"data: [DONE]\n":
                with self._lasting("token", begin):
                    line = await reader.readline()
                begin = time.perf_counter()
            await reader.readuntil(b"0\r\n\r\n")

    @contextlib.contextmanager
    def _lasting(self, name: str, begin: float) -> Iterator[None]:
        """Record how long something takes, also if it does not end."""
        try:
            yield
        finally:
            setattr(self, name, max(getattr(self, name), time.perf_counter() - begin))


def request(path: str, content: bytes) -> bytes:
    """A request as it is sent."""
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def posted(host: str, port: int, path: str, content: bytes) -> str:
    """The status of a request, with the beginning of its answer if it was refused."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request(path, content))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 300)
        rest = (await reader.read(100)).decode(errors="replace") if b" 200 " not in head[:20] else ""
        return head.split(b"\r\n")[0].decode() + (f" {rest}" if rest else "")
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
        return type(error).__name__
    finally:
        writer.close()


async def half_open(host: str, port: int) -> str:
    """Connections that send half a request; returns how many other requests were answered then."""
    writers = []
    for _ in range(HALF_OPEN):
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5)
            writer.write(b"POST /v1/completions HTTP/1.1\r\n")
            writers.append(writer)
    answered = 0
    for _ in range(5):
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            one = posted(host, port, "completions", b'{"model": "model", "prompt": "a"}')
            answered += "200" in await asyncio.wait_for(one, 5)
    for writer in writers:
        writer.close()
    return f"{len(writers)} opened, {answered} of 5 others answered"


async def nothing(*_: object) -> str:
    """What the rows amount to without an attack."""
    await asyncio.sleep(SECONDS)
    return "-"


async def measured(host: str, port: int, attack: Callable[[str, int], Awaitable[str]]) -> dict[str, Any]:
    """One row."""
    async with Watch(host, port) as watch:
        begin = time.perf_counter()
        outcome = await attack(host, port)
        seconds = time.perf_counter() - begin
    figures = {"seconds": seconds, "health": watch.health, "token": watch.token}
    return {"outcome": outcome, **{name: round(value, 3) for name, value in figures.items()}}


async def rows(host: str, port: int, only: list[str], log: Path) -> dict[str, Any]:
    """All rows."""
    attacks: dict[str, Callable[[str, int], Awaitable[str]]] = {"nothing": nothing}
    for name, make in BODIES.items():

        def one(host: str, port: int, make: Any = make) -> Awaitable[str]:
            return posted(host, port, *make())

        attacks[name] = one
    attacks[f"{HALF_OPEN} half-open connections"] = half_open
    results = {}
    for name, attack in attacks.items():
        if only and not any(text in name for text in only):
            continue
        before = log.stat().st_size
        try:
            results[name] = await asyncio.wait_for(measured(host, port, attack), 400)
        except (OSError, TimeoutError) as error:
            results[name] = {"outcome": f"{type(error).__name__}: {error}"}
        results[name]["log_bytes"] = log.stat().st_size - before
        print(f"{name}: {results[name]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "hexad.cli.main", "serve", arguments.source, "--port", "0"]
    command += ["--name", "model", *arguments.overrides]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "stderr"
        with log.open("w") as errors:
            server = subprocess.Popen(command, stderr=errors)
        try:
            address = None
            while address is None:
                time.sleep(0.1)
                address = re.search(r"serving model at http://(\S+):(\d+)", log.read_text())
                if server.poll() is not None:
                    sys.exit(log.read_text())
            results = asyncio.run(rows(address[1], int(address[2]), arguments.only, log))
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            server.kill()
    if arguments.output:
        document = {"facts": facts("uvicorn"), "load": os.getloadavg(), "rows": results}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
