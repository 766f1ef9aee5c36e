"""The engine around Megatron-LM's ``GPTModel``: tensor, sequence and pipeline ranks, stepped by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hexad.comm import broadcast, receive_async, send_async
from hexad.config import Config, ConfigError, HexadError
from hexad.topology.mesh import Mesh

from ..deepspeed.engine import MANNERS, DeepSpeedEngine
from ..deepspeed.translate import engine_config
from ..facade.optimizer import refused
from ..megatron import parallel_state
from ..megatron.gpt import GPTModel, GPTWorkload, check_tied, resolved_model
from ..megatron.schedules import empty_hidden


def engine_of(model: Any) -> tuple[type[DeepSpeedEngine], Mesh] | None:
    """The class of a ``GPTModel``'s engine, and its mesh; None for another model."""
    return (GPTModelEngine, parallel_state.get_mesh()) if isinstance(model, GPTModel) else None


_RESULT, _GRADIENT = 1 << 20, (1 << 20) + 1
"""Message tags, beyond those of schedules."""


class _Exchange(torch.autograd.Function):
    """Returns the last stage's result in place of this stage's, so that every rank computes and
    differentiates the loss. The gradient of this stage's result is what ``receive`` returns."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, result: Tensor, receive: Callable[[], Tensor]) -> Tensor:
        context.receive = receive
        return result

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return context.receive(), None, None


class GPTModelEngine(DeepSpeedEngine):
    """Trains a ``GPTModel``, whose ranks are those of ``initialize_megatron``.

    With pipeline ranks, ``engine(...)`` passes one microbatch through all stages, and every rank receives
    the last stage's result; ``backward`` passes gradients back. Stages do not overlap:
    ``get_forward_backward_func`` of :mod:`hexad.compat.megatron` runs schedules.
    """

    _module: GPTModel

    def _workload(self) -> GPTWorkload:
        resolved, mesh = resolved_model(), parallel_state.get_mesh()
        placement = resolved.plan.schedule.placement
        if len(placement) > mesh.pipeline.size:
            raise HexadError(
                "initialize: found several stages per rank (--num-layers-per-virtual-pipeline-stage); "
                "use one, or get_forward_backward_func"
            )
        settings = self._settings(resolved.config)
        if settings.model.tied_embeddings:
            check_tied(False, settings.parallel.zero)
        shape = self._shape = tuple(empty_hidden(settings, mesh).shape)
        return GPTWorkload(
            {mesh.pipeline.rank: self._module},
            mesh,
            settings,
            plan=resolved.plan,
            boundary=lambda *_: torch.empty(shape),
            manners=MANNERS,
        )

    set_train_micro_batch_size = refused(
        "set_train_micro_batch_size", "found a GPTModel, whose ranks exchange --micro-batch-size sequences"
    )

    def _settings(self, flags: Config) -> Config:
        """The flags' settings, with the file's for state, precision and clipping."""
        file = engine_config(self._config, self.device.type == "cuda")
        if file.precision.dtype != flags.precision.dtype:
            raise ConfigError(
                "fp16.enabled, bf16.enabled",
                f"found {file.precision.dtype}, but the flags (--fp16, --bf16) make a model in "
                f"{flags.precision.dtype}; use the same",
            )
        micro = self._config.batch.micro
        if micro != flags.batch.micro:
            raise ConfigError(
                "train_micro_batch_size_per_gpu",
                f"found {micro}, but --micro-batch-size is {flags.batch.micro}; use the same",
            )
        return flags.model_copy(
            update={
                "parallel": flags.parallel.model_copy(update={"zero": file.parallel.zero}),
                "precision": file.precision,
                "optimizer": file.optimizer,
                # GPTModel wraps its own layers in recompute.
                "memory": file.memory,
                "checkpoint": file.checkpoint,
                "batch": flags.batch.model_copy(update={"global_": self._config.batch.total}),
            }
        )

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The model's result of a microbatch; of the last stage's model on every rank."""
        pipeline, module = self._engine.mesh.pipeline, self._module
        if pipeline.size == 1:
            result: Tensor = super().forward(*inputs, **named)
            return result
        received = None
        if pipeline.rank > 0:
            received = self._receive(pipeline.rank - 1, _RESULT)
            if torch.is_grad_enabled():
                received.requires_grad_()
                received.register_post_accumulate_grad_hook(self._send_back)
        module.set_input_tensor(received)
        output: Tensor = super().forward(*inputs, **named)
        last = pipeline.rank == pipeline.size - 1
        if not last:
            self._send(output.detach(), pipeline.rank + 1, _RESULT)
        final = output.detach().contiguous() if last else self._empty(inputs, named)
        final = broadcast(final, pipeline, pipeline.size - 1)
        if last or not output.requires_grad:
            return output if last else final
        gradient = partial(self._receive, pipeline.rank + 1, _GRADIENT)
        exchanged: Tensor = _Exchange.apply(output, final, gradient)
        return exchanged

    def _receive(self, source: int, tag: int) -> Tensor:
        """Hidden states, or their gradient, of a neighbour."""
        empty = torch.empty(self._shape, dtype=self._module.dtype, device=self.device)
        return receive_async(empty, self._engine.mesh.pipeline, source, tag).wait()

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        send_async(tensor.contiguous(), self._engine.mesh.pipeline, to, tag).wait()

    def _send_back(self, received: Tensor) -> None:
        assert received.grad is not None
        self._send(received.grad, self._engine.mesh.pipeline.rank - 1, _GRADIENT)
        received.grad = None

    def _empty(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        """An empty tensor like the last stage's result: losses, or logits."""
        tokens = inputs[0] if inputs else named["input_ids"]
        labels = named.get("labels", inputs[3] if len(inputs) > 3 else None)
        if labels is not None:
            wide = torch.promote_types(self._module.dtype, torch.float32)
            return torch.empty(tuple(tokens.shape), dtype=wide, device=self.device)
        vocab, mesh = int(resolved_model().config.model.vocab), self._engine.mesh
        width = vocab // mesh.tensor.size if self._module.parallel_output else vocab
        return torch.empty((*tokens.shape, width), dtype=self._module.dtype, device=self.device)
