"""Parameters in flat contiguous buckets, the unit of reduction, update and gathering; among which data ranks
they are sharded (ZeRO: Rajbhandari et al., arXiv 1910.02054); their temporary buffers.

Parameters that are treated alike (weight decay, the axes that divide them) share buckets, so that each of
these touches a few large tensors instead of hundreds of small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.comm import streams
from hexad.comm.memory import same_place
from hexad.config.errors import HexadError
from hexad.topology.mesh import Axis, Mesh

from ..derived import forget_derived
from ..inventory import Grid, Traits, Weight
from ..rectangle import Rectangle
from ..sharding import (
    Declared,
    Provide,
    absent,
    fill_initial,
    guard,
    not_gathered,
    unguard,
)
from .bucket_plan import BucketPlan, HeldParameter, plan_buckets, state_shards


@dataclass(frozen=True)
class StateSharding:
    """How the data ranks of one grid hold the state of its weights.

    Level 0 is the same machinery with one rank per shard: every rank holds everything.

    Attributes:
        shards: the ranks among which it is sharded; size 1 in level 0.
        replicas: the ranks that hold the same shard (hybrid sharding, as in MiCS, arXiv 2205.00119).
        model: the axes of the grid that may divide a weight; ranks along them hold other shards of it, or
            copies.
    """

    shards: Axis
    replicas: Axis
    model: tuple[Axis, ...]

    def copies(self, traits: Traits) -> list[Axis]:
        """The axes of ``model`` along which ranks hold the same shards of weights with these traits. Weights
        that are divided over one part of an axis are copied along its other parts."""
        axes: list[Axis] = []
        for axis in self.model:
            if axis.name not in traits.divided:
                parts = [part for part in axis.parts if part.name not in traits.divided]
                axes += parts if len(parts) < len(axis.parts) else [axis]
        return axes

    def holder(self, traits: Traits) -> tuple[int, int]:
        """This rank's number among those that hold the same shards, and how many they are."""
        number, holders = self.replicas.rank, self.replicas.size
        for axis in self.copies(traits):
            number, holders = number * axis.size + axis.rank, holders * axis.size
        return number, holders

    @classmethod
    def create(cls, zero: int, replicas: int, mesh: Mesh, grid: Grid = "dense") -> StateSharding:
        """Split the axis over which the grid's gradients are reduced, as ``parallel.zero`` and
        ``parallel.replicas`` say; every rank calls this together."""
        data = mesh.gradient_axis(grid)
        return cls(*mesh.split(data, state_shards(data.size, zero, replicas)), mesh.model_axes(grid))


Shardings = Mapping[Grid, StateSharding]
"""The state sharding of every grid that has weights."""


@dataclass(frozen=True)
class Formats:
    """Number formats of the state.

    Attributes:
        parameters: of the model.
        gradients: in which they are added up on a rank.
        reduced: in which they are summed over data ranks.
        master: of what the optimizer updates: at least float32.
    """

    parameters: torch.dtype
    gradients: torch.dtype
    reduced: torch.dtype
    master: torch.dtype


class Bucket:
    """A run of parameters in flat tensors, of which this rank's shard is one slice.

    Attributes:
        plan: which parameters, and where they begin.
        traits: of all of them.
        members: the parameters, in the order of the plan.
        low, high: this rank's shard of it.
        whole: all parameters in the model's dtype, which are views of it; None while they are absent.
        gradients: all gradients; None while they are not kept.
        master: this rank's shard of the values in the master format, which the optimizer updates; of frozen
            parameters, in the model's format.
        source: what is gathered from: this rank's shard of the values on the device.
        gradient: this rank's shard of the summed gradients.
        offloaded: the master values are in the host's memory.
        provide: returns what is read of its parameters while their values are not here, or on their way.
    """

    def __init__(self, plan: BucketPlan, members: Sequence[Declared], rank: int) -> None:
        self.plan = plan
        self.traits = plan.traits
        self.members = tuple(members)
        self.low, self.high = rank * plan.shard_size, (rank + 1) * plan.shard_size
        self._shapes = tuple(member.parameter.shape for member in members)
        self._absent: list[Tensor] = []
        self.whole: Tensor | None = None
        self.gradients: Tensor | None = None
        self.master = torch.empty(0)
        self.source = torch.empty(0)
        self.gradient = torch.empty(0)
        self.offloaded = self._copied = False
        self.provide: Provide = not_gathered

    @property
    def adapter(self) -> bool:
        """Whether its parameters are those of low-rank adapters."""
        return self.members[0].declaration.weights[0].adapter

    def allocate(self, formats: Formats, host: bool) -> None:
        """Make what stays in memory all the time; with ``host`` the master values are in the host's.
        Parameters have the values that they came with; deferred ones are zero until :meth:`initialise` or a
        checkpoint sets them.

        Raises:
            HexadError: there is not enough memory for the parameters.
        """
        device = self.members[0].parameter.device
        tensors = {
            number: member.parameter.data for number, member in enumerate(self.members) if _has_values(member)
        }
        size = self.plan.size if self.plan.resident else self.plan.shard_size
        dtype = formats.master if self.traits.wide else formats.parameters
        try:
            values = torch.zeros(size, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; on CPUs it has no class of its own
            if "memory" not in str(error):
                raise
            gib = size * dtype.itemsize / 2**30
            raise HexadError(
                f"memory: a rank cannot allocate {gib:,.1f} GiB of parameters; use a smaller model or more "
                "ranks (hexad show memory)"
            ) from error
        low = 0 if self.plan.resident else self.low
        for member, tensor in tensors.items():
            self._copy_given(values, low, self.plan.offsets[member], tensor.reshape(-1))
        if self.plan.resident:
            self.attach(values)
            self._forget_derived()
        else:
            self._leave_without_values(dtype, device)
        shard = values[self.low - low : self.high - low]
        if self.plan.frozen:  # nothing updates it, so that the model's format is wide enough
            self.master = self.source = shard
            return
        self._keep_shard(shard, formats.master, host)
        if self.plan.keeps_gradients:
            self.gradients = torch.zeros(self.plan.size, dtype=formats.gradients, device=device)
            self.gradient = self.shard(self.gradients)
        else:
            self.gradient = torch.zeros(self.plan.shard_size, dtype=formats.gradients, device=device)

    @staticmethod
    def _copy_given(values: Tensor, low: int, offset: int, tensor: Tensor) -> None:
        """Copy a parameter's values, from ``offset`` on in the bucket, to a tensor that begins at ``low``."""
        begin, end = max(offset, low), min(offset + tensor.numel(), low + values.numel())
        if begin < end:
            values[begin - low : end - low].copy_(tensor[begin - offset : end - offset])

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the initial values of weights that are not given, of which a rank draws what it keeps."""
        values, low = self.held
        for rectangle, weight, part in self.weights(values, low):
            if not weight.given:
                fill_initial(part, rectangle, weight, seed)
        self._forget_derived()
        shard = values[self.low - low : self.high - low]
        if not self.plan.frozen:
            # Master values begin as what the model computes with, as they do in buckets that are resident.
            self.master.copy_(shard.to(self.members[0].parameter.dtype))

    def _keep_shard(self, shard: Tensor, master: torch.dtype, host: bool) -> None:
        self.offloaded = host
        if host:
            self.master = streams.of(shard.device).pinned(shard.to("cpu", master, copy=True))
        else:
            self.master = shard.to(master)  # where the formats agree, the same memory
        self.source = shard if self.plan.resident or host else self.master

    @property
    def in_use(self) -> bool:
        """Whether modules compute with the master values themselves."""
        return self.plan.resident and same_place(self.master, self.source)

    @property
    def held(self) -> tuple[Tensor, int]:
        """The values that always are on the device, and which element of the bucket they begin with."""
        if self.plan.resident:
            assert self.whole is not None
            return self.whole, 0
        return self.source, self.low

    def adopt(self) -> None:
        """Take the values that were changed among the complete ones, which are here. Others keep their
        masters, which have more digits."""
        shard = self.shard(self.whole)
        streams.of(shard.device).join(streams.SAVING)
        if not same_place(self.master, shard):
            values = shard.to(self.master.device)
            changed = values != self.master.to(shard.dtype)
            self.master.copy_(torch.where(changed, values.to(self.master.dtype), self.master))

    def written_too(self) -> Tensor | None:
        """The tensor to which an update on the device also writes the new master values, in the model's
        format, so that :meth:`publish` does not copy them; None where there is no copy."""
        if self.offloaded or same_place(self.source, self.master):
            return None
        self._read(self.members[0].parameter)  # waits where its old values are still being gathered
        self._copied = True
        return self.source

    def publish(self) -> None:
        """Copy new master values to where they are gathered from."""
        self._forget_derived()
        if not (self._copied or same_place(self.source, self.master)):
            self.source.copy_(self.master, non_blocking=True)
        self._copied = False

    def _forget_derived(self) -> None:
        if self.plan.resident:
            for declared in self.members:
                forget_derived(declared.parameter)

    def shard(self, flat: Tensor | None) -> Tensor:
        """This rank's slice of a flat tensor of the bucket's size."""
        assert flat is not None
        return flat[self.low : self.high]

    def offset_of(self, parameter: object) -> int:
        """The element that one of its parameters begins with."""
        numbers = (n for n, declared in enumerate(self.members) if declared.parameter is parameter)
        return self.plan.offsets[next(numbers)]

    def view(self, flat: Tensor, member: int) -> Tensor:
        """A member's view of a flat tensor of the bucket's size."""
        shape, offset = self._shapes[member], self.plan.offsets[member]
        return flat[offset : offset + shape.numel()].view(shape)

    def views(self, flat: Tensor) -> list[Tensor]:
        """All members' views of a flat tensor of the bucket's size, outside of any graph. A flat tensor keeps
        them: in ZeRO 3 a layer would make 50 views per microbatch, which takes the host 0.1 ms."""
        kept: dict[object, list[Tensor]] | None = flat.__dict__.get("views")
        if kept is None:
            kept = flat.views = {}  # type: ignore[attr-defined]
        if self._shapes not in kept:
            # Views of an alias: those of the tensor itself would keep it, and it them.
            with torch.inference_mode(False), torch.no_grad():
                kept[self._shapes] = [self.view(flat.data, member) for member in range(len(self.members))]
        return kept[self._shapes]

    def attach(self, whole: Tensor) -> None:
        """Make the parameters views of ``whole``."""
        self.whole = whole
        self.unguard()
        for declared, view in zip(self.members, self.views(whole)):
            declared.parameter.data = view

    def guard(self) -> None:
        """Let :attr:`provide` decide what is read of the parameters, until :meth:`unguard`."""
        for declared in self.members:
            guard(declared.parameter, self._read)

    def _read(self, parameter: Tensor) -> Tensor:
        return self.provide(parameter)

    def unguard(self) -> None:
        """Make the parameters' values readable."""
        for declared in self.members:
            unguard(declared.parameter)

    def detach(self) -> Tensor:
        """Leave the parameters without values; returns what held them."""
        whole, self.whole = self.whole, None
        assert whole is not None
        self._leave_without_values(whole.dtype, whole.device)
        return whole

    def _leave_without_values(self, dtype: torch.dtype, device: torch.device) -> None:
        self.unguard()
        self._absent = self._absent or [absent(shape, dtype, device) for shape in self._shapes]
        for declared, placeholder in zip(self.members, self._absent):
            declared.parameter.data = placeholder
        self.guard()

    def give_back(self, device: torch.device) -> None:
        """Give the parameters, whose values are here, memory of their own on a device, and keep of the bucket
        only the master values, there too."""
        assert self.whole is not None
        for member, declared in enumerate(self.members):
            declared.parameter.data = self.view(self.whole, member).to(device, copy=True)
        self.master.data = self.master.data.to(device, copy=True)  # whoever holds it keeps it
        self.whole = self.gradients = None
        self.source = self.gradient = self.master

    def pieces(self, shard: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
        """(rectangle of a global tensor, its view) of everything in a tensor like ``master``: a rank holds at
        most three rectangles of a matrix."""
        for rectangle, _, view in self.weights(shard, self.low):
            yield rectangle, view

    def weights(self, flat: Tensor, first: int) -> Iterator[tuple[Rectangle, Weight, Tensor]]:
        """(rectangle, weight, view) of everything in a tensor that holds the bucket from
        element ``first`` on."""
        for offset, declared in zip(self.plan.offsets, self.members):
            width = declared.parameter.shape[1:].numel()
            for start, rectangle, weight in declared.pieces:
                begin = offset + start * width  # in the bucket
                low, high = max(first, begin), min(first + flat.numel(), begin + rectangle.numel)
                for position, part in rectangle.flat_range(low - begin, high - begin):
                    at = begin + position - first
                    view = flat[at : at + part.numel].view(part.sizes)
                    yield part, weight, view


def _has_values(declared: Declared) -> bool:
    """Whether a parameter has memory of its own, not a placeholder."""
    data = declared.parameter.data
    return declared.plain or data.untyped_storage().nbytes() >= data.numel() * data.element_size()


def make_buckets(
    members: Sequence[tuple[int, Declared]],
    bucket_bytes: float,
    formats: Formats,
    zero: int,
    sharding: Shardings,
) -> list[Bucket]:
    """Parameters of this rank's pipeline stages, each with the number of its stage, in buckets as
    :func:`plan_buckets` puts them."""
    parameters = [
        HeldParameter.of(stage, member.declaration, member.positions, member.uses)
        for stage, member in members
    ]
    counts = {grid: state.shards.size for grid, state in sharding.items()}
    plans = plan_buckets(parameters, bucket_bytes, formats.gradients.itemsize, zero, counts)
    return [
        Bucket(plan, [members[number][1] for number in plan.members], sharding[plan.traits.grid].shards.rank)
        for plan in plans
    ]


class BufferPool:
    """Flat tensors of a bucket's size, used again.

    Buckets of one layout share buffers, so that padding is zeroed once and stays zero. Nothing is given back
    to the system: what was needed once is needed again every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[object, ...], list[Tensor]] = {}

    def take(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """A buffer for ``bucket``, with whatever values its parameters' elements had last."""
        free = self._free.get((dtype, *bucket.plan.layout))
        if free:
            return free.pop()
        with torch.inference_mode(False):  # a buffer made while evaluating is used in training too
            return torch.zeros(bucket.plan.size, dtype=dtype, device=self._device)

    def give(self, bucket: Bucket, buffer: Tensor) -> None:
        """Give back what :meth:`take` returned for a bucket of the same layout."""
        self._free.setdefault((buffer.dtype, *bucket.plan.layout), []).append(buffer)
