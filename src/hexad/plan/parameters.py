"""The parameters of a pipeline rank and the buckets they go into, from the configuration alone.

Follows :mod:`hexad.model.transformer` and :mod:`hexad.parallel.data.buckets`; ``tests/memory`` holds both
to the same buckets, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hexad.config.schema import ModelSettings
from hexad.parallel.shapes import padded_vocab

_ALIGNMENT = 32  # of hexad.parallel.data.buckets, which needs torch


class Kind(NamedTuple):
    """As :class:`hexad.parallel.data.buckets.Kind`."""

    sharded: bool
    partial: bool
    decay: bool
    tied: bool = False
    copy: bool = False


class Parameter(NamedTuple):
    """One rank's share of a parameter: elements, whether it is a matrix, and its kind."""

    elements: int
    matrix: bool
    kind: Kind


@dataclass(frozen=True)
class Unit:
    """Parameters that are needed together: an embedding, a layer, a norm or a head."""

    parameters: tuple[Parameter, ...]
    block: bool = False


class Place(NamedTuple):
    """Of a parameter: positions of its stage on the rank, of its unit in the stage, and in the unit."""

    stage: int
    unit: int
    parameter: int


@dataclass(frozen=True)
class PlannedBucket:
    """The size of a bucket.

    Attributes:
        members: elements of its parameters.
        size: in elements, padded.
        resident: always whole on the rank.
        places: where its parameters are.
    """

    members: tuple[int, ...]
    size: int
    resident: bool
    places: tuple[Place, ...]

    @property
    def layout(self) -> tuple[int, ...]:
        """Buckets of one layout take turns with one buffer."""
        return (self.size, *self.members)


def stage_units(
    model: ModelSettings, tensor: int, sequence: bool, layers: int, first: bool, last: bool, tied: str
) -> list[Unit]:
    """The units of one pipeline stage, in the order of the model.

    Args:
        model: resolved; ``vocab`` and ``max_positions`` are numbers.
        tensor: tensor degree.
        sequence: sequence parallel is in force.
        layers: of the stage.
        first: it has the embedding.
        last: it has the final norm and the head.
        tied: where the head's weight is: ``own``, ``here`` (on this rank, with the embedding) or ``copy``.
    """
    sharded, hidden = tensor > 1, model.hidden
    table = padded_vocab(int(model.vocab), tensor) // tensor * hidden
    norm_parameter = Parameter(hidden, False, Kind(False, sequence, False))
    norm = (norm_parameter,) * (2 if model.family == "gpt2" else 1)
    units = []
    if first:
        kind = Kind(sharded, False, True, tied=tied == "copy")
        units.append(Unit((Parameter(table, True, kind),)))
        if model.family == "gpt2":
            rows = int(model.max_positions)
            units.append(Unit((Parameter(rows * hidden, True, Kind(False, sequence, True)),)))
    units += [Unit(tuple(_block(model, tensor, sequence, norm)), block=True)] * layers
    if last:
        units.append(Unit(norm))
        head = {
            "own": (Parameter(table, True, Kind(sharded, False, True)),),
            "copy": (Parameter(table, True, Kind(sharded, False, True, True, True)),),
            "here": (),
        }
        units.append(Unit(head[tied]))
    return units


def _block(
    model: ModelSettings, tensor: int, sequence: bool, norm: tuple[Parameter, ...]
) -> Iterator[Parameter]:
    gpt2, hidden, width = model.family == "gpt2", model.hidden, int(model.head_dim)
    weight, bias = Kind(tensor > 1, False, True), Kind(tensor > 1, False, False)
    whole_bias = Parameter(hidden, False, Kind(False, sequence, False))
    queries = model.heads * width // tensor
    qkv = queries + 2 * int(model.kv_heads) * width // tensor
    inner = int(model.ffn_hidden) // tensor
    outputs = inner if gpt2 else 2 * inner
    yield from norm
    yield Parameter(qkv * hidden, True, weight)
    if model.qkv_bias:
        yield Parameter(qkv, False, bias)
    yield Parameter(hidden * queries, True, weight)
    if gpt2:
        yield whole_bias
    if model.qk_norm:
        yield from (Parameter(width, False, Kind(False, tensor > 1, False)),) * 2
    yield from norm
    yield Parameter(outputs * hidden, True, weight)
    if gpt2:
        yield Parameter(outputs, False, bias)
    yield Parameter(hidden * inner, True, weight)
    if gpt2:
        yield whole_bias


def plan_buckets(
    stages: Sequence[Sequence[Unit]], bucket_bytes: float, gradient: int, zero: int, shards: int
) -> list[PlannedBucket]:
    """The buckets of one rank's pipeline stages, in the order in which backward completes them.

    Args:
        stages: units of each.
        bucket_bytes: ``parallel.bucket_mb`` in bytes.
        gradient: bytes of a gradient's element.
        zero: ``parallel.zero``.
        shards: data ranks that share the state.
    """
    buckets = []
    for stage, units in reversed(list(enumerate(stages))):
        runs: dict[tuple[Kind, bool, int], list[tuple[int, Place]]] = {}
        for number, unit in enumerate(units):
            for index, (elements, matrix, kind) in enumerate(unit.parameters):
                apart = number if matrix and (zero == 3 or not unit.block) else -1
                member = elements, Place(stage, number, index)
                runs.setdefault((kind, matrix, apart), []).append(member)
        for (_, matrix, _), members in reversed(runs.items()):
            absent = zero == 3 and matrix
            limit = float("inf") if absent else bucket_bytes / gradient
            for part in _cut(members[::-1], limit):
                sizes, places = zip(*part)
                size = _aligned(sum(map(_aligned, sizes)), _ALIGNMENT * shards)
                buckets.append(PlannedBucket(sizes, size, not absent, places))
    return buckets


def _aligned(elements: int, multiple: int = _ALIGNMENT) -> int:
    return -(-elements // multiple) * multiple


def _cut(members: Sequence[tuple[int, Place]], limit: float) -> Iterator[list[tuple[int, Place]]]:
    run: list[tuple[int, Place]] = []
    size = 0
    for member in members:
        elements = _aligned(member[0])
        if run and size + elements > limit:
            yield run
            run, size = [], 0
        run.append(member)
        size += elements
    yield run
