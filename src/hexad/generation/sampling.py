"""The settings of a generation. No torch.

:class:`Sampling` declares each of them once: its type, default, range and meaning. Checks and their
messages, the options of ``hexad generate``, the fields of requests to the server and the Python reference
follow from it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf
from typing import Any, TypeVar, get_type_hints

from hexad.config import ConfigError

MOST_LOGPROBS = 20
"""Most likely tokens that are reported beside the chosen one, at most."""
_MOST = 1.7e308
_MOST_STOPS, _LONGEST_STOP = 64, 1024
_MOST_STOP_IDS = 1024
_MOST_BIAS = 100
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting besides its name, type and default.

    Attributes:
        meaning: what it does, a phrase.
        low, high: the range of a number.
        expected: the range in words.
    """

    meaning: str
    low: float = -inf
    high: float = inf
    expected: str = ""


def _setting(default: T, *declaration: Any) -> T:
    """A field of :class:`Sampling`: its default, and the arguments of its :class:`Setting`."""
    value: T = field(default=default, metadata={"setting": Setting(*declaration)})
    return value


def _documented(kind: type[T]) -> type[T]:
    """Add the declared settings to a class's docstring."""
    lines = (f"    {entry.name}: {entry.metadata['setting'].meaning}." for entry in fields(kind))  # type: ignore[arg-type]
    kind.__doc__ = "\n".join((inspect.cleandoc(kind.__doc__ or ""), "", "Attributes:", *lines, ""))
    return kind


@_documented
@dataclass(frozen=True)
class Sampling:
    """The settings of a generation: how tokens are chosen, when a text ends, and what is returned.

    Logits receive ``logit_bias`` and the penalties, are divided by the temperature, and of the most likely
    tokens that remain one is sampled. ``top_p`` is that of Holtzman et al. (arXiv 1904.09751), ``min_p`` that
    of Nguyen et al. (arXiv 2407.01082), ``repetition_penalty`` that of Keskar et al. (arXiv 1909.05858). With
    0 ``tokens`` and ``prompt_logprobs``, prompts are only scored.

    Raises:
        ConfigError: a value out of range, or several samples that would all be the same.
    """

    temperature: float = _setting(
        0.0,
        "0 selects the most likely token; otherwise logits are divided by it",
        0,
        _MOST,
        "a number from 0",
    )
    top_k: int = _setting(0, "sample the k most likely tokens only; 0: all", 0, 2**31, "0 (all) or more")
    top_p: float = _setting(
        1.0,
        "sample the most likely tokens up to this sum of probabilities only",
        5e-324,
        1,
        "a number above 0, at most 1",
    )
    seed: int = _setting(
        1234,
        "seed of sampling: random numbers follow from it, the prompt and the number of the sample",
        0,
        2**63 - 1,
        "0 to 2^63 - 1",
    )
    min_p: float = _setting(
        0.0,
        "sample tokens with at least this part of the largest probability only",
        0,
        1,
        "a number from 0 to 1",
    )
    repetition_penalty: float = _setting(
        1.0,
        "logits of tokens in the prompt or the new text are divided by it if positive, else multiplied: "
        "above 1, tokens are repeated less",
        1e-6,
        1e6,
        "a number above 0",
    )
    presence_penalty: float = _setting(
        0.0, "subtracted from the logits of tokens in the new text", -2, 2, "a number from -2 to 2"
    )
    frequency_penalty: float = _setting(
        0.0,
        "subtracted from the logits of tokens in the new text, as often as they occur",
        -2,
        2,
        "a number from -2 to 2",
    )
    logit_bias: tuple[tuple[int, float], ...] = _setting(
        (), "by token id, a number that is added to its logit"
    )
    tokens: int = _setting(
        128,
        "new tokens at most",
        0,
        inf,
        "an integer of at least 1",
    )
    samples: int = _setting(1, "texts for each prompt", 1, inf, "an integer of at least 1")
    stop: tuple[str, ...] = _setting((), "texts before which the new text ends; also special tokens")
    logprobs: int | None = _setting(
        None,
        "return the log-probabilities of the new tokens, with those of so many of the most likely tokens "
        f"beside each, up to {MOST_LOGPROBS}",
        0,
        MOST_LOGPROBS,
        f"0 to {MOST_LOGPROBS}",
    )
    prompt_logprobs: int | None = _setting(
        None,
        "the same for the prompt's tokens but the first",
        0,
        MOST_LOGPROBS,
        f"0 to {MOST_LOGPROBS}",
    )
    schema: str | None = _setting(
        None, "a JSON schema that texts conform to (pip install 'hexad[constraints]')"
    )
    grammar: str | None = _setting(
        None, "another grammar that texts conform to, see hexad.generation.grammars"
    )
    min_tokens: int = _setting(0, "new tokens before which no text ends", -inf, inf, "0 to tokens")
    ignore_eos: bool = _setting(False, "continue after the tokens that end documents and answers")
    stop_token_ids: tuple[int, ...] = _setting((), "other tokens that end a text")
    skip_special_tokens: bool = _setting(True, "leave special tokens out of the text")
    routing: bool = _setting(
        False,
        "return the experts of all tokens but the last, which hexad.Microbatch can impose on training; the "
        "computation of the prompt is shared with no other text",
    )

    def __post_init__(self) -> None:
        for name, (kind, setting) in settings().items():
            _check(name, getattr(self, name), kind, setting)
        for token, bias in self.logit_bias:
            known = isinstance(token, int) and token >= 0 and isinstance(bias, int | float)
            if not known or not -_MOST_BIAS <= bias <= _MOST_BIAS:
                expected = f"ids with numbers from {-_MOST_BIAS} to {_MOST_BIAS}"
                raise ConfigError("logit_bias", f"found {token}: {bias}, expected {expected}")
        if not self.tokens and self.prompt_logprobs is None:
            expected = settings()["tokens"][1].expected
            raise ConfigError("tokens", f"found {self.tokens!r}, expected {expected}")
        if self.samples > 1 and self.temperature == 0:
            problem = "with ``temperature`` 0, where all are the same; set one above 0"
            raise ConfigError("samples", f"found {self.samples} {problem}")
        self._check_stop()
        if not 0 <= self.min_tokens <= self.tokens:
            problem = f"found {self.min_tokens!r}, expected 0 to tokens, {self.tokens}"
            raise ConfigError("min_tokens", problem)
        ids = self.stop_token_ids
        if len(ids) > _MOST_STOP_IDS or not all(type(token) is int and token >= 0 for token in ids):
            expected = f"expected at most {_MOST_STOP_IDS:,} ids"
            raise ConfigError("stop_token_ids", f"found {ids!r:.60}, {expected}")

    def _check_stop(self) -> None:
        """Check the texts before which a text ends."""
        if len(self.stop) > _MOST_STOPS or max(map(len, map(str, self.stop)), default=0) > _LONGEST_STOP:
            limits = f"{_MOST_STOPS} texts of {_LONGEST_STOP} characters"
            raise ConfigError("stop", f"found {len(self.stop)} texts, expected at most {limits}")
        if "" in self.stop:
            raise ConfigError("stop", "found an empty text; leave it out")
        for text in self.stop:
            try:
                text.encode()
            except (AttributeError, UnicodeEncodeError):
                raise ConfigError("stop", f"found {ascii(text)[:60]}, which is not Unicode text") from None

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before by more than the model."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties)


@cache
def settings() -> dict[str, tuple[Any, Setting]]:
    """The type and the declaration of every setting, by its name."""
    kinds = get_type_hints(Sampling)
    return {entry.name: (kinds[entry.name], entry.metadata["setting"]) for entry in fields(Sampling)}


CHOICE_SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
"""The settings by which tokens are chosen."""
UNRESTRICTED: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""The settings that restrict sampling, with the values that do not, which temperature 0 needs."""


def restricted_with_temperature(sampling: Sampling) -> Sampling:
    """The settings, after a check that restrictions of sampling have a temperature.

    Raises:
        ConfigError: one has none, and would have no effect.
    """
    if sampling.temperature == 0:
        for name, unrestricted in UNRESTRICTED.items():
            if (value := getattr(sampling, name)) != unrestricted:
                problem = f"found {value} with ``temperature`` 0, which takes the likeliest token; raise it"
                raise ConfigError(name, problem)
    return sampling


def _check(name: str, value: Any, kind: Any, setting: Setting) -> None:
    """Check the type of a value, and the range of a number."""
    expected = setting.expected
    if kind is bool:
        valid, expected = isinstance(value, bool), "true or false"
    elif kind in (int, float, int | None):
        number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
        valid = (number and setting.low <= value <= setting.high) or (value is None and kind == int | None)
    else:
        return
    if not valid:
        raise ConfigError(name, f"found {value!r:.60}, expected {expected}")
