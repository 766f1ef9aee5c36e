"""Reading ``torch_dist`` checkpoints, files of PyTorch's distributed checkpoint format, and conversion of
those of Megatron-Core's GPT model: weights, moments, progress."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexad.checkpoint.hugging_face.importing import check_target, with_precision
from hexad.config import Config, HexadError
from hexad.config.errors import shortened
from hexad.config.model import ModelSettings
from hexad.model.configuration import build_config, load_config
from hexad.model.inventory import ModelInventory
from hexad.optim.schedule import MOMENTS
from hexad.parallel.rectangle import Rectangle

from ..facade.imported import ForeignTensor, ImportResult, model_directory, published_config, write_import
from ..facade.inert import Inert, load_inert, unpickle_inert

METADATA, COMMON = ".metadata", "common.pt"
_METADATA_CLASSES = (
    *(
        f"torch.distributed.checkpoint.{name}"
        for name in """
        filesystem._StorageInfo metadata.BytesStorageMetadata metadata.ChunkStorageMetadata metadata.Metadata
        metadata.MetadataIndex metadata.StorageMeta metadata.TensorProperties metadata.TensorStorageMetadata
        metadata._MEM_FORMAT_ENCODING planner.SavePlan planner.TensorWriteData planner.WriteItem
        planner.WriteItemType
        """.split()
    ),
    "torch.serialization._get_layout",
)
_COMMON_CLASSES = tuple(
    """
    megatron.core.enums.ModelType megatron.core.optimizer.optimizer_config.OptimizerConfig
    megatron.core.rerun_state_machine.RerunDiagnostic megatron.core.rerun_state_machine.RerunMode
    megatron.core.rerun_state_machine.RerunState megatron.core.transformer.enums.AttnBackend
    megatron.core.transformer.enums.CudaGraphScope numpy.dtypes.UInt32DType pathlib.PosixPath
    pathlib._local.PosixPath signal.Signals types.SimpleNamespace
    """.split()
)


@dataclass(frozen=True)
class _Piece:
    """A rectangle of a tensor, and its bytes."""

    rectangle: Rectangle
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DistTensor:
    """A tensor of the checkpoint.

    Attributes:
        key: its name in Megatron.
        shape: global.
        dtype: it is stored in.
        pieces: the rectangles that cover it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[_Piece] = field(default_factory=list)


class TorchDistCheckpoint:
    """A checkpoint opened for reading; values are read when they are needed, nothing is executed.

    Args:
        directory: with ``.metadata`` and ``common.pt``, or ``latest_checkpointed_iteration.txt`` beside it.

    Attributes:
        directory: of the iteration.
        common: what is not sharded: ``iteration``, ``args``, optimizer settings.
        tensors: by Megatron's keys.

    Raises:
        HexadError: a file is missing, damaged or could run code, or a tensor is not covered.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = _iteration(directory)
        common = load_inert(self.directory / COMMON, _COMMON_CLASSES)
        self.common: Mapping[str, Any] = common if isinstance(common, Mapping) else {}
        path = self.directory / METADATA
        try:
            self.tensors = _described_tensors(unpickle_inert(path, _METADATA_CLASSES))
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            problem = shortened(repr(error))
            raise HexadError(f"{path}: not of a distributed checkpoint ({problem})") from None
        self._check()

    def read(self, tensor: DistTensor, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A rectangle of a tensor, from the pieces that have a part of it.

        Raises:
            HexadError: a piece is damaged, or is not what ``.metadata`` says.
        """
        rectangle = Rectangle(tensor.key, tensor.shape, offset, sizes)
        values_read = torch.empty(sizes, dtype=tensor.dtype)
        for piece in tensor.pieces:
            common = rectangle.intersection(piece.rectangle)
            if common is not None:
                values = self._values(tensor, piece)
                values_read[_within(common, rectangle)] = values[_within(common, piece.rectangle)]
        return values_read

    def _values(self, tensor: DistTensor, piece: _Piece) -> Tensor:
        path = self.directory / piece.file
        with open(path, "rb") as file:
            file.seek(piece.offset)
            values = load_inert(path, (), file.read(piece.length))
        if not isinstance(values, Tensor) or tuple(values.shape) != piece.rectangle.sizes:
            raise HexadError(f"{path}: does not hold {tensor.key} of {piece.rectangle.sizes}")
        return values

    def _check(self) -> None:
        """Check that every tensor is covered and no file is truncated."""
        ends: dict[str, int] = defaultdict(int)
        lengths: dict[str, int] = defaultdict(int)
        for tensor in self.tensors.values():
            count = sum(piece.rectangle.numel for piece in tensor.pieces)
            values = math.prod(tensor.shape)
            if count != values:
                path = self.directory / METADATA
                raise HexadError(f"{path}: {tensor.key} has {count} values, expected {values}")
            for piece in tensor.pieces:
                bytes_needed = piece.rectangle.numel * tensor.dtype.itemsize
                if min(piece.offset, piece.rectangle.numel) < 0 or bytes_needed > piece.length:
                    raise HexadError(
                        f"{self.directory / METADATA}: {tensor.key}: {piece.length} bytes hold a piece of "
                        f"{piece.rectangle.sizes}, which has {bytes_needed}"
                    )
                lengths[piece.file] += piece.length
                ends[piece.file] = max(ends[piece.file], piece.offset + piece.length)
        for name, end in ends.items():
            path = self.directory / name
            if Path(name).name != name or not path.is_file():
                raise HexadError(f"{path}: missing")
            if path.stat().st_size < max(end, lengths[name]):
                needed = max(end, lengths[name])
                raise HexadError(f"{path}: truncated: {path.stat().st_size} bytes of {needed}")


def _within(part: Rectangle, whole: Rectangle) -> tuple[slice, ...]:
    """The index of a rectangle in another one's values."""
    begins = (low - first for low, first in zip(part.offset, whole.offset))
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, part.sizes))


def _iteration(directory: Path) -> Path:
    """The directory of the newest iteration, or the one that was given."""
    latest = directory / "latest_checkpointed_iteration.txt"
    newest = directory
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace").strip()
        newest = directory / (f"iter_{int(text):07d}" if text.isdigit() else text)
    if not (newest / METADATA).is_file():
        raise HexadError(
            f"{newest}: holds no {METADATA}; expected a checkpoint of Megatron-Core in the torch_dist format"
        )
    return newest


def _described_tensors(metadata: Inert) -> dict[str, DistTensor]:
    """The tensors that the metadata describe."""
    tensors: dict[str, DistTensor] = {}
    sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for key, entry in metadata.attributes["state_dict_metadata"].items():
        if "chunks" not in entry.attributes:
            continue  # bytes: extra state, random numbers
        dtype = entry.attributes["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{key}: dtype {dtype}")
        tensors[key] = DistTensor(key, tuple(entry.attributes["size"]), dtype)
        sizes[key] = {
            tuple(chunk.attributes["offsets"]): tuple(chunk.attributes["sizes"])
            for chunk in entry.attributes["chunks"]
        }
    for index, info in metadata.attributes["storage_data"].items():
        key, place = index.attributes["fqn"], info.attributes
        if key not in tensors:
            continue
        if place.get("transform_descriptors"):
            raise ValueError(f"{place['relative_path']}: files of extensions, which are not read")
        offset = tuple(index.attributes["offset"])
        rectangle = Rectangle(key, tensors[key].shape, offset, sizes[key][offset])
        section = str(place["relative_path"]), int(place["offset"]), int(place["length"])
        tensors[key].pieces.append(_Piece(rectangle, *section))
    return tensors


_STATE = "optimizer.state"
_MASTERS = (f"{_STATE}.fp32_param.", f"{_STATE}.param.", "")
"""Prefixes of the keys of weights, the most precise first: masters of the mixed-precision optimizers, of
the distributed one, and the model's own."""

_OUTSIDE = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "norm": "decoder.final_layernorm",
    "head.weight": "output_layer.weight",
}
_IN_LAYERS = {
    # Layer norms are parts of the products that follow them, also where they are separate modules.
    "attention_norm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "attention_norm.bias": ("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias"),
    "ffn_norm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "ffn_norm.bias": ("mlp.linear_fc1.layer_norm_bias", "pre_mlp_layernorm.bias"),
    "attention.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "attention.k_norm.weight": ("self_attention.k_layernorm.weight",),
}
_PRODUCTS = {
    "attention.q": "self_attention.linear_qkv",
    "attention.k": "self_attention.linear_qkv",
    "attention.v": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "ffn.gate": "mlp.linear_fc1",
    "ffn.up": "mlp.linear_fc1",
    "ffn.down": "mlp.linear_fc2",
}
_UNLIKE = {"apply_layernorm_1p": False, "rotary_interleaved": False, "multi_latent_attention": False}
"""Megatron's options whose other values would change the numbers."""


def import_checkpoint(
    source: Path, to: Path, check: Callable[[Config], Config], model: Path | None, weights_only: bool = False
) -> ImportResult:
    """Write a checkpoint with the state of a GPT model that Megatron-Core saved, in any of its layouts, one
    tensor at a time.

    Args:
        source: the directory of an iteration, or the one with ``latest_checkpointed_iteration.txt``.
        to: the checkpoint's directory; it is renamed into place when all is on disk.
        check: resolves a configuration, or refuses it.
        model: what the model is: a ``run.yaml``, or a Hugging Face directory (or its ``config.json``).
        weights_only: leave out optimizer state and progress.

    Raises:
        HexadError: a file or ``model`` is missing; a file is damaged or could run code; the checkpoint is of
            another model, or has no Adam moments; or ``to`` is not empty or cannot be written.
    """
    check_target(to)
    if not source.is_dir():
        what = "is a file" if source.exists() else "no such directory"
        raise HexadError(f"{source}: {what}; expected the directory of a Megatron-Core checkpoint")
    if model is None:
        raise HexadError("--model: missing; name the run.yaml or Hugging Face directory of Megatron's model")
    folder = None if model.suffix in (".yaml", ".yml") else model_directory(model)
    saved = TorchDistCheckpoint(source)
    args = saved.common.get("args")
    options: Mapping[str, Any] = args.attributes if isinstance(args, Inert) else {}
    for name, value in _UNLIKE.items():
        if options.get(name, value) != value:
            raise HexadError(f"{saved.directory}: args.{name}: found {options[name]}; supported: {value}")
    if folder is None:
        config = check(load_config(model))
    else:
        config = check(build_config(published_config(folder)))
        embedding = saved.tensors.get(_OUTSIDE["embedding.weight"])
        config = config if embedding is None else with_precision(config, embedding.dtype)
    if not weights_only:
        _check_sharding(saved)
    kinds = ("",) if weights_only else ("", *MOMENTS)
    tensors = [tensor for kind in kinds for tensor in _tensors(saved, config.model, kind)]
    progress = {"step": 0, "updates": 0, "samples": 0} if weights_only else _progress(saved, options)
    return write_import(tensors, to, source, progress, config, folder)


def _check_sharding(saved: TorchDistCheckpoint) -> None:
    """Refuse states of the distributed optimizer that are not under the names of parameters."""
    optimizer = saved.common.get("optimizer")
    kind = optimizer.get("param_state_sharding_type") if isinstance(optimizer, Mapping) else None
    if kind not in (None, "fully_reshardable"):
        raise HexadError(
            f"{saved.directory}: found optimizer states as {kind}; save with "
            "--dist-ckpt-optim-fully-reshardable, or add --weights-only to import the weights"
        )


def _tensors(saved: TorchDistCheckpoint, model: ModelSettings, kind: str) -> Iterator[ForeignTensor]:
    """The model's weights (``kind`` empty), or a moment of them."""
    prefixes = (f"{_STATE}.{kind}.",) if kind else _MASTERS
    used = set()

    @lru_cache(maxsize=1)  # several of ours may be parts of it
    def whole(key: str, layer: int | None) -> Tensor:
        tensor = saved.tensors[key]
        if layer is None:
            return saved.read(tensor, (0,) * len(tensor.shape), tensor.shape)
        rest = tensor.shape[1:]
        return saved.read(tensor, (layer, *(0 for _ in rest)), (1, *rest))[0]

    for name, weight in ModelInventory(model).weights().items():
        tensor, layer = _found(saved, name, prefixes, kind)
        if layer is not None and tensor.shape[0] != model.layers:
            raise HexadError(
                f"{saved.directory}: {tensor.key} has {tensor.shape[0]} layers, the model has {model.layers}"
            )
        used.add(tensor.key.removeprefix(next(p for p in prefixes if tensor.key.startswith(p))))
        shape = tensor.shape if layer is None else tensor.shape[1:]
        rows, vocabulary = _rows(name, weight.shape[0], model), name in ("embedding.weight", "head.weight")
        if shape[1:] != weight.shape[1:] or (shape[0] < rows if vocabulary else shape[0] != rows):
            raise HexadError(
                f"{saved.directory}: {tensor.key} has shape {shape}, expected {(rows, *weight.shape[1:])}"
            )

        def read(name: str, key: str, layer: int | None, shape: tuple[int, ...]) -> Tensor:
            return _part(name, whole(key, layer), model).reshape(shape)

        ours = f"optimizer.{kind}.{name}" if kind else f"model.{name}"
        yield ForeignTensor(
            ours, weight.shape, tensor.dtype, partial(read, name, tensor.key, layer, weight.shape)
        )
    for key in saved.tensors:
        if not key.startswith("optimizer.") and key not in used and "rng_state" not in key and not kind:
            raise HexadError(
                f"{saved.directory}: found tensor {key}, which a {model.family} model with these settings "
                "does not have"
            )


def _found(
    saved: TorchDistCheckpoint, name: str, prefixes: tuple[str, ...], kind: str
) -> tuple[DistTensor, int | None]:
    """Megatron's tensor that has ours, and the layer where it has those of all."""
    if name.startswith("layers."):
        _, number, short = name.split(".", 2)
        module, _, last = short.rpartition(".")
        places = _IN_LAYERS.get(short) or (f"{_PRODUCTS.get(module, module)}.{last}",)
        keys: list[tuple[str, int | None]] = [(f"decoder.layers.{place}", int(number)) for place in places]
        keys += [(f"decoder.layers.{number}.{place}", None) for place in places]
    else:
        module, _, last = name.rpartition(".")
        keys = [(_OUTSIDE.get(name) or f"{_OUTSIDE.get(module, module)}.{last}", None)]
    for prefix in prefixes:
        for key, layer in keys:
            tensor = saved.tensors.get(prefix + key)
            if tensor is not None and (layer is None or layer < tensor.shape[0]):
                return tensor, layer
    fix = "; add --weights-only to import the weights" if kind else ""
    raise HexadError(f"{saved.directory}: tensor {prefixes[-1]}{keys[0][0]} ({name}) is missing{fix}")


def _rows(name: str, rows: int, model: ModelSettings) -> int:
    """Rows of Megatron's tensor, which holds our tensor of ``rows`` rows."""
    module = name.split(".", 2)[-1].rpartition(".")[0]
    if module in ("attention.q", "attention.k", "attention.v"):
        return (int(model.heads) + 2 * int(model.kv_heads)) * int(model.head_dim)
    if module in ("ffn.gate", "ffn.up"):
        return rows * (2 if _gated(model) else 1)
    return rows


def _part(name: str, theirs: Tensor, model: ModelSettings) -> Tensor:
    """Our rows of Megatron's tensor: queries, keys and values are together by group of heads; the vocabulary
    may be padded."""
    module = name.split(".", 2)[-1].rpartition(".")[0]
    if module in ("attention.q", "attention.k", "attention.v"):
        groups, queries = int(model.kv_heads), int(model.heads) // int(model.kv_heads)
        by_group = theirs.unflatten(0, (groups, queries + 2, int(model.head_dim)))
        place = {
            "q": slice(0, queries),
            "k": slice(queries, queries + 1),
            "v": slice(queries + 1, queries + 2),
        }
        return by_group[:, place[module[-1]]]
    if module in ("ffn.gate", "ffn.up") and _gated(model):
        return theirs.chunk(2)[module == "ffn.up"]
    return theirs[: int(model.vocab)] if name in ("embedding.weight", "head.weight") else theirs


def _gated(model: ModelSettings) -> bool:
    return any(".ffn.gate." in name for name in ModelInventory(model).weights())


def _progress(saved: TorchDistCheckpoint, options: Mapping[str, Any]) -> dict[str, Any]:
    """The progress that Hexad's engine resumes from."""
    step = saved.common.get("iteration")
    if not isinstance(step, int):
        raise HexadError(f"{saved.directory}: common.pt has no iteration; import it with --weights-only")
    optimizer = saved.common.get("optimizer", {})
    updates = set(_steps(optimizer))
    if len(updates) > 1:
        raise HexadError(
            f"{saved.directory}: common.pt: found different numbers of updates {sorted(updates)}"
        )
    progress: dict[str, Any] = {"step": step, "updates": updates.pop() if updates else step}
    progress["samples"] = int(options.get("consumed_train_samples") or 0)
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, Mapping) else None
    names = {"scale": "scale", "growth_tracker": "clean", "hysteresis_tracker": "patience"}
    if isinstance(scaler, Mapping) and scaler.keys() >= names.keys():
        progress["loss_scale"] = {ours: float(scaler[theirs]) for theirs, ours in names.items()}
    return progress


def _steps(state: Any) -> Iterator[int]:
    """The numbers of updates anywhere in an optimizer's settings."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key in ("step", "common_step") and isinstance(value, (int, float, Tensor)):
                yield int(value)
            else:
                yield from _steps(value)
    elif isinstance(state, (list, tuple)):
        for item in state:
            yield from _steps(item)
