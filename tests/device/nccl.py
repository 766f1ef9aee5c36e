"""Plays recorded calls by NCCL's rules, and says what would hang or mix up.

A communicator has one stream on each of its ranks. A call starts when its rank's stream has done what it was
given before, when the computing stream has come to where it was started, and when all members have come to
it. A send meets a receive; those of one batch run together, those started by themselves one after the other,
as all calls of a communicator that was created with its device (``device_id``). The host only waits where it
reads a value, creates a communicator, or agrees with the other hosts.

The ranks of a large world that do the same are played by one of them, see :func:`play`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .recorder import COMPUTE, Agreed, Call, Computed, Created, Event, Ordered, Synchronised, Waited

LATENCY, BYTES = 10.0, 1e3
"""Of a call: time, and bytes per unit of time. An operator takes one unit."""


@dataclass
class Unit:
    """What a communicator's stream does at once on a rank: a collective, or the messages of a batch."""

    calls: list[Call]
    position: int  # of the stream that it was started from
    matched: dict[int, float] = field(default_factory=dict)  # by call: when its message is over
    end: float | None = None

    @property
    def message(self) -> bool:
        return self.calls[0].kind in ("send", "receive")


@dataclass
class _Stream:
    """A stream of a rank: what it was asked for, how much of that is done, and when."""

    queue: list[Event] = field(default_factory=list)
    times: list[float] = field(default_factory=lambda: [0.0])  # when it reached each position
    waited: float = 0.0

    @property
    def done(self) -> int:
        return len(self.times) - 1

    @property
    def over(self) -> bool:
        return self.done == len(self.queue)

    @property
    def time(self) -> float:
        return self.times[-1]


@dataclass
class _Rank:
    """A rank's host, its streams and those of its communicators."""

    events: Sequence[Event]
    host: int = 0
    host_time: float = 0.0
    streams: dict[str, _Stream] = field(default_factory=lambda: defaultdict(_Stream))
    positions: dict[int, int] = field(default_factory=dict)  # of a stream that another follows, by its event
    units: dict[str, list[Unit]] = field(default_factory=dict)
    heads: Counter[str] = field(default_factory=Counter)
    free: dict[str, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)

    def started_from(self, unit: Unit) -> _Stream:
        """The stream that a unit was started from."""
        return self.streams[unit.calls[0].stream]


@dataclass(frozen=True)
class Played:
    """The outcome.

    Attributes:
        problems: a line each: deadlocks, calls that do not match.
        seconds: of the whole, in units of time.
        waited: by rank, how long the computing stream waited for communicators.
    """

    problems: list[str]
    seconds: float
    waited: dict[int, float]


class _Player:
    def __init__(self, programs: Mapping[int, Sequence[Event]], played_by: Callable[[int], int]) -> None:
        self.ranks = {rank: _Rank(events) for rank, events in programs.items()}
        self.groups: dict[str, tuple[int, ...]] = {}
        self.members: dict[str, list[int]] = {}
        self.problems: list[str] = []
        for events in programs.values():
            for event in events:
                if isinstance(event, Created):
                    if self.groups.setdefault(event.group, event.ranks) != event.ranks:
                        self.problems.append(f"communicator {event.group} has other ranks on other ranks")
                    self.members[event.group] = sorted({played_by(rank) for rank in event.ranks})
        self._played_by = played_by

    def run(self) -> Played:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= self._advance(rank)
        stuck = [rank for rank in self.ranks if not self._over(rank)]
        if stuck and not self.problems:
            self.problems.append(f"deadlock: {'; '.join(map(self._waits, stuck))}")
        times = (max(state.streams[COMPUTE].time, state.host_time) for state in self.ranks.values())
        waited = {rank: state.streams[COMPUTE].waited for rank, state in self.ranks.items()}
        return Played(self.problems, max(times), waited)

    def _over(self, rank: int) -> bool:
        state = self.ranks[rank]
        calls = all(state.heads[name] == len(units) for name, units in state.units.items())
        return state.host == len(state.events) and calls and all(s.over for s in state.streams.values())

    def _advance(self, rank: int) -> bool:
        state = self.ranks[rank]
        moved = self._host(rank, state)
        for stream in list(state.streams.values()):
            moved |= self._compute(state, stream)
        for name in list(state.units):
            moved |= self._communicate(rank, name)
        return moved

    # The host

    def _host(self, rank: int, state: _Rank) -> bool:
        begin = state.host
        while state.host < len(state.events):
            event = state.events[state.host]
            if isinstance(event, Synchronised):
                if not state.streams[COMPUTE].over:
                    break
                state.host_time = max(state.host_time, state.streams[COMPUTE].time)
            elif isinstance(event, Created | Agreed):
                others = self.members[event.group] if isinstance(event, Created) else list(self.ranks)
                if not self._all_come_to(event, others):
                    break
            elif isinstance(event, Call):
                self._enqueue(state, event)
            else:
                if isinstance(event, Ordered):
                    state.positions[id(event)] = len(state.streams[event.before].queue)
                state.streams[event.stream].queue.append(event)
            state.host += 1
        return state.host > begin

    def _all_come_to(self, event: Created | Agreed, others: Sequence[int]) -> bool:
        """Whether the hosts of all members have come to this event, or are past it."""
        for other in others:
            state = self.ranks[other]
            reached = state.events[: state.host + 1]
            if isinstance(event, Agreed):
                if not any(isinstance(e, Agreed) and e.number == event.number for e in reached):
                    return False
            elif event not in reached:
                return False
        return True

    @staticmethod
    def _enqueue(state: _Rank, call: Call) -> None:
        units = state.units.setdefault(call.group, [])
        together = call.batch is not None and units and units[-1].calls[0].batch == call.batch
        if together:
            units[-1].calls.append(call)
        else:
            units.append(Unit([call], len(state.streams[call.stream].queue)))

    # Streams

    def _compute(self, state: _Rank, stream: _Stream) -> bool:
        begin = stream.done
        while not stream.over:
            item, time = stream.queue[stream.done], stream.time
            if isinstance(item, Waited):
                if item.number not in state.ends:
                    break
                time = max(time, state.ends[item.number])
                stream.waited += time - stream.time
            elif isinstance(item, Ordered):
                before, position = state.streams[item.before], state.positions[id(item)]
                if before.done < position:
                    break
                time = max(time, before.times[position])
            elif isinstance(item, Computed):
                time += item.operators
            stream.times.append(time)
        return stream.done > begin

    def _ready(self, rank: int, name: str) -> Unit | None:
        """What a communicator's stream has come to on a rank."""
        state = self.ranks[rank]
        units, head = state.units.get(name, []), state.heads[name]
        if head == len(units) or units[head].position > state.started_from(units[head]).done:
            return None
        return units[head]

    def _communicate(self, rank: int, name: str) -> bool:
        unit = self._ready(rank, name)
        if unit is None:
            return False
        return self._messages(rank, name, unit) if unit.message else self._collective(name)

    def _collective(self, name: str) -> bool:
        members = self.members[name]
        there = {member: self._ready(member, name) for member in members}
        if any(other is None or other.message for other in there.values()):
            return False  # messages among the others may still be under way
        first = there[members[0]]
        assert first is not None
        for member, other in there.items():
            assert other is not None
            if not _match(first.calls[0], other.calls[0]):
                self._mismatch(name, (members[0], first.calls[0]), (member, other.calls[0]))
                return False
        start = max(self._start(member, name, other) for member, other in there.items() if other is not None)
        end = start + LATENCY + first.calls[0].nbytes / BYTES
        for member, other in there.items():
            assert other is not None
            self._finish(member, name, other, end)
        return True

    def _mismatch(self, name: str, one: tuple[int, Call], other: tuple[int, Call]) -> None:
        """Report the first calls of a communicator that do not match, each with its rank."""
        if not any(problem.startswith(f"communicator {name}:") for problem in self.problems):
            ends = " meets ".join(
                f"{_words(call)} of rank {rank}"
                for rank, call in sorted((one, other), key=lambda end: end[0])
            )
            self.problems.append(f"communicator {name}: {ends}")

    def _messages(self, rank: int, name: str, unit: Unit) -> bool:
        """Match what can be matched with the peers' current units."""
        moved = False
        for call in unit.calls:
            if call.number in unit.matched:
                continue
            peer = self._played_by(self.groups[name][call.peer or 0])
            other = self._ready(peer, name)
            if other is None:
                continue
            partner = next((part for part in other.calls if self._meets(rank, name, call, part, other)), None)
            if partner is None:
                continue
            if (partner.nbytes, partner.dtype) != (call.nbytes, call.dtype):
                self._mismatch(name, (rank, call), (peer, partner))
                return False
            start = max(self._start(rank, name, unit), self._start(peer, name, other))
            end = start + LATENCY + call.nbytes / BYTES
            unit.matched[call.number] = other.matched[partner.number] = end
            moved = True
            if len(other.matched) == len(other.calls) and other is not unit:
                self._finish(peer, name, other, max(other.matched.values()))
        if len(unit.matched) == len(unit.calls):
            self._finish(rank, name, unit, max(unit.matched.values()))
        return moved

    def _meets(self, rank: int, name: str, call: Call, part: Call, other: Unit) -> bool:
        if part.kind not in ("send", "receive") or part.number in other.matched:
            return False
        back = self._played_by(self.groups[name][part.peer or 0])
        return part.kind != call.kind and back == rank and part is not call

    def _start(self, rank: int, name: str, unit: Unit) -> float:
        state = self.ranks[rank]
        return max(state.started_from(unit).times[unit.position], state.free.get(name, 0.0))

    def _finish(self, rank: int, name: str, unit: Unit, end: float) -> None:
        state = self.ranks[rank]
        state.heads[name] += 1
        state.free[name] = unit.end = end
        for call in unit.calls:
            state.ends[call.number] = unit.matched.get(call.number, end)

    def _waits(self, rank: int) -> str:
        """What a rank that is not over waits for."""
        state, parts = self.ranks[rank], []
        if state.host < len(state.events):
            event = state.events[state.host]
            parts.append(f"its host at {type(event).__name__.lower()}{_of(event)}")
        for name, units in state.units.items():
            head = state.heads[name]
            if head < len(units):
                calls = " and ".join(map(_words, units[head].calls))
                started = "" if self._ready(rank, name) else " (not yet started)"
                parts.append(f"communicator {name} at {calls}{started}")
        return f"rank {rank} waits: {', '.join(parts) or 'its computing stream'}"


def _match(one: Call, other: Call) -> bool:
    """Whether two ranks' calls are the same collective; of an all-to-all, sizes differ."""
    same = (one.kind, one.dtype, one.peer) == (other.kind, other.dtype, other.peer)
    return same and (one.nbytes == other.nbytes or one.kind == "all_to_all")


def _words(call: Call) -> str:
    peer = "" if call.peer is None else f" with {call.peer}"
    return f"{call.kind}{peer} of {call.nbytes} bytes ({call.dtype.removeprefix('torch.')})"


def _of(event: Any) -> str:
    return f" of {event.group} (ranks {event.ranks})" if isinstance(event, Created) else ""


def play(
    programs: Mapping[int, Sequence[Event]], played_by: Callable[[int], int] = lambda rank: rank
) -> Played:
    """Play what ranks have recorded.

    Args:
        programs: by rank.
        played_by: the rank that stands for a rank, which does the same with its own groups: in a large world
            those with one pipeline place.
    """
    return _Player(programs, played_by).run()
