"""Memory of a rank's model state, known before anything is started."""

from __future__ import annotations

import torch

from hexad.config import Config
from hexad.model.transformer import DTYPES, Transformer
from hexad.parallel.data.flat import aligned
from hexad.parallel.sharding import declared_parameters
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis

from .engine import placement, with_positions


def state_bytes(config: Config, layout: Layout) -> dict[str, int]:
    """Bytes per rank of parameters, gradients, master weights and optimizer state; activations come on top.

    The model is built without memory (meta device), so that the count is exact. ``model.vocab`` must be a
    number.
    """
    dtype = DTYPES[config.precision.dtype]
    axis = Axis("tensor", tuple(range(layout.tensor)))
    model = Transformer(with_positions(config), placement(config, axis, torch.device("meta")))
    count = sum(aligned(declared.parameter.numel()) for declared in declared_parameters(model))
    wide = 8 if dtype == torch.float64 else 4
    state = {
        "parameters": count * dtype.itemsize,
        "gradients": count * wide,
        "master": 0 if dtype.itemsize == wide else count * wide,
        "optimizer": 2 * count * wide,
    }
    return {**state, "total": sum(state.values())}
