"""DeepSpeed's pipeline engine: complete steps of a :class:`PipelineModule`, and what crosses a stage's
boundary, a tensor or several in one message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hexad.comm import Pending, agreed, all_reduce, gather_objects, merged, receive_async, send_async
from hexad.config import ConfigError, HexadError
from hexad.engine.workload import ModuleWorkload

from ..facade.optimizer import refused
from .data import RepeatingLoader, cast_tensors
from .engine import MANNERS, DeepSpeedEngine
from .pipe import PipelineModule, PipeStage
from .translate import engine_config


@dataclass(frozen=True)
class MessagePart:
    """A tensor of a stage's result.

    Attributes:
        shape, dtype: of the tensor.
        trained: a gradient is sent back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    def size(self, dtype: torch.dtype) -> int:
        """The number of elements that it takes of a message in a format."""
        if self.trained:
            return prod(self.shape)
        return -(-prod(self.shape) * self.dtype.itemsize // dtype.itemsize)

    def encoded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The elements of a message in a format: converted values, or bytes."""
        if self.trained:
            return tensor.reshape(-1).to(dtype)
        raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        return torch.nn.functional.pad(raw, (0, -raw.numel() % dtype.itemsize)).view(dtype)

    def decoded(self, elements: Tensor) -> Tensor:
        """The tensor, from its elements in a message."""
        if self.trained:
            return elements.view(self.shape).to(self.dtype)
        raw = elements.detach().clone().view(torch.uint8)[: prod(self.shape) * self.dtype.itemsize]
        return raw.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Form:
    """The form of a stage's result, and of the message that carries it.

    A message is one flat tensor, in the widest format of those with gradients, which are converted; of the
    others it has the bytes. A single tensor with a gradient is sent as it is.

    Attributes:
        parts: its tensors.
        single: it is one tensor, not a tuple of them.
    """

    parts: tuple[MessagePart, ...]
    single: bool

    @classmethod
    def of(cls, result: Any, trained: bool) -> Form:
        """The form of a tensor or a tuple of tensors; ``trained``: gradients of floating-point ones are sent
        back.

        Raises:
            HexadError: it is something else.
        """
        single = isinstance(result, Tensor)
        tensors = (result,) if single else result
        if not isinstance(tensors, list | tuple) or not all(isinstance(t, Tensor) for t in tensors):
            raise HexadError(
                f"PipelineModule: found a {type(result).__name__} as the result of a stage's last layer, "
                "expected a tensor or a tuple of tensors"
            )
        parts = [MessagePart(tuple(t.shape), t.dtype, trained and t.is_floating_point()) for t in tensors]
        return cls(tuple(parts), single)

    @property
    def plain(self) -> bool:
        """Whether the message is the tensor itself."""
        return self.single and self.parts[0].trained

    @property
    def dtype(self) -> torch.dtype:
        """The format of the message, which holds every value of those that have gradients."""
        kinds = [part.dtype for part in self.parts if part.trained]
        return reduce(torch.promote_types, kinds) if kinds else torch.float32

    def message(self, result: Any) -> Tensor:
        """The message of a result, with its graph."""
        if self.plain:
            tensor: Tensor = result
            return tensor
        tensors = (result,) if self.single else result
        return torch.cat([part.encoded(tensor, self.dtype) for tensor, part in zip(tensors, self.parts)])

    def empty(self, device: torch.device) -> Tensor:
        """An empty tensor like the message."""
        if self.plain:
            return torch.empty(self.parts[0].shape, dtype=self.dtype, device=device)
        size = sum(part.size(self.dtype) for part in self.parts)
        return torch.empty(size, dtype=self.dtype, device=device)

    def result(self, message: Tensor) -> Any:
        """The result in a message."""
        if self.plain:
            return message
        pieces = message.split([part.size(self.dtype) for part in self.parts])
        tensors = tuple(part.decoded(piece) for part, piece in zip(self.parts, pieces))
        return tensors[0] if self.single else tensors


_PROBE = 1 << 20
"""Message tag, beyond those of schedules."""


class PipelineBatch(NamedTuple):
    """A microbatch on a pipeline rank.

    Attributes:
        inputs: of the first layer, on the first stage's rank.
        labels: on the last stage's rank.
        forms: of the results of all stages but the last.
    """

    inputs: Any
    labels: Any
    forms: tuple[Form, ...]


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
        self._forms: dict[object, tuple[Form, ...]] = {}
        self._data_iterator: Iterator[Any] | None = None
        return ModuleWorkload(
            module.own_stages,
            module.mesh,
            settings.model_copy(update={"parallel": parallel}),
            plan=module.plan,
            compute=partial(_compute, module),
            boundary=lambda batch, stage: batch.forms[stage].empty(self.device),
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
        mesh = self._engine.mesh
        loss = torch.zeros((), dtype=torch.float64, device=self.device) if total is None else total
        loss = all_reduce(all_reduce(loss, mesh.data), mesh.pipeline)
        return (loss / (count * mesh.data.size)).float()

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

    def _batches(self, data_iter: Iterator[Any] | None, count: int) -> list[PipelineBatch]:
        """Microbatches of a step, with the forms of what crosses boundaries."""
        # An error in one rank's data is raised on all ranks, so that none waits.
        pairs, mine = agreed(lambda: self._read(data_iter, count), self._engine.mesh.world)
        signatures = self._signatures(mine)
        # Data ranks may have different shapes, but gather weights together (ZeRO 3).
        new = list(dict.fromkeys(signature for signature in signatures if signature not in self._forms))
        for number in range(merged(len(new), self._engine.mesh.world, max)):
            wanted = new[number] if number < len(new) else signatures[0]
            self._forms[wanted] = self._probe(pairs[signatures.index(wanted)][0])
        return [
            PipelineBatch(one, two, self._forms[signature])
            for (one, two), signature in zip(pairs, signatures)
        ]

    def _read(self, data_iter: Iterator[Any] | None, count: int) -> tuple[list[Any], list[object] | None]:
        """This rank's microbatches, and on the first stage's rank what their shapes follow from."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return [(None, None)] * count, None
        source = self._data(data_iter if data_iter is not None else self._data_iterator)
        pairs = [cast_tensors(_pair(batch), self.device) for batch in islice(source, count)]
        if len(pairs) < count:
            raise HexadError(
                f"train_batch: found {len(pairs)} microbatches left in the data, expected {count}; end the "
                "loop before, or repeat the data (RepeatingLoader)"
            )
        return pairs, [_signature(inputs) for inputs, _ in pairs] if self.is_first_stage() else None

    def _signatures(self, mine: list[object] | None) -> list[object]:
        """The shapes and formats of each microbatch's inputs, the same on all pipeline ranks."""
        pipeline, first = self._engine.mesh.pipeline, self._module.plan.schedule.placement[0]
        signatures = gather_objects(mine, pipeline)[first] if pipeline.size > 1 else mine
        return list(signatures or [])

    @torch.no_grad()
    def _probe(self, x: Any) -> tuple[Form, ...]:
        """The forms of all stages' results for one microbatch: by a forward pass without side effects."""
        module, pipeline = self._module, self._engine.mesh.pipeline
        placement, forms, training = module.plan.schedule.placement, [], module.training
        module.eval()  # running averages are not updated
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            for number, rank in enumerate(placement[:-1]):
                form = None
                if rank == module.stage_id:
                    x = module.own_stages[number](x)
                    form = Form.of(x, trained=True)
                form = gather_objects(form, pipeline)[rank] if pipeline.size > 1 else form
                assert form is not None
                x = self._pass_on(form, x, rank, placement[number + 1])
                forms.append(form)
        module.train(training)
        return tuple(forms)

    def _pass_on(self, form: Form, x: Any, source: int, target: int) -> Any:
        """Send a stage's result to the rank of the next stage; returns it there, None elsewhere."""
        pipeline = self._engine.mesh.pipeline
        pending: Pending | None = None
        if source == target:
            return x
        if pipeline.rank == source:
            pending = send_async(form.message(x).contiguous(), pipeline, target, _PROBE)
        elif pipeline.rank == target:
            pending = receive_async(form.empty(self.device), pipeline, source, _PROBE)
        received = None if pending is None else pending.wait()
        return form.result(received) if pipeline.rank == target and received is not None else None

    # Not available in pipelines

    forward = refused("engine(...)", "a pipeline makes complete steps; call train_batch or eval_batch")
    backward = refused("backward", "a pipeline makes complete steps; call train_batch")
    step = refused("step", "a pipeline makes complete steps; call train_batch")


def _compute(
    module: PipelineModule,
    stage: nn.Module,
    batch: PipelineBatch,
    message: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Compute a stage's result for a microbatch: a message, or the loss."""
    assert isinstance(stage, PipeStage)
    number = next(n for n, part in enumerate(module.parts) if part == stage.layers)
    if message is None:
        x = batch.inputs
    else:  # a copy, as in DeepSpeed: the first layer may change its input in place
        x = batch.forms[number - 1].result(message.clone() if message.requires_grad else message)
    x = stage(x)
    if number < len(module.parts) - 1:
        return batch.forms[number].message(x)
    loss: Tensor = x if module.loss_fn is None else module.loss_fn(x, batch.labels)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        what = "the last layer's result, without loss_fn," if module.loss_fn is None else "loss_fn"
        raise HexadError(f"{what} has {found}, expected a scalar loss")
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
