"""Whether a schedule can be run, and what it needs: memory, and buffers for messages in flight."""

from collections.abc import Iterator
from dataclasses import dataclass

from .schedule import KINDS, Action, Message, Schedule, ScheduleError

_SHOWN = 6


@dataclass(frozen=True)
class Report:
    """The memory that a valid schedule needs.

    Attributes:
        peak_activations: for each rank, the most activations held at once, counted in stages x microbatches;
            each is held from F to W (or BW). Zeros for forwards only, which hold none.
        buffers: the fewest messages that each directed link between two ranks must be able to hold, beyond
            those that the receiver has taken, to avoid a deadlock. 0: sends may block until received.
    """

    peak_activations: tuple[int, ...]
    buffers: int


def validate(schedule: Schedule, buffers: int | None = None, *, forward_only: bool = False) -> Report:
    """Check that a schedule is complete and that its order has no deadlock.

    Args:
        schedule: any, from a generator or a file.
        buffers: messages that each directed link between two ranks holds while the receiver has not taken
            them; a send into a full one blocks its rank. A message is taken when the receiver reaches the
            action that needs it. 0: a send blocks until then. None: sends never block.
        forward_only: the schedule has forwards only, as for evaluation.

    Raises:
        ScheduleError: names the first action that is missing, duplicate, misplaced or out of order; or the
            ranks that wait for each other, and for what.
    """
    if not schedule.ranks or schedule.microbatches < 1:
        raise ScheduleError("found no ranks or no microbatches, expected at least one of each")
    for stage, owner in enumerate(schedule.placement):
        if not 0 <= owner < schedule.pipeline:
            raise ScheduleError(
                f"stage {stage} is placed on rank {owner}, but there are {schedule.pipeline} ranks"
            )
    for rank in range(schedule.pipeline):
        if rank not in schedule.placement:
            raise ScheduleError(f"rank {rank} of {schedule.pipeline} has no stage; every rank needs one")
    done = bytearray(schedule.stages * schedule.microbatches)
    peaks = tuple(_check_rank(schedule, rank, done, forward_only) for rank in range(schedule.pipeline))
    complete = 1 if forward_only else 3
    for index, state in enumerate(done):
        if state != complete:
            _missing(schedule, *divmod(index, schedule.microbatches), state)
    return Report((0,) * schedule.pipeline if forward_only else peaks, _Traversal(schedule, buffers).needed())


def _check_rank(schedule: Schedule, rank: int, done: bytearray, forward_only: bool) -> int:
    """Check one rank's actions by themselves and return the most activations held at once.

    Args:
        schedule: the whole.
        rank: which.
        done: uint8 ``[stages * microbatches]``, to be filled in: 0 nothing, 1 F, 2 B, 3 W or BW.
        forward_only: whether other actions are refused.
    """
    placement, microbatches, stages = schedule.placement, schedule.microbatches, schedule.stages
    activations = peak = 0
    for action in schedule.ranks[rank]:
        kind, stage, number = action
        if not (0 <= stage < stages and 0 <= number < microbatches) or kind not in KINDS:
            raise ScheduleError(
                f"rank {rank} has {action}, expected one of {', '.join(KINDS)} with stages below {stages} "
                f"and microbatches below {microbatches}"
            )
        if placement[stage] != rank:
            raise ScheduleError(f"rank {rank} has {action}, but stage {stage} is on rank {placement[stage]}")
        index = stage * microbatches + number
        state = done[index]
        if kind == "F" and state == 0:
            done[index] = 1
            activations += 1
            if activations > peak:
                peak = activations
        elif kind == "B" and state == 1 and not forward_only:
            done[index] = 2
        elif (kind == "W" and state == 2) or (kind == "BW" and state == 1 and not forward_only):
            done[index] = 3
            activations -= 1
        else:
            raise ScheduleError(_misplaced(schedule, rank, action, state, forward_only))
    return peak


def _misplaced(schedule: Schedule, rank: int, action: Action, state: int, forward_only: bool) -> str:
    """Why ``action`` is misplaced: ``state`` is what was done before it, as in ``done``."""
    kind, stage, number = action
    if forward_only and kind != "F":
        return f"rank {rank} has {action}, expected forwards only"
    if state >= {"F": 1, "B": 2, "BW": 2, "W": 3}[kind]:
        before = next(
            other
            for other in schedule.ranks[rank]
            if other[1:] == (stage, number) and set(kind) & set(other.kind)
        )
        if before == action:
            return f"rank {rank} has {action} more than once"
        return f"rank {rank} has {action}, but also {before}, which does the same"
    needed = Action("B" if kind == "W" and state == 1 else "F", stage, number)
    if needed in schedule.ranks[rank]:
        return f"rank {rank} has {action} before {needed}"
    return f"rank {rank} has {action}, but {needed} is missing"


def _missing(schedule: Schedule, stage: int, number: int, state: int) -> None:
    kind = ("F", "B", "W")[state]
    raise ScheduleError(
        f"{Action(kind, stage, number)} is missing on rank {schedule.placement[stage]}"
        + (" (or a BW)" if kind == "B" else "")
    )


class _Traversal:
    """Simulates a schedule without clocks: each rank runs until it must wait.

    An action that can run stays possible until it runs, so that the result does not depend on the order in
    which ranks are tried. More buffers only allow more actions: when all ranks are blocked, one is added and
    the run continues, and the number at the end is the smallest that suffices.

    A message has the index of the action that needs it: ``stage * microbatches + number`` for F, and the same
    plus the number of all those for B.
    """

    def __init__(self, schedule: Schedule, limit: int | None) -> None:
        self.schedule = schedule
        self.limit = limit
        self.buffers = 0
        count = schedule.stages * schedule.microbatches
        # 0: not sent, 1: waits on the link, 2: handed over (or from the rank itself).
        self.sent = bytearray(2 * count)
        self.sent[: schedule.microbatches] = b"\2" * schedule.microbatches
        self.sent[2 * count - schedule.microbatches :] = b"\2" * schedule.microbatches
        self.position = [0] * schedule.pipeline
        self.waiting = [-1] * schedule.pipeline
        self.sending = [-1] * schedule.pipeline
        self.in_flight = [0] * schedule.pipeline**2
        self.full = [-1] * schedule.pipeline**2

    def needed(self) -> int:
        """The fewest buffers per link.

        Raises:
            ScheduleError: no number of them suffices, or not as many as the limit.
        """
        stack = list(range(self.schedule.pipeline))
        while True:
            while stack:
                self._advance(stack.pop(), stack)
            if all(position == len(actions) for position, actions in zip(self.position, self.schedule.ranks)):
                return self.buffers
            if self.buffers == self.limit or max(self.sending) < 0:
                raise ScheduleError(self._deadlock())
            self.buffers += 1
            for link, index in enumerate(self.full):
                if index >= 0:
                    self._accept(link, stack)

    def _accept(self, link: int, stack: list[int]) -> None:
        """Let a link hold the message whose sender is blocked."""
        self.sent[self.full[link]] = 1
        self.full[link] = -1
        self.in_flight[link] += 1
        sender = link // self.schedule.pipeline
        self.sending[sender] = -1
        self.position[sender] += 1
        stack.append(sender)

    def _advance(self, rank: int, stack: list[int]) -> None:
        """Run one rank as far as possible; push the ranks that can continue because of it on the stack."""
        if self.sending[rank] >= 0:
            return
        schedule, sent, placement = self.schedule, self.sent, self.schedule.placement
        microbatches, pipeline = schedule.microbatches, schedule.pipeline
        backward = schedule.stages * microbatches
        actions = schedule.ranks[rank]
        position, end = self.position[rank], len(actions)
        while position < end:
            kind, stage, number = actions[position]
            if kind == "W":
                position += 1
                continue
            index = stage * microbatches + number
            if kind == "F":
                need, gives, source, target = index, index + microbatches, stage - 1, stage + 1
            else:
                index += backward
                need, gives, source, target = index, index - microbatches, stage + 1, stage - 1
            if sent[need] != 2 and not self._take(rank, placement[source], need, stack):
                break
            if not 0 <= target < schedule.stages:
                pass
            elif (other := placement[target]) == rank:
                sent[gives] = 2
            elif self.waiting[other] == gives:
                sent[gives] = 2
                self.waiting[other] = -1
                stack.append(other)
            elif self.in_flight[link := rank * pipeline + other] < self.buffers:
                sent[gives] = 1
                self.in_flight[link] += 1
            else:
                self.sending[rank] = self.full[link] = gives
                break
            position += 1
        self.position[rank] = position

    def _take(self, rank: int, source: int, need: int, stack: list[int]) -> bool:
        """Take a message from its link, or from a sender blocked with it; or record that ``rank`` waits."""
        link = source * self.schedule.pipeline + rank
        if self.sent[need] == 1:
            self.in_flight[link] -= 1
            if self.full[link] >= 0:
                self._accept(link, stack)
        elif self.full[link] == need and source != rank:
            self.in_flight[link] -= 1
            self._accept(link, stack)
        else:
            self.waiting[rank] = need
            return False
        self.sent[need] = 2
        return True

    def _deadlock(self) -> str:
        """The shortest cycle of ranks that wait for each other."""
        waits = dict(self._waits())
        circles = []
        for start in waits:
            path = [start]
            while (other := waits[path[-1]][0]) not in path:
                path.append(other)
            circles.append(path[path.index(other) :])
        circle = min(circles, key=lambda ranks: (len(ranks), ranks))
        more = f"; and {len(circle) - _SHOWN} more ranks" if len(circle) > _SHOWN else ""
        reasons = "; ".join(waits[rank][1] for rank in circle[:_SHOWN])
        room = "" if self.buffers != self.limit else f" with {self.limit} buffers per link"
        return f"deadlock{room}: {reasons}{more}"

    def _waits(self) -> Iterator[tuple[int, tuple[int, str]]]:
        """The rank that each blocked rank waits for, and why."""
        schedule = self.schedule
        for rank, (position, actions) in enumerate(zip(self.position, schedule.ranks)):
            if position == len(actions):
                continue
            action = actions[position]
            step = 1 if action.kind == "F" else -1
            if self.sending[rank] >= 0:
                other = schedule.placement[action.stage + step]
                yield (
                    rank,
                    (other, f"rank {rank} has done {action}, which rank {other} is not ready to receive"),
                )
                continue
            source = Message("F" if step > 0 else "B", action.stage - step, action.microbatch)
            other = schedule.placement[source.stage]
            where = "itself, later in its order" if other == rank else f"rank {other}"
            yield rank, (other, f"rank {rank} waits at {action} for {Action(*source)} of {where}")
