"""The schedule that ``hexad show schedule`` draws, and its times, from the command line."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from hexad.config import Config, HexadError, blaming
from hexad.model.configuration import load_config
from hexad.parallel.pipeline.schedule import Schedule, read_schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.simulate import TIMELINE, Costs, simulate
from hexad.parallel.pipeline.validate import validate
from hexad.planning import planned_layout, resolve
from hexad.planning.stages import stage_costs
from hexad.show.schedule import Chart, read_timeline

from .options import split_settings

Times = tuple[float, ...]
"""Of F, B and W of one microbatch in all stages of a rank, and of a message."""
_DEFAULT_TIMES: Times = (1.0, 1.0, 1.0, 0.0)


class Choice(NamedTuple):
    """What is drawn, an addition to the title, and the step of a run if it was measured."""

    charts: list[Chart]
    note: str = ""
    step: int | None = None

    def as_tree(self) -> dict[str, Any]:
        """One schedule's tree, or the content of a run's ``timeline.json``."""
        if self.step is None:
            return self.charts[0].timeline.as_tree()
        return {"step": self.step, **{chart.label: chart.timeline.as_tree() for chart in self.charts}}


def chosen(settings: tuple[str, ...], options: dict[str, Any]) -> Choice:
    """The schedule of a command line: its arguments, and the options given by their names in Python.

    Raises:
        HexadError: one of them is malformed, or they contradict each other.
    """
    times = _times(options["costs"]) if "costs" in options else None
    path, overrides = split_settings("show schedule", settings)
    if "file" in options:
        file = options["file"]
        if settings:
            raise HexadError(f"--file: found '{file}' beside {settings[0]}; give one of them")
        _refuse(options, f"--file {file}", "file", "costs")
        schedule = read_schedule(file)
        with blaming(f"--file: {file}"):
            validate(schedule)
        return Choice([_with_times(schedule, times or _DEFAULT_TIMES)])
    if not settings:
        times = times or _DEFAULT_TIMES
        return Choice([_with_times(_from_options(options, times), times)])
    _refuse(options, path or "the configuration", "costs")
    if path is None or not Path(path).is_dir():
        return Choice([_from_config(load_config(path, overrides), times)])
    if overrides:
        raise HexadError(f"show schedule: found overrides of the run {path}; give a configuration file")
    timeline, config = Path(path) / TIMELINE, Path(path) / "config.yaml"
    if timeline.is_file():
        _refuse(options, f"{timeline}")
        step, charts = read_timeline(timeline)
        return Choice(charts, f", step {step:,}", step)
    if not config.is_file():
        raise HexadError(f"{path}: found neither {TIMELINE} nor config.yaml; is it the run.dir of a run?")
    return Choice([_from_config(load_config(config), times)], " (as configured)")


def _refuse(options: dict[str, Any], source: str, *allowed: str) -> None:
    """Refuse options that contradict ``source``."""
    for name in sorted(options.keys() - set(allowed)):
        option, value = f"--{name.replace('_', '-')}", options[name]
        raise HexadError(f"{option}: found {value}, but {source} determines the schedule; leave it out")


def _from_options(options: dict[str, Any], times: Times) -> Schedule:
    name, pipeline = options.get("schedule", "1f1b"), options.get("pipeline", 4)
    if "memory" in options and name != "auto":
        raise HexadError(f"--memory: found {options['memory']:g}; it applies only to --schedule auto")
    with blaming("--schedule"):
        return build_schedule(
            name,
            pipeline,
            options.get("microbatches", 2 * pipeline),
            options.get("virtual_stages", 2 if name == "interleaved" else 1),
            group=options.get("group"),
            costs=lambda placement: _equal(placement, times),
            memory=options.get("memory"),
        )


def _with_times(schedule: Schedule, times: Times) -> Chart:
    basis = "F {:g}, B {:g}, W {:g} per rank and microbatch, message {:g}".format(*times)
    return Chart(simulate(schedule, _equal(schedule.placement, times)), basis=basis)


def _equal(placement: tuple[int, ...], times: Times) -> Costs:
    """Costs that divide a rank's times equally among its stages."""
    stages = Counter(placement)
    parts = tuple(1 / stages[rank] for rank in placement)
    forward, backward, weight = (tuple(time * part for part in parts) for time in times[:3])
    return Costs(forward, backward, weight, transfer=times[3], activation=parts)


def _times(text: str) -> Times:
    try:
        times = tuple(float(part) for part in text.split(","))
        if len(times) == 4 and all(isfinite(time) and time >= 0 for time in times) and any(times[:3]):
            return times
    except ValueError:
        pass
    raise HexadError(
        f"--costs: found '{text}', expected F,B,W,P2P such as 1,1,1,0.1: times from 0, F, B or W above 0"
    )


def _from_config(config: Config, times: Times | None) -> Chart:
    """The schedule that the trainer would run."""
    resolved = resolve(config, planned_layout(config))
    plan = resolved.plan
    if times:
        return _with_times(plan.schedule, times)
    flops = stage_costs(resolved.config, plan.layers, plan.schedule.pipeline)
    unit = sum(flops.forward) / plan.schedule.pipeline
    forward, backward, weight = (
        tuple(time / unit for time in each) for each in (flops.forward, flops.backward, flops.weight)
    )
    costs = Costs(forward, backward, weight, activation=flops.activation)
    return Chart(simulate(plan.schedule, costs), basis="times proportional to FLOPs, mean F of a rank 1")
