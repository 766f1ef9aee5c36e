"""Agreements: small objects of all ranks, merged on the way up a tree and spread on the way down.

For set-up, errors and signals. All ranks of an axis call these functions together, in the same order.
"""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import reduce
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import Tensor

from hexad.config import AgreedError, HexadError
from hexad.topology.layout import Level, Tree
from hexad.topology.mesh import Axis

from .collectives import wait_for

T = TypeVar("T")
V = TypeVar("V")
N = TypeVar("N")

_MESSAGE = 512
"""Bytes of a message; a longer object is sent in two."""
_LENGTH = 8
_MOST_VALUES = 8
"""Different values of which :func:`first_difference` looks at the objects."""


def merged(value: T, axis: Axis, merge: Callable[[T, T], T]) -> T:
    """Every rank's picklable ``value``, merged in the order of the ranks, on every rank of the mesh.

    ``merge`` makes one of two values, the first of lower ranks; it is associative, and must not raise.
    """
    if _single(axis):
        return value
    tree = _tree(axis)
    return wait_for(axis, lambda: _spread(tree, _gathered(tree, value, merge)))


def merging(value: T, axis: Axis, merge: Callable[[T, T], T]) -> Future[T]:
    """Merge the values of all ranks (:func:`merged`) in the background. Nothing else may use the axis's
    channel meanwhile."""
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(merged(value, axis, merge))
        except BaseException as error:
            result.set_exception(error)

    if _single(axis):
        result.set_result(value)
    else:
        # A daemon: if a peer is lost, the end of the process does not wait for it.
        threading.Thread(target=work, name=f"hexad-{axis.name}", daemon=True).start()
    return result


def gathered(value: T, axis: Axis, merge: Callable[[T, T], T]) -> T | None:
    """Merge the values of all ranks (:func:`merged`) on the first rank; None on the others, which do not
    wait."""
    if _single(axis):
        return value
    tree = _tree(axis)
    result = wait_for(axis, lambda: _gathered(tree, value, merge))
    return result if axis.rank == 0 else None


def among_neighbours(value: T, axis: Axis) -> dict[int, T]:
    """The picklable values of this rank and its neighbours, by rank, ascending: those of its group on the
    lowest level of the tree, see :data:`~hexad.topology.layout.FAN_OUT`."""
    if _single(axis):
        return {axis.rank: value}
    tree, values = _tree(axis), {axis.rank: value}
    lowest = tree.levels[0]
    if lowest.ranks[1] != lowest.ranks[0] + 1:
        return values  # the last of the world, alone in its group
    here = replace(tree, levels=(lowest,))
    return wait_for(axis, lambda: _spread(here, _gathered(here, values, lambda a, b: a | b)))


def from_first(action: Callable[[], T], axis: Axis) -> T:
    """Run an action on the first rank only, and return its result on all.

    Raises:
        AgreedError: the user's error that the action raised, on every rank alike.
        Exception: any other that it raised, likewise.
    """
    outcome: tuple[T | None, Exception | None] = None, None
    if axis.rank == 0 or axis.alone:
        try:
            outcome = action(), None
        except Exception as error:
            outcome = None, error
    if not _single(axis):
        tree, first_outcome = _tree(axis), outcome
        outcome = wait_for(axis, lambda: _spread(tree, first_outcome))
    result, raised = outcome
    if isinstance(raised, HexadError) and not isinstance(raised, AgreedError):
        raise AgreedError(raised.marked, type(raised))
    if raised is not None:
        raise raised
    return result  # type: ignore[return-value]


def scattered(
    value: V | None, axis: Axis, need: N, merge: Callable[[N, N], N], select: Callable[[V, N], V]
) -> V:
    """Scatter the part of the first rank's value that this rank needs: ``select(value, need)``.

    No rank but the first has all of it, others pass None: a rank receives what those below it in the tree
    need. ``merge`` makes one of two needs, ``select`` takes the part of a value, or of a part that contains
    it; neither must raise.
    """
    if _single(axis):
        return select(value, need)  # type: ignore[arg-type]
    tree = _tree(axis)
    return wait_for(axis, lambda: _handed_out(tree, value, need, merge, select))


def _handed_out(
    tree: Tree, value: V | None, need: N, merge: Callable[[N, N], N], select: Callable[[V, N], V]
) -> V:
    below: list[tuple[N, list[N]]] = []  # by level: what is needed up to the level below, and by the others
    for level in tree.levels:
        if level.place:
            _send(tree, level, [0], pickle.dumps(need))
            break
        others = [pickle.loads(message) for message in _receive(tree, level, range(1, len(level.ranks)))]
        below.append((need, others))
        need = reduce(merge, others, need)
    part: Any = value
    if tree.levels[-1].place:
        part = pickle.loads(_receive(tree, tree.levels[-1], [0])[0])
    for level, (own_need, others) in reversed(list(zip(tree.levels, below))):
        for place, other in enumerate(others, 1):
            _send(tree, level, [place], pickle.dumps(select(part, other)))
        part = select(part, own_need)
    return part


def agreed(action: Callable[[], T], axis: Axis) -> T:
    """Do something on every rank of an axis; if any meets a user's error, all raise it. ``action`` itself
    must not communicate.

    Raises:
        AgreedError: the first rank's error, on every rank alike.
    """
    error, result = None, None
    try:
        result = action()
    except HexadError as caught:
        error = axis.rank, type(caught), caught.marked
    first, all_failed = merged((error, error is not None), axis, lambda a, b: (a[0] or b[0], a[1] and b[1]))
    if first is not None:
        rank, kind, text = first
        raise AgreedError(text if all_failed else f"rank {rank}: {text}", kind)
    return result  # type: ignore[return-value]


def first_difference(value: object, axis: Axis) -> tuple[Any, int, Any] | None:
    """None if all ranks have the same value; else the first rank's, the lowest rank with another, and its.

    Hashes are compared; values are sent only where those differ.
    """
    digest = sha256(repr(value).encode()).digest()
    places = merged({digest: axis.rank}, axis, _lowest)
    if len(places) == 1:
        return None
    shown = {axis.rank: value} if axis.rank in places.values() else {}
    values = merged(shown, axis, lambda a, b: a | b)
    # Equal values may be written in different ways.
    differing = (rank for rank in sorted(values) if values[rank] != values[0])
    rank = next(differing, None)
    return None if rank is None else (values[0], rank, values[rank])


def identical(what: str, value: object, axis: Axis) -> None:
    """Check that all ranks have the same value. The message names ``what``; of a tree of dictionaries the
    leaf that differs is named, with ``settings`` without a prefix.

    Raises:
        AgreedError: they do not; names two ranks and what they have.
    """
    difference = first_difference(value, axis)
    if difference is not None:
        first, rank, other = difference
        name, ours, theirs = _leaf(what, first, other)
        raise AgreedError(f"{name}: rank 0 has {ours}, rank {rank} has {theirs}; all ranks need the same")


def _leaf(name: str, value: object, other: object) -> tuple[str, object, object]:
    """The first leaf in which two trees of settings differ: its dotted name and both values."""
    if isinstance(value, dict) and isinstance(other, dict) and value.keys() == other.keys():
        key = next(key for key in value if value[key] != other[key])
        return _leaf(key if name == "settings" else f"{name}.{key}", value[key], other[key])
    return name, value, other


def _lowest(first: dict[bytes, int], other: dict[bytes, int]) -> dict[bytes, int]:
    """The lowest rank of each hash; of a few hashes only."""
    ordered = sorted((other | first).items(), key=lambda item: item[1])
    return dict(ordered[:_MOST_VALUES])


def _single(axis: Axis) -> bool:
    """Whether there is no other rank to agree with."""
    return axis.size == 1 or axis.alone


def _tree(axis: Axis) -> Tree:
    assert axis.tree is not None, f"axis {axis.name} has no tree: agreements are those of all ranks"
    return axis.tree


def _gathered(tree: Tree, value: T, merge: Callable[[T, T], T]) -> T:
    """The merged values of this rank and of those below it in the tree; sent to the parent."""
    for level in tree.levels:
        if level.place:
            _send(tree, level, [0], pickle.dumps(value))
            break
        for message in _receive(tree, level, range(1, len(level.ranks))):
            value = merge(value, pickle.loads(message))
    return value


def _spread(tree: Tree, value: T) -> T:
    """The value of the first rank; sent on to the ranks below."""
    content = b""
    for level in reversed(tree.levels):
        if level.place:
            (content,) = _receive(tree, level, [0])
        else:
            content = content or pickle.dumps(value)
            _send(tree, level, range(1, len(level.ranks)), content)
    return pickle.loads(content) if tree.levels[-1].place else value


def _send(tree: Tree, level: Level, places: Any, content: bytes) -> None:
    inline = _MESSAGE - _LENGTH
    head = (len(content).to_bytes(_LENGTH, "little") + content[:inline]).ljust(_MESSAGE, b"\0")
    parts = [
        torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (head, content[inline:]) if part
    ]
    works = [level.group.send([part], place, tree.channel) for place in places for part in parts]
    for work in works:
        work.wait(tree.timeout)


def _receive(tree: Tree, level: Level, places: Any) -> list[bytes]:
    """The messages of the ranks at some places, in their order."""

    def start(place: int, size: int) -> tuple[Tensor, Any]:
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffer, level.group.recv([buffer], place, tree.channel)

    heads = [start(place, _MESSAGE) for place in places]
    messages = []
    for place, (head, work) in zip(places, heads):
        work.wait(tree.timeout)
        length = int.from_bytes(head[:_LENGTH].numpy().tobytes(), "little")
        content = head[_LENGTH : _LENGTH + length].numpy().tobytes()
        if length > len(content):
            rest, work = start(place, length - len(content))
            work.wait(tree.timeout)
            content += rest.numpy().tobytes()
        messages.append(content)
    return messages
