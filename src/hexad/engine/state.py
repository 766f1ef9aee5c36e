"""The state of the modules that a rank trains: buckets, gradients and optimizer state, its weights, and the
host's free memory, returned to the system when it has grown."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hexad.checkpoint.hugging_face.weights import WeightSource
from hexad.checkpoint.tensor_file import Chunk
from hexad.comm import agreed, streams
from hexad.config import HexadError
from hexad.config.schema import PrecisionSettings
from hexad.model.transformer import DTYPES
from hexad.optim.optimizer import AdamW, BucketOptimizer, Rule
from hexad.parallel.data.buckets import Bucket, BufferPool, Formats, StateSharding, make_buckets
from hexad.parallel.data.gatherer import ParameterGatherer
from hexad.parallel.data.gradients import Gradients
from hexad.parallel.data.replicas import Replicas
from hexad.parallel.rectangle import Rectangle

from .language import compiles
from .modules import Facts, Modules
from .workload import Workload


def formats(precision: PrecisionSettings) -> Formats:
    """The number formats of parameters, gradients and master values."""
    parameters = DTYPES[precision.dtype]
    master = torch.float64 if parameters == torch.float64 else torch.float32
    gradients = torch.bfloat16 if precision.accumulate == "bf16" else master
    reduced = torch.bfloat16 if precision.reduce == "bf16" else master
    return Formats(parameters, gradients, reduced, master)


class State:
    """The parameters of modules in buckets, with their gradients and optimizer, on this rank.

    Args:
        workload: whose stages these are.
        training: False for evaluation only.
        optimizer: see :class:`~hexad.engine.engine.Engine`.

    Attributes:
        workload, config, mesh: of these stages.
        stages: of this rank, by number.
        modules: what the stages hold.
        sharding: how ZeRO shards the buckets of each grid.
        buckets: all of them; ``trained``: those with gradients.
        gradients: of the trained buckets.
        gatherer: of parameters that are sharded.
        optimizer: of the trained buckets.
    """

    def __init__(
        self,
        workload: Workload,
        training: bool,
        optimizer: torch.optim.Optimizer | Callable[[Mapping[int, nn.Module]], Any] | None = None,
    ) -> None:
        self.workload, self.training = workload, training
        self.plan, self.config, self.mesh = workload.plan, workload.config, workload.mesh
        self.stages = stages = workload.stages(training)
        config, mesh, manners = self.config, self.mesh, workload.manners
        rule = optimizer
        if rule is not None and not isinstance(rule, torch.optim.Optimizer):
            rule = rule(stages)
        parallel, owners = config.parallel, self.plan.schedule.placement
        groups = None if rule is None else rule.param_groups
        known = self._known()
        self.modules = Modules.agreed(stages, owners, mesh, training, groups, workload.ties, known)
        # In an order that is the same on all ranks: each makes the same process groups.
        self.sharding = {
            grid: StateSharding.create(parallel.zero, parallel.replicas, mesh, grid)
            for grid in self.modules.grids
        }
        tied = {
            name: mesh.some(mesh.pipeline, *(owners[stage] for stage in stages))
            for name, stages in self.modules.ties.items()
        }
        kinds, limit = formats(config.precision), float(parallel.bucket_mb) * 2**20
        self.modules.broadcast_untrained(kinds.parameters)
        self.modules.broadcast_ties(tied)
        self.buckets = make_buckets(self.modules.held, limit, kinds, parallel.zero, self.sharding)
        self.trained = [bucket for bucket in self.buckets if not bucket.plan.frozen]
        for bucket in self.buckets:
            copies = (
                mesh.gradient_axis(bucket.traits.grid),
                *self.sharding[bucket.traits.grid].copies(bucket.traits),
            )
            self.modules.broadcast((m.parameter for m in bucket.members if m.given), *copies)
            bucket.allocate(kinds, config.memory.offload == "optimizer")
        pool = BufferPool(mesh.device)
        factor = 1 / mesh.data.size if manners.averages else 1.0
        self.gradients = Gradients(
            *(self.trained, self.sharding, mesh.axes, tied, pool, kinds.reduced, manners.extends, factor)
        )
        hooks, views = config.run.compile != "full", not workload.configured
        self.gatherer = ParameterGatherer(stages, self.buckets, self.sharding, pool, hooks, views)
        norm = torch.empty(0, dtype=kinds.master, device=mesh.device)
        axes = mesh.tensor, mesh.pipeline, mesh.gradient_axis()
        self.optimizer = BucketOptimizer(
            self.trained,
            self._rule(rule),
            config.optimizer.clip,
            self.sharding,
            mesh.pipeline,
            norm,
            axes,
            manners.clip_epsilon,
        )
        self.replicas = Replicas(self.buckets, self.sharding, tied, mesh.world)

    def _known(self) -> Facts | None:
        """Facts about other ranks' stages, where these do not exist (a dry run)."""
        return None

    def _rule(self, optimizer: Any) -> Rule:
        if optimizer is None:
            device = self.mesh.device
            compiled = self.workload.configured and compiles(self.config.run, device)
            return AdamW(self.trained, self.config.optimizer, device, compiled)
        from hexad.optim.torch_optimizer import TorchOptimizer  # torch.optim imports the compiler

        return TorchOptimizer(optimizer, self.trained)

    def initialise(self, frozen: bool = True) -> None:
        """Set parameters and optimizer to what a run begins with; without ``frozen`` only what is trained."""
        streams.of(self.mesh.device).join(streams.SAVING)
        for bucket in self.buckets if frozen else self.trained:
            bucket.initialise(self.config.run.seed)
        for bucket in self.trained:
            for _, values in self.optimizer.rule.state(bucket):
                values.zero_()  # a damaged checkpoint may have been read in part

    def chunks(self) -> list[Chunk]:
        """This rank's shard of the state that a checkpoint holds, as views: master weights, optimizer state,
        and what plain modules have besides, buffers and frozen parameters. With ``model.lora`` weights that
        nothing changes are left out: a checkpoint refers to where they came from."""
        adapters = self.workload.configured and self.config.model.lora is not None
        chunks = [] if adapters else self.fixed()
        chunks += self._weights(bucket for bucket in self.buckets if not bucket.plan.fixed)
        for bucket in self.trained:
            for kind, tensor in self.optimizer.rule.state(bucket):
                chunks += self._pieces(bucket, kind, tensor)
        return chunks + self.modules.chunks()

    def _weights(self, buckets: Iterable[Bucket]) -> list[Chunk]:
        """This rank's shard of the master weights in some of the buckets."""
        # Whoever overwrites them must not be overwritten by a gather under way, nor overwrite what is saved.
        self.gatherer.settle()
        streams.of(self.mesh.device).join(streams.SAVING)
        return [chunk for bucket in buckets for chunk in self._pieces(bucket, "model", bucket.master)]

    def _pieces(self, bucket: Bucket, kind: str, tensor: Tensor) -> list[Chunk]:
        """A tensor like a bucket's master as chunks. Frozen weights are rounded to the model's format."""
        traits = bucket.traits
        # A copy of the embedding's weight is written by the stage with the embedding.
        holder = None if traits.copy else self.sharding[traits.grid].holder(traits)
        # Users may change the weights of their modules at any time.
        steady = self.workload.configured or not (tensor is bucket.master and bucket.in_use)
        return [
            Chunk(rectangle.named(f"{kind}.{rectangle.name}"), values, holder, bucket.plan.frozen, steady)
            for rectangle, values in bucket.pieces(tensor)
        ]

    def check_replicas(self) -> None:
        """Compare the weights of ranks that should hold the same; all ranks together.

        Raises:
            AgreedError: a weight differs, naming it and the ranks.
        """
        self.gatherer.settle()
        self.replicas.check()

    def weights(self, adapters: bool = False) -> list[Chunk]:
        """This rank's shard of the model's weights, as views: of master weights, and of frozen ones; those of
        ``adapters`` (``model.lora``) if asked for."""
        buckets = [bucket for bucket in self.buckets if adapters or not bucket.adapter]
        return self._weights(buckets) + self.modules.chunks()

    def published(self) -> list[tuple[Rectangle, Tensor]]:
        """This rank's weights in the form that the modules compute with, as views: complete ones of its
        stages, or in ZeRO 3 its shard of these, which may be in the format of the master values."""
        self.gatherer.settle()
        return [
            (rectangle, values)
            for bucket in self.buckets
            for rectangle, _, values in bucket.weights(*bucket.held)
        ]

    def fixed(self) -> list[Chunk]:
        """This rank's shard of the weights that nothing changes, as views."""
        return self._weights(bucket for bucket in self.buckets if bucket.plan.fixed)

    @torch.no_grad()
    def load_weights(self, source: WeightSource) -> None:
        """Set the weights (their masters, in 16-bit runs), all ranks together: each reads what it holds.
        Optimizer state and progress stay as they are.

        Raises:
            AgreedError: what the source raised on any rank.
        """
        agreed(lambda: source.fill(self.weights()), self.mesh.world)
        self.publish()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Make the values of all parameters of this rank's stages complete and current while inside, to be
        read; all ranks together. Outside, reading a parameter that is being gathered waits for it, and
        reading one that is sharded (ZeRO 3) is an error."""
        self.gatherer.settle()
        for bucket in self.buckets:
            self.gatherer.acquire(bucket)
        try:
            yield
        finally:
            for bucket in self.buckets:
                self.gatherer.release(bucket)

    def release(self, device: torch.device, gather: bool = True) -> None:
        """Make the modules plain again: parameters with complete values and memory of their own on a device,
        without hooks. Afterwards :meth:`chunks` and :meth:`progress` can be saved, and nothing else done.

        Args:
            device: of the parameters and the master values.
            gather: all ranks do this together. Otherwise nothing is gathered or moved: parameters that are
                sharded are left without values. After an error the other ranks may be gone.
        """
        for bucket in self.buckets:
            if gather:
                self.gatherer.acquire(bucket)
                bucket.give_back(device)
            else:
                bucket.unguard()
        self.gatherer.unhook()
        self.gradients.detach()

    def state_dict(self, exclude_frozen: bool = False, first_only: bool = False) -> dict[str, Tensor]:
        """The modules' ``state_dict``, complete and current, on the host of every rank; all ranks together.

        Args:
            exclude_frozen: leave out parameters that are not trained.
            first_only: nothing on other ranks than the first, whose hosts hold no copy.

        Returns:
            tensors by name, in the format that the modules compute in.

        Raises:
            HexadError: with pipeline or expert ranks, none of which has complete modules, or with tensor
                ranks and modules that :func:`hexad.parallelize` has not divided.
        """
        mesh, layout = self.mesh, self.mesh.layout
        divided = all(member.given for bucket in self.buckets for member in bucket.members)
        if (1 if divided else layout.tensor) * layout.pipeline * layout.expert > 1:
            raise HexadError(
                f"state_dict: found {layout.tensor} tensor, {layout.pipeline} pipeline and {layout.expert} "
                "expert ranks, each with a part of the model; save a checkpoint, and load or export it "
                "without these"
            )
        keeps = not (first_only and mesh.rank)
        if layout.tensor > 1:
            return self._of_divided(exclude_frozen, keeps)
        self.gatherer.settle()
        values: dict[Tensor, Tensor] = {}
        for bucket in self.buckets:
            self.gatherer.acquire(bucket)
            for declared in bucket.members if keeps else ():
                values[declared.parameter] = declared.parameter.detach().to("cpu", copy=True)
            self.gatherer.release(bucket)
        items = [pair for stage in self.stages.values() for pair in stage.state_dict(keep_vars=True).items()]
        return {
            name: values[value] if value in values else value.detach().to("cpu", copy=True)
            for name, value in (items if keeps else ())
            if not (exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad)
        }

    def _of_divided(self, exclude_frozen: bool, keeps: bool) -> dict[str, Tensor]:
        """The state dict of sharded modules, which gather the shards of the tensor ranks themselves."""
        frozen = {
            name
            for stage in self.stages.values()
            for name, parameter in stage.named_parameters()
            if not parameter.requires_grad
        }
        with self.gathered():
            items = [pair for stage in self.stages.values() for pair in stage.state_dict().items()]
            return {
                name: value.detach().to("cpu", copy=True)
                for name, value in (items if keeps else ())
                if not (exclude_frozen and name in frozen)
            }

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the values of the master weights, after :meth:`chunks` have been overwritten."""
        for bucket in self.buckets:
            self.gatherer.publish(bucket)
        self.gatherer.settle()


GROWTH = 1.05
"""Resident memory that is tolerated, over that of a step which began with nothing free."""


class Heap:
    """Keeps what a step frees for the next one, and gives back what it does not need, where the C library can
    (glibc's ``mallopt`` and ``malloc_trim``).

    By itself glibc returns the free end of the heap to the system several times in a step, and gets it back,
    page fault by page fault: for a ResNet whose gradients are freed one by one, a tenth of a step. But a step
    leaves small blocks that stay among large ones that are free: without this a process's resident memory
    grows from step to step to about half as much again as it needs. What is given back costs page faults when
    the next step uses it again: 3 to 5 % of a step of ``benchmarks/deepspeed_interface.py``. So it is given
    back only when resident memory has grown by :data:`GROWTH`. Blocks mapped one by one
    (``mallopt``) take less memory still, but a fifth more time.
    """

    def __init__(self) -> None:
        keep_free()
        self._needed: int | None = None  # bytes resident after a step that began with nothing free
        self._trimmed = False

    def step_ended(self) -> bool:
        """Return free memory to the system if there is too much; returns whether memory was trimmed."""
        bytes_resident = resident()
        if self._trimmed:
            self._needed = bytes_resident
        self._trimmed = self._needed is None or bytes_resident > GROWTH * self._needed
        if self._trimmed:
            give_back()
        return self._trimmed


def keep_free() -> None:
    """Give nothing back to the system before :func:`give_back`, but blocks of 32 MiB and more, which are
    mapped one by one: glibc does that from 128 KiB on, but raises the limit to 32 MiB as they are freed."""
    trim_threshold, mmap_threshold = -1, -3  # as in malloc.h
    with suppress(AttributeError, OSError, TypeError):  # another C library
        of_process = ctypes.CDLL(None)
        of_process.mallopt(mmap_threshold, 32 * 2**20)
        of_process.mallopt(trim_threshold, -1)


def give_back() -> None:
    """Give back what is free."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of this process in memory, without those of files; 0 where that cannot be read."""
    try:
        _, everything, files, *_ = map(int, Path("/proc/self/statm").read_bytes().split())
        return (everything - files) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
