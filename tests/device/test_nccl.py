"""The player of NCCL's rules: what it accepts, what it reports, and what it plays of large worlds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexad import comm
from hexad.optim import optimizer
from hexad.parallel.context import attention
from hexad.parallel.data import buckets
from hexad.parallel.pipeline import executor
from hexad.parallel.pipeline.schedule import Message, Schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.simulate import Costs
from hexad.parallel.pipeline.transfers import Exchange, MessageEnd, transfers
from hexad.topology import mesh
from hexad.topology.mesh import Axis

from ..parity.harness import VARIANTS, Case, Variant, deep
from ..pipeline.test_exchange import as_needed
from ..pool import Pool
from . import scenarios
from .nccl import Played, play
from .recorder import (
    Agreed,
    Call,
    Computed,
    Created,
    Event,
    Followed,
    Marked,
    Reached,
    Synchronised,
    Waited,
)

PAIR = Created("g", (0, 1))


def call(number: int, kind: str = "all_reduce", group: str = "g", **fields: Any) -> Call:
    values = {"nbytes": 1000, "dtype": "torch.float32", **fields}
    return Call(number, group, kind, **values)


def problems(*programs: Sequence[Event]) -> list[str]:
    return play(dict(enumerate(programs))).problems


def test_calls_in_one_order_end_and_waits_are_timed() -> None:
    """The later rank waits only for the call, the earlier one for the later, too."""
    early = [PAIR, call(0), Computed(5), Waited(0)]
    played = play({0: early, 1: [PAIR, Computed(100), call(0), Waited(0), Synchronised()]})
    assert played.problems == []
    assert (played.seconds, played.waited) == (111.0, {0: 106.0, 1: 11.0})  # 10 and 1,000 bytes


def test_calls_in_different_orders_hang_only_on_one_stream() -> None:
    swapped = [call(0, "all_reduce"), call(1, "all_gather")], [call(0, "all_gather"), call(1, "all_reduce")]
    (problem,) = problems(*([PAIR, *calls] for calls in swapped))
    assert problem == (
        "communicator g: all_reduce of 1000 bytes (float32) of rank 0 meets "
        "all_gather of 1000 bytes (float32) of rank 1"
    )
    groups = [PAIR, Created("h", (0, 1))]
    apart = [call(0), call(1, group="h")], [call(0, group="h"), call(1)]
    assert problems(*([*groups, *calls] for calls in apart)) == []
    # A wait in between orders the streams of different communicators.
    waited = [[*groups, one, Waited(0), two, Waited(1)] for one, two in apart]
    assert problems(*waited)[0].startswith("deadlock: rank 0 waits: communicator g at all_reduce")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nbytes": 1004}, "of 1004 bytes"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"kind": "reduce_scatter"}, "reduce_scatter"),
        ({"peer": 1}, "with 1"),
    ],
)
def test_calls_that_do_not_match_are_named(fields: dict[str, Any], words: str) -> None:
    (problem,) = problems([PAIR, call(0)], [PAIR, replace(call(0), **fields)])
    assert words in problem.partition("rank 0 meets ")[2] and problem.endswith("rank 1")


def test_groups_are_created_in_one_order() -> None:
    other = Created("h", (0, 1))
    assert problems([PAIR, other], [PAIR, other]) == []
    assert "its host at created of g (ranks (0, 1))" in problems([PAIR, other], [other, PAIR])[0]
    assert "other ranks" in problems([PAIR], [replace(PAIR, ranks=(0, 1, 2))])[0]


def _exchange(first: int, batched: bool) -> list[Event]:
    """Send to the other rank and receive from it."""
    batch, peer = 0 if batched else None, 1 - first
    kinds = ("send", "receive")
    return [PAIR, *(call(number, kind, peer=peer, batch=batch) for number, kind in enumerate(kinds))]


def test_messages_run_together_in_a_batch_and_one_after_the_other_without() -> None:
    assert problems(_exchange(0, True), _exchange(1, True)) == []
    assert "deadlock" in problems(_exchange(0, False), _exchange(1, False))[0]
    sends, receives = _exchange(0, False), _exchange(1, False)
    assert problems(sends, [receives[0], receives[2], receives[1]]) == []


def test_messages_to_others_are_not_in_the_way_of_a_collective() -> None:
    everyone = Created("g", (0, 1, 2))
    sender = [everyone, call(0, "send", peer=2), call(1)]
    receiver = [everyone, call(0, "receive", peer=1), call(1)]
    assert problems([everyone, call(0)], sender, receiver) == []


def test_the_host_waits_where_it_reads_and_agrees() -> None:
    """A rank that reads before it starts what the other waits for."""
    groups = [PAIR, Created("h", (0, 1))]
    reads = [*groups, call(0), Waited(0), Synchronised(), call(1, group="h")]
    first = [*groups, call(0, group="h"), Waited(0), Synchronised(), call(1)]
    assert "its host at synchronised" in problems(reads, first)[0]
    assert problems([PAIR, Agreed(0), call(0)], [PAIR, call(0), Agreed(0)]) == []
    assert (
        "agreed"
        in problems([PAIR, Agreed(0), call(0)], [PAIR, call(0), Waited(0), Synchronised(), Agreed(0)])[0]
    )


def test_streams_beside_the_computing_one_do_not_delay_it() -> None:
    """A sum on a stream of its own, which the computing one joins later."""
    beside = [
        Followed("compute", "side"),
        call(0, stream="side"),
        Waited(0, "side"),
        call(1, stream="side"),
        Computed(100),
        Waited(1),
    ]
    played = play({rank: [PAIR, *beside, Synchronised()] for rank in (0, 1)})
    assert (played.problems, played.seconds, played.waited) == ([], 100.0, {0: 0.0, 1: 0.0})
    joined = [*beside[:3], Computed(5), Followed("side", "compute"), Computed(5)]
    assert play({rank: [PAIR, *joined, Synchronised()] for rank in (0, 1)}).seconds == 16.0
    assert play({rank: [PAIR, *joined[2:], *joined[:2]] for rank in (0, 1)}).problems  # for what is not yet


def test_the_host_waits_for_a_mark_not_for_what_follows_it() -> None:
    later = [PAIR, Agreed(0), call(0), Waited(0)]
    marked = [PAIR, Computed(5), Marked(0), call(0), Waited(0), Reached(0), Agreed(0)]
    assert problems(marked, later) == []
    read = [Synchronised() if event == Reached(0) else event for event in marked]
    assert "its host at synchronised" in problems(read, later)[0]


def test_communicators_without_a_device_are_created_where_they_are_used() -> None:
    groups = [PAIR, Created("h", (0, 1))]
    apart = [call(0), call(1, group="h")], [call(0, group="h"), call(1)]
    programs = {rank: [*groups, *calls] for rank, calls in enumerate(apart)}
    assert play(programs).problems == []
    assert "its host at call" in play(programs, lazily=True).problems[0]


def test_pairs_of_ranks_without_a_device_have_communicators_for_messages() -> None:
    """A ring in which all send first, after messages in an order that creates them."""
    everyone, sends = Created("g", (0, 1, 2)), [(0, 1), (1, 2), (2, 0)]
    programs: dict[int, list[Event]] = {}
    for rank in range(3):
        before, after = (rank - 1) % 3, (rank + 1) % 3
        first = [
            call(number, "send" if ends[0] == rank else "receive", peer=ends[ends[0] == rank])
            for number, ends in enumerate(sends)
            if rank in ends
        ]
        ring = [call(4, "send", peer=after), call(5, "receive", peer=before)]
        programs[rank] = [everyone, *first, *ring]
    assert "deadlock" in play(programs).problems[0]
    assert play(programs, lazily=True).problems == []
    hosts = {rank: [everyone, *events[-2:]] for rank, events in programs.items()}
    assert "its host at call" in play(hosts, lazily=True).problems[0]


# Recorded programs


@pytest.fixture(scope="module")
def recorded(pool: Pool) -> dict[int, list[Event]]:
    """What four ranks do in two steps: tensor parallel, deferred products, a pipeline."""
    ranks = scenarios.run(pool, scenarios.SCENARIOS["zb_h1, tensor 2 + sequence"])
    return {rank: seen.events for rank, seen in enumerate(ranks)}


def _calls(events: Sequence[Event]) -> list[int]:
    return [index for index, event in enumerate(events) if isinstance(event, Call)]


@pytest.mark.parametrize("kind", ["dropped", "repeated", "swapped", "grown", "renamed", "ended"])
def test_changed_programs_are_noticed(kind: str, recorded: dict[int, list[Event]]) -> None:
    """Anything that one rank does otherwise than the others."""
    generator = random.Random(kind)
    for _ in range(12):
        rank = generator.randrange(4)
        events = list(recorded[rank])
        index = generator.choice(_calls(events))
        made = events[index]
        assert isinstance(made, Call)
        if kind == "dropped":
            events[index : index + 1] = []
            events = [event for event in events if event != Waited(made.number)]
        elif kind == "repeated":
            events.insert(index, replace(made, number=10**6))
        elif kind == "swapped":  # with the next of its communicator that is another
            later = (
                place
                for place in _calls(events)
                if place > index and events[place].group == made.group and not _same(events[place], made)  # type: ignore[union-attr]
            )
            place = next(later, None)
            if place is None:
                continue
            events[index], events[place] = events[place], events[index]
        elif kind == "grown":
            events[index] = replace(made, nbytes=made.nbytes + 8)
        elif kind == "renamed":
            others = {e.group for e in events if isinstance(e, Created) and len(e.ranks) > 1} - {made.group}
            events[index] = replace(made, group=generator.choice(sorted(others)))
        else:  # the rank fails in the middle of the step
            events = events[:index]
        assert play({**recorded, rank: events}).problems, (rank, made)


def _same(one: Event, other: Call) -> bool:
    return isinstance(one, Call) and replace(one, number=0) == replace(other, number=0)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("sequence", "exposed"), [(True, 4 * 3 + 3), (False, 2 * 3 + 1)])
def test_a_layer_computes_beside_its_collectives(
    sequence: bool, exposed: int, chunks: int, pool: Pool
) -> None:
    """Exposed are, of a layer's forward pass, the first chunk that is gathered and the last that is summed,
    two of each with sequence parallel, else two sums; those of embedding and head; and the first gather of
    the backward pass."""
    variant = replace(deep(VARIANTS[0], 3), overrides={"parallel": {"tensor_chunks": chunks}})
    case = Case(variant, tensor=2, sequence=sequence, samples=2, steps=1)
    recorded, _ = scenarios.dry_run(pool, case, axes=("tensor",))
    whole, parts = {3840, 1920}, {3840 // chunks, 1920 // chunks}
    for events in recorded.values():
        calls = [event for event in events if isinstance(event, Call)]
        # Those of layers in forward; in backward; of embedding and head.
        layers, others = (12, 18 + 4) if sequence else (6, 6 + 2)
        assert sum(call.nbytes in parts for call in calls) == (
            layers * chunks + (0 if chunks > 1 else others)
        )
        activations = [call.number for call in calls if call.nbytes in whole | parts]
        beside, under_way = Counter[int](), set[int]()
        for event in events:
            if isinstance(event, Call):
                under_way.add(event.number)
            elif isinstance(event, Waited):
                under_way.discard(event.number)
            elif isinstance(event, Computed):
                beside.update(under_way)
        assert sum(not beside[number] for number in activations) == exposed


# Large worlds

_WIDE = {
    "layers": 9,
    "hidden": 48,
    "heads": 8,
    "kv_heads": 8,
    "ffn_hidden": 64,
    "vocab": 211,
    "tied_embeddings": True,
}
_LARGE = Variant("wide, tied", _WIDE, micro=2)

LARGE = {
    "1,024 ranks": Case(
        _LARGE, data=64, tensor=8, pipeline=2, schedule="zb_h1", samples=384, zero=1, replicas=4
    ),
    "4,096 ranks, zero 2": Case(_LARGE, data=64, tensor=8, pipeline=8, samples=384, zero=2),
    "4,096 ranks, zero 3": Case(_LARGE, 1024, 1, True, 4, "interleaved", 2, samples=4096, zero=3, replicas=8),
    "128 ranks, context": Case(_LARGE, 8, 2, True, 2, "zb_v", 2, context=4, samples=32, zero=3),
}


@pytest.mark.parametrize(
    "name",
    [name if name.startswith("1,024") else pytest.param(name, marks=pytest.mark.slow) for name in LARGE],
)
def test_large_worlds_end(name: str, pool: Pool) -> None:
    case = LARGE[name]
    recorded, played_by = scenarios.dry_run(pool, case)
    assert play(recorded, played_by).problems == []
    # What other ranks do differs in the names of their groups alone.
    others, _ = scenarios.dry_run(
        pool, case, of=case.tensor * case.context * (case.data // 2) + (case.tensor > 1)
    )
    for one, other in zip(recorded.values(), others.values()):
        assert _shapes(one) == _shapes(other)


def _shapes(events: Sequence[Event]) -> list[tuple[str, int, str]]:
    return [(event.kind, event.nbytes, event.dtype) for event in events if isinstance(event, Call)]


# Code that is broken on one rank


def _reversed_axes(rank: int) -> Any:
    axes = mesh.TRAINING_AXES[::-1] if rank == 1 else mesh.TRAINING_AXES
    return mock.patch.object(mesh, "TRAINING_AXES", axes)


@contextmanager
def _own_order(rank: int) -> Iterator[None]:
    with (
        mock.patch.object(executor, "transfers", as_needed),
        mock.patch.object(Axis, "carrier", lambda self, *_: self.group),  # for both directions
    ):
        yield


def _other_buckets(rank: int) -> Any:
    original = buckets.plan_buckets

    def plan(held: Any, size: float, *rest: Any) -> Any:
        return original(held, 20 * size if rank == 1 else size, *rest)

    return mock.patch.object(buckets, "plan_buckets", plan)


def _no_norm(rank: int) -> Any:
    def reduce(tensor: Any, axis: Any, operator: str = "sum") -> Any:
        left_out = rank == 1 and axis.name == "pipeline" and operator == "sum"
        return tensor if left_out else comm.all_reduce(tensor, axis, operator)

    return mock.patch.object(optimizer, "all_reduce", reduce)


def _unbatched(rank: int) -> Any:
    def one_by_one(message: Any, to: int, out: Any, source: int, axis: Any, tag: int = 0) -> comm.Pending:
        comm.send_async(message, axis, to, tag)
        return comm.receive_async(out, axis, source, tag)

    return mock.patch.object(attention, "exchange_async", one_by_one)


_FOUR = Case(deep(VARIANTS[0], 3), data=2, pipeline=2, zero=1)
_RING = Case(VARIANTS[0], context=2)
BROKEN: dict[str, tuple[Case, Callable[[int], Any], str]] = {
    "groups created in another order": (_FOUR, _reversed_axes, "its host at created"),
    "messages in each rank's own order": (
        replace(_FOUR, pipeline=4, data=1),
        _own_order,
        "deadlock",
    ),
    "buckets of another size": (_FOUR, _other_buckets, "reduce_scatter of"),
    "a reduction left out": (_FOUR, _no_norm, "all_reduce of 8 bytes"),
    "messages one by one": (_RING, _unbatched, "deadlock"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_code_broken_on_one_rank_is_noticed(name: str, pool: Pool) -> None:
    case, broken, words = BROKEN[name]
    every = ("tensor", "context", "pipeline", "data")
    recorded, _ = scenarios.dry_run(pool, case, axes=every, broken=broken)
    assert words in play(recorded).problems[0]


# Schedules


class _Transport:
    """Writes down what a rank's exchange asks for."""

    def __init__(self, events: list[Event], axis: Axis) -> None:
        self.events, self.axis, self.numbers = events, axis, 0

    def _start(self, kind: str, message: Message, peer: int) -> Any:
        number, self.numbers = self.numbers, self.numbers + 1
        ends = (self.axis.rank, peer) if kind == "send" else (peer, self.axis.rank)
        self.events.append(call(number, kind, str(self.axis.carrier(*ends)), peer=peer))
        events = self.events

        class Started:
            def wait(self) -> Message:
                events.append(Waited(number))
                return message

        return Started()

    def send(self, message: Message, peer: int, tag: int) -> Any:
        return self._start("send", message, peer)

    def receive(self, message: Message, peer: int, tag: int) -> Any:
        return self._start("receive", message, peer)


def programs(schedule: Schedule, orders: list[list[MessageEnd]], directions: bool = False) -> Played:
    """Play a schedule's messages, with each direction on a communicator of its own or on one for both."""
    ranks = tuple(range(schedule.pipeline))
    groups: dict[str, Any] = {"group": "both"}
    if directions:
        groups |= {"to_next": "next", "to_previous": "previous"}
    result: dict[int, list[Event]] = {}
    for rank, actions in enumerate(schedule.ranks):
        events: list[Event] = [Created(name, ranks) for name in groups.values()]
        transport = _Transport(events, Axis("pipeline", ranks, rank, **groups))
        exchange = Exchange(schedule, orders[rank], transport)
        for action in actions:
            needed, made = schedule.received(action), schedule.sent(action)
            if needed is not None:
                exchange.receive(needed)
            events.append(Computed(100))
            if made is not None:
                exchange.send(made, made)
        exchange.finish()
        result[rank] = events
    return play(result)


NAMES = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "auto"]
schedules = st.builds(
    lambda name, pipeline, microbatches, frozen: replace(
        build_schedule(name, pipeline, microbatches, 3 if name == "interleaved" else 1), trained_from=frozen
    ),
    st.sampled_from(NAMES),
    st.integers(2, 12),
    st.integers(1, 30),
    st.integers(0, 2),
)


@given(schedule=schedules, directions=st.booleans(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_messages_of_any_schedule_arrive(schedule: Schedule, directions: bool, data: Any) -> None:
    seconds = st.lists(st.integers(1, 9), min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    costs = Costs(data.draw(seconds), data.draw(seconds), data.draw(seconds))
    assert programs(schedule, transfers(schedule, costs), directions).problems == []


@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_each_direction_of_neighbours_has_a_communicator(pipeline: int) -> None:
    groups: dict[str, Any] = {"group": "both", "to_next": "next", "to_previous": "previous"}
    axis = Axis("pipeline", tuple(range(pipeline)), 0, **groups)
    assert {axis.carrier(0, 1), axis.carrier(1, 0)} == {"next", "previous"}
    assert axis.carrier(pipeline - 1, 0) == ("previous" if pipeline == 2 else "next")  # around the end
    assert axis.carrier(0, pipeline - 1) == ("next" if pipeline == 2 else "previous")
    if pipeline == 4:
        assert axis.carrier(0, 2) == "both"


def test_messages_in_each_rank_s_own_order_hang() -> None:
    schedule = build_schedule("1f1b", 4, 8, 1)
    assert "deadlock" in programs(schedule, as_needed(schedule)).problems[0]
