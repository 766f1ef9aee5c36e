"""Steps whose ledger is held to what the planner predicts, to the byte."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.engine import Engine
from hexad.engine.faults import StepResult
from hexad.model.experts import Experts
from hexad.parallel.expert.dispatch import Dispatcher, Exchanged, Route
from hexad.planning import Resolved
from hexad.planning.traffic import StepValues, predicted_traffic

Rows = dict[int, list[tuple[int, int]]]


def step_as_planned(engine: Engine, batch: Sequence[Microbatch]) -> StepResult:
    """A training step of whole microbatches; what this rank sends in it is what the planner says."""
    mesh, before = engine.mesh, engine.mesh.sent_bytes()
    with routed_rows(engine) as rows:
        result = engine.train_step(batch)
    sent = {axis: size - before[axis] for axis, size in mesh.sent_bytes().items()}
    resolved = Resolved(engine.config, mesh.layout, engine.plan)
    documents = [microbatch.documents for microbatch in batch]
    imposed, judged = batch[0].experts is not None, result.limit is not None
    values = StepValues(documents, rows, imposed, not result.skipped, judged)
    predicted = predicted_traffic(resolved, mesh.rank, values)
    assert predicted == sent, f"rank {mesh.rank}: predicted {predicted}, sent {sent}"
    return result


@contextmanager
def routed_rows(engine: Engine) -> Iterator[Rows]:
    """By layer, of every microbatch: rows that this rank sends to experts of other ranks, and receives."""
    modules = (module for stage in engine.stages.values() for module in stage.modules())
    layers = {id(module.dispatcher): module.layer for module in modules if isinstance(module, Experts)}
    rows, original = Rows(), Dispatcher.route

    def route(self: Dispatcher, *arguments: object, **options: object) -> Route:
        made: Route = original(self, *arguments, **options)  # type: ignore[arg-type]
        repeated = torch._C._current_graph_task_id() >= 0  # in the backward pass
        if isinstance(made, Exchanged) and made.send is not None and not repeated:
            assert made.receive is not None
            place = self.ranks.axis.rank
            counts = [sum(part) - part[place] for part in (made.send, made.receive)]
            rows.setdefault(layers[id(self)], []).append((counts[0], counts[1]))
        return made

    with mock.patch.object(Dispatcher, "route", route):
        yield rows
