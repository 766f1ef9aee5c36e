"""DeepSpeed's API over Hexad: ``from hexad.compat import deepspeed``. See ``docs/deepspeed.md``.

:func:`install` makes ``import deepspeed`` return it, for scripts that cannot be changed.
"""

import sys
from importlib import import_module
from typing import Any

__version__ = version = "0.19.8"
"""The release of DeepSpeed whose names, defaults and numbers these are."""
__version_major__, __version_minor__, __version_patch__ = map(int, version.split("."))
__git_branch__ = __git_hash__ = None

_PUBLIC = {
    "DeepSpeedConfig": "entry",
    "DeepSpeedConfigError": "entry",
    "DeepSpeedDataLoader": "data",
    "DeepSpeedEngine": "engine",
    "DeepSpeedOptimizer": "optimizers",
    "LayerSpec": "pipe",
    "PipelineEngine": "pipe_engine",
    "PipelineModule": "pipe",
    "RepeatingLoader": "data",
    "TiedLayerSpec": "pipe",
    "add_config_arguments": "entry",
    "get_accelerator": "accelerator",
    "init_distributed": "entry",
    "initialize": "entry",
    "log_dist": "utils",
    "logger": "utils",
}
_MODULES = ("accelerator", "checkpointing", "comm", "lr_schedules", "ops", "pipe", "utils", "zero")

__all__ = [*_PUBLIC, *_MODULES, "install"]


def __getattr__(name: str) -> Any:
    """Resolved on first use: configurations are read without torch."""
    if name in _MODULES:  # imported on first use, since it imports torch
        return import_module(f"{__name__}.{name}")
    if name == "dist":
        return import_module(f"{__name__}.comm")
    if name not in _PUBLIC:
        from ..facade.installed import refused_name
        from .installed import UNSUPPORTED

        if name in UNSUPPORTED:
            return refused_name(f"deepspeed.{name}", UNSUPPORTED[name])
        raise AttributeError(
            f"hexad.compat.deepspeed has no {name!r}; it has {', '.join(sorted([*_PUBLIC, *_MODULES]))}"
        )
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def install() -> None:
    """Make ``import deepspeed`` return this package in this process. Call it before importing transformers or
    accelerate, which look for the package when they are imported.

    Raises:
        HexadError: the deepspeed package has been imported.
    """
    from ..facade.installed import announce
    from ..facade.installed import install as install_package
    from .installed import CONSTANTS, MODULES, UNSUPPORTED, WHERE

    package = sys.modules[__name__]
    install_package(package, "deepspeed", WHERE, UNSUPPORTED, modules=MODULES, constants=CONSTANTS)
    announce("deepspeed", __version__)
