"""What a generator is asked and what it answers: sampling, requests, tokens. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hexad.config import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_LOGPROBS = 20
"""Most likely tokens that are reported beside the chosen one, at most."""

Ending = Literal["document", "stop", "length", "failed"]
"""What ends a text: a token that ends a document or an answer, a text to stop at, or the number of tokens; or
a failure, such as logits that are not finite, with which no text is completed."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: logits receive ``logit_bias`` and the penalties, are divided by the
    temperature, and of the most likely tokens that remain one is drawn.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: choose among the k most likely; 0 means all.
        top_p: choose among the fewest most likely whose probabilities reach this sum (Holtzman et al.,
            arXiv 1904.09751).
        seed: of the random numbers.
        min_p: choose among those with at least this part of the largest probability (Nguyen et al.,
            arXiv 2407.01082).
        repetition_penalty: logits of tokens in the prompt or in the text so far are divided by it if they are
            positive, else multiplied (Keskar et al., arXiv 1909.05858).
        presence_penalty: is subtracted from the logits of tokens in the text so far.
        frequency_penalty: is subtracted as often as they occur in it.
        logit_bias: pairs of a token's id and what is added to its logit.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, low, high, expected in _RANGES:
            value: Any = getattr(self, name)
            number = isinstance(value, int if name in ("top_k", "seed") else int | float)
            if isinstance(value, bool) or not number or not low <= value <= high:
                raise ConfigError(_option(name), f"found {value!r}, expected {expected}")
        for token, bias in self.logit_bias:
            known = isinstance(token, int) and token >= 0 and isinstance(bias, int | float)
            if not known or not -100 <= bias <= 100:
                raise ConfigError(
                    "--logit-bias", f"found {token}: {bias}, expected ids with numbers from -100 to 100"
                )

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before by more than the model."""
        penalties = self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty
        return any(penalties)


_MOST = 1.7e308
_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0, _MOST, "a number from 0"),
    ("top_k", 0, 2**31, "0 (all) or more"),
    ("top_p", 5e-324, 1, "a number above 0, at most 1"),
    ("seed", 0, 2**63 - 1, "0 to 2^63 - 1"),
    ("min_p", 0, 1, "a number from 0 to 1"),
    ("repetition_penalty", 1e-6, 1e6, "a number above 0"),
    ("presence_penalty", -2, 2, "a number from -2 to 2"),
    ("frequency_penalty", -2, 2, "a number from -2 to 2"),
)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def asked_sampling(sampling: Sampling) -> Sampling:
    """The sampling that a user asks for.

    Raises:
        ConfigError: a choice among likely tokens without a temperature.
    """
    if sampling.temperature == 0:
        for name, without in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
            if (value := getattr(sampling, name)) != without:
                problem = f"found {value} with temperature 0, which takes the likeliest token; raise it"
                raise ConfigError(_option(name), problem)
    return sampling


def streams(seed: int, samples: Sequence[int], prompt: Sequence[int]) -> list[int]:
    """The keys of samples' random numbers, which follow from the prompt's ids, not from other prompts."""
    text = " ".join(map(str, prompt)).encode()

    def key(sample: int) -> int:
        hashed = blake2b(f"{seed} {sample} ".encode(), digest_size=8)
        hashed.update(text)
        return int.from_bytes(hashed.digest(), "big") >> 1

    return [key(sample) for sample in samples]


def drawn(key: int, place: int) -> float:
    """The random number, from 0 to below 1, of a sample's token at a place among its new ones."""
    message = key.to_bytes(8, "big") + place.to_bytes(8, "big")
    return (int.from_bytes(blake2b(message, digest_size=8).digest(), "big") >> 11) * 2.0**-53


class Logprob(NamedTuple):
    """How likely a token was, before any of the settings of :class:`Sampling`.

    Attributes:
        token: its id.
        value: logarithm of its probability, in nats.
        top: the ids and the values of the most likely ones, as many as were asked for, in their order.
    """

    token: int
    value: float
    top: tuple[tuple[int, float], ...] = ()


class RoutedExperts(NamedTuple):
    """The experts that tokens have passed, all of a text and its prompt but the last token, which nothing was
    computed of: what :meth:`hexad.Microbatch.of_sequences` imposes on training.

    Attributes:
        experts: int32 ``[tokens, layers with experts, top_k]``, the likeliest first.
        weights: float32 (in fp64 float64), as large: what their outputs were multiplied by.
    """

    experts: NDArray[np.int32]
    weights: NDArray[Any]


@dataclass(frozen=True)
class Request:
    """One text to be written, or to be scored.

    Attributes:
        prompt: ids, at least one.
        tokens: new ids at most; 0 where the prompt is only scored.
        sampling: how they are chosen.
        sample: its number among the texts of the same prompt, which have other random numbers.
        ends: ids that end the text.
        stop: texts before which it ends.
        logprobs: the log-probability of each new token is wanted, with so many of the most likely ones
            beside it; None: not.
        prompt_logprobs: the same of the prompt's tokens but the first.
        grammar: that the text conforms to, see :mod:`hexad.generation.grammars`; None for any text.
        min_tokens: new ids before which neither ``ends`` nor ``stop`` end it.
        shown: special tokens that are part of the text.
        key: of its random numbers, see :func:`streams`; None: it is computed when the request is begun, which
            takes a while for a long prompt.
        routing: the experts of its tokens are wanted.
    """

    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling = Sampling()
    sample: int = 0
    ends: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    min_tokens: int = 0
    shown: frozenset[int] = frozenset()
    key: int | None = None
    routing: bool = False

    @property
    def longest(self) -> int:
        """Tokens that it may come to have in the cache, and positions: nothing follows the last one."""
        return len(self.prompt) + self.tokens - 1


@dataclass(frozen=True)
class Update:
    """What a request has brought since the update before.

    Attributes:
        number: of the request.
        text: its new text; of a failure, what the problem is.
        tokens: its new ids.
        logprobs: theirs, where they were asked for.
        prompt_logprobs: those of the prompt, where they were asked for; once.
        ended: what ended it; None before the end.
        cached: tokens of the prompt whose keys were at hand.
        routing: the experts of all tokens, where they were asked for; once, at the end.
    """

    number: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] | None = None
    ended: Ending | None = None
    cached: int = 0
    routing: RoutedExperts | None = None
