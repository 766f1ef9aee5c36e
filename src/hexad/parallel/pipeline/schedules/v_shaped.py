"""Two stages per rank in a V-shaped placement: ZB-V and DualPipe-V.

The first rank then also has the last stage: backwards start where forwards start, and every rank needs the
same memory. Below, ``down`` is a rank's stage in the first half of the V and ``back`` the one in the second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..schedule import Action, Schedule, v_shaped


def zb_v(pipeline: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al., arXiv 2405.15362): no bubble where F, B and W take equally long.

    Every rank holds the activations of at most ``2 * p`` stages, that is of ``p`` complete microbatches: as
    many as 1F1B's first rank.
    """
    planned = max(microbatches, 2 * pipeline)
    return _schedule(
        "zb_v", pipeline, microbatches, [_zb_v(pipeline, rank, planned) for rank in range(pipeline)]
    )


def dualpipe_v(pipeline: int, microbatches: int) -> Schedule:
    """DualPipe-V (DeepSeek's DualPipe, cut in half): forwards paired with complete backwards.

    It is designed to run the two of a pair at the same time, so that one's communication overlaps with the
    other's arithmetic; here they run one after the other. Every rank holds the activations of at most
    ``2 * p + 1`` stages.
    """
    planned = max(microbatches, 2 * pipeline)
    orders = [_dualpipe_v(pipeline, rank, planned) for rank in range(pipeline)]
    return _schedule("dualpipe_v", pipeline, microbatches, orders)


def _schedule(name: str, pipeline: int, microbatches: int, orders: Sequence[_Order]) -> Schedule:
    # The orders are those of a step long enough for every phase.
    ranks = tuple(
        tuple(action for action in order.actions if action.microbatch < microbatches) for order in orders
    )
    return Schedule(name, microbatches, v_shaped(pipeline), ranks)


class _Order:
    """Builds the actions of one rank; microbatches of each kind and stage are numbered from 0."""

    def __init__(self, pipeline: int, rank: int) -> None:
        self.actions: list[Action] = []
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
                self.actions.append(Action(kind, stage, number))


def _zb_v(pipeline: int, rank: int, microbatches: int) -> _Order:
    order = _Order(pipeline, rank)
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
    return order


def _dualpipe_v(pipeline: int, rank: int, microbatches: int) -> _Order:
    order = _Order(pipeline, rank)
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
    return order
