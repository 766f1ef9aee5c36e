"""Requests to a generator, and the updates that it returns. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .sampling import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Ending = Literal["document", "stop", "length", "failed"]
"""The cause of a text's end: a token that ends a document or an answer, a text to stop at, or the number of
tokens; or a failure, such as logits that are not finite, with which no text is completed."""


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
    """The log-probability of a token in the model's distribution, before any setting of
    :class:`~hexad.generation.sampling.Sampling`.

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
    """One text to generate, or one prompt to score.

    Attributes:
        prompt: its ids, at least one.
        sampling: its settings; of its grammar and schema, the grammar alone counts.
        sample: its number among the texts of the same prompt, which have other random numbers.
        ends: ids that end the text.
        shown: special tokens that are part of the text.
        key: the key of its random numbers, see :func:`streams`; None: computed when the request begins, which
            takes a while for a long prompt.
    """

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    sample: int = 0
    ends: frozenset[int] = frozenset()
    shown: frozenset[int] = frozenset()
    key: int | None = None

    @property
    def longest(self) -> int:
        """Tokens that it may come to have in the cache, and positions: nothing follows the last one."""
        return len(self.prompt) + self.sampling.tokens - 1


@dataclass(slots=True)
class RequestUpdate:
    """The results of a request since its last update.

    The rank that chooses tokens makes it, of one batch: ``prompt_logprobs`` and ``routing`` are those of the
    batch's tokens. The leader of the replica adds the text, what ended it, and these when they are complete.

    Attributes:
        number: of the request.
        text: its new text; of a failure, what the problem is.
        tokens: its new ids.
        logprobs: of the new ids, where they are returned.
        prompt_logprobs: of the prompt, where they are returned; once.
        ended: what ended it; None before the end.
        cached: tokens of the prompt whose keys were in the cache.
        routing: the experts of all tokens, where they are returned; once, at the end.
    """

    number: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] | None = None
    ended: Ending | None = None
    cached: int = 0
    routing: RoutedExperts | None = None
