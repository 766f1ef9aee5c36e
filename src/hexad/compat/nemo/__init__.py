"""NeMo 2's API over Hexad: its strategy, its recipes' objects, and modules with its hooks.

Import from ``hexad.compat.nemo`` in place of ``nemo.lightning`` and ``nemo.collections.llm``; or call
:func:`install`, and scripts import their own names. ``docs/nemo.md`` lists what there is.
"""

from __future__ import annotations

from . import optim as lr_scheduler
from .optim import LRSchedulerModule, MegatronOptimizerModule, OptimizerModule
from .reductions import MaskedTokenLossReduction, MegatronLossReduction
from .sampler import DataSampler, MegatronDataSampler
from .strategy import MegatronMixedPrecision, MegatronStrategy

__all__ = [
    "DataSampler",
    "LRSchedulerModule",
    "MaskedTokenLossReduction",
    "MegatronDataSampler",
    "MegatronLossReduction",
    "MegatronMixedPrecision",
    "MegatronOptimizerModule",
    "MegatronStrategy",
    "OptimizerModule",
    "lr_scheduler",
]
