"""Requests of OpenAI's interface, and what they ask of the generator. No torch.

Fields of other servers that do the same are accepted too, by the names that vLLM gives them. Fields that only
describe a request have no effect; what would change an answer and is not supported is refused; unknown fields
are logged and ignored, or refused by a strict server.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    create_model,
)

from hexad.config import ConfigError, HexadError, shown

from ..grammars import of_choices, of_lark, of_regex, of_schema, schema_text
from ..prompts import Prompt
from ..sampling import MOST_LOGPROBS, UNRESTRICTED, Sampling, settings
from .errors import encodable

JsonNumber = StrictInt | StrictFloat
_MOST_CHOICES = 128
_MOST_FIELDS = 200
_MOST_BIASES = 1024
WITHOUT_EFFECT = frozenset(
    (
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
    )
)
"""Fields that describe a request, or how it is served."""


class StreamOptions(BaseModel):
    """The options of a stream."""

    model_config = ConfigDict(extra="allow")

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class _Addressed(BaseModel):
    """The model that a request is for, and its number of new tokens."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None


_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "stop", "ignore_eos", "min_tokens", "stop_token_ids", "skip_special_tokens"),
)
"""Settings of :class:`~hexad.generation.sampling.Sampling` that are fields of the same name."""
_FIELD_TYPES: dict[Any, Any] = {float: JsonNumber, int: StrictInt, bool: StrictBool}
"""The types of fields by those of settings. Lists and objects are checked by :meth:`_Common.check`: a
validator of their elements would describe every one that is wrong."""
if TYPE_CHECKING:
    _WithSettings = _Addressed
else:
    _WithSettings = create_model(
        "_WithSettings",
        __base__=_Addressed,
        **{name: (_FIELD_TYPES.get(settings()[name][0], Any) | None, None) for name in _SAME_NAMES},
    )


class _Common(_WithSettings):
    """The fields of both kinds of requests."""

    unsupported: ClassVar[Mapping[str, str]] = {}

    n: Annotated[StrictInt, Field(ge=1, le=_MOST_CHOICES)] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: StrictStr | None = None
    guided_choice: Any = None
    guided_grammar: StrictStr | None = None

    def check(self) -> list[str]:
        """Refuse what is not supported.

        Returns:
            The fields that are not known and have no effect.

        Raises:
            HexadError: names the field.
        """
        unknown = []
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported and value:
                raise ConfigError(name, self.unsupported[name])
            if name not in WITHOUT_EFFECT and name not in self.unsupported and value is not None:
                unknown.append(name)
        if self.stream_options is not None:
            if not self.stream:
                raise ConfigError("stream_options", "found without stream: true; remove it")
            unknown += [f"stream_options.{name}" for name in self.stream_options.model_extra or {}]
        values = self._settings()
        bias, stop, ids = (values.get(name) for name in ("logit_bias", "stop", "stop_token_ids"))
        if bias is not None and (not isinstance(bias, dict) or len(bias) > _MOST_BIASES):
            expected = f"expected at most {_MOST_BIASES:,} numbers by token id"
            raise ConfigError("logit_bias", f"found {shown(bias)}, {expected}")
        if stop is not None and not isinstance(stop, str | list):
            raise ConfigError("stop", f"found {shown(stop)}, expected a text or a list of texts")
        if isinstance(stop, list) and any(not isinstance(text, str) for text in stop[:_MOST_FIELDS]):
            raise ConfigError("stop", f"found {shown(stop)}, expected a text or a list of texts")
        if ids is not None and not isinstance(ids, list):
            raise ConfigError("stop_token_ids", f"found {shown(ids)}, expected a list of ids")
        if self.best_of is not None:
            if self.best_of < self.choices:
                raise ConfigError("best_of", f"found {self.best_of}, expected at least n, {self.choices}")
            if self.stream and self.best_of != self.choices:
                raise ConfigError("best_of", "found with stream: true: the best are known at the end")
        return unknown

    def _settings(self) -> dict[str, Any]:
        return {name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None}

    @property
    def choices(self) -> int:
        """Texts for each prompt; without randomness they are the same."""
        return self.n or 1

    @property
    def samples(self) -> int:
        """Texts that are computed for each prompt, of which the best are the choices."""
        return max(self.choices, self.best_of or 1)

    def _sampling(
        self, tokens: int, logprobs: int | None, prompt_logprobs: int | None, grammar: str | None
    ) -> Sampling:
        """The settings of the generation. As at OpenAI, the temperature is 1, and the seed another one every
        time, if the request has none. Texts that would be the same are computed once."""
        values = {"temperature": 1.0, "seed": secrets.randbelow(2**63), **self._settings()}
        values["seed"] &= 2**63 - 1
        if values.get("top_k") == -1:  # all, as in vLLM
            values["top_k"] = 0
        if values["temperature"] == 0:
            values |= UNRESTRICTED
        bias, stop = values.get("logit_bias", {}), values.get("stop", ())
        try:
            values["logit_bias"] = tuple((int(token), float(value)) for token, value in bias.items())
        except (ValueError, OverflowError, TypeError):
            raise ConfigError("logit_bias", f"found {shown(bias)}, expected numbers by token id") from None
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
        return Sampling(
            **values,
            tokens=tokens,
            samples=1 if values["temperature"] == 0 else self.samples,
            logprobs=0 if logprobs is None and self.samples > self.choices else logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )

    def grammar(self) -> tuple[str, str] | None:
        """The field that asks for a form of the answer, and its grammar.

        Raises:
            ConfigError: several do, or one is malformed.
        """
        asked = {
            field: grammar
            for field, read in (
                ("response_format", self._response_format),
                ("structured_outputs", self._structured_outputs),
                *((f"guided_{kind}", _guided(kind)) for kind in _GRAMMARS),
            )
            if (value := getattr(self, field)) is not None and (grammar := read(value)) is not None
        }
        if len(asked) > 1:
            first, second, *_ = asked
            raise ConfigError(second, f"found beside {first}; set one of them")
        return next(iter(asked.items()), None)

    @staticmethod
    def _response_format(form: Any) -> str | None:
        kind: Literal["text", "json_object", "json_schema"] | Any = (
            form.get("type") if isinstance(form, dict) else None
        )
        if kind == "text":
            return None
        if kind == "json_object":
            return of_schema({"type": "object"})
        if kind == "json_schema":
            described = form.get("json_schema")
            if isinstance(described, dict) and isinstance(described.get("schema"), dict):
                return of_schema(schema_text(described["schema"]))
            raise ConfigError("response_format", "found no json_schema.schema, which is an object")
        known = "text, json_object or json_schema"
        raise ConfigError("response_format", f"found type {shown(kind)}, expected {known}")

    @staticmethod
    def _structured_outputs(form: Any) -> str | None:
        known = (*_GRAMMARS, "json_object")
        names = [name for name in form if form[name] is not None] if isinstance(form, dict) else []
        if len(names) != 1 or names[0] not in known:
            expected = f"expected one of {', '.join(known)}"
            raise ConfigError("structured_outputs", f"found {shown(form)}, {expected}")
        (name,) = names
        if name == "json_object":
            return of_schema({"type": "object"}) if form[name] else None
        return _grammar("structured_outputs", name, form[name])


_GRAMMARS = ("json", "regex", "choice", "grammar")


def _guided(kind: str) -> Any:
    return lambda value: _grammar(f"guided_{kind}", kind, value)


def _grammar(field: str, kind: str, value: Any) -> str:
    if kind == "json":
        try:
            return of_schema(schema_text(value))
        except ConfigError as error:
            raise ConfigError(field, error.problem) from None
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise ConfigError(field, f"found {shown(value)}, expected a list of texts")
        return of_choices(value)
    if not isinstance(value, str):
        raise ConfigError(field, f"found {shown(value)}, expected a text")
    return of_regex(value) if kind == "regex" else of_lark(value)


class CompletionRequest(_Common):
    """``POST /v1/completions``."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "suffix": "is not supported; remove it",
        "use_beam_search": "is not supported; remove it",
        "prompt_embeds": "is not supported; send a text or ids",
    }

    prompt: Any
    logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: StrictBool | None = None
    add_special_tokens: StrictBool | None = None

    def check(self) -> list[str]:
        """Refuse what is not supported; see :meth:`_Common.check`."""
        unknown = super().check()
        if self.prompt_logprobs is not None and self.stream:
            problem = "found with stream: true, which is not supported; remove one"
            raise ConfigError("prompt_logprobs", problem)
        return unknown

    @property
    def number(self) -> int:
        """Prompts, before any is looked at."""
        several = isinstance(self.prompt, list) and self.prompt and type(self.prompt[0]) is not int
        return len(self.prompt) if several else 1

    def prompts(self) -> list[Prompt]:
        """Texts or ids."""
        prompt = self.prompt
        if prompt == []:
            raise ConfigError("prompt", "found an empty list, expected a text or ids")
        single = isinstance(prompt, str) or (isinstance(prompt, list) and type(prompt[0]) is int)
        texts = [prompt] if single else prompt
        if not isinstance(texts, list) or not all(isinstance(text, str | list) for text in texts):
            raise ConfigError("prompt", f"found {shown(prompt)}, expected a text or ids, or a list of them")
        begins = {} if self.add_special_tokens is not False else {"add_special_tokens": False}
        return [{"prompt": text, **begins} for text in texts]

    def sampling(self, room: int, grammar: str | None = None) -> Sampling:
        """The settings of the generation; ``room``: tokens that the model has room for."""
        tokens = 16 if self.max_tokens is None else self.max_tokens
        scored = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scored = max(self.logprobs, scored or 0)
        if tokens == 0 and scored is None:
            scored = 0  # nothing else is computed
        return self._sampling(tokens, self.logprobs, scored, grammar)


class ChatRequest(_Common):
    """``POST /v1/chat/completions``."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "functions": "is not supported; send tools",
        "function_call": "is not supported; send tool_choice",
        "audio": "is not supported; remove it",
        "use_beam_search": "is not supported; remove it",
        "chat_template": "is not supported: the server's template is its tokenizer's; remove it",
        "web_search_options": "is not supported; remove it",
    }

    messages: Any
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    modalities: Any = None
    chat_template_kwargs: dict[StrictStr, Any] | None = None
    reasoning_effort: StrictStr | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    documents: Any = None

    @property
    def number(self) -> int:
        """Conversations."""
        return 1

    def check(self) -> list[str]:
        """Refuse what is not supported; see :meth:`_Common.check`."""
        unknown = super().check()
        if not isinstance(self.messages, list) or not self.messages:
            raise ConfigError("messages", f"found {shown(self.messages)}, expected a list of messages")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            other = f"beside max_completion_tokens {self.max_completion_tokens}"
            raise ConfigError("max_tokens", f"found {self.max_tokens} {other}; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ConfigError("top_logprobs", "found without logprobs: true; add it")
        if self.modalities not in (None, [], ["text"]):
            raise ConfigError("modalities", f"found {shown(self.modalities)}, expected ['text']")
        self.forced_tool()
        return unknown

    def functions(self) -> list[dict[str, Any]]:
        """The functions of ``tools``.

        Raises:
            ConfigError: one is malformed.
        """
        functions = []
        if self.tools is not None and not isinstance(self.tools, list):
            raise ConfigError("tools", f"found {shown(self.tools)}, expected a list of functions")
        for tool in self.tools or ():
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                expected = "expected {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
                raise ConfigError("tools", f"found {shown(tool)}, {expected}")
            functions.append(function)
        return functions

    def forced_tool(self) -> str | None:
        """The function that the answer has to call; "" if any will do, None if none has to be called."""
        choice = self.tool_choice
        names = [function["name"] for function in self.functions()]
        if choice in (None, "auto", "none"):
            return None
        if choice == "required":
            name: Any = ""
        else:
            function = choice.get("function") if isinstance(choice, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            known = "auto, none, required or {'type': 'function', 'function': {'name': ...}}"
            raise ConfigError("tool_choice", f"found {shown(choice)}, expected {known}")
        if not names or (name and name not in names):
            listed = ", ".join(names[:8]) or "no tools"
            raise ConfigError("tool_choice", f"found {shown(choice)}, but tools has {listed}")
        return name

    def prompts(self) -> list[Prompt]:
        """The conversation, with the texts of its messages' parts."""
        values = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            values.setdefault("reasoning_effort", self.reasoning_effort)
        if self.documents is not None:
            values.setdefault("documents", self.documents)
        prompt: dict[str, Any] = {
            "messages": [
                {**message, "content": _text(message)} if isinstance(message, dict) else message
                for message in self.messages
            ],
            "chat_template_kwargs": values,
            "tools": self.tools or None,
        }
        for name in ("add_generation_prompt", "continue_final_message"):
            if (value := getattr(self, name)) is not None:
                prompt[name] = value
        return [prompt]

    def sampling(self, room: int, grammar: str | None = None) -> Sampling:
        """The settings of the generation; ``room``: tokens that the model has room for."""
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        tokens = limits[0] if limits else max(1, room)
        return self._sampling(tokens, (self.top_logprobs or 0) if self.logprobs else None, None, grammar)


Body = CompletionRequest | ChatRequest


def read(kind: type[CompletionRequest] | type[ChatRequest], fields: Mapping[str, Any]) -> Body:
    """A request with these fields.

    Raises:
        ConfigError: names the first field that is malformed.
    """
    if len(fields) > _MOST_FIELDS:
        raise HexadError(f"the request: found {len(fields):,} fields, expected at most {_MOST_FIELDS}")
    for name in fields:
        if name != encodable(name):
            raise ConfigError(name, "is not a field of this request, nor Unicode text; remove it")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        (problem, *_) = error.errors(include_url=False, include_context=False)
        names = [str(part) for part in problem["loc"]]
        where = ".".join(name for name in names if not name.startswith(("constrained", "function-")))
        if problem["type"] == "missing":
            raise ConfigError(names[0], "is missing") from None
        text = problem["msg"][0].lower() + problem["msg"][1:]
        wrong = ConfigError(where, f"found {shown(problem.get('input'))}; {text}")
        wrong.field = names[0]
        raise wrong from None


def _text(message: Mapping[str, Any]) -> Any:
    """The text of a message, given as such or in parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part
        if isinstance(part, dict) and part.get("type") in ("text", "input_text", "refusal"):
            text = part.get("text" if "text" in part else "refusal")
        if not isinstance(text, str):
            raise ConfigError("messages", "found a part that is no text, which the model does not read")
        texts.append(text)
    return "".join(texts)
