"""The assignment of parameters to buckets, and their sizes. No torch: the trainer and the memory model both
call :func:`plan_buckets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..inventory import AxisPositions, Grid, Parameter, Traits

ALIGNMENT = 32
"""Elements to which views are aligned, for vectorised kernels."""


@dataclass(frozen=True)
class HeldParameter:
    """A parameter on a rank.

    Attributes:
        stage: number of the pipeline stage that holds it.
        parameter: what it is.
        elements: of the rank's tensor.
        traits: how it is treated.
        uses: modules that use it, and contribute to its gradient.
    """

    stage: int
    parameter: Parameter
    elements: int
    traits: Traits
    uses: int = 1

    @classmethod
    def of(cls, stage: int, parameter: Parameter, positions: AxisPositions, uses: int = 1) -> HeldParameter:
        """The parameter on the rank at these positions."""
        return cls(stage, parameter, parameter.elements(positions), parameter.traits(positions), uses)


@dataclass(frozen=True)
class BucketPlan:
    """A run of parameters in one flat tensor.

    Attributes:
        traits: of all its parameters.
        members: numbers of its parameters, the last in the model first: the order in which backward completes
            their gradients.
        elements: of each member.
        uses: of each member, see :class:`HeldParameter`.
        offsets: first element of each member in the bucket.
        size: in elements, padded: a multiple of the number of shards.
        shards: data ranks among which it is sharded.
        resident: its values are always on the rank; False for matrices in ZeRO 3, but those of adapters.
        keeps_gradients: all its gradients are kept between microbatches; False in ZeRO 2 and 3, which keep
            this rank's shard of their sum.
        outside_layers: see :class:`~hexad.parallel.inventory.Weight`.
    """

    traits: Traits
    members: tuple[int, ...]
    elements: tuple[int, ...]
    uses: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    shards: int
    resident: bool
    keeps_gradients: bool
    outside_layers: bool

    @property
    def frozen(self) -> bool:
        """Whether its parameters are not trained: it has no gradients."""
        return self.traits.frozen

    @property
    def fixed(self) -> bool:
        """Whether nothing ever changes its parameters."""
        return self.traits.frozen and not self.traits.wide

    def rounds(self, microbatches: int) -> int:
        """How often its gradients are reduced in a step."""
        return 1 if self.keeps_gradients else microbatches

    @property
    def order(self) -> int:
        """Its place: forward needs buckets in ascending order."""
        return self.members[-1]

    @property
    def shard_size(self) -> int:
        """Elements of a rank's shard."""
        return self.size // self.shards

    @property
    def layout(self) -> tuple[int, ...]:
        """Buckets of one layout can take turns with one buffer: its unused elements are the same."""
        return (self.size, *self.elements)


def state_shards(data: int, zero: int, replicas: int) -> int:
    """Into how many shards ``data`` ranks divide the state; in ZeRO 0 every rank holds it all."""
    return data // replicas if zero else 1


def plan_buckets(
    parameters: Sequence[HeldParameter],
    bucket_bytes: float,
    gradient: int,
    zero: int,
    shards: Mapping[Grid, int],
) -> list[BucketPlan]:
    """Put all parameters of a rank into buckets, in the order in which forward needs them.

    A bucket never holds parameters of two pipeline stages, nor both vectors and matrices, nor adapters and
    other weights; embedding, positions and head have buckets of their own. So a bucket is complete after one
    action of a schedule, the same on all data ranks, whichever way it divides the backward pass. In ZeRO 3
    the matrices of every unit have a bucket of their own.

    Args:
        parameters: in the order of the model.
        bucket_bytes: cut where gradients become larger than this.
        gradient: bytes of a gradient's element.
        zero: ``parallel.zero``.
        shards: see :func:`state_shards`, per grid.
    """
    runs: dict[tuple[int, Traits, bool, bool, bool, str], list[int]] = {}
    for number, entry in enumerate(parameters):
        matrix, weight = entry.parameter.matrix, entry.parameter.weights[0]
        resident = zero < 3 or not matrix or weight.adapter
        alone = not resident or (matrix and weight.outside_layers)
        key = (entry.stage, entry.traits, matrix, weight.adapter, resident, weight.unit if alone else "")
        runs.setdefault(key, []).append(number)
    plans = []
    for (_, traits, _, _, resident, _), numbers in runs.items():
        limit = bucket_bytes / gradient if resident else float("inf")
        count = shards[traits.grid]
        parts = _cut(numbers[::-1], parameters, limit)
        keeps = zero < 2 and not traits.frozen
        plans += [_plan(part, parameters, traits, count, resident, keeps) for part in parts]
    return sorted(plans, key=lambda plan: plan.order)


def _plan(
    members: Sequence[int],
    parameters: Sequence[HeldParameter],
    traits: Traits,
    shards: int,
    resident: bool,
    keeps: bool,
) -> BucketPlan:
    offsets, end = [], 0
    for number in members:
        offsets.append(end)
        end += _aligned(parameters[number].elements)
    return BucketPlan(
        traits,
        tuple(members),
        tuple(parameters[number].elements for number in members),
        tuple(parameters[number].uses for number in members),
        tuple(offsets),
        _aligned(end, ALIGNMENT * shards),
        shards,
        resident,
        keeps,
        parameters[members[0]].parameter.weights[0].outside_layers,
    )


def _aligned(elements: int, multiple: int = ALIGNMENT) -> int:
    return -(-elements // multiple) * multiple


def _cut(numbers: Sequence[int], parameters: Sequence[HeldParameter], limit: float) -> Iterator[list[int]]:
    """Runs of at most ``limit`` elements, or one parameter that is larger."""
    run: list[int] = []
    size = 0
    for number in numbers:
        elements = _aligned(parameters[number].elements)
        if run and size + elements > limit:
            yield run
            run, size = [], 0
        run.append(number)
        size += elements
    yield run
