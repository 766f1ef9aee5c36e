"""A pipeline rank's training step, action by action: what is held, what each needs for a moment, and the
buffers that buckets take turns with."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hexad.model.inventory import StageSpec
from hexad.model.recompute_inventory import Recompute
from hexad.parallel.data.bucket_plan import BucketPlan
from hexad.parallel.data.ordering import Gathering, Gathers, Rounds
from hexad.parallel.inventory import Execution, Grid, Kept
from hexad.parallel.pipeline.schedule import Action, Message, Schedule
from hexad.parallel.pipeline.transfers import Exchange, Order


class StateBuffers:
    """Counts a step's buffers, in the place of tensors.

    Args:
        buckets: of the rank.
        run: how a microbatch is computed; on a CPU a reduction receives into a buffer as large as the bucket,
            on a GPU into the shard.
        ranks: of each grid, those over which gradients are summed, see ``Layout.state_ranks``.

    Attributes:
        moving: bytes that reductions under way receive into.
        most: largest ``moving`` since :meth:`restart`.
    """

    def __init__(self, buckets: Sequence[BucketPlan], run: Execution, ranks: Mapping[Grid, int]) -> None:
        self.moving = self.most = 0
        self._buckets, self._whole, self._ranks = buckets, run.cpu, ranks
        self._parameter, self._gradient, self._sent = run.byte, run.gradient, run.reduced
        self._narrowed = run.reduced != run.gradient
        self._reducing: deque[tuple[int, int]] = deque()  # bytes received into, and summed beside them
        self._used: Counter[tuple[int, ...]] = Counter()
        self._peak: Counter[tuple[int, ...]] = Counter()
        self._here: set[int] = set()
        self._accumulating: set[int] = set()
        # As the trainer numbers them: frozen parameters have no gradients.
        self._trained = [plan for plan in buckets if not plan.frozen]
        self._rounds = Rounds(self._trained, self, run.cpu or self._narrowed)
        self._places = {
            number: (bucket, member)
            for bucket, plan in enumerate(self._trained)
            for member, number in enumerate(plan.members)
        }

    @property
    def pooled(self) -> int:
        """Bytes of all buffers that were ever needed at a time: they are never given back to the system."""
        return sum(width * size * number for (width, size, *_), number in self._peak.items())

    def begin(self, microbatches: int) -> None:
        """Begin a step of so many microbatches, as :meth:`hexad.parallel.data.gradients.Gradients.begin`
        does."""
        self._rounds.begin(microbatches)

    def contribute(self, parameters: Sequence[int]) -> None:
        """A microbatch's gradients of these parameters (by number) are complete; frozen ones have none."""
        for bucket, member in (self._places[number] for number in parameters if number in self._places):
            plan = self._trained[bucket]
            if not plan.keeps_gradients and bucket not in self._accumulating:
                self._accumulating.add(bucket)
                self._take(self._gradient, plan)
            self._rounds.added(bucket, member)

    def restart(self) -> None:
        """Begin a new maximum."""
        self.most = self.moving

    # As Rounds decides

    def start(self, bucket: int, first: bool, last: bool, absent: Sequence[int]) -> None:
        """Count the buffers of a reduction that starts."""
        plan = self._trained[bucket]
        several = plan.shards > 1
        # The first shard is summed where it belongs, later ones and those in another format beside it.
        beside = plan.shard_size * self._sent if several and (self._narrowed or not first) else 0
        received = (plan.size * self._sent if several else 0) if self._whole else beside
        if self._narrowed and several:
            received += plan.size * self._sent  # the copy that is sent
        self._reducing.append((received, beside if self._whole else 0))
        self.moving += received
        self.most = max(self.most, self.moving)
        self._accumulating.discard(bucket)

    def overrun(self) -> None:
        """Never called: a plan contributes what it announces."""
        raise AssertionError

    def retire(self, bucket: int, last: bool) -> None:
        """Release the buffers of a reduction that is over."""
        received, beside = self._reducing.popleft()
        plan = self._trained[bucket]
        self.most = max(self.most, self.moving + beside)
        self.moving -= received
        if last and self._narrowed and self._ranks[plan.traits.grid] > plan.shards:
            # Sent in a copy, which is there until the end of the step.
            self.moving += plan.shard_size * self._sent
            self.most = max(self.most, self.moving)
        if not plan.keeps_gradients:
            self._used[self._gradient, *plan.layout] -= 1

    # As Gathering decides

    def fetch(self, bucket: int) -> None:
        """Count the buffer of a bucket that is gathered, unless it is held."""
        if bucket not in self._here:
            self._here.add(bucket)
            self._take(self._parameter, self._buckets[bucket])

    def free(self, bucket: int) -> None:
        """Release the buffer of a bucket, if it is held."""
        if bucket in self._here:
            self._here.discard(bucket)
            self._used[self._parameter, *self._buckets[bucket].layout] -= 1

    def _take(self, width: int, plan: BucketPlan) -> None:
        key = (width, *plan.layout)
        self._used[key] += 1
        self._peak[key] = max(self._peak[key], self._used[key])


class StageGathers:
    """The gathers of a stage's weights that are not resident, as its units run.

    Args:
        stage: whose units these are.
        numbers: those of its parameters on the rank, by name.
        buckets: of the rank.
        gathers: carries them out.
    """

    def __init__(
        self, stage: StageSpec, numbers: Mapping[str, int], buckets: Sequence[BucketPlan], gathers: Gathers
    ) -> None:
        self.members: dict[str, list[int]] = {}
        for parameter in stage.parameters:
            self.members.setdefault(parameter.unit, []).append(numbers[parameter.name])
        if stage.head is not None and stage.head.tied == "here":
            self.members["head"] = [numbers["embedding.weight"]]
        owner = {number: bucket for bucket, plan in enumerate(buckets) for number in plan.members}
        needed = [list(dict.fromkeys(owner[number] for number in unit)) for unit in self.members.values()]
        self._order = Gathering(needed, buckets, gathers)
        self._units = {unit: number for number, unit in enumerate(self.members)}
        self._reached = [f"layers.{number}" for number in reversed(stage.layers[stage.unreached :])]
        # Otherwise no gradient of a layer's input says that its backward pass is over.
        self._leaves = stage.input_reached

    def forward(self) -> None:
        """Run a forward pass, up to the last unit, which is not left yet."""
        *others, last = self._units.values()
        for unit in others:
            self._order.enter(unit)
            self._order.leave(unit)
        self._order.enter(last)

    def end_forward(self) -> None:
        """Leave the last unit."""
        self._order.leave(len(self._units) - 1)

    def turn(self, unit: str) -> None:
        """The backward pass reaches a layer."""
        self._order.turn(self._units[unit])

    def end_backward(self) -> None:
        """The backward pass of the first layer that it reaches is over."""
        if self._reached and self._leaves:
            self._order.leave(self._units[self._reached[-1]])

    def backward(self) -> None:
        """Run a backward pass."""
        for unit in self._reached:
            self.turn(unit)
        self.end_backward()


_BEGUN = 4
"""Actions of one kind after which a schedule repeats itself, as far as buffers of sharded state go."""


@dataclass(frozen=True)
class Peak:
    """The moment at which the most bytes are held: kept by kind, needed for a moment, and the position of the
    action among the rank's (None: after all of them)."""

    kept: Kept
    transient: int
    position: int | None

    @property
    def total(self) -> int:
        """The bytes at that moment."""
        return self.kept.total() + self.transient


class StageMemory:
    """The memory of a stage's actions, computed once.

    ``recompute``: what its layers recompute; ``numbers``: those of its parameters on the rank, by name;
    ``split``: the schedule has weight gradients as actions of their own.
    """

    def __init__(
        self, stage: StageSpec, run: Execution, recompute: Recompute, numbers: Mapping[str, int], split: bool
    ) -> None:
        self.stage, self.run = stage, run
        self.stream = run.stream(stage.model.settings.hidden)
        self.kept = stage.kept(run, recompute)
        self.operands = stage.operands(run)
        self.kept_bytes = self.kept.total()
        self.layers = list(zip(stage.layers, stage.recomputing(recompute)))
        self.vectors = {
            parameter.name: numbers[parameter.name] for parameter in stage.parameters if not parameter.matrix
        }
        self.numbers = numbers
        self.leftover: list[int] = []  # parameters whose product a ``B`` sets aside and leaves to its ``W``
        self.moments = {
            apart: list(self._backward(apart)) for apart in ((False, True) if split else (False,))
        }
        self.weight_moments = list(self._weights()) if split else []
        self.operand_bytes = self.operands.total()

    @property
    def forward(self) -> int:
        """Bytes that the layers' ``F`` needs above what is kept, its output included."""
        stage, run = self.stage, self.run
        alone = set(stage.blocks[: stage.unreached])
        reached = {part for _, part in self.layers[stage.unreached :]}
        needed = max((block.forward(run, recomputed) for block, recomputed in reached), default=0)
        # Layers that no gradient reaches come first, when nothing of the others is kept yet.
        first = max((block.forward_alone(run) for block in alone), default=0) - self.kept_bytes
        return max(needed, first) + (0 if stage.last else self.stream)

    def _backward(self, split: bool) -> Iterator[tuple[int, int, list[int], str | None]]:
        """(bytes needed, bytes when gradients are complete, parameters whose they are, unit that backward
        reaches), above what is held when the action begins."""
        stage, run, stream = self.stage, self.run, self.stream
        base = stream
        if stage.norm is not None:
            yield max(stream, stage.norm.backward(run)), stream, self._vectors("norm"), None
            base -= 2 * stream  # the head's gradient was kept, and the final norm has given up its input
        parts = {
            (block, recomputed): (
                block.backward(run, recomputed, split),
                (block.operands(run).total() if split else 0) - block.kept(run, recomputed).total(),
            )
            for block, recomputed in {part for _, part in self.layers}
        }
        # Of a product that is set aside: bytes of its operands, the weight's number, and the kind of branch.
        aside, later, kind = 0, list[int](), ""
        for number, part in reversed(self.layers[stage.unreached :]):
            moments, left = parts[part]
            unit = f"layers.{number}"
            reached: str | None = unit
            for moment in moments:
                weights = moment.weights if moment.aside or not split else ()
                parameters = [self.numbers[f"{unit}.{weight.name}"] for weight in weights]
                needed, done = base + moment.needed + aside, list[int]()
                computed = 0  # operands of the product before, held until its gradient is handed over
                if moment.aside or (moment.weights and not run.sequence):
                    done, later, computed, aside = later, [], aside, 0
                if moment.aside:
                    later, parameters, aside = parameters, [], moment.aside
                    kind = part[0].kind_of(moment.weights[0])
                yield needed, base + moment.complete + max(computed, aside), done + parameters, reached
                reached = None
            base += left
            last = number == stage.layers[-1]
            base += stream if last and not stage.last else 0  # what was received is held to the end
            yield base, base, self._vectors(unit), None
        units = ("positions.", "embedding.")
        first = [self.numbers[p.name] for unit in units for p in stage.parameters if p.name.startswith(unit)]
        embeds = any(part.unit == "embedding" and not part.frozen for part in stage.parameters)
        gathers = run.sequence and embeds and not stage.unreached  # the gradient of the embedding's output
        if split and aside and not gathers:
            self.leftover, later = later, []
            self.operands[kind] += aside
            yield base + aside, base + aside, first, None
        else:
            yield base + aside, base, later + first, None

    def _weights(self) -> Iterator[tuple[int, int, list[int], str | None]]:
        """Yield the moments of ``W``, in the form of :meth:`_backward`."""
        released = 0
        parts = {block: block.weight_moments(self.run) for block in set(self.stage.blocks)}
        for number, (block, _) in reversed(self.layers[self.stage.unreached :]):
            for needed, complete, weights, _ in parts[block]:
                done = [self.numbers[f"layers.{number}.{weight.name}"] for weight in weights]
                yield needed - released, complete - released, done, None
            released += block.operands(self.run).total()
        if self.leftover:
            yield -released, -released, self.leftover, None

    def _vectors(self, unit: str) -> list[int]:
        """Parameters too small to matter, but with a place in the order of reductions."""
        return [number for name, number in reversed(self.vectors.items()) if name.startswith(f"{unit}.")]


class RankStep:
    """Walks a rank's actions in a step, and counts the bytes that they hold.

    The steady part of a schedule is counted once: of every stage's actions of one kind the last, and where
    gradients are not kept over the step the first few, are walked in detail, with gradients and gathers; what
    the first needed at the most holds for those between.

    Args:
        order: of the rank's transfers, see :func:`~hexad.parallel.pipeline.transfers.transfers`.
        stages: of the rank, by number, ascending.
        buffers: counts what reductions and gathers need; its buffers are not part of ``peak``.

    Attributes:
        peak: the largest number of bytes, and when it is reached.
    """

    def __init__(
        self,
        schedule: Schedule,
        pipeline: int,
        order: Order,
        stages: Mapping[int, StageMemory],
        buckets: Sequence[BucketPlan],
        buffers: StateBuffers,
    ) -> None:
        self.peak = Peak(Counter(), 0, None)
        self._schedule, self._stages, self._buffers = schedule, stages, buffers
        self._own = schedule.stages_of(pipeline)
        self._handed: set[Message | None] = set()
        self._exchange: Exchange[None] = Exchange(schedule, order, _Counted())
        self._kept: Counter[int] = Counter()
        self._operands: Counter[int] = Counter()
        self._bytes = 0
        self._gathers = {
            number: StageGathers(stage.stage, stage.numbers, buckets, buffers)
            for number, stage in stages.items()
        }
        self._seen: Counter[tuple[str, int]] = Counter()
        self._most: dict[tuple[str, int], int] = {}
        actions = schedule.ranks[pipeline]
        totals = Counter((action.kind, action.stage) for action in actions)
        # Where gradients are kept over the step, only its last contributions matter.
        begun = 0 if all(plan.keeps_gradients or plan.frozen for plan in buckets) else _BEGUN
        detailed = {key: {*range(min(begun, count)), count - 1} for key, count in totals.items()}
        buffers.begin(len(next(iter(detailed.values()))))
        for position, action in enumerate(actions):
            self._before(action)
            self._act(position, action, self._seen[action[:2]] in detailed[action[:2]])
            self._seen[action[:2]] += 1
            self._after(action)

    def _before(self, action: Action) -> None:
        """Take over the action's input: receive it, or end its wait on this rank."""
        message = self._schedule.received(action)
        if message is not None:
            self._exchange.receive(message)
        else:
            self._handed.discard(action.needs)

    def _after(self, action: Action) -> None:
        """Send the action's result, or keep it for the next stage where that is on this rank."""
        message = self._schedule.sent(action)
        if message is not None:
            self._exchange.send(message, None)
        elif (sent := action.gives) is not None and sent.target in self._own:
            self._handed.add(sent)

    def _act(self, position: int, action: Action, detailed: bool) -> None:
        stage, kind = self._stages[action.stage], action.kind
        if kind == "F":
            self._hold(self._kept, action.stage, stage.kept_bytes)
        key = action[:2]
        if detailed or key not in self._most:
            walk = self._forward if kind == "F" else self._backward
            transient = walk(action, stage, detailed)
            self._most[key] = max(transient, self._most.get(key, transient))
        else:
            transient = self._most[key]
        self._level(position, transient)
        if kind == "W":
            self._hold(self._operands, action.stage, -stage.operand_bytes)
        elif kind != "F":
            self._hold(self._kept, action.stage, -stage.kept_bytes)
        if kind == "B":
            self._hold(self._operands, action.stage, stage.operand_bytes)

    def _hold(self, counts: Counter[int], stage: int, size: int) -> None:
        counts[stage] += 1 if size > 0 else -1
        self._bytes += size

    def _level(self, position: int, transient: int) -> None:
        """Raise the peak if more is held and needed now than before; boundary tensors have the first stage's
        size."""
        stream = next(iter(self._stages.values())).stream
        transient += (self._exchange.held + len(self._handed)) * stream
        if self._bytes + transient > self.peak.total:
            kept: Kept = Counter()
            for number, stage in self._stages.items():
                for counts, parts in ((self._kept, stage.kept), (self._operands, stage.operands)):
                    for name, size in parts.items():
                        kept[name] += counts[number] * size
            self.peak = Peak(kept, transient, position)

    def _forward(self, action: Action, stage: StageMemory, detailed: bool) -> int:
        """Walk ``F``; returns the bytes needed at the most."""
        gathers, buffers = self._gathers[action.stage], self._buffers
        if detailed:
            gathers.forward()
        most = stage.forward + buffers.moving
        if stage.stage.head is not None:
            needed, left = stage.stage.head.loss(stage.run)
            most = max(most, needed + buffers.moving)
            buffers.restart()
            if detailed:
                buffers.contribute(gathers.members["head"])
            most = max(most, left + buffers.most)
        if detailed:
            gathers.end_forward()
        return most

    def _backward(self, action: Action, stage: StageMemory, detailed: bool) -> int:
        """Walk ``B``, ``W`` or ``BW``; returns the bytes needed at the most."""
        gathers = self._gathers[action.stage]
        moments = stage.weight_moments if action.kind == "W" else stage.moments[action.kind == "B"]
        buffers, most = self._buffers, 0
        for needed, complete, done, unit in moments:
            if detailed and unit is not None:
                gathers.turn(unit)
            most = max(most, needed + buffers.moving)
            if detailed and done:
                buffers.restart()
                buffers.contribute(done)
                most = max(most, complete + buffers.most)
        if detailed and action.kind != "W":
            gathers.end_backward()
        return most


class _Counted:
    """Transfers of nothing: what is under way is counted, not moved."""

    def send(self, message: None, peer: int, tag: int) -> _Counted:
        return self

    def receive(self, message: Message, peer: int, tag: int) -> _Counted:
        return self

    def wait(self) -> None:
        """No-op: transfers are only counted."""
