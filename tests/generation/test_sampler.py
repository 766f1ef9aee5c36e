"""Choosing tokens: each setting against its definition, and what one request gets whatever the others are."""

import math
import random
from typing import Any

import pytest
import torch

from hexad.config import NOT_FINITE, ConfigError
from hexad.generation.requests import Request, RequestUpdate, drawn, streams
from hexad.generation.sampler import Sampler, log_probabilities
from hexad.generation.sampling import Sampling, restricted_with_temperature
from hexad.generation.sequence import Sequence

PROBABILITIES = (0.5, 0.3, 0.15, 0.05)
LOGITS = torch.tensor([PROBABILITIES]).double().log()


def sequence_of(sampler: Sampler, request: Request, number: int = 1) -> Sequence:
    """A sequence that is ready for a sampler."""
    sequence = Sequence(number, request)
    sampler.begin(sequence)
    return sequence


def counts(prompt: tuple[int, ...] = (9,), tokens: int = 4000, **settings: Any) -> list[float]:
    """How often each token is drawn from :data:`LOGITS`."""
    sampler = Sampler()
    sampling = Sampling(**{"temperature": 1.0, "tokens": tokens, **settings})
    sequence = sequence_of(sampler, Request(prompt, sampling))
    tokens_of = [sampler.choose(LOGITS, [sequence])[0].tokens[0] for _ in range(tokens)]
    return [tokens_of.count(token) / tokens for token in range(4)]


def normalised(*weights: float) -> Any:
    return pytest.approx([weight / sum(weights) for weight in weights], abs=0.03)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, [p**2 for p in PROBABILITIES]),
        ({"top_k": 2}, (0.5, 0.3, 0, 0)),
        ({"top_k": 4}, PROBABILITIES),
        ({"top_p": 0.7}, (0.5, 0.3, 0, 0)),  # 0.5 does not reach it, 0.5 + 0.3 does
        ({"top_p": 1e-9}, (1, 0, 0, 0)),
        ({"top_p": 0.96}, PROBABILITIES),
        ({"min_p": 0.25}, (0.5, 0.3, 0.15, 0)),
        ({"min_p": 1.0}, (1, 0, 0, 0)),
        ({"top_k": 3, "top_p": 0.8}, (0.5, 0.3, 0, 0)),
        ({"logit_bias": ((3, 100.0),)}, (0, 0, 0, 1)),
        ({"logit_bias": ((0, -100.0), (3, math.log(6)))}, (0, 0.3, 0.15, 0.3)),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probabilities(settings: dict[str, Any], expected: Any) -> None:
    assert counts(**settings) == normalised(*expected)


def test_penalties() -> None:
    """Of logits, each checked by the greedy choice among two that they change."""

    def first(logits: list[float], steps: int, prompt: tuple[int, ...] = (9,), **settings: Any) -> list[int]:
        sampler = Sampler()
        sequence = sequence_of(sampler, Request(prompt, Sampling(tokens=9, **settings)))
        row = torch.tensor([logits + [-99.0] * (10 - len(logits))])
        return [sampler.choose(row, [sequence])[0].tokens[0] for _ in range(steps)]

    assert first([1.0, 0.9], 4) == [0, 0, 0, 0]
    assert first([1.0, 0.9, 0.0], 4, presence_penalty=0.5) == [0, 1, 0, 0]  # 0.5 against 0.4 from then on
    assert first([1.0, 0.9, -9.0], 6, frequency_penalty=0.3) == [0, 1, 0, 1, 0, 1]
    assert first([1.0, 0.9], 4, repetition_penalty=1.2) == [0, 1, 0, 0]  # 0.83 against 0.75
    assert first([1.0, 0.9], 1, prompt=(0,), repetition_penalty=1.2) == [1]
    assert first([-1.0, -1.1], 1, prompt=(0,), repetition_penalty=1.2) == [1]  # negative ones are multiplied
    assert first([1.0, 0.9], 1, prompt=(0,), presence_penalty=0.5) == [0]  # counts new tokens only


def test_a_request_gets_the_same_whatever_the_others_are() -> None:
    chance = random.Random(3)
    vocab = 30
    requests = []
    for number in range(12):
        sampling = Sampling(
            temperature=chance.choice([0.0, 0.8, 1.7]),
            top_k=chance.choice([0, 5]),
            top_p=chance.choice([1.0, 0.6]),
            min_p=chance.choice([0.0, 0.2]),
            presence_penalty=chance.choice([0.0, 1.0]),
            logit_bias=((number, 1.5),),
            seed=number % 3,
            tokens=9,
            logprobs=chance.choice([None, 0, 4]),
        )
        requests.append(Request((number, 5), sampling))
    logits = torch.randn(20, 12, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = []
    for number, request in enumerate(requests):
        sampler = Sampler()
        sequence = sequence_of(sampler, request, number)
        alone.append([sampler.choose(step[number : number + 1], [sequence])[0] for step in logits])
    together, taken = Sampler(), [0] * 12
    sequences = [sequence_of(together, request, number) for number, request in enumerate(requests)]
    while min(taken) < 20:
        numbers = [n for n in range(12) if taken[n] < 20 and chance.random() < 0.7]
        if not numbers:
            continue
        rows = torch.stack([logits[taken[n], n] for n in numbers])
        updates = together.choose(rows, [sequences[number] for number in numbers])
        for number, update in zip(numbers, updates, strict=True):
            assert update == alone[number][taken[number]]
            taken[number] += 1


def test_random_numbers() -> None:
    """From 0 to below 1, evenly; those of prompts, samples and seeds are others."""
    values = [drawn(key, place) for key in range(100) for place in range(100)]
    assert 0 <= min(values) < 0.001 and 0.999 < max(values) < 1 and len(set(values)) == 10_000
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.01)
    keys = {key for s in (3, 4) for ids in ([1], [2], [1, 2], [12]) for key in streams(s, range(3), ids)}
    assert len(keys) == 24 and all(0 <= key < 2**63 for key in keys)
    assert streams(3, [1], [7, 8]) == streams(3, [1], (7, 8))


def test_the_last_token_can_be_drawn_and_no_other_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the product of the random number and the sum is rounded up."""
    monkeypatch.setattr("hexad.generation.sampler.drawn", lambda *_: 1 - 2.0**-53)
    assert counts(tokens=3) == [0, 0, 0, 1]
    assert counts(tokens=3, top_k=3) == [0, 0, 1, 0]
    monkeypatch.setattr("hexad.generation.sampler.drawn", lambda *_: 0.0)
    assert counts(tokens=3) == [1, 0, 0, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-38, 1e300])
def test_no_temperature_draws_what_is_not_there(temperature: float) -> None:
    """Also where some tokens are excluded."""
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 2.0]])
    sampler = Sampler()
    sequence = sequence_of(sampler, Request((1,), Sampling(temperature=temperature, tokens=99)))
    chosen = {sampler.choose(logits, [sequence])[0].tokens[0] for _ in range(99)}
    assert chosen == ({1} if temperature < 1 else {0, 1, 3})
    nothing = torch.full((1, 4), torch.nan)
    (failed,) = sampler.choose(nothing, [sequence])
    assert (failed.tokens, failed.ended, failed.text) == ((), "failed", NOT_FINITE)


def test_log_probabilities_are_those_of_the_model() -> None:
    """Whatever is drawn from the logits."""
    one, other = log_probabilities(LOGITS.repeat(2, 1), torch.tensor([2, 0]), [2, None])
    assert one.token == 2 and one.value == pytest.approx(math.log(0.15))
    assert [token for token, _ in one.top] == [0, 1] and one.top[1][1] == pytest.approx(math.log(0.3))
    assert other.value == pytest.approx(math.log(0.5)) and other.top == ()
    sampler = Sampler()
    biased = Request((1,), Sampling(tokens=3, logit_bias=((3, 50.0),), logprobs=9))
    (update,) = sampler.choose(LOGITS, [sequence_of(sampler, biased)])
    (logprob,) = update.logprobs
    assert update.tokens == (3,)
    assert logprob.value == pytest.approx(math.log(0.05)) and len(logprob.top) == 4


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"seed": -1}, "seed"),
        ({"logit_bias": ((-1, 0.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
    ],
)
def test_sampling_out_of_range(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: found "):
        Sampling(**options)


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_choices_without_a_temperature(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="with temperature 0, which takes the likeliest token"):
        restricted_with_temperature(Sampling(**options))


def test_no_text_ends_before_its_least_length() -> None:
    sampler = Sampler()
    request = Request((9,), Sampling(tokens=9, min_tokens=3), ends=frozenset({0, 7}))
    sequence = sequence_of(sampler, request)
    assert [sampler.choose(LOGITS, [sequence])[0].tokens[0] for _ in range(5)] == [1, 1, 1, 0, 0]


def test_a_grammar_that_cannot_go_on_ends_its_text_only() -> None:
    class Complex:
        def allowed(self, device: torch.device) -> None:
            return None

        def accept(self, token: int) -> None:
            raise AssertionError

    sampler = Sampler(lambda grammar: Complex())
    constrained = sequence_of(sampler, Request((9,), Sampling(tokens=9, grammar="{}")))
    free = sequence_of(sampler, Request((9,), Sampling(tokens=9)), 2)
    failed, other = sampler.choose(LOGITS.repeat(2, 1), [constrained, free])
    assert failed == RequestUpdate(1, "the grammar of the text is too complex", ended="failed")
    assert other == RequestUpdate(2, tokens=(0,))
