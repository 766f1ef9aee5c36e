"""Groups of ranks that work together, and the tree over which all of them agree: pure arithmetic on rank
numbers, without torch.

A :class:`Layout` places ``world`` ranks on two grids that share the pipeline axis:

- dense layers: ``tensor x context x data x pipeline``;
- expert layers: ``expert_tensor x expert x expert_data x pipeline``.

Both follow one rank order, in which ``tensor`` also stands for ``expert_tensor`` and ``data`` for
``expert_data``. This is Megatron-Core's convention (``RankGenerator`` with ``tp-cp-ep-dp-pp``) and its
"parallel folding" of expert layers (arXiv 2504.14960). A rank is a mixed-radix number whose digits
are its coordinates, so every question is answered from (degree, stride) pairs and nothing of the size of the
world is ever stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from itertools import product
from math import gcd, prod
from typing import Any, Literal, NamedTuple

from hexad.config import ConfigError, counted, did_you_mean
from hexad.config.schema import ParallelSettings

MOST_RANKS = 2**22
"""Most ranks of a world: pictures and groups of ranks list them."""

DENSE_AXES = ("tensor", "context", "data", "pipeline")
EXPERT_AXES = ("expert_tensor", "expert", "expert_data", "pipeline")
AXES = ("tensor", "context", "pipeline", "data", "expert", "expert_tensor", "expert_data")
ORDER_NAMES = ("tensor", "context", "expert", "data", "pipeline")
DEFAULT_ORDER = "-".join(ORDER_NAMES)

# What a name in the order means on each grid; a grid skips the names it does not have.
_DENSE_OF = {"tensor": "tensor", "context": "context", "data": "data", "pipeline": "pipeline"}
_EXPERT_OF = {"tensor": "expert_tensor", "expert": "expert", "data": "expert_data", "pipeline": "pipeline"}
_MEGATRON_NAMES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline"}


class Digit(NamedTuple):
    """One digit of a rank: the coordinate is ``rank // stride % degree``."""

    degree: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of every axis plus the rank order.

    Args:
        world: ranks in all.
        tensor, context, pipeline: degrees of the dense grid.
        data: data degree; ``auto`` is ``world / (tensor * context * pipeline)``. Always an int afterwards.
        expert, expert_tensor: degrees of the expert grid; ``expert_data`` is
            ``world / (expert_tensor * expert * pipeline)``.
        order: names out of :data:`ORDER_NAMES`, fastest-varying first, joined by ``-``. Axes of
            degree 1 may be left out.

    Raises:
        ConfigError: degrees that do not fit the world, or a malformed order.
    """

    world: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int | Literal["auto"] = "auto"
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        _check_number("world", self.world, "ranks to start")
        if self.world > MOST_RANKS:
            raise ConfigError("world", f"found {self.world} ranks, expected at most {MOST_RANKS}")
        for name in ("tensor", "context", "pipeline", "expert", "expert_tensor"):
            _check_number(f"parallel.{name}", getattr(self, name), "a degree")
        if self.data != "auto":
            _check_number("parallel.data", self.data, "a degree or auto")
        object.__setattr__(self, "data", self._data_degree())
        self._check_divisible(("expert_tensor", "expert", "pipeline"))
        self._check_order()

    @classmethod
    def from_settings(cls, settings: ParallelSettings, world: int) -> Layout:
        """The layout that the ``parallel`` settings describe in a world of ``world`` ranks."""
        degrees = {
            field.name: getattr(settings, field.name) for field in fields(cls) if field.name != "world"
        }
        return cls(world=world, **degrees)

    # Questions about axes

    @cached_property
    def degrees(self) -> dict[str, int]:
        """Degree of each of the seven :data:`AXES`."""
        return {axis: prod(digit.degree for digit in self._digits[axis]) for axis in AXES}

    def degree(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return self.degrees[_known(axis)]

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which the gradients of dense layers are summed: those that have other tokens."""
        return self.degrees["data"] * self.context

    @property
    def state_ranks(self) -> dict[Literal["dense", "expert"], int]:
        """The number of ranks over which gradients are summed and state is sharded, per grid."""
        return {"dense": self.gradient_ranks, "expert": self.degrees["expert_data"]}

    # Questions about groups

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ only in their coordinates along ``axes``.

        Several axes make one combined group. Ranks ascend within a group, and groups ascend by first rank.

        Raises:
            ValueError: no axis, an unknown one, or axes of different grids.
        """
        return list(self.iter_groups(*axes))

    def iter_groups(self, *axes: str) -> Iterator[list[int]]:
        """:meth:`groups`, one at a time."""
        inside = self._digits_of(axes)
        outside = [digit for digit in self._grid_of(axes) if digit not in inside]
        members = list(_numbers(inside))
        return ([first + member for member in members] for first in _numbers(outside))

    def digits(self, *axes: str) -> tuple[Digit, ...]:
        """Degree and stride of each digit longer than 1 along ``axes``, fastest first: the first group of
        :meth:`groups` without a list of its ranks.

        Raises:
            ValueError: as :meth:`groups`.
        """
        return tuple(self._digits_of(axes))

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that share every coordinate with ``rank`` but those along ``axes``, itself included."""
        self._check_rank(rank)
        inside = self._digits_of(axes)
        first = rank - sum(rank // digit.stride % digit.degree * digit.stride for digit in inside)
        if len(inside) == 1:
            degree, stride = inside[0]
            return list(range(first, first + degree * stride, stride))
        return [first + member for member in _numbers(inside)]

    def contains(self, outer: Sequence[str], inner: Sequence[str]) -> bool:
        """Whether every group along the axes ``inner`` lies in one group along the axes ``outer``, which may
        be of the other grid."""
        ranges = _joined(self._longer(outer))
        return all(
            any(
                digit.stride % span.stride == 0
                and span.degree % (digit.stride // span.stride * digit.degree) == 0
                for span in ranges
            )
            for digit in self._longer(inner)
        )

    # Questions about ranks

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of ``rank`` along each of the seven :data:`AXES`."""
        self._check_rank(rank)
        return {axis: _coordinate(rank, self._digits[axis]) for axis in AXES}

    def rank_of(self, **coordinates: int) -> int:
        """The rank at these coordinates; the inverse of :meth:`coordinates`.

        Either grid's axes determine a rank; axes of degree 1 may be left out.

        Raises:
            ValueError: a coordinate is unknown, missing or out of range, or the two grids' disagree.
        """
        for axis, value in coordinates.items():
            if not 0 <= value < self.degree(axis):
                raise ValueError(f"{axis}: found coordinate {value}, expected 0 to {self.degree(axis) - 1}")
        complete = [
            grid
            for grid in (DENSE_AXES, EXPERT_AXES)
            if all(axis in coordinates or self.degree(axis) == 1 for axis in grid)
        ]
        if not complete:
            missing = [a for a in DENSE_AXES if a not in coordinates and self.degree(a) > 1]
            raise ValueError(f"no coordinate given along {', '.join(missing)}")
        ranks = [
            sum(_number(coordinates.get(axis, 0), self._digits[axis]) for axis in grid) for grid in complete
        ]
        if len(set(ranks)) > 1:
            raise ValueError(f"dense coordinates name rank {ranks[0]}, expert coordinates rank {ranks[1]}")
        return ranks[0]

    # The grids

    @cached_property
    def _digits(self) -> dict[str, tuple[Digit, ...]]:
        """Each axis's digits, fastest first. One digit, but for an ``expert_data`` without expert axes."""
        dense = self._strides(_DENSE_OF)
        if self.expert == self.expert_tensor == 1:
            # Nothing is laid out by the expert grid then: its data axis is all of a stage, in any order.
            stage = sorted(
                (digit for axis, digit in dense.items() if axis != "pipeline"), key=lambda digit: digit.stride
            )
            unit = (Digit(1, 1),)
            folded = {"expert": unit, "expert_tensor": unit, "expert_data": tuple(stage)}
            return {**{axis: (digit,) for axis, digit in dense.items()}, **folded}
        expert = self._strides(_EXPERT_OF)
        return {axis: (digit,) for axis, digit in {**expert, **dense}.items()}

    def _given(self, axis: str) -> int:
        """Degree of an axis; that of ``expert_data`` follows from the others."""
        if axis == "expert_data":
            return self.world // (self.expert_tensor * self.expert * self.pipeline)
        return int(getattr(self, axis))

    def _strides(self, meaning: dict[str, str]) -> dict[str, Digit]:
        """Degree and stride of each axis of a grid: the first in the order has stride 1, omitted ones degree
        1."""
        digits = {axis: Digit(1, 1) for axis in meaning.values()}
        stride = 1
        for axis in (meaning[name] for name in self.order.split("-") if name in meaning):
            digits[axis] = Digit(self._given(axis), stride)
            stride *= digits[axis].degree
        return digits

    def _grid_of(self, axes: tuple[str, ...]) -> list[Digit]:
        """Digits longer than 1 of the grid that holds all of ``axes``, fastest first."""
        if not axes:
            raise ValueError(f"name at least one axis out of {', '.join(AXES)}")
        for axis in axes:
            _known(axis)
        grid = next((grid for grid in (DENSE_AXES, EXPERT_AXES) if set(axes) <= set(grid)), None)
        if grid is None:
            raise ValueError(
                f"{', '.join(axes)}: axes of two grids; combine axes out of {', '.join(DENSE_AXES)} "
                f"or out of {', '.join(EXPERT_AXES)}"
            )
        digits = [digit for axis in grid for digit in self._digits[axis] if digit.degree > 1]
        return sorted(digits, key=lambda digit: digit.stride)

    def _digits_of(self, axes: tuple[str, ...]) -> list[Digit]:
        digits = {digit for axis in axes for digit in self._digits[_known(axis)]}
        return [digit for digit in self._grid_of(axes) if digit in digits]

    def _longer(self, axes: Sequence[str]) -> list[Digit]:
        """The digits of axes of any grid that are longer than 1, fastest first."""
        digits = {digit for axis in axes for digit in self._digits[_known(axis)] if digit.degree > 1}
        return sorted(digits, key=lambda digit: digit.stride)

    # Checks

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(f"found rank {rank}, expected 0 to {self.world - 1}")

    def _data_degree(self) -> int:
        self._check_divisible(("tensor", "context", "pipeline"))
        model = self.tensor * self.context * self.pipeline
        if self.data not in ("auto", self.world // model):
            raise ConfigError(
                "parallel.data",
                f"found {self.data}, but world {self.world} / (tensor {self.tensor} x context {self.context} "
                f"x pipeline {self.pipeline}) = {self.world // model}; use {self.world // model} or auto, "
                f"or start {counted(model * int(self.data), 'rank')}",
            )
        return self.world // model

    def _check_divisible(self, axes: tuple[str, ...]) -> None:
        """Refuse the first axis whose degree no longer divides the world."""
        degrees = {axis: self._given(axis) for axis in axes}
        product = 1
        for axis, degree in degrees.items():
            product *= degree
            if self.world % product:
                raise ConfigError(f"parallel.{axis}", self._misfit(axis, degrees))

    def _misfit(self, axis: str, degrees: dict[str, int]) -> str:
        product = prod(degrees.values())
        text = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        fitting = f"start {nearest_multiples(product, self.world)} ranks"
        others = product // degrees[axis]
        if self.world % others == 0:
            # A divisor of the degree: what fits the degree (heads, layers) fits its divisors too.
            fitting += f", or use {axis} {gcd(self.world // others, degrees[axis])}"
        return (
            f"found {degrees[axis]}, but world {self.world} is not divisible by {text} = {product}; {fitting}"
        )

    def _check_order(self) -> None:
        names = str(self.order).split("-")
        example = f"use each of {', '.join(ORDER_NAMES)} once, fastest first, such as {DEFAULT_ORDER}"
        for name in names:
            if name not in ORDER_NAMES:
                known = _MEGATRON_NAMES.get(name)
                hint = f" (did you mean '{known}'?)" if known else did_you_mean(name, ORDER_NAMES)
                raise ConfigError(
                    "parallel.order", f"found '{self.order}' with unknown axis '{name}'{hint}; {example}"
                )
            if names.count(name) > 1:
                raise ConfigError("parallel.order", f"found '{self.order}' with '{name}' twice; {example}")
        used = {name: self._given(name) for name in (*_DENSE_OF, "expert")}
        if self.expert * self.expert_tensor > 1:
            used |= {name: max(used[name], self._given(axis)) for name, axis in _EXPERT_OF.items()}
        for name, degree in used.items():
            if name not in names and degree != 1:
                raise ConfigError(
                    "parallel.order", f"found '{self.order}' without '{name}' (degree {degree}); {example}"
                )
        self._check_same_stages()

    def _check_same_stages(self) -> None:
        """Refuse an order that puts dense and expert layers of one stage on different ranks."""
        if self.pipeline == 1 or self.expert * self.expert_tensor == 1:
            return
        dense, expert = (self._strides(grid)["pipeline"] for grid in (_DENSE_OF, _EXPERT_OF))
        if dense != expert:
            names = [name for name in self.order.split("-") if name != "pipeline"]
            raise ConfigError(
                "parallel.order",
                f"found '{self.order}', which puts dense and expert layers of one pipeline stage on "
                f"different ranks (stride {dense.stride} against {expert.stride}); put pipeline last: "
                f"{'-'.join([*names, 'pipeline'])}",
            )


def _known(axis: str) -> str:
    if axis not in AXES:
        raise ValueError(f"unknown axis '{axis}'{did_you_mean(axis, AXES)}; known: {', '.join(AXES)}")
    return axis


def _check_number(field: str, value: object, meaning: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(field, f"found {value!r}, expected {meaning}: an integer of at least 1")


def _coordinate(rank: int, digits: tuple[Digit, ...]) -> int:
    """The number that a rank's ``digits`` spell, the first digit being the fastest."""
    coordinate, weight = 0, 1
    for degree, stride in digits:
        coordinate += rank // stride % degree * weight
        weight *= degree
    return coordinate


def _number(coordinate: int, digits: tuple[Digit, ...]) -> int:
    """The number that ``coordinate`` along an axis adds to a rank; the inverse of :func:`_coordinate`."""
    total = 0
    for degree, stride in digits:
        total += coordinate % degree * stride
        coordinate //= degree
    return total


def _joined(digits: list[Digit]) -> list[Digit]:
    """Digits (fastest first) of which those that follow each other without a gap are one."""
    joined: list[Digit] = []
    for digit in digits:
        if joined and joined[-1].degree * joined[-1].stride == digit.stride:
            joined[-1] = Digit(joined[-1].degree * digit.degree, joined[-1].stride)
        else:
            joined.append(digit)
    return joined


def _numbers(digits: list[Digit]) -> Iterator[int]:
    """Every value that ``digits`` (fastest first) can add to a rank, ascending."""
    slowest_first = (range(0, degree * stride, stride) for degree, stride in reversed(digits))
    return map(sum, product(*slowest_first))


def goes_to_next(sender: int, receiver: int, ranks: int) -> bool:
    """Whether a message between neighbours of a ring of ranks goes to the next one; of two ranks, to the one
    with the larger number."""
    return sender < receiver if ranks == 2 else (receiver - sender) % ranks == 1


def nearest_multiples(factor: int, value: int) -> str:
    """``8 or 12``: the multiples of a number just below and above a value."""
    below = value // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


FAN_OUT = 16
"""Ranks of a group. Those of a host are neighbours, so that the lowest level covers one or two hosts."""
CHANNELS = ("main", "checkpoint", "signals", "counts", "pace")
"""Agreements that may be made at the same time. A channel's place here is the tag of its messages."""


def tree_groups(rank: int, world: int, fan_out: int) -> Iterator[tuple[int, ...]]:
    """The ranks of the groups that a rank belongs to, from the lowest level up.

    It is the first rank in all but the last of them.
    """
    step = 1
    while step < world:
        width = step * fan_out
        first = rank - rank % width
        members = tuple(range(first, min(first + width, world), step))
        # At the end of the world one rank may be left over: it is a group of the next level only.
        if len(members) > 1:
            yield members
        if rank != first:
            return
        step = width


@dataclass(frozen=True)
class Level:
    """A rank's place in one of its groups.

    Attributes:
        ranks: global ranks of the group.
        place: this rank's among them; the first one passes on what the others send.
        group: gloo's process group.
    """

    ranks: tuple[int, ...]
    place: int
    group: Any


@dataclass(frozen=True)
class Tree:
    """A rank's part of the tree over which all ranks agree.

    Attributes:
        levels: from the lowest up; the rank is the first one in all but the last.
        channel: messages of different channels do not mix, so that several threads may use one tree.
        timeout: to wait for a message at most.
    """

    levels: tuple[Level, ...]
    channel: int
    timeout: timedelta
