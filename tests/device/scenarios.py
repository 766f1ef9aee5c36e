"""What the detectors watch: training in many layouts, and whatever else moves values on a device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hexad import Engine, HexadError, Mesh
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.directory import CheckpointDirectory
from hexad.comm import agreement
from hexad.compat.deepspeed.zero import GatheredParameters
from hexad.engine.counting import Counting, Counts
from hexad.topology import mesh
from hexad.topology.layout import Layout, Level, Tree

from ..compat.deepspeed import test_engine as deepspeed_engine
from ..compat.deepspeed import test_pipe as deepspeed_pipe
from ..compat.megatron import test_gpt as megatron_gpt
from ..compat.megatron import test_layers as megatron_layers
from ..generation import test_parity as generation
from ..parity import harness
from ..parity.context_cases import CONTEXT_GRID
from ..parity.expert_cases import CAPACITY, MIXTRAL
from ..parity.harness import DROPPED, VARIANTS, Case, deep
from ..parity.latent_cases import LATENT, LATENT_GRID
from ..parity.part_cases import PARTS_GRID
from .mutations import applied
from .races import simulated
from .recorder import Event


@dataclass(frozen=True)
class Seen:
    """What a rank did.

    Attributes:
        value: what the scenario returned.
        races: a line each.
        waits: places of the package that have waited for collectives.
        events: what was asked of its process groups, see :mod:`.recorder`.
    """

    value: Any
    races: list[str]
    waits: set[str]
    events: list[Event]


@dataclass(frozen=True)
class Scenario:
    """A function that every rank of a world calls."""

    world: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def watched(
    rank: int, world: int, store: str | None, scenario: Scenario, mutation: str | None = None
) -> Seen:
    """Run a scenario on this rank, watched; ``store`` as in :func:`.races.simulated`."""
    with simulated(rank, world, store) as (recording, races), applied(mutation, races):
        value = scenario.function(*scenario.arguments)
    return Seen(value, races.found, races.waits, recording.events)


def run(pool: Any, scenario: Scenario, mutation: str | None = None) -> list[Seen]:
    """Run a scenario on all its ranks."""
    return pool.apart(scenario.world, watched, pool.store(), scenario, mutation)


def dry_run(
    pool: Any,
    case: Case,
    of: int = 0,
    axes: tuple[str, ...] = ("pipeline", "context"),
    broken: Callable[[int], Any] | None = None,
) -> tuple[dict[int, list[Event]], Callable[[int], int]]:
    """Two steps in a world of any size, by some of its ranks: those along ``axes`` of rank ``of``. Others do
    the same, with their own groups. Only what the hosts agree on is exchanged.

    ``broken`` returns a patch of a rank's code. Returns what each has asked of its process groups, and which
    of them plays any rank.
    """
    layout = Layout.from_settings(case.config().parallel, case.world)
    ranks = layout.group(of, *axes)
    programs = pool.apart(len(ranks), _dry, pool.store(), case, ranks, broken)
    return dict(zip(ranks, programs)), lambda rank: ranks[layout.group(rank, *axes).index(rank)]


def _dry(
    place: int, places: int, store: str, case: Case, ranks: list[int], broken: Callable[[int], Any] | None
) -> list[Event]:
    limit = timedelta(seconds=60)
    levels: tuple[Level, ...] = ()
    if places > 1:  # the hosts of those that run
        group = dist.ProcessGroupGloo(dist.FileStore(store, places), place, places, limit)
        levels = (Level(tuple(range(places)), place, group),)
    tree = Tree(levels, 0, limit)
    with (
        nullcontext() if broken is None else broken(ranks[place]),
        # What broken code sends is not what the planner says.
        nullcontext() if broken is None else mock.patch.object(harness, "step_as_planned", Engine.train_step),
        mock.patch.object(mesh, "_make_tree", lambda *_: tree),
        mock.patch.object(agreement, "_gathered", agreement._gathered if levels else _own),
        mock.patch.object(agreement, "_spread", agreement._spread if levels else _own),
        # What ranks count together is not all there.
        mock.patch.object(Counting, "_agreement", lambda *_: 0),
        mock.patch.object(Counting, "_result", _some_targets),
        simulated(ranks[place], case.world, None) as (recording, races),
    ):
        harness.run_rank(case)
    assert broken is not None or races.found == []
    return recording.events


_COUNTED = Counting._result


def _some_targets(self: Counting, counting: Any, equal: bool) -> Counts:
    counts = _COUNTED(self, counting, equal)
    return counts._replace(targets=counts.targets or 1)


def _own(tree: Tree, value: Any, merge: Any = None) -> Any:
    return value


def train(case: Case) -> Scenario:
    """Steps of a case of the parity grid."""
    return Scenario(case.world, harness.run_rank, (case,))


def saved_and_resumed(case: Case, offload: bool) -> list[float]:
    """Train, save beside the next step, roll back, train, evaluate; returns losses."""
    config = case.config()
    memory = config.memory.model_copy(update={"offload": "optimizer" if offload else "none"})
    with tempfile.TemporaryDirectory() as directory:
        run = config.run.model_copy(update={"dir": directory})
        config = config.model_copy(update={"run": run, "memory": memory})
        layout = Layout.from_settings(config.parallel, case.world)
        here = Mesh.create(layout, torch.device("cpu"))
        engine, checkpointer = Engine(config, here), Checkpointer(config, here)

        def step() -> float:
            return engine.train_step(harness.microbatches(case, engine.step, here.data.rank)).loss

        losses = [step()]
        checkpointer.save(engine.chunks(), engine.progress())
        losses.append(step())
        checkpointer.wait()
        path = checkpointer.newest()
        assert path is not None
        manifest = checkpointer.load(path, engine.chunks())
        engine.restored(manifest.progress)
        assert step() == losses[-1]
        losses.append(engine.evaluate(harness.microbatches(case, 9, here.data.rank))[0])
        engine.check_replicas()
        checkpointer.close()
        return losses


def changed_after_saves(stage: int, bf16: bool) -> list[float]:
    """Saves in the background, each followed by a change of weights outside of updates, as scripts clip or
    replace them."""
    program = deepspeed_engine.deepspeed_engine(stage, bf16={"enabled": bf16})
    engine, layer = program._engine, program.module.last
    # As with hexad.training.saves.Saves; DeepSpeed's interface saves at once.
    checkpoint = engine.config.checkpoint.model_copy(update={"asynchronous": True})
    config = engine.config.model_copy(update={"checkpoint": checkpoint})
    with tempfile.TemporaryDirectory() as directory:
        checkpointer = Checkpointer(config, engine.mesh, CheckpointDirectory(directory))
        losses = []
        for step in range(3):
            losses += deepspeed_engine.steps(program, step, step + 1)
            checkpointer.save(engine.chunks(), engine.progress())
            if step == 1 and stage < 3:
                with torch.no_grad():
                    layer.weight.clamp_(-0.1, 0.1)
            with GatheredParameters(layer.parameters(), modifier_rank=0), torch.no_grad():
                layer.weight.fill_(0.1)
        checkpointer.close()
        return losses


def refused(case: Case) -> str:
    """One rank has a token id outside the vocabulary: all refuse the step; then a good one."""
    config = case.config()
    here = Mesh.create(Layout.from_settings(config.parallel, case.world), torch.device("cpu"))
    engine = Engine(config, here)
    good = harness.microbatches(case, 0, here.data.rank)
    bad = replace(good[0], tokens=good[0].tokens.clone().fill_(9999)) if here.rank == 1 else good[0]
    try:
        engine.train_step([bad, *good[1:]])
    except HexadError as error:
        engine.train_step(good)
        return str(error)
    return "accepted"


_LLAMA = deep(VARIANTS[0], 4)
_NARROW = {"dtype": "bf16", "reduce": "bf16"}
_FIVE = replace(DROPPED[0], micro=1)
SCENARIOS: dict[str, Scenario] = {
    "data 2, zero 1": train(Case(VARIANTS[2], data=2, zero=1)),
    "data 4, zero 1, 2 replicas": train(Case(deep(VARIANTS[1], 3), data=4, zero=1, replicas=2)),
    "data 2, zero 2, selective": train(Case(DROPPED[2], data=2, zero=2, recompute="selective")),
    "data 4, zero 3, 2 replicas, full": train(Case(_LLAMA, data=4, zero=3, replicas=2, recompute="full")),
    "tensor 2": train(Case(VARIANTS[5], tensor=2, sequence=False)),
    "tensor 2 + sequence, data 2, zero 3": train(Case(VARIANTS[0], 2, 2, zero=3)),
    "1f1b, tied, data 2, zero 1": train(Case(deep(VARIANTS[1], 3), 2, pipeline=2, zero=1)),
    "interleaved, 7 microbatches, tensor 2 + sequence": train(
        Case(_LLAMA, 1, 2, True, 2, "interleaved", 2, samples=14)
    ),
    "zb_h1, tensor 2 + sequence": train(Case(_LLAMA, 1, 2, True, 2, "zb_h1")),
    "zb_v, data 2, zero 2": train(Case(_LLAMA, 2, 1, True, 2, "zb_v", 2, zero=2)),
    "dualpipe_v, 3 microbatches, zero 3": train(
        Case(_FIVE, 2, 1, True, 2, "dualpipe_v", 2, zero=3, samples=6)
    ),
    "gpipe of 4, frozen stages": train(
        replace(harness.ADAPTED_GRID[3], pipeline=4, tensor=1, schedule="gpipe", virtual=1)
    ),
    "LoRA, zb_h1, tensor 2, zero 2": train(harness.ADAPTED_GRID[0]),
    "copied KV heads, tensor 4": train(harness.COPIED_GRID[0]),
    "experts, data 2, tensor 2, zero 3": train(Case(MIXTRAL, 2, 2, expert=2, zero=3, samples=6)),
    "experts, capacity, all_gather": train(
        Case(CAPACITY, 2, 2, expert=2, dispatcher="all_gather", samples=6)
    ),
    "latent attention, tensor 2 + sequence": train(LATENT_GRID[0]),
    "latent attention, LoRA, tensor 2": train(
        Case(harness.adapted(LATENT[1], "LoRA", rank=3, alpha=5.0), tensor=2, sequence=False)
    ),
    "recomputed parts, data 2, tensor 2 + sequence, zero 3": train(PARTS_GRID[0]),
    "recomputed parts, zb_h1, tensor 2 + sequence": train(PARTS_GRID[1]),
    "recomputed parts, ulysses": train(PARTS_GRID[2]),
    "context ring": train(next(case for case in CONTEXT_GRID if case.method == "ring")),
    "context all_gather": train(next(case for case in CONTEXT_GRID if case.method == "all_gather")),
    "context ulysses_ring": train(
        replace(next(case for case in CONTEXT_GRID if case.method == "ulysses_ring"), tensor=1)
    ),
    "bf16, zero 2, 2 replicas": train(
        Case(replace(VARIANTS[0], overrides={"precision": _NARROW}), data=4, zero=2, replicas=2)
    ),
    "wrong ids on one rank": Scenario(4, refused, (Case(_LLAMA, 2, pipeline=2, zero=2),)),
    "saved and resumed, zero 1": Scenario(2, saved_and_resumed, (Case(VARIANTS[0], data=2, zero=1), False)),
    "saved and resumed, offload, zero 2": Scenario(
        2, saved_and_resumed, (Case(VARIANTS[2], data=2, zero=2), True)
    ),
    "saved and resumed, pipeline, zero 3": Scenario(
        4, saved_and_resumed, (Case(deep(VARIANTS[1], 3), 2, pipeline=2, zero=3), False)
    ),
    "changed after saves, zero 1": Scenario(2, changed_after_saves, (1, False)),
    "changed after saves, bf16, zero 3": Scenario(2, changed_after_saves, (3, True)),
    "generation, pipeline 2, tensor 2": Scenario(
        4, generation.written_by, ("llama", generation.Degrees(tensor=2, pipeline=2))
    ),
    "generation, context 2": Scenario(2, generation.written_by, ("llama", generation.Degrees(context=2))),
    "generation, latent attention, context 2": Scenario(
        2, generation.written_by, ("deepseek_v3", generation.Degrees(context=2))
    ),
    "deepspeed, zero 3, gathered and changed": Scenario(2, deepspeed_engine.changed, (3,)),
    "deepspeed, zero 1, as scripts read": Scenario(2, deepspeed_engine.idioms, (1,)),
    "deepspeed, pipeline, zero 3": Scenario(4, deepspeed_pipe.train, (2, 3, {}, 3, (9, 5))),
    "megatron, zb_v": Scenario(
        2,
        megatron_gpt._train,
        (["--pipeline-model-parallel-size", "2"], ["parallel.schedule=zb_v", "parallel.virtual_stages=2"], 2),
    ),
    "megatron, layers in an engine": Scenario(2, megatron_layers._trained, (2, True, 0)),
}
