"""The results of operations on sharded tensors: arithmetic with shapes, no torch.

A dim is divided in a number of *parts*: equal runs, each of which is divided over the ranks in order. There
is one after a column-parallel layer, two after a packed one. A dim is divided if its size is not that of the
same operation in the undivided model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

Shape = tuple[int, ...]
DividedDims = Mapping[int, int]
"""Divided dim -> its parts."""
Gradient = Literal["none", "whole", "summed"]
"""Gradient of a tensor that all ranks have: it needs none; each rank must compute all of it; each must
compute a part, and the parts are summed."""


class Misfit(Exception):
    """A rank would not compute its part of what one process computes."""


@dataclass(frozen=True)
class Operand:
    """A tensor of the undivided and of the divided model.

    Attributes:
        whole, local: its shape on one process and on a rank.
        parts: of the dims that differ.
        gradient: that of a tensor without divided dims.
    """

    whole: Shape
    local: Shape
    parts: DividedDims = field(default_factory=dict)
    gradient: Gradient = "none"


@dataclass(frozen=True)
class ShardedOperation:
    """A call of an operation in both models.

    Attributes:
        name: without its overload: ``view``, ``bmm``.
        pointwise: it computes each element from those at the same place.
        operands: its tensors.
        whole, local: its other arguments by name, on one process and on a rank.
        shapes: of its results, on one process and on a rank.
        ranks: over which dims are divided.
    """

    name: str
    pointwise: bool
    operands: Sequence[Operand]
    whole: Mapping[str, Any]
    local: Mapping[str, Any]
    shapes: Sequence[tuple[Shape, Shape]]
    ranks: int

    def results(self) -> list[Operand]:
        """The shapes and divided dims of its results.

        Raises:
            Misfit: a rank's result is no part of that of one process.
        """
        self._check_numbers()
        rule = RULES.get(self.name, _by_place if self.pointwise else _along)
        results = []
        for number, (whole, local) in enumerate(self.shapes):
            dims = divided_dims(whole, local, self.ranks)
            parts = rule(self, number)
            if parts.keys() != set(dims):
                raise self.misfit(number)
            results.append(Operand(whole, local, parts, self._gradient(bool(dims))))
        return results

    def misfit(self, number: int) -> Misfit:
        """The error of a result whose elements are no rank's part."""
        whole, local = (list(shape) for shape in self.shapes[number])
        of_rank = ", ".join(str(list(operand.local)) for operand in self.operands) or "no tensor"
        of_one = ", ".join(str(list(operand.whole)) for operand in self.operands) or "no tensor"
        return Misfit(
            f"found shape {local} of {self.name} of {of_rank}, expected a rank's part of {whole} of "
            f"{self.name} of {of_one}"
        )

    def _check_numbers(self) -> None:
        """Refuse numbers that follow a rank's heads or features and are no sizes, such as scales."""
        for name, value in self.whole.items():
            number = isinstance(value, float) or (self.pointwise and isinstance(value, int))
            if (number or name == "fill_value") and repr(value) != repr(self.local[name]):
                raise Misfit(f"found the number {self.local[name]!r} in {self.name}, expected {value!r}")

    def _gradient(self, is_divided: bool) -> Gradient:
        kinds = {operand.gradient for operand in self.operands if not operand.parts} - {"none"}
        if is_divided and "whole" in kinds:
            raise Misfit(
                f"found a tensor of shape {self._undivided()} in {self.name}, which each rank uses for its "
                "own heads or features, expected one whose gradient is summed (a 'partial' parameter)"
            )
        if len(kinds) > 1:
            raise Misfit(
                f"found a 'partial' parameter in {self.name}, expected it where a rank has its own heads"
            )
        return "none" if is_divided or not kinds else kinds.pop()

    def _undivided(self) -> list[int]:
        return next(list(o.local) for o in self.operands if o.gradient == "whole" and not o.parts)


def divided_dims(whole: Shape, local: Shape, ranks: int) -> list[int]:
    """The dims that differ.

    Raises:
        Misfit: a size is neither that of one process nor a ``ranks``-th part of it.
    """
    dims = [dim for dim, (size, part) in enumerate(zip(whole, local)) if size != part]
    if len(whole) != len(local) or any(local[dim] * ranks != whole[dim] for dim in dims):
        raise Misfit(f"found shape {list(local)}, expected {list(whole)} or a rank's part of it")
    return dims


SizeRule = Callable[[ShardedOperation, int], DividedDims]
"""The parts of a result, by its number."""


def _moved(
    operation: ShardedOperation, number: int, places: Iterable[tuple[Operand, Mapping[int, int]]]
) -> dict[int, int]:
    """The parts of a result to which dims of operands move; a divided one must be somewhere in the result."""
    parts: dict[int, int] = {}
    for operand, moves in places:
        for dim, count in operand.parts.items():
            if dim not in moves or parts.setdefault(moves[dim], count) != count:
                raise operation.misfit(number)
    return parts


def _by_place(operation: ShardedOperation, number: int) -> DividedDims:
    """Broadcast operands: those with a divided dim must not meet others that have all of it."""
    dims = len(operation.shapes[number][0])
    aligned = [
        (operand, {dim: dim + dims - len(operand.whole) for dim in range(len(operand.whole))})
        for operand in operation.operands
    ]
    parts = _moved(operation, number, aligned)
    for operand, moves in aligned:
        if any(
            place in parts and operand.whole[dim] != 1 and dim not in operand.parts
            for dim, place in moves.items()
        ):
            raise operation.misfit(number)
    return parts


def _along(operation: ShardedOperation, number: int) -> DividedDims:
    """An operation along dims (softmax, sums, norms, sorting), none of which may be divided; of any other
    operation the results are divided as the operands are."""
    if not operation.operands:
        return {}
    first, result = operation.operands[0], operation.shapes[number][0]
    dims = _dims(operation, len(first.whole))
    if dims & first.parts.keys():
        raise operation.misfit(number)
    kept = [dim for dim in range(len(first.whole)) if dim not in dims or len(result) == len(first.whole)]
    moves = dict(zip(kept, range(len(kept)))) if len(kept) == len(result) else {}
    if len(kept) == len(result) and first.parts:
        return _moved(operation, number, [(first, moves)])
    counts = [count for operand in operation.operands for count in operand.parts.values()]
    parts = dict.fromkeys(divided_dims(*operation.shapes[number], operation.ranks), 1)
    if bool(counts) != bool(parts) or any(count != 1 for count in counts):
        raise operation.misfit(number)
    return parts


def _dims(operation: ShardedOperation, count: int) -> set[int]:
    """The dims along which an operation computes."""
    if "normalized_shape" in operation.whole:
        return set(range(count - len(operation.whole["normalized_shape"]), count))
    names = {"dim", "dims"} & operation.whole.keys()
    if not names:
        return set()
    value = operation.whole[names.pop()]
    value = [value] if isinstance(value, int) else value or range(count)
    return {dim % count for dim in value if count}


def _view(operation: ShardedOperation, number: int) -> DividedDims:
    """Divided dims of a result that has the same elements in the same order."""
    (operand,) = operation.operands
    (whole, local), parts = operation.shapes[number], {}
    for before, after in _groups(operand.whole, whole):
        sources = [dim for dim in before if dim in operand.parts]
        targets = [dim for dim in after if whole[dim] != local[dim]]
        if not sources and not targets:
            continue
        if len(sources) != 1 or len(targets) != 1:
            raise operation.misfit(number)
        (source,), (target,) = sources, targets
        runs = prod(operand.whole[dim] for dim in before if dim < source) * operand.parts[source]
        count, rest = divmod(runs, prod(whole[dim] for dim in after if dim < target))
        if rest or not count or whole[target] % (count * operation.ranks):
            raise operation.misfit(number)
        parts[target] = count
    return parts


def _groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """The smallest runs of dims of two shapes with the same number of elements."""
    groups, first, second = [], 0, 0
    while first < len(before) or second < len(after):
        start, begin = first, second
        left = before[first] if first < len(before) else 1
        right = after[second] if second < len(after) else 1
        first, second = min(first + 1, len(before)), min(second + 1, len(after))
        while left != right:
            if left < right:
                left, first = left * before[first], first + 1
            else:
                right, second = right * after[second], second + 1
        groups.append((range(start, first), range(begin, second)))
    return groups


def _permuted(operation: ShardedOperation, number: int) -> DividedDims:
    (operand,) = operation.operands
    order = list(range(len(operand.whole)))
    if operation.name == "permute":
        order = [dim % len(order) for dim in operation.whole["dims"]]
    elif len(order) > 1:
        a, b = operation.whole.get("dim0", 0), operation.whole.get("dim1", 1)
        order[a], order[b] = order[b], order[a]
    return _moved(operation, number, [(operand, {dim: place for place, dim in enumerate(order)})])


def _repeated(operation: ShardedOperation, number: int) -> DividedDims:
    """Values that are repeated: any number of times where all ranks have them, in parts of a rank's own."""
    (operand,) = operation.operands
    whole, local = operation.shapes[number]
    offset, parts = len(whole) - len(operand.whole), {}
    for place in divided_dims(whole, local, operation.ranks):
        count = operand.parts.get(place - offset)
        if count is None:
            parts[place] = 1
        elif whole[place] * operand.local[place - offset] == operand.whole[place - offset] * local[place]:
            parts[place] = count * (whole[place] // operand.whole[place - offset])
        else:
            raise operation.misfit(number)
    if {dim + offset for dim in operand.parts} - parts.keys():
        raise operation.misfit(number)
    if operation.name == "expand" and any(
        place >= offset and operand.whole[place - offset] != 1 and place - offset not in operand.parts
        for place in parts
    ):
        raise operation.misfit(number)
    return parts


def _cut(operation: ShardedOperation, number: int) -> DividedDims:
    """A run of a dim: of a divided one it must have complete parts."""
    (operand,) = operation.operands
    dim = operation.whole["dim"] % len(operand.whole)
    whole, _ = operation.shapes[number]
    size, gone = operand.whole[dim], len(whole) < len(operand.whole)
    start, local_start = (_start(operation, number, dim, side) for side in (0, 1))
    moves = {place: place - (gone and place > dim) for place in range(len(operand.whole)) if place != dim}
    others = Operand(operand.whole, operand.local, {d: n for d, n in operand.parts.items() if d != dim})
    parts = _moved(operation, number, [(others, moves)])
    if dim not in operand.parts:
        if start != local_start:
            raise operation.misfit(number)
        return parts
    run = size // operand.parts[dim]
    if (
        gone
        or operation.whole.get("step", 1) != 1
        or start % run
        or whole[dim] % run
        or local_start * operation.ranks != start
    ):
        raise operation.misfit(number)
    return {**parts, dim: whole[dim] // run}


def _start(operation: ShardedOperation, number: int, dim: int, side: int) -> int:
    """The first index of a run, on one process or on a rank."""
    arguments = (operation.whole, operation.local)[side]
    size = (operation.operands[0].whole, operation.operands[0].local)[side][dim]
    if operation.name in ("slice", "select"):
        start = arguments.get("start", arguments.get("index", 0)) or 0
        return min(max(start + size if start < 0 else start, 0), size)
    if operation.name == "unbind":
        return number
    return sum(shapes[side][dim] for shapes in operation.shapes[:number])


def _joined(operation: ShardedOperation, number: int) -> DividedDims:
    """One tensor behind the other; those of stack are one apart."""
    whole, _ = operation.shapes[number]
    dim, stacked = operation.whole["dim"] % len(whole), operation.name == "stack"
    operands = [operand for operand in operation.operands if operand.whole != (0,)]
    moves = {place: place + (stacked and place >= dim) for place in range(len(whole))}
    if not stacked:
        along = [operand.parts.get(dim) for operand in operands]
        lengths = {operand.whole[dim] // (operand.parts.get(dim) or 1) for operand in operands}
        if any(along):
            if not all(along) or len(lengths) > 1:
                raise operation.misfit(number)
            rest = [
                Operand(o.whole, o.local, {d: n for d, n in o.parts.items() if d != dim}) for o in operands
            ]
            return {**_moved(operation, number, [(o, moves) for o in rest]), dim: sum(filter(None, along))}
    parts = _moved(operation, number, [(operand, moves) for operand in operands])
    if any(
        parts.get(moves[d]) != o.parts.get(d)
        for o in operands
        for d in range(len(o.whole))
        if stacked or d != dim
    ):
        raise operation.misfit(number)
    return parts


def _product(operation: ShardedOperation, number: int) -> DividedDims:
    """A product of matrices: what is summed over must not be divided."""
    *added, first, second = operation.operands
    dims = len(operation.shapes[number][0])
    rows, columns = dims - 2, dims - 1
    batch = {0: 0} if dims == 3 else {}
    places = [(first, {**batch, rows: rows}), (second, {**batch, columns: columns})]
    places += [(o, {d: d + dims - len(o.whole) for d in range(len(o.whole))}) for o in added]
    return _moved(operation, number, places)


def _einsum(operation: ShardedOperation, number: int) -> DividedDims:
    """A sum over dims by their letters."""
    terms, _, result = operation.whole["equation"].replace(" ", "").partition("->")
    places = (
        {dim: result.index(letter) for dim, letter in enumerate(term) if letter in result}
        for term in terms.split(",")
    )
    return _moved(operation, number, zip(operation.operands, places))


def _attention(operation: ShardedOperation, number: int) -> DividedDims:
    """Heads of queries with those of their keys and values; tokens and widths are not divided."""
    query, *others = operation.operands
    if any(operand.parts != query.parts for operand in others[:2]):
        raise operation.misfit(number)
    dims = len(operation.shapes[number][0])
    moves = [{dim: dim + dims - len(o.whole) for dim in range(len(o.whole) - 2)} for o in operation.operands]
    return _moved(operation, number, zip(operation.operands, moves))


def _indexed(operation: ShardedOperation, number: int) -> DividedDims:
    """Elements that are chosen by number: of a divided dim each rank has others."""
    first = operation.operands[0]
    if any(index is not None and dim in first.parts for dim, index in enumerate(operation.whole["indices"])):
        raise operation.misfit(number)
    return _along(operation, number)


def _filled(operation: ShardedOperation, number: int) -> DividedDims:
    """Divided dims of a result filled with one value or with random numbers."""
    whole, local = operation.shapes[number]
    like = next((o.parts for o in operation.operands if (o.whole, o.local) == (whole, local)), None)
    return dict.fromkeys(divided_dims(whole, local, operation.ranks), 1) if like is None else like


_FILLING = (
    "zeros ones full empty new_zeros new_ones new_full new_empty new_empty_strided empty_strided zeros_like "
)
_FILLING += (
    "ones_like full_like empty_like empty_permuted scalar_tensor rand randn rand_like randn_like bernoulli"
)
RULES: dict[str, SizeRule] = {
    **dict.fromkeys(("view", "squeeze", "unsqueeze"), _view),
    **dict.fromkeys(("permute", "transpose", "t"), _permuted),
    **dict.fromkeys(("expand", "repeat"), _repeated),
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "unbind"), _cut),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), _product),
    **dict.fromkeys(_FILLING.split(), _filled),
    **dict.fromkeys(("index", "_unsafe_index"), _indexed),
    "copy_": _by_place,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
}
"""Rules of operations that are neither pointwise nor along dims."""
