"""Measurements of single steps: traces by torch's profiler, one file per rank in ``run.dir/profile``, and the
measured and planned times of pipeline actions, ``run.dir/timeline.json``."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hexad.comm import gather_objects
from hexad.config import ConfigError
from hexad.config.schema import ProfileSettings
from hexad.engine.engine import Engine
from hexad.parallel.pipeline.simulate import Costs, Timeline, simulate
from hexad.planning.stages import stage_costs

STEP = "hexad.step"
"""The label of a step."""


class StepProfile:
    """Profiles the steps that ``log.profile`` names, if any; on a GPU a snapshot of its memory's history is
    written too. ``agreed`` runs what may fail on one rank alone (:meth:`hexad.launching.launch.Run.agreed`).
    """

    def __init__(
        self,
        settings: ProfileSettings | None,
        directory: Path,
        rank: int,
        device: torch.device,
        agreed: Callable[[Callable[[], None]], None],
    ) -> None:
        self._settings = settings
        self._name = directory / "profile" / f"rank-{rank:05d}"
        self._device, self._agreed = device, agreed
        self._profiler: Any = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, counted from 1."""
        settings = self._settings
        if settings is None or not settings.start <= number < settings.start + settings.steps:
            yield
            return
        if self._profiler is None:
            self._start()
        try:
            with torch.profiler.record_function(f"{STEP} {number}"):
                yield
        except BaseException:
            self.abandon()
            raise
        if number == settings.start + settings.steps - 1:
            self.finish()

    def finish(self) -> None:
        """Write what has been profiled, if anything; all ranks together.

        Raises:
            AgreedError: a rank cannot write its trace.
        """
        if self._profiler is not None:
            self._profiler.stop()
            profiler, self._profiler = self._profiler, None
            self._agreed(lambda: self._write(profiler))

    def abandon(self) -> None:
        """Stop profiling without a trace, after an error."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with suppress(RuntimeError):
                profiler.stop()
            self._record_memory(False)

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._record_memory(True)
        # Of all threads alike: otherwise gloo's threads inherit the profiler, and when they end, the heap now
        # and then aborts the process (torch 2.13, two ranks: 12 of 54 runs).
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(activities=activities, experimental_config=everywhere)
        self._profiler.start()

    def _record_memory(self, enabled: bool) -> None:
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history("all" if enabled else None)

    def _write(self, profiler: Any) -> None:
        try:
            self._name.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{self._name}.json.gz")
            if self._device.type == "cuda":
                torch.cuda.memory._dump_snapshot(f"{self._name}-memory.pickle")
        except OSError as error:
            raise ConfigError(
                "log.profile", f"cannot write {self._name}.json.gz: {error.strerror or error}"
            ) from None
        finally:
            self._record_memory(False)


def timeline_text(engine: Engine) -> str:
    """The last recorded step's timeline and the planned one as JSON; the ranks of a pipeline call it
    together."""
    # Clocks of different hosts agree to about a millisecond.
    recorded = gather_objects(engine.recorded(), engine.mesh.pipeline)
    first = min(begin for begin, _ in recorded)
    times = [
        [(begin - first + start, begin - first + end) for start, end in rank] for begin, rank in recorded
    ]
    measured = Timeline.of(engine.plan.schedule, times)
    planned = simulate(engine.plan.schedule, _planned(engine, measured))
    return json.dumps({"step": engine.step, "planned": planned.as_tree(), "measured": measured.as_tree()})


def _planned(engine: Engine, measured: Timeline) -> Costs:
    """The costs of the plan, scaled so that the mean time of an action equals the measured one."""
    config, plan = engine.config, engine.plan
    costs = stage_costs(config, plan.layers, plan.schedule.pipeline)
    work = _busy(simulate(plan.schedule, costs))
    unit = _busy(measured) / work if work else 0.0
    passes = (costs.forward, costs.backward, costs.weight)
    forward, backward, weight = (tuple(time * unit for time in times) for times in passes)
    return replace(costs, forward=forward, backward=backward, weight=weight)


def _busy(timeline: Timeline) -> float:
    return sum(end - start for actions in timeline.times for start, end in actions)
