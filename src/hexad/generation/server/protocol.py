"""Requests of OpenAI's interface, and what they ask of the generator.

Fields of other servers that do the same are accepted too: ``top_k``, ``min_p``, ``repetition_penalty``,
``prompt_logprobs``. What is not supported is refused, not ignored; fields that only describe a request have
no effect.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from hexad.config import ConfigError, HexadError

from ..prompts import Prompt
from ..requests import MOST_LOGPROBS, Sampling
from ..texts import Wanted, schema_text

Number = StrictInt | StrictFloat
_MOST_CHOICES = 128
_WITHOUT_EFFECT = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
"""Fields that describe a request."""


class StreamOptions(BaseModel):
    """What a stream contains besides text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False


class _Common(BaseModel):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[Mapping[str, str]] = {}

    model: StrictStr
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[StrictStr, Number], Field(max_length=1024)] | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            HexadError: names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported and value:
                raise ConfigError(name, self.unsupported[name])
            if name not in _WITHOUT_EFFECT and name not in self.unsupported:
                raise ConfigError(name, "is not a field of this request; remove it")
        if self.stream_options is not None and not self.stream:
            raise ConfigError("stream_options", "found without stream: true; remove it")

    def sampling(self) -> Sampling:
        """How tokens are chosen; as at OpenAI at temperature 1, with random numbers of its own without a
        seed."""
        names = "top_p top_k min_p repetition_penalty presence_penalty frequency_penalty".split()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        seed = secrets.randbelow(2**63) if self.seed is None else self.seed & (2**63 - 1)
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature == 0:  # these choose among random ones
            given = {name: value for name, value in given.items() if name not in ("top_p", "top_k", "min_p")}
        try:
            bias = tuple((int(token), float(value)) for token, value in (self.logit_bias or {}).items())
        except (ValueError, OverflowError):
            problem = f"found {self.logit_bias!r:.60}, expected numbers by token id"
            raise ConfigError("logit_bias", problem) from None
        return Sampling(temperature=temperature, seed=seed, logit_bias=bias, **given)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """Texts for each prompt; without randomness they are the same."""
        return self.n or 1


class CompletionRequest(_Common):
    """``POST /v1/completions``."""

    unsupported: ClassVar[Mapping[str, str]] = {"suffix": "is not supported; remove it"}

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None

    def check(self) -> None:
        """See there."""
        super().check()
        if self.best_of is not None and self.best_of != self.choices:
            raise ConfigError("best_of", f"found {self.best_of}, expected n, {self.choices}; remove it")
        if self.echo and self.stream:
            raise ConfigError("echo", "found true with stream: true, which is not supported; remove one")
        if self.prompt_logprobs is not None and self.stream:
            raise ConfigError(
                "prompt_logprobs", "found with stream: true, which is not supported; remove one"
            )

    def prompts(self) -> list[Prompt]:
        """Texts or ids."""
        given: Any = self.prompt
        if given == []:
            raise ConfigError("prompt", "found an empty list, expected a text or ids")
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        return [{"prompt": prompt} for prompt in given]

    def wanted(self, room: int) -> Wanted:
        """What is to be generated; ``room``: tokens that the model has room for."""
        tokens = 16 if self.max_tokens is None else self.max_tokens
        scored = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scored = max(self.logprobs, scored or 0)
        if tokens == 0 and scored is None:
            scored = 0  # nothing else is computed
        common = self.sampling(), self.choices, self.stop_texts
        return _wanted(tokens, *common, self.logprobs, scored, None)


class ChatRequest(_Common):
    """``POST /v1/chat/completions``."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "tools": "is not supported; remove it",
        "tool_choice": "is not supported; remove it",
        "functions": "is not supported; remove it",
        "function_call": "is not supported; remove it",
        "audio": "is not supported; remove it",
        "modalities": "is not supported; remove it",
    }

    messages: Annotated[list[dict[StrictStr, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: dict[StrictStr, Any] | None = None

    def check(self) -> None:
        """See there."""
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            other = f"beside max_completion_tokens {self.max_completion_tokens}"
            raise ConfigError("max_tokens", f"found {self.max_tokens} {other}; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ConfigError("top_logprobs", "found without logprobs: true; add it")

    def prompts(self) -> list[Prompt]:
        """The conversation, with the texts of its messages' parts."""
        return [{"messages": [{**message, "content": _text(message)} for message in self.messages]}]

    def wanted(self, room: int) -> Wanted:
        """What is to be generated; ``room``: tokens that the model has room for."""
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        tokens = limits[0] if limits else max(1, room)
        common = self.sampling(), self.choices, self.stop_texts
        return _wanted(
            tokens, *common, (self.top_logprobs or 0) if self.logprobs else None, None, self._schema()
        )

    def _schema(self) -> str | None:
        """The JSON schema of the answer."""
        form = self.response_format or {"type": "text"}
        kind: Literal["text", "json_object", "json_schema"] | Any = form.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return json.dumps({"type": "object"})
        if kind == "json_schema":
            described = form.get("json_schema")
            if isinstance(described, dict) and isinstance(described.get("schema"), dict):
                return schema_text(described["schema"])
            raise ConfigError("response_format", "found no json_schema.schema, which is an object")
        known = "text, json_object or json_schema"
        raise ConfigError("response_format", f"found type {kind!r}, expected {known}")


def _wanted(
    tokens: int,
    sampling: Sampling,
    choices: int,
    stop: tuple[str, ...],
    logprobs: int | None,
    scored: int | None,
    schema: str | None,
) -> Wanted:
    """As :class:`Wanted`; several texts that are the same are made, as at OpenAI."""
    samples = 1 if sampling.temperature == 0 else choices
    return Wanted(tokens, sampling, samples, stop, logprobs, scored, schema)


def _text(message: Mapping[str, Any]) -> Any:
    """The text of a message, given as such or in parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise HexadError("messages: found a part that is no text, which the model does not read")
        texts.append(part["text"])
    return "".join(texts)
