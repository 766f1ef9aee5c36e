"""An engine as a user of the library holds it."""

import gc
import weakref

import pytest
import torch.distributed as dist

from hexad.config import Config, HexadError
from hexad.dataset.load.microbatch import Microbatch

from ..pool import Pool
from ..small import config_of, engine_of, microbatches


def batch(config: Config, count: int) -> list[Microbatch]:
    """So many microbatches, the same on every rank."""
    return microbatches(config, seed=1, samples=count * config.batch.micro)


def losses(given: int, schedule: str, configured: int) -> list[float]:
    """Losses of two steps of an engine with other numbers of microbatches than configured."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = config_of(
        model={"layers": 5},
        batch={"micro": 2, "global": 2 * configured},
        parallel={"pipeline": world, "schedule": schedule},
        precision={"dtype": "fp64"},
    )
    engine = engine_of(config)
    return [engine.train_step(batch(config, count)).loss for count in (given, 1)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "auto"])
@pytest.mark.parametrize("microbatches", [2, 6])
def test_a_step_may_have_another_number_of_microbatches(schedule: str, microbatches: int, pool: Pool) -> None:
    (alone,) = pool.run(1, losses, microbatches, "1f1b", 4)
    for of_rank in pool.run(2, losses, microbatches, schedule, 4):
        assert of_rank == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_engine_leaves_nothing_behind(zero: int) -> None:
    """Parameters, gradients and hooks refer to each other; buffers and process groups go with them."""
    config = config_of(model={"family": "gpt2"}, parallel={"schedule": "zb_h1", "zero": zero})
    engine = engine_of(config)
    engine.train_step(batch(config, 1))
    things = (engine.gradients, engine.gatherer, *engine.buckets, *engine.stages.values())
    left = [weakref.ref(thing) for thing in things]
    left += [weakref.ref(bucket.gradient) for bucket in engine.buckets]
    del engine, things
    gc.collect()
    assert [thing() for thing in left] == [None] * len(left)


def refusals(zero: int) -> list[str]:
    """What training and evaluation say where the ranks have different numbers of microbatches."""
    config = config_of(parallel={"zero": zero})
    engine = engine_of(config)
    messages = []
    for step in (engine.train_step, engine.evaluate):
        try:
            step(batch(config, 1 + engine.mesh.rank))
            messages.append("")
        except HexadError as error:
            messages.append(str(error))
    assert engine.train_step(batch(config, 2)).step == 1
    return messages


@pytest.mark.parametrize("zero", [0, 3])
def test_data_ranks_must_have_as_many_microbatches(zero: int, pool: Pool) -> None:
    """Or collectives would wait for each other for ever; evaluation has none of them but in stage 3."""
    for training, evaluation in pool.run(2, refusals, zero):
        assert "different numbers of microbatches" in training
        assert bool(evaluation) == (zero == 3)
