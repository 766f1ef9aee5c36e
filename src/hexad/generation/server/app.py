"""The pages of a server: OpenAI's interface, its health, its metrics, and a page to chat."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from hexad.config import ConfigError, HexadError

from ..requests import Logprob, Update
from ..requests import Request as TextRequest
from .protocol import ChatRequest, CompletionRequest
from .service import Busy, Service, Unavailable

log = logging.getLogger("hexad")
T = TypeVar("T")

_LARGEST = 32 * 2**20
"""Bytes of a request."""


class _Refused(Exception):
    """An answer in OpenAI's form of an error."""

    def __init__(self, status: int, text: str, kind: str, param: str | None = None, code: str | None = None):
        super().__init__(text)
        self.status = status
        self.document = {"message": text, "type": kind, "param": param, "code": code}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return JSONResponse({"error": self.document}, self.status, headers)


def _wrong(text: str, param: str | None = None) -> _Refused:
    return _Refused(400, text, "invalid_request_error", param)


def make_app(service: Service, name: str, keys: Sequence[str] = (), positions: int = 0) -> FastAPI:
    """The application.

    Args:
        service: computes.
        name: of the model.
        keys: one of which requests must have, if there are any.
        positions: tokens that the model was made for.
    """
    app = FastAPI(title="hexad serve", docs_url=None, redoc_url=None, openapi_url=None)
    pages = _Pages(service, name, positions)
    created = int(time.time())

    _guard(app, service, keys)
    _answer_errors(app)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse(*({"status": "ok"}, 200) if service.ready else ({"status": "failed"}, 503))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        chats = service.generator.encoder.template is not None
        model = {"id": name, "object": "model", "created": created, "owned_by": "hexad"}
        return JSONResponse(
            {"object": "list", "data": [{**model, "max_model_len": positions, "chat": chats}]}
        )

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        pages.check_model(model)
        return JSONResponse({"id": name, "object": "model", "created": created, "owned_by": "hexad"})

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await pages.answer(_Completion(pages, body), request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await pages.answer(_Chat(pages, body), request)

    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page)

    return app


def _guard(app: FastAPI, service: Service, keys: Sequence[str]) -> None:
    """Refuse requests without a key and those that are too large, and count all."""

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        path = request.url.path
        if path.startswith("/v1/") and keys and not _known(request.headers.get("authorization", ""), keys):
            response: Response = _Refused(
                401, "Incorrect API key provided", "invalid_request_error", code="invalid_api_key"
            ).response()
        elif request.method == "POST" and (
            "content-length" not in request.headers or "transfer-encoding" in request.headers
        ):
            text = "found no Content-Length, or a Transfer-Encoding"
            response = _Refused(411, text, "invalid_request_error").response()
        elif int(request.headers.get("content-length") or 0) > _LARGEST:
            response = _Refused(413, f"found more than {_LARGEST} bytes", "invalid_request_error").response()
        else:
            try:
                response = await answer(request)
            except Exception:
                log.exception("%s %s", request.method, path)
                response = _Refused(500, "the server has failed to answer", "server_error").response()
        if path.startswith("/v1/"):
            known = path if any(getattr(route, "path", "") == path for route in app.routes) else "other"
            service.metrics.requests.labels(known, response.status_code).inc()
        return response


def _answer_errors(app: FastAPI) -> None:
    """Give errors OpenAI's form."""

    @app.exception_handler(_Refused)
    async def refused(_: Request, error: _Refused) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _wrong(*_first_problem(error)).response()

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return _Refused(error.status_code, text, "invalid_request_error").response()


def _known(header: str, keys: Sequence[str]) -> bool:
    """Whether a request has one of the keys; takes as long for any that is wrong."""
    given = header.removeprefix("Bearer ").encode(errors="surrogateescape")
    return sum(hmac.compare_digest(given, key.encode()) for key in keys) > 0


def _first_problem(error: RequestValidationError) -> tuple[str, str | None]:
    """A message, and the field that it is about."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"] if part not in ("body", "query", "path")]
    if problem["type"] == "json_invalid":
        return f"the request is not JSON: {problem.get('ctx', {}).get('error', problem['msg'])}", None
    field = place[0] if place else None
    where = ".".join(part for part in place if not part.startswith(("constrained", "list[", "function-")))
    found = repr(problem.get("input"))[:60]
    text = problem["msg"][0].lower() + problem["msg"][1:]
    if problem["type"] == "missing":
        return f"{where}: is missing", field
    return f"{where or 'the request'}: found {found}; {text}", field


class _Pages:
    """What both kinds of requests need."""

    def __init__(self, service: Service, name: str, positions: int) -> None:
        self.service, self.name, self.positions = service, name, positions

        tokenizer = service.generator.tokenizer
        self._decode, self._specials = tokenizer.decode, {n: text for text, n in tokenizer.specials.items()}

    def shown(self, token: int) -> str:
        """The text of one token; of those that have none by themselves, the id."""
        text = self._specials.get(token) or self._decode([token])
        return f"token_id:{token}" if not text or "\N{REPLACEMENT CHARACTER}" in text else text

    def check_model(self, model: str) -> None:
        """Refuse other models than the server's."""
        if model != self.name:
            text = f"The model '{model}' does not exist; this server has '{self.name}'"
            raise _Refused(404, text, "invalid_request_error", "model", "model_not_found")

    async def answer(self, kind: _Completion | _Chat, request: Request) -> Response:
        """Answer a request; a client that leaves ends it."""
        body = kind.body
        try:
            self.check_model(body.model)
            body.check()
            self._check_number(len(body.prompts()) * body.choices)
            # Tokenizers and templates take a while, in which other streams must not stop.
            requests, prompts = await asyncio.to_thread(kind.requests)
        except HexadError as error:
            raise _wrong(_field_names(str(error)), _param(error)) from None
        for ids in prompts:
            self.service.metrics.prompt(len(ids))
        stream = self.service.stream(requests)
        texts = _Texts(kind, requests, prompts)
        try:
            first = await _unless_left(request, anext(stream))
            if first is not None and not body.stream:
                await _unless_left(request, texts.read(first, stream))
        except Busy:
            raise _too_many() from None
        except Unavailable:
            raise _Refused(503, "the server is stopping or has failed", "server_error") from None
        if first is None or not (body.stream or texts.complete):
            return Response(status_code=499)
        if not body.stream:
            return JSONResponse(texts.document())
        options = body.stream_options
        usage = options is not None and options.include_usage
        return StreamingResponse(texts.events(first, stream, usage), media_type="text/event-stream")

    def _check_number(self, texts: int) -> None:
        """Refuse more texts than there is room for, before anything is made of them."""
        if texts > self.service.most:
            problem = f"found {texts:,} texts in one request, expected at most {self.service.most:,}"
            raise _Refused(400, problem, "invalid_request_error", "n")
        if texts > self.service.room:
            raise _too_many()


def _too_many() -> _Refused:
    return _Refused(429, "as many requests wait as may; try again", "rate_limit_error")


async def _unless_left(request: Request, work: Awaitable[T]) -> T | None:
    """What some work returns; None if the client leaves before, which cancels it."""
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


def _field_names(text: str) -> str:
    """A message about an option of a command, as one about a field."""
    if text.startswith("--"):
        option, _, rest = text.partition(":")
        text = f"{option.removeprefix('--').replace('-', '_')}:{rest}"
    names = {"tokens:": "max_tokens:", "samples:": "n:", "schema:": "response_format:"}
    for ours, theirs in names.items():
        if text.startswith(ours):
            return theirs + text.removeprefix(ours)
    return text


def _param(error: HexadError) -> str | None:
    if not isinstance(error, ConfigError):
        return None
    return _field_names(f"{error.field}:").rstrip(":")


class _Completion:
    """The form of ``/v1/completions``."""

    object, prefix = ("text_completion", "text_completion"), "cmpl"

    def __init__(self, pages: _Pages, body: CompletionRequest) -> None:
        self.pages, self.body = pages, body

    def requests(self) -> tuple[list[TextRequest], list[tuple[int, ...]]]:
        return _requests(self.pages, self.body)

    def choice(self, index: int, text: _Text) -> dict[str, Any]:
        """A complete text."""
        body, tokenizer = self.body, self.pages.service.generator.tokenizer
        echoed = tokenizer.decode(text.prompt) if body.echo else ""
        logprobs = None
        if body.logprobs is not None:
            before: list[Logprob | None] = []
            if body.echo:
                before = [None, *(text.scores or ())]
            logprobs = self._logprobs([*before, *text.logprobs], text.prompt[:1], 0)
        document = {
            "index": index,
            "text": echoed + text.text,
            "logprobs": logprobs,
            "finish_reason": _reason(text.ended),
        }
        if body.prompt_logprobs is not None:
            document["prompt_logprobs"] = [
                None, *({str(token): {"logprob": value} for token, value in ((one.token, one.value),
                        *one.top)} for one in text.scores or ())
            ]  # fmt: skip
        return document

    def delta(self, index: int, update: Update, offset: int) -> dict[str, Any]:
        """A part of a text."""
        wanted = self.body.logprobs is not None and update.tokens
        logprobs = self._logprobs(update.logprobs, (), offset) if wanted else None
        return {
            "index": index,
            "text": update.text,
            "logprobs": logprobs,
            "finish_reason": _reason(update.ended),
        }

    def _logprobs(
        self, logprobs: Sequence[Logprob | None], first: Sequence[int], offset: int
    ) -> dict[str, Any]:
        shown = self.pages.shown
        tokens, offsets = [], []
        for one in logprobs:
            tokens.append(shown(first[0] if one is None else one.token))
            offsets.append(offset)
            offset += len(tokens[-1])
        tops = [
            {shown(token): value for token, value in one.top} if one is not None and one.top else None
            for one in logprobs
        ]
        values = [None if one is None else one.value for one in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class _Chat:
    """The form of ``/v1/chat/completions``."""

    object, prefix = ("chat.completion", "chat.completion.chunk"), "chatcmpl"

    def __init__(self, pages: _Pages, body: ChatRequest) -> None:
        self.pages, self.body = pages, body

    def requests(self) -> tuple[list[TextRequest], list[tuple[int, ...]]]:
        return _requests(self.pages, self.body)

    def choice(self, index: int, text: _Text) -> dict[str, Any]:
        """A complete answer."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text.text, "refusal": None},
            "logprobs": self._logprobs(text.logprobs),
            "finish_reason": _reason(text.ended),
        }

    def delta(self, index: int, update: Update, offset: int) -> dict[str, Any]:
        """A part of an answer."""
        role = {"role": "assistant"} if offset == 0 else {}
        return {
            "index": index,
            "delta": {**role, "content": update.text},
            "logprobs": self._logprobs(update.logprobs) if update.tokens else None,
            "finish_reason": _reason(update.ended),
        }

    def _logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        entries = [
            {
                **self._entry(one.token, one.value),
                "top_logprobs": [self._entry(*pair) for pair in one.top],
            }
            for one in logprobs
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self.pages.shown(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _requests(
    pages: _Pages, body: CompletionRequest | ChatRequest
) -> tuple[list[TextRequest], list[tuple[int, ...]]]:
    """The requests of a body, and the ids of its prompts."""
    generator = pages.service.generator
    prompts = body.prompts()
    encoded = [generator.encoder.ids(prompt, f"prompt {n + 1}") for n, prompt in enumerate(prompts)]
    longest = max(map(len, encoded))
    limit = min(pages.positions, generator.capacity)
    wanted = body.wanted(limit - longest)
    if longest + wanted.tokens > limit:
        raise ConfigError(
            "max_tokens",
            f"{longest} tokens of the prompt and {wanted.tokens} new ones exceed the model's {limit}",
        )
    return [request for _, _, request in generator.requests(prompts, wanted)], encoded


def _reason(ended: str | None) -> str | None:
    return None if ended is None else "length" if ended == "length" else "stop"


class _Text:
    """A text as it grows."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt, self.text = prompt, ""
        self.ended: str | None = None
        self.tokens = self.cached = 0
        self.logprobs: list[Logprob] = []
        self.scores: tuple[Logprob, ...] | None = None

    def add(self, update: Update) -> None:
        self.text += update.text
        self.tokens += len(update.tokens)
        self.logprobs += update.logprobs
        self.cached = max(self.cached, update.cached)
        self.ended = update.ended
        self.scores = update.prompt_logprobs if self.scores is None else self.scores


class _Texts:
    """The texts of one request, in its form."""

    def __init__(
        self, kind: _Completion | _Chat, requests: Sequence[TextRequest], prompts: Sequence[tuple[int, ...]]
    ) -> None:
        self._kind, self._prompts = kind, prompts
        self._texts = [_Text(request.prompt) for request in requests]
        # Choices that are the same are computed once.
        self._copies = kind.body.choices * len(prompts) // len(requests)
        self._head = {
            "id": f"{kind.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": kind.pages.name,
        }

    async def read(self, first: tuple[int, Update], stream: AsyncIterator[tuple[int, Update]]) -> None:
        """Take all updates."""
        place, update = first
        self._texts[place].add(update)
        async for place, update in stream:
            self._texts[place].add(update)

    @property
    def complete(self) -> bool:
        """Whether all texts have ended."""
        return all(text.ended is not None for text in self._texts)

    def document(self) -> dict[str, Any]:
        """The answer in one piece."""
        texts = [text for text in self._texts for _ in range(self._copies)]
        choices = [self._kind.choice(index, text) for index, text in enumerate(texts)]
        return {**self._head, "object": self._kind.object[0], "choices": choices, "usage": self._usage()}

    async def events(
        self, first: tuple[int, Update], stream: AsyncIterator[tuple[int, Update]], usage: bool
    ) -> AsyncIterator[bytes]:
        """The answer in events."""
        try:
            for chunk in self._chunks(first, usage):
                yield chunk
            async for entry in stream:
                for chunk in self._chunks(entry, usage):
                    yield chunk
        except Unavailable:
            failed = _Refused(503, "the server has failed", "server_error").document
            yield _event({"error": failed})
            return
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        if usage:
            yield self._chunk([], self._usage())
        yield b"data: [DONE]\n\n"

    def _chunks(self, entry: tuple[int, Update], usage: bool) -> list[bytes]:
        place, update = entry
        text = self._texts[place]
        offset = len(text.text) if isinstance(self._kind, _Completion) else text.tokens
        text.add(update)
        deltas = [
            self._kind.delta(place * self._copies + copy, update, offset) for copy in range(self._copies)
        ]
        return [self._chunk([delta], None, usage) for delta in deltas]

    def _chunk(self, choices: list[Any], usage: Any, named: bool = True) -> bytes:
        document = {**self._head, "object": self._kind.object[1], "choices": choices}
        return _event({**document, "usage": usage} if named else document)

    def _usage(self) -> dict[str, Any]:
        prompt, new = sum(map(len, self._prompts)), sum(text.tokens for text in self._texts) * self._copies
        first = self._texts[:: max(1, len(self._texts) // len(self._prompts))]  # of each prompt's samples
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(text.cached for text in first)},
        }


def _event(document: Any) -> bytes:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode(errors="backslashreplace")
