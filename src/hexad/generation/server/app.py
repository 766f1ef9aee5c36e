"""The pages of a server: OpenAI's interface, its health, its metrics, and a page to chat."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from hexad.config import ConfigError, HexadError, json_text
from hexad.dataset.text.token_text import Label, TokenLabels, TokenText

from ..requests import Logprob, Update
from ..requests import Request as TextRequest
from .protocol import ChatRequest, CompletionRequest
from .service import Busy, Failed, Service, Unavailable

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
        texts = _Texts(kind, requests, prompts, self.service.generator.text)
        try:
            first = await _unless_left(request, anext(stream))
            if first is not None and not body.stream:
                await _unless_left(request, texts.read(first, stream))
        except Busy:
            raise _too_many() from None
        except Unavailable:
            raise _Refused(503, "the server is stopping or has failed", "server_error") from None
        except Failed as error:
            raise _Refused(500, str(error), "server_error") from None
        if first is None or not (body.stream or texts.complete):
            return Response(status_code=499)
        if not body.stream:
            # Naming the tokens of long prompts takes a while, too.
            document = await asyncio.to_thread(texts.document)
            content = json_text(document, ensure_ascii=False, separators=(",", ":"))
            return Response(content.encode(errors="backslashreplace"), media_type="application/json")
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
        self._echoes: dict[int, _Echo] = {}  # by prompt

    def requests(self) -> tuple[list[TextRequest], list[tuple[int, ...]]]:
        return _requests(self.pages, self.body)

    def _echo(self, prompt: int, text: _Text) -> _Echo:
        """The echo of a prompt, which all of its texts have."""
        if prompt not in self._echoes:
            written = self.body.prompts()[prompt]["prompt"]
            self._echoes[prompt] = _Echo.of(self.pages.service.generator.text, written, text)
        return self._echoes[prompt]

    def choice(self, index: int, text: _Text) -> dict[str, Any]:
        """A complete text."""
        body = self.body
        echo = self._echo(index // body.choices, text) if body.echo else _Echo("")
        logprobs = None
        if body.logprobs is not None:
            logprobs = _columns([*echo.tokens, *text.named(text.logprobs, len(echo.text))])
        document = {
            "index": index,
            "text": echo.text + text.text,
            "logprobs": logprobs,
            "finish_reason": _reason(text.ended),
        }
        if body.prompt_logprobs is not None:
            document["prompt_logprobs"] = [
                None, *({str(token): {"logprob": value} for token, value in ((one.token, one.value),
                        *one.top)} for one in text.scores or ())
            ]  # fmt: skip
        return document

    def delta(self, index: int, update: Update, text: _Text) -> dict[str, Any]:
        """A part of a text, which ``text`` does not have yet."""
        wanted = self.body.logprobs is not None and update.tokens
        return {
            "index": index,
            "text": update.text,
            "logprobs": _columns(text.named(update.logprobs)) if wanted else None,
            "finish_reason": _reason(update.ended),
        }


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
            "logprobs": self._logprobs(text.named(text.logprobs)),
            "finish_reason": _reason(text.ended),
        }

    def delta(self, index: int, update: Update, text: _Text) -> dict[str, Any]:
        """A part of an answer, which ``text`` does not have yet."""
        role = {"role": "assistant"} if text.tokens == 0 else {}
        return {
            "index": index,
            "delta": {**role, "content": update.text},
            "logprobs": self._logprobs(text.named(update.logprobs)) if update.tokens else None,
            "finish_reason": _reason(update.ended),
        }

    def _logprobs(self, named: Sequence[_Named]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        entries = [
            {
                **_entry(one.label, one.value),
                "top_logprobs": [_entry(label, value) for label, value in one.top],
            }
            for one in named
        ]
        return {"content": entries, "refusal": None}


def _entry(label: Label, value: float | None) -> dict[str, Any]:
    return {"token": label.name, "logprob": value, "bytes": list(label.value)}


def _columns(named: Sequence[_Named]) -> dict[str, Any]:
    """The log-probabilities of a completion."""
    return {
        "tokens": [one.label.name for one in named],
        "token_logprobs": [one.value for one in named],
        # As at OpenAI, the token itself is among the most likely ones.
        "top_logprobs": [
            {label.name: value for label, value in (*one.top, (one.label, one.value))} if one.top else None
            for one in named
        ],
        "text_offset": [one.offset for one in named],
    }


class _Named(NamedTuple):
    """A token of a result.

    Attributes:
        label: its name.
        value: its log-probability; None for the first of a text.
        offset: characters of the text before it.
        top: names and log-probabilities of the most likely tokens.
    """

    label: Label
    value: float | None
    offset: int
    top: tuple[tuple[Label, float], ...] = ()


def _named(labels: TokenLabels, token: int, score: Logprob | None, offset: int = 0) -> _Named:
    """The next token of a text, and where it begins."""
    place, top = offset + labels.decoder.characters, () if score is None else score.top
    names = labels.add(token, (other for other, _ in top))
    named_top = tuple((names[other], value) for other, value in top)
    return _Named(names[token], None if score is None else score.value, place, named_top)


@dataclass(frozen=True)
class _Echo:
    """A prompt as a part of its result.

    Attributes:
        text: as it was given; of ids, the text that they stand for.
        tokens: where their log-probabilities were asked for.
    """

    text: str
    tokens: tuple[_Named, ...] = ()

    @classmethod
    def of(cls, tokens: TokenText, prompt: str | list[int], text: _Text) -> _Echo:
        """The echo of a prompt that was given as a text or as ids."""
        labels = TokenLabels(tokens, tokens.prompt_decoder())
        named = [
            _named(labels, token, score) for token, score in zip(text.prompt, (None, *(text.scores or ())))
        ]
        if isinstance(prompt, list):
            decoder = tokens.prompt_decoder()
            shown = "".join(decoder.add(token).text for token in text.prompt)
            if not text.tokens:  # else they complete the last character
                shown += decoder.end()
            return cls(shown, tuple(named))
        # Encoding may change a text: places are those in the text that was given.
        (places,) = tokens.tokenizer.encode_offsets([prompt])
        begins = [*[0] * (len(text.prompt) - len(places.ids)), *places.begin.tolist()]
        return cls(prompt, tuple(one._replace(offset=begin) for one, begin in zip(named, begins)))


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

    def __init__(self, prompt: tuple[int, ...], tokens: TokenText) -> None:
        self.prompt, self.text = prompt, ""
        self._labels = TokenLabels(tokens, tokens.decoder(prompt))
        self.ended: str | None = None
        self.tokens = self.cached = 0
        self.logprobs: list[Logprob] = []
        self.scores: tuple[Logprob, ...] | None = None

    def named(self, scores: Sequence[Logprob], offset: int = 0) -> list[_Named]:
        """Its next tokens; ``offset``: of its text in the result. Called once for each."""
        return [_named(self._labels, score.token, score, offset) for score in scores]

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
        self,
        kind: _Completion | _Chat,
        requests: Sequence[TextRequest],
        prompts: Sequence[tuple[int, ...]],
        tokens: TokenText,
    ) -> None:
        self._kind, self._prompts = kind, prompts
        self._texts = [_Text(request.prompt, tokens) for request in requests]
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
        choices = []
        for place, text in enumerate(self._texts):
            choice = self._kind.choice(place * self._copies, text)
            choices += [{**choice, "index": place * self._copies + copy} for copy in range(self._copies)]
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
        except (Unavailable, Failed) as error:
            failed = _Refused(503, str(error) or "the server has failed", "server_error").document
            yield _event({"error": failed})
            return
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        if usage:
            yield self._chunk([], self._usage())
        yield b"data: [DONE]\n\n"

    def _chunks(self, entry: tuple[int, Update], usage: bool) -> list[bytes]:
        place, update = entry
        text, first = self._texts[place], place * self._copies
        delta = self._kind.delta(first, update, text)
        text.add(update)
        deltas = [{**delta, "index": first + copy} for copy in range(self._copies)]
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
    return f"data: {json_text(document, ensure_ascii=False)}\n\n".encode(errors="backslashreplace")
