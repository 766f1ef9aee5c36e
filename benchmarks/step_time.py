"""Step time and peak memory of Hexad beside plain PyTorch, in one run: the 32M-parameter llama on CPUs.

    python benchmarks/step_time.py [--modes single data2 tensor2 tensor2_sequence] [--steps 7] [--json FILE]
    python benchmarks/step_time.py --modes pipeline2_1f1b tensor2_pipeline2_1f1b pipeline2_best

For every mode, both programs' processes are started and hold the same weights; then they take turns, a step
each, while the other's processes sleep. Printed are the medians of the wall seconds of a step (the slowest
rank), of the CPU seconds (all ranks), the largest resident set of a rank, and their ratios (Hexad / PyTorch).

Both run the same pipeline schedule on the same stages, save in modes that end in ``_best`` and ``_auto``:
there Hexad's ZB-V, or the schedule that it finds itself, runs beside PyTorch's 1F1B.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

PROGRAMS = ("hexad", "torch")
RANKS = {"single": 1, "data2": 2, "tensor2": 2, "tensor2_sequence": 2}
SCHEDULES = {
    "1f1b": ("1f1b", "1f1b"),
    "interleaved": ("interleaved", "interleaved"),
    "zb_v": ("zb_v", "zb_v"),
    "best": ("zb_v", "1f1b"),
    "auto": ("auto", "1f1b"),
}
"""Hexad's schedule and PyTorch's, by the end of a pipeline mode's name."""
PLAIN = tuple(RANKS)
RANKS |= {f"pipeline2_{end}": 2 for end in SCHEDULES} | {f"tensor2_pipeline2_{end}": 4 for end in SCHEDULES}


def model_settings() -> dict[str, int]:
    """Hexad's settings for the peers' model."""
    from peers.plain_torch import Shape

    shape = Shape()
    names = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
    return {name: getattr(shape, name) for name in names}


def hexad_step(mode: str, dtype: str) -> Callable[[], float]:
    """A step of Hexad on the peer's weights and tokens."""
    import torch
    from peers.plain_torch import GLOBAL, MICRO, Shape, random_tokens, reference_weights

    from hexad import Engine, Layout, Mesh, Microbatch, load_config
    from hexad.model.families import hugging_face_tensors

    shape = Shape()
    config = load_config(
        {
            "run": {"device": "cpu"},
            "model": model_settings(),
            "data": {"sequence": shape.sequence},
            "batch": {"micro": MICRO, "global": GLOBAL},
            "parallel": parallel_settings(mode),
            "precision": {"dtype": dtype},
            "optimizer": {"lr": 3e-4, "clip": 0.0},
            "lr_schedule": {"kind": "constant", "warmup": 0},
        }
    )
    world = RANKS[mode]
    mesh = Mesh.create(Layout.from_settings(config.parallel, world), torch.device("cpu"))
    engine = Engine(config, mesh)
    state = reference_weights(shape)
    table = hugging_face_tensors(config.model)
    engine.load_weights({ours: place.read(state) for ours, place in table.items()})
    tokens = random_tokens(shape)[0]
    rows = range(mesh.data.rank * MICRO, GLOBAL, MICRO * mesh.data.size)
    batch = [
        Microbatch(tokens[row : row + MICRO, :-1].contiguous(), tokens[row : row + MICRO, 1:].contiguous())
        for row in rows
    ]
    return lambda: engine.train_step(batch).loss


def parallel_settings(mode: str) -> dict[str, Any]:
    """Hexad's ``parallel`` settings for a mode."""
    settings = {"tensor": 2 if "tensor" in mode else 1, "sequence": mode.endswith("sequence")}
    if "pipeline" not in mode:
        return settings
    from peers.torch_pipelining import PIPELINE, SPLITS

    schedule = SCHEDULES[mode.split("pipeline2_")[1]][0]
    virtual_stages = 2 if schedule in ("interleaved", "zb_v") else 1
    # How many stages there are, `auto` finds itself.
    split = "cost" if schedule == "auto" else list(SPLITS[PIPELINE * virtual_stages])
    pipeline = {"pipeline": PIPELINE, "virtual_stages": virtual_stages, "schedule": schedule, "split": split}
    return settings | pipeline


def torch_step(mode: str, dtype: str) -> Callable[[], float | None]:
    """A step of plain PyTorch. With a pipeline, ranks without the last stage know no loss."""
    import torch
    from peers.plain_torch import Shape, make_step, random_tokens

    tokens = random_tokens(Shape())[0]
    step: Callable[[], float | None]
    if "pipeline" in mode:
        from peers.torch_pipelining import make_step as make_pipeline_step

        layout, _, end = mode.rpartition("pipeline2_")
        step = make_pipeline_step(f"{layout}pipeline2_{SCHEDULES[end][1]}", tokens)
    else:
        step = make_step(mode, tokens)
    if dtype == "fp32":
        return step

    def in_bf16() -> float | None:
        with torch.autocast("cpu", torch.bfloat16):
            return step()

    return in_bf16


def worker(program: str, mode: str, dtype: str) -> None:
    """One rank: a step per line of stdin, a JSON line per step on stdout."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if RANKS[mode] > 1:
        dist.init_process_group("gloo")
    step: Callable[[], float | None] = (hexad_step if program == "hexad" else torch_step)(mode, dtype)
    print("ready", flush=True)
    for _ in sys.stdin:
        if RANKS[mode] > 1:
            dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        figures = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": loss}
        figures["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(figures), flush=True)


class Program:
    """The ranks of one program, waiting for their turns."""

    def __init__(self, program: str, mode: str, dtype: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = RANKS[mode]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", program, mode, dtype],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank in range(world)
        ]
        for rank in self.ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n", "a rank did not start"
        self.steps: list[list[dict[str, Any]]] = []

    def step(self) -> None:
        """Let all ranks make one step."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        self.steps.append([json.loads(rank.stdout.readline()) for rank in self.ranks if rank.stdout])

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.communicate()

    def figures(self) -> dict[str, float]:
        """Medians over all steps but the first."""
        steps = self.steps[1:]
        return {
            "step_seconds": median(max(rank["wall"] for rank in step) for step in steps),
            "cpu_seconds": median(sum(rank["cpu"] for rank in step) for step in steps),
            "peak_rss_mb": max(rank["rss"] for rank in steps[-1]),
            "first_loss": _loss(self.steps[0]),
            "last_loss": _loss(self.steps[-1]),
        }


def _loss(step: list[dict[str, Any]]) -> float:
    """Of the first rank that knows it."""
    return next(rank["loss"] for rank in step if rank["loss"] is not None)


def compare(mode: str, steps: int, dtype: str) -> dict[str, Any]:
    """Both programs in turns."""
    programs = {name: Program(name, mode, dtype) for name in PROGRAMS}
    for index in range(steps + 1):
        for name in PROGRAMS if index % 2 else reversed(PROGRAMS):
            programs[name].step()
    result: dict[str, Any] = {name: program.figures() for name, program in programs.items()}
    for program in programs.values():
        program.close()
    names = ("step_seconds", "cpu_seconds", "peak_rss_mb")
    result["ratio"] = {name: result["hexad"][name] / result["torch"][name] for name in names}
    # The median of the ratios of neighbouring steps is steadier than the ratio of medians.
    pairs = zip(programs["hexad"].steps[1:], programs["torch"].steps[1:])
    result["ratio"]["paired"] = median(
        max(rank["wall"] for rank in ours) / max(rank["wall"] for rank in theirs) for ours, theirs in pairs
    )
    return result


def main() -> None:
    """Compare the modes asked for; a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=RANKS, default=PLAIN)
    parser.add_argument("--steps", type=int, default=7, help="timed steps per program and mode")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    import torch

    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "dtype": options.dtype,
        "steps": options.steps,
        "modes": {},
    }
    columns = ("wall s", "torch", "ratio", "paired", "CPU", "MB", "torch", "loss", "torch")
    print(f"{'mode':29s}" + "".join(f"{name:>9s}" for name in columns))
    for mode in options.modes:
        found = results["modes"][mode] = compare(mode, options.steps, options.dtype)
        ours, theirs, ratio = found["hexad"], found["torch"], found["ratio"]
        seconds = (ours["step_seconds"], theirs["step_seconds"])
        ratios = (ratio["step_seconds"], ratio["paired"], ratio["cpu_seconds"])
        memory = (ours["peak_rss_mb"], theirs["peak_rss_mb"])
        losses = (ours["first_loss"], theirs["first_loss"])
        line = "".join(f"{value:9.2f}" for value in (*seconds, *ratios))
        line += "".join(f"{value:9.0f}" for value in memory) + "".join(f"{value:9.5f}" for value in losses)
        print(f"{mode:29s}{line}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
