"""Which schedule ``hexad show schedule`` is to draw, and with which times."""

from __future__ import annotations

from collections import Counter
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hexad.config import Config, HexadError, blaming, load_config
from hexad.parallel.pipeline.schedule import Schedule, read_schedule
from hexad.parallel.pipeline.schedules import NAMES, build_schedule, stages_per_rank
from hexad.parallel.pipeline.simulate import TIMELINE, Costs
from hexad.show.schedule import Chart, read_timeline, simulated

if TYPE_CHECKING:
    from hexad.train.pipeline import PipelinePlan

Times = tuple[float, float, float, float]
"""Of F, B and W of a rank's whole share of a microbatch, and of a message."""
_ONES: Times = (1.0, 1.0, 1.0, 0.0)

_SETTLED = {
    "pipeline": "parallel.pipeline",
    "microbatches": "batch.global",
    "schedule": "parallel.schedule",
    "virtual_stages": "parallel.virtual_stages",
    "group": "parallel.schedule_group",
    "memory": "parallel.schedule_memory",
}


class Choice(NamedTuple):
    """What is to be drawn: one schedule, or a step as planned and as measured."""

    charts: list[Chart]
    note: str = ""
    """Added to the title."""
    step: int | None = None

    def as_tree(self) -> dict[str, Any]:
        """One schedule's tree, or what a run's ``timeline.json`` holds."""
        if self.step is None:
            return self.charts[0].timeline.as_tree()
        return {"step": self.step, **{chart.label: chart.timeline.as_tree() for chart in self.charts}}


def chosen(settings: tuple[str, ...], options: dict[str, Any]) -> Choice:
    """What a command line asks for.

    Args:
        settings: a run's directory or configuration file, and overrides.
        options: the options that were given, by their names with underscores.

    Raises:
        HexadError: something is wrong with them, or they contradict each other.
    """
    times = _times(options["costs"]) if "costs" in options else None
    sources = [text for text in settings if "=" not in text]
    if len(sources) > 1:
        raise HexadError(
            f"show schedule: found several runs or configurations ({', '.join(sources)}); give one"
        )
    if "file" in options:
        if settings:
            raise HexadError(f"--file: found '{options['file']}' beside {settings[0]}; give one of them")
        _refuse(options, _SETTLED, f"--file {options['file']}")
        schedule = read_schedule(options["file"])
        with blaming(f"--file: {options['file']}"):
            return Choice([_with_times(schedule, times)])
    if sources and Path(sources[0]).is_dir():
        return _of_run(Path(sources[0]), settings, options, times)
    if settings:
        _refuse(options, _SETTLED, sources[0] if sources else "a configuration", overridable=True)
        overrides = [text for text in settings if "=" in text]
        return Choice([_of_config(load_config(sources[0] if sources else None, overrides), times)])
    times = times or _ONES
    return Choice([_with_times(_from_options(options, times), times)])


def _of_run(
    directory: Path, settings: tuple[str, ...], options: dict[str, Any], times: Times | None
) -> Choice:
    """A run's recorded step; where there is none, its schedule as configured."""
    if len(settings) > 1:
        raise HexadError(f"show schedule: found overrides beside the run {directory}, which is as it is")
    _refuse(options, _SETTLED, str(directory))
    if (directory / TIMELINE).is_file():
        _refuse(options, {"costs": ""}, f"{directory}/{TIMELINE}")
        step, charts = read_timeline(directory / TIMELINE)
        return Choice(charts, f", step {step:,}", step)
    if not (directory / "config.yaml").is_file():
        raise HexadError(
            f"{directory}: found neither {TIMELINE} nor config.yaml; is it the run.dir of a run?"
        )
    return Choice([_of_config(load_config(directory / "config.yaml"), times)], " (as configured)")


def _refuse(options: dict[str, Any], settled: dict[str, str], by: str, overridable: bool = False) -> None:
    for name, setting in settled.items():
        if name in options:
            option = f"--{name.replace('_', '-')}"
            instead = f", or write {setting}=..." if overridable else ""
            raise HexadError(f"{option}: found {options[name]}, but {by} settles it; leave it out{instead}")


def _from_options(options: dict[str, Any], times: Times) -> Schedule:
    name = options.get("schedule", "1f1b")
    for option in ("pipeline", "microbatches", "virtual_stages", "group"):
        if options.get(option, 1) < 1:
            raise HexadError(
                f"--{option.replace('_', '-')}: found {options[option]}, expected a whole number from 1"
            )
    if "memory" in options and (name != "auto" or not options["memory"] > 0):
        problem = "expected more than 0" if name == "auto" else f"but {name} needs what it needs; use auto"
        raise HexadError(f"--memory: found {options['memory']:g}, {problem}")
    pipeline = options.get("pipeline", 4)
    virtual = options.get("virtual_stages", 2 if name == "interleaved" else 1)
    with blaming("--schedule" if name not in NAMES else "--virtual-stages"):
        stages_per_rank(name, virtual)
    with blaming("--group" if "group" in options else "--memory" if "memory" in options else "--schedule"):
        return build_schedule(
            name,
            pipeline,
            options.get("microbatches", 2 * pipeline),
            virtual,
            group=options.get("group"),
            costs=lambda placement: _equal(placement, times),
            memory=options.get("memory"),
        )


def _with_times(schedule: Schedule, times: Times | None) -> Chart:
    times = times or _ONES
    words = "F {:g}, B {:g}, W {:g} per rank and microbatch, message {:g}".format(*times)
    return simulated(schedule, _equal(schedule.placement, times), basis=words)


def _equal(placement: tuple[int, ...], times: Times) -> Costs:
    """Costs where each of a rank's stages takes an equal part of its times."""
    stages = Counter(placement)
    parts = [1 / stages[rank] for rank in placement]
    forward, backward, weight = (tuple(time * part for part in parts) for time in times[:3])
    return Costs(forward, backward, weight, transfer=times[3], activation=tuple(parts))


def _times(text: str) -> Times:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4):
        raise HexadError(f"--costs: found '{text}', expected F,B,W,P2P such as 1,1,1,0.1")
    if not all(isfinite(number) and number >= 0 for number in numbers) or not any(numbers[:3]):
        raise HexadError(f"--costs: found '{text}', expected times from 0, and one of F, B and W above 0")
    forward, backward, weight, message = [*numbers, 0.0][:4]
    return forward, backward, weight, message


def _of_config(config: Config, times: Times | None) -> Chart:
    """The schedule that the trainer would run."""
    from hexad.topology.layout import Layout
    from hexad.train.checks import check_config

    from .show import _fewest_ranks

    plan = check_config(config, Layout.from_settings(config.parallel, _fewest_ranks(config.parallel)))
    if times:
        return _with_times(plan.schedule, times)
    words = "times by the stages' arithmetic, F being 1 per rank and microbatch"
    return simulated(plan.schedule, _arithmetic(config, plan), basis=words)


def _arithmetic(config: Config, plan: PipelinePlan) -> Costs:
    """FLOPs as times: forward of a rank's share takes 1 in the mean."""
    from hexad.train.pipeline import model_work, stage_costs

    costs = stage_costs(model_work(config), plan.layers, plan.schedule.pipeline)
    unit = sum(costs.forward) / plan.schedule.pipeline
    forward, backward, weight = (
        tuple(time / unit for time in each) for each in (costs.forward, costs.backward, costs.weight)
    )
    return Costs(forward, backward, weight, activation=costs.activation)
