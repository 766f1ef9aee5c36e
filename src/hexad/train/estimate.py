"""Memory of a rank's model state, known before anything is started."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hexad.config import Config
from hexad.model.transformer import Transformer, build_stages
from hexad.parallel.data.buckets import aligned
from hexad.parallel.sharding import declared_parameters
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis

from .engine import placement, with_positions
from .pipeline import PipelinePlan


def state_bytes(config: Config, layout: Layout, plan: PipelinePlan) -> list[dict[str, int]]:
    """For each pipeline rank, bytes of parameters, gradients, master weights and optimizer state.

    Activations come on top. The model is built without memory (meta device), so that the count is exact.
    ``model.vocab`` must be a number.

    Args:
        config: resolved.
        layout: of the run.
        plan: its stages.
    """
    place = placement(config, Axis("tensor", tuple(range(layout.tensor))), torch.device("meta"))
    model, owners = with_positions(config), plan.schedule.placement
    return [
        _bytes_of(build_stages(model, place, plan.layers, owners, rank).values(), place.dtype)
        for rank in range(layout.pipeline)
    ]


def _bytes_of(stages: Iterable[Transformer], dtype: torch.dtype) -> dict[str, int]:
    count = sum(aligned(declared.parameter.numel()) for declared in declared_parameters(*stages))
    wide = 8 if dtype == torch.float64 else 4
    state = {
        "parameters": count * dtype.itemsize,
        "gradients": count * wide,
        "master": 0 if dtype.itemsize == wide else count * wide,
        "optimizer": 2 * count * wide,
    }
    return {**state, "total": sum(state.values())}
