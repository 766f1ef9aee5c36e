"""A generator beside a training engine of another layout, in the same processes: it has the engine's weights
after every update, and in exact arithmetic the same log-probabilities, bit for bit."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hexad import Engine, Generator, HexadError
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.losses import Outputs
from hexad.parallel import resharding
from hexad.parallel.rectangle import Rectangle
from hexad.parallel.resharding import Resharding, minus
from hexad.planning.layouts import planned_layout
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..pool import Pool, RankError
from ..small import config_of
from .replicas import CPU
from .test_exact import MODELS, layout_of

Parallel = Mapping[str, Any]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17], [1, 2, 3, 4]]
NEW = 9


def engine_of(name: str, parallel: Parallel, dtype: str, made: list[Tensor], **model: Any) -> Engine:
    """An engine that trains likely tokens to be likelier, and keeps their log-probabilities."""
    layout = layout_of(parallel)
    config = config_of(
        model={**MODELS[name], "vocab": 257, **model},
        parallel=parallel,
        data={"sequence": 24},
        batch={"micro": 1, "global": 6},
        optimizer={"lr": 0.01},
        precision={"dtype": dtype, "exact": True},
        inference={"cache_tokens": 256, "block": 4},
    )

    def loss(outputs: Outputs, microbatch: Microbatch) -> Tensor:
        logprobs = outputs.log_probabilities()
        made.append(outputs.whole(logprobs.detach())[0])
        return -(logprobs * microbatch.extras["weight"].flatten()).sum()

    mesh = Mesh.create(planned_layout(config, layout.world), CPU)
    return Engine(config, mesh, loss=loss)


def microbatch_of(ids: list[int], prompt: int) -> Microbatch:
    """A sequence of 24 tokens, padded; tokens after the prompt weigh 1."""
    row = [*ids, *[0] * (25 - len(ids))]
    labels = torch.tensor([row[1:]])
    weight = torch.zeros(1, 24)
    weight[0, prompt - 1 : len(ids) - 1] = 1
    return Microbatch(torch.tensor([row[:-1]]), labels, extras={"weight": weight})


def trained_and_generated(
    name: str, parallel: Parallel, degrees: dict[str, int], dtype: str
) -> tuple[int, int, int]:
    """Over three updates: compare log-probabilities of all new tokens; returns how many were compared, how
    many differ, and how often the scores changed with the weights."""
    made: list[Tensor] = []
    engine = engine_of(name, parallel, dtype, made)
    compared = different = changed = 0
    with Generator(engine, **degrees) as generator:
        for turn in range(3):
            prompts = [{"prompt": prompt} for prompt in PROMPTS]
            texts = generator.generate(prompts, tokens=NEW, temperature=1.0, seed=turn, logprobs=0)
            sequences = [[*prompt, *text.tokens] for prompt, text in zip(PROMPTS, texts)]
            data = engine.mesh.data
            mine = range(data.rank, len(PROMPTS), data.size)
            engine.train_step([microbatch_of(sequences[n], len(PROMPTS[n])) for n in mine])
            assert len(made) == (len(mine) if engine.mesh.pipeline.rank == data_last(engine) else 0)
            for number, logprobs in zip(mine, made):
                begin = len(PROMPTS[number]) - 1
                new = logprobs[begin : begin + len(texts[number].tokens)].tolist()
                values = [logprob.value for logprob in texts[number].logprobs or ()]
                compared += len(new)
                different += sum(one != other for one, other in zip(new, values, strict=True))
            made.clear()
            before = generator.score(sequences)
            generator.update(engine)
            after = generator.score(sequences)
            changed += [one.prompt_logprobs for one in before] != [one.prompt_logprobs for one in after]
    return compared, different, changed


def data_last(engine: Engine) -> int:
    """The pipeline rank with the head."""
    return engine.plan.schedule.placement[-1]


PAIRS: list[tuple[str, Parallel, dict[str, int], str]] = [
    ("gpt2", {"data": 2, "zero": 3}, {"tensor": 2}, "bf16"),
    ("lora", {"pipeline": 2}, {"tensor": 2}, "fp32"),
]
MORE: list[tuple[str, Parallel, dict[str, int], str]] = [
    ("llama", {}, {}, "fp32"),
    ("llama", {"tensor": 2}, {"data": 2}, "bf16"),
    ("qwen3", {"context": 2, "zero": 1}, {"pipeline": 2}, "fp32"),
    ("granite", {"tensor": 2, "pipeline": 2}, {"context": 2, "tensor": 2}, "bf16"),
    ("mistral", {"tensor": 3, "data": 2, "zero": 2}, {"tensor": 2, "pipeline": 3}, "fp32"),
]


@pytest.mark.parametrize(
    ("name", "parallel", "degrees", "dtype"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)],
    ids=str,
)
def test_training_sees_the_log_probabilities_of_generation(
    name: str, parallel: Parallel, degrees: dict[str, int], dtype: str, pool: Pool
) -> None:
    results = pool.run(layout_of(parallel).world, trained_and_generated, name, parallel, degrees, dtype)
    assert sum(compared for compared, _, _ in results) >= 3 * len(PROMPTS) * NEW // 2
    assert {different for _, different, _ in results} == {0}
    assert {changed for _, _, changed in results} == {3}


def test_parts_of_rectangles() -> None:
    whole = Rectangle("w", (7, 9, 5), (1, 2, 0), (5, 6, 4))
    part = Rectangle("w", (7, 9, 5), (2, 4, 0), (2, 3, 3))
    seen = torch.zeros(7, 9, 5)
    seen[part.slices] += 1
    for rest in minus(whole, part):
        seen[rest.slices] += 1
    expected = torch.zeros(7, 9, 5)
    expected[whole.slices] = 1
    assert torch.equal(seen, expected)
    assert [*minus(part, part)] == []


def transferred(
    have: list[list[Rectangle]], need: list[list[Rectangle]], message: int = 1 << 24
) -> tuple[int, bool]:
    """What this rank receives, in messages of so many elements, and whether it then has the right values."""
    world = len(have)
    mesh = Mesh.create(Layout(data=world, world=world), CPU)
    true = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in SHAPES.items()
    }
    held = [(rectangle, true[rectangle.name][rectangle.slices].contiguous()) for rectangle in have[mesh.rank]]
    places = [(rectangle, torch.full(rectangle.sizes, torch.nan)) for rectangle in need[mesh.rank]]
    with mock.patch.object(resharding, "_MESSAGE", message):
        way = Resharding(have[mesh.rank], need[mesh.rank], mesh.world)
    for _ in range(2):
        way.run(held, places, torch.float32)
    right = all(torch.equal(values, true[rectangle.name][rectangle.slices]) for rectangle, values in places)
    return way.received, right


SHAPES = {"a": (7, 5), "b": (11,)}


def part(name: str, *bounds: tuple[int, int]) -> Rectangle:
    offset, sizes = tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)
    return Rectangle(name, SHAPES[name], offset, sizes)


def test_a_rank_receives_only_what_it_lacks(pool: Pool) -> None:
    rows = [[part("a", (0, 3), (0, 5)), part("b", (0, 11))], [part("a", (3, 7), (0, 5))], [part("b", (2, 9))]]
    columns = [
        [part("a", (0, 7), (0, 2))],
        [part("a", (0, 7), (2, 5)), part("b", (0, 11))],
        [part("a", (1, 6), (1, 4)), part("b", (1, 10))],
    ]
    for message in (1 << 24, 9, 4, 1):
        results = pool.run(3, transferred, rows, columns, message)
        assert results == [(4 * 2, True), (3 * 3 + 11, True), (5 * 3 + 2, True)]


def test_values_that_no_rank_has(pool: Pool) -> None:
    have = [[part("a", (0, 3), (0, 5))], [part("b", (0, 11))]]
    with pytest.raises(RankError, match="a: no rank has its elements from"):
        pool.run(2, transferred, have, [[part("a", (0, 4), (0, 5))], []])


def test_what_does_not_fit() -> None:
    engine = engine_of("llama", {}, "fp32", [])
    other = engine_of("qwen3", {}, "fp32", [])
    with (
        Generator(engine) as generator,
        pytest.raises(HexadError, match=r"model\.family: found 'llama', but the engine has 'qwen3'"),
    ):
        generator.update(other)
        for wrong in (None, Engine(torch.nn.Linear(2, 2), engine.mesh, config_of())):
            with pytest.raises(HexadError, match="expected an engine of a language model"):
                generator.update(wrong)  # type: ignore[arg-type]
        with pytest.raises(HexadError, match=r"sequences: found 5, expected lists of ids"):
            generator.score([5])  # type: ignore[list-item]
    with pytest.raises(HexadError, match=r"Generator: found 1, expected parallel\.tensor 2"):
        Generator(engine, tensor=2)
    with pytest.raises(HexadError, match="overrides"):
        Generator(engine, "precision.dtype=fp32")
    with pytest.raises(HexadError, match="engine of modules"):
        Generator(Engine(torch.nn.Linear(2, 2), engine.mesh, config_of()))
