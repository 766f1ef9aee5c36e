"""Export of a checkpoint as a Hugging Face model (safetensors shards, configuration, tokenizer), and of
adapters as PEFT reads them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexad.config import Config, HexadError
from hexad.config.model import ModelSettings
from hexad.dataset.files import write_durably
from hexad.model.configuration import build_config
from hexad.model.experts_inventory import of_stack
from hexad.model.families import Family
from hexad.model.hugging_face import CONFIG_FILE, architecture, config_json
from hexad.model.inventory import ModelInventory
from hexad.model.pretrained import HUGGING_FACE
from hexad.model.transformer import DTYPES
from hexad.parallel.rectangle import Rectangle

from ..base import Base
from ..kept_tokenizer import (
    copied_files,
    ending_ids,
    generation_ends,
    model_files,
    tokenizer_of_checkpoint,
    write_files,
)
from ..merged import StoredWeights, opened_weights
from ..reader import Checkpoint
from ..tensor_file import TensorEntry, TensorFileWriter, dtype_name
from .files import GENERATION_FILE, appearing, has_tokenizer, other_settings, special_tokens, write_json
from .names import PublishedTensor, published_tensors
from .weights import INDEX_FILE, SINGLE_FILE, read_slices


@dataclass(frozen=True)
class _Target:
    """A published tensor: our parts of it in order, and the format it is written in."""

    name: str
    parts: tuple[tuple[str, PublishedTensor], ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0][1].stored_shape

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        family: as which ``transformers`` loads it.
        dtype: torch's name of the weights' format.
        files: names of the weights' files.
        parameters: in all.
        notes: for the user, in sentences.
    """

    family: str
    dtype: str
    files: list[str]
    parameters: int
    notes: list[str]


def saved_config(checkpoint: Checkpoint) -> Config:
    """The configuration a checkpoint was written with, without ``model.load`` and with its own tokenizer."""
    tree = dict(checkpoint.manifest.config)
    tree["data"] = {**tree.get("data", {}), "tokenizer": tokenizer_of_checkpoint(checkpoint.path, tree)}
    tree["model"] = {name: value for name, value in tree["model"].items() if name != "load"}
    return build_config(tree)


def export_checkpoint(
    path: Path, to: Path, dtype: str = "auto", shard_bytes: int = 5 * 10**9, base: str | None = None
) -> Exported:
    """Write a checkpoint as a Hugging Face model, its adapters merged, with its tokenizer; see
    :func:`export_model`.

    Args:
        path: of the checkpoint.
        to, dtype, shard_bytes: as there.
        base: of adapters: where the base model is, if it has been moved.

    Raises:
        HexadError: as there.
    """
    with Checkpoint(path) as opened:
        config = saved_config(opened)
        with opened_weights(opened, config, base) as weights:
            beside = model_files(str(path), config.data.tokenizer)
            return export_model(weights, config, to, dtype, shard_bytes, _ending_ids(path, config), beside)


def _ending_ids(path: Path, config: Config) -> list[int]:
    """The ids that end what the model writes, if its tokenizer still exists."""
    try:
        return ending_ids(str(path), config.data.tokenizer)
    except HexadError:
        return []  # the export reports that there is none


def export_model(
    weights: StoredWeights,
    config: Config,
    to: Path,
    dtype: str,
    shard_bytes: int,
    ends: Sequence[int],
    beside: Path | None = None,
) -> Exported:
    """Write a Hugging Face directory with the weights of a checkpoint, slice by slice.

    Args:
        weights: from :func:`~hexad.checkpoint.merged.opened_weights`.
        config: the checkpoint's own, from :func:`saved_config`.
        to: the directory; it is renamed into place when all is on disk.
        dtype: a key of :data:`DTYPES`, or ``auto``: as in training; of an imported model, unchanged.
        shard_bytes: largest size of a weights' file, unless a single tensor is larger.
        ends: the ids that end what the model writes, if they are known.
        beside: directory with what the model's ``config.json`` and ``generation_config.json`` have besides.

    Raises:
        HexadError: ``transformers`` has no such model; the checkpoint is damaged; a value is beyond the range
            of ``dtype``; or ``to`` is not empty or cannot be written.
    """
    kind = architecture(config.model)
    notes = []
    if kind.name != config.model.family:
        notes.append(
            f"written as {kind.name}: {config.model.family} has no such biases, norms, rotation or sizes"
        )
    if "dropout" not in kind.keys and config.model.dropout:
        notes.append(f"model.dropout {config.model.dropout} cannot be stored in its {CONFIG_FILE}")
    word = config.precision.dtype if dtype == "auto" else dtype
    export_dtype = None if dtype == "auto" and weights.weights_only else DTYPES[word]
    targets = _targets(weights, config, kind, export_dtype)
    stored = {weights.dtype(name) for target in targets for name, _ in target.parts}
    word = dtype_name(max(targets, key=lambda target: target.nbytes).dtype)
    narrowed = {
        kind for kind in stored if export_dtype and torch.promote_types(kind, export_dtype) != export_dtype
    }
    if narrowed:
        notes.append(f"weights are rounded from {', '.join(sorted(map(dtype_name, narrowed)))} to {word}")
    with appearing(to, "to") as partial:
        shards = _shards(targets, shard_bytes)
        for file, members in shards.items():
            described = [(target.name, target.dtype, target.shape) for target in members]
            slices = (part for target in members for part in _slices(weights, target))
            _write(partial / file, described, slices)
        if len(shards) > 1:
            places = {target.name: file for file, members in shards.items() for target in members}
            total = sum(target.nbytes for target in targets)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            write_json(partial / INDEX_FILE, index)
        notes += _write_beside(partial, config, word, ends, beside)
    parameters = sum(torch.Size(target.shape).numel() for target in targets)
    return Exported(kind.name, word, list(shards), parameters, notes)


def _targets(
    weights: StoredWeights, config: Config, kind: Family, dtype: torch.dtype | None
) -> list[_Target]:
    """The published tensors of family ``kind``; without ``dtype`` in the format in which they are stored.

    Raises:
        HexadError: a tensor is missing, has another shape, or belongs to no part of the model.
    """
    inventory = ModelInventory(config.model)
    ours = inventory.weights()
    for name in weights.tensors:
        if name not in ours and name not in inventory.adapters():
            raise HexadError(f"{weights.where}: found tensor model.{name}, which the model does not have")
    parts: dict[str, list[tuple[str, PublishedTensor]]] = {}
    for name, place in published_tensors(config.model, kind).items():
        weights.check(name, place.shape)
        for part in place.forms[0]:
            parts.setdefault(part.name, []).append((name, part))
    targets = []
    for published, members in parts.items():
        members.sort(key=lambda entry: entry[1].first)
        stored = reduce(torch.promote_types, (weights.dtype(name) for name, _ in members))
        written = dtype or stored
        if dtype is not None and ours[members[0][0]].wide:  # changed in steps that 16 bits would round off
            written = torch.promote_types(dtype, torch.float32)
        targets.append(_Target(published, tuple(members), written))
    return targets


def _shards(targets: Sequence[_Target], limit: int) -> dict[str, list[_Target]]:
    """The tensors of every file, by its name."""
    shards: list[list[_Target]] = [[]]
    for target in targets:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + target.nbytes > limit:
            shards.append([])
        shards[-1].append(target)
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    stem, count = SINGLE_FILE.removesuffix(".safetensors"), len(shards)
    return {f"{stem}-{n:05d}-of-{count:05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def _write(path: Path, described: Sequence[TensorEntry], values: Iterable[Tensor]) -> None:
    """Write a file of weights; ``values``: of the tensors, in their order and in any slices."""
    with TensorFileWriter(path, described, {"format": "pt"}) as writer:
        for part in values:
            writer.write(part)
        writer.close()


def _slices(weights: StoredWeights, target: _Target) -> Iterator[Tensor]:
    """Yield a published tensor slice by slice, in its format."""
    if target.parts[0][1].transposed:  # their rows extend over all parts, as our columns do
        for rows in read_slices(Rectangle.whole(target.name, target.shape), 8):
            begin, count = rows.offset[0], rows.sizes[0]
            columns = [
                weights.read(ours, (0, begin), (place.part.shape[0], count)).t()
                for ours, place in target.parts
            ]
            yield _converted(torch.cat(columns, dim=1), target)
        return
    for ours, place in target.parts:
        for part in read_slices(place.part, 8):
            yield _converted(weights.read(ours, part.offset, part.sizes), target)


def _converted(values: Tensor, target: _Target) -> Tensor:
    converted = values.to(target.dtype)
    if converted.dtype != values.dtype and not torch.equal(converted.isinf(), values.isinf()):
        raise HexadError(
            f"``dtype``: {target.name} has values up to {float(values[values.isfinite()].abs().max()):.3g}, "
            f"beyond the range of {dtype_name(target.dtype)}; use bf16 or fp32"
        )
    return converted


def _write_beside(
    directory: Path, config: Config, dtype: str, ends: Sequence[int], folder: Path | None
) -> list[str]:
    """Write tokenizer and configurations beside the weights; returns notes on what is missing."""
    tokenizer = Path(config.data.tokenizer)
    files = copied_files(config.data.tokenizer)
    files.pop(CONFIG_FILE, None)  # the model's own is written
    write_files(files, directory)
    special = special_tokens(folder, _one_or_all(ends))
    ours = config_json(config.model, dtype, special)
    write_json(directory / CONFIG_FILE, {**other_settings(folder, str(ours["model_type"])), **ours})
    written = directory / GENERATION_FILE
    if folder is not None and (folder / GENERATION_FILE).is_file():
        write_durably(written, (folder / GENERATION_FILE).read_bytes())
    if not written.exists() and special["eos_token_id"] is not None:
        known = {key: value for key, value in special.items() if value is not None}
        write_json(written, {"_from_model_config": True, **known})
    if written.exists() and not set(ends) <= set(generation_ends(directory)):
        settings = json.loads(written.read_text(encoding="utf-8"))
        write_json(written, {**settings, "eos_token_id": _one_or_all(ends)})
    return [] if has_tokenizer(directory) else [f"no tokenizer found in data.tokenizer {tokenizer}"]


def _one_or_all(ends: Sequence[int]) -> int | list[int] | None:
    """Ids as ``eos_token_id`` has them."""
    return list(ends) if len(ends) > 1 else next(iter(ends), None)


ADAPTER_CONFIG_FILE = "adapter_config.json"

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LIKE_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def export_adapters(path: Path, to: Path, dtype: str) -> Exported:
    """Write the adapters of the checkpoint at ``path`` for ``peft.PeftModel.from_pretrained``.

    Where several of our matrices are one in published files (GPT-2's and Phi-3's query, key and value), their
    adapters become one, of the sum of their ranks: ``A`` one above the other, ``B`` block by block, ``alpha``
    in proportion. Those of experts are ``target_parameters``.

    The directory is renamed into place when all is on disk. ``dtype`` is a key of :data:`DTYPES`, or
    ``auto``: as they are stored.

    Raises:
        HexadError: the checkpoint has no adapters, or other trained weights besides; or ``to`` is not empty
            or cannot be written.
    """
    with Checkpoint(path) as opened:
        return _export_adapters(opened, saved_config(opened), to, dtype)


def _export_adapters(checkpoint: Checkpoint, config: Config, to: Path, dtype: str) -> Exported:
    lora, inventory = config.model.lora, ModelInventory(config.model)
    if lora is None:
        raise HexadError(
            f"``adapter``: checkpoint {checkpoint.path} has no adapters (model.lora); leave it out"
        )
    others = [name for name, weight in inventory.weights().items() if not weight.frozen]
    if others:
        raise HexadError(
            f"``adapter``: checkpoint {checkpoint.path} has trained {others[0]} besides its adapters "
            "(model.train), which PEFT's format does not hold; export the merged model: leave ``adapter`` out"
        )
    kind = architecture(config.model)
    modules = _modules(inventory, kind)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module, parts in modules.items():
        first, second = _joined(checkpoint, parts)
        ranks[module] = first.shape[0]
        tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"] = first, second
    stacks = [name.removesuffix(".lora_a") for name in inventory.adapters() if _is_first_of_stack(name)]
    for name in stacks:
        module, (first, second) = _wrapper(name, stacks, kind), _of_experts(checkpoint, name)
        tensors[f"{module}.lora_A"], tensors[f"{module}.lora_B"] = first, second
    tensors = {
        f"{_PREFIX}{name}.weight": (values if dtype == "auto" else values.to(DTYPES[dtype])).contiguous()
        for name, values in tensors.items()
    }
    base, parameters = Base.of(checkpoint.manifest), [kind.spellings(name)[-1] for name in stacks]
    document = _config(config, kind, ranks, parameters, base)
    with appearing(to, "to") as partial:
        described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        _write(partial / WEIGHTS_FILE, described, tensors.values())
        write_json(partial / ADAPTER_CONFIG_FILE, document)
    notes = []
    if lora.dropout != document["lora_dropout"]:
        problem = f"cannot be stored in its {ADAPTER_CONFIG_FILE}: PEFT has none with target_parameters"
        notes.append(f"model.lora.dropout {lora.dropout} {problem}")
    word = dtype_name(next(iter(tensors.values())).dtype)
    return Exported(kind.name, word, [WEIGHTS_FILE], sum(map(torch.numel, tensors.values())), notes)


TensorParts = list[tuple[str, int, bool]]
"""Our matrices that are one in published files: module, outputs, whether it has an adapter."""


def _modules(inventory: ModelInventory, kind: Family) -> dict[str, TensorParts]:
    """Published module -> our matrices in it, of modules with an adapter."""
    adapters, modules = inventory.adapters(), dict[str, TensorParts]()
    for name, weight in inventory.weights().items():
        module, _, what = name.rpartition(".")
        if what == "weight" and name.startswith("layers.") and len(weight.shape) == 2:
            parts = modules.setdefault(kind.published(module), [])
            parts.append((module, weight.shape[0], f"{module}.lora_a" in adapters))
    return {module: parts for module, parts in modules.items() if any(adapted for *_, adapted in parts)}


def _joined(checkpoint: Checkpoint, parts: TensorParts) -> tuple[Tensor, Tensor]:
    """``A [rank, in]`` and ``B [out, rank]`` of one published module."""
    names = [(f"model.{module}.lora_", outputs, adapted) for module, outputs, adapted in parts]
    first = torch.cat([checkpoint.read(f"{name}a") for name, _, adapted in names if adapted])
    blocks = [
        checkpoint.read(f"{name}b") if adapted else first.new_empty(outputs, 0)
        for name, outputs, adapted in names
    ]
    return first, torch.block_diag(*blocks)


def _is_first_of_stack(name: str) -> bool:
    """Whether a tensor is ``A`` of the adapters of a stack of experts' matrices."""
    return of_stack(name) and name.endswith(".lora_a")


def _wrapper(stack: str, adapted: Sequence[str], kind: Family) -> str:
    """The module of PEFT that has a stack's adapters. It wraps each parameter of the module of experts in
    another one, the first innermost."""
    module = kind.spellings(stack)[-1].rpartition(".")[0]
    inner = stack.endswith(".gate_up") and stack.replace(".gate_up", ".down") in adapted
    return f"{module}.base_layer" if inner else module


def _of_experts(checkpoint: Checkpoint, stack: str) -> tuple[Tensor, Tensor]:
    """``A [experts * rank, in]``, expert by expert, and ``B [out, rank * experts]``, of each rank all
    experts."""
    first, second = (checkpoint.read(f"model.{stack}.lora_{half}") for half in "ab")
    return first.flatten(0, 1), second.flatten(1, -2).permute(1, 2, 0).flatten(1)


def _config(
    config: Config, kind: Family, ranks: dict[str, int], parameters: list[str], base: Base | None
) -> dict[str, Any]:
    """The content of ``adapter_config.json``; ``parameters``: names of adapted stacks of experts."""
    lora = config.model.lora
    assert lora is not None
    source = None if base is None or base.load is None else base.load.removeprefix(HUGGING_FACE)
    short = {module: _short(module, list(ranks), config.model, kind) for module in ranks}
    # In models with experts PEFT takes these names for those of experts, wherever they are.
    alike = [module for module in ranks if kind.experts and module.rpartition(".")[2] in _LIKE_EXPERTS]
    parameters = [*parameters, *(f"{module}.weight" for module in alike)]
    wider = {short[module]: rank for module, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0 if parameters else lora.dropout,  # PEFT has none for parameters
        "target_modules": sorted({name for module, name in short.items() if module not in alike}),
        "target_parameters": parameters or None,
        "rank_pattern": wider,
        "alpha_pattern": {name: lora.alpha * rank / lora.rank for name, rank in wider.items()},
        "fan_in_fan_out": kind.transposed,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _short(module: str, adapted: Sequence[str], model: ModelSettings, kind: Family) -> str:
    """The shortest end of an adapted module's name that no other module has but adapted ones."""
    names = {
        kind.published(re.sub(r"\.(weight|bias)$", "", name)) for name in ModelInventory(model).weights()
    }
    parts = module.split(".")
    ends = (".".join(parts[begin:]) for begin in range(len(parts) - 1, -1, -1))
    return next(
        end for end in ends if all(name in adapted for name in names if f".{name}".endswith(f".{end}"))
    )
