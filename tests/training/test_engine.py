"""An engine as a user of the library holds it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from hexad.config import HexadError
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.engine import Engine
from hexad.model.configuration import build_config
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..pool import Pool

CPU = torch.device("cpu")
_MICRO, _SEQUENCE = 2, 6


def batch(microbatches: int) -> list[Microbatch]:
    tokens = torch.randint(
        31, (microbatches, _MICRO, _SEQUENCE + 1), generator=torch.Generator().manual_seed(1)
    )
    return [Microbatch(token[:, :-1].contiguous(), token[:, 1:].contiguous()) for token in tokens]


def losses(microbatches: int, schedule: str, configured: int) -> list[float]:
    """Losses of two steps of an engine with other numbers of microbatches than configured."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = build_config(
        {
            "model": {"layers": 5, "hidden": 16, "heads": 2, "ffn_hidden": 24, "vocab": 40},
            "data": {"sequence": _SEQUENCE},
            "batch": {"micro": _MICRO, "global": _MICRO * configured},
            "parallel": {"pipeline": world, "schedule": schedule},
            "precision": {"dtype": "fp64"},
        }
    )
    engine = Engine(config, Mesh.create(Layout.from_settings(config.parallel, world), CPU))
    return [engine.train_step(batch(count)).loss for count in (microbatches, 1)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "auto"])
@pytest.mark.parametrize("microbatches", [2, 6])
def test_a_step_may_have_another_number_of_microbatches(schedule: str, microbatches: int, pool: Pool) -> None:
    (alone,) = pool.run(1, losses, microbatches, "1f1b", 4)
    for found in pool.run(2, losses, microbatches, schedule, 4):
        assert found == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_engine_leaves_nothing_behind(zero: int) -> None:
    """Parameters, gradients and hooks refer to each other; buffers and process groups go with them."""
    config = build_config(
        {
            "model": {
                "family": "gpt2",
                "layers": 2,
                "hidden": 16,
                "heads": 2,
                "ffn_hidden": 24,
                "vocab": 40,
            },
            "data": {"sequence": _SEQUENCE},
            "batch": {"micro": _MICRO, "global": _MICRO},
            "parallel": {"schedule": "zb_h1", "zero": zero},
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), CPU))
    engine.train_step(batch(1))
    things = (engine.gradients, engine.gatherer, *engine.buckets, *engine.stages.values())
    left = [weakref.ref(thing) for thing in things]
    left += [weakref.ref(bucket.gradient) for bucket in engine.buckets]
    del engine, things
    gc.collect()
    assert [thing() for thing in left] == [None] * len(left)


def refusals(zero: int) -> list[str]:
    """What training and evaluation say where the ranks have different numbers of microbatches."""
    config = build_config(
        {
            "model": {"layers": 2, "hidden": 16, "heads": 2, "ffn_hidden": 24, "vocab": 40},
            "data": {"sequence": _SEQUENCE},
            "batch": {"micro": _MICRO, "global": 2 * _MICRO},
            "parallel": {"zero": zero},
        }
    )
    engine = Engine(config, Mesh.create(Layout.from_settings(config.parallel, 2), CPU))
    found = []
    for step in (engine.train_step, engine.evaluate):
        try:
            step(batch(1 + engine.mesh.rank))
            found.append("")
        except HexadError as error:
            found.append(str(error))
    assert engine.train_step(batch(2)).step == 1
    return found


@pytest.mark.parametrize("zero", [0, 3])
def test_data_ranks_must_have_as_many_microbatches(zero: int, pool: Pool) -> None:
    """Or collectives would wait for each other for ever; evaluation has none of them but in stage 3."""
    for training, evaluation in pool.run(2, refusals, zero):
        assert "different numbers of microbatches" in training
        assert bool(evaluation) == (zero == 3)
