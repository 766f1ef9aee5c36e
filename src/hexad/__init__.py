"""Hexad: train and run transformers too large for one accelerator.

Functions::

    load_config(path, overrides)      settings from a file (docs/configuration.md), as a Config
    train(config, callbacks=...)      what ``hexad train`` does, in this process
    generate(source, prompts, ...)    continue prompts with a run, a checkpoint or ``hf:DIR``
    evaluate(source, data, ...)       loss, perplexity and bits per byte
    score(source, sequences)          log-probabilities of given tokens
    plan(model, cluster, ...)         the fastest layouts of a model on a cluster, without it
    launch(config)                    join the world, for a custom loop around an Engine
    parallelize(module, mesh, plan)   divide a user's or a transformers model over tensor ranks
    pipeline(module, mesh, ...)       divide it into pipeline stages
    clip_grad_norm_(module, limit)    clip a divided model's gradients in a plain loop

Classes: ``Engine`` (one step: accumulate, reduce, update), ``Generator`` (a saved model that generates),
``Microbatch``, ``Callback``, ``Layout`` (rank arithmetic), ``Mesh`` and ``Axis`` (process groups),
``Config`` (all settings), ``HexadError`` and ``ConfigError`` (what a user can fix). ``docs/python.md``
shows them at work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hexad.version import __version__

# Resolved on first use, so that `import hexad` and the torch-free commands start in milliseconds.
_PUBLIC = {
    "Axis": "hexad.topology.mesh",
    "Callback": "hexad.training.callbacks",
    "Config": "hexad.config",
    "ConfigError": "hexad.config",
    "Engine": "hexad.engine.engine",
    "Generator": "hexad.generation.generator",
    "HexadError": "hexad.config",
    "Layout": "hexad.topology.layout",
    "Mesh": "hexad.topology.mesh",
    "Microbatch": "hexad.dataset.load.microbatch",
    "clip_grad_norm_": "hexad.conversion.parallelize",
    "evaluate": "hexad.api",
    "generate": "hexad.api",
    "launch": "hexad.launching.launch",
    "load_config": "hexad.model.configuration",
    "parallelize": "hexad.conversion.parallelize",
    "pipeline": "hexad.conversion.pipeline",
    "plan": "hexad.planning.plan",
    "score": "hexad.api",
    "train": "hexad.api",
}

# Not Config: help() would list what pydantic gives every class of settings.
__all__ = [
    "Axis",
    "Callback",
    "ConfigError",
    "Engine",
    "Generator",
    "HexadError",
    "Layout",
    "Mesh",
    "Microbatch",
    "__version__",
    "clip_grad_norm_",
    "evaluate",
    "generate",
    "launch",
    "load_config",
    "parallelize",
    "pipeline",
    "plan",
    "score",
    "train",
]

if TYPE_CHECKING:
    from hexad.api import evaluate, generate, score, train
    from hexad.config import Config as Config
    from hexad.config import ConfigError, HexadError
    from hexad.conversion.parallelize import clip_grad_norm_, parallelize
    from hexad.conversion.pipeline import pipeline
    from hexad.dataset.load.microbatch import Microbatch
    from hexad.engine.engine import Engine
    from hexad.generation.generator import Generator
    from hexad.launching.launch import launch
    from hexad.model.configuration import load_config
    from hexad.planning.plan import plan
    from hexad.topology.layout import Layout
    from hexad.topology.mesh import Axis, Mesh
    from hexad.training.callbacks import Callback


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hexad' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "Config"})
