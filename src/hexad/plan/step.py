"""A pipeline rank's training step, action by action: what is held, and what each needs for a moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hexad.parallel.pipeline.schedule import Action, Schedule

from .activations import Kept, Stage
from .backward import Layer, Moment, weights
from .division import Division
from .messages import Messages
from .parameters import Place, Unit


@dataclass(frozen=True)
class Peak:
    """Where the most bytes are held: kept by kind, needed for a moment, and the action."""

    kept: Kept
    transient: int
    action: str

    @property
    def total(self) -> int:
        """Bytes."""
        return self.kept.total() + self.transient


class Step:
    """Walks the rank's actions.

    Args:
        schedule: of the step.
        pipeline: the rank.
        stages: it holds, by number, ascending.
        units: of each of them.
        division: counts what reductions and gathers need; its buffers are not part of the peak.

    Attributes:
        peak: of the step.
    """

    def __init__(
        self,
        schedule: Schedule,
        pipeline: int,
        stages: Mapping[int, Stage],
        units: Sequence[Sequence[Unit]],
        division: Division,
    ) -> None:
        self.peak = Peak(Counter(), 0, "")
        self._held: Kept = Counter()
        self._stages, self._units, self._division = stages, units, division
        self._positions = {number: position for position, number in enumerate(stages)}
        self._messages = Messages(schedule, pipeline)
        for action in schedule.ranks[pipeline]:
            self._messages.before(action)
            self._act(action)
            self._messages.after(action)

    def _act(self, action: Action) -> None:
        stage = self._stages[action.stage]
        if action.kind == "F":
            self._held.update(stage.kept())
            self._forward(action, stage)
        elif action.kind == "W":
            blocks = [place for layer in self._blocks(action.stage) for place in layer]
            self._contribute(action, 0, weights(stage), blocks)
            self._held.subtract(stage.products())
        else:
            self._backward(action, stage, split=action.kind == "B")
            self._held.subtract(stage.kept())
            if action.kind == "B":
                self._held.update(stage.products())

    def _level(self, action: Action, transient: int, moving: int) -> None:
        """So many bytes are needed beside what is held; ``moving`` by reductions."""
        stream = next(iter(self._stages.values())).sizes.stream
        transient += moving + self._messages.held * stream
        if self._held.total() + transient > self.peak.total:
            self.peak = Peak(Counter(self._held), transient, str(action))

    def _forward(self, action: Action, stage: Stage) -> None:
        position, division = self._positions[action.stage], self._division
        coming = division.absent(position)
        for unit, after in pairwise(coming):
            division.fetch(position, unit)
            division.fetch(position, after)
            division.release(position, unit)
        for unit in coming[-1:]:
            division.fetch(position, unit)
        output = 0 if stage.last else stage.sizes.stream
        self._level(action, stage.forward_peak() + output, division.moving)
        if stage.last:
            most, then = stage.loss()
            self._level(action, most, division.moving)
            self._level(action, then, division.contribute_head())
        for unit in coming[-1:]:
            division.release(position, unit)

    def _backward(self, action: Action, stage: Stage, split: bool) -> None:
        position, division, stream = self._positions[action.stage], self._division, stage.sizes.stream
        units = self._units[position]
        blocks = [number for number, unit in enumerate(units) if unit.block]
        if stage.last:
            self._level(action, max(stream, stage.norm()), division.moving)
            self._vectors(position, len(units) - 2)
        # The gradient that layers pass on. The head's was kept, and the final norm has given up its input.
        base = stream - (2 * stream if stage.last else 0)
        kinds = ["none"] * (stage.layers - stage.again) + [stage.kind] * stage.again
        matrices = self._blocks(action.stage)
        for index, unit in enumerate(reversed(blocks)):
            self._turn(position, unit, blocks)
            layer = Layer(stage, kinds[index], split)
            self._contribute(action, base, layer.moments, [] if split else matrices[index])
            self._vectors(position, unit)  # the first norm's are the last
            base -= sum(stage.block(kinds[index]).values())
            base += sum(stage.products().values()) // stage.layers if split else 0
            if index == 0 and not stage.last:
                base += stream  # what was received is held to the end
        if blocks:
            division.release(position, blocks[0])
        for unit in reversed(range(blocks[0] if blocks else 0)):
            self._vectors(position, unit, matrices=True)

    def _turn(self, stage: int, unit: int, blocks: Sequence[int]) -> None:
        """The weights of the layer after go, this one's and those of the one before come."""
        if unit + 1 in blocks:
            self._division.release(stage, unit + 1)
        self._division.fetch(stage, unit)
        if unit - 1 in blocks:
            self._division.fetch(stage, unit - 1)

    def _blocks(self, stage: int) -> list[list[Place]]:
        """The matrices of the stage's layers, in the order of backward."""
        position = self._positions[stage]
        return [
            [
                Place(position, number, i)
                for i in reversed(range(len(unit.parameters)))
                if unit.parameters[i].matrix
            ]
            for number, unit in reversed(list(enumerate(self._units[position])))
            if unit.block
        ]

    def _vectors(self, stage: int, unit: int, matrices: bool = False) -> None:
        """Gradients that are too small to matter, but have a place in the order of reductions."""
        parameters = self._units[stage][unit].parameters
        for index in reversed(range(len(parameters))):
            if matrices or not parameters[index].matrix:
                self._division.contribute(Place(stage, unit, index))

    def _contribute(
        self, action: Action, base: int, moments: Sequence[Moment], places: Sequence[Place]
    ) -> None:
        """Walk ``moments``, each but what follows the last place with a gradient at its end."""
        division = self._division
        for index, moment in enumerate(moments):
            self._level(action, base + moment.most, division.moving)
            if index < len(places):
                self._level(action, base + moment.then, division.contribute(places[index]))
