"""Generation and scoring over context ranks: what one process gives, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from hexad.config import Config
from hexad.generation import generator
from hexad.generation.generator import Sampling, generate_all
from hexad.generation.scoring import Likelihood, log_likelihoods
from hexad.model.transformer import Transformer, build_stages, factored_mesh, make_shard
from hexad.parallel.sharding import declared_parameters, initialise
from hexad.planning.checks import planned_layout
from hexad.planning.resolve import resolve
from hexad.topology.mesh import Mesh

from ..pool import Pool
from ..small import config_of

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 1},
    "gpt2": {"family": "gpt2", "max_positions": 64},
    "mistral": {"family": "mistral", "kv_heads": 2, "sliding_window": 5},
    "phi3": {"family": "phi3", "sliding_window": 3},
    "qwen3": {"family": "qwen3", "kv_heads": 2},
    "longrope": {
        "family": "llama",
        "head_dim": 8,
        "rope_scaling": {
            "type": "longrope",
            "original_positions": 2,
            "short_factors": [1, 1.2, 1.4, 2],
            "long_factors": [1.5, 2, 4, 8],
        },
    },
}
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6], [8, 9, 7], [9, 3]]
LENGTHS = [8, 3, 8, 5, 1]
SCORED = [([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 2), ([9, 2], 1), ([6, 5, 3, 5], 3), ([*PROMPTS[2], 7], 1)]
Result = tuple[list[list[list[int]]], list[Likelihood]]


@dataclass(frozen=True)
class Degrees:
    """A layout."""

    context: int
    method: str = "ring"
    ulysses: int | str = "auto"
    tensor: int = 1
    pipeline: int = 1

    @property
    def world(self) -> int:
        return self.context * self.tensor * self.pipeline


def computed(names: Sequence[str], layout: Degrees) -> dict[str, Result]:
    """For each model the new tokens of several batches of prompts, and likelihoods; on this rank."""
    mesh = Mesh.create(planned_layout(settings(names[0], layout), layout.world), torch.device("cpu"))
    return {name: _computed(settings(name, layout), mesh) for name in names}


def settings(name: str, layout: Degrees) -> Config:
    """The configuration of a small model in a layout."""
    degrees = {"tensor": layout.tensor, "context": layout.context, "pipeline": layout.pipeline}
    method = {"context_method": layout.method, "context_ulysses": layout.ulysses}
    return config_of(
        model={"heads": 4, "vocab": 50, "init_std": 0.5, **MODELS[name]},
        parallel={**degrees, **method, "sequence": False},
        data={"sequence": 12},
        batch={"micro": 1, "global": 1},
        precision={"dtype": "fp64"},
    )


def _computed(config: Config, mesh: Mesh) -> Result:
    resolved = resolve(config, mesh.layout)
    config = resolved.config
    mesh = factored_mesh(config.model, config.parallel, mesh)
    shard = make_shard(config.parallel, mesh, torch.float64)
    rank, layers = mesh.pipeline.rank, resolved.plan.layers
    stage = build_stages(config.model, shard, layers, range(len(layers)), rank)[rank].eval()
    initialise(declared_parameters(stage), 7)

    def written(prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        seeds = range(len(prompts))
        return generate_all(stage, prompts, 8, sampling, _ended, seeds, mesh.pipeline)

    texts = [written(PROMPTS, Sampling()), written(PROMPTS[1:2], Sampling())]
    texts.append(written(PROMPTS, Sampling(temperature=1.3, top_k=9)))
    first = texts[0][0]  # the most likely tokens
    changed = [[*first[:-1], (first[-1] + 1) % 50], [(first[0] + 1) % 50, *first[1:]]]
    continued = [([*PROMPTS[0], *ids], len(PROMPTS[0])) for ids in (first, *changed)]
    return texts, log_likelihoods(stage, [*SCORED, *continued], mesh.pipeline)


def _ended(number: int, ids: list[int]) -> bool:
    """Some prompts end before others."""
    return len(ids) == LENGTHS[number]


@cache
def alone(name: str) -> Result:
    """What one process gives."""
    result = computed([name], Degrees(1))[name]
    assert [part.greedy for part in result[1][-3:]] == [True, False, False]
    return result


def check(pool: Pool, names: Sequence[str], layout: Degrees) -> None:
    for rank, results in enumerate(pool.run(layout.world, computed, names, layout)):
        for name in names:
            texts, likelihoods = results[name]
            wanted, expected = alone(name)
            assert texts == wanted, (name, rank)
            for one, other in zip(likelihoods, expected, strict=True):
                assert one.log_probability == pytest.approx(other.log_probability, rel=1e-11), (name, rank)
                assert one.greedy == other.greedy


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Degrees(2), ["gpt2", "mistral", "qwen3", "longrope"]),
        (Degrees(4, "ulysses"), ["llama", "mistral"]),
        (Degrees(4, "ulysses_ring", 2), ["llama", "phi3"]),
        (Degrees(2, "all_gather", tensor=2), ["llama"]),
        (Degrees(2, "ring", pipeline=2), ["gpt2"]),
    ],
    ids=str,
)
def test_context_ranks_give_what_one_process_gives(layout: Degrees, names: list[str], pool: Pool) -> None:
    """Prompts of several lengths, one shorter than there are ranks, windows shorter than a rank's tokens and
    longer, fewer key/value heads than ranks."""
    check(pool, names, layout)


SIZES = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (3, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        *product(("ring", "ulysses_ring", "all_gather"), SIZES),
        *product(("ulysses",), SIZES[:-1]),  # three ranks cannot share four heads
    ],
    ids=str,
)
def test_every_method_in_every_layout(method: str, sizes: tuple[int, int, int], pool: Pool) -> None:
    context, tensor, pipeline = sizes
    check(pool, list(MODELS), Degrees(context, method, tensor=tensor, pipeline=pipeline))


def noisy() -> list[list[int]]:
    """What this rank writes where its logits are not those of the others."""
    config, original = settings("llama", Degrees(2)), generator.gathered_logits
    mesh = Mesh.create(planned_layout(config), torch.device("cpu"))
    noise = torch.Generator().manual_seed(mesh.rank)

    def changed(model: Transformer, hidden: torch.Tensor) -> torch.Tensor:
        logits = original(model, hidden)
        return logits + 20 * torch.rand(logits.shape, generator=noise)

    with mock.patch.object(generator, "gathered_logits", changed):
        return _computed(config, mesh)[0][0]


def test_ranks_that_round_differently_write_the_same(pool: Pool) -> None:
    first, second = pool.run(2, noisy)
    assert first == second != alone("llama")[0][0]
