"""The search for the fastest layouts, beside a search by hand over all of them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import yaml

from hexad import ConfigError, Layout, load_config
from hexad.config import Config, HexadError
from hexad.planning import resolve
from hexad.planning.device_memory import device_memory
from hexad.planning.job import Job
from hexad.planning.links import Cluster
from hexad.planning.memory import largest, per_pipeline_rank
from hexad.planning.plan import explained, plan
from hexad.planning.search import Search
from hexad.planning.step_time import Predictor
from hexad.topology.hardware import load_hardware

DENSE = {"preset": "llama3-8b", "layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn_hidden": 7168}
MIXTURE = {
    "family": "mixtral",
    "layers": 4,
    "hidden": 2048,
    "heads": 16,
    "vocab": 32000,
    "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 4096},
}
SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")


def _config(model: dict[str, Any], sequences: int, **groups: Any) -> Config:
    tree = {"model": model, "data": {"sequence": 4096}, "batch": {"micro": 1, "global": sequences}}
    return load_config({"run": {"device": "cuda"}, "precision": {"dtype": "bf16"}, **tree, **groups})


def _by_hand(base: Config, world: int, fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Settings of every layout, in no order."""
    tensors = contexts = pipelines = experts = [2**n for n in range(world.bit_length())]
    virtuals = range(1, base.model.layers + 1)
    axes = {
        "tensor": [degree for degree in tensors if degree <= 8],
        "context": [degree for degree in contexts if base.data.sequence // degree >= 1024],
        "pipeline": pipelines,
        "expert": experts if base.model.moe else [1],
        "expert_tensor": tensors if base.model.moe else [1],
        "schedule": SCHEDULES,
        "virtual_stages": virtuals,
        "zero": range(4),
    }
    chosen = [[fixed[name]] if name in fixed else values for name, values in axes.items()]
    for values in product(*chosen):
        settings = dict(zip(axes, values))
        plain = settings["schedule"] == fixed.get("schedule", "1f1b") and settings["virtual_stages"] == 1
        if settings["expert_tensor"] not in (1, settings["tensor"]):
            continue
        if settings["pipeline"] > 1 or plain:
            yield settings


def _seconds(base: Config, settings: dict[str, Any], micro: int, memory: dict[str, Any], world: int) -> Any:
    """Seconds of a step, and bytes of a GPU; None if it is refused."""
    update = {
        "parallel": base.parallel.model_copy(update={**settings, "data": "auto"}),
        "batch": base.batch.model_copy(update={"micro": micro}),
        "memory": base.memory.model_copy(update=memory),
    }
    config = base.model_copy(update=update)
    try:
        resolved = resolve(config, Layout.from_settings(config.parallel, world))
    except ConfigError:
        return None
    nbytes = device_memory(largest(per_pipeline_rank(resolved)).total, resolved).total
    return Predictor(Job.of(resolved), Cluster(load_hardware("h100"), world)).step.total, nbytes


def _memories(layers: tuple[int, ...], offload: bool) -> Iterator[dict[str, Any]]:
    """What is traded for memory: all layers of a stage recompute, or so many."""
    for place in ("none", "optimizer") if offload else ("none",):
        yield {"recompute": "none", "offload": place}
        for kind, number in product(("selective", "full"), ("all", *layers)):
            yield {"recompute": kind, "recompute_layers": number, "offload": place}


FIXED = {"parallel.context": 1, "parallel.virtual_stages": 1}


@pytest.mark.parametrize(
    ("model", "world", "sequences", "gib", "fixed", "layers", "offload"),
    [
        (DENSE, 4, 8, 21, {**FIXED, "parallel.zero": 1}, (2,), False),
        pytest.param(DENSE, 4, 32, 79, FIXED, (3,), False, marks=pytest.mark.slow),
        pytest.param(
            DENSE, 4, 32, 21, {**FIXED, "parallel.zero": 1}, (1, 2, 3, 5), True, marks=pytest.mark.slow
        ),
        pytest.param(
            *(DENSE, 8, 16, 30, {"parallel.schedule": "interleaved", "parallel.zero": 3}, (1,), False),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MIXTURE, 8, 32, 40, {**FIXED, "parallel.zero": 1}, (1, 2), False, marks=pytest.mark.slow
        ),
    ],
)
def test_nothing_better_exists(
    model: dict[str, Any],
    world: int,
    sequences: int,
    gib: int,
    fixed: dict[str, Any],
    layers: tuple[int, ...],
    offload: bool,
) -> None:
    """Of all layouts with the default order and without replicas, each resolved, predicted and checked."""
    base = _config(model, sequences)
    names = {key.removeprefix("parallel."): value for key, value in fixed.items()}
    base = base.model_copy(update={"parallel": base.parallel.model_copy(update=names)})
    micros, room = (1, 2), gib * 2**30
    cluster = Cluster(load_hardware("h100"), world)
    keys = {"order", "replicas", "context_method", "split", "tensor_chunks"}
    keys = {f"parallel.{name}" for name in keys} | set(fixed) | {"batch.micro"}
    best = []
    for micro in micros:
        one = base.model_copy(update={"batch": base.batch.model_copy(update={"micro": micro})})
        names_fixed = frozenset(keys if offload else {*keys, "memory.offload"})
        best += Search(one, cluster, room, names_fixed).best(1)
    fastest = min(best, key=lambda candidate: candidate.step.total)
    expected = [
        found[0]
        for settings in _by_hand(base, world, names)
        for micro in micros
        for memory in _memories(layers, offload)
        if (found := _seconds(base, settings, micro, memory, world)) is not None and found[1] <= room
    ]
    assert fastest.step.total <= min(expected) * (1 + 1e-3)
    config = fastest.resolved.config
    settings = config.parallel.model_dump()
    again = _seconds(base, settings, config.batch.micro, config.memory.model_dump(), world)
    assert again == (pytest.approx(fastest.step.total), fastest.device.total) and again[1] <= room


def test_what_is_fixed_stays() -> None:
    result = plan(
        "llama3-8b",
        "h100:64",
        sequence=8192,
        global_batch=128,
        fix=["parallel.tensor=4", "parallel.context=1", "batch.micro=1"],
    )
    assert result.layouts and len(result.layouts) <= 10
    for candidate in result.layouts:
        assert candidate.resolved.config.parallel.tensor == 4 and candidate.resolved.config.batch.micro == 1
        assert candidate.device.total <= result.cluster.capacity
        parts = result.breakdown(candidate).seconds
        assert sum(parts.values()) == pytest.approx(candidate.step.total)
        assert all(seconds > -1e-9 for seconds in parts.values()), parts
    times = [candidate.step.total for candidate in result.layouts]
    assert times == sorted(times)


def test_the_written_configuration_is_the_layout() -> None:
    """Loaded and resolved again, it has the same predicted time and memory."""
    fix = ["parallel.context=1", "batch.micro=1"]
    result = plan("llama3.2-1b", "h100:8", sequence=4096, global_batch=16, top=3, fix=fix)
    for candidate in result.layouts:
        config = load_config(yaml.safe_load(result.run_yaml(candidate)))
        resolved = resolve(config, Layout.from_settings(config.parallel, 8), bf16=True)
        assert resolved.layout == candidate.resolved.layout
        step = Predictor(Job.of(resolved), result.cluster.cluster).step.total
        assert step == pytest.approx(candidate.step.total)
        assert largest(per_pipeline_rank(resolved)) == candidate.memory


def test_a_layout_of_ones_own() -> None:
    result = plan("llama3-8b", "h100:16", sequence=8192, global_batch=64, top=0)
    first = explained(result, "tensor=8, zero=1, micro=1, recompute=full")
    settings = result.settings(first)
    assert settings == {
        "parallel.tensor": 8,
        "parallel.zero": 1,
        "batch.micro": 1,
        "memory.recompute": "full",
    }
    assert result.breakdown(first).seconds["recomputed"] > 0.15 * first.step.total
    for wrong, says in (
        ("tensor", "layout: found 'tensor', expected settings"),
        ("tensor=3", "parallel.tensor"),
    ):
        with pytest.raises(HexadError, match=says):
            explained(result, wrong)


def test_where_nothing_fits() -> None:
    with pytest.raises(HexadError, match=r"plan: no layout of h100:8 is possible \(.*memory: [0-9,]+"):
        plan("llama3.1-405b", "h100:8", sequence=8192, global_batch=64)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"])
def test_the_timeline_has_the_actions_times(schedule: str) -> None:
    """Of every stage its own, whichever rank has it."""
    parallel = {"pipeline": 2, "schedule": schedule, "virtual_stages": 3 if schedule == "interleaved" else 1}
    config = _config({**DENSE, "layers": 7}, 8, parallel=parallel)
    job = Job.of(resolve(config, Layout.from_settings(config.parallel, 2)))
    step = Predictor(job, Cluster(load_hardware("h100"), 2)).step
    for actions, times in zip(job.schedule.ranks, step.timeline.times):
        for action, (begin, end) in zip(actions, times):
            assert end - begin == pytest.approx(step.actions[action.stage, action.kind].seconds)
    assert replace(job, schedule=job.schedule) == job
