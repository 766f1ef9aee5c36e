"""The face of DeepSpeed: ``from hexad.compat import deepspeed``. ``docs/deepspeed.md`` is its page.

:func:`install` lets ``import deepspeed`` find it, in scripts that are not to be changed at all.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.19.8"
"""The release of DeepSpeed whose names, defaults and numbers these are."""

_PUBLIC = {
    "DeepSpeedConfig": "config",
    "DeepSpeedEngine": "engine",
    "LayerSpec": "pipe",
    "PipelineEngine": "pipe_engine",
    "PipelineModule": "pipe",
    "RepeatingLoader": "data",
    "TiedLayerSpec": "pipe",
    "add_config_arguments": "entry",
    "init_distributed": "entry",
    "initialize": "entry",
}
_MODULES = ("checkpointing", "comm", "lr_schedules", "ops", "pipe", "utils", "zero")

__all__ = [*_PUBLIC, *_MODULES, "install"]


def __getattr__(name: str) -> Any:
    """Resolved on first use: configurations are read without torch."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _PUBLIC:
        raise AttributeError(
            f"hexad.compat.deepspeed has no {name!r}; it has {', '.join(sorted([*_PUBLIC, *_MODULES]))}"
        )
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


_ELSEWHERE = {
    "deepspeed": "",
    "deepspeed.comm": "comm",
    "deepspeed.zero": "zero",
    "deepspeed.checkpointing": "checkpointing",
    "deepspeed.ops": "ops",
    "deepspeed.ops.adam": "ops",
    "deepspeed.pipe": "pipe",
    "deepspeed.runtime": "",
    "deepspeed.runtime.pipe": "pipe",
    "deepspeed.runtime.pipe.module": "pipe",
    "deepspeed.runtime.pipe.engine": "pipe_engine",
    "deepspeed.runtime.zero": "zero",
    "deepspeed.runtime.lr_schedules": "lr_schedules",
    "deepspeed.runtime.activation_checkpointing": "",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "checkpointing",
    "deepspeed.runtime.dataloader": "data",
    "deepspeed.runtime.engine": "engine",
    "deepspeed.utils": "utils",
}
"""Where DeepSpeed has the modules that scripts import from."""


def install() -> None:
    """Let ``import deepspeed`` find this, from here on in this process.

    Raises:
        HexadError: another one has been imported.
    """
    from hexad.config import HexadError

    here = sys.modules[__name__]
    if sys.modules.get("deepspeed", here) is not here:
        raise HexadError("install: the deepspeed package has been imported already; call install() before")
    for name, module in _ELSEWHERE.items():
        sys.modules[name] = import_module(f"{__name__}.{module}") if module else here
