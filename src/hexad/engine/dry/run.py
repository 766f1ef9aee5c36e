"""A training step of one rank of a job of any size, on one CPU: its peak memory and what it sends."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hexad.config import Config, ConfigError, HexadError
from hexad.dataset.load.microbatch import Microbatch
from hexad.parallel.context.slice import Slicing
from hexad.parallel.contributions import widening_products
from hexad.parallel.expert.kinds import ANYWHERE, KINDS
from hexad.parallel.pipeline.schedule import Action
from hexad.planning import Resolved
from hexad.planning.memory import MemoryPlan, predict
from hexad.planning.traffic import predicted_traffic
from hexad.topology.mesh import Mesh

from .engine import DryEngine
from .ledger import Ledger
from .tensors import CPU, META, dry_tensors

GPU_UNIT = 512
"""Bytes that PyTorch's allocator for GPUs rounds every tensor up to a multiple of."""
COMPONENTS = ("parameters", "gradients", "master", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class DryRun:
    """Memory and traffic of a rank in one step.

    Attributes:
        rank, world: its global number, and the number of ranks.
        coordinates: its place along every axis.
        device: that is planned for: ``gpu`` or ``cpu``.
        components: bytes alive at the peak, by :data:`COMPONENTS`.
        action: what the rank did at the peak.
        predicted: by :func:`hexad.planning.memory.predict`.
        sent: bytes by axis.
        predicted_sent: by :func:`hexad.planning.traffic.predicted_traffic`.
        seconds: that the dry run took.
        resident: largest resident memory of this process so far, in bytes.
    """

    rank: int
    world: int
    coordinates: dict[str, int]
    device: str
    components: dict[str, int]
    action: str
    predicted: MemoryPlan
    sent: dict[str, int]
    predicted_sent: dict[str, int]
    seconds: float
    resident: int

    @property
    def peak(self) -> int:
        """Bytes alive at the peak, on the device."""
        return sum(self.components.values())

    @property
    def predicted_components(self) -> dict[str, int]:
        """Bytes that the plan has of every component. A CPU's memory holds offloaded state too: the master
        values, and the moments of the optimizer."""
        plan = self.predicted
        sizes = {name: getattr(plan, name) for name in COMPONENTS if name != "activations"}
        sizes["activations"] = sum(plan.activations.values())
        if self.device == "cpu" and plan.host:
            from hexad.optim.schedule import MOMENTS

            sizes["master"] += plan.host // (1 + len(MOMENTS))
            sizes["optimizer"] += plan.host - plan.host // (1 + len(MOMENTS))
        return {name: sizes[name] for name in COMPONENTS}

    @property
    def predicted_peak(self) -> int:
        """Bytes that the plan has in all."""
        return sum(self.predicted_components.values())

    def as_tree(self) -> dict[str, Any]:
        """The report as JSON values."""
        predicted = self.predicted_components
        return {
            "rank": self.rank,
            "world": self.world,
            "coordinates": self.coordinates,
            "device": self.device,
            "memory": {
                **{name: _compared(size, predicted[name]) for name, size in self.components.items()},
                "total": _compared(self.peak, self.predicted_peak),
            },
            "counted_action": self.action,
            "predicted_action": self.predicted.action,
            "sent": {axis: _compared(size, self.predicted_sent[axis]) for axis, size in self.sent.items()},
            "seconds": self.seconds,
            "resident_bytes": self.resident,
        }


def _compared(counted: int, predicted: int) -> dict[str, Any]:
    """Both numbers, and by how many per cent the prediction is above what was counted."""
    difference = 100.0 * (predicted / counted - 1) if counted else None
    return {"predicted_bytes": predicted, "bytes": counted, "difference_percent": difference}


def dry_run(resolved: Resolved, rank: int) -> DryRun:
    """Run a step of one rank with the engine that trains, on tensors without values and without other ranks.

    Two steps are made, and the second is counted: the first one allocates buffers that are kept. Experts have
    an even load on a CPU; on a GPU, where buffers have a static size, the load does not matter.

    Args:
        resolved: of the run. The device is a CPU with ``run.device: cpu``, else a GPU.
        rank: global number.

    Raises:
        ConfigError: what cannot be run without values.
        HexadError: no such rank.
    """
    layout = resolved.layout
    if not 0 <= rank < layout.world:
        raise HexadError(
            f"``rank``: found {rank}, expected 0 to {layout.world - 1} of a world of {layout.world}"
        )
    check_dry(resolved.config)
    begin = time.perf_counter()
    cpu = resolved.config.run.device == "cpu"
    ledger, names = Ledger(1 if cpu else GPU_UNIT), ["begin"]
    config = _even(resolved.config) if cpu else resolved.config
    resolved = Resolved(config, layout, resolved.plan)

    def began(action: Action | None) -> None:
        names.append("update" if action is None else str(action))
        ledger.begin_action()

    if cpu:
        widening_products(CPU)  # which is tried once
    microbatches = _microbatches(config, layout.context, layout.coordinates(rank)["context"])
    with dry_tensors(ledger, cpu):
        mesh = Mesh.of_one(layout, rank, CPU if cpu else META)
        engine = DryEngine(resolved, mesh, began)
        for tensor, kind in _state(engine):
            ledger.mark(tensor, kind)
        engine.train_step(microbatches)
        ledger.begin_step("buffers")
        del names[1:]
        before = mesh.sent_bytes()
        engine.train_step(microbatches)
        sent = {axis: size - before[axis] for axis, size in mesh.sent_bytes().items()}
        action = names[ledger.at]
        counted = ledger.at_peak("activations", "buffers", action.startswith("F"))
    return DryRun(
        rank=rank,
        world=layout.world,
        coordinates=layout.coordinates(rank),
        device="cpu" if cpu else "gpu",
        components={name: counted[name] for name in COMPONENTS},
        action=action,
        predicted=predict(resolved, rank),
        sent=sent,
        predicted_sent=predicted_traffic(resolved, rank),
        seconds=time.perf_counter() - begin,
        resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    )


def check_dry(config: Config) -> None:
    """Refuse what cannot be run without values.

    Raises:
        ConfigError: names the setting and the fix.
    """
    moe, parallel, device = config.model.moe, config.parallel, config.run.device
    if config.run.compile == "full":
        raise ConfigError(
            "run.compile", "found full, whose graphs cannot be compiled in a dry run; use pointwise"
        )
    if moe is None:
        return
    divided = parallel.expert * parallel.expert_tensor > 1
    if divided and moe.dispatcher != "auto" and KINDS[moe.dispatcher].gpu:
        raise ConfigError(
            "model.moe.dispatcher",
            f"found {moe.dispatcher}, whose library allocates memory that a dry run cannot see; use "
            f"{' or '.join(ANYWHERE)}",
        )
    if device != "cpu" and config.precision.dtype not in ("bf16", "fp8"):
        raise ConfigError(
            "precision.dtype",
            f"found {config.precision.dtype} with experts on a GPU: products are not grouped in this format "
            "and the host reads the experts' loads, which a dry run does not have; use bf16, fp8 or "
            "run.device cpu",
        )


def _even(config: Config) -> Config:
    """The configuration with an even load of all experts."""
    if config.model.moe is None:
        return config
    moe = config.model.moe.model_copy(update={"forced": True})
    return config.model_copy(update={"model": config.model.model_copy(update={"moe": moe})})


def _microbatches(config: Config, contexts: int, context_rank: int) -> list[Microbatch]:
    """A step's microbatches of a data rank: sequences of one document each, as a context rank holds them."""
    micro, length = config.batch.micro, config.data.sequence
    tokens = (torch.arange(micro * length) % min(int(config.model.vocab), 100)).view(micro, length)
    isolated = config.data.documents == "isolate"
    documents = tuple(range(0, micro * length + 1, length)) if isolated else None
    microbatch = Microbatch(tokens, tokens, documents)
    if contexts > 1:
        microbatch = microbatch.part(Slicing.of(config.parallel, config.model), context_rank)
    return [microbatch] * (config.batch.global_ // micro // int(config.parallel.data))


def _state(engine: DryEngine) -> Iterator[tuple[Tensor, str]]:
    """The memory that an engine holds all the time, by kind. Of memory with two uses the first one counts."""
    kinds: dict[Tensor, str] = {}
    for bucket in engine.buckets:
        if bucket.plan.resident or bucket.plan.frozen:
            kinds.setdefault(bucket.held[0], "parameters")
        elif bucket.source is not bucket.master:
            kinds.setdefault(bucket.source, "parameters")
        if bucket.plan.frozen:
            continue
        if not bucket.in_use:
            kinds.setdefault(bucket.master, "master")
        kinds.setdefault(bucket.gradient, "gradients")
    for bucket in engine.trained:
        for _, values in engine.optimizer.rule.state(bucket):
            kinds.setdefault(values, "optimizer")
    yield from kinds.items()
