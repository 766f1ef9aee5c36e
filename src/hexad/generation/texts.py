"""Turns users' prompts into requests, and updates into texts. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from hexad.config import ConfigError, HexadError, counted, did_you_mean

from .grammars import of_schema, schema_text
from .prompts import Prompt, PromptEncoder
from .requests import Ending, Logprob, Request, RequestUpdate, RoutedExperts, streams
from .sampling import CHOICE_SETTINGS, UNRESTRICTED, Sampling, restricted_with_temperature


@dataclass(frozen=True)
class Continuation:
    """One text that a model has written.

    Attributes:
        number: of its prompt, among the prompts.
        sample: its number among those of the prompt.
        text: without the prompt, and without what ended it.
        tokens: the new ids, with what ended them.
        ended: by a token that ends a ``document`` or an answer, a ``stop`` text, or the ``length``.
        prompt: the text, the ids or the messages that it continues.
        logprobs: of the new tokens, where they were asked for.
        prompt_logprobs: of the prompt's tokens but the first, where they were asked for.
        routing: the experts of all tokens but the last, the prompt's included, where they were asked for.
    """

    number: int
    sample: int
    text: str
    tokens: list[int]
    ended: Ending
    prompt: Any = None
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob, ...] | None = None
    routing: RoutedExperts | None = None


class Settings(TypedDict, total=False):
    """The fields of :class:`~hexad.generation.sampling.Sampling` as arguments of
    :meth:`hexad.Generator.generate`, in the forms that users write; those in a prompt's object apply to that
    prompt.
    """

    tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    samples: int
    stop: str | Sequence[str]
    logprobs: int | None
    prompt_logprobs: int | None
    schema: Any
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    skip_special_tokens: bool
    routing: bool


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """The sampling with these :class:`Settings`, and defaults for the others.

    Raises:
        HexadError: an unknown setting, or a value of the wrong type or out of range.
    """
    for name in settings.keys() - Settings.__annotations__.keys():
        raise HexadError(f"generate: unknown argument {name!r}{did_you_mean(name, Settings.__annotations__)}")
    return with_settings(Sampling(), settings)


def with_settings(sampling: Sampling, settings: Mapping[str, Any]) -> Sampling:
    """The sampling with some of :class:`Settings` in place of its values, each checked. A temperature of 0
    also replaces what restricts sampling.

    Raises:
        HexadError: a value of the wrong type or out of range.
    """
    values = dict(settings)
    if "logit_bias" in values:
        bias = values["logit_bias"]
        if not isinstance(bias, Mapping):
            raise ConfigError("logit_bias", f"found {bias!r:.60}, expected numbers by token id")
        values["logit_bias"] = tuple((_id(token), value) for token, value in bias.items())
    if values.get("temperature") == 0:
        values = {**UNRESTRICTED, **values}
    if "stop" in values:
        stop = values["stop"]
        if not isinstance(stop, str | list | tuple):
            raise ConfigError("stop", f"found {stop!r:.60}, expected a text or a list of texts")
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "stop_token_ids" in values:
        ids = values["stop_token_ids"]
        if not isinstance(ids, list | tuple):
            raise ConfigError("stop_token_ids", f"found {ids!r:.60}, expected a list of ids")
        values["stop_token_ids"] = tuple(ids)
    if values.get("schema") is not None:
        values["schema"] = schema_text(values["schema"])
    changed = replace(sampling, **values)
    return restricted_with_temperature(changed) if values.keys() & set(CHOICE_SETTINGS) else changed


def _id(token: Any) -> Any:
    """A token's id, which is a text in JSON."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token


def sampling_of_prompt(sampling: Sampling, prompt: Prompt, name: str = "prompt") -> Sampling:
    """The sampling with the settings that a prompt's object has; ``name`` is the prompt's in messages.

    Raises:
        HexadError: as for :func:`with_settings`.
    """
    names = Settings.__annotations__ if isinstance(prompt, Mapping) else ()
    settings = {setting: prompt[setting] for setting in names if setting in prompt}
    try:
        return with_settings(sampling, settings) if settings else sampling
    except HexadError as error:
        raise HexadError(f"{name}: {error}") from None


def requests_of(prompt: Prompt, sampling: Sampling, encoder: PromptEncoder, name: str) -> list[Request]:
    """The requests of a prompt, one for each sample; ``name`` is the prompt's in messages.

    Raises:
        HexadError: the prompt cannot be used.
    """
    ids = encoder.ids(prompt, name)
    ends = frozenset() if sampling.ignore_eos else encoder.ends(prompt)
    shown = frozenset() if sampling.skip_special_tokens else frozenset(encoder.specials.values())
    if sampling.schema is not None:
        sampling = replace(sampling, schema=None, grammar=of_schema(sampling.schema))
    ends |= frozenset(sampling.stop_token_ids)
    keys = streams(sampling.seed, range(sampling.samples), ids)
    return [Request(ids, sampling, sample, ends, shown, key) for sample, key in enumerate(keys)]


def prompt_list(prompts: Any) -> list[Prompt]:
    """A list of prompts, from a text or a list of which some may be texts.

    Raises:
        HexadError: neither.
    """
    if not isinstance(prompts, Sequence):
        raise HexadError(f"prompts: found {prompts!r}, expected a text or a list of prompts")
    listed = [prompts] if isinstance(prompts, str) else prompts
    return [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in listed]


def continuation(
    number: int, request: Request, prompt: Any, updates: Sequence[RequestUpdate]
) -> Continuation:
    """The text of a request, from its updates.

    Raises:
        HexadError: logits are not finite.
    """
    ended = updates[-1].ended
    assert ended is not None
    if ended == "failed":
        place = len(request.prompt) + sum(len(update.tokens) for update in updates)
        raise HexadError(f"prompt {number + 1}: after {counted(place, 'token')} {updates[-1].text}")
    scores = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    logprobs = tuple(logprob for update in updates for logprob in update.logprobs)
    return Continuation(
        number,
        request.sample,
        "".join(update.text for update in updates),
        [token for update in updates for token in update.tokens],
        ended,
        prompt,
        None if request.sampling.logprobs is None else logprobs,
        scores[0] if scores else None,
        updates[-1].routing,
    )
