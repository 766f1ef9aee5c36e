"""Settings that make a job much slower than it need be, with the planner's figures. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hexad.config import Config, ConfigError
from hexad.topology.devices import named_gpu
from hexad.topology.hardware import load_hardware
from hexad.topology.layout import Layout

from . import Resolved
from .device_memory import device_memory
from .job import Job
from .links import Cluster
from .memory import largest, per_pipeline_rank
from .resolve import resolve
from .step_time import Predictor

GPU = "h100"
"""The kind of GPU of the figures, where the configuration names none."""
_WORTH = 1.25
"""How many times as long a step must take as with one setting changed."""
_MOST = 2**14
"""Microbatches x stages of a schedule of which many are simulated in a moment."""
_WAITING = 0.15
"""Part of a step that is spent waiting, or idle, from which on its cause is told."""


@dataclass(frozen=True)
class Advice:
    """A change that makes steps shorter.

    Attributes:
        changes: settings by key.
        seconds: of a step as configured, and with the changes.
        waiting: seconds of the step as configured that its largest cause of waiting takes, and the cause.
    """

    changes: dict[str, Any]
    seconds: tuple[float, float]
    waiting: tuple[float, str]

    def __str__(self) -> str:
        before, after = self.seconds
        seconds, cause = self.waiting
        why = f", of which {seconds:.2f} s is {cause}" if seconds >= _WAITING * before else ""
        settings = " ".join(f"{key}={value}" for key, value in self.changes.items())
        gpu = GPU.upper()
        return f"predicted {before:.2f} s a step on {gpu}s{why}; with {settings} {after:.2f} s, and it fits"


def advice(resolved: Resolved) -> Advice | None:
    """The change of one setting, or of a schedule with its stages, that saves most of a step; None if none
    saves much, the job is planned for a CPU, has one rank, or a schedule that takes long to simulate.

    Memory must fit the GPU, with what it holds besides tensors, or be no more than as configured.
    """
    config, world = resolved.config, resolved.layout.world
    if config.run.device == "cpu" or world == 1 or config.precision.dtype in ("fp64", "fp32"):
        return None
    schedule = resolved.plan.schedule
    if schedule.microbatches * schedule.stages > _MOST:
        return None
    known = named_gpu(GPU)
    assert known is not None
    cluster = Cluster(load_hardware(GPU), world)
    now = Predictor(Job.of(resolved), cluster)
    before = now.step.total
    room = max(known[1], _needed(resolved))
    best: tuple[float, dict[str, Any]] | None = None
    for changes in _changes(config, resolved.layout):
        with suppress(ConfigError):
            changed = resolve(_changed(config, changes), _layout(config, changes, world), bf16=True)
            seconds = Predictor(Job.of(changed), cluster).step.total
            better = seconds * _WORTH < before and (best is None or seconds < best[0])
            if better and _needed(changed) <= room:
                best = seconds, changes
    if best is None:
        return None
    return Advice(best[1], (before, best[0]), _waiting(now))


def _needed(resolved: Resolved) -> int:
    """Bytes of a GPU."""
    total = largest(per_pipeline_rank(resolved)).total
    return device_memory(total, resolved).total


def _changes(config: Config, layout: Layout) -> Iterator[dict[str, Any]]:
    parallel, memory = config.parallel, config.memory
    for zero in (0, 1, 2, 3):
        if zero != parallel.zero and layout.gradient_ranks > 1:
            yield {"parallel.zero": zero}
    if layout.pipeline > 1:
        for schedule in ("1f1b", "zb_h1", "zb_v"):
            if schedule != parallel.schedule:
                yield {"parallel.schedule": schedule, "parallel.virtual_stages": 1}
        per_rank = config.model.layers // layout.pipeline
        for virtual in range(2, min(per_rank, 8) + 1):
            yield {"parallel.schedule": "interleaved", "parallel.virtual_stages": virtual}
    if memory.recompute != "none":
        yield {"memory.recompute": "none", "memory.recompute_layers": "all"}
    if layout.context > 1:
        for method in ("ring", "ulysses", "all_gather"):
            if method != parallel.context_method:
                yield {"parallel.context_method": method}
    for name in ("tensor", "context", "pipeline"):
        if (degree := getattr(parallel, name)) > 1 and degree % 2 == 0:
            yield {f"parallel.{name}": degree // 2}
    data = layout.degrees["data"]
    for micro in (config.batch.micro * 2, config.batch.micro // 2):
        if micro and config.batch.global_ % (micro * data) == 0:
            yield {"batch.micro": micro}


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    groups: dict[str, dict[str, Any]] = {"parallel": {"data": "auto"}}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in groups.items()}
    )


def _layout(config: Config, changes: dict[str, Any], world: int) -> Layout:
    return Layout.from_settings(_changed(config, changes).parallel, world)


_CAUSES = {
    "tensor": "waiting for tensor ranks",
    "ring": "waiting for context ranks",
    "ulysses": "waiting for context ranks",
    "expert": "waiting for expert ranks",
    "data": "waiting for data ranks",
}


def _waiting(predictor: Predictor) -> tuple[float, str]:
    """The largest cause of waiting on the pipeline rank that computes longest, in seconds of a step."""
    step, schedule = predictor.step, predictor.job.schedule
    busiest = max(
        ([step.actions[action.stage, action.kind] for action in rank] for rank in schedule.ranks),
        key=lambda times: sum(time.seconds for time in times),
    )
    causes: dict[str, float] = {}
    for time in busiest:
        for axis, seconds in time.exposed.items():
            cause = _CAUSES.get(axis, f"waiting for {axis} ranks")
            causes[cause] = causes.get(cause, 0.0) + seconds
    causes["the pipeline's bubble"] = step.timeline.makespan - sum(time.seconds for time in busiest)
    causes["the reduction of gradients"] = step.reduction
    cause = max(causes, key=lambda name: causes[name])
    return causes[cause], cause
