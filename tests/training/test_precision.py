"""fp16, bf16 and fp32: loss scaling, skipped steps, and how near the layouts stay to one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hexad.config import Config, ConfigError
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.engine import Engine
from hexad.engine.language import LanguageModel, Task
from hexad.optim.schedule import LossScaler
from hexad.parallel.contributions import Contribution, WeightGradient
from hexad.parallel.sharding import Shard
from hexad.parallel.tensor.loss import head_loss_sum
from hexad.planning import check_config
from hexad.topology.layout import Layout

from ..pool import Pool
from ..small import Tree, config_of, engine_of, microbatches
from .conftest import MakeRun

DEFAULTS: Tree = {
    "model": {
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn_hidden": 56,
        "vocab": 101,
        "init_std": 0.1,
    },
    "data": {"sequence": 12},
    "batch": {"micro": 2, "global": 12},
    "parallel": {"bucket_mb": 0.02},
    "optimizer": {"lr": 0.01},
    "lr_schedule": {"kind": "constant", "warmup": 0},
}


def batch_of(engine: Engine) -> list[Microbatch]:
    data = engine.mesh.data
    return microbatches(engine.config, data.rank, data.size, seed=3)


# Loss scaling


def scales(overflows: list[bool], **settings: Any) -> list[float]:
    scaler = LossScaler(config_of(DEFAULTS, precision={"dtype": "fp16", **settings}).precision)
    values = []
    for overflow in overflows:
        scaler.update(overflow)
        values.append(scaler.scale)
    return values


def test_two_overflows_then_growth() -> None:
    settings = {"loss_scale_initial": 2.0**8, "loss_scale_window": 2, "loss_scale_hysteresis": 1}
    assert scales([True, True, False, False, False, False], **settings) == [128, 64, 64, 128, 128, 256]


def test_hysteresis_forgives_the_first_overflow() -> None:
    settings = {"loss_scale_initial": 2.0**8, "loss_scale_window": 3}
    assert scales([True, True, True], **settings) == [256, 128, 64]
    # Clean steps in between forgive nothing until the scale has grown.
    assert scales([True, False, True], **settings) == [256, 256, 128]
    assert scales([True, False, False, False, True, True], **settings) == [256, 256, 256, 512, 512, 256]


def test_the_window_begins_anew_after_an_overflow() -> None:
    settings = {"loss_scale_initial": 4.0, "loss_scale_window": 2, "loss_scale_hysteresis": 3}
    assert scales([False, True, False, False], **settings) == [4, 4, 4, 8]


def test_defaults_and_the_smallest_scale() -> None:
    scaler = LossScaler(config_of(DEFAULTS, precision={"dtype": "fp16"}).precision)
    assert scaler.scale == 2**16
    for _ in range(17):
        scaler.update(True)
        assert not scaler.exhausted
    assert scaler.scale == 1.0
    scaler.update(True)
    assert scaler.exhausted and scaler.scale == 1.0


def test_what_an_earlier_overflow_has_exhausted_is_forgotten() -> None:
    settings = {"loss_scale_initial": 1.0, "loss_scale_window": 1, "loss_scale_hysteresis": 2}
    one = LossScaler(config_of(DEFAULTS, precision={"dtype": "fp16", **settings}).precision)
    other = LossScaler(config_of(DEFAULTS, precision={"dtype": "fp16", **settings}).precision)
    for overflow, exhausted in ((True, False), (True, True), (False, False), (True, False)):
        other.restore(one.state())  # a run that is resumed before every step judges likewise
        for scaler in (one, other):
            scaler.update(overflow)
            assert scaler.exhausted == exhausted


def test_a_scaler_goes_on_from_its_state() -> None:
    settings = config_of(DEFAULTS, precision={"dtype": "fp16", "loss_scale_window": 3}).precision
    one, other = LossScaler(settings), LossScaler(settings)
    for overflow in (True, False, False):
        one.update(overflow)
    other.restore(one.state())
    for overflow in (False, True, True):
        one.update(overflow)
        other.update(overflow)
        assert other.scale == one.scale
    assert one.scale == 2**16  # grown once, then halved once


def test_other_precisions_are_not_scaled() -> None:
    for dtype in ("bf16", "fp32", "fp64"):
        scaler = LossScaler(config_of(DEFAULTS, precision={"dtype": dtype}).precision)
        scaler.update(True)
        assert scaler.scale == 1.0 and scaler.exhausted and scaler.state() == {}


# Skipped steps


def poisoned(config: Config, vector: bool, value: float) -> tuple[list[bool], bool, list[float], int, float]:
    """Three steps, in the second of which one rank's gradient is not finite."""
    engine = engine_of(config)
    last = dist.get_rank() == dist.get_world_size() - 1
    skipped, scales, unchanged = [], [], True
    chosen = next(
        number
        for number, bucket in enumerate(engine.buckets)
        if vector == (bucket.members[0].parameter.dim() == 1)
    )
    start = engine.gradients.start

    def poison(number: int, *rest: Any) -> None:
        if number == chosen and engine.step == 1 and last:
            engine.gradients._whole(number)[0] = value
        start(number, *rest)

    engine.gradients.start = poison  # type: ignore[method-assign]
    for _ in range(3):
        before = [chunk.tensor.clone() for chunk in engine.chunks()]
        result = engine.train_step(batch_of(engine))
        skipped.append(result.skipped)
        scales.append(result.loss_scale)
        if result.skipped:
            after = engine.chunks()
            unchanged = all(torch.equal(was, chunk.tensor) for was, chunk in zip(before, after))
    return skipped, unchanged, scales, engine.updates, engine.buckets[-1].master.abs().max().item()


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 3, "zero": 1},
        {"data": 2, "zero": 1, "replicas": 2},
        {"tensor": 2, "sequence": False},
        pytest.param({"data": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "schedule": "zb_h1"}, marks=pytest.mark.slow),
        {"data": 2, "tensor": 2, "pipeline": 2, "zero": 2},
        pytest.param({"data": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "zero": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(
    parallel: dict[str, Any], vector: bool, pool: Pool
) -> None:
    value = float("nan") if vector else float("inf")
    config = config_of(
        DEFAULTS,
        precision={"dtype": "fp16", "loss_scale_initial": 256.0, "loss_scale_hysteresis": 1},
        parallel=parallel,
    )
    world = parallel.get("data", 1) * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    for skipped, unchanged, scales, updates, largest in pool.run(world, poisoned, config, vector, value):
        assert skipped == [False, True, False]
        assert unchanged
        assert scales == [256.0, 256.0, 128.0]
        assert updates == 2
        assert largest < 10


# Tolerances


def losses_of(config: Config) -> list[float]:
    return traces_of(config)[0]


def traces_of(config: Config) -> tuple[list[float], list[float]]:
    """Losses and gradient norms."""
    engine = engine_of(config)
    results = [engine.train_step(batch_of(engine)) for _ in range(4)]
    return [result.loss for result in results], [result.grad_norm for result in results]


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        # Two units in the last place of what is stored: products are summed in fp32, so that a loss, a mean
        # of many such numbers, is off by less than the activations and weights it is made from.
        pytest.param({"dtype": "bf16"}, 2 * 2**-8, marks=pytest.mark.slow),
        ({"dtype": "bf16", "reduce": "bf16"}, 2 * 2**-8),
        pytest.param(
            {"dtype": "bf16", "reduce": "bf16", "accumulate": "bf16"}, 2 * 2**-8, marks=pytest.mark.slow
        ),
        ({"dtype": "fp16"}, 2 * 2**-10),
        # Sums in another order, and Adam divides small gradients by their own size: 128 units.
        pytest.param({"dtype": "fp32"}, 128 * 2**-23, marks=pytest.mark.slow),
    ],
)
def test_layouts_stay_near_one_process(precision: dict[str, Any], tolerance: float, pool: Pool) -> None:
    ((alone, norms),) = pool.run(1, traces_of, config_of(DEFAULTS, precision=precision))
    assert alone[-1] < alone[0] - 0.05
    for parallel in (
        {"data": 2},
        {"data": 3, "zero": 1},
        {"data": 2, "zero": 2},
        {"data": 2, "zero": 3},
        {"tensor": 2},
        {"data": 2, "pipeline": 2, "zero": 3, "schedule": "zb_h1"},
    ):
        world = parallel.get("data", 1) * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
        config = config_of(DEFAULTS, precision=precision, parallel=parallel)
        ((losses, rank_norms), *_) = pool.run(world, traces_of, config)
        assert losses == pytest.approx(alone, rel=tolerance), parallel
        assert rank_norms == pytest.approx(norms, rel=16 * tolerance), parallel


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_sixteen_bits_stay_near_fp32(dtype: str, pool: Pool) -> None:
    (wide,) = pool.run(1, losses_of, config_of(DEFAULTS, precision={"dtype": "fp32"}))
    (narrow,) = pool.run(1, losses_of, config_of(DEFAULTS, precision={"dtype": dtype}))
    assert narrow == pytest.approx(wide, rel=2 * 2**-8 if dtype == "bf16" else 2**-10)
    assert narrow != wide


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_offloaded_state_gives_the_same_losses(zero: int, pool: Pool) -> None:
    groups = {
        "precision": {"dtype": "bf16" if zero % 2 else "fp32"},
        "parallel": {"data": 2, "zero": zero},
    }
    config = config_of(DEFAULTS, **groups)
    offloaded = config_of(DEFAULTS, **groups, memory={"offload": "optimizer"})
    assert pool.run(2, losses_of, offloaded) == pool.run(2, losses_of, config)


def gradients_of(config: Config) -> torch.Tensor:
    """The gradient of a step, from this rank's buckets (ZeRO 0)."""
    engine = engine_of(config)
    batch = batch_of(engine)
    engine.begin(len(batch) * 8)
    for _ in range(8):
        for microbatch in batch:
            assert isinstance(engine.workload, LanguageModel)
            engine.accumulate([Task(engine.workload.counting.part(microbatch))], 1.0 / 1000)
    engine.reduce()
    return torch.cat([bucket.gradient.float() for bucket in engine.buckets])


def test_gradients_sent_in_bf16_are_accumulated_in_fp32(pool: Pool) -> None:
    """One rounding, whatever the number of microbatches, where nothing else is asked for."""
    errors = {}
    for name, settings in (("sent", {}), ("accumulated", {"accumulate": "bf16"})):
        configs = (
            config_of(DEFAULTS, precision={"dtype": "bf16", **more}, parallel={"data": 2})
            for more in ({}, {"reduce": "bf16", **settings})
        )
        wide, narrow = (pool.run(2, gradients_of, config)[0] for config in configs)
        errors[name] = float((narrow - wide).norm() / wide.norm())
    assert errors["sent"] < 2**-8
    assert errors["accumulated"] > 3 * errors["sent"]


class _Wide:
    """Adds up products of fp16 matrices as a GPU does."""

    deferring = False

    def __init__(self, parameter: torch.Tensor) -> None:
        self.total = torch.zeros(parameter.shape, dtype=torch.float64)

    def contribute(self, _: torch.Tensor, contribution: Contribution, last: bool = True) -> None:
        assert isinstance(contribution, WeightGradient)
        self.total += contribution.output_gradient.double().t() @ contribution.inputs.double()


def test_small_probabilities_over_millions_of_targets_do_not_underflow_in_fp16() -> None:
    vocab, hidden, targets = 128_256, 8, 4_194_304
    config = config_of(DEFAULTS, precision={"dtype": "fp16"})
    engine = engine_of(config)
    assert isinstance(engine.workload, LanguageModel)
    x = torch.randn(24, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).half()
    weight = torch.zeros(vocab, hidden, dtype=torch.float16, requires_grad=True)
    weight.gradient_accumulator = _Wide(weight)  # type: ignore[attr-defined]
    divisor = engine.workload.divisor(targets)
    labels = torch.zeros(24, dtype=torch.int64)
    head_loss_sum(x, weight, labels, vocab, Shard(), engine.scaler.scale / divisor)
    gradient = weight.gradient_accumulator.total / (engine.scaler.scale * targets / divisor)  # type: ignore[attr-defined]
    wanted = x.double().sum(0) / vocab / targets  # of every row but the first, all logits being 0
    assert ((gradient[1:] - wanted).norm(dim=1) / wanted.norm()).max() < 2**-10


# A whole run


def test_a_run_survives_overflows_and_resumes(make_run: MakeRun) -> None:
    precision = {"dtype": "fp16", "loss_scale_initial": 2.0**40, "loss_scale_hysteresis": 1}
    run = make_run(precision=precision, run={"steps": 24}, checkpoint={"every": 12})
    assert run.train().status == 0
    metrics = run.metrics
    skipped = [line["skipped"] for line in metrics]
    assert skipped[0] and not skipped[-1]
    scales = [line["loss_scale"] for line in metrics]
    for before, after, bad in zip(scales, scales[1:], skipped):
        assert after == (before / 2 if bad else before)
    again = make_run(precision=precision, run={"steps": 12}, checkpoint={"every": 12})
    assert again.train().status == again.train("run.steps=24").status == 0
    assert [line["loss_scale"] for line in again.metrics] == scales
    assert again.losses == run.losses


def test_a_scale_that_cannot_be_lowered_stops_the_run(make_run: MakeRun) -> None:
    run = make_run(precision={"dtype": "fp16", "loss_scale": 2.0**100}, run={"steps": 3})
    result = run.train()
    assert result.status == 2
    assert "not finite at loss scale" in result.error and "precision.loss_scale" in result.error
    assert [line["skipped"] for line in run.metrics] == [True]


# What does not fit


@pytest.mark.parametrize(
    ("precision", "parallel", "text"),
    [
        ({"dtype": "fp32", "reduce": "bf16"}, {}, "precision.reduce: found bf16 with precision.dtype fp32"),
        (
            {"dtype": "bf16", "accumulate": "bf16"},
            {},
            "precision.accumulate: found bf16 with precision.reduce",
        ),
        (
            {"dtype": "bf16", "loss_scale": 2.0},
            {},
            "precision.loss_scale: found 2.0 with precision.dtype bf16",
        ),
        ({"dtype": "fp32", "loss_scale_window": 5}, {}, "precision.loss_scale_window: found 5"),
        (
            {"dtype": "fp16", "loss_scale": 8.0, "loss_scale_window": 5},
            {},
            "with a fixed precision.loss_scale",
        ),
        (
            {"dtype": "fp16", "loss_scale_initial": 8.0, "loss_scale_min": 64.0},
            {},
            "precision.loss_scale_min",
        ),
        ({"dtype": "fp32"}, {"replicas": 2, "data": 2}, "parallel.replicas: found 2 with parallel.zero 0"),
        (
            {"dtype": "fp32"},
            {"replicas": 2, "data": 3, "zero": 1},
            "does not divide the data degree 3; use 1 or 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(precision: dict[str, Any], parallel: dict[str, Any], text: str) -> None:
    config = config_of(DEFAULTS, precision=precision, parallel=parallel)
    with pytest.raises(ConfigError) as error:
        check_config(config, Layout.from_settings(config.parallel, parallel.get("data", 1)))
    assert text in str(error.value)
