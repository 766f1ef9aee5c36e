"""What is wanted of a generation, in texts, and what comes of it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from hexad.config import ConfigError, HexadError, counted, did_you_mean, in_python

from .grammars import of_schema, schema_text
from .prompts import Prompt, PromptEncoder
from .requests import (
    MOST_LOGPROBS,
    Ending,
    Logprob,
    Request,
    RoutedExperts,
    Sampling,
    Update,
    asked_sampling,
    streams,
)

_MOST_STOPS, _LONGEST_STOP = 64, 1024
_MOST_STOP_IDS = 1024


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


@dataclass(frozen=True)
class Wanted:
    """The settings of a generation: how much is written, and how.

    Attributes:
        tokens: new ids at most.
        sampling: how they are chosen; every sample of every prompt has random numbers of its own.
        samples: of each prompt.
        stop: texts at which one ends; also special tokens.
        logprobs: the log-probabilities of new tokens are wanted, with so many of the most likely ones beside
            each; None: not.
        prompt_logprobs: the same of prompts.
        schema: a JSON schema, as JSON, that texts conform to.
        grammar: any other grammar that they conform to, see :mod:`hexad.generation.grammars`.
        min_tokens: new ids before which no text ends.
        ignore_eos: the tokens that end documents and answers do not end a text.
        stop_token_ids: other tokens that do.
        skip_special_tokens: special tokens are no part of a text.
        routing: the experts of tokens are wanted.

    Raises:
        ConfigError: a number out of range, several samples that would all be the same, an empty text to
            stop at, or one that is not Unicode.
    """

    tokens: int = 128
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    samples: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    schema: str | None = None
    grammar: str | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    routing: bool = False

    def __post_init__(self) -> None:
        for name, least in (("tokens", self.prompt_logprobs is None), ("samples", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    f"--{name}", f"found {value!r}, expected an integer of at least {int(least)}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_LOGPROBS
            if value is not None and not known:
                expected = f"found {value!r}, expected 0 to {MOST_LOGPROBS}"
                raise ConfigError(f"--{name.replace('_', '-')}", expected)
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ConfigError(
                "--samples",
                f"found {self.samples} with --temperature 0, where all are the same; set one above 0",
            )
        if len(self.stop) > _MOST_STOPS or max(map(len, map(str, self.stop)), default=0) > _LONGEST_STOP:
            limits = f"{_MOST_STOPS} texts of {_LONGEST_STOP} characters"
            raise ConfigError("--stop", f"found {len(self.stop)} texts, expected at most {limits}")
        if "" in self.stop:
            raise ConfigError("--stop", "found an empty text; leave it out")
        for text in self.stop:
            try:
                text.encode()
            except (AttributeError, UnicodeEncodeError):
                raise ConfigError("--stop", f"found {ascii(text)[:60]}, which is not Unicode text") from None
        self._check_ends()

    def _check_ends(self) -> None:
        """Check what ends a text besides ``stop``."""
        least = self.min_tokens
        if not isinstance(least, int) or isinstance(least, bool) or not 0 <= least <= max(self.tokens, 0):
            expected = f"0 to tokens, {self.tokens}"
            raise ConfigError("--min-tokens", f"found {least!r}, expected {expected}")
        for name in ("ignore_eos", "skip_special_tokens", "routing"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(
                    f"--{name.replace('_', '-')}", f"found {value!r:.60}, expected true or false"
                )
        ids = self.stop_token_ids
        if len(ids) > _MOST_STOP_IDS or not all(type(token) is int and token >= 0 for token in ids):
            expected = f"expected at most {_MOST_STOP_IDS:,} ids"
            raise ConfigError("--stop-token-ids", f"found {ids!r:.60}, {expected}")

    def replaced(self, settings: Mapping[str, Any]) -> Wanted:
        """With some of :class:`Settings` in place of its own, each checked. A temperature of 0 replaces what
        chooses among likely tokens, too.

        Raises:
            HexadError: a value of the wrong type or out of range.
        """
        given = dict(settings)
        names = Sampling.__dataclass_fields__.keys()
        sampling = {name: given.pop(name) for name in given.keys() & names}
        if "logit_bias" in sampling:
            bias = sampling["logit_bias"]
            if not isinstance(bias, Mapping):
                raise ConfigError("--logit-bias", f"found {bias!r:.60}, expected numbers by token id")
            sampling["logit_bias"] = tuple((_id(token), value) for token, value in bias.items())
        if sampling.get("temperature") == 0:
            sampling = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **sampling}
        if "stop" in given:
            stop = given["stop"]
            if not isinstance(stop, str | list | tuple):
                raise ConfigError("--stop", f"found {stop!r:.60}, expected a text or a list of texts")
            given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if "stop_token_ids" in given:
            ids = given["stop_token_ids"]
            if not isinstance(ids, list | tuple):
                raise ConfigError("--stop-token-ids", f"found {ids!r:.60}, expected a list of ids")
            given["stop_token_ids"] = tuple(ids)
        if given.get("schema") is not None:
            given["schema"] = schema_text(given["schema"])
        changed = asked_sampling(replace(self.sampling, **sampling)) if sampling else self.sampling
        return replace(self, sampling=changed, **given)

    def of_prompt(self, prompt: Prompt, name: str = "prompt") -> Wanted:
        """With the settings that a prompt has beside its text; ``name`` is the prompt's in messages.

        Raises:
            HexadError: as for :meth:`replaced`.
        """
        known = Settings.__annotations__ if isinstance(prompt, Mapping) else ()
        own = {setting: prompt[setting] for setting in known if setting in prompt}
        try:
            return self.replaced(own) if own else self
        except HexadError as error:
            raise HexadError(f"{name}: {in_python(error)}") from None

    def requests(self, prompt: Prompt, encoder: PromptEncoder, name: str) -> list[Request]:
        """The requests of a prompt, one for each sample; ``name`` is the prompt's in messages.

        Raises:
            HexadError: the prompt cannot be used.
        """
        ids = encoder.ids(prompt, name)
        ends = frozenset() if self.ignore_eos else encoder.ends(prompt)
        shown = frozenset() if self.skip_special_tokens else frozenset(encoder.specials.values())
        request = Request(
            ids,
            self.tokens,
            self.sampling,
            ends=ends | frozenset(self.stop_token_ids),
            stop=self.stop,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=self.grammar if self.schema is None else of_schema(self.schema),
            min_tokens=self.min_tokens,
            shown=shown,
            routing=self.routing,
        )
        keys = streams(self.sampling.seed, range(self.samples), ids)
        return [replace(request, sample=sample, key=key) for sample, key in enumerate(keys)]


class Settings(TypedDict, total=False):
    """The settings of a generation as arguments of :meth:`hexad.Generator.generate`; those in a prompt's
    object apply to that prompt.

    Attributes:
        tokens: new tokens at most; 128.
        temperature: 0 selects the most likely token; 0.
        top_k: sample the ``k`` most likely only; 0: all.
        top_p: sample the most likely up to this sum of probabilities only; 1.
        min_p: sample those with at least this part of the largest probability only; 0.
        repetition_penalty: divides the logits of tokens in the prompt or in the text so far; 1.
        presence_penalty, frequency_penalty: are subtracted from the logits of tokens in the text so far, the
            latter as often as they occur; 0.
        logit_bias: by token id, what is added to its logit.
        seed: of sampling; the random numbers of a sample follow from it, the prompt and the sample's number.
        samples: texts for each prompt; 1.
        stop: a text, or several, before which one ends; also special tokens.
        logprobs: the log-probabilities of the new tokens are wanted, with so many of the most likely ones
            beside each, up to 20; None: not.
        prompt_logprobs: the same of the prompts' tokens but the first.
        schema: a JSON schema that texts conform to (``pip install 'hexad[constraints]'``).
        min_tokens: new tokens before which no text ends; 0.
        ignore_eos: write on after the tokens that end documents and answers; false.
        stop_token_ids: other tokens that end a text.
        skip_special_tokens: special tokens are no part of a text; true.
        routing: the experts of the tokens are wanted, which :class:`hexad.Microbatch` can impose on training;
            false. Such a text shares the computation of its prompt with no other.
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


def wanted(settings: Mapping[str, Any]) -> Wanted:
    """What :class:`Settings` ask for.

    Raises:
        HexadError: an unknown setting, or a value of the wrong type or out of range.
    """
    for name in settings.keys() - Settings.__annotations__.keys():
        raise HexadError(f"generate: unknown argument {name!r}{did_you_mean(name, Settings.__annotations__)}")
    return Wanted().replaced(settings)


def _id(token: Any) -> Any:
    """A token's id, in JSON a text."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token


def asked(prompts: Any) -> list[Prompt]:
    """Prompts, given as a text, or as several of which some may be texts.

    Raises:
        HexadError: neither.
    """
    if not isinstance(prompts, Sequence):
        raise HexadError(f"prompts: found {prompts!r}, expected a text or a list of prompts")
    listed = [prompts] if isinstance(prompts, str) else prompts
    return [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in listed]


def continuation(number: int, request: Request, prompt: Any, updates: Sequence[Update]) -> Continuation:
    """What the updates of a request have brought together.

    Raises:
        HexadError: logits are not finite.
    """
    ended = updates[-1].ended
    assert ended is not None
    if ended == "failed":
        place = len(request.prompt) + sum(len(update.tokens) for update in updates)
        raise HexadError(f"prompt {number + 1}: after {counted(place, 'token')} {updates[-1].text}")
    scores = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    return Continuation(
        number,
        request.sample,
        "".join(update.text for update in updates),
        [token for update in updates for token in update.tokens],
        ended,
        prompt,
        None if request.logprobs is None else tuple(one for update in updates for one in update.logprobs),
        scores[0] if scores else None,
        updates[-1].routing,
    )
