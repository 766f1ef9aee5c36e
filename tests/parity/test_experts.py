"""Mixtures of experts: what the parity grid does not show."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from hexad.config import Config
from hexad.engine.engine import Engine
from hexad.engine.faults import StepResult
from hexad.parallel.expert.grouped import add_gradients
from hexad.parallel.sharding import declared_parameters, initialise
from hexad.planning import resolve
from hexad.planning.memory import predict, rank_buckets, rank_parameters, rank_stages
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..layers import shard_of, whole_model
from ..pool import Pool
from .expert_cases import MIXTRAL
from .harness import Case, adapted, assemble, microbatches, run_rank


@dataclass
class Recorder:
    """In place of an :class:`~hexad.model.auxiliary.Auxiliary`: keeps the losses, for plain autograd."""

    losses: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def attach(
        self,
        x: torch.Tensor,
        losses: Mapping[str, torch.Tensor],
        layer: int,
        counts: torch.Tensor,
        repeated: bool,
    ) -> torch.Tensor:
        for name, loss in losses.items():
            self.losses.setdefault(name, []).append(loss)
        return x


def test_one_process_has_the_gradients_of_one_explicit_loss() -> None:
    """Token losses over all targets, plus the mean over microbatches of the layers' losses."""
    case = Case(replace(MIXTRAL, overrides={"optimizer": {"clip": 0.0}}), steps=1)
    (token_loss, *auxiliary), _, gradients, _ = run_rank(case)
    config, batches, recorder = case.config(), microbatches(case, 0, 0), Recorder()
    model = whole_model(resolve(config, Layout(world=1)).config.model, shard_of())
    parameters = declared_parameters(model)
    initialise(parameters, config.run.seed)
    targets = sum(batch.targets() for batch in batches)
    sums = [
        model.loss_sum(batch.tokens, batch.labels, scale=1 / targets, auxiliary=recorder)  # type: ignore[arg-type]
        for batch in batches
    ]
    tokens = torch.stack(sums).sum() / targets
    added = [torch.stack(recorder.losses[name]).sum() / len(batches) for name in ("balance", "z")]
    assert len(recorder.losses["z"]) == len(batches) * config.model.layers
    assert token_loss == pytest.approx(tokens.item(), rel=1e-12)
    assert auxiliary == pytest.approx([loss.item() for loss in added], rel=1e-12)
    wanted = torch.autograd.grad(tokens + sum(added), [parameter.parameter for parameter in parameters])
    accumulated = assemble([gradients])
    for declared, gradient in zip(parameters, wanted):
        for start, rectangle, _ in declared.pieces:
            values = torch.from_numpy(accumulated[rectangle.name])
            expected = gradient.narrow(0, start, rectangle.sizes[0])
            torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-13, msg=rectangle.name)


def test_fp16_gives_auxiliary_losses_the_weight_they_have_in_float64() -> None:
    """The loss scale, and fp16's divisor in place of all targets, apply to both kinds of losses; most of the
    norm is the auxiliary loss's."""
    precision = {"dtype": "fp16", "loss_scale": 64}
    half = replace(MIXTRAL, overrides={"precision": precision})
    losses, norms, *_ = run_rank(Case(half, steps=1))
    wanted_losses, wanted_norms, *_ = run_rank(Case(MIXTRAL, steps=1))
    assert losses == pytest.approx(wanted_losses, rel=2**-8)
    assert norms == pytest.approx(wanted_norms, rel=2**-7)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_on_several_ranks_are_close_to_one_process(dtype: str, pool: Pool) -> None:
    case = Case(replace(MIXTRAL, overrides={"precision": {"dtype": dtype}}), samples=6)
    wanted, divided = run_rank(case), replace(case, data=2, tensor=2, expert=2, expert_tensor=2, zero=2)
    losses, norms, *_ = pool.run(divided.world, run_rank, divided)[0]
    assert losses == pytest.approx(wanted[0], rel=2**-8)
    assert norms == pytest.approx(wanted[1], rel=2**-6)


def test_evaluation_has_no_auxiliary_losses() -> None:
    case = Case(MIXTRAL, steps=1)
    (token_loss, *_), *_ = run_rank(case)
    mesh = Mesh.create(Layout(world=1), torch.device("cpu"))
    total, targets = Engine(case.config(), mesh).evaluate(microbatches(case, 0, 0))
    assert total / targets == pytest.approx(token_loss, rel=1e-12)


@pytest.mark.parametrize(
    ("train", "recompute"),
    [
        pytest.param([train], recompute, marks=pytest.mark.slow if (row + column) % 2 else ())
        for row, train in enumerate(("head", "layers.2", "experts.gate_up", "layers.1.*.router"))
        for column, recompute in enumerate(("none", "selective", "full"))
    ],
)
def test_layers_below_all_that_is_trained_are_counted_once(train: list[str], recompute: str) -> None:
    """They have no backward pass: their losses and loads are those of a step that trains everything."""
    case = Case(MIXTRAL, steps=1, recompute=recompute)

    def step(case: Case) -> StepResult:
        engine = Engine(case.config(), Mesh.create(Layout(world=1), torch.device("cpu")))
        return engine.train_step(microbatches(case, 0, 0))

    wanted, found = step(case), step(replace(case, variant=adapted(MIXTRAL, "frozen", train)))
    assert found.auxiliary == pytest.approx(wanted.auxiliary, rel=1e-12)
    assert {layer: load.tokens for layer, load in found.experts.items()} == {
        layer: load.tokens for layer, load in wanted.experts.items()
    }
    assert all(sum(load.tokens) for load in found.experts.values())


def test_a_capacity_beyond_all_tokens_drops_nothing() -> None:
    plain = Case(MIXTRAL, steps=1)
    moe = {**MIXTRAL.model["moe"], "capacity_factor": 1e300}
    large = Case(replace(MIXTRAL, model={**MIXTRAL.model, "moe": moe}), steps=1)
    assert run_rank(large)[0] == run_rank(plain)[0]


def planned(config: Config, world: int) -> tuple[list[Any], list[Any], int, int]:
    """(buckets of the memory plan, of the engine, bytes of optimizer state in the plan, in the engine)."""
    layout = Layout.from_settings(config.parallel, world)
    mesh = Mesh.create(layout, torch.device("cpu"))
    engine, resolved = Engine(config, mesh), resolve(config, layout)
    plan = predict(resolved, mesh.rank)
    held = rank_parameters(rank_stages(resolved, mesh.pipeline.rank), layout)
    buckets = rank_buckets(resolved.config, layout, held)
    tensors = [tensor for bucket in engine.trained for _, tensor in engine.optimizer.rule.state(bucket)]
    state = sum(tensor.nbytes for tensor in tensors)
    return buckets, [bucket.plan for bucket in engine.buckets], plan.optimizer, state


BOTH_GRIDS = (
    Case(MIXTRAL, data=2, expert=2, zero=1),
    Case(MIXTRAL, data=4, expert=2, zero=2, replicas=2),
    Case(MIXTRAL, data=2, expert=2, pipeline=2, schedule="zb_h1", zero=3),
)


@pytest.mark.parametrize("case", BOTH_GRIDS, ids=lambda case: case.layout)
def test_the_memory_plan_has_the_buckets_of_both_grids(case: Case, pool: Pool) -> None:
    for buckets, real, optimizer, state in pool.run(case.world, planned, case.config(), case.world):
        assert buckets == real
        assert optimizer == state
        shards = {bucket.traits.grid: bucket.shards for bucket in buckets}
        assert shards["dense"] == 2 and shards["expert"] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fresh", [True, False])
def test_products_of_uneven_sizes(dtype: torch.dtype, fresh: bool) -> None:
    """Against one product per matrix; a matrix that has multiplied nothing gets zeros."""
    generator = torch.Generator().manual_seed(7)
    rows, out, width = [3, 0, 5, 1], 7, 4
    gradient = torch.randn((sum(rows), out), generator=generator).to(dtype)
    inputs = torch.randn((sum(rows), width), generator=generator).to(dtype)
    wide = max(dtype, torch.float32, key=lambda kind: kind.itemsize)
    total = torch.randn((len(rows), out, width), generator=generator).to(wide)
    parts = zip(gradient.split(rows), inputs.split(rows))
    products = torch.stack([left.to(wide).t() @ right.to(wide) for left, right in parts])
    expected = products if fresh else total + products
    add_gradients(total, gradient, inputs, fresh, torch.tensor(rows).cumsum(0).int())
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
