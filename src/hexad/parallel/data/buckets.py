"""Parameters in flat contiguous buckets: the unit of reduction, update and gathering.

Parameters that are treated alike (weight decay, division over the tensor axis) share buckets, so that each of
these touches a few large tensors instead of hundreds of small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from ..sharding import Declaration, DeclaredParameter, Piece, absent, declared_parameters, initialise
from .rectangles import overlap

_ALIGNMENT = 32  # elements; keeps every view on a boundary that vector and matrix units like


def aligned(elements: int, multiple: int = _ALIGNMENT) -> int:
    """``elements`` rounded up: what a parameter takes up in a bucket, or a bucket in memory."""
    return -(-elements // multiple) * multiple


@dataclass(frozen=True)
class Kind:
    """What the parameters of a bucket have in common; see :class:`hexad.parallel.sharding.Declaration`."""

    sharded: bool
    partial: bool
    decay: bool
    tied: bool
    copy: bool

    @classmethod
    def of(cls, declaration: Declaration) -> Kind:
        """The kind of a declared parameter."""
        return cls(**{field.name: getattr(declaration, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Formats:
    """Number formats of the state.

    Attributes:
        parameters: of the model.
        gradients: of accumulation and reduction.
        master: of what the optimizer updates: at least float32.
    """

    parameters: torch.dtype
    gradients: torch.dtype
    master: torch.dtype


class Bucket:
    """A run of whole parameters in flat tensors, of which this rank's share is one slice.

    Attributes:
        kind: of all its parameters.
        members: the parameters, last layer first: the order in which backward completes their gradients.
        offsets: where each begins, in elements.
        size: in elements, a multiple of the number of shards.
        low, high: this rank's share of it.
        order: smallest place in the model of its parameters; forward needs buckets in this order.
        resident: ``whole`` is always there. False for matrices in stage 3.
        whole: all parameters in the model's dtype, which are views of it; None while they are absent.
        gradients: all gradients; None while they are not kept.
        master: this rank's share of the values in the master format; the optimizer updates it.
        source: what is gathered from: this rank's share of the values on the device.
        gradient: this rank's share of the summed gradients.
    """

    def __init__(
        self,
        kind: Kind,
        members: Sequence[DeclaredParameter],
        order: int,
        shards: int,
        rank: int,
        resident: bool,
    ) -> None:
        self.kind = kind
        self.members = tuple(members)
        self.order = order
        self.resident = resident
        self.offsets: list[int] = []
        end = 0
        for declared in self.members:
            self.offsets.append(end)
            end += aligned(declared.parameter.numel())
        self.size = aligned(end, _ALIGNMENT * shards)
        share = self.size // shards
        self.low, self.high = rank * share, (rank + 1) * share
        self.whole: torch.Tensor | None = None
        self.gradients: torch.Tensor | None = None
        self.master = torch.empty(0)
        self.source = torch.empty(0)
        self.gradient = torch.empty(0)

    @property
    def layout(self) -> tuple[int, ...]:
        """Buckets of one layout can take turns with one buffer: its unused elements are the same."""
        return (self.size, *(declared.parameter.numel() for declared in self.members))

    def allocate(self, formats: Formats, stage: int, host: bool, seed: int) -> None:
        """Make what stays in memory all the time, with initial values drawn from ``seed``.

        Args:
            formats: number formats.
            stage: what data ranks divide among them, see :class:`StateSharding`.
            host: the master values stay in the host's memory.
            seed: of the initial values.
        """
        device = self.members[0].parameter.device
        self.attach(torch.zeros(self.size, dtype=formats.parameters, device=device))
        initialise(self.members, seed)
        self._keep_share(self.share(self.whole), formats.master, host)
        if stage < 2:
            self.gradients = torch.zeros(self.size, dtype=formats.gradients, device=device)
            self.gradient = self.share(self.gradients)
        else:
            self.gradient = torch.zeros(self.high - self.low, dtype=formats.gradients, device=device)
        if not self.resident:
            self.detach()

    def _keep_share(self, share: torch.Tensor, master: torch.dtype, host: bool) -> None:
        if host:
            self.master = share.to("cpu", master, copy=True)
            if share.device.type == "cuda":
                self.master = self.master.pin_memory()
        elif share.dtype != master or not self.resident:
            self.master = share.to(master, copy=True)
        else:
            self.master = share
        if self.resident:
            self.source = share
        else:
            self.source = share.clone() if host else self.master

    def publish(self) -> None:
        """Copy new master values to where they are gathered from."""
        if self.source.data_ptr() != self.master.data_ptr():
            self.source.copy_(self.master, non_blocking=True)

    def share(self, flat: torch.Tensor | None) -> torch.Tensor:
        """This rank's slice of a flat tensor of the bucket's size."""
        assert flat is not None
        return flat[self.low : self.high]

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Every member's view of a flat tensor of the bucket's size."""
        for offset, declared in zip(self.offsets, self.members):
            shape = declared.parameter.shape
            yield flat[offset : offset + shape.numel()].view(shape)

    def attach(self, whole: torch.Tensor) -> None:
        """Make the parameters views of ``whole``."""
        self.whole = whole
        for declared, view in zip(self.members, self.views(whole)):
            declared.parameter.data = view

    def detach(self) -> torch.Tensor:
        """Leave the parameters without values; returns what held them."""
        whole, self.whole = self.whole, None
        assert whole is not None
        for declared in self.members:
            declared.parameter.data = absent(declared.parameter.shape, whole.dtype, whole.device)
        return whole

    def pieces(self, share: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """(piece, its view) of every rectangle of a global tensor in a tensor like ``master``: what a rank
        keeps of a matrix is at most three rectangles of each global tensor in it."""
        for offset, declared in zip(self.offsets, self.members):
            low, high = max(self.low, offset), min(self.high, offset + declared.parameter.numel())
            if low >= high:
                continue
            values = share[low - self.low : high - self.low]
            for piece in declared.declaration.pieces:
                yield from overlap(piece, declared.parameter.shape, low - offset, values)


def make_buckets(
    stages: Mapping[int, nn.Module], bucket_bytes: float, formats: Formats, stage: int, shards: int, rank: int
) -> list[Bucket]:
    """Put all parameters of this rank's pipeline stages into buckets, in the order forward needs them.

    A bucket never holds parameters of two pipeline stages, nor both vectors and matrices, and the matrices of
    embedding, positions and head have buckets of their own: all gradients of a bucket are complete after the
    same action of a schedule, whichever way it divides the backward pass. In stage 3 the matrices of every
    unit (see :func:`units`) have a bucket of their own.

    Args:
        stages: by number.
        bucket_bytes: cut where gradients become larger than this.
        formats: number formats.
        stage: what data ranks divide among them.
        shards: among how many, and which of them this is.
        rank: see ``shards``.
    """
    runs: dict[tuple[int, Kind, bool, int], list[tuple[int, DeclaredParameter]]] = {}
    known = {declared.parameter: declared for declared in declared_parameters(*stages.values())}
    places = {parameter: place for place, parameter in enumerate(known)}
    for number, model in stages.items():
        for unit, module in enumerate(units(model)):
            for parameter in dict.fromkeys(module.parameters()):
                declared = known.pop(parameter, None)
                if declared is None:  # a tied weight, used by two units
                    continue
                matrix, block = parameter.dim() > 1, _is_block(model, module)
                apart = unit if matrix and (stage == 3 or not block) else -1
                key = (number, Kind.of(declared.declaration), matrix, apart)
                runs.setdefault(key, []).append((places[parameter], declared))
    buckets = []
    for (_, kind, matrix, _), members in runs.items():
        limit = bucket_bytes / formats.gradients.itemsize if stage < 3 or not matrix else float("inf")
        for part in _cut(sorted(members, key=lambda member: -member[0]), limit):
            resident = stage < 3 or not matrix
            declared_members = [declared for _, declared in part]
            buckets.append(Bucket(kind, declared_members, part[-1][0], shards, rank, resident))
    return sorted(buckets, key=lambda bucket: bucket.order)


def units(model: nn.Module) -> list[nn.Module]:
    """The parts of a stage whose parameters are needed together, in the order of the forward pass: its
    embedding, positions, every single layer, norm and head."""
    found: list[nn.Module] = []
    for child in model.children():
        found += child.children() if isinstance(child, nn.ModuleDict) else [child]
    return found


def _is_block(model: nn.Module, unit: nn.Module) -> bool:
    return all(unit is not child for child in model.children())


def _cut(
    members: Sequence[tuple[int, DeclaredParameter]], limit: float
) -> Iterator[list[tuple[int, DeclaredParameter]]]:
    """Runs of at most ``limit`` elements, or one parameter that is larger."""
    run: list[tuple[int, DeclaredParameter]] = []
    size = 0
    for member in members:
        elements = aligned(member[1].parameter.numel())
        if run and size + elements > limit:
            yield run
            run, size = [], 0
        run.append(member)
        size += elements
    if run:
        yield run
