"""The measured and the planned times of one step's pipeline actions: ``run.dir/timeline.json``."""

from __future__ import annotations

import json
from dataclasses import replace

from hexad.comm import gather_objects
from hexad.engine.engine import Engine
from hexad.parallel.pipeline.simulate import Costs, Timeline, simulate
from hexad.planning.stages import stage_costs


def timeline_text(engine: Engine) -> str:
    """The last recorded step's timeline and the planned one as JSON; the ranks of a pipeline call it
    together."""
    # Clocks of different hosts agree to about a millisecond.
    found = gather_objects(engine.recorded(), engine.mesh.pipeline)
    first = min(begin for begin, _ in found)
    times = [[(begin - first + start, begin - first + end) for start, end in rank] for begin, rank in found]
    measured = Timeline.of(engine.plan.schedule, times)
    planned = simulate(engine.plan.schedule, _planned(engine, measured))
    return json.dumps({"step": engine.step, "planned": planned.as_tree(), "measured": measured.as_tree()})


def _planned(engine: Engine, measured: Timeline) -> Costs:
    """The costs of the plan, scaled so that the mean time of an action equals the measured one."""
    config, plan = engine.config, engine.plan
    costs = stage_costs(config, plan.layers, plan.schedule.pipeline)
    work = _busy(simulate(plan.schedule, costs))
    unit = _busy(measured) / work if work else 0.0

    def scaled(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * unit for value in values)

    return replace(
        costs, forward=scaled(costs.forward), backward=scaled(costs.backward), weight=scaled(costs.weight)
    )


def _busy(timeline: Timeline) -> float:
    return sum(end - start for actions in timeline.times for start, end in actions)
