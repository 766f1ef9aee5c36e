"""Forward and backward passes of modules that a script has made itself, with its functions, by a pipeline's
schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hexad.config import HexadError
from hexad.parallel.data.buckets import BufferPool
from hexad.parallel.data.gradients import Gradients
from hexad.parallel.pipeline.executor import Executor, MessageBuffers
from hexad.parallel.pipeline.schedule import Schedule, forward_schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.topology.mesh import Mesh

from . import parallel_state
from .distributed import DistributedDataParallel, check_averaged, unwrapped
from .gpt import GPTModel

LossFunction = Callable[[Tensor], tuple[Any, ...]]
ForwardStep = Callable[[Any, Any], tuple[Tensor, LossFunction]]
Shape = tuple[int | None, int | None]
"""Tokens of a sequence, and sequences of a microbatch."""


@dataclass
class Step:
    """The script's functions and data of one call."""

    forward: ForwardStep
    iterators: Mapping[int, Any]  # by stage
    reported: list[Any] = field(default_factory=list)  # by the loss function, per microbatch
    sums: list[tuple[Tensor, Tensor | float]] = field(default_factory=list)  # of losses, and of what counts


def compute_of(stages: Mapping[int, nn.Module], last: int) -> Callable[..., Tensor]:
    """What an engine computes of a rank's stages, by a script's functions; the ``last`` has the loss."""
    return partial(_compute, {stage: number for number, stage in stages.items()}, last)


def _compute(
    numbers: dict[nn.Module, int],
    last: int,
    stage: nn.Module,
    step: Step,
    inputs: Tensor | None,
    _: float | None,
) -> Tensor:
    """A stage's pass of one microbatch."""
    module = unwrapped(stage)
    if inputs is not None or hasattr(module, "set_input_tensor"):
        module.set_input_tensor(inputs)
    number = numbers[stage]
    returned = step.forward(step.iterators.get(number), stage)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise HexadError(f"forward_step: found {_kind(returned)}; return (output, loss function)")
    output, loss_function = returned
    if number != last:
        return output
    if not callable(loss_function):
        raise HexadError(f"forward_step: found {_kind(loss_function)} as loss function; return a function")
    loss, counted, reported = _loss_of(loss_function(output))
    step.reported.append(reported)
    step.sums.append((loss.detach(), 1.0 if counted is None else counted))
    # As Megatron-Core: a microbatch where nothing counts has the loss 0.
    return loss if counted is None else loss / torch.as_tensor(counted).clamp(min=1)


def _loss_of(returned: Any) -> tuple[Tensor, Any, Any]:
    """The loss, what it is divided by (None: nothing), and what is reported, of a loss function's result.

    Raises:
        HexadError: a result of another form, which has no gradient or several elements.
    """
    forms = "return (loss, reported) or (sum, count, reported), with a loss of one element"
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        raise HexadError(f"loss function: found {_kind(returned)}; {forms}")
    loss, *counted, reported = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise HexadError(f"loss function: found {_kind(loss)} as loss; {forms}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise HexadError(
            "loss function: found a loss without a gradient; return it before detach() or item()"
        )
    return loss, counted[0] if counted else None, reported


def _kind(value: Any) -> str:
    """What a function has returned, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


_MEMORY: WeakKeyDictionary[nn.Module, MessageBuffers] = WeakKeyDictionary()
"""By a rank's first module."""


@dataclass
class Chunks:
    """This rank's stages, modules of a script's own: Megatron-Core's model chunks.

    Attributes:
        stages: by number.
        count: of stages, on all ranks.
        mesh: of the run.
    """

    stages: dict[int, nn.Module]
    count: int
    mesh: Mesh

    @classmethod
    def of(cls, model: Any) -> Chunks:
        """The stages that a script passes: a module, or a list of this rank's.

        Raises:
            HexadError: something else, or another number than ``parallel_state`` has.
        """
        chunks = model if isinstance(model, list) else [model]
        modules = all(isinstance(chunk, nn.Module) for chunk in chunks)
        if not chunks or not modules or not parallel_state.is_initialized():
            kind = "None" if model is None else f"a {type(model).__name__}"
            raise HexadError(f"model: found {kind}; pass what setup_model returns")
        mesh = parallel_state.get_mesh()
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        if len(chunks) != virtual:
            raise HexadError(
                f"model: found {len(chunks)} modules, but parallel_state has {virtual} stages for each "
                "pipeline rank; pass a list of these"
            )
        ranks = mesh.pipeline.size
        return cls(
            {place * ranks + mesh.pipeline.rank: chunk for place, chunk in enumerate(chunks)},
            virtual * ranks,
            mesh,
        )

    @property
    def settings(self) -> Any:
        """The ``config`` of the first module; None if it has none."""
        return getattr(unwrapped(next(iter(self.stages.values()))), "config", None)

    def run(self, step: Step, microbatches: int, shape: Shape, forward_only: bool) -> None:
        """Run the passes of one step: 1F1B, or interleaved with several stages per rank. Gradients are means
        over microbatches; they are added up where the modules have them."""
        check_averaged(self.settings)
        module = unwrapped(next(iter(self.stages.values())))
        if isinstance(module, GPTModel) and None not in shape:
            module.check_tokens(shape[0] * shape[1])  # type: ignore[operator]  # before any rank waits
        schedule = self._schedule(microbatches, forward_only)
        if not forward_only:
            for stage in self.stages.values():
                if isinstance(stage, DistributedDataParallel):
                    stage.expect(microbatches)
        executor = self._executor(schedule, shape)
        if forward_only:
            with torch.no_grad():
                executor.run([step] * microbatches)
            return
        executor.run([step] * microbatches, 1.0 / microbatches)
        finish = getattr(self.settings, "finalize_model_grads_func", None)
        if finish is not None:
            finish(list(self.stages.values()), None)

    def _schedule(self, microbatches: int, forward_only: bool) -> Schedule:
        ranks = self.mesh.pipeline.size
        virtual = self.count // ranks
        schedule = build_schedule("1f1b" if virtual == 1 else "interleaved", ranks, microbatches, virtual)
        return forward_schedule(schedule.placement, microbatches) if forward_only else schedule

    def _executor(self, schedule: Schedule, shape: Shape) -> Executor[Step]:
        compute = compute_of(self.stages, self.count - 1)
        scaled = getattr(self.settings, "grad_scale_func", None)

        def passed(stage: nn.Module, number: int, *arguments: Any) -> Tensor:
            result = compute(stage, *arguments)
            return scaled(result) if scaled is not None and number == self.count - 1 else result

        # Products are not deferred in these schedules: each module accumulates by itself.
        idle = Gradients((), {}, {}, {}, BufferPool(self.mesh.device), torch.float32)
        return Executor(
            schedule,
            {number: partial(passed, stage, number) for number, stage in self.stages.items()},
            self.mesh.pipeline,
            partial(self._boundary, shape),
            idle,
            self.mesh.device,
            self._messages(),
        )

    def _messages(self) -> MessageBuffers:
        """Memory of messages, the same in all steps of these modules."""
        first = self.stages[min(self.stages)]
        if first not in _MEMORY:
            _MEMORY[first] = MessageBuffers(self.mesh.device)
        return _MEMORY[first]

    def _boundary(self, shape: Shape, _: Step, __: int) -> Tensor:
        """An empty tensor like the hidden states that cross a stage boundary: of :class:`GPTModel`
        ``[tokens, hidden]``, of other modules ``[s, b, hidden]``; fewer tokens in sequence parallel."""
        length, batch = shape
        module, config = unwrapped(next(iter(self.stages.values()))), self.settings
        if length is None or batch is None:
            raise HexadError(
                "forward_backward: found no seq_length and micro_batch_size; a pipeline needs both"
            )
        if isinstance(module, GPTModel):
            shard = module.shard
            rows = length * batch // (shard.tensor.size if shard.sequence else 1)
            return torch.empty((rows, module.hidden), dtype=shard.dtype, device=shard.device)
        hidden = getattr(config, "hidden_size", None)
        if hidden is None:
            raise HexadError("model: found no config.hidden_size; a pipeline of modules needs it")
        divided = self.mesh.tensor.size if getattr(config, "sequence_parallel", False) else 1
        dtype = getattr(config, "pipeline_dtype", None) or getattr(config, "params_dtype", None)
        return torch.empty(
            (length // divided, batch, hidden), dtype=dtype or torch.float32, device=self.mesh.device
        )
