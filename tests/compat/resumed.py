"""Hexad's engine with an imported checkpoint."""

from hexad.checkpoint.checkpointer import Checkpointer
from hexad.config import Config
from hexad.engine.engine import Engine
from hexad.topology.mesh import Mesh


def resumed(config: Config, mesh: Mesh) -> Engine:
    """The engine of a configuration, as ``checkpoint.load`` left it."""
    engine, checkpointer = Engine(config, mesh), Checkpointer(config, mesh)
    path = checkpointer.find()
    assert path is not None
    engine.restored(checkpointer.load(path, engine.chunks()).progress)
    checkpointer.close()
    return engine
