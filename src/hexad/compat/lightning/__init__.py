"""Lightning's trainer over Hexad: a strategy that shards state, for any LightningModule.

``Trainer(strategy=HexadStrategy(zero=3))``, or ``strategy="hexad"``, ``"hexad_zero1"`` to ``"hexad_zero3"``
once this package is imported. Only public classes and hooks of ``lightning.pytorch`` are used.
"""

try:
    import lightning.pytorch
except ImportError as error:
    from hexad.config import HexadError

    raise HexadError("lightning is not installed: pip install 'hexad[lightning]'") from error

from lightning.pytorch.strategies import StrategyRegistry

from .checkpoints import checkpoint_file, export_checkpoint, read_checkpoint
from .module import HexadModule
from .pipeline import PipelineModule
from .strategy import HexadStrategy

__all__ = [
    "HexadModule",
    "HexadStrategy",
    "PipelineModule",
    "checkpoint_file",
    "export_checkpoint",
    "read_checkpoint",
]

for _zero in range(4):
    StrategyRegistry.register(
        f"hexad_zero{_zero}" if _zero else "hexad",
        HexadStrategy,
        description=f"data parallel over Hexad, ZeRO {_zero}",
        override=True,
        zero=_zero,
    )
