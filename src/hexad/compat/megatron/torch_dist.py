"""Reading Megatron-Core's ``torch_dist`` checkpoints: files of PyTorch's distributed checkpoint format, whose
``.metadata`` says which rectangle of which tensor is where."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hexad.config import HexadError
from hexad.parallel.rectangle import Rectangle

from ..facade.inert import Inert, load_inert, unpickle_inert

METADATA, COMMON = ".metadata", "common.pt"
_DCP = "torch.distributed.checkpoint"
_METADATA_CLASSES = (
    f"{_DCP}.filesystem._StorageInfo",
    f"{_DCP}.metadata.BytesStorageMetadata",
    f"{_DCP}.metadata.ChunkStorageMetadata",
    f"{_DCP}.metadata.Metadata",
    f"{_DCP}.metadata.MetadataIndex",
    f"{_DCP}.metadata.StorageMeta",
    f"{_DCP}.metadata.TensorProperties",
    f"{_DCP}.metadata.TensorStorageMetadata",
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    f"{_DCP}.planner.SavePlan",
    f"{_DCP}.planner.TensorWriteData",
    f"{_DCP}.planner.WriteItem",
    f"{_DCP}.planner.WriteItemType",
    "torch.serialization._get_layout",
)
_COMMON_CLASSES = (
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "numpy.dtypes.UInt32DType",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "signal.Signals",
    "types.SimpleNamespace",
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
            self.tensors = _tensors(unpickle_inert(path, _METADATA_CLASSES))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise HexadError(f"{path}: not of a distributed checkpoint ({error!r})") from None
        self._check()

    def read(self, tensor: DistTensor, offset: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """A rectangle of a tensor, from the pieces that have a part of it.

        Raises:
            HexadError: a piece is damaged, or is not what ``.metadata`` says.
        """
        wanted = Rectangle(tensor.key, tensor.shape, offset, sizes)
        found = torch.empty(sizes, dtype=tensor.dtype)
        for piece in tensor.pieces:
            common = wanted.intersection(piece.rectangle)
            if common is not None:
                values = self._values(tensor, piece)
                found[_within(common, wanted)] = values[_within(common, piece.rectangle)]
        return found

    def _values(self, tensor: DistTensor, piece: _Piece) -> torch.Tensor:
        path = self.directory / piece.file
        with open(path, "rb") as file:
            file.seek(piece.offset)
            values = load_inert(path, (), file.read(piece.length))
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != piece.rectangle.sizes:
            raise HexadError(f"{path}: does not hold {tensor.key} of {piece.rectangle.sizes}")
        return values

    def _check(self) -> None:
        """Check that every tensor is covered and no file is truncated."""
        ends: dict[str, int] = defaultdict(int)
        for tensor in self.tensors.values():
            count = sum(piece.rectangle.numel for piece in tensor.pieces)
            wanted = math.prod(tensor.shape)
            if count != wanted:
                path = self.directory / METADATA
                raise HexadError(f"{path}: {tensor.key} has {count} values, expected {wanted}")
            for piece in tensor.pieces:
                ends[piece.file] = max(ends[piece.file], piece.offset + piece.length)
        for name, end in ends.items():
            path = self.directory / name
            if Path(name).name != name or not path.is_file():
                raise HexadError(f"{path}: missing")
            if path.stat().st_size < end:
                raise HexadError(f"{path}: truncated: {path.stat().st_size} bytes of {end}")


def _within(part: Rectangle, whole: Rectangle) -> tuple[slice, ...]:
    """The index of a rectangle in another one's values."""
    begins = (low - first for low, first in zip(part.offset, whole.offset))
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, part.sizes))


def _iteration(directory: Path) -> Path:
    """The directory of the newest iteration, or the given one."""
    latest = directory / "latest_checkpointed_iteration.txt"
    found = directory
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace").strip()
        found = directory / (f"iter_{int(text):07d}" if text.isdigit() else text)
    if not (found / METADATA).is_file():
        raise HexadError(
            f"{found}: holds no {METADATA}; expected a checkpoint of Megatron-Core in the torch_dist format"
        )
    return found


def _tensors(metadata: Inert) -> dict[str, DistTensor]:
    """The tensors that the metadata describe."""
    found: dict[str, DistTensor] = {}
    sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for key, entry in metadata.held["state_dict_metadata"].items():
        if "chunks" not in entry.held:
            continue  # bytes: extra state, random numbers
        dtype = entry.held["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{key}: dtype {dtype}")
        found[key] = DistTensor(key, tuple(entry.held["size"]), dtype)
        sizes[key] = {tuple(each.held["offsets"]): tuple(each.held["sizes"]) for each in entry.held["chunks"]}
    for index, info in metadata.held["storage_data"].items():
        key, held = index.held["fqn"], info.held
        if key not in found:
            continue
        if held.get("transform_descriptors"):
            raise ValueError(f"{held['relative_path']}: files of extensions, which are not read")
        offset = tuple(index.held["offset"])
        rectangle = Rectangle(key, found[key].shape, offset, sizes[key][offset])
        place = str(held["relative_path"]), int(held["offset"]), int(held["length"])
        found[key].pieces.append(_Piece(rectangle, *place))
    return found
