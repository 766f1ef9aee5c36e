"""One rank of a server: the first answers requests, the others compute with it until it stops."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hexad.config import HexadError, one_line
from hexad.config.schema import InferenceSettings
from hexad.planning.saved_model import SavedModel

from ..generator import Generator

if TYPE_CHECKING:
    from .service import Service

_SWITCH = 0.0005
"""Seconds after which a thread lets another one run, where several want to."""
_LAST_WORDS = 5
"""Seconds in which streams that have to end can send that they do."""


def serve(
    saved: SavedModel,
    host: str,
    port: int,
    name: str,
    access: Mapping[str, Any],
    announce: Any = print,
) -> None:
    """Serve a model until the process is asked to stop (SIGINT or SIGTERM); all ranks call this together.

    Args:
        saved: the model.
        host, port: to listen at; port 0 chooses a free one.
        name: of the model in requests.
        access: the fields of :class:`~hexad.generation.server.app.Access`.
        announce: called with a line once the server is ready.

    Raises:
        HexadError: the address cannot be used, or a package is missing.
        CommError: a rank was lost.
    """
    listener: list[socket.socket] = []
    with Generator(saved) as generator:
        settings = saved.config.inference

        def listen() -> None:
            listener.append(_listening(host, port))

        generator.on_first(listen)
        if not generator.first:
            _ignore_stops()
            generator.lead(lambda: None)
            return
        from .app import Access, make_app
        from .metrics import ServerMetrics
        from .service import Service

        service = Service(generator, ServerMetrics(), settings.queue)
        limit = min(saved.positions, generator.capacity)
        app = make_app(service, name, limit, Access(**{**access, "hosts": (*access["hosts"], host)}))
        address = listener[0].getsockname()
        shown = f"[{host}]" if ":" in host else host
        ready = f"serving {name} at http://{shown}:{address[1]} (cache: {generator.capacity:,} tokens)"
        asyncio.run(_run(app, service, listener[0], settings, lambda: announce(ready)))
        service.stop()
        service.join()
        if service.failure is not None:
            raise service.failure


def _ignore_stops() -> None:
    """The first rank ends the others: they are asked to stop at the same time."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise HexadError(f"--host {host} --port {port}: cannot be used: {one_line(error)}") from None
    return listener


async def _run(
    app: Any, service: Service, listener: socket.socket, settings: InferenceSettings, ready: Any
) -> None:
    """Answer requests until a signal, or until the generator fails."""
    import uvicorn

    from .connections import Connection, Limits, most_connections

    class Server(uvicorn.Server):
        """Ends by itself: uvicorn's own would end the process with the signal once more."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
            for number in numbers:
                loop.add_signal_handler(number, self._end, number)
            try:
                yield
            finally:
                for number in numbers:
                    loop.remove_signal_handler(number)

        def _end(self, number: int) -> None:
            self.handle_exit(number, None)
            asyncio.get_running_loop().call_later(settings.grace, service.abandon)

    most = most_connections()
    most = most if settings.connections == "auto" else min(settings.connections, most)
    config = uvicorn.Config(
        app,
        http=type("ServedConnection", (Connection,), {"limits": Limits(most, settings.client_timeout)}),
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=round(settings.grace + _LAST_WORDS),
        timeout_keep_alive=max(1, round(settings.client_timeout)),
    )
    server = Server(config)
    service.start()
    gc.collect()
    gc.freeze()  # collections of what requests leave look at nothing else
    # Each operation of the generator may wait so long for a thread that reads a request.
    sys.setswitchinterval(_SWITCH)
    ready()
    failing = asyncio.ensure_future(service.failed())

    async def end() -> None:
        await failing
        await asyncio.sleep(0.2)  # until the streams have sent the error
        server.should_exit = True

    ending = asyncio.ensure_future(end())
    await server.serve(sockets=[listener])
    for task in (ending, failing):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
