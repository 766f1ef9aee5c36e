"""Tokens and log-probabilities of the generator, in every layout, with every cache and whatever else is
computed, against plain forward passes of one process over each text, in float64."""

import random
from collections import abc
from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from hexad.generation.requests import Request
from hexad.generation.sampler import Sampler
from hexad.generation.sampling import Sampling
from hexad.generation.sequence import Sequence
from hexad.model.transformer import Transformer
from hexad.planning.layouts import planned_layout
from hexad.topology.mesh import Mesh

from ..pool import Pool
from .replicas import CPU, MODELS, Degrees, Result, Room, settings, stage_of, written

ROOMS = {
    "wide": Room(),
    "small steps": Room(batch_tokens=7, block=3),
    "preemption": Room(tokens=56, block=3, batch_tokens=16),
    "few sequences": Room(block=5, sequences=3),
}
LAYOUTS = [
    Degrees(),
    Degrees(tensor=2),
    Degrees(tensor=4),
    Degrees(pipeline=2),
    Degrees(context=2),
    Degrees(context=3),
    Degrees(tensor=2, pipeline=2),
    Degrees(context=2, pipeline=2),
    Degrees(tensor=2, context=2),
    Degrees(tensor=2, context=2, pipeline=2),
]


def requests_of(seed: int, count: int, longest: int, new: int) -> tuple[list[Request], dict[int, list[int]]]:
    """Requests with prompts of random lengths, some of which begin alike, and when they arrive."""
    chance = random.Random(seed)
    shared = [chance.randrange(50) for _ in range(longest)]
    requests = []
    for number in range(count):
        length = chance.choice([1, 2, chance.randint(1, longest)])
        prompt = shared[:length] if chance.random() < 0.4 else [chance.randrange(50) for _ in range(length)]
        values: dict[str, Any] = {
            "temperature": chance.choice([0.0, 0.7, 1.3]),
            "seed": number,
            "repetition_penalty": chance.choice([1.0, 1.2]),
        }
        if values["temperature"]:
            values |= chance.choice([{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}])
        scored = chance.choice([None, None, 0, 2])
        tokens = 0 if scored is not None and chance.random() < 0.3 else chance.randint(1, new)
        ends = frozenset(chance.sample(range(50), 2))
        logprobs = chance.choice([None, 0, 3])
        sampling = Sampling(**values, tokens=tokens, logprobs=logprobs, prompt_logprobs=scored)
        requests.append(Request(tuple(prompt), sampling, ends=ends))
    arrivals: dict[int, list[int]] = {}
    for number in range(1, count + 1):
        arrivals.setdefault(chance.randrange(count), []).append(number)
    return requests, {turn: sorted(numbers) for turn, numbers in arrivals.items()}


def in_order(arrivals: Mapping[int, abc.Sequence[int]]) -> tuple[list[int], dict[int, list[int]]]:
    """The requests by arrival, and the same arrivals with numbers in this order."""
    order = [number for turn in sorted(arrivals) for number in arrivals[turn]]
    places = {number: place for place, number in enumerate(order, 1)}
    return order, {turn: [places[number] for number in numbers] for turn, numbers in arrivals.items()}


@cache
def alone(name: str, seed: int, count: int, longest: int, new: int) -> list[Result]:
    """What each request brings by itself: a forward pass over all tokens for each new one."""
    config = settings(name, Degrees(), Room())
    model = stage_of(config, Mesh.create(planned_layout(config, 1), CPU))
    results = []
    for number, request in enumerate(requests_of(seed, count, longest, new)[0]):
        sampler, ids, result = Sampler(), list(request.prompt), Result()
        sequence = Sequence(number, request)
        sampler.begin(sequence)
        with torch.no_grad():
            while len(result.tokens) < request.sampling.tokens:
                logits = model.logits(model(torch.tensor([ids])))[-1:, : model.vocab]
                (update,) = sampler.choose(logits, [sequence])
                (token,) = update.tokens
                ids.append(token)
                result.tokens.append(token)
                result.logprobs += update.logprobs
                if token in request.ends:
                    break
            if request.sampling.prompt_logprobs is not None:
                result.values = _scores(model, request)
        results.append(result)
    return results


def _scores(model: Transformer, request: Request) -> list[float]:
    """The log-probabilities of a prompt's tokens but the first; nothing follows the last if it is only
    scored."""
    targets = torch.tensor(request.prompt[1:])
    inputs = request.prompt if request.sampling.tokens else request.prompt[:-1]
    if not len(targets):
        return []
    logits = model.logits(model(torch.tensor([inputs])))[: len(targets), :50]
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1).tolist()


def written_by(name: str, layout: Degrees) -> object:
    """What a few requests bring on this rank."""
    requests, arrivals = requests_of(2, 8, 12, 6)
    order, numbered = in_order(arrivals)
    return written(name, layout, ROOMS["small steps"], [requests[n - 1] for n in order], numbered)


def check(pool: Pool, name: str, layout: Degrees, room: Room, size: tuple[int, int, int, int]) -> int:
    """Compare the requests of a size; returns how often a sequence was preempted."""
    requests, arrivals = requests_of(*size)
    order, numbered = in_order(arrivals)
    arguments = name, layout, room, [requests[number - 1] for number in order], numbered
    leader = pool.run(layout.world, written, *arguments)[0]
    results, preemptions = leader
    for place, number in enumerate(order, 1):
        result, expected, request = results[place], alone(name, *size)[number - 1], requests[number - 1]
        assert result.tokens == expected.tokens, (number, request)
        assert result.ended == (
            "document" if result.tokens and result.tokens[-1] in request.ends else "length"
        )
        values = [logprob.value for logprob in result.logprobs]
        assert values == pytest.approx([logprob.value for logprob in expected.logprobs], rel=1e-9)
        tops = [[token for token, _ in logprob.top] for logprob in result.logprobs]
        assert tops == [[token for token, _ in logprob.top] for logprob in expected.logprobs]
        if request.sampling.prompt_logprobs is not None:
            assert [logprob.token for logprob in result.scores] == list(request.prompt[1:])
            scores = [logprob.value for logprob in result.scores]
            assert scores == pytest.approx(expected.values, rel=1e-9)
            assert all(len(logprob.top) == request.sampling.prompt_logprobs for logprob in result.scores)
    return preemptions


@pytest.mark.parametrize(
    ("name", "layout", "room"),
    [
        ("llama", Degrees(), "wide"),
        ("gpt2", Degrees(), "preemption"),
        ("mistral", Degrees(), "small steps"),
        ("longrope", Degrees(), "preemption"),
        ("qwen3", Degrees(tensor=2), "small steps"),
        ("llama", Degrees(pipeline=2), "preemption"),
        ("mistral", Degrees(context=2), "small steps"),
        ("longrope", Degrees(context=3), "small steps"),
        ("llama", Degrees(tensor=2, context=2, pipeline=2), "preemption"),
        ("experts", Degrees(tensor=2, expert=2), "small steps"),
        ("experts", Degrees(context=3, expert=3), "preemption"),
    ],
    ids=str,
)
def test_requests_bring_what_each_brings_alone(name: str, layout: Degrees, room: str, pool: Pool) -> None:
    preemptions = check(pool, name, layout, ROOMS[room], (5, 24, 30, 20))
    assert (preemptions > 0) == (room == "preemption" or name == "longrope")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "room"), [*product(MODELS, ROOMS)], ids=str)
def test_every_model_in_every_layout(name: str, room: str, pool: Pool) -> None:
    for seed, layout in enumerate(LAYOUTS):
        check(pool, name, layout, ROOMS[room], (seed, 30, 33, 17))


LONG = Room(tokens=2112, block=4, batch_tokens=512, sequences=48)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_hundred_requests_of_up_to_two_thousand_tokens(layout: Degrees, pool: Pool) -> None:
    """At random times, in a cache of little more than the longest."""
    check(pool, "llama", layout, LONG, (11, 200, 2000, 40))


def test_prompts_that_begin_alike_are_computed_once(pool: Pool) -> None:
    """Blocks of a sequence that has ended, too, and those of one that still runs."""
    prompt = tuple(range(30))
    first = Request(prompt, Sampling(tokens=20))
    others = [Request(ids, Sampling(tokens=5)) for ids in ((*prompt[:25], 40, 41), prompt, (*prompt[:3], 9))]
    arrivals = {0: [1], 3: [2, 3, 4]}
    results, _ = pool.run(1, written, "llama", Degrees(), Room(block=4), [first, *others], arrivals)[0]
    assert [results[number].cached for number in (1, 2, 3, 4)] == [0, 24, 28, 0]
    again = [first, replaced(first, 12)]
    results, _ = pool.run(1, written, "llama", Degrees(), Room(block=4), again, {0: [1], 60: [2]})[0]
    assert results[2].cached == 28 and results[2].tokens == results[1].tokens[:12]


def replaced(request: Request, tokens: int) -> Request:
    return Request(request.prompt, Sampling(tokens=tokens))
