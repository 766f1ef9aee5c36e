"""Parameters and gradients as views into flat contiguous buffers.

Parameters that are treated alike (weight decay, division over the tensor axis) share one buffer, so that
reduction, norm and update each touch a few large tensors instead of hundreds of small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from ..sharding import Declaration, DeclaredParameter, Piece, declared_parameters

_ALIGNMENT = 32  # elements; keeps every view on a boundary that vector and matrix units like


def aligned(elements: int) -> int:
    """Elements that a parameter takes up in a flat buffer."""
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Kind:
    """What the parameters of a group have in common; see :class:`hexad.parallel.sharding.Declaration`."""

    sharded: bool
    partial: bool
    decay: bool
    tied: bool
    copy: bool

    @classmethod
    def of(cls, declaration: Declaration) -> Kind:
        """The kind of a declared parameter."""
        return cls(**{field.name: getattr(declaration, field.name) for field in fields(cls)})


@dataclass
class Bucket:
    """A run of whole parameters in a group: the unit of reduction.

    Attributes:
        start, end: the slice of the flat buffers.
        members: how many parameters it holds.
        earliest: smallest place in the model of its parameters; the gradient of that one completes last.
        missing: parameters whose gradient is not complete in the current step.
    """

    start: int
    end: int
    members: int
    earliest: int
    missing: int = 0


class FlatGroup:
    """Parameters of one kind and dtype in one buffer, last layer first: the order in which backward
    completes their gradients.

    Attributes:
        parameters: flat values in the model's dtype; every parameter is a view of it.
        gradients: flat gradients, float32 (float64 in float64 runs).
        master: flat values the optimizer updates; ``parameters`` itself unless the model is 16-bit.
        buckets: runs of at most ``bucket_bytes`` of gradients (or one parameter that is larger).
    """

    def __init__(self, kind: Kind, members: Sequence[tuple[int, DeclaredParameter]], bucket_bytes: float):
        self.kind = kind
        self.members = sorted(members, key=lambda member: -member[0])
        first = self.members[0][1].parameter
        self.offsets: list[int] = []
        total = 0
        for _, declared in self.members:
            self.offsets.append(total)
            total += aligned(declared.parameter.numel())
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.parameters = torch.zeros(total, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(total, dtype=wide, device=first.device)
        for _, declared, view in self.views(self.parameters):
            declared.parameter.data = view.copy_(declared.parameter.detach())
        self.master = self.parameters if first.dtype == wide else self.parameters.to(wide)
        self.buckets = self._cut(bucket_bytes)

    def views(self, flat: torch.Tensor) -> Iterator[tuple[int, DeclaredParameter, torch.Tensor]]:
        """(place in the model, parameter, its view of ``flat``), in buffer order."""
        for offset, (place, declared) in zip(self.offsets, self.members):
            shape = declared.parameter.shape
            yield place, declared, flat[offset : offset + shape.numel()].view(shape)

    def pieces(self, flat: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """(piece, its view of ``flat``) of every global tensor that this rank holds a part of."""
        for _, declared, view in self.views(flat):
            for piece in declared.declaration.pieces:
                yield piece, piece.local(view)

    def bucket_of(self, offset: int) -> Bucket:
        """The bucket that holds this offset."""
        return next(bucket for bucket in self.buckets if bucket.start <= offset < bucket.end)

    def publish(self) -> None:
        """Copy the master values to the model after an update or a load."""
        if self.master is not self.parameters:
            self.parameters.copy_(self.master)

    def _cut(self, bucket_bytes: float) -> list[Bucket]:
        limit = max(1, int(bucket_bytes) // self.gradients.element_size())
        buckets: list[Bucket] = []
        for offset, (place, declared) in zip(self.offsets, self.members):
            end = offset + aligned(declared.parameter.numel())
            if buckets and end - buckets[-1].start <= limit:
                bucket = buckets[-1]
                bucket.end, bucket.members, bucket.earliest = end, bucket.members + 1, place
            else:
                buckets.append(Bucket(offset, end, 1, place))
        return buckets


def flatten(models: Iterable[nn.Module], bucket_bytes: float) -> list[FlatGroup]:
    """Move all parameters of the models (stages) into flat groups.

    The order is the same on all ranks that hold the same stages.
    """
    kinds: dict[Kind, list[tuple[int, DeclaredParameter]]] = {}
    for place, declared in enumerate(declared_parameters(*models)):
        kinds.setdefault(Kind.of(declared.declaration), []).append((place, declared))
    return [FlatGroup(kind, members, bucket_bytes) for kind, members in kinds.items()]
