"""Megatron-LM's API over Hexad, for scripts that use its functions.

Import from ``hexad.compat.megatron`` in place of ``megatron``; ``docs/megatron.md`` lists what there is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "gpt": "GPTModel",
    "initialize": "destroy_megatron get_args get_config get_tokenizer initialize_megatron",
    "layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
    "mappings": "vocab_parallel_cross_entropy",
    "parallel_state": "get_mesh",
    "schedules": "get_forward_backward_func get_num_microbatches setup_model",
    "settings": "DistributedDataParallelConfig MegatronModule ModelParallelConfig OptimizerConfig",
    "tensor_parallel": "",
    "training": "get_timers pretrain print_rank_0",
    "transformer": "ModelType TransformerConfig core_transformer_config_from_args",
}
"""Module -> its names that this package has too."""
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["install", "mappings", "parallel_state", "tensor_parallel", *_WHERE]

if TYPE_CHECKING:
    from . import mappings, parallel_state, tensor_parallel
    from .gpt import GPTModel
    from .initialize import destroy_megatron, get_args, get_config, get_tokenizer, initialize_megatron
    from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from .mappings import vocab_parallel_cross_entropy
    from .parallel_state import get_mesh
    from .schedules import get_forward_backward_func, get_num_microbatches, setup_model
    from .settings import (
        DistributedDataParallelConfig,
        MegatronModule,
        ModelParallelConfig,
        OptimizerConfig,
    )
    from .training import get_timers, pretrain, print_rank_0
    from .transformer import ModelType, TransformerConfig, core_transformer_config_from_args


def __getattr__(name: str) -> Any:
    """Resolved on first use: the translation of launch lines needs no torch."""
    if name in _NAMES:
        return import_module(f"{__name__}.{name}")
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    from hexad.config import did_you_mean

    raise AttributeError(f"module '{__name__}' has no attribute '{name}'{did_you_mean(name, __all__)}")


_ignored: tuple[str, ...] = ()


def ignored_flags() -> tuple[str, ...]:
    """The flags that ``install`` was told to ignore."""
    return _ignored


def install(ignore: Iterable[str] = ()) -> None:
    """Make ``import megatron`` return this package in this process, with the modules of Megatron-Core and of
    older releases; ``docs/megatron.md`` lists them. Without a GPU, what the script does on one happens on the
    CPU.

    Args:
        ignore: flags of the launch line to ignore with their values, known or not; each is reported.

    Raises:
        HexadError: a megatron package has been imported.
    """
    from ..facade.installed import install as install_package
    from ..facade.without_gpu import use_cpu_for_cuda
    from .installed import CONSTANTS, MODULES, NAMES, UNSUPPORTED, WHERE

    global _ignored
    _ignored += tuple(ignore)
    package = sys.modules[__name__]
    install_package(package, "megatron", WHERE, UNSUPPORTED, NAMES, MODULES, CONSTANTS)
    use_cpu_for_cuda()


def __dir__() -> list[str]:
    return sorted(__all__)
