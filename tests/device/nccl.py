"""Plays recorded calls by NCCL's rules, and says what would hang or mix up.

A communicator has one stream on each of its ranks. A call starts when its rank's stream has done what it was
given before, when the stream that was the current one has come to where the call was started, and when all
members have come to it. A send meets a receive. Those of one batch run together. Those started by themselves
run one after the other, as all calls of a communicator that was created with its device (``device_id``); of
others each pair of ranks has a communicator of its own for them, and every communicator is created where it
is first used. The host only waits where it reads a value, creates a communicator, or agrees with the other
hosts. (``ProcessGroupNCCL::pointToPoint`` and ``collective``, PyTorch 2.7 to 2.14.)

The ranks of a large world that do the same are played by one of them, see :func:`play`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .recorder import (
    COMPUTE,
    Agreed,
    Call,
    Computed,
    Created,
    Event,
    Followed,
    Marked,
    Queued,
    Reached,
    Synchronised,
    Waited,
)

LATENCY, BYTES = 10.0, 1e3
"""Of a call: time, and bytes per unit of time. An operator takes one unit."""


@dataclass
class Unit:
    """What a communicator's stream does at once on a rank: a collective, or the messages of a batch."""

    calls: list[Call]
    position: int  # of the stream that it follows, where it was started
    matched: dict[int, float] = field(default_factory=dict)  # by call: when its message is over

    @property
    def message(self) -> bool:
        return self.calls[0].message

    @property
    def stream(self) -> str:
        return self.calls[0].stream


@dataclass
class _Stream:
    """A stream of operators and waits. ``times``: when it has reached each position."""

    queue: list[Queued | tuple[str, int]] = field(default_factory=list)
    times: list[float] = field(default_factory=lambda: [0.0])

    @property
    def done(self) -> int:
        return len(self.times) - 1


@dataclass
class _Rank:
    """A rank's host, its streams, and those of its communicators."""

    events: Sequence[Event]
    host: int = 0
    host_time: float = 0.0
    streams: dict[str, _Stream] = field(default_factory=lambda: defaultdict(_Stream))
    marks: dict[int, tuple[str, int]] = field(default_factory=dict)
    units: dict[str, list[Unit]] = field(default_factory=dict)
    heads: Counter[str] = field(default_factory=Counter)
    free: dict[str, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    waited: float = 0.0


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
    def __init__(
        self, programs: Mapping[int, Sequence[Event]], played_by: Callable[[int], int], lazily: bool
    ) -> None:
        self._played_by, self._lazily = played_by, lazily
        self.ranks = {rank: _Rank(events) for rank, events in programs.items()}
        self.groups: dict[str, tuple[int, ...]] = {}
        self.members: dict[str, list[int]] = {}
        self.problems: list[str] = []
        # Where each rank's host first comes to something that hosts do together.
        self.meetings: dict[int, dict[object, int]] = {rank: {} for rank in programs}
        for events in programs.values():
            for event in events:
                if isinstance(event, Created):
                    if self.groups.setdefault(event.group, event.ranks) != event.ranks:
                        self.problems.append(f"communicator {event.group} has other ranks on other ranks")
                    self.members[event.group] = self._players(event.ranks)
        for rank, events in programs.items():
            for place, event in enumerate(events):
                meeting: object = event
                if isinstance(event, Call):
                    meeting = self._communicator(rank, event)
                if not isinstance(event, Queued):
                    self.meetings[rank].setdefault(meeting, place)

    def _players(self, ranks: Sequence[int]) -> list[int]:
        return sorted({self._played_by(rank) for rank in ranks})

    def _communicator(self, rank: int, call: Call) -> str:
        """The communicator of a call, which is that of its group, but for messages without a device."""
        if not (self._lazily and call.message and call.batch is None):
            return call.group
        pair = sorted((self.groups[call.group][call.peer or 0], self._self(rank, call.group)))
        name = f"{call.group} of {pair[0]} and {pair[1]}"
        self.members[name] = self._players(pair)
        return name

    def _self(self, rank: int, group: str) -> int:
        """The rank of a group that a rank is, or plays."""
        ranks = self.groups[group]
        return rank if rank in ranks else next(other for other in ranks if self._played_by(other) == rank)

    def run(self) -> Played:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= self._advance(rank)
        stuck = [rank for rank in self.ranks if not self._over(rank)]
        if stuck and not self.problems:
            self.problems.append(f"deadlock: {'; '.join(map(self._waits, stuck))}")
        times = [state.host_time for state in self.ranks.values()]
        times += [stream.times[-1] for state in self.ranks.values() for stream in state.streams.values()]
        waited = {rank: state.waited for rank, state in self.ranks.items()}
        return Played(self.problems, max(times, default=0.0), waited)

    def _over(self, rank: int) -> bool:
        state = self.ranks[rank]
        communicators = all(state.heads[name] == len(units) for name, units in state.units.items())
        streams = all(stream.done == len(stream.queue) for stream in state.streams.values())
        return state.host == len(state.events) and streams and communicators

    def _advance(self, rank: int) -> bool:
        state = self.ranks[rank]
        moved = self._host(rank, state)
        for name in list(state.streams):
            moved |= self._stream(state, name)
        for name in list(state.units):
            moved |= self._communicate(rank, name)
        return moved

    # The host

    def _host(self, rank: int, state: _Rank) -> bool:
        begin = state.host
        while state.host < len(state.events) and self._pass(rank, state, state.events[state.host]):
            state.host += 1
        return state.host > begin

    def _pass(self, rank: int, state: _Rank, event: Event) -> bool:
        """Whether the host passes an event now; what is queued is queued then."""
        if isinstance(event, Synchronised | Reached):
            if isinstance(event, Synchronised):
                stream, position = state.streams[event.stream], len(state.streams[event.stream].queue)
            else:
                name, position = state.marks[event.number]
                stream = state.streams[name]
            if stream.done < position:
                return False
            state.host_time = max(state.host_time, stream.times[position])
        elif isinstance(event, Created):
            return self._all_come_to(event, self.members[event.group])
        elif isinstance(event, Agreed):
            return self._all_come_to(event, list(self.ranks))
        elif isinstance(event, Call):
            name = self._communicator(rank, event)
            if self._lazily and name not in state.units and not self._all_come_to(name, self.members[name]):
                return False
            self._enqueue(state, name, event)
        elif isinstance(event, Followed):
            before = state.streams[event.before]
            state.streams[event.stream].queue.append((event.before, len(before.queue)))
        else:
            state.streams[event.stream].queue.append(event)
            if isinstance(event, Marked):
                state.marks[event.number] = event.stream, len(state.streams[event.stream].queue)
        return True

    def _all_come_to(self, meeting: object, others: Sequence[int]) -> bool:
        """Whether the hosts of all members have come to a meeting, or are past it."""
        places = ((self.meetings[other].get(meeting), self.ranks[other].host) for other in others)
        return all(place is not None and place <= host for place, host in places)

    @staticmethod
    def _enqueue(state: _Rank, name: str, call: Call) -> None:
        units = state.units.setdefault(name, [])
        if call.batch is not None and units and units[-1].calls[0].batch == call.batch:
            units[-1].calls.append(call)
        else:
            units.append(Unit([call], len(state.streams[call.stream].queue)))

    # Streams

    def _stream(self, state: _Rank, name: str) -> bool:
        stream = state.streams[name]
        begin = stream.done
        while stream.done < len(stream.queue):
            item, now = stream.queue[stream.done], stream.times[-1]
            if isinstance(item, Waited):
                end = state.ends.get(item.number)
                if end is None:
                    break
                if name == COMPUTE:
                    state.waited += max(0.0, end - now)
                now = max(now, end)
            elif isinstance(item, Computed):
                now += item.operators
            elif isinstance(item, tuple):
                before, position = state.streams[item[0]], item[1]
                if before.done < position:
                    break
                now = max(now, before.times[position])
            stream.times.append(now)
        return stream.done > begin

    def _ready(self, rank: int, name: str) -> Unit | None:
        """What a communicator's stream has come to on a rank."""
        state = self.ranks[rank]
        units, head = state.units.get(name, []), state.heads[name]
        if head == len(units) or units[head].position > state.streams[units[head].stream].done:
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
            peer = self._played_by(self.groups[call.group][call.peer or 0])
            other = self._ready(peer, name)
            if other is None:
                continue
            partner = next((part for part in other.calls if self._meets(rank, call, part, other)), None)
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

    def _meets(self, rank: int, call: Call, part: Call, other: Unit) -> bool:
        if not part.message or part.number in other.matched:
            return False
        back = self._played_by(self.groups[part.group][part.peer or 0])
        return part.kind != call.kind and back == rank and part is not call

    def _start(self, rank: int, name: str, unit: Unit) -> float:
        state = self.ranks[rank]
        return max(state.streams[unit.stream].times[unit.position], state.free.get(name, 0.0))

    def _finish(self, rank: int, name: str, unit: Unit, end: float) -> None:
        state = self.ranks[rank]
        state.heads[name] += 1
        state.free[name] = end
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
                begun = units[head].position <= state.streams[units[head].stream].done
                started = "" if begun else " (not yet started)"
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
    programs: Mapping[int, Sequence[Event]],
    played_by: Callable[[int], int] = lambda rank: rank,
    lazily: bool = False,
) -> Played:
    """Play what ranks have recorded.

    Args:
        programs: by rank.
        played_by: the rank that stands for a rank, which does the same with its own groups: in a large world
            those with one pipeline place.
        lazily: groups were created without a device, as scripts of other systems do.
    """
    return _Player(programs, played_by, lazily).run()
