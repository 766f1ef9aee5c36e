"""The pages of a server: OpenAI's interface, its health, its metrics, and a page to chat."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from hexad.config import ConfigError, HexadError
from hexad.config.schema import InferenceSettings

from ..grammars import json_schema
from ..prompts import Prompt
from ..requests import RequestUpdate
from .access import SMALL, ClientLeft, Guard, RequestMemory, body, parsed
from .errors import ContextExceeded, RequestError, about, refusal, too_many
from .forms import ChatForm, CompletionForm, EventStream, Texts
from .protocol import Body, ChatRequest, CompletionRequest, read
from .service import Busy, Failed, Service, Unavailable
from .tools import ToolFormat

log = logging.getLogger("hexad")
T = TypeVar("T")

_THREADS = 3
"""Small requests that are prepared at once, and as many large ones."""
_MOST_NAMES = 50
"""Unknown fields that are logged."""


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        keys: one of which requests must have, if there are any.
        hosts: names under which clients know this machine, where there are no keys.
        strict: unknown fields are refused.
    """

    keys: Sequence[str] = ()
    hosts: Collection[str] = ()
    strict: bool = False


def make_app(service: Service, name: str, positions: int, access: Access) -> Guard:
    """The application.

    Args:
        service: computes.
        name: of the model.
        positions: tokens that the model was made for.
        access: who may ask.
    """
    pages = _Pages(service, name, positions, access.strict)
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    created = int(time.time())
    model = {"id": name, "object": "model", "created": created, "owned_by": "hexad"}

    async def health(_: Request) -> Response:
        return JSONResponse(*({"status": "ok"}, 200) if service.ready else ({"status": "failed"}, 503))

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(_: Request) -> Response:
        chats = service.generator.encoder.template is not None
        listed = {**model, "max_model_len": positions, "chat": chats}
        return JSONResponse({"object": "list", "data": [listed]})

    async def one_model(request: Request) -> Response:
        pages.check_model(request.path_params["model"])
        return JSONResponse(model)

    async def completions(request: Request) -> Response:
        return await pages.answer(CompletionRequest, request)

    async def chat(request: Request) -> Response:
        return await pages.answer(ChatRequest, request)

    async def index(_: Request) -> Response:
        return HTMLResponse(page)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error.response()

    async def wrong_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = f"{request.method} {request.scope['path']}: {error.detail}"
        return RequestError(error.status_code, problem).response()

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", one_model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/", index),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: wrong_path, RequestError: refused})
    timeout = service.generator.saved.config.inference.client_timeout
    paths = [route.path for route in routes]
    return Guard(app, service.metrics, paths, access.keys, access.hosts, timeout)


class _Pages:
    """The answers to both kinds of requests."""

    def __init__(self, service: Service, name: str, positions: int, strict: bool) -> None:
        self.service, self.name, self.positions, self._strict = service, name, positions, strict
        settings: InferenceSettings = service.generator.saved.config.inference
        self._largest = settings.body_mib * 2**20
        self._room = RequestMemory(settings.requests_mib * 2**20)
        # Small requests do not wait for large ones.
        self._threads, self._others = (
            ThreadPoolExecutor(_THREADS, f"hexad-{size}") for size in ("small", "large")
        )
        self._ignored: set[str] = set()

    def check_model(self, model: str) -> None:
        """Refuse other models than the server's."""
        if model != self.name:
            text = f"The model '{model[:200]}' does not exist; this server has '{self.name}'"
            raise RequestError(404, text, param="model", code="model_not_found")

    @cached_property
    def _calls(self) -> ToolFormat | None:
        template = self.service.generator.encoder.template
        return None if template is None else ToolFormat.of(template)

    async def answer(self, kind: type[CompletionRequest] | type[ChatRequest], request: Request) -> Response:
        """Answer a request; a client that leaves ends it."""
        loop = asyncio.get_running_loop()
        try:
            async with body(request.scope, request.receive, self._largest, self._room) as content:
                # Long texts take a while, in which other streams must not stop.
                threads = self._threads if len(content) <= SMALL else self._others
                texts = await loop.run_in_executor(threads, self._texts, kind, content)
        except HexadError as error:
            raise refusal(error) from None
        except ClientLeft:
            return Response(status_code=499)
        for ids in texts.prompts:
            self.service.metrics.prompt(len(ids))
        stream, streaming = self._stream(texts), texts.form.body.stream
        try:
            first = await _unless_left(request, anext(stream))
            if first is not None and not streaming:
                await _unless_left(request, texts.read(first, stream))
        except Busy:
            raise too_many("as many requests wait as may") from None
        except Unavailable as error:
            raise RequestError(503, str(error), "server_error") from None
        except Failed as error:
            raise RequestError(500, str(error), "server_error") from None
        if first is None or not (streaming or texts.complete):
            return Response(status_code=499)
        if streaming:
            return EventStream(texts.events(first, stream))
        # Naming the tokens of long prompts takes a while, too.
        threads = self._threads if texts.size <= SMALL else self._others
        answered = await loop.run_in_executor(threads, texts.content)
        return Response(answered, media_type="application/json")

    async def _stream(self, texts: Texts) -> AsyncIterator[tuple[int, RequestUpdate]]:
        """The updates of texts, which take room until they end."""
        with self._room.taken(texts.size):
            stream = self.service.stream(texts.requests)
            try:
                async for entry in stream:
                    yield entry
            finally:
                await stream.aclose()  # type: ignore[attr-defined]

    def _texts(self, kind: type[CompletionRequest] | type[ChatRequest], content: bytes) -> Texts:
        """The texts that a request asks for, with their requests to the generator.

        Raises:
            HexadError: names the field that cannot be used.
            Refused: another model, or more texts than there is room for.
        """
        body = read(kind, parsed(content))
        self.check_model(body.model)
        self._report(body.check())
        self._check_number(body.number * body.samples)
        prompts = body.prompts()
        form, asked, shown = self._form(body)
        constraints = self.service.generator.constraints
        if asked is not None:
            constraints.check(asked[1], asked[0])
        encoded = [self._ids(prompt, n, body) for n, prompt in enumerate(prompts)]
        longest = max(map(len, encoded))
        sampling = body.sampling(self._limit - longest, None if asked is None else asked[1])
        if longest + sampling.tokens > self._limit:
            raise self._exceeded(body, longest, sampling.tokens)
        plain = self.service.generator.requests([{"prompt": [*ids]} for ids in encoded], sampling)
        ends = [self.service.generator.encoder.ends(prompt) for prompt in prompts]
        requests = [
            replace(
                request,
                ends=request.ends | (frozenset() if sampling.ignore_eos else ends[number]),
                shown=request.shown | shown,
            )
            for number, _, request in plain
        ]
        return Texts(form, requests, encoded, self.service.generator.text, self.name)

    def _ids(self, prompt: Prompt, number: int, body: Body) -> tuple[int, ...]:
        """The ids of a prompt, if it is not too long."""
        ids = prompt.get("prompt")
        if isinstance(ids, list) and len(ids) > self._limit:
            raise self._exceeded(body, len(ids))
        name = f"prompt {number + 1}"
        try:
            ids = self.service.generator.encoder.ids(prompt, name)
        except ConfigError:
            raise
        except HexadError as error:
            field = "messages" if isinstance(body, ChatRequest) else "prompt"
            text = str(error).removeprefix("prompts: ").removeprefix("prompt: ")
            raise about(field, text.removeprefix(f"{name}: ") if field == "messages" else text) from None
        if len(ids) > self._limit:
            raise self._exceeded(body, len(ids))
        return ids

    @property
    def _limit(self) -> int:
        """Tokens of a prompt and its answer."""
        return min(self.positions, self.service.generator.capacity)

    def _exceeded(self, body: Body, prompt: int, new: int = 0) -> ContextExceeded:
        of_prompt = f"{prompt:,} tokens of the prompt"
        text = f"{of_prompt} and {new:,} new ones" if new else of_prompt
        field = "max_tokens" if new else "messages" if isinstance(body, ChatRequest) else "prompt"
        return ContextExceeded(field, f"{text} exceed the model's {self._limit:,}")

    def _form(self, body: Body) -> tuple[CompletionForm | ChatForm, tuple[str, str] | None, frozenset[int]]:
        """The form of the answer; the field that asks for a grammar, and the grammar; the special tokens that
        are part of the text."""
        asked, generator = body.grammar(), self.service.generator
        if isinstance(body, CompletionRequest):
            return CompletionForm(body, generator.text), asked, frozenset()
        functions, forced = body.functions(), body.forced_tool()
        if not functions or body.tool_choice == "none":
            return ChatForm(body, None), asked, frozenset()
        calls, specials = self._calls, generator.encoder.specials
        if calls is None:
            problem = (
                "the model's chat template does not write calls as a name and arguments in JSON, so that"
            )
            raise ConfigError("tools", f"{problem} none could be read; set tool_choice: none, or remove them")
        answer = None
        if asked is not None:
            answer = json_schema(asked[1])
            if answer is None or forced is not None:
                raise ConfigError(asked[0], "found beside tools, which have another form; remove one")
        if (
            forced is not None
            or answer is not None
            or any(definition.get("strict") for definition in functions)
        ):
            listed = [function for function in functions if forced in (None, "", function["name"])]
            several = body.parallel_tool_calls is not False
            options: Any = {"forced": forced is not None, "several": several, "answer": answer}
            single = generator.constraints.named("tools")
            asked = "tools", calls.grammar(listed, single, **options)
        return ChatForm(body, calls), asked, frozenset(calls.specials(specials))

    def _report(self, unknown: Sequence[str]) -> None:
        """Refuse unknown fields, or log each of them once."""
        if unknown and self._strict:
            raise ConfigError(unknown[0], "is not a field of this request; remove it")
        new = [name for name in unknown if name not in self._ignored]
        if new and len(self._ignored) < _MOST_NAMES:
            self._ignored.update(new)
            names = ", ".join(ascii(name)[:60] for name in new[:8])
            log.warning("requests have fields that are not known here and have no effect: %s", names)

    def _check_number(self, texts: int) -> None:
        """Refuse more texts than there is room for, before anything is made of them."""
        if texts > self.service.most:
            problem = f"found {texts:,} texts in one request, expected at most {self.service.most:,}"
            raise RequestError(400, problem, param="n")
        if texts > self.service.room:
            raise too_many("as many requests wait as may")


async def _unless_left(request: Request, work: Awaitable[T]) -> T | None:
    """The result of some work; None if the client leaves before, which cancels it."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    return None if working.cancelled() else working.result()


async def _left(request: Request) -> None:
    """Wait until a client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
