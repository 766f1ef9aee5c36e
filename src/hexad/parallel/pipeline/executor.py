"""Runs a schedule: executes this rank's actions, and derives sends and receives from them.

One stage on one rank is a schedule too, so that there is no separate path without a pipeline.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hexad.comm import Pending, receive_async, send_async, streams
from hexad.topology.mesh import Axis

from ..data.gradients import Deferred, Gradients
from .schedule import Action, Message, Schedule
from .simulate import Costs
from .transfers import Exchange, transfers

M = TypeVar("M")

Stage = Callable[[M, Tensor | None, float | None], Tensor]
"""The computation of one stage, given a microbatch, the hidden states of the stage before (None on the
first), and what the loss will be multiplied by before it is differentiated (None in evaluation): hidden
states, and on the last stage a scalar, the sum of the microbatch's token losses."""

Buffer = Callable[[M, int], Tensor]
"""Makes an uninitialised tensor like the result of a stage, given microbatch and stage."""


class MessageBuffers:
    """Memory of messages, used again as soon as nothing else refers to it.

    A message of NCCL marks its memory as used by the communicator's stream (``recordStream``): if it were
    freed, PyTorch's allocator would have it back only when the device has caught up with the host, which is
    many microbatches ahead. On a CPU messages are tensors of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._pooled = streams.of(device).apart
        self._buffers: list[Tensor] = []

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor like one that has just been made."""
        return self._place(tensor) if self._pooled else tensor

    def of(self, result: Tensor) -> Tensor:
        """A stage's result, to be sent: contiguous, and not changed by anyone."""
        return self._place(result).copy_(result) if self._pooled else result.contiguous()

    def _place(self, tensor: Tensor) -> Tensor:
        free = [buffer for buffer in self._buffers if _references(buffer) == _ALONE]
        fitting = [buffer for buffer in free if buffer.nbytes >= tensor.nbytes]
        if fitting:
            buffer = min(fitting, key=lambda buffer: buffer.nbytes)
        else:
            if free:  # in its place
                self._buffers = [buffer for buffer in self._buffers if buffer is not free[0]]
            with torch.inference_mode(False):  # one that was made while evaluating is used in training too
                buffer = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
            self._buffers.append(buffer)
        # Not a view of it, whose graphs would see that it has been written again.
        return buffer.data[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _references(buffer: Tensor) -> int:
    """How many tensors share a buffer's memory, and one for its storage's object."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))


_ALONE = _references(torch.empty(1))


@dataclass
class Executor(Generic[M]):
    """Runs one schedule on one rank, step after step.

    Attributes:
        schedule: valid; of forward actions only for evaluation.
        stages: this rank's stages, by number.
        axis: the pipeline axis.
        buffer: for what other ranks send.
        gradients: where the stages' weight gradients may be deferred.
        device: where the stages compute.
        memory: of messages.
        costs: of the stages, by which messages are ordered; the same on all ranks.
        peak_activations: most pairs of stage and microbatch held at once so far, from ``F`` to ``W``.
        times: (start, end) of every action of the last recorded run, in seconds since its start; time spent
            waiting for messages lies between actions.
        began: start of that run, in seconds since the epoch.
        began_action: called with each action before it is executed, and with None after the last one.
    """

    schedule: Schedule
    stages: Mapping[int, Stage[M]]
    axis: Axis
    buffer: Buffer[M] | None
    gradients: Gradients
    device: torch.device
    memory: MessageBuffers
    costs: Costs | None = None
    peak_activations: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)
    began: float = 0.0
    began_action: Callable[[Action | None], None] | None = None

    def __post_init__(self) -> None:
        self._transfers = transfers(self.schedule, self.costs)[self.axis.rank]

    def run(
        self, microbatches: Sequence[M], scale: float | None = None, record: bool = False
    ) -> Tensor | None:
        """Execute this rank's actions.

        Args:
            microbatches: as many as the schedule has, the same ones on all pipeline ranks.
            scale: what the sum of all token losses is multiplied by before it is differentiated. None where
                the schedule has no backward actions.
            record: measure ``times``.

        Returns:
            float64 sum of all token losses on the rank of the last stage; None on others.

        Raises:
            ValueError: another number of microbatches.
        """
        if len(microbatches) != self.schedule.microbatches:
            raise ValueError(f"{len(microbatches)} microbatches, scheduled are {self.schedule.microbatches}")

        transport = _PointToPoint(self.axis, self.buffer, microbatches, self.memory)
        exchange = Exchange(self.schedule, self._transfers, transport)
        walk = _Walk(self.schedule, self.stages, microbatches, scale, self.gradients)
        clock = _Clock(self.device) if record else None
        for action in self.schedule.ranks[self.axis.rank]:
            if self.began_action is not None:
                self.began_action(action)
            message = self.schedule.received(action)
            received = None if message is None else exchange.receive(message)
            if clock is not None:
                clock.tick()
            result = walk.act(action, received)
            if clock is not None:
                clock.tick()
            message = self.schedule.sent(action)
            if message is not None:
                assert result is not None
                exchange.send(message, self.memory.of(result))
            del received, result
            self.peak_activations = max(self.peak_activations, walk.held)
        exchange.finish()
        if self.began_action is not None:
            self.began_action(None)
        if clock is not None:
            self.times, self.began = clock.pairs(), clock.began
        return walk.total


@dataclass
class _PointToPoint(Generic[M]):
    """Sends tensors over the pipeline axis."""

    axis: Axis
    buffer: Buffer[M] | None
    microbatches: Sequence[M]
    memory: MessageBuffers

    def send(self, message: Tensor, peer: int, tag: int) -> Pending:
        return send_async(message, self.axis, peer, tag)

    def receive(self, message: Message, peer: int, tag: int) -> Pending:
        assert self.buffer is not None, "stages on several ranks need a boundary"
        # A gradient has the shape of what the stage before has sent.
        boundary = message.stage if message.kind == "F" else message.stage - 1
        buffer = self.memory.like(self.buffer(self.microbatches[message.microbatch], boundary))
        return receive_async(buffer, self.axis, peer, tag)


class _Graph(NamedTuple):
    """The autograd graph of a stage and a microbatch, held from ``F`` to ``B``.

    Attributes:
        inputs: whose gradient goes to the stage before; None if none does.
        root: where backward starts: the loss, or the edge of the graph at the output, which is not held
            itself. None if nothing needs a gradient.
    """

    inputs: Tensor | None
    root: Tensor | GradientEdge | None


@dataclass
class _Walk(Generic[M]):
    """The state of one execution: activations from ``F`` to ``B``, and operands of weight gradients to
    ``W``."""

    schedule: Schedule
    stages: Mapping[int, Stage[M]]
    microbatches: Sequence[M]
    scale: float | None
    gradients: Gradients
    total: Tensor | None = None
    graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    weights: dict[tuple[int, int], Deferred] = field(default_factory=dict)
    handed: dict[Message | None, Tensor] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Pairs of stage and microbatch of which anything is held."""
        return len(self.graphs) + len(self.weights)

    def act(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Execute one action; returns its result for a neighbouring stage."""
        kind, stage, microbatch = action
        if kind == "W":
            self.gradients.compute_deferred(self.weights.pop((stage, microbatch)))
            return None
        if received is None:  # the neighbour is on this rank, or there is none
            received = self.handed.pop(action.needs, None)
        if kind == "F":
            result = self._forward(stage, microbatch, received)
        else:
            result = self._backward(stage, microbatch, received, split=kind == "B")
        message = action.gives
        if result is not None and message is not None and message.target in self.stages:
            self.handed[message] = result
        return result

    def _forward(self, stage: int, microbatch: int, inputs: Tensor | None) -> Tensor | None:
        training = self.scale is not None
        passes = training and inputs is not None and self.schedule.passes(stage)
        if inputs is not None:
            inputs.requires_grad_(passes)
        with torch.set_grad_enabled(training):
            output = self.stages[stage](self.microbatches[microbatch], inputs, self.scale)
        final = stage == self.schedule.stages - 1
        needed = training and output.requires_grad
        if passes or needed:
            root = None if not needed else output if final else get_gradient_edge(output)
            self.graphs[stage, microbatch] = _Graph(inputs if passes else None, root)
        if not final:
            return output.detach()
        loss = output.detach().double()
        self.total = loss if self.total is None else self.total + loss
        return None

    def _backward(self, stage: int, microbatch: int, gradient: Tensor | None, split: bool) -> Tensor | None:
        inputs, root = self.graphs.pop((stage, microbatch), _Graph(None, None))
        if isinstance(root, Tensor):
            assert self.scale is not None
            gradient = torch.full_like(root, self.scale)
        with self.gradients.defer() if split else nullcontext() as later:
            if root is not None:
                torch.autograd.backward(root, gradient)
        if later is not None:
            self.weights[stage, microbatch] = later
        if inputs is None:
            return None
        return torch.zeros_like(inputs) if inputs.grad is None else inputs.grad


class _Clock:
    """Times on the device: of the host's clock on a CPU, of events in the stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] | None = [] if device.type == "cuda" else None
        self._seconds: list[float] = []
        self.began = time.time()
        self.tick()

    def tick(self) -> None:
        if self._events is None:
            self._seconds.append(time.perf_counter())
            return
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()

    def pairs(self) -> list[tuple[float, float]]:
        """(start, end) of each two ticks, in seconds since the clock was created."""
        if self._events is not None:
            self._events[-1].synchronize()
            self._seconds = [self._events[0].elapsed_time(event) / 1000 for event in self._events]
        seconds = [moment - self._seconds[0] for moment in self._seconds[1:]]
        return list(zip(seconds[::2], seconds[1::2]))
