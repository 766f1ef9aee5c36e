"""Megatron-LM's API over Hexad, for scripts that use its functions.

Import from ``hexad.compat.megatron`` in place of ``megatron``; ``docs/megatron.md`` lists what there is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Resolved on first use: the translation of launch lines needs no torch.
_PUBLIC = {
    "ColumnParallelLinear": "layers",
    "GPTModel": "gpt",
    "ModelParallelConfig": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelEmbedding": "layers",
    "destroy_megatron": "initialize",
    "get_args": "initialize",
    "get_config": "initialize",
    "get_forward_backward_func": "schedules",
    "get_mesh": "parallel_state",
    "get_num_microbatches": "schedules",
    "get_tokenizer": "initialize",
    "initialize_megatron": "initialize",
    "setup_model": "schedules",
    "vocab_parallel_cross_entropy": "mappings",
}
_MODULES = ("mappings", "parallel_state")

__all__ = [
    "ColumnParallelLinear",
    "GPTModel",
    "ModelParallelConfig",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "destroy_megatron",
    "get_args",
    "get_config",
    "get_forward_backward_func",
    "get_mesh",
    "get_num_microbatches",
    "get_tokenizer",
    "initialize_megatron",
    "mappings",
    "parallel_state",
    "setup_model",
    "vocab_parallel_cross_entropy",
]

if TYPE_CHECKING:
    from . import mappings, parallel_state
    from .gpt import GPTModel
    from .initialize import destroy_megatron, get_args, get_config, get_tokenizer, initialize_megatron
    from .layers import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, VocabParallelEmbedding
    from .mappings import vocab_parallel_cross_entropy
    from .parallel_state import get_mesh
    from .schedules import get_forward_backward_func, get_num_microbatches, setup_model


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _PUBLIC:
        from hexad.config import did_you_mean

        raise AttributeError(f"module '{__name__}' has no attribute '{name}'{did_you_mean(name, __all__)}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
