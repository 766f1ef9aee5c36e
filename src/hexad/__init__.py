"""Hexad: train and run transformers too large for one accelerator.

Functions::

    load_config(path, overrides)      settings from a file (docs/configuration.md), as a Config
    train(config, callbacks=...)      what ``hexad train`` does, in this process
    generate(source, prompts, ...)    continue prompts with a run, a checkpoint or ``hf:DIR``
    evaluate(source, data, ...)       loss, perplexity and bits per byte
    launch(config)                    join the world, for a loop of one's own around an Engine

Classes: ``Engine`` (one step: accumulate, reduce, update), ``Microbatch``, ``Callback``, ``Layout`` (rank
arithmetic), ``Mesh`` and ``Axis`` (process groups), ``Config`` (all settings), ``HexadError`` and
``ConfigError`` (what a user can fix). ``docs/python.md`` shows them at work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Resolved on first use, so that `import hexad` and the torch-free commands start in milliseconds.
_PUBLIC = {
    "Axis": "hexad.topology.mesh",
    "Callback": "hexad.train.callbacks",
    "Config": "hexad.config",
    "ConfigError": "hexad.config",
    "Engine": "hexad.train.engine",
    "HexadError": "hexad.config",
    "Layout": "hexad.topology.layout",
    "Mesh": "hexad.topology.mesh",
    "Microbatch": "hexad.dataset.microbatch",
    "evaluate": "hexad.api",
    "launch": "hexad.train.launch",
    "load_config": "hexad.model.configuration",
}
_CALLABLE = ("generate", "train")
"""Packages that can be called (:mod:`hexad.callable_package`)."""

# Not Config: help() would list what pydantic gives every class of settings.
__all__ = [
    "Axis",
    "Callback",
    "ConfigError",
    "Engine",
    "HexadError",
    "Layout",
    "Mesh",
    "Microbatch",
    "__version__",
    "evaluate",
    "generate",
    "launch",
    "load_config",
    "train",
]

if TYPE_CHECKING:
    from hexad.api import evaluate, generate, train
    from hexad.config import Config as Config
    from hexad.config import ConfigError, HexadError
    from hexad.dataset.microbatch import Microbatch
    from hexad.model.configuration import load_config
    from hexad.topology.layout import Layout
    from hexad.topology.mesh import Axis, Mesh
    from hexad.train.callbacks import Callback
    from hexad.train.engine import Engine
    from hexad.train.launch import launch


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return import_module(f"hexad.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hexad' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "Config"})
