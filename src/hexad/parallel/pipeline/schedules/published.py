"""The published schedules.

- GPipe: all forwards, then all backwards.
- 1F1B and interleaved: forwards and backwards alternate, with one stage per rank or several.
- ZB-H1 and ZB-H2: weight gradients fill a rank's waiting time (Qi et al., arXiv 2401.10241).
- ZB-V and DualPipe-V: two stages per rank in a V-shaped placement. The first rank also has the last stage:
  backwards start where forwards start, and every rank needs the same memory. ``down`` is its stage in the
  first half of the V and ``back`` the one in the second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from ..schedule import Action, Schedule, looped, v_shaped


def gpipe(pipeline: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """GPipe (Huang et al., arXiv 1811.06965), breadth-first where a rank has several stages.

    A rank runs every microbatch through one of its stages before the next stage, and backward in the opposite
    order (Lamy-Poirier, arXiv 2211.05953). It holds the activations of the complete step:
    ``microbatches * virtual_stages``.
    """
    placement = looped(pipeline, virtual_stages)
    numbers = range(microbatches)
    ranks = []
    for rank in range(pipeline):
        stages = range(rank, len(placement), pipeline)
        forwards = [Action("F", stage, number) for stage in stages for number in numbers]
        backwards = [Action("BW", stage, number) for stage in reversed(stages) for number in numbers]
        ranks.append((*forwards, *backwards))
    return Schedule("gpipe", microbatches, placement, tuple(ranks))


def one_forward_one_backward(pipeline: int, microbatches: int) -> Schedule:
    """1F1B, also called PipeDream-Flush (Narayanan et al., arXiv 2006.09503).

    Rank ``r`` of ``p`` runs ``p - r - 1`` forwards ahead, and so holds at most ``p - r`` activations.
    """
    ranks = []
    for rank in range(pipeline):
        forwards = [Action("F", rank, number) for number in range(microbatches)]
        backwards = [Action("BW", rank, number) for number in range(microbatches)]
        ranks.append(in_turns(forwards, backwards, pipeline - rank - 1))
    return Schedule("1f1b", microbatches, looped(pipeline, 1), tuple(ranks))


def interleaved(pipeline: int, microbatches: int, virtual_stages: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473); with one stage per rank it is 1F1B.

    Microbatches run in groups, each group through all of a rank's stages. Rank ``r`` of ``p`` runs
    ``2 * (p - r - 1) + (v - 1) * group`` forwards ahead. If the groups do not divide the microbatches, the
    remainder is spread over them: a small group at the end would make every rank wait once per stage.

    The default ``group``, as many microbatches as ranks, is the smallest that keeps all ranks busy; a larger
    one leaves more time for messages and holds more activations.
    """
    if virtual_stages == 1:
        return replace(one_forward_one_backward(pipeline, microbatches), name="interleaved")
    groups = _groups(microbatches, pipeline if group is None else group)
    smallest, largest = len(groups[0]), len(groups[-1])
    ranks = []
    for rank in range(pipeline):
        order = [
            (stage, number)
            for numbers in groups
            for stage in range(rank, pipeline * virtual_stages, pipeline)
            for number in numbers
        ]
        forwards = [Action("F", stage, number) for stage, number in order]
        last = (virtual_stages - 1) * pipeline + 2 * rank
        backwards = [Action("BW", last - stage, number) for stage, number in order]
        # With groups of fewer microbatches than ranks, the first rank must be ahead of the last by less than
        # two groups: otherwise they would deadlock, each waiting for an action one group away.
        ahead = max(2 * (pipeline - rank - 1), 2 * (pipeline - smallest) - 1)
        ranks.append(in_turns(forwards, backwards, ahead + (virtual_stages - 1) * largest))
    return Schedule("interleaved", microbatches, looped(pipeline, virtual_stages), tuple(ranks))


def _groups(microbatches: int, size: int) -> list[range]:
    """Microbatches in groups of at least ``size`` (or all, if they are fewer), ascending and even."""
    count = max(microbatches // size, 1)
    small, larger = divmod(microbatches, count)
    lengths = [small] * (count - larger) + [small + 1] * larger
    return [range(begin, begin + length) for begin, length in zip(accumulate(lengths, initial=0), lengths)]


def in_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """``ahead`` forwards, then alternating forwards and backwards, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    turns = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return (*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :])


def zb_h1(pipeline: int, microbatches: int) -> Schedule:
    """ZB-H1, with as many forwards ahead as 1F1B. Every rank holds up to ``p`` activations, like 1F1B's first
    rank."""
    return _handcrafted("zb_h1", pipeline, microbatches, 1)


def zb_h2(pipeline: int, microbatches: int) -> Schedule:
    """Twice as many forwards ahead, for no bubble where F, B and W take equally long.

    Every rank holds up to ``2 * p - 1`` activations.
    """
    return _handcrafted("zb_h2", pipeline, microbatches, 2)


def _handcrafted(name: str, pipeline: int, microbatches: int, depth: int) -> Schedule:
    """Rank ``r`` runs ``depth * (p - r - 1)`` forwards ahead and defers ``depth * r`` weight gradients.

    Deferring them makes the gradients of the inputs, for which previous ranks wait, available earlier. They
    are computed at the end, while previous ranks still run their backwards.
    """
    ranks = [
        _order(rank, microbatches, depth * (pipeline - rank - 1), depth * rank) for rank in range(pipeline)
    ]
    return Schedule(name, microbatches, looped(pipeline, 1), tuple(ranks))


def _order(stage: int, microbatches: int, ahead: int, debt: int) -> tuple[Action, ...]:
    ahead = min(ahead, microbatches)
    actions = [Action("F", stage, number) for number in range(ahead)]
    weights = 0
    for backward in range(microbatches):
        forward = ahead + backward
        if forward < microbatches:
            actions.append(Action("F", stage, forward))
        actions.append(Action("B", stage, backward))
        if backward + 1 - weights > debt or forward >= microbatches:
            actions.append(Action("W", stage, weights))
            weights += 1
    actions += [Action("W", stage, number) for number in range(weights, microbatches)]
    return tuple(actions)


def zb_v(pipeline: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al., arXiv 2405.15362): no bubble where F, B and W take equally long.

    Every rank holds the activations of at most ``2 * p`` stages, that is of ``p`` complete microbatches: as
    many as 1F1B's first rank.
    """
    return _v_schedule("zb_v", pipeline, microbatches, _zb_v)


def dualpipe_v(pipeline: int, microbatches: int) -> Schedule:
    """DualPipe-V (DeepSeek's DualPipe, cut in half): forwards paired with complete backwards.

    It is designed to run the two of a pair at the same time, so that one's communication overlaps with the
    other's arithmetic; here they run one after the other. Every rank holds the activations of at most
    ``2 * p + 1`` stages.
    """
    return _v_schedule("dualpipe_v", pipeline, microbatches, _dualpipe_v)


def _v_schedule(
    name: str, pipeline: int, microbatches: int, add_all: Callable[[_Order, int, int, int], None]
) -> Schedule:
    """The beginning of a step that is long enough for every phase of an order."""
    planned = max(microbatches, 2 * pipeline)
    orders = [_Order(pipeline, rank, microbatches) for rank in range(pipeline)]
    for rank, order in enumerate(orders):
        add_all(order, pipeline, rank, planned)
    return Schedule(name, microbatches, v_shaped(pipeline), tuple(tuple(order.actions) for order in orders))


class _Order:
    """Builds the actions of one rank; microbatches of each kind and stage are numbered from 0.

    Those of microbatches from ``limit`` are left out, which keeps the order of the others valid.
    """

    def __init__(self, pipeline: int, rank: int, limit: int) -> None:
        self.actions: list[Action] = []
        self._limit = limit
        self.owed: deque[tuple[int, int]] = deque()
        self._stages = {"0": rank, "1": 2 * pipeline - 1 - rank}
        self._counts: dict[tuple[str, int], int] = {}

    def add(self, words: str, times: int = 1) -> None:
        """Add actions in the notation of the papers' figures, such as ``F0 B1``: the kind, and 0 for ``down``
        or 1 for ``back``.

        ``W`` without a stage is the oldest deferred weight gradient of either stage.
        """
        steps = [(word.rstrip("01"), self._stages.get(word[-1])) for word in words.split()]
        for _ in range(times):
            for kind, stage in steps:
                if stage is None:
                    stage, number = self.owed.popleft()
                elif kind == "W":
                    number = next(number for owed, number in self.owed if owed == stage)
                    self.owed.remove((stage, number))
                else:
                    key = (kind[0], stage)
                    number = self._counts.get(key, 0)
                    self._counts[key] = number + 1
                    if kind == "B":
                        self.owed.append((stage, number))
                if number < self._limit:
                    self.actions.append(Action(kind, stage, number))


def _zb_v(order: _Order, pipeline: int, rank: int, microbatches: int) -> None:
    after = pipeline - rank
    order.add("F0", 2 * after - 1)
    order.add("F1 F0", rank)
    order.add("F1 B1 W1", after)
    ahead = 2 * pipeline - rank - 1
    order.add("F0 B0 W0 F1 B1 W1", microbatches - ahead)
    order.add("B0 W0 F1 B1 W1", ahead - pipeline)
    order.add("B0 B1", rank)
    order.add("B0 W0", after)
    order.add("W1", rank)
    order.add("W0", rank)


def _dualpipe_v(order: _Order, pipeline: int, rank: int, microbatches: int) -> None:
    after = pipeline - rank - 1
    order.add("F0", 2 * after)
    order.add("F0 F1", rank + 1)
    order.add("B1 W1 F1", after)
    order.add("F0 BW1 F1 BW0", microbatches - 2 * pipeline + rank + 1)
    order.add("BW1 F1 BW0", after)
    # The second half of the backwards without a forward defers its weight gradients.
    order.add("BW1 BW0", (rank + 1) // 2)
    order.add("B1 B0" if rank % 2 else "BW1 B0")
    order.add("B1 B0", rank - (rank + 1) // 2)
    order.add("W B0", after)
    order.add("W", rank + 1)


ONE_STAGE = {"1f1b": one_forward_one_backward, "zb_h1": zb_h1, "zb_h2": zb_h2}
V_SHAPED = {"zb_v": zb_v, "dualpipe_v": dualpipe_v}
"""The schedules with one stage per rank, and those with two in a V, by name."""
