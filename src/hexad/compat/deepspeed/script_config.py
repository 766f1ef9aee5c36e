"""``DeepSpeedConfig`` as scripts construct it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import config as checked
from .keys import Keys


class DeepSpeedConfig(checked.DeepSpeedConfig):
    """A checked configuration. Its top-level keys are attributes, the batch sizes with inferred values.

    Args:
        config: a file, or its contents.
        mpu: model-parallel ranks; by default all ranks are data ranks.
        mesh_device: accepted without effect.

    Raises:
        ConfigError: an unknown, malformed or refused key, or batch sizes that do not fit each other.
        HexadError: a file that cannot be read.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        found = checked.read_config(config, _data_ranks(mpu))
        super().__init__(found.keys, found.batch, found.tree)

    def __getattr__(self, name: str) -> Any:
        sizes = {
            "train_batch_size": "total",
            "train_micro_batch_size_per_gpu": "micro",
            "gradient_accumulation_steps": "accumulation",
        }
        if name in sizes:
            return getattr(self.batch, sizes[name])
        if name in Keys.model_fields:
            return getattr(self.keys, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _data_ranks(mpu: Any) -> int:
    """Of the world that was joined; 1 before that."""
    from ..facade import world  # imports torch

    return int(mpu.get_data_parallel_world_size()) if mpu is not None else world.world_size()
