"""One rank of a 70B model with tensor 8, pipeline 8, data 8 and ZeRO 3, without its 511 peers.

Every collective ends at once with numbers of this rank: one copy, on the stream that computes, which takes
the host less than a call of NCCL (the step ``nccl`` measures those). What remains is what the rank itself
needs: the time of its kernels, the time in which they wait for the host, and memory, beside Hexad's
prediction. The rank is in the middle of the pipeline. A dry run (``hexad plan --dry-run``) counts the same
rank's memory and bytes without a GPU, where nothing has values; here kernels run on numbers.

PyTorch's backend ``fake`` leaves results as they were: numbers that are not finite would make Hexad leave out
the update, and a GPU multiplies zeros faster than numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.forwarding import Exchange, Forwarding
from torch import Tensor

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.config import Config
from hexad.config.model import ModelSettings
from hexad.engine.dry.engine import CountingOfOne
from hexad.engine.language import LanguageModel
from hexad.planning import resolve
from hexad.planning.costs import flops_per_token
from hexad.planning.memory import predict
from hexad.topology import mesh as meshes
from hexad.topology.cluster import peak_flops
from hexad.topology.layout import Level, Tree
from hexad.training.pace import collected_by_step

from .device import Bench
from .profile import host_stacks, profiled
from .record import Record

MODEL: dict[str, Any] = {"preset": "llama3-70b"}
TOY: dict[str, Any] = {"layers": 8, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "vocab": 300}
WARM_UP, STEPS, MICROBATCHES = 2, 4, 16
PROFILE = 4.0
"""Seconds that a profile takes."""
TABLES = ("kernels", "host_calls", "host_lines", "host_functions")


def run(record: Record) -> None:
    """For ZeRO 3, and then for ZeRO 1, which gathers nothing within a step; half of the time for each."""
    bench = Bench.of(record.pretend)
    if bench.pretend:
        record.absent("mfu_of_its_layers", "a CPU has no published peak")
    done: list[dict[str, Any]] = []
    for zero, part in ((3, 0.5), (1, 0.0)):
        until = record.left() * part
        row: dict[str, Any] = {"zero": zero}
        with record.attempt(f"zero {zero}"):
            for update in _figures(bench, zero, lambda until=until: record.left() - until):
                for table in TABLES:
                    for line in update.pop(table, []):
                        record.add(table, {"zero": zero, **line})
                row |= update
                record.put("ranks", [*done, row])
        done.append(row)


def _config(bench: Bench, zero: int) -> Config:
    degree = 2 if bench.pretend else 8
    return load_config(
        {
            "run": {"device": bench.device.type, "compile": "none" if bench.pretend else "pointwise"},
            "model": TOY if bench.pretend else MODEL,
            "data": {"sequence": 32 if bench.pretend else 4096},
            "batch": {"micro": 1, "global": degree * MICROBATCHES},
            "parallel": {"tensor": degree, "pipeline": 8, "data": degree, "zero": zero},
            "precision": {"dtype": "bf16"},
            "lr_schedule": {"warmup": 10},
        }
    )


def _figures(bench: Bench, zero: int, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Memory as predicted; milliseconds of a step; kernels and gaps; and, while seconds are ``left``, what
    the host does."""
    config = _config(bench, zero)
    degree, tokens = config.parallel.tensor, config.data.sequence
    layout = Layout.from_settings(config.parallel, degree * 8 * degree)
    rank = next(r for r in range(layout.world) if layout.coordinates(r)["pipeline"] == 4)
    resolved = resolve(config, layout)
    plan = predict(resolved, rank)
    yield {
        "layout": f"tensor {degree}, pipeline 8, data {degree}, rank {rank}",
        "predicted_gib": plan.total / 2**30,
        "at": plan.action,
    }
    ids = torch.randint(300, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    batch = [Microbatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * MICROBATCHES
    if not bench.pretend:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    with _without_peers(layout, rank), collected_by_step() as collect:
        model = LanguageModel(resolved, Mesh.create(layout, bench.device))
        model.counting = CountingOfOne(model.config, model.mesh)
        engine = Engine(model, model.mesh)

        def step() -> None:
            if engine.train_step(batch).skipped:
                raise RuntimeError("the update was left out")
            collect(1)

        for _ in range(WARM_UP):
            begin = time.perf_counter()
            step()
            bench.synchronize()
            yield {"warm_up_ms": 1e3 * (time.perf_counter() - begin)}
        seconds = bench.seconds(step, STEPS, 0)
        layers = sum(len(stage.layers) for stage in engine.stages.values())
        work = _flops(config.model, layers, tokens) * MICROBATCHES / degree
        peak = None if bench.pretend else peak_flops(bench.device, torch.bfloat16)
        yield {
            "layers": layers,
            "step_ms": 1e3 * seconds,
            "mfu_of_its_layers": None if peak is None else work / seconds / peak,
            **(bench.memory() or {"allocated_gib": None}),
        }
        stacks = host_stacks(step, 2)
        yield {
            "samples": stacks["samples"],
            "collector_ms": stacks["collector_ms"],
            "host_lines": stacks["lines"],
            "host_functions": stacks["functions"],
        }
        if left() < PROFILE:
            return
        profile = profiled(bench, step, 1)
    yield {
        "busy_ms": profile["busy_ms"],
        "host_gap_ms": max(0.0, 1e3 * seconds - profile["busy_ms"]),
        "launches": profile["launches"],
        "kinds_ms": profile["kinds_ms"],
        "kernels": profile["kernels"],
        "host_calls": profile["host_calls"],
    }


@contextmanager
def _without_peers(layout: Layout, rank: int) -> Iterator[None]:
    """A world in which only this rank exists."""
    dist.init_process_group("alone", store=dist.HashStore(), rank=rank, world_size=layout.world)
    try:
        with mock.patch.object(meshes, "_make_tree", _tree):
            yield
    finally:
        dist.destroy_process_group()


def _flops(model: ModelSettings, layers: int, tokens: int) -> float:
    """Training FLOPs of so many layers for one sequence, without head."""
    more, less = (
        flops_per_token(model.model_copy(update={"layers": count}), tokens) for count in (layers + 1, 1)
    )
    return (more - less) * tokens


def _tree(rank: int, world: int, timeout: timedelta) -> Tree:
    """Agreements of this rank with itself."""
    return Tree((Level((rank,), 0, None),), 0, timeout)


class Alone(Forwarding):
    """A group of which only this rank exists."""

    name = "alone"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._noise: dict[tuple[int, torch.dtype], Tensor] = {}

    def forward(
        self,
        kind: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        exchange: Exchange,
        peer: int | None = None,
    ) -> _Done:
        """Sums as if the others had zeros, anything else as if they had what this rank has; of a message the
        same normal numbers each time."""
        if not outputs or outputs is inputs:
            return _DONE
        output = outputs[0].detach()
        if not inputs:
            output.view(-1).copy_(self._numbers(output))
        elif kind == "all_gather":
            source = inputs[0].detach()
            own = source.data_ptr() - output.data_ptr()
            if 0 <= own < output.nbytes:
                source = source.clone()
            torch.cat([source.view(-1)] * self.members, out=output.view(-1))  # contiguous, as NCCL writes
        else:
            start = self.place * output.numel() if kind == "reduce_scatter" else 0
            source = inputs[0].detach().view(-1)[start : start + output.numel()]
            if source.data_ptr() != output.data_ptr():
                output.view(-1)[: source.numel()].copy_(source)
        return _DONE

    def _numbers(self, tensor: Tensor) -> Tensor:
        key = tensor.numel(), tensor.dtype
        if key not in self._noise:
            self._noise[key] = torch.randn(tensor.numel(), device=tensor.device).to(tensor.dtype)
        return self._noise[key]

    def shutdown(self) -> None:
        """Nothing is left to do."""
        self._noise.clear()

    abort = shutdown


class _Done:
    """A collective that is over: torch's ``Work``."""

    def wait(self, timeout: Any = None) -> bool:
        """At once: what follows on the stream comes after it."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


_DONE = _Done()

dist.Backend.register_backend(
    "alone", lambda store, rank, size, timeout: Alone(rank, size), devices=["cpu", "cuda"]
)
