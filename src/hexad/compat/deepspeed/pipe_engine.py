"""DeepSpeed's pipeline engine: complete steps of a :class:`PipelineModule`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hexad.comm import agreed, all_reduce, gather_objects
from hexad.config import ConfigError, HexadError
from hexad.engine.workload import ModuleWorkload

from ..facade.optimizer import refused
from .data import RepeatingLoader, cast_tensors
from .engine import MANNERS, DeepSpeedEngine
from .pipe import PipelineModule, PipeStage
from .translate import engine_config


class PipelineWorkload(ModuleWorkload):
    """The stages of a :class:`PipelineModule`. A microbatch is ``(inputs, labels)``: inputs on the rank of
    the first stage, labels on that of the last."""

    def signatures(self, microbatches: Sequence[Any]) -> list[object]:
        """The shapes and formats of each microbatch's inputs, from the rank of the first stage."""
        pipeline, first = self.mesh.pipeline, self.plan.schedule.placement[0]
        known = [_signature(x) for x, _ in microbatches] if pipeline.rank == first else None
        signatures = gather_objects(known, pipeline)[first] if pipeline.size > 1 else known
        return list(signatures or [])

    def received(self, message: Tensor) -> Tensor:
        """A copy, as in DeepSpeed: the first layer may change its input in place."""
        return message.clone() if message.requires_grad else message


class PipelineEngine(DeepSpeedEngine):
    """Steps of a pipeline: :meth:`train_batch`, :meth:`eval_batch`. Works with every ZeRO stage."""

    _module: PipelineModule
    _keeps_groups = True
    _shuffles = False  # as DeepSpeed's pipelines

    def _workload(self) -> ModuleWorkload:
        module, keys = self._module, self._config.keys
        for name, enabled in (
            ("torch_autocast.enabled", keys.torch_autocast.enabled),
            ("fp16.auto_cast", keys.fp16.enabled and keys.fp16.auto_cast),
            ("managed_gradient_accumulation", not keys.managed_gradient_accumulation),
        ):
            if enabled:
                raise ConfigError(
                    name, "is not supported with a PipelineModule; remove it, or cast in a layer"
                )
        if keys.pipeline.activation_checkpoint_interval:
            module.set_checkpoint_interval(keys.pipeline.activation_checkpoint_interval)
        settings = engine_config(self._config, self.device.type == "cuda", pipeline=module.num_stages)
        chosen = {"schedule": module.schedule, "virtual_stages": module.virtual_stages}
        parallel = settings.parallel.model_copy(update=chosen)
        self._data_iterator: Iterator[Any] | None = None
        return PipelineWorkload(
            module.own_stages,
            module.mesh,
            settings.model_copy(update={"parallel": parallel}),
            plan=module.plan,
            compute=partial(_compute, module),
            ties=module.ties(),
            manners=MANNERS,
        )

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """A complete step; all ranks together.

        Args:
            data_iter: of microbatches ``(inputs, labels)``, on the ranks of the first and of the last stage;
                by default of ``training_data``, or of :meth:`set_dataiterator`.

        Returns:
            the mean loss over microbatches and data ranks, on every rank.
        """
        self._needs_optimizer("train_batch")
        self._module.train()
        count = self.gradient_accumulation_steps()
        batches = self._batches(data_iter, count)
        total = self._engine.accumulate(batches, scale=1.0 / count)
        self._accumulation.passes = count
        self._update({})
        self.micro_steps += count
        return self._mean(total, count)

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """The mean loss of a step's microbatches, in evaluation mode and without gradients.

        Raises:
            HexadError: ``return_logits``, no ``compute_loss``, or another ``reduce_output`` than ``avg``.
        """
        if return_logits or not compute_loss or reduce_output != "avg":
            raise HexadError("eval_batch: returns the mean loss; leave out return_logits and reduce_output")
        count = num_micro_batches or self.gradient_accumulation_steps()
        training = self._module.training
        self._module.eval()
        batches = self._batches(data_iter, count)
        total = self._engine.total_loss(batches)
        self._module.train(training)
        return self._mean(total, count)

    def _mean(self, total: Tensor | None, count: int) -> Tensor:
        data = self._engine.mesh.data
        loss = all_reduce(self._engine.on_all_stages(total), data)
        return (loss / (count * data.size)).float()

    # Data

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the microbatches that :meth:`train_batch` reads by default."""
        self._data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set :meth:`set_dataiterator` to one pass over a loader after the other."""
        self._data_iterator = iter(RepeatingLoader(loader))

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers."""
        return self._module.plan.schedule.placement[0] == self._module.stage_id

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return self._module.plan.schedule.placement[-1] == self._module.stage_id

    def _batches(self, data_iter: Iterator[Any] | None, count: int) -> list[tuple[Any, Any]]:
        """This rank's microbatches of a step; an error in one rank's data is raised on all ranks, so that
        none waits."""
        return agreed(lambda: self._read(data_iter, count), self._engine.mesh.world)

    def _read(self, data_iter: Iterator[Any] | None, count: int) -> list[tuple[Any, Any]]:
        """Read this rank's microbatches of a step; those of stages in the middle have no values."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return [(None, None)] * count
        source = self._data(data_iter if data_iter is not None else self._data_iterator)
        pairs = [cast_tensors(_pair(batch), self.device) for batch in islice(source, count)]
        if len(pairs) < count:
            raise HexadError(
                f"train_batch: found {len(pairs)} microbatches left in the data, expected {count}; end the "
                "loop before, or repeat the data (RepeatingLoader)"
            )
        for inputs, _ in pairs if self.is_first_stage() else ():
            _signature(inputs)  # refuses others than tensors
        return pairs

    # Not available in pipelines

    forward = refused("engine(...)", "a pipeline makes complete steps; call train_batch or eval_batch")
    backward = refused("backward", "a pipeline makes complete steps; call train_batch")
    step = refused("step", "a pipeline makes complete steps; call train_batch")


def _compute(module: PipelineModule, stage: nn.Module, batch: Any, inputs: Any, _: float | None) -> Any:
    """Compute a stage's result of a microbatch, of the last one the loss."""
    assert isinstance(stage, PipeStage)
    x = stage(batch[0] if inputs is None else inputs)
    if stage.numbers != module.parts[-1]:
        return x
    loss: Tensor = x if module.loss_fn is None else module.loss_fn(x, batch[1])
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        what = "the last layer's result, without loss_fn," if module.loss_fn is None else "loss_fn"
        raise HexadError(f"{what} has {kind}, expected a scalar loss")
    loss = loss.reshape(())
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise HexadError(
            f"train_batch: found a {type(batch).__name__} as a microbatch, expected (inputs, labels)"
        )
    return batch[0], batch[1]


def _signature(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_signature(item) for item in value)
    raise HexadError(f"train_batch: found a {type(value).__name__} among the inputs, expected tensors")
