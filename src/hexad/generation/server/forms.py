"""Results in OpenAI's forms: complete ones, and the parts of streams."""

from __future__ import annotations

import asyncio
import secrets
import string
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hexad.config import json_text
from hexad.dataset.text.token_text import Label, TokenLabels, TokenText

from ..prompts import Prompt
from ..requests import Logprob, Request, RequestUpdate
from .errors import RequestError
from .protocol import ChatRequest, CompletionRequest
from .service import Failed, Unavailable
from .tools import FunctionCall, ToolFormat, ToolReader

_ID_BYTES, _LOGPROB_BYTES = 80, 160
"""Bytes that the server keeps of a token: its id, in the request and in the sequence; a log-probability."""
_PIECE = 512
"""Elements of a list that are written as JSON at once: meanwhile no other thread runs."""


class EventStream(StreamingResponse):
    """An answer in events, whose generator ends with it: also where a client leaves, or does not read."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


class CompletionForm:
    """The form of ``/v1/completions``."""

    object, prefix = ("text_completion", "text_completion"), "cmpl"

    def __init__(self, body: CompletionRequest, tokens: TokenText) -> None:
        self.body, self._tokens = body, tokens
        self._echoes: dict[int, _Echo] = {}  # by prompt

    def choice(self, prompt: int, text: _Text) -> dict[str, Any]:
        """A complete text after a prompt."""
        body, echo = self.body, self._echo(prompt, text)
        logprobs = None
        if body.logprobs is not None:
            logprobs = _columns([*echo.tokens, *text.named(text.logprobs, len(echo.text))])
        document: dict[str, Any] = {
            "text": echo.text + text.text,
            "logprobs": logprobs,
            "finish_reason": _reason(text.ended),
        }
        if body.prompt_logprobs is not None:
            document["prompt_logprobs"] = [
                None, *({str(token): {"logprob": value} for token, value in ((entry.token, entry.value),
                        *entry.top)} for entry in text.scores or ())
            ]  # fmt: skip
        return document

    def deltas(self, prompt: int, update: RequestUpdate, text: _Text) -> list[dict[str, Any]]:
        """The parts of a text that an update brings; ``text`` has those before."""
        body = self.body
        parts = []
        if body.echo and not text.begun:
            text.scores = update.prompt_logprobs
            echo = self._echo(prompt, text)
            columns = None if body.logprobs is None else _columns(echo.tokens)
            parts.append({"text": echo.text, "logprobs": columns, "finish_reason": None})
        offset = len(self._echo(prompt, text).text)
        columns = None
        if body.logprobs is not None and update.tokens:
            columns = _columns(text.named(update.logprobs, offset))
        parts.append({"text": update.text, "logprobs": columns, "finish_reason": _reason(update.ended)})
        return parts

    def _echo(self, prompt: int, text: _Text) -> _Echo:
        """The echo of a prompt, which all of its texts have."""
        if not self.body.echo:
            return _Echo("")
        if prompt not in self._echoes:
            written = self._prompts[prompt]["prompt"]
            followed = bool(text.tokens or (self.body.stream and self.body.max_tokens != 0))
            named = isinstance(written, list) or self.body.logprobs is not None
            echo = _Echo.of(self._tokens, written, text, followed) if named else _Echo(written)
            self._echoes[prompt] = echo
        return self._echoes[prompt]

    @cached_property
    def _prompts(self) -> list[Prompt]:
        return self.body.prompts()


class ChatForm:
    """The form of ``/v1/chat/completions``.

    Args:
        body: the request.
        calls: how the template writes calls of functions; None where the request allows none.
    """

    object, prefix = ("chat.completion", "chat.completion.chunk"), "chatcmpl"

    def __init__(self, body: ChatRequest, calls: ToolFormat | None) -> None:
        self.body, self._format = body, calls

    def choice(self, prompt: int, text: _Text) -> dict[str, Any]:
        """A complete answer."""
        content, calls = text.text, list[FunctionCall]()
        if self._format is not None:
            content, calls = self._format.calls(text.text)
        message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in self._allowed(calls)]
        else:
            message["content"] = text.text
        return {
            "message": message,
            "logprobs": self._logprobs(text.named(text.logprobs)),
            "finish_reason": self._reason(text.ended, calls),
        }

    def deltas(self, prompt: int, update: RequestUpdate, text: _Text) -> list[dict[str, Any]]:
        """The parts of an answer that an update brings; ``text`` has those before."""
        content, calls = update.text, list[FunctionCall]()
        if self._format is not None:
            text.reader = text.reader or ToolReader(self._format)
            content = text.reader.add(update.text)
            if update.ended is not None:
                rest, calls = text.reader.end()
                content += rest
        role = {} if text.begun else {"role": "assistant"}
        parts: list[dict[str, Any]] = [{**role, "content": content}]
        if calls:
            listed = [{"index": n, **_call(call)} for n, call in enumerate(self._allowed(calls))]
            parts.append({"tool_calls": listed})
        named = self._logprobs(text.named(update.logprobs)) if update.tokens else None
        last = len(parts) - 1
        return [
            {
                "delta": part,
                "logprobs": named if n == 0 else None,
                "finish_reason": self._reason(update.ended, calls) if n == last else None,
            }
            for n, part in enumerate(parts)
        ]

    def _allowed(self, calls: list[FunctionCall]) -> list[FunctionCall]:
        return calls[:1] if self.body.parallel_tool_calls is False else calls

    def _reason(self, ended: str | None, calls: Sequence[FunctionCall]) -> str | None:
        return "tool_calls" if calls else _reason(ended)

    def _logprobs(self, named: Sequence[_Named]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        entries = [
            {
                **_entry(entry.label, entry.value),
                "top_logprobs": [_entry(label, value) for label, value in entry.top],
            }
            for entry in named
        ]
        return {"content": entries, "refusal": None}


def _call(call: FunctionCall) -> dict[str, Any]:
    """A call of a function, with an identifier that all templates accept."""
    letters = string.ascii_letters + string.digits
    number = "".join(secrets.choice(letters) for _ in range(9))
    return {"id": number, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _entry(label: Label, value: float | None) -> dict[str, Any]:
    return {"token": label.name, "logprob": value, "bytes": list(label.value)}


def _columns(named: Sequence[_Named]) -> dict[str, Any]:
    """The log-probabilities of a completion."""
    return {
        "tokens": [entry.label.name for entry in named],
        "token_logprobs": [entry.value for entry in named],
        # As at OpenAI, the token itself is among the most likely ones.
        "top_logprobs": [
            {label.name: value for label, value in (*entry.top, (entry.label, entry.value))}
            if entry.top
            else None
            for entry in named
        ],
        "text_offset": [entry.offset for entry in named],
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
    def of(cls, tokens: TokenText, prompt: str | list[int], text: _Text, followed: bool) -> _Echo:
        """The echo of a prompt, a text or ids, that new tokens follow or not."""
        labels = TokenLabels(tokens, tokens.prompt_decoder())
        named = [
            _named(labels, token, score) for token, score in zip(text.prompt, (None, *(text.scores or ())))
        ]
        if isinstance(prompt, list):
            decoder = tokens.prompt_decoder()
            shown = "".join(decoder.add(token).text for token in text.prompt)
            if not followed:  # else they complete the last character
                shown += decoder.end()
            return cls(shown, tuple(named))
        # Encoding may change a text: places are those in the text that was given.
        (places,) = tokens.tokenizer.encode_offsets([prompt])
        begins = [*[0] * (len(text.prompt) - len(places.ids)), *places.begin.tolist()]
        return cls(prompt, tuple(entry._replace(offset=begin) for entry, begin in zip(named, begins)))


class _Text:
    """A text as it grows."""

    def __init__(self, prompt: tuple[int, ...], tokens: TokenText) -> None:
        self.prompt, self.text = prompt, ""
        self._labels = TokenLabels(tokens, tokens.decoder(prompt))
        self.ended: str | None = None
        self.tokens = self.cached = 0
        self.logprobs: list[Logprob] = []
        self.scores: tuple[Logprob, ...] | None = None
        self.begun = False  # whether a part of it was sent
        self.reader: ToolReader | None = None

    def named(self, scores: Sequence[Logprob], offset: int = 0) -> list[_Named]:
        """Its next tokens; ``offset``: of its text in the result. Called once for each."""
        return [_named(self._labels, score.token, score, offset) for score in scores]

    def add(self, update: RequestUpdate) -> None:
        self.begun = True
        self.text += update.text
        self.tokens += len(update.tokens)
        self.logprobs += update.logprobs
        self.cached = max(self.cached, update.cached)
        self.ended = update.ended
        self.scores = update.prompt_logprobs if self.scores is None else self.scores

    def likelihood(self) -> float:
        """The mean of its tokens' log-probabilities."""
        values = [logprob.value for logprob in self.logprobs]
        return sum(values) / len(values) if values else 0.0


class Texts:
    """The texts of one request, in its form.

    Attributes:
        form: of the request.
        requests: those of the generator, in the order of prompts and samples.
        prompts: ids of the prompts.

    Args:
        tokens: the texts of the tokenizer's tokens.
        name: of the model.
    """

    def __init__(
        self,
        form: CompletionForm | ChatForm,
        requests: Sequence[Request],
        prompts: Sequence[tuple[int, ...]],
        tokens: TokenText,
        name: str,
    ) -> None:
        self.form, self.requests, self.prompts = form, requests, prompts
        self._texts = [_Text(request.prompt, tokens) for request in requests]
        self._samples = len(requests) // len(prompts)
        # Choices that are the same are computed once.
        self._copies = 1 if self._samples > 1 else form.body.choices
        self._head = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }

    @property
    def size(self) -> int:
        """Bytes that the server keeps of them until the end, about."""
        size = sum(map(len, self.prompts)) * _ID_BYTES
        for request in self.requests:
            sampling = request.sampling
            if sampling.prompt_logprobs is not None:
                size += len(request.prompt) * (1 + sampling.prompt_logprobs) * _LOGPROB_BYTES
            if sampling.logprobs is not None and not self.form.body.stream:
                size += sampling.tokens * (1 + sampling.logprobs) * _LOGPROB_BYTES
        return size

    async def read(
        self, first: tuple[int, RequestUpdate], stream: AsyncIterator[tuple[int, RequestUpdate]]
    ) -> None:
        """Take all updates."""
        place, update = first
        self._texts[place].add(update)
        async for place, update in stream:
            self._texts[place].add(update)

    @property
    def complete(self) -> bool:
        """Whether all texts have ended."""
        return all(text.ended is not None for text in self._texts)

    def content(self) -> bytes:
        """The answer in one piece, as JSON."""
        choices: list[dict[str, Any]] = []
        for prompt in range(len(self.prompts)):
            texts = self._texts[prompt * self._samples : (prompt + 1) * self._samples]
            best = sorted(texts, key=_Text.likelihood, reverse=True) if self._many else texts
            for text in best[: self.form.body.choices]:
                choice = self.form.choice(prompt, text)
                choices += [{"index": len(choices) + copy, **choice} for copy in range(self._copies)]
        head = {**self._head, "object": self.form.object[0]}
        document = {**head, "choices": choices, "usage": self._usage()}
        return "".join(_pieces(document)).encode(errors="backslashreplace")

    @property
    def _many(self) -> bool:
        """Whether more texts are computed than are answered."""
        return self._samples > self.form.body.choices

    async def events(
        self, first: tuple[int, RequestUpdate], stream: AsyncIterator[tuple[int, RequestUpdate]]
    ) -> AsyncIterator[bytes]:
        """The answer in events."""
        options = self.form.body.stream_options
        usage = options is not None and bool(options.include_usage)
        try:
            for chunk in await self._events(first, usage):
                yield chunk
            async for entry in stream:
                for chunk in await self._events(entry, usage):
                    yield chunk
        except (Unavailable, Failed) as error:
            yield _event({"error": RequestError(503, str(error), "server_error").document})
            return
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        if usage:
            yield self._chunk([], {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    async def _events(self, entry: tuple[int, RequestUpdate], usage: bool) -> list[bytes]:
        place, update = entry
        echo = isinstance(self.form, CompletionForm) and self.form.body.echo
        if update.prompt_logprobs is None and (not echo or self._texts[place].begun):
            return self._chunks(entry, usage)
        # Naming the tokens of a long prompt takes a while, in which others must not stop.
        return await asyncio.to_thread(self._chunks, entry, usage)

    def _chunks(self, entry: tuple[int, RequestUpdate], usage: bool) -> list[bytes]:
        place, update = entry
        text, first = self._texts[place], place * self._copies
        deltas = self.form.deltas(place // self._samples, update, text)
        text.add(update)
        options = self.form.body.stream_options
        counts: dict[str, Any] = {"usage": None} if usage else {}
        if options is not None and options.continuous_usage_stats:
            counts = {"usage": self._usage()}
        return [
            self._chunk([{"index": first + copy, **delta}], counts)
            for copy in range(self._copies)
            for delta in deltas
        ]

    def _chunk(self, choices: list[Any], counts: dict[str, Any]) -> bytes:
        return _event({**self._head, "object": self.form.object[1], "choices": choices, **counts})

    def _usage(self) -> dict[str, Any]:
        prompt, new = sum(map(len, self.prompts)), sum(text.tokens for text in self._texts) * self._copies
        first = self._texts[:: self._samples]  # of each prompt's samples
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(text.cached for text in first)},
        }


def _reason(ended: str | None) -> str | None:
    return None if ended is None else "length" if ended == "length" else "stop"


def _event(document: Any) -> bytes:
    return f"data: {''.join(_pieces(document))}\n\n".encode(errors="backslashreplace")


def _pieces(value: Any) -> Iterator[str]:
    """JSON of a document, of which no piece takes long."""
    if isinstance(value, dict) and value:
        for number, (name, inner) in enumerate(value.items()):
            yield ("," if number else "{") + json_text(str(name), ensure_ascii=False) + ":"
            yield from _pieces(inner)
        yield "}"
    elif isinstance(value, list | tuple) and (len(value) > _PIECE or any(map(_nested, value))):
        for number in range(0, len(value), _PIECE):
            part = value[number : number + _PIECE]
            yield "," if number else "["
            if any(map(_nested, part)):
                for place, inner in enumerate(part):
                    yield "," if place else ""
                    yield from _pieces(inner)
            else:
                yield json_text(part, ensure_ascii=False, separators=(",", ":"))[1:-1]
        yield "]"
    else:
        yield json_text(value, ensure_ascii=False, separators=(",", ":"))


def _nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
