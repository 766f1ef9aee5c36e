"""One training step: the only place where it happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hexad.checkpoint.chunks import Chunk
from hexad.checkpoint.hugging_face import WeightSource
from hexad.comm import Pending, agreed, all_reduce, all_reduce_async
from hexad.config import Config, ConfigError, HexadError
from hexad.config.schema import ModelSettings, PrecisionSettings
from hexad.dataset.microbatch import Microbatch
from hexad.model.dropout import Draws
from hexad.model.recompute import Recompute
from hexad.model.transformer import DTYPES, Transformer, build_stages
from hexad.optim.adamw import BucketAdamW, NormAxes
from hexad.optim.scaling import LossScaler
from hexad.optim.schedule import learning_rate
from hexad.parallel.data import (
    Bucket,
    BufferPool,
    Formats,
    GradientReducer,
    ParameterGatherer,
    StateSharding,
    make_buckets,
)
from hexad.parallel.pipeline.executor import Executor
from hexad.parallel.pipeline.schedule import forward_schedule
from hexad.parallel.sharding import Placement
from hexad.parallel.slot import ProductQueue
from hexad.topology.mesh import Axis, Mesh

from .checks import check_config
from .faults import Fault, FaultGuard
from .pipeline import training_schedule


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        step: its number, counted from 1.
        loss: mean cross-entropy per target token over the global batch before the update, in nats.
        grad_norm: global gradient norm before clipping.
        lr: learning rate applied.
        targets: target tokens in the global batch.
        skipped: the gradient was not finite, or the loss a spike, and nothing was updated.
        loss_scale: what the loss was multiplied by in the backward pass.
        fault: why it was skipped; None where only the loss scale was too large.
        limit: the largest loss that would have been no spike; None without a limit.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    targets: int
    skipped: bool
    loss_scale: float
    fault: Fault | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Task:
    """What the pipeline's stages are given of one microbatch.

    Attributes:
        microbatch: on the device.
        seed: what the loss's sum is multiplied by before it is differentiated; None for evaluation.
        draws: of the random numbers of dropout; None for evaluation.
    """

    microbatch: Microbatch
    seed: float | None = None
    draws: Draws | None = None


def formats(precision: PrecisionSettings) -> Formats:
    """The number formats of parameters, gradients and master values."""
    parameters = DTYPES[precision.dtype]
    master = torch.float64 if parameters == torch.float64 else torch.float32
    return Formats(parameters, torch.bfloat16 if precision.reduce == "bf16" else master, master)


def with_positions(config: Config) -> ModelSettings:
    """The model settings with ``max_positions: auto`` resolved to ``data.sequence``."""
    if config.model.max_positions != "auto":
        return config.model
    return config.model.model_copy(update={"max_positions": config.data.sequence})


def placement(config: Config, tensor: Axis, device: torch.device) -> Placement:
    """How the model's layers hold their shares for training."""
    sequence = config.parallel.sequence and tensor.size > 1
    dtype = config.precision.dtype
    return Placement(tensor, sequence, DTYPES[dtype], device, deferred=True, fp8=dtype == "fp8")


class Engine:
    """A model with its gradients and optimizer on this rank's share of the mesh.

    Args:
        config: resolved; ``model.vocab`` must be a number.
        mesh: from :func:`hexad.launch`.

    Attributes:
        step: steps made so far.
        updates: those of them that were not skipped.
        samples: sequences consumed so far.
        scaler: of the loss.
        guard: of the losses that count.

    Raises:
        ConfigError: settings that do not fit each other or the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.plan = plan = check_config(config, mesh.layout)
        if config.model.vocab == "auto":
            raise ConfigError(
                "model.vocab", "found 'auto', expected a number: the tokenizer's vocabulary size"
            )
        self.config = config
        self.mesh = mesh
        self.step = self.updates = self.samples = 0
        place = placement(config, mesh.tensor, mesh.device)
        owners = plan.schedule.placement
        recompute = Recompute.from_settings(config.memory)
        self.stages = build_stages(
            with_positions(config), place, plan.layers, owners, mesh.pipeline.rank, recompute
        )
        parallel = config.parallel
        self.sharding = StateSharding.create(parallel.zero, parallel.replicas, mesh)
        self.buckets = self._allocated(formats(config.precision))
        tied = Axis("pipeline")
        if config.model.tied_embeddings:
            tied = mesh.pair(mesh.pipeline, owners[0], owners[-1])
        self._products = ProductQueue()
        pool = BufferPool(mesh.device)
        self.reducer = GradientReducer(self.buckets, self.sharding, mesh.tensor, tied, self._products, pool)
        self.gatherer = ParameterGatherer(
            self.stages, self.buckets, self.sharding, pool, hooks=not config.run.compile
        )
        axes = NormAxes(mesh.tensor, self.sharding.shards, mesh.pipeline)
        self.optimizer = BucketAdamW(self.buckets, config.optimizer, axes)
        self.scaler = LossScaler(config.precision)
        self.guard = FaultGuard(config.faults)
        self._recorded: tuple[float, list[tuple[float, float]]] | None = None
        self._executors: dict[tuple[bool, int], Executor[Task]] = {}
        if config.run.compile:
            for stage in self.stages.values():
                for layer in stage.layers.values():
                    layer.compile()

    def _allocated(self, formats: Formats) -> list[Bucket]:
        """This rank's parameters in buckets, with their initial values."""
        config, sharding = self.config, self.sharding
        stage, shards = config.parallel.zero, sharding.shards
        limit = config.parallel.bucket_mb * 2**20
        buckets = make_buckets(self.stages, limit, formats, stage, shards.size, shards.rank)
        for bucket in buckets:
            bucket.allocate(formats, stage, config.memory.offload == "optimizer", config.run.seed)
        return buckets

    def train_step(self, microbatches: Sequence[Microbatch], record: bool = False) -> StepResult:
        """Accumulate this data rank's microbatches, reduce, clip and update.

        Every rank of the mesh calls this together with the same number of microbatches; tensor and pipeline
        ranks of one data rank pass the same ones. Microbatch ``i`` of data rank ``r`` of ``D`` holds the
        sequences from number ``(i * D + r) * rows`` on of the global batch, as the loader hands them out:
        dropout is drawn by that number. With ``record`` the pipeline's actions are timed, see
        :meth:`recorded`.

        Raises:
            HexadError: no microbatch, no target token, different numbers of microbatches, or token ids
                outside the vocabulary.
        """
        self.mesh.trace.step = self.step + 1
        counting = self._count(microbatches)
        executor = self._executor(len(microbatches), training=True)
        if self.config.run.compile:
            self.gatherer.settle()
        placed = [self._placed(microbatch) for microbatch in microbatches]
        self.reducer.begin(len(placed))
        # Every rank looks at the counts before any waits for another stage, so that all refuse them alike.
        targets = self._targets(counting.wait())
        scale = self.scaler.scale
        seed = scale / targets
        tasks = [Task(m, seed, self._draws(index, m)) for index, m in enumerate(placed)]
        total = executor.run(tasks, seed, record)
        if record:
            self._recorded = (executor.began, executor.times)
        total = total if total is not None else torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        loss = all_reduce_async(total, self.mesh.data)
        self.reducer.finish()
        loss = all_reduce_async(loss.wait(), self.mesh.pipeline)
        schedule, peak = self.config.lr_schedule, self.config.optimizer.lr
        lr = learning_rate(schedule, peak, self.config.run.steps, self.step + 1)
        limit = self.guard.limit
        veto = None if limit is None else self._veto(loss, limit * targets)
        norm = self.optimizer.step(lr, scale, self.gatherer.publish, veto)
        finite = math.isfinite(norm)
        spike = finite and veto is not None and bool(veto.wait())
        self.scaler.update(not finite)
        self.step += 1
        self.updates += finite and not spike
        sequences = sum(microbatch.tokens.shape[0] for microbatch in placed)
        self.samples += sequences * self.mesh.data.size
        mean = float(loss.wait()) / targets
        fault: Fault | None = "spike" if spike else None
        if not finite and self.scaler.exhausted:
            fault = "not_finite"
        self.guard.record(self.step, mean, finite and not spike, fault)
        return StepResult(self.step, mean, norm, lr, targets, not finite or spike, scale, fault, limit)

    def _veto(self, loss: Pending, limit: float) -> Pending:
        """Start asking whether any rank finds the sum of the losses above a limit."""
        return all_reduce_async((loss.wait() > limit).to(torch.int32), self.mesh.world, "max")

    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[float, int]:
        """(sum of token losses in nats, number of target tokens) over all data ranks; changes nothing.

        Raises:
            HexadError: no microbatch, or token ids outside the vocabulary; in stage 3, which gathers weights
                for each microbatch, different numbers of them on the data ranks.
        """
        if not microbatches:
            raise HexadError("evaluate needs at least one microbatch")
        if self.sharding.stage == 3:
            _same_number(self._count(microbatches).wait(), self.mesh.data.size)
        executor = self._executor(len(microbatches), training=False)
        if self.config.run.compile:
            self.gatherer.settle()
        total = executor.run([Task(self._placed(microbatch)) for microbatch in microbatches])
        targets = sum(microbatch.targets() for microbatch in microbatches)
        result = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if total is not None:
            result += torch.stack([total, torch.full_like(total, targets)])
        loss_sum, count = all_reduce(all_reduce(result, self.mesh.data), self.mesh.pipeline).tolist()
        return loss_sum, int(count)

    def chunks(self) -> list[Chunk]:
        """This rank's share of the state: master weights and optimizer state, as views."""
        self.gatherer.settle()  # who overwrites them must not be overwritten by what is still under way
        return [
            Chunk(f"{kind}.{piece.name}", piece.shape, piece.offset, values, self._holder(bucket))
            for bucket in self.buckets
            for kind, tensor in (("model", bucket.master), *self.optimizer.state(bucket))
            for piece, values in bucket.pieces(tensor)
        ]

    def _holder(self, bucket: Bucket) -> tuple[int, int] | None:
        """This rank's number among those that hold the same rectangles of a bucket, and how many they are."""
        if bucket.kind.copy:
            return None  # the stage with the embedding writes it
        replicas, tensor = self.sharding.replicas, self.mesh.tensor
        if bucket.kind.sharded:
            return replicas.rank, replicas.size
        return replicas.rank * tensor.size + tensor.rank, replicas.size * tensor.size

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps beside :meth:`chunks`, in JSON's types."""
        return {
            "step": self.step,
            "updates": self.updates,
            "samples": self.samples,
            "loss_scale": self.scaler.state(),
            "faults": self.guard.state(),
        }

    def restored(self, progress: Mapping[str, Any]) -> None:
        """Go on from :meth:`progress`, after :meth:`chunks` have been overwritten."""
        self.step, self.samples = progress["step"], progress["samples"]
        self.updates = progress.get("updates", self.step)
        self.scaler.restore(progress.get("loss_scale", {}))
        self.guard.restore(progress.get("faults", {}))
        self.optimizer.set_updates(self.updates)
        self._publish()

    def rolled_back(self, progress: Mapping[str, Any], samples: int) -> None:
        """As :meth:`restored`, but with the data from ``samples`` on; faults since then still count."""
        row = self.guard.row
        self.restored(progress)
        self.guard.row, self.samples = row, samples

    @torch.no_grad()
    def load_weights(self, source: WeightSource) -> None:
        """Set the weights (their masters, in 16-bit runs), all ranks together: each reads what it holds.
        Optimizer state and progress stay as they are.

        Raises:
            AgreedError: what the source raised on any rank.
        """
        weights = [chunk for chunk in self.chunks() if chunk.name.startswith("model.")]
        agreed(lambda: source.fill(weights), self.mesh.world)
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for bucket in self.buckets:
            self.gatherer.publish(bucket)
        self.gatherer.settle()

    @property
    def peak_activations(self) -> int:
        """Most pairs of stage and microbatch that this rank has held at once."""
        return max((executor.peak_activations for executor in self._executors.values()), default=0)

    def recorded(self) -> tuple[float, list[tuple[float, float]]]:
        """When the last recorded step began, in seconds since the epoch, and (start, end) of each of this
        rank's actions, in seconds since then."""
        assert self._recorded is not None, "no step was recorded"
        return self._recorded

    def _executor(self, microbatches: int, training: bool) -> Executor[Task]:
        """The executor for this many microbatches, made when it is first needed."""
        key = (training, microbatches)
        if key not in self._executors:
            if training:
                schedule = training_schedule(self.config, self.plan, microbatches)
            else:
                schedule = forward_schedule(self.plan.schedule.placement, microbatches)
            stages = {number: self._stage(stage) for number, stage in self.stages.items()}
            self._executors[key] = Executor(
                schedule, stages, self.mesh.pipeline, self._boundary, self._products, self.mesh.device
            )
        return self._executors[key]

    @staticmethod
    def _stage(stage: Transformer) -> Callable[[Task, torch.Tensor | None], torch.Tensor]:
        """What a stage computes of a microbatch: hidden states, and the last stage the loss."""

        def compute(task: Task, inputs: torch.Tensor | None) -> torch.Tensor:
            tokens, documents = task.microbatch.tokens, task.microbatch.documents
            if stage.part.last:
                labels = task.microbatch.labels
                return stage.loss_sum(tokens, labels, documents, inputs, task.seed, task.draws)
            return stage(tokens, documents, inputs=inputs, draws=task.draws)

        return compute

    def _draws(self, index: int, microbatch: Microbatch) -> Draws:
        """Of this data rank's microbatch number ``index`` of the step: the data ranks take turns."""
        first = (index * self.mesh.data.size + self.mesh.data.rank) * microbatch.tokens.shape[0]
        return Draws(self.config.run.seed, self.step, first)

    def _boundary(self, task: Task) -> torch.Tensor:
        """An empty tensor for the hidden states between two stages."""
        place = placement(self.config, self.mesh.tensor, self.mesh.device)
        rows = task.microbatch.tokens.numel() // (place.axis.size if place.sequence else 1)
        return torch.empty((rows, self.config.model.hidden), dtype=place.dtype, device=place.device)

    def _placed(self, microbatch: Microbatch) -> Microbatch:
        """Check a microbatch and move it to the device."""
        vocab = int(self.config.model.vocab)
        for name, ids, lowest in (("token", microbatch.tokens, 0), ("label", microbatch.labels, -100)):
            low, high = (int(x) for x in ids.aminmax())
            if low < lowest or high >= vocab or (lowest and -100 < low < 0):
                bad = high if high >= vocab else low
                raise HexadError(
                    f"{name} id {bad} is outside the model's vocabulary of {vocab} (model.vocab)"
                )
        if microbatch.documents is not None:
            _check_documents(microbatch.documents, *microbatch.tokens.shape)
        return microbatch.to(self.mesh.device)

    def _count(self, microbatches: Sequence[Microbatch]) -> Pending:
        """Start summing (target tokens, microbatches, microbatches squared) over the data ranks."""
        if not microbatches:
            raise HexadError("train_step needs at least one microbatch")
        number = len(microbatches)
        counts = [sum(m.targets() for m in microbatches), number, number**2]
        return all_reduce_async(torch.tensor(counts, device=self.mesh.device), self.mesh.data)

    def _targets(self, counts: torch.Tensor) -> int:
        """The global number of targets, from :meth:`_count`'s sums."""
        _same_number(counts, self.mesh.data.size)
        targets = int(counts[0])
        if targets == 0:
            raise HexadError("no position of the global batch has a target: all labels are -100")
        return targets


def _same_number(counts: torch.Tensor, ranks: int) -> None:
    _, number, squares = counts.tolist()
    # Equality in Cauchy-Schwarz: only when every rank has the same number.
    if number**2 != squares * ranks:
        raise HexadError("data ranks were given different numbers of microbatches in one step")


def _check_documents(documents: tuple[int, ...], sequences: int, length: int) -> None:
    """Offsets that miss the start of a sequence would let attention reach across sequences in silence."""
    total = sequences * length
    starts = set(range(0, total, length))
    ascending = all(a < b for a, b in pairwise(documents))
    if not ascending or documents[-1] != total or documents[0] != 0 or not starts <= set(documents):
        raise HexadError(
            f"Microbatch.documents: found {documents}, expected rising offsets from 0 to {total} with each "
            f"sequence's start ({length} tokens each) among them"
        )
