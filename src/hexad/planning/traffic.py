"""Bytes that a rank sends over each axis in a step, before anything is started."""

from collections.abc import Iterable, Mapping

from hexad.model.inventory import StageSpec
from hexad.model.recompute_inventory import Recompute
from hexad.parallel.inventory import Collective, Execution
from hexad.topology.sent import sent_bytes


def stage_collectives(
    stage: StageSpec, run: Execution, recompute: Recompute, split: bool
) -> list[Collective]:
    """What a stage's modules send for one microbatch; with ``split`` weight gradients are actions of their
    own."""
    parts = [
        stage.before_layers(run),
        *stage.layer_operations(run, recompute, split),
        stage.after_layers(run),
    ]
    return [collective for part in parts for collective in part.collectives]


def bytes_sent(collectives: Iterable[Collective], sizes: Mapping[str, int]) -> int:
    """Bytes that a rank sends over the axes of ``sizes``, which have so many ranks."""
    return sum(
        sent_bytes(collective.operation, sizes[collective.axis], collective.nbytes)
        for collective in collectives
        if collective.axis in sizes
    )
