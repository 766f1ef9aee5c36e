"""DeepSpeed's engine: its names, defaults and calling order, over Hexad's engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from hexad.comm import identical
from hexad.config import HexadError, did_you_mean
from hexad.conversion import parallelize as conversion
from hexad.engine.engine import Engine
from hexad.engine.workload import Manners, ModuleWorkload
from hexad.launching.environment import environment
from hexad.model.transformer import DTYPES

from ..facade import world
from ..facade.accumulation import Accumulation
from ..facade.optimizer import EngineOptimizer, ModuleZeroGrad, Parameters, trained
from ..facade.reads import GatheredReads
from .config import Batch, CheckedConfig, unknown_keys, without_effect
from .data import Loader, cast_tensors, loader_of
from .engine_checkpoints import EngineCheckpoints
from .groups import PipelineGrid
from .optimizers import client_optimizer, client_scheduler
from .translate import engine_config
from .utils import ThroughputTimer
from .zero import ParameterOffload, mark_partitioned, read_empty, register

log = logging.getLogger("hexad")

_OF_MODULES = frozenset(dir(nn.Module))
"""Names that are no hint for a misspelt one."""
_CHANGES = "with deepspeed.utils.safe_set_full_grad"
MANNERS = Manners(clip_epsilon=1e-6, scale_delay=1, extends=True)
"""DeepSpeed's: losses of other engines may be differentiated through one, too."""


def _reads(path: str, what: str) -> Callable[[DeepSpeedEngine], Any]:
    """A method that returns an engine's attribute, by its dotted path."""
    read = attrgetter(path)

    def method(self: DeepSpeedEngine) -> Any:
        return read(self)

    method.__doc__ = what
    return method


class DeepSpeedEngine(EngineCheckpoints):
    """Trains any module: ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``.

    The loss is the mean over a rank's samples; gradients are averaged over ranks and accumulated backward
    passes, as in DeepSpeed.

    Args:
        module: the same on all ranks; the first rank's values are used.
        config: checked.
        device: of this rank.
        optimizer, parameters, scheduler, data, collate: as of
            :func:`~hexad.compat.deepspeed.entry.initialize`.

    Attributes:
        optimizer: an :class:`EngineOptimizer` around it; None without one: for evaluation only.
        lr_scheduler: of the learning rate, or None.
        training_dataloader: of ``data``, or None.
        global_steps: steps so far, skipped ones included; ``skipped_steps`` counts those.
        global_samples: samples so far, of all ranks.
        micro_steps: calls of :meth:`step` so far.
    """

    def __init__(
        self,
        module: nn.Module,
        config: CheckedConfig,
        device: torch.device,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
        parameters: Parameters | None = None,
        scheduler: Any = None,
        data: Any = None,
        collate: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self._config, self.device = config, device
        object.__setattr__(self, "_module", module)
        self._modules["module"] = module  # its parameters' names begin with "module.", as in DeepSpeed
        if self.zero_optimization_stage() == 3:
            mark_partitioned(module)
        self._cast_buffers()
        autocast = config.keys.torch_autocast
        if autocast.enabled and autocast.dtype == "float16":
            raise HexadError(
                "torch_autocast.dtype: found float16, which needs a loss scale; use bfloat16 or fp16"
            )
        basic = client_optimizer(module, config.keys, optimizer, parameters, self._keeps_groups)
        # Without an optimizer: one that keeps nothing.
        updating = basic or torch.optim.SGD(trained(module) or [torch.zeros(1)], lr=0.0)
        workload = self._workload()
        self._engine = Engine(workload, workload.mesh, optimizer=updating, initialise=False)
        self._reads = GatheredReads(self._engine)
        self._engine.gatherer.absent = read_empty
        register(self._engine)
        if self._keeps_groups or self._engine.mesh.pipeline.size == 1:
            groups = self._engine.optimizer.rule.numbers()["groups"]
            identical("optimizer.param_groups", dict(enumerate(groups)), self._engine.mesh.world)
        methods = self._update_alone, self._optimizer_zero_grad
        self.optimizer = None if basic is None else EngineOptimizer(basic, self._engine, *methods)
        if self.optimizer is not None and self.zero_optimization_stage() == 3:
            self.optimizer.parameter_offload = ParameterOffload(module)
        self.basic_optimizer = basic
        self.lr_scheduler = client_scheduler(scheduler, basic, config.keys)
        self.training_dataloader = None if data is None else self.deepspeed_io(data, collate_fn=collate)
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self.gradient_average = True
        object.__setattr__(module, "zero_grad", ModuleZeroGrad(module, self.zero_grad))
        self.tput_timer, self.grid = ThroughputTimer(), PipelineGrid(self._engine.mesh)
        self._accumulation = Accumulation(self._engine)
        self._boundary: bool | None = None
        self._norm: float | None = None
        self._applied = False
        self._begin()
        self._report()

    # Construction

    _keeps_groups = False
    """Whether groups without parameters stay: where ranks have other parameters, so that numbers agree."""
    _shuffles = True
    """Whether the loader of ``training_data`` shuffles."""

    def _workload(self) -> ModuleWorkload:
        settings = engine_config(self._config, self.device.type == "cuda")
        mesh = conversion.mesh_of(self._module) or world.mesh_of(self.device)
        return ModuleWorkload(self._module, mesh, settings, manners=MANNERS)

    def _cast_buffers(self) -> None:
        dtype = self._config.keys.data_types.buffer_dtype
        for module in self._module.modules() if dtype is not None else ():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(DTYPES[str(dtype)]))

    def _report(self) -> None:
        if self.global_rank:
            return
        keys = self._config.keys
        if "gradient_clipping" not in keys.model_fields_set and self._engine.optimizer.clip:
            log.info("gradient_clipping: %s, DeepSpeed's default; 0 turns it off", self.gradient_clipping())
        for note in without_effect(keys):
            log.warning("%s", note)
        unknown = unknown_keys(self._config.tree)
        if unknown:
            log.warning("unknown keys without effect: %s", ", ".join(unknown))

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """A loader of this rank's samples of a data set; the configuration says whether an incomplete last
        microbatch is left out.

        Args:
            dataset: map-style, of which ranks get different samples; an iterable one is read as it is.
            batch_size: samples of a microbatch; by default those of a backward pass.
            route: ``train`` shuffles, except in a pipeline.
            pin_memory: accepted without effect.
            data_sampler: of this rank's samples, in place of one over all ranks.
            collate_fn: of samples into a microbatch.
            num_local_io_workers: processes that load; by default none but this one.
        """
        return loader_of(
            dataset,
            self._engine.mesh.data,
            shuffle=self._shuffles and route == "train",
            batch_size=batch_size or self._config.batch.micro,
            sampler=data_sampler,
            collate_fn=collate_fn,
            drop_last=self._config.keys.dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
        )

    # A step

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's result."""
        keys = self._config.keys
        if keys.fp16.enabled and keys.fp16.auto_cast:
            inputs, named = cast_tensors(inputs, torch.float16), cast_tensors(named, torch.float16)
        kind = getattr(torch, keys.torch_autocast.dtype)
        self._engine.gatherer.absent = self._reads  # until the backward pass is over
        try:
            with torch.autocast(self.device.type, kind) if keys.torch_autocast.enabled else nullcontext():
                return self._module(*inputs, **named)
        finally:
            self._engine.gatherer.absent = read_empty
            if not torch.is_grad_enabled():
                self._reads.release()

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add this microbatch's gradients to those of the step.

        Args:
            loss: a scalar.
            retain_graph: as of ``torch.Tensor.backward``.
            scale_wrt_gas: divide by the number of backward passes of a step.

        Returns:
            the loss, divided so.

        Raises:
            HexadError: there is no optimizer, or the loss is not a scalar with a graph.
        """
        self._needs_optimizer("backward")
        divided = self._config.keys.managed_gradient_accumulation and scale_wrt_gas
        divisor = self.gradient_accumulation_steps() if divided else 1
        try:
            return self._accumulation.backward(loss, divisor, retain_graph)
        finally:
            if not retain_graph:
                self._reads.release()

    def _limit(self) -> int | None:
        """Backward passes after which buckets are reduced; None: the update reduces them."""
        managed, passes = self._config.keys.managed_gradient_accumulation, self.gradient_accumulation_steps()
        # With a boundary set by hand (accelerate) the number is an upper bound; 1 then means nothing.
        return passes if managed and (self._boundary is not False or passes > 1) else None

    def _begin(self) -> None:
        self._accumulation.begin(self._limit())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated for the next step, all ranks together; no effect with ZeRO 2 and
        3, as in DeepSpeed. Not needed otherwise: a step begins without gradients."""
        if self.zero_optimization_stage() < 2:
            self._discard()

    def _optimizer_zero_grad(self) -> None:
        if self.zero_optimization_stage() != 2:  # it discards more than the engine's, as in DeepSpeed
            self._discard()

    def _discard(self) -> None:
        self._accumulation.discard(self._limit())

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step, by other numbers of backward passes; between steps.

        Raises:
            HexadError: it is not divisible by the samples of a backward pass of all data ranks, or
                gradients have been accumulated.
        """
        per_pass = self._per_pass()
        if train_batch_size < 1 or train_batch_size % per_pass:
            raise HexadError(
                f"set_train_batch_size: found {train_batch_size}, expected a multiple of {per_pass}, the "
                "samples of a backward pass over all data ranks"
            )
        self._set_batch(Batch(self._config.batch.micro, train_batch_size // per_pass, train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a backward pass, and with it those of a step; between steps.

        Raises:
            HexadError: it is not positive, or gradients have been accumulated.
        """
        if micro_batch_size < 1:
            raise HexadError(f"set_train_micro_batch_size: found {micro_batch_size}, expected at least 1")
        passes = self.gradient_accumulation_steps()
        total = micro_batch_size * passes * self.dp_world_size
        self._set_batch(Batch(micro_batch_size, passes, total))

    def _set_batch(self, batch: Batch) -> None:
        if self._accumulation.pending:
            raise HexadError("found accumulated gradients; change batch sizes after a step")
        self._config = replace(self._config, batch=batch)
        self.micro_steps -= self.micro_steps % batch.accumulation
        self._begin()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` updates."""
        if self._boundary is not None:
            return self._boundary
        if not self._config.keys.managed_gradient_accumulation:
            return True
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Determine whether the next :meth:`step` updates, in place of counting."""
        self._boundary = is_boundary
        if not self._accumulation.pending:
            self._begin()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate any number of backward passes, which :meth:`step` reduces, outside.

        Raises:
            HexadError: with ZeRO 2 or 3, which reduce in every backward pass, or inside another one.
        """
        return self._accumulation.no_sync(self.zero_optimization_stage())

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Reduce, clip and update, at the boundary of accumulation; otherwise count.

        Raises:
            HexadError: without a backward pass before, inside :meth:`no_sync`, or in fp16 with ZeRO if the
                smallest loss scale overflows.
        """
        self._needs_optimizer("step")
        if not self._accumulation.synchronised:
            raise HexadError("step: found inside no_sync; call it outside")
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            self._accumulation.take_assigned(_CHANGES)
            if not self._accumulation.pending and not self._accumulation.discarded:
                raise HexadError("step: found no backward pass since the last update; call backward before")
            self._update(lr_kwargs or {})
        self.micro_steps += 1

    def _update_alone(self) -> None:
        """The optimizer's own ``step``: an update without the schedule and the counters of :meth:`step`; with
        stage 0 in float32 without clipping too."""
        self._accumulation.take_assigned(_CHANGES)
        if not self._accumulation.pending:
            raise HexadError("optimizer.step: found no backward pass since the last update; call it before")
        basic = self.zero_optimization_stage() == 0 and self._config.dtype == "fp32"
        clip, self._engine.optimizer.clip = self._engine.optimizer.clip, 0.0 if basic else self._config.clip
        try:
            self._update_weights()
        finally:
            self._engine.optimizer.clip = clip

    def _update_weights(self) -> int:
        """Reduce, clip and update; returns the number of backward passes."""
        mean = self._config.keys.gradient_allreduce_op == "mean"
        update = self._accumulation.update(self._limit(), self.dp_world_size if mean else 1)
        self._engine.gatherer.settle()  # scripts read parameters after a step
        self._norm, self._applied = update.norm, update.applied
        assert self.optimizer is not None
        self.optimizer.overflow, self.optimizer._global_grad_norm = not self._applied, self._norm
        return update.passes

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        passes = self._update_weights()
        if not self._applied:
            self._skipped()
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        managed = self._config.keys.managed_gradient_accumulation
        samples = self.train_batch_size() if managed else self._per_pass() * passes
        self.global_samples += samples
        self.tput_timer.step(samples)
        every = self.steps_per_print()
        if every and self.global_steps % every == 0 and not self.global_rank:
            log.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())

    def _skipped(self) -> None:
        self.skipped_steps += 1
        scaler, dynamic = self._engine.scaler, not self._config.keys.fp16.loss_scale
        # Stage 0 of DeepSpeed keeps the smallest scale.
        if scaler.active and dynamic and scaler.exhausted and self.zero_optimization():
            raise HexadError(
                f"fp16: found gradients that are not finite at the smallest loss scale, {scaler.scale:g}; "
                "check the data, lower the learning rate, or use bf16"
            )
        if not self.global_rank:
            log.warning("step %d: gradients are not finite, skipped", self.global_steps + 1)

    def _per_pass(self) -> int:
        return self._config.batch.micro * self.dp_world_size

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """A complete step of a module that returns its loss: the mean loss of this rank's microbatches.

        Args:
            data_iter: of microbatches: a tuple or list is the module's arguments, a mapping its named ones.
                By default of ``training_data``.
        """
        total = torch.zeros((), device=self.device)
        for _ in range(self.gradient_accumulation_steps()):
            loss = self._loss(next(self._data(data_iter)))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
                raise HexadError(
                    f"train_batch: the module returned a {type(loss).__name__}{shape}, expected its loss; "
                    "return it, or call the engine, backward and step"
                )
            total += self.backward(loss).float()
            self.step()
        return total

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """The loss of one microbatch, without gradients; see :meth:`train_batch`."""
        return cast(Tensor, self._loss(next(data_iter))).float()

    def _data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            if not hasattr(data_iter, "__next__"):  # each step would begin it again
                kind = type(data_iter).__name__
                raise HexadError(f"train_batch: found a {kind}, expected an iterator: iter(...), made once")
            return data_iter
        if self.training_dataloader is None:
            raise HexadError("train_batch: found no data_iter and no training_data; pass one of them")
        return self.training_dataloader.endless()

    def _loss(self, batch: Any) -> Any:
        batch = cast_tensors(batch, self.device)
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, list | tuple) else self(batch)

    def _needs_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise HexadError(
                f"{what}: the engine has no optimizer; pass one to initialize, or name one in the file"
            )

    # What scripts ask: settings, sizes, rates, norms

    @property
    def module(self) -> nn.Module:
        """The module, with the values of the last update where it is not sharded (ZeRO 3)."""
        self._engine.gatherer.settle()
        return self._module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            names = {*vars(self), *dir(type(self))} - _OF_MODULES
            attributes = sorted(known for known in names if not known.startswith("_"))
            hint = did_you_mean(name, attributes)
            raise AttributeError(
                f"{type(self).__name__} and its module have no {name!r}{hint or '; see docs/deepspeed.md'}"
            ) from None

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return environment().local_rank

    config = property(_reads("_config.tree", "The configuration as it was read."))
    global_rank = property(_reads("_engine.mesh.rank", "This rank's number."))
    world_size = property(_reads("_engine.mesh.layout.world", "The number of all ranks."))
    dp_world_size = property(_reads("_engine.mesh.data.size", "The number of data ranks."))
    train_batch_size = _reads("_config.batch.total", "Samples of a step, over all ranks.")
    train_micro_batch_size_per_gpu = _reads("_config.batch.micro", "Samples of a backward pass.")
    gradient_accumulation_steps = _reads("_config.batch.accumulation", "Backward passes of a step.")
    gradient_clipping = _reads("_engine.optimizer.clip", "The largest gradient norm; 0 for none.")
    zero_optimization_stage = _reads("_config.keys.zero_optimization.stage", "The level of sharding, 0 to 3.")
    fp16_enabled = _reads("_config.keys.fp16.enabled", "Whether parameters are fp16.")
    bfloat16_enabled = _reads("_config.keys.bf16.enabled", "Whether parameters are bf16.")
    wall_clock_breakdown = _reads("_config.keys.wall_clock_breakdown", "The key's value, without effect.")
    steps_per_print = _reads("_config.keys.steps_per_print", "Steps between lines of the log; None for none.")
    loss_scale = _reads("_engine.scaler.scale", "The loss scale of the next step.")
    get_global_grad_norm = _reads("_norm", "The gradient norm of the last step before clipping, or None.")
    was_step_applied = _reads("_applied", "Whether the last :meth:`step` changed the weights.")

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a backward pass, and backward passes of a step."""
        batch = self._config.batch
        return batch.total, batch.micro, batch.accumulation

    def optimizer_name(self) -> str | None:
        """The optimizer that the configuration names; the class of the script's own."""
        named = self._config.keys.optimizer
        if self.basic_optimizer is None:
            return None
        return type(self.basic_optimizer).__name__ if named is None else named.type.lower()

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.basic_optimizer is None else self.basic_optimizer.param_groups

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [group["lr"] for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Momentum or betas of every parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self._groups():
            group["lr"] = lr

    def offload_states(self, *_: Any, **__: Any) -> None:
        """No effect on a CPU: the state is in the host's memory.

        Raises:
            HexadError: on a GPU, where it stays.
        """
        if self.device.type != "cpu":
            raise HexadError(
                "offload_states: state stays where it is; use zero_optimization.offload_optimizer"
            )

    reload_states = offload_states

    def destroy(self) -> None:
        """No effect: an engine is freed when nothing refers to it, and complete values after use."""

    empty_partition_cache = destroy
