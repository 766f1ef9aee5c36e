"""Values sent between users' pipeline stages: one tensor, or several and None, in one message.

Which ones is found by a forward pass without side effects, once for every new shape of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hexad.comm import Pending, gather_objects, merged, receive_async, send_async
from hexad.config import HexadError
from hexad.topology.mesh import Mesh


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
        parts: its tensors, in order; None for a None.
        template: lists, tuples and dictionaries around them, with their numbers in their places.
    """

    parts: tuple[MessagePart | None, ...]
    template: Any

    @classmethod
    def of(cls, result: Any, trained: bool) -> Form:
        """The form of a tensor, or of nested lists, tuples and dictionaries of tensors and None.

        Args:
            result: of a stage.
            trained: gradients of floating-point tensors are sent back.

        Raises:
            HexadError: it has something else, or no tensor.
        """
        values, structure = pytree.tree_flatten(result)
        other = next((value for value in values if not (value is None or isinstance(value, Tensor))), None)
        if other is not None or all(value is None for value in values):
            kind = "no tensor" if other is None else f"a {type(other).__name__}"
            raise HexadError(
                f"found {kind} in the result of a stage's last layer, expected tensors and None, alone or in "
                "tuples, lists or dictionaries"
            )
        parts = [
            None
            if value is None
            else MessagePart(tuple(value.shape), value.dtype, trained and value.is_floating_point())
            for value in values
        ]
        return cls(tuple(parts), pytree.tree_unflatten(range(len(values)), structure))

    @property
    def plain(self) -> bool:
        """Whether the message is the tensor itself."""
        part = self.parts[0]
        return isinstance(self.template, int) and part is not None and part.trained

    @property
    def tensors(self) -> list[MessagePart]:
        """The parts without None."""
        return [part for part in self.parts if part is not None]

    @property
    def dtype(self) -> torch.dtype:
        """The format of the message, which holds every value of those that have gradients."""
        kinds = [part.dtype for part in self.tensors if part.trained]
        return reduce(torch.promote_types, kinds) if kinds else torch.float32

    def message(self, result: Any) -> Tensor:
        """The message of a result, with its graph.

        Raises:
            HexadError: a result of another form.
        """
        if Form.of(result, any(part.trained for part in self.tensors)) != self:
            raise HexadError(
                "a stage's result has another form than that of a microbatch before with the same shapes; "
                "what stages pass on may depend on nothing else, unless boundary= names it"
            )
        if self.plain:
            tensor: Tensor = result
            return tensor
        values = pytree.tree_leaves(result)
        pairs = [(value, part) for value, part in zip(values, self.parts) if part is not None]
        return torch.cat([part.encoded(value, self.dtype) for value, part in pairs])

    def empty(self, device: torch.device) -> Tensor:
        """An empty tensor like the message."""
        if self.plain:
            return torch.empty(self.tensors[0].shape, dtype=self.dtype, device=device)
        size = sum(part.size(self.dtype) for part in self.tensors)
        return torch.empty(size, dtype=self.dtype, device=device)

    def result(self, message: Tensor) -> Any:
        """The result in a message."""
        if self.plain:
            return message
        elements = iter(message.split([part.size(self.dtype) for part in self.tensors]))
        values = [None if part is None else part.decoded(next(elements)) for part in self.parts]
        return pytree.tree_map(values.__getitem__, self.template)


class FormedBatch(NamedTuple):
    """A microbatch, and the forms of the results of all stages but the last.

    Attributes:
        batch: of the user.
        forms: by stage.
    """

    batch: Any
    forms: tuple[Form, ...]


def signature(batch: Any) -> object:
    """The facts that determine a microbatch's shapes: shapes and formats of its tensors, also of those in
    dataclasses, and the kinds of others."""
    values, structure = pytree.tree_flatten(batch)
    return tuple(_kind(value) for value in values), str(structure)


def _kind(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if not is_dataclass(value) or isinstance(value, type):
        return type(value).__name__
    return type(value).__name__, signature(
        {field.name: getattr(value, field.name) for field in fields(value)}
    )


_PROBE = 1 << 20
"""Message tag, beyond those of schedules."""


class Forms:
    """The forms of what a pipeline's stages pass on, by the signature of a microbatch.

    Args:
        stages: of this rank, by number.
        placement: the pipeline rank of every stage.
        mesh: of the run.
        compute: given a stage's number, a microbatch and the result of the stage before, computes its result.
        together: all data ranks compute at the same time, as gathered weights need (ZeRO 3).
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        placement: Sequence[int],
        mesh: Mesh,
        compute: Callable[[int, Any, Any], Any],
        together: bool,
    ) -> None:
        self._stages, self._placement, self._mesh = stages, placement, mesh
        self._compute, self._together = compute, together
        self._known: dict[object, tuple[Form, ...]] = {}

    def formed(self, batches: Sequence[Any], signatures: Sequence[object]) -> list[FormedBatch]:
        """Microbatches with their forms; all ranks together.

        Args:
            batches: of this data rank.
            signatures: of these, the same on all pipeline ranks.
        """
        unknown = list(dict.fromkeys(known for known in signatures if known not in self._known))
        rounds = merged(len(unknown), self._mesh.world, max) if self._together else len(unknown)
        for number in range(rounds):
            probed = unknown[number] if number < len(unknown) else signatures[0]
            self._known[probed] = self._probe(batches[signatures.index(probed)])
        return [FormedBatch(batch, self._known[known]) for batch, known in zip(batches, signatures)]

    @torch.no_grad()
    def _probe(self, batch: Any) -> tuple[Form, ...]:
        """The forms of all stages' results of one microbatch, by a forward pass without side effects."""
        pipeline, forms, result = self._mesh.pipeline, list[Form](), None
        device = self._mesh.device
        with (
            _evaluating(self._stages.values()),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            for number, rank in enumerate(self._placement[:-1]):
                form = None
                if rank == pipeline.rank:
                    result = self._compute(number, batch, result)
                    form = Form.of(result, trained=True)
                form = gather_objects(form, pipeline)[rank] if pipeline.size > 1 else form
                assert form is not None
                result = self._pass_on(form, result, rank, self._placement[number + 1])
                forms.append(form)
        return tuple(forms)

    def _pass_on(self, form: Form, result: Any, source: int, target: int) -> Any:
        """Send a stage's result to the rank of the next stage; returns it there, None elsewhere."""
        pipeline = self._mesh.pipeline
        pending: Pending | None = None
        if source == target:
            return result
        if pipeline.rank == source:
            pending = send_async(form.message(result).contiguous(), pipeline, target, _PROBE)
        elif pipeline.rank == target:
            pending = receive_async(form.empty(self._mesh.device), pipeline, source, _PROBE)
        received = None if pending is None else pending.wait()
        return form.result(received) if pipeline.rank == target and received is not None else None


@contextmanager
def _evaluating(stages: Iterator[nn.Module] | Any) -> Iterator[None]:
    """Evaluation mode of all modules inside: running averages are not updated."""
    training = [module for stage in stages for module in stage.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
