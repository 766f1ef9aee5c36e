"""Hexad: train and run transformers too large for one accelerator."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Resolved on first use, so that `import hexad` and the torch-free commands start in milliseconds.
_PUBLIC = {
    "Axis": "hexad.topology.mesh",
    "Config": "hexad.config",
    "ConfigError": "hexad.config",
    "Engine": "hexad.train.engine",
    "HexadError": "hexad.config",
    "Layout": "hexad.topology.layout",
    "Mesh": "hexad.topology.mesh",
    "Microbatch": "hexad.dataset.microbatch",
    "launch": "hexad.train.launch",
    "load_config": "hexad.model.configuration",
}

__all__ = [
    "Axis",
    "Config",
    "ConfigError",
    "Engine",
    "HexadError",
    "Layout",
    "Mesh",
    "Microbatch",
    "__version__",
    "launch",
    "load_config",
]

if TYPE_CHECKING:
    from hexad.config import Config, ConfigError, HexadError
    from hexad.dataset.microbatch import Microbatch
    from hexad.model.configuration import load_config
    from hexad.topology.layout import Layout
    from hexad.topology.mesh import Axis, Mesh
    from hexad.train.engine import Engine
    from hexad.train.launch import launch


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hexad' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
