"""DeepSpeed's engine: its names, defaults and calling order, over Hexad's engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from hexad.comm import identical
from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.topology.layout import Layout

from ..facade import world
from . import gathered
from .checkpoints import Checkpoints
from .config import Batch, DeepSpeedConfig, without_effect
from .data import Loader, loader_of
from .optimizers import EngineOptimizer, Parameters, client_optimizer, client_scheduler, trained
from .translate import engine_config

log = logging.getLogger("hexad")

CLIP_EPSILON = 1e-6
"""DeepSpeed adds it to the norm that it divides by."""


class DeepSpeedEngine(Checkpoints):
    """Trains any module: ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()``.

    The loss is the mean over a rank's samples; gradients are averaged over ranks and accumulated backward
    passes, as in DeepSpeed.

    Args:
        module: the same on all ranks; the first rank's values are used.
        config: checked.
        device: of this rank.
        optimizer: a ``torch.optim`` optimizer, or a function of parameters that returns one; by
            default the one that the configuration names.
        parameters: parameters, or groups of them, to train; by default all that require gradients.
        scheduler: of the learning rate, or a function of the optimizer that returns one.
        data: a data set, of which :attr:`training_dataloader` loads this rank's samples.
        collate: of that loader.

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
        config: DeepSpeedConfig,
        device: torch.device,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
        parameters: Parameters | None = None,
        scheduler: Any = None,
        data: Any = None,
        collate: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self._config, self.device = config, device
        self._module = module
        self._cast_buffers()
        autocast = config.keys.torch_autocast
        if autocast.enabled and autocast.dtype == "float16":
            raise HexadError(
                "torch_autocast.dtype: found float16, which needs a loss scale; use bfloat16 or fp16"
            )
        basic = client_optimizer(module, config.keys, optimizer, parameters, self._keeps_groups)
        # Without an optimizer: one that keeps nothing.
        self._engine = self._make(basic or torch.optim.SGD(trained(module) or [torch.zeros(1)], lr=0.0))
        if self.zero_optimization_stage() == 3:
            module.register_state_dict_pre_hook(gathered.refuse_shards)
        self._engine.optimizer.clip_epsilon = CLIP_EPSILON
        self._engine.scaler.delayed(1)
        gathered.register(self._engine)
        if self._keeps_groups or self._engine.mesh.pipeline.size == 1:
            groups = self._engine.optimizer.rule.numbers()["groups"]
            identical("optimizer.param_groups", dict(enumerate(groups)), self._engine.mesh.world)
        self.optimizer = (
            None if basic is None else EngineOptimizer(basic, self._engine, self._optimizer_discards())
        )
        self.basic_optimizer = basic
        self.lr_scheduler = client_scheduler(scheduler, basic, config.keys)
        self.training_dataloader = None if data is None else self.deepspeed_io(data, collate_fn=collate)
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self.gradient_average = True
        self._passes = 0  # backward passes since the last update
        self._discarded = False  # gradients, since the last update
        self._limit: int | None = None  # that reductions wait for; None: until the update
        self._boundary: bool | None = None
        self._no_sync = False
        self._norm: float | None = None
        self._applied = False
        self._begin()
        self._report()

    _keeps_groups = False
    """Whether groups without parameters stay: where ranks have other parameters, so that numbers agree."""

    # Construction

    _shuffles = True
    """Whether the loader of ``training_data`` shuffles."""

    def _make(self, optimizer: torch.optim.Optimizer) -> Engine:
        settings = engine_config(self._config, self.device.type == "cuda")
        mesh = world.mesh_of(Layout(world=world.world_size()), self.device)
        return Engine(self._module, mesh, settings, optimizer=optimizer, initialise=False)

    def _cast_buffers(self) -> None:
        wanted = self._config.keys.data_types.buffer_dtype
        kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, None: None}[wanted]
        for module in self._module.modules() if kind is not None else ():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer is not None and buffer.is_floating_point():
                    setattr(module, name, buffer.to(kind))

    def _report(self) -> None:
        if self.global_rank:
            return
        keys = self._config.keys
        if "gradient_clipping" not in keys.model_fields_set and self._engine.optimizer.clip:
            log.info("gradient_clipping: %s, DeepSpeed's default; 0 turns it off", self.gradient_clipping())
        unused = without_effect(keys)
        if unused:
            log.warning("accepted without effect: %s", "; ".join(unused))

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
        """A loader of this rank's samples of a data set.

        Args:
            dataset: see :func:`~hexad.compat.deepspeed.data.loader_of`.
            batch_size: samples of a microbatch; by default those of a backward pass.
            route: ``train`` shuffles, except in a pipeline.
            pin_memory: accepted without effect.
            data_sampler: of this rank's samples, in place of one over all ranks.
            collate_fn: of samples into a microbatch.
            num_local_io_workers: processes that load; by default none but this one.
        """
        micro, drop = self._config.batch.micro, self._config.keys.dataloader_drop_last
        return loader_of(
            dataset,
            batch_size or micro,
            self._engine.mesh.data,
            collate_fn,
            drop,
            sampler=data_sampler,
            shuffle=self._shuffles and route == "train",
            workers=num_local_io_workers or 0,
        )

    # A step

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the module computes."""
        keys = self._config.keys
        if keys.fp16.enabled and keys.fp16.auto_cast:
            inputs, named = _cast(inputs, torch.float16), _cast(named, torch.float16)
        autocast = nullcontext()
        if keys.torch_autocast.enabled:
            kind = getattr(torch, keys.torch_autocast.dtype)
            autocast = torch.autocast(self.device.type, kind)  # type: ignore[assignment]
        with autocast:
            return self._module(*inputs, **named)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
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
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = type(loss).__name__
            if isinstance(loss, torch.Tensor):
                found = f"shape {tuple(loss.shape)}, requires_grad {loss.requires_grad}"
            raise HexadError(f"backward: found {found}, expected a scalar loss with a graph")
        if self._limit is not None and self._passes >= self._limit:
            self._engine.extend()
        self._passes += 1
        if self._config.keys.managed_gradient_accumulation and scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = loss.float() * self._engine.scaler.scale if self._engine.scaler.active else loss
        scaled.backward(retain_graph=retain_graph)
        return loss.detach()

    def _begin(self) -> None:
        """Accept gradients from now on, including those of a loss that another engine differentiates."""
        managed, passes = self._config.keys.managed_gradient_accumulation, self.gradient_accumulation_steps()
        # With a boundary set by hand (accelerate) the number is an upper bound; 1 then means nothing.
        known = managed and not self._no_sync and (self._boundary is not False or passes > 1)
        self._limit = passes if known else None
        self._engine.begin(self._limit)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients accumulated for the next step, all ranks together; no effect with ZeRO 2 and
        3, as in DeepSpeed. Needless otherwise: a step begins without gradients."""
        if self.zero_optimization_stage() < 2:
            self._discard()

    def _optimizer_discards(self) -> Callable[[], None] | None:
        """What the optimizer's ``zero_grad`` does: with ZeRO 3 more than the engine's, as in DeepSpeed."""
        return None if self.zero_optimization_stage() == 2 else self._discard

    def _discard(self) -> None:
        if self._engine.gradients.contributed:
            self._passes, self._discarded = 0, True
            self._begin()

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
        if self._engine.gradients.contributed:
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
        """Set it explicitly."""
        self._boundary = is_boundary
        if not self._engine.gradients.contributed:
            self._begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate any number of backward passes, which :meth:`step` reduces, outside.

        Raises:
            HexadError: with ZeRO 2 or 3, which reduce in every backward pass, or inside another one.
        """
        stage = self.zero_optimization_stage()
        if stage >= 2:
            raise HexadError(
                f"no_sync: found zero_optimization.stage {stage}, which shards gradients; use 0 or 1"
            )
        if self._no_sync:
            raise HexadError("no_sync: found inside another no_sync")
        self._no_sync = True
        if not self._engine.gradients.contributed:
            self._begin()
        try:
            yield
        finally:
            self._no_sync = False

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Reduce, clip and update, at the boundary of accumulation; otherwise count.

        Raises:
            HexadError: without a backward pass before, inside :meth:`no_sync`, or in fp16 if the
                smallest loss scale overflows.
        """
        self._needs_optimizer("step")
        if self._no_sync:
            raise HexadError("step: found inside no_sync; call it outside")
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            if not self._engine.gradients.contributed and not self._discarded:
                raise HexadError("step: found no backward pass since the last update; call backward before")
            self._update(lr_kwargs or {})
        self.micro_steps += 1

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        passes, self._passes, self._discarded = self._passes, 0, False
        self._engine.reduce()
        mean = self._config.keys.gradient_allreduce_op == "mean"
        before = self._engine.updates
        self._norm = self._engine.update(None, divisor=self.dp_world_size if mean else 1)
        self._engine.gatherer.settle()  # scripts read parameters after a step
        self._begin()
        self._applied = self._engine.updates > before
        assert self.optimizer is not None
        self.optimizer.overflow, self.optimizer._global_grad_norm = not self._applied, self._norm
        if not self._applied:
            self._skipped()
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        managed = self._config.keys.managed_gradient_accumulation
        self.global_samples += self.train_batch_size() if managed else self._per_pass() * passes
        every = self.steps_per_print()
        if every and self.global_steps % every == 0 and not self.global_rank:
            log.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())

    def _skipped(self) -> None:
        self.skipped_steps += 1
        scaler = self._engine.scaler
        if scaler.active and scaler.exhausted and not self._config.keys.fp16.loss_scale:
            raise HexadError(
                f"fp16: found gradients that are not finite at the smallest loss scale, {scaler.scale:g}; "
                "check the data, lower the learning rate, or use bf16"
            )
        if not self.global_rank:
            log.warning("step %d: gradients are not finite, skipped", self.global_steps + 1)

    def _per_pass(self) -> int:
        return self._config.batch.micro * self.dp_world_size

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """A complete step of a module that returns its loss: the mean loss of this rank's microbatches.

        Args:
            data_iter: of microbatches: a tuple or list is the module's arguments, a mapping its named ones.
                By default of ``training_data``.
        """
        total = torch.zeros((), device=self.device)
        for _ in range(self.gradient_accumulation_steps()):
            loss = self._loss(next(self._data(data_iter)))
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
                raise HexadError(
                    f"train_batch: the module returned a {type(loss).__name__}{shape}, expected its loss; "
                    "return it, or call the engine, backward and step"
                )
            total += self.backward(loss).float()
            self.step()
        return total

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """The loss of one microbatch, without gradients; see :meth:`train_batch`."""
        return cast(torch.Tensor, self._loss(next(data_iter))).float()

    def _data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise HexadError("train_batch: found no data_iter and no training_data; pass one of them")
        return self.training_dataloader.endless()

    def _loss(self, batch: Any) -> Any:
        batch = _cast(batch, self.device)
        if isinstance(batch, Mapping):
            return self(**batch)
        return self(*batch) if isinstance(batch, list | tuple) else self(batch)

    def _needs_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise HexadError(
                f"{what}: the engine has no optimizer; pass one to initialize, or name one in the file"
            )


def _cast(value: Any, to: torch.dtype | torch.device) -> Any:
    """Tensors in containers on a device, or floating-point ones in a format."""
    if isinstance(value, torch.Tensor):
        return value.to(to) if isinstance(to, torch.device) or value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(each, to) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(each, to) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast(each, to) for each in value)
    return value
