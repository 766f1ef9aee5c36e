"""Declarations of modules' parameters, operations, memory and messages, without torch.

A module's inventory stands beside its code (``model/attention.py``, ``model/attention_inventory.py``) and is
made of the types declared here. Layers allocate their parameters from it; initialisation, buckets, the
gradient norm, parameter counts, FLOPs, checkpoints, published tensors and the memory model read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from operator import add
from typing import Literal, NamedTuple

from .exact_inventory import function_bytes, function_each
from .rectangle import Rectangle

DRAWN = 1 << 20
"""Elements of which dropout decides at a time."""

Kept = Counter[str]
"""Bytes kept from forward to backward, by kind: ``residual``, ``norm``, ``attention``, ``feed_forward``,
``experts``, ``loss``, ``positions``, and ``boundary``: received from another stage."""

Grid = Literal["dense", "expert"]
"""The one of the two grids of :mod:`hexad.topology.layout` a weight is divided over."""


class Position(NamedTuple):
    """A rank's place along an axis."""

    rank: int = 0
    size: int = 1


AxisPositions = Mapping[str, Position]
"""A rank's place along every axis, by name; an axis that is missing has size 1."""

KV_AXES = ("kv", "kv_copies")
"""The tensor axis as a product, where it has more ranks than attention has key/value heads: ``kv`` numbers
the heads, and the ranks along ``kv_copies``, which are neighbours, hold the same one."""


def tensor_positions(place: Position, copies: int) -> AxisPositions:
    """A rank's place along the tensor axis and along :data:`KV_AXES`, given the size of ``kv_copies``."""
    run, copy = divmod(place.rank, copies)
    parts = Position(run, place.size // copies), Position(copy, copies)
    return {"tensor": place, **dict(zip(KV_AXES, parts))}


@dataclass(frozen=True)
class Weight:
    """A global tensor, and how its values are divided over the device grid.

    Attributes:
        name: of the tensor in checkpoints.
        shape: global, without padding.
        divided: axis -> the dim that is divided over it. Several axes may divide one dim, the first in the
            largest parts.
        partial: axes whose ranks each compute part of the gradient, so that the parts must be summed.
        grid: whose axes ``divided`` names, and over whose data axis gradients are reduced.
        decay: whether weight decay applies.
        std: standard deviation of the initial values; 0 means the constant ``fill``.
        fill: initial value where ``std`` is 0.
        multiple: every shard of a divided dim 0 is padded to a multiple of this; 0 requires it to divide.
        unit: path of the module it is gathered with (ZeRO 3): weights of one unit are needed together.
        outside_layers: its gradient is complete at another time than those of layers (embedding, output
            head), and backward does not need its values.
        vocabulary: its rows are those of the vocabulary: the embedding's or the output head's.
        frozen: it is not trained: no gradient, no optimizer state, no values in a wider format.
        wide: frozen, and in the format of master values: it is changed by a rule of its own.
        adapter: it is part of a low-rank adapter, small enough to stay on every rank in ZeRO 3.
        group: of the optimizer's settings, where the optimizer has several.
        given: its initial values are those that its module came with; otherwise an engine draws them.
        within: where the weight begins in the global tensor, in every dim, and that tensor's shape, if it is
            a part of one: the parts are divided one by one.
    """

    name: str
    shape: tuple[int, ...]
    divided: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    grid: Grid = "dense"
    decay: bool = False
    std: float = 0.0
    fill: float = 0.0
    multiple: int = 0
    unit: str = ""
    outside_layers: bool = False
    vocabulary: bool = False
    frozen: bool = False
    wide: bool = False
    adapter: bool = False
    group: int = 0
    given: bool = False
    within: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def fixed(self) -> bool:
        """Whether nothing ever changes it."""
        return self.frozen and not self.wide

    def local_shape(self, positions: AxisPositions) -> tuple[int, ...]:
        """The shape of a rank's shard, padding included.

        Raises:
            ValueError: a dim does not divide by the axes' sizes.
        """
        return tuple(self._along(dim, positions)[1] for dim in range(len(self.shape)))

    def rectangle(self, positions: AxisPositions) -> Rectangle:
        """The part of the global tensor that a rank holds; empty where it holds padding only."""
        offset, sizes = [], []
        for dim, extent in enumerate(self.shape):
            index, size = self._along(dim, positions)
            offset.append(min(index * size, extent))
            sizes.append(min((index + 1) * size, extent) - offset[-1])
        first, whole = self.within or ((0,) * len(self.shape), self.shape)
        return Rectangle(self.name, whole, tuple(map(add, first, offset)), tuple(sizes))

    def _along(self, dim: int, positions: AxisPositions) -> tuple[int, int]:
        """(index of the rank's shard, size of every shard) along a dim."""
        index, parts = 0, 1
        for axis, divided in self.divided.items():
            if divided == dim:
                place = positions.get(axis, Position())
                index, parts = index * place.size + place.rank, parts * place.size
        size, extent = -(-self.shape[dim] // parts), self.shape[dim]
        if dim == 0 and self.multiple:
            return index, -(-size // self.multiple) * self.multiple
        if extent % parts:
            raise ValueError(f"{self.name}: dim {dim} of {extent} does not divide by {parts} ranks")
        return index, size


@dataclass(frozen=True)
class Traits:
    """Properties that the parameters of a bucket share.

    Attributes:
        divided: axes of a degree above 1 over which they are divided.
        partial: axes of a degree above 1 over which their gradients must be summed.
        grid: see :class:`Weight`.
        decay: whether weight decay applies.
        tied: other pipeline ranks hold the same values for another use (a tied embedding), so that the
            gradients of all must be summed: a name that these have in common; empty if none do.
        copy: not the first of these, so that the gradient norm leaves it out.
        frozen: they are not trained.
        group, wide: see :class:`Weight`.
    """

    divided: frozenset[str]
    partial: frozenset[str]
    grid: Grid
    decay: bool
    tied: str = ""
    copy: bool = False
    frozen: bool = False
    group: int = 0
    wide: bool = False


_COMMON = (
    *("divided", "partial", "grid", "decay", "unit", "outside_layers"),
    *("frozen", "wide", "adapter", "group"),
)
"""Fields that the weights of one :class:`Parameter` share."""


@dataclass(frozen=True)
class Parameter:
    """One local tensor: a weight, or several that are fused along dim 0.

    Attributes:
        name: of the attribute, from the stage's root: ``layers.3.attention.qkv.weight``.
        weights: with the same ``divided``, ``partial``, ``grid``, ``decay``, ``unit``, ``outside_layers``,
            ``frozen``, ``wide``, ``adapter``, ``group``.
        tied, copy: see :class:`Traits`.

    Raises:
        ValueError: the weights differ in one of these.
    """

    name: str
    weights: tuple[Weight, ...]
    tied: str = ""
    copy: bool = False

    def __post_init__(self) -> None:
        first, *others = self.weights
        for trait in _COMMON if others else ():
            if any(getattr(other, trait) != getattr(first, trait) for other in others):
                values = [getattr(weight, trait) for weight in self.weights]
                raise ValueError(f"{self.name}: the weights differ in {trait}: {values}")

    @property
    def unit(self) -> str:
        """The unit of the model with which the parameter is gathered."""
        return self.weights[0].unit

    @property
    def matrix(self) -> bool:
        """Whether the parameter has two dimensions or more."""
        return len(self.weights[0].shape) > 1

    @property
    def frozen(self) -> bool:
        """Whether the parameter is not trained."""
        return self.weights[0].frozen

    def local_shape(self, positions: AxisPositions) -> tuple[int, ...]:
        """The shape of a rank's tensor, padding included."""
        shapes = [weight.local_shape(positions) for weight in self.weights]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def elements(self, positions: AxisPositions) -> int:
        """Elements of a rank's tensor, padding included."""
        return prod(self.local_shape(positions))

    def pieces(self, positions: AxisPositions) -> list[tuple[int, Rectangle, Weight]]:
        """(first row in the local tensor, rectangle, weight) of everything a rank's tensor holds."""
        pieces, start = [], 0
        for weight in self.weights:
            pieces.append((start, weight.rectangle(positions), weight))
            start += weight.local_shape(positions)[0]
        return pieces

    def traits(self, positions: AxisPositions) -> Traits:
        """How a rank treats it; axes of degree 1 divide nothing."""
        first = self.weights[0]
        several = {axis for axis, place in positions.items() if place.size > 1}
        divided, partial = frozenset(several & first.divided.keys()), frozenset(several & first.partial)
        shared = first.grid, first.decay, self.tied, self.copy, first.frozen, first.group, first.wide
        return Traits(divided, partial, *shared)


class Product(NamedTuple):
    """Matrix products of one kind: ``times`` times ``[m, k] @ [k, n]``, ``2 * m * n * k`` FLOPs each.

    Attributes:
        action: ``F``, ``B`` or ``W``.
        again: it repeats a product of the forward pass, which MFU does not count.
        kernel: what computes it: a product of matrices, or a part of a fused attention kernel.
        groups: matrices of one kernel over which rows are divided evenly: ``m`` in ``F`` and ``B``, ``k`` in
            ``W``.
        aside: a weight's gradient that is set aside, to be computed beside a later collective.
        wide: of operands in float32 at least, whatever the model's format.
        eight: of operands in 8 bits; a weight's gradient only where these are computed in 8 bits, too.
    """

    action: str
    m: int
    n: int
    k: int
    times: float = 1.0
    again: bool = False
    kernel: Literal["product", "attention"] = "product"
    groups: int = 1
    aside: bool = False
    wide: bool = False
    eight: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of all ``times`` products."""
        return 2.0 * self.m * self.n * self.k * self.times


class Pass(NamedTuple):
    """Functions whose time is that of their passes over memory: norms, activations, copies, sums.

    Attributes:
        action: ``F``, ``B`` or ``W``.
        kind: ``norm``, ``activation``, ``rotation``, ``sum``, ``copy``, ``loss``, ``embedding``, ``routing``,
            ``permutation`` or ``bias``.
        nbytes: read and written, where pointwise functions are compiled.
        kernels: launched.
        again: it repeats a pass of the forward pass.
    """

    action: str
    kind: str
    nbytes: int
    kernels: int = 1
    again: bool = False


class Collective(NamedTuple):
    """A collective operation.

    Attributes:
        action: ``F``, ``B`` or ``W``.
        axis: over which it runs.
        operation: as :func:`hexad.comm.sent_bytes` names it, or ``exchange``: point to point, all that a rank
            sends.
        nbytes: of the whole tensor; of an ``exchange`` what the rank sends.
        beside: how many of the products and passes that follow are computed before its result is needed.
        meanwhile: products that were set aside are computed first.
    """

    action: str
    axis: str
    operation: str
    nbytes: int
    beside: int = 0
    meanwhile: bool = False


Operation = Product | Pass | Collective
"""An operation of a rank in an action."""


class Operations(NamedTuple):
    """Operations of a rank for a microbatch, in order.

    Attributes:
        forward: all of action ``F``.
        backward: of actions ``B`` and ``W``.
        last: how many of the last ones in ``forward`` only make the result, and are not repeated in full
            recompute.
    """

    forward: list[Operation]
    backward: list[Operation]
    last: int = 0

    def then(self, following: Operations) -> Operations:
        """These, followed in the forward pass by others."""
        return Operations(
            self.forward + following.forward, following.backward + self.backward, following.last
        )

    def reached(self, reached: bool) -> Operations:
        """These, where a gradient of their result or their weights is needed; else without backward pass."""
        return self if reached else self._replace(backward=[])

    def of(self, action: str) -> list[Operation]:
        """The operations of ``F``, ``B``, ``W`` or ``BW``. A product that is set aside is not deferred to
        ``W``."""
        if action == "F":
            return self.forward
        return [op for op in self.backward if _within(op, action)]

    @property
    def products(self) -> list[Product]:
        """The matrix products of all actions."""
        return [op for op in (*self.forward, *self.backward) if isinstance(op, Product)]

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of all actions."""
        return [op for op in (*self.forward, *self.backward) if isinstance(op, Collective)]

    def repeated(self) -> list[Operation]:
        """The forward pass without what only makes its result, as ``B`` repeats it."""
        kept = self.forward[: len(self.forward) - self.last]
        return [again(op) for op in kept]


def again(operation: Operation) -> Operation:
    """An operation of the forward pass as the backward pass repeats it."""
    if isinstance(operation, Collective):
        return operation._replace(action="B")
    return operation._replace(action="B", again=True)


def _within(operation: Operation, action: str) -> bool:
    """Whether a backward operation is one of ``B``, ``W`` or ``BW``."""
    if action == "BW":
        return True
    aside = isinstance(operation, Product) and operation.aside
    return (operation.action == action and not aside) or (aside and action == "B")


class Moment(NamedTuple):
    """Part of a backward pass, up to the gradient of a weight.

    Attributes:
        needed: bytes at the most, above what is held when the backward pass begins; negative where what was
            kept has been given up.
        complete: bytes when the weight's gradient is complete, above the same.
        weights: whose gradient that is.
        aside: bytes of the operands, where the weight's gradient is set aside: they stay, and the gradient is
            complete, until the next collective that nothing else is computed beside.
    """

    needed: int
    complete: int
    weights: tuple[Parameter, ...] = ()
    aside: int = 0

    def above(self, nbytes: int) -> Moment:
        """The moment on top of ``nbytes`` bytes that are there anyway."""
        return self._replace(needed=self.needed + nbytes, complete=self.complete + nbytes)


@dataclass(frozen=True)
class Execution:
    """How a rank computes a microbatch: what bytes and products depend on besides the model.

    Attributes:
        sequences, length: of a microbatch; tokens are their product.
        tensor: tensor degree.
        sequence: sequence parallel is in force.
        byte: bytes of a parameter's or an activation's element.
        gradient: bytes of an element of the gradient buffers.
        reduced: bytes of an element of gradients when they are sent to other data ranks.
        keeps_gradients: gradients are kept over the step (ZeRO 0 and 1).
        fp8: products are computed in 8 bits.
        fp8_weight_gradients: those of weight gradients too.
        rounded_once: weights are kept in 8 bits from their first product to the next update.
        cpu: on a CPU.
        compiled: pointwise functions are compiled.
        isolate: attention is confined to documents.
        attended: of all pairs of tokens of a sequence, the part in one document; below 1 with ``isolate``.
        context: context degree; every rank has as many of the tokens.
        expert, expert_tensor: degrees of the expert grid.
        load: rows of a rank's experts, relative to an even load; no more than there can be.
        ulysses: context ranks that exchange heads for tokens.
        gathers: keys and values are gathered over the other context ranks, else sent in rounds.
        exact: the forward pass computes by :mod:`hexad.parallel.exact`; the backward pass first repeats the
            usual functions.
        chunks: of a tensor-parallel layer's forward pass, of which one is sent while the next is computed.
        keys: tokens whose keys and values a rank sends in the rounds of a ring, and receives; None: those of
            all tokens, to every other rank.
        routed: rows that a rank sends to experts of other ranks, and receives from these; None: those of an
            even load.
        imposed: experts are imposed on tokens, so that their capacity does not matter.
        fp8_experts: products of experts are computed in 8 bits, too; Hexad computes them in the model's
            format.
    """

    sequences: int
    length: int
    tensor: int = 1
    sequence: bool = False
    byte: int = 4
    gradient: int = 4
    reduced: int = 4
    keeps_gradients: bool = True
    fp8: bool = False
    fp8_weight_gradients: bool = False
    rounded_once: bool = False
    cpu: bool = True
    compiled: bool = False
    isolate: bool = False
    attended: float = 1.0
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    load: float = 1.0
    ulysses: int = 1
    gathers: bool = False
    exact: bool = False
    chunks: int = 1
    keys: tuple[int, int] | None = None
    routed: tuple[int, int] | None = None
    imposed: bool = False
    fp8_experts: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.sequences * self.length // self.context

    @property
    def replicated(self) -> Execution:
        """How a rank computes what every tensor rank holds: of its own rows of the residual stream."""
        if self.tensor == 1:
            return self
        context = self.context * (self.tensor if self.sequence else 1)
        return replace(self, tensor=1, sequence=False, context=context)

    @property
    def ring(self) -> int:
        """Context ranks that exchange keys and values."""
        return self.context // self.ulysses

    @property
    def rows(self) -> int:
        """Rows of the residual stream on a rank."""
        return self.tokens // self.tensor if self.sequence else self.tokens

    @property
    def wide(self) -> int:
        """Bytes of a statistic's element: at least those of float32."""
        return max(self.byte, 4)

    @property
    def widening(self) -> int:
        """How many times larger a tensor in the wide format is: 2 for 16-bit formats."""
        return self.wide // self.byte

    def stream(self, hidden: int) -> int:
        """Bytes of a rank's part of the residual stream."""
        return self.rows * hidden * self.byte

    def whole(self, features: int) -> int:
        """Bytes of ``[tokens, features]``."""
        return self.tokens * features * self.byte

    def gathered(self, hidden: int) -> int:
        """Bytes that a gather of the stream, or a sum before it is scattered, adds."""
        return self.whole(hidden) if self.sequence else 0

    def function(self, elements: int) -> int:
        """Bytes that exact arithmetic needs beside a function's result of so many elements."""
        return function_bytes(elements, self.cpu, function_each(self.byte)) if self.exact else 0

    def mask(self, elements: int) -> int:
        """Bytes for drawing which of the elements are dropped: four 32-bit numbers each, some at a time."""
        return 0 if self.compiled else 16 * min(elements, DRAWN)

    def weight_product(self, elements: int) -> int:
        """Bytes of a weight's gradient before it is added in another format; GPUs add products of 16-bit
        matrices to float32 gradients in one."""
        in_one = self.gradient == self.byte or (self.gradient == 4 and self.byte == 2 and not self.cpu)
        return 0 if in_one else elements * self.byte
