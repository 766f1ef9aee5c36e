"""A training step's memory on real ranks, beside the plan of the same run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hexad.config import Config
from hexad.dataset.load.microbatch import Microbatch
from hexad.parallel.context.slice import Slicing
from hexad.planning import resolve
from hexad.planning.memory import MemoryPlan, predict
from hexad.topology.layout import Layout

from ..small import Tree, config_of
from .live import Live


@dataclass(frozen=True)
class Found:
    """Of one rank.

    Attributes:
        state: bytes alive between steps, but for buffers that wait in the pool.
        peak: most bytes alive in a step.
        plan: what was predicted.
        sent: bytes in a step, by axis.
    """

    state: int
    peak: int
    plan: MemoryPlan
    sent: dict[str, int]


DEFAULTS: Tree = {
    "run": {"steps": 10, "device": "cpu"},
    "model": {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn_hidden": 352, "vocab": 1000},
    "data": {"sequence": 128},
    "batch": {"micro": 2, "global": 8},
    "precision": {"dtype": "fp32"},
    "parallel": {"bucket_mb": 0.5},
}
"""A run large enough for activations and states to matter."""


def measured_config(**groups: dict[str, Any]) -> Config:
    """The configuration of that run with the settings of ``groups``."""
    return config_of(DEFAULTS, **groups)


def compare_dry_runs(config: Config, measured: Sequence[Found]) -> None:
    """Dry runs of the first, a middle and the last rank against all ranks of a real run: to the byte, but for
    what another rank's thread still holds in every measured step."""
    from hexad.engine.dry.run import dry_run

    world = len(measured)
    resolved = resolve(config, Layout.from_settings(config.parallel, world))
    for rank in sorted({0, world // 2, world - 1}):
        run, of_rank = dry_run(resolved, rank), measured[rank]
        assert run.predicted_sent == run.sent == of_rank.sent, f"rank {rank}"
        assert 0.998 * of_rank.peak <= run.peak <= of_rank.peak, f"rank {rank}"
        assert run.predicted_peak == of_rank.plan.total + of_rank.plan.host


def _pooled(engine: Any) -> int:
    free = engine.gradients._pool._free.values()
    return sum(buffer.nbytes for buffers in free for buffer in buffers)


def measure(config: Config, world: int) -> Found:
    """Run six steps on this rank and watch the last five. A collective's thread releases its tensors a
    little later, in some steps too late: the smallest peak is the one that is needed."""
    from hexad.engine.engine import Engine
    from hexad.topology.mesh import Mesh

    layout = Layout.from_settings(config.parallel, world)
    mesh = Mesh.create(layout, torch.device("cpu"))
    resolved = resolve(config, layout)
    micro, length = config.batch.micro, config.data.sequence
    tokens = torch.arange(micro * length).view(micro, length) % 100
    slicing = Slicing.of(resolved.config.parallel, resolved.config.model)
    isolated = config.data.documents == "isolate"
    documents = tuple(range(0, micro * length + 1, length)) if isolated else None
    microbatch = Microbatch(tokens, tokens, documents).part(
        slicing, mesh.context.rank
    )  # as the loader gives it
    batch = [microbatch] * (config.batch.global_ // micro // mesh.data.size)
    with Live() as live:
        engine = Engine(resolved, mesh)
        engine.train_step(batch)
        state, peaks = live.restart() - _pooled(engine), []
        for _ in range(5):
            live.restart()
            before = mesh.sent_bytes()
            engine.train_step(batch)
            peaks.append(live.peak)
        sent = {axis: size - before[axis] for axis, size in mesh.sent_bytes().items()}
    rank = torch.distributed.get_rank() if world > 1 else 0
    return Found(state, min(peaks), predict(resolved, rank), sent)
