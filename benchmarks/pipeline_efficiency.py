"""How near the executor comes to the simulator that is fed with the executor's own action times.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/pipeline_efficiency.py \\
        [--schedules 1f1b interleaved zb_h1 zb_v] [--microbatches 8] [--steps 5] [--json FILE]

The ranks are those of one pipeline; the model is the 32M-parameter llama of ``step_time.py``. For every
recorded step the simulator is given each action's own time. Messages cost nothing in the simulation, so that
what they cost in the executor shows.
Printed are the medians over the steps of the seconds from the first action's start to the last one's end,
measured and simulated, and of their ratio; and the most activations each rank held at once, counted and as
validated.
"""

import argparse
import gc
import json
import os
import platform
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from peers.plain_torch import MICRO, Shape
from programs import model_settings

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.parallel.pipeline.schedule import Schedule
from hexad.parallel.pipeline.schedules import NAMES
from hexad.parallel.pipeline.simulate import Costs, Timeline, simulate
from hexad.parallel.pipeline.validate import validate

DEFAULT = ("1f1b", "interleaved", "zb_h1", "zb_v")


@dataclass
class Step:
    """One recorded step: its timeline, and the same schedule simulated with its actions' times."""

    measured: Timeline
    simulated: Timeline


def engine_of(schedule: str, microbatches: int, ranks: int) -> Engine:
    config = load_config(
        {
            "run": {"device": "cpu"},
            "model": model_settings(),
            "data": {"sequence": Shape().sequence},
            "batch": {"micro": MICRO, "global": MICRO * microbatches},
            "parallel": {
                "pipeline": ranks,
                "schedule": schedule,
                "virtual_stages": 2 if schedule == "interleaved" else 1,
            },
            "precision": {"dtype": "fp32"},
        }
    )
    return Engine(config, Mesh.create(Layout.from_settings(config.parallel, ranks), torch.device("cpu")))


def action_seconds(timeline: Timeline) -> dict[str, list[float]]:
    """Of each kind of action: every stage's median time."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for actions, times in zip(timeline.schedule.ranks, timeline.times):
        for action, (start, end) in zip(actions, times):
            seconds[action.kind, action.stage].append(end - start)
    kinds = sorted({kind for kind, _ in seconds})
    stages = range(timeline.schedule.stages)
    return {kind: [median(seconds.get((kind, stage), [0.0])) for stage in stages] for kind in kinds}


def recorded(engine: Engine, batch: list[Microbatch], schedule: Schedule) -> Step:
    dist.barrier()
    engine.train_step(batch, record=True)
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, engine.recorded())
    first = min(begin for begin, _ in steps)
    times = [[(begin - first + start, begin - first + end) for start, end in rank] for begin, rank in steps]
    measured = Timeline.of(schedule, times)
    durations = [[end - start for start, end in rank] for rank in times]
    return Step(measured, simulate(schedule, Costs.uniform(schedule.stages), durations))


def measure(name: str, microbatches: int, steps: int) -> dict[str, Any]:
    world = dist.get_world_size()
    engine = engine_of(name, microbatches, world)
    schedule = engine.plan.schedule
    shape = Shape()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab, (MICRO, shape.sequence + 1), generator=generator)
    batch = [Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())] * microbatches
    done = [recorded(engine, batch, schedule) for _ in range(steps + 1)][1:]
    counted: list[Any] = [None] * world
    dist.all_gather_object(counted, engine.peak_activations)
    return {
        "measured": median(step.measured.makespan for step in done),
        "simulated": median(step.simulated.makespan for step in done),
        "ratio": median(step.measured.makespan / step.simulated.makespan for step in done),
        "bubble": median(step.measured.bubble for step in done),
        "simulated_bubble": median(step.simulated.bubble for step in done),
        "peak_activations": counted,
        "validator": list(validate(schedule).peak_activations),
        "action_seconds": action_seconds(done[-1].measured),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", nargs="+", choices=NAMES, default=DEFAULT)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "microbatches": options.microbatches,
        "schedules": {},
    }
    for name in options.schedules:
        figures = results["schedules"][name] = measure(name, options.microbatches, options.steps)
        if first:
            print(
                f"{name:12s} measured {figures['measured']:6.2f} s, simulated {figures['simulated']:6.2f} s, "
                f"ratio {figures['ratio']:.3f}; "
                f"bubble {figures['bubble']:.3f}, {figures['simulated_bubble']:.3f}; "
                f"activations {figures['peak_activations']}, {figures['validator']}",
                flush=True,
            )
    if first and options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    gc.collect()  # engines are webs of references, and their groups have threads
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
