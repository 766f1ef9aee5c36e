"""The experts of generated tokens: kept in every layout, and imposed on training."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hexad import Config, Engine, Generator, HexadError
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.losses import Outputs
from hexad.generation.requests import Request, RoutedExperts
from hexad.generation.sampling import Sampling
from hexad.model.replay import Chosen, Replay
from hexad.model.router import Router
from hexad.parallel.sharding import declared_parameters, initialise
from hexad.planning import resolve
from hexad.planning.layouts import planned_layout
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..layers import shard_of, whole_model
from ..pool import Pool, RankError
from ..small import config_of
from .replicas import CPU, Degrees, Result, Room, settings, stage_of, written
from .test_exact import layout_of
from .test_parity import ROOMS, in_order, requests_of

MIXTURES: dict[str, dict[str, Any]] = {
    "first dense": {
        "family": "llama",
        "layers": 5,
        "kv_heads": 2,
        "moe": {"experts": 6, "top_k": 3, "ffn_hidden": 14, "first_dense": 1, "every": 2},
    },
    "sigmoid": {
        "family": "llama",
        "layers": 3,
        "kv_heads": 2,
        "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 14, "score": "sigmoid", "capacity_factor": 0.5},
    },
}


def routed(model: nn.Module, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The experts and the weights of a text's tokens, of one layer after the other."""
    seen: list[tuple[Tensor, Tensor]] = []

    def see(_: nn.Module, __: Any, routing: Any) -> None:
        seen.append((routing.experts, routing.weights))

    hooks = [m.register_forward_hook(see) for m in model.modules() if isinstance(m, Router)]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return seen


def check_routing(name: str, layout: Degrees, room: Room, pool: Pool) -> dict[int, Result]:
    """Compare the experts of requests with those of plain forward passes of one process."""
    requests, arrivals = requests_of(8, 12, 20, 9)
    order, numbered = in_order(arrivals)
    asked = []
    for number in order:
        sampling = replace(requests[number - 1].sampling, routing=number % 4 > 0)
        asked.append(replace(requests[number - 1], sampling=sampling))
    model = MIXTURES[name]
    results, _ = pool.run(layout.world, written, model, layout, room, asked, numbered)[0]
    unlimited = {**model, "moe": {**model["moe"], "capacity_factor": None}}
    config = settings(unlimited, Degrees(), Room())
    whole = stage_of(config, Mesh.create(planned_layout(config, 1), CPU))
    for number, request in enumerate(asked, 1):
        routing, ids = results[number].routing, [*request.prompt, *results[number].tokens][:-1]
        if not request.sampling.routing:
            assert routing is None
            continue
        assert routing is not None and routing.experts.dtype == np.int32
        layers = len(config.model.expert_layers)
        assert routing.experts.shape == routing.weights.shape == (len(ids), layers, model["moe"]["top_k"])
        for layer, (experts, weights) in enumerate(routed(whole, ids) if ids else ()):
            assert (routing.experts[:, layer] == experts.numpy()).all(), (number, layer)
            np.testing.assert_allclose(routing.weights[:, layer], weights.numpy(), rtol=1e-9)
    return results


@pytest.mark.parametrize(
    ("name", "layout", "room"),
    [
        ("first dense", Degrees(), "preemption"),
        ("sigmoid", Degrees(tensor=2, context=2, expert=2), "small steps"),
        ("first dense", Degrees(context=3, pipeline=2, expert=3), "small steps"),
        ("sigmoid", Degrees(tensor=2, pipeline=3), "preemption"),
    ],
    ids=str,
)
def test_experts_are_those_of_a_plain_forward_pass(name: str, layout: Degrees, room: str, pool: Pool) -> None:
    check_routing(name, layout, ROOMS[room], pool)


def engine_of(name: str, parallel: Mapping[str, Any], made: list[Tensor], **more: Any) -> Engine:
    """An engine in float64 that keeps the log-probabilities of the targets."""
    config = config_of(
        model={**MIXTURES[name], "vocab": 257, "init_std": 0.5, "heads": 4},
        parallel={**parallel, "zero": 0},
        data={"sequence": 24},
        batch={"micro": 1, "global": 2},
        precision={"dtype": "fp64"},
        inference={"cache_tokens": 256, "block": 4},
        **more,
    )

    def loss(outputs: Outputs, microbatch: Microbatch) -> Tensor:
        logprobs = outputs.log_probabilities()
        made.append(outputs.whole(logprobs.detach()).flatten())
        return -logprobs.sum()

    mesh = Mesh.create(planned_layout(config, layout_of(parallel).world), CPU)
    return Engine(config, mesh, loss=loss)


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]


def trained_without_routers(
    name: str, parallel: Mapping[str, Any], degrees: dict[str, int]
) -> tuple[float, int]:
    """Generate, lose the routers, and train on what was generated with its experts and their weights; returns
    the largest difference of a log-probability, and how many were compared."""
    made: list[Tensor] = []
    engine = engine_of(name, parallel, made, memory={"recompute": "full"} if "pipeline" in parallel else {})
    data, multiple = engine.mesh.data, engine.config.parallel.token_multiple
    with Generator(engine, **degrees) as generator:
        asked = [{"prompt": prompt, "routing": True} for prompt in PROMPTS]
        texts = generator.generate(asked, tokens=9, temperature=1.0, logprobs=0)
        (scored,) = generator.score([PROMPTS[2]], routing=True)
    assert scored.routing is not None and len(scored.routing.experts) == len(PROMPTS[2]) - 1
    assert (scored.routing.experts == texts[2].routing.experts[: len(PROMPTS[2]) - 1]).all()
    for stage in engine.stages.values():
        for module in stage.modules():
            if isinstance(module, Router):
                module.weight.data.normal_(generator=torch.Generator().manual_seed(engine.mesh.rank))
    mine = range(data.rank, len(PROMPTS), data.size)
    batch = Microbatch.of_sequences(
        [[*PROMPTS[n], *texts[n].tokens] for n in mine],
        multiple,
        [len(PROMPTS[n]) for n in mine],
        experts=[texts[n].routing.experts for n in mine],
        expert_weights=[texts[n].routing.weights for n in mine],
    )
    engine.train_step([batch])
    wanted = [one.value for n in mine for one in texts[n].logprobs or ()]
    targets = (batch.labels.flatten() >= 0).nonzero().flatten()
    found = [made[0][targets].tolist()] if made else []
    differences = [abs(a / b - 1) for values in found for a, b in zip(values, wanted, strict=True)]
    return max(differences, default=0.0), len(differences)


@pytest.mark.parametrize(
    ("name", "parallel", "degrees"),
    [
        ("first dense", {"data": 2, "expert": 2}, {"tensor": 2}),
        ("sigmoid", {"tensor": 2, "context": 2, "expert": 2}, {"pipeline": 2}),
        ("first dense", {"pipeline": 2, "tensor": 2, "expert": 2, "sequence": False}, {}),
    ],
    ids=str,
)
def test_training_passes_the_experts_of_generation(
    name: str, parallel: Mapping[str, Any], degrees: dict[str, int], pool: Pool
) -> None:
    """Log-probabilities are those of generation, though nothing is left of the routers' weights."""
    results = pool.run(layout_of(parallel).world, trained_without_routers, name, parallel, degrees)
    assert max(difference for difference, _ in results) < 1e-9
    assert sum(compared for _, compared in results) >= len(PROMPTS) * 5


TOKENS = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(3))
MODEL = {**MIXTURES["first dense"], "vocab": 61, "init_std": 0.5, "heads": 4}


def other_experts(config: Config) -> Tensor:
    """Random ones, not those that routers would choose."""
    shape = (*TOKENS[:, 1:].shape, len(config.model.expert_layers), config.model.moe.experts)
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)).argsort(-1)[..., :3]


def test_routers_learn_from_imposed_experts() -> None:
    """The gradient of their weights is that of finite differences; with weights imposed that happen to be
    theirs, it is the same; and where the router is to choose, nothing changes."""
    config = resolve(config_of(model=MODEL), Layout(world=1)).config
    model = whole_model(config.model, shard_of())
    initialise(declared_parameters(model), 11)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    matrices = [router.weight for router in routers]
    own: dict[int, Chosen] = {}

    def loss(experts: Tensor | None, weights: Tensor | None = None) -> Tensor:
        replay = None if experts is None else Replay(config.model.expert_layers, experts, weights)
        return model.loss_sum(TOKENS[:, :-1], TOKENS[:, 1:], replay=replay)

    def gradients(*imposed: Tensor | None) -> list[Tensor]:
        return list(torch.autograd.grad(loss(*imposed), matrices))

    imposed = other_experts(config).flatten(0, 1)
    for matrix, gradient in zip(matrices, gradients(imposed)):
        direction = torch.randn(matrix.shape, dtype=matrix.dtype, generator=torch.Generator().manual_seed(2))
        values = []
        for step in (1e-5, -1e-5):
            matrix.data.add_(direction, alpha=step)
            values.append(loss(imposed).item())
            matrix.data.sub_(direction, alpha=step)
        assert (gradient * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)
    hooks = [
        router.register_forward_hook(
            lambda module, _, routing: own.update({module.layer: Chosen(routing.experts, routing.weights)})
        )
        for router in routers
    ]
    assert loss(imposed) != loss(None)
    plain = gradients(None)
    for hook in hooks:
        hook.remove()
    chosen, weights = (
        torch.stack([getattr(own[layer], name) for layer in sorted(own)], 1) for name in Chosen._fields
    )
    for same in ((torch.full_like(chosen, -1), None), (chosen, None), (chosen, weights.detach())):
        assert loss(*same) == loss(None)
        assert all(torch.equal(*pair) for pair in zip(gradients(*same), plain))
    twice = gradients(chosen, 2 * weights.detach())
    assert loss(chosen, 2 * weights.detach()) != loss(None)
    assert not any(torch.equal(*pair) for pair in zip(twice, plain))


def test_what_cannot_be_imposed() -> None:
    engine = engine_of("first dense", {}, [])
    tokens = TOKENS % 50
    batch = Microbatch(tokens[:, :-1], tokens[:, 1:])
    experts = other_experts(engine.config)

    def refused(message: str, **imposed: Tensor) -> None:
        for call in (lambda one: engine.train_step([one]), lambda one: engine.evaluate([one])):
            with pytest.raises(HexadError, match=message):
                call(replace(batch, **imposed))

    weights = torch.rand(experts.shape)
    refused(r"experts: found int64 of shape \(2, 12, 2, 2\), expected int64 of shape \(2, 12, 2, 3\)",
            experts=experts[..., :2])  # fmt: skip
    refused(r"experts: found int32 of shape", experts=experts.int())
    refused(r"expert_weights: found int64 of shape", experts=experts, expert_weights=experts)
    refused(r"expert_weights: found float32 of shape \(2, 12, 1, 3\)", experts=experts,
            expert_weights=weights[:, :, :1])  # fmt: skip
    refused(r"expert_weights: found float16 of shape", experts=experts, expert_weights=weights.half())
    refused(r"expert_weights: found a weight that is not finite", experts=experts,
            expert_weights=weights.where(weights < 0.5, torch.nan))  # fmt: skip
    refused(r"expert_weights: found weights without Microbatch.experts", expert_weights=weights)
    refused(r"found the expert 6, expected 0 to 5", experts=experts + (experts == 5))
    refused(r"found the expert -2, expected 0 to 5, or -1", experts=experts - 2 * (experts == 0))
    refused(r"found a token with an expert twice, or with -1", experts=experts.clamp(max=2))
    refused(r"found a token with an expert twice, or with -1", experts=experts - (experts == 0).long())
    engine.train_step([replace(batch, experts=experts)])
    dense = Engine(config_of(model={"vocab": 257}, batch={"global": 2, "micro": 2}), engine.mesh)
    with pytest.raises(HexadError, match=r"found experts, but the model has none \(model\.moe\)"):
        dense.train_step([replace(batch, experts=experts)])
    with (
        Generator(dense) as generator,
        pytest.raises(HexadError, match=r"routing: found true, but the model"),
    ):
        generator.generate([{"prompt": [1, 2]}], tokens=2, routing=True)
    with pytest.raises(
        HexadError, match=r"experts of sequence 2: found shape \(3, 2, 3\), expected an array \[2,"
    ):
        Microbatch.of_sequences([[1, 2], [3, 4, 5]], experts=[experts[0, :1], experts[0, :3]])
    with pytest.raises(HexadError, match=r"expert_weights: found 1 values for 2 sequences"):
        Microbatch.of_sequences([[1, 2], [3, 4, 5]], expert_weights=[experts[0, :1]])


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (None, "of sequence 1: found NoneType, expected an array [1, layers"),
        ("text", "of sequence 1: found str, expected an array [1, layers"),
        ([[[1, 2]], [[1]]], "of sequence 1: found list, expected an array [1, layers"),
        (RoutedExperts(np.zeros((1, 2, 3), np.int32), np.ones((1, 2, 3))), "found shape (2, 1, 2, 3), exp"),
        (np.ones((1, 2, 3)), "of sequence 1: found torch.float64, expected whole numbers"),
    ],
    ids=str,
)
def test_arrays_that_are_none(array: Any, problem: str) -> None:
    with pytest.raises(HexadError, match=re.escape(problem)):
        Microbatch.of_sequences([[1, 2], [3, 4]], experts=[array, np.zeros((1, 2, 3), np.int32)])


def test_arrays_of_other_sizes() -> None:
    for arrays, problem in (
        (3, "experts: found 3, expected an array of each sequence"),
        ([np.zeros((1, 2, 3), int), np.zeros((1, 2, 2), int)], "sequence 2: found (2, 2), but the first has"),
    ):
        with pytest.raises(HexadError, match=re.escape(problem)):
            Microbatch.of_sequences([[1, 2], [3, 4]], experts=arrays)  # type: ignore[arg-type]


def only_some_ranks(what: str) -> None:
    engine = engine_of("first dense", {"tensor": 2}, [])
    batch, experts = Microbatch(TOKENS[:, :-1] % 50, TOKENS[:, 1:] % 50), other_experts(engine.config)
    imposed = {"experts": experts, "expert_weights": torch.ones(experts.shape)}
    if engine.mesh.rank:
        del imposed[what]
    engine.train_step([replace(batch, **imposed)] if "experts" in imposed else [batch])


@pytest.mark.parametrize("what", ["experts", "expert_weights"])
def test_ranks_of_a_data_rank_impose_alike(what: str, pool: Pool) -> None:
    with pytest.raises(RankError, match="or experts on some ranks only"):
        pool.run(2, only_some_ranks, what)


def test_kept_experts_hold_no_others() -> None:
    """Arrays of a text are not views of those of a batch, which has the tokens of other texts."""
    engine = engine_of("first dense", {}, [])
    with Generator(engine) as generator:
        sequences = generator._replica._sequences
        generator._replica.add(1, Request((1, 2, 3), Sampling(tokens=9, routing=True)))
        generator._replica.add(2, Request(tuple(range(60)), Sampling(tokens=9)))
        while not (1 in sequences and len(sequences[1].routing) > 2):
            generator._replica.advance()
        for _, stages in sequences[1].routing:
            assert all(array.base is None for stage in stages for array in stage)
        generator._replica.cancel(1)
        generator._replica.cancel(2)
