"""NeMo 2's API over Hexad: its strategy, its recipes' objects, and modules with its hooks.

Import from ``hexad.compat.nemo`` in place of ``nemo.lightning`` and ``nemo.collections.llm``; or call
:func:`install`, and scripts import their own names. ``docs/nemo.md`` lists what there is.
"""

from __future__ import annotations

from . import llm, tokenizers
from . import optim as lr_scheduler
from .experiment import AutoResume, ModelCheckpoint, NeMoLogger, RestoreConfig, Trainer
from .optim import LRSchedulerModule, MegatronOptimizerModule, OptimizerModule
from .reductions import MaskedTokenLossReduction, MegatronLossReduction
from .sampler import DataSampler, MegatronDataSampler
from .strategy import MegatronMixedPrecision, MegatronStrategy

__all__ = [
    "AutoResume",
    "DataSampler",
    "LRSchedulerModule",
    "MaskedTokenLossReduction",
    "MegatronDataSampler",
    "MegatronLossReduction",
    "MegatronMixedPrecision",
    "MegatronOptimizerModule",
    "MegatronStrategy",
    "ModelCheckpoint",
    "NeMoLogger",
    "OptimizerModule",
    "RestoreConfig",
    "Trainer",
    "install",
    "llm",
    "lr_scheduler",
    "tokenizers",
]


def install() -> None:
    """Make ``import nemo`` and ``import megatron`` return Hexad's interfaces in this process.

    Raises:
        HexadError: one of these packages has been imported.
    """
    import sys

    from ..facade.installed import install as install_package
    from ..megatron import install as install_megatron
    from .installed import CONSTANTS, MODULES, NAMES, OF_LLM, UNSUPPORTED, has_nemo_run, where

    install_megatron()
    install_package(sys.modules[__name__], "nemo", where(), UNSUPPORTED, NAMES, MODULES, CONSTANTS)
    for name, module in OF_LLM.items():
        setattr(llm, name, sys.modules[f"nemo.{module}"])
    if has_nemo_run():
        from .model_recipes import add_modules

        add_modules()
