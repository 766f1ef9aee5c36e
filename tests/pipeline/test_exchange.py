"""The order of transfers under the strictest network: every rank's are carried out one after another, in the
order in which they were started, and each only once its other end is next on the other rank too.

That is what one communicator of NCCL does. Others let more pass, so that what ends here ends there.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad.parallel.data.buckets import BufferPool
from hexad.parallel.data.gradients import Gradients
from hexad.parallel.pipeline import executor
from hexad.parallel.pipeline.executor import Executor, MessageBuffers, Stage
from hexad.parallel.pipeline.schedule import Schedule, forward_schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.simulate import Costs
from hexad.parallel.pipeline.transfers import MessageEnd, transfers
from hexad.topology.mesh import Axis

from ..layers import CPU


class Stuck(Exception):
    """Every rank waits, and no transfer can be carried out."""


@dataclass(eq=False)
class End:
    """One end of a message, as a rank started it."""

    network: Network
    rank: int
    peer: int
    outgoing: bool
    tag: int
    tensor: torch.Tensor
    done: bool = False

    def wait(self) -> torch.Tensor:
        """Until it is carried out."""
        self.network.wait(self)
        return self.tensor


class Network:
    """Carries out what is first in the ranks' queues."""

    def __init__(self, ranks: int) -> None:
        self.changed = threading.Condition()
        self.queues: list[deque[End]] = [deque() for _ in range(ranks)]
        self.waits: list[End | None] = [None] * ranks
        self.ended = [False] * ranks
        self.stuck = False

    def start(self, end: End) -> End:
        """Queue one end, and carry out what it lets through."""
        with self.changed:
            self.queues[end.rank].append(end)
            while any(self._meet(rank) for rank in range(len(self.queues))):
                self.changed.notify_all()
        return end

    def _meet(self, rank: int) -> bool:
        """Whether what is first on the rank is first on its peer too; then it is carried out."""
        if not self.queues[rank] or not self.queues[rank][0].outgoing:
            return False
        source = self.queues[rank][0]
        queue = self.queues[source.peer]
        if not queue or queue[0].outgoing or queue[0].peer != rank:
            return False
        target = queue[0]
        assert source.tag == target.tag, "NCCL knows no tags: it would deliver another message"
        target.tensor.copy_(source.tensor)
        for end in (source, target):
            end.done = True
            self.queues[end.rank].popleft()
        return True

    def wait(self, end: End) -> None:
        """Until it is carried out, or for ever."""
        with self.changed:
            self.waits[end.rank] = end
            self._notice()
            self.changed.wait_for(lambda: end.done or self.stuck, timeout=60)
            if not end.done:
                raise Stuck
            self.waits[end.rank] = None

    def leave(self, rank: int) -> None:
        """The rank's program is over."""
        with self.changed:
            self.ended[rank] = True
            self._notice()

    def _notice(self) -> None:
        waiting = [end is not None and not end.done for end in self.waits]
        if all(ended or waits for ended, waits in zip(self.ended, waiting)) and any(waiting):
            self.stuck = True
            self.changed.notify_all()


def run(schedule: Schedule, training: bool) -> tuple[float, list[float]]:
    """The schedule on as many threads as ranks: the loss, and every stage's weight's gradient.

    Stage s maps x to w[s] x; the loss of microbatch m is the last stage's output, begun with m + 1.
    """
    network = Network(schedule.pipeline)
    weights = [torch.tensor(1.0 + stage / 8, requires_grad=True) for stage in range(schedule.stages)]
    with pytest.MonkeyPatch.context() as patch:

        def start(outgoing: bool) -> Callable[[torch.Tensor, Axis, int, int], End]:
            return lambda tensor, axis, peer, tag: network.start(
                End(network, axis.rank, peer, outgoing, tag, tensor)
            )

        patch.setattr(executor, "send_async", start(outgoing=True))
        patch.setattr(executor, "receive_async", start(outgoing=False))

        def program(rank: int) -> float:
            def stage(number: int) -> Stage[int]:
                def compute(microbatch: int, inputs: torch.Tensor | None, _: float | None) -> torch.Tensor:
                    return weights[number] * (torch.tensor(microbatch + 1.0) if inputs is None else inputs)

                return compute

            own = {number: stage(number) for number, at in enumerate(schedule.placement) if at == rank}
            axis = Axis("pipeline", tuple(range(schedule.pipeline)), rank)
            none = Gradients([], {}, {}, {}, BufferPool(CPU), torch.float64)
            ours = Executor(schedule, own, axis, lambda *_: torch.empty(()), none, CPU, MessageBuffers(CPU))
            try:
                total = ours.run(range(schedule.microbatches), 1.0 if training else None)
            finally:
                network.leave(rank)
            return 0.0 if total is None else float(total)

        with ThreadPoolExecutor(schedule.pipeline) as threads:
            losses = list(threads.map(program, range(schedule.pipeline)))
    assert not any(network.queues)
    return sum(losses), [0.0 if weight.grad is None else float(weight.grad) for weight in weights]


schedules = st.builds(
    lambda name, pipeline, microbatches: build_schedule(
        name, pipeline, microbatches, 3 if name == "interleaved" else 1
    ),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "auto"]),
    st.integers(2, 6),
    st.integers(1, 13),
)


def expected_loss(schedule: Schedule) -> float:
    product = math.prod(1.0 + stage / 8 for stage in range(schedule.stages))
    return product * schedule.microbatches * (schedule.microbatches + 1) / 2


@given(schedule=schedules)
@settings(max_examples=60)
def test_training_ends(schedule: Schedule) -> None:
    loss, gradients = run(schedule, training=True)
    wanted = expected_loss(schedule)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert gradients == pytest.approx(
        [wanted / (1.0 + stage / 8) for stage in range(schedule.stages)], rel=1e-5
    )


@given(schedule=schedules)
@settings(max_examples=30)
def test_evaluation_ends(schedule: Schedule) -> None:
    forwards = forward_schedule(schedule.placement, schedule.microbatches)
    loss, gradients = run(forwards, training=False)
    assert loss == pytest.approx(expected_loss(schedule), rel=1e-5)
    assert not any(gradients)


def as_needed(schedule: Schedule, costs: Costs | None = None) -> list[list[MessageEnd]]:
    """Messages in the order in which each rank comes to them."""
    orders = []
    for own, actions in zip(transfers(schedule, costs), schedule.ranks):
        of = {transfer.message: transfer for transfer in own}
        order = [m for a in actions for m in (schedule.received(a), schedule.sent(a)) if m is not None]
        orders.append([of[message] for message in order])
    return orders


def test_transfers_as_ranks_come_to_them_get_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of 1F1B's steady state both send before they receive."""
    monkeypatch.setattr("hexad.parallel.pipeline.executor.transfers", as_needed)
    with pytest.raises(Stuck):
        run(build_schedule("1f1b", 4, 8, 1), training=True)
