"""Adapters as PEFT reads them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hexad.config import Config, HexadError
from hexad.config.model import ModelSettings
from hexad.model.families import Family
from hexad.model.hugging_face import architecture
from hexad.model.inventory import ModelInventory
from hexad.model.pretrained import HUGGING_FACE
from hexad.model.transformer import DTYPES

from ..base import Base
from ..reader import Checkpoint
from ..tensor_file import TensorFileWriter, dtype_name
from .exporting import Exported
from .files import appearing, write_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def export_adapters(checkpoint: Checkpoint, config: Config, to: Path, dtype: str) -> Exported:
    """Write the adapters of a checkpoint for ``peft.PeftModel.from_pretrained``.

    Where several of our matrices are one in published files (GPT-2's and Phi-3's query, key and value), their
    adapters become one, of the sum of their ranks: ``A`` one above the other, ``B`` block by block, ``alpha``
    in proportion.

    Args:
        checkpoint: opened.
        config: its own.
        to: the directory; it is renamed into place when all is on disk.
        dtype: a key of :data:`DTYPES`, or ``auto``: as they are stored.

    Raises:
        HexadError: the checkpoint has no adapters, or other trained weights besides; or ``to`` is not empty
            or cannot be written.
    """
    lora, inventory = config.model.lora, ModelInventory(config.model)
    if lora is None:
        raise HexadError(
            f"--adapter: checkpoint {checkpoint.path} has no adapters (model.lora); leave it out"
        )
    others = [name for name, weight in inventory.weights().items() if not weight.frozen]
    if others:
        raise HexadError(
            f"--adapter: checkpoint {checkpoint.path} has trained {others[0]} besides its adapters "
            "(model.train), which PEFT's format does not hold; export the merged model: leave --adapter out"
        )
    kind = architecture(config.model)
    modules = _modules(inventory, kind)
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    for module, parts in modules.items():
        first, second = _joined(checkpoint, parts)
        ranks[module] = first.shape[0]
        wanted = first.dtype if dtype == "auto" else DTYPES[dtype]
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = first.to(wanted).contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = second.to(wanted).contiguous()
    base = Base.of(checkpoint.manifest)
    with appearing(to, "--to") as partial:
        described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        with TensorFileWriter(partial / WEIGHTS_FILE, described, {"format": "pt"}) as writer:
            for tensor in tensors.values():
                writer.write(tensor)
            writer.close()
        write_json(partial / CONFIG_FILE, _config(config, kind, ranks, base))
    word = dtype_name(next(iter(tensors.values())).dtype)
    return Exported(kind.name, word, [WEIGHTS_FILE], sum(map(torch.numel, tensors.values())), [])


Parts = list[tuple[str, int, bool]]
"""Our matrices that are one in published files: module, outputs, whether it has an adapter."""


def _modules(inventory: ModelInventory, kind: Family) -> dict[str, Parts]:
    """Published module -> our matrices in it, of modules with an adapter."""
    adapters, found = inventory.adapters(), dict[str, Parts]()
    for name, weight in inventory.weights().items():
        module, _, what = name.rpartition(".")
        if what == "weight" and name.startswith("layers.") and len(weight.shape) == 2:
            parts = found.setdefault(kind.published(module), [])
            parts.append((module, weight.shape[0], f"{module}.lora_a" in adapters))
    return {module: parts for module, parts in found.items() if any(adapted for *_, adapted in parts)}


def _joined(checkpoint: Checkpoint, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """``A [rank, in]`` and ``B [out, rank]`` of one published module."""
    firsts, seconds, rows = [], [], []
    row = 0
    for module, outputs, adapted in parts:
        if adapted:
            firsts.append(checkpoint.read(f"model.{module}.lora_a"))
            seconds.append(checkpoint.read(f"model.{module}.lora_b"))
            rows.append(row)
        row += outputs
    first = torch.cat(firsts)
    second = first.new_zeros(row, first.shape[0])
    column = 0
    for row, block in zip(rows, seconds):
        second[row : row + block.shape[0], column : column + block.shape[1]] = block
        column += block.shape[1]
    return first, second


def _config(config: Config, kind: Family, ranks: dict[str, int], base: Base | None) -> dict[str, Any]:
    """``adapter_config.json``."""
    lora = config.model.lora
    assert lora is not None
    source = None if base is None or base.load is None else base.load.removeprefix(HUGGING_FACE)
    short = {module: _short(module, list(ranks), config.model, kind) for module in ranks}
    wider = {short[module]: rank for module, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(set(short.values())),
        "rank_pattern": wider,
        "alpha_pattern": {name: lora.alpha * rank / lora.rank for name, rank in wider.items()},
        "fan_in_fan_out": kind.transposed,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _short(module: str, adapted: Sequence[str], model: ModelSettings, kind: Family) -> str:
    """The shortest end of an adapted module's name that no other module has but adapted ones."""
    names = {kind.published(name.rpartition(".")[0]) for name in ModelInventory(model).weights()}
    parts = module.split(".")
    ends = (".".join(parts[begin:]) for begin in range(len(parts) - 1, -1, -1))
    return next(
        end for end in ends if all(name in adapted for name in names if f".{name}".endswith(f".{end}"))
    )
