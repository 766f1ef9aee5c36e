"""The engine of a rank whose peers do not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from hexad.config import HexadError
from hexad.parallel.pipeline.executor import Executor
from hexad.parallel.pipeline.schedule import Action
from hexad.planning import Resolved
from hexad.planning.memory import rank_stages
from hexad.topology.mesh import Mesh

from ..counting import Counting, Counts
from ..engine import Engine
from ..language import LanguageModel
from ..modules import Facts


class CountingOfOne(Counting):
    """Counts what all ranks have without asking them: every token of a global batch is a target."""

    def _result(self, counting: Future[Counts], equal: bool) -> Counts:
        counts = counting.result()
        if counts.problem is not None:
            raise HexadError(counts.problem)
        sequences, length = self.config.batch.global_, self.config.data.sequence
        return counts._replace(targets=sequences * length, pairs=sequences * length**2)


class DryEngine(Engine):
    """One rank of a configured run, on tensors without values: see :mod:`hexad.engine.dry.tensors`.

    Args:
        resolved: of the run.
        mesh: see :meth:`hexad.topology.mesh.Mesh.of_one`.
        began: called with each action of the pipeline as it begins, and with None after the last one.
    """

    def __init__(self, resolved: Resolved, mesh: Mesh, began: Callable[[Action | None], None]) -> None:
        self._resolved, self._began = resolved, began
        model = LanguageModel(resolved, mesh)
        model.counting = CountingOfOne(model.config, model.mesh)
        super().__init__(model, mesh, initialise=False)
        self.optimizer.reading = _assumed  # type: ignore[method-assign]

    def _known(self) -> Facts:
        facts = Facts()
        for pipeline in range(self.mesh.pipeline.size):
            for number, stage in rank_stages(self._resolved, pipeline).items():
                for parameter in stage.parameters:
                    tied = frozenset({(parameter.tied, number)} if parameter.tied else ())
                    grid = frozenset({parameter.weights[0].grid})
                    facts = facts.plus(Facts(grid, tied, not parameter.frozen))
        return facts

    def _executor(self, microbatches: int, training: bool) -> Executor[Any]:
        executor = super()._executor(microbatches, training)
        executor.began_action = self._began
        return executor


def _assumed(parts: Sequence[Tensor]) -> Callable[[], list[float]]:
    """The values that the host reads at the end of a step: a norm and a factor of 1, so that there is an
    update, and 0 of all that is only reported."""
    numbers = [number for part in parts for number in [0.0 if part.dim() else 1.0] * part.numel()]
    return lambda: numbers
