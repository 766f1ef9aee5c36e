"""A rank's share of a checkpoint as rectangles of global tensors, moved by torch.distributed.checkpoint.

A checkpoint knows nothing of the layout that wrote it: it holds global tensors by name. What any layout
saved, any other loads; each rank reads only the rectangles it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hexad.comm import CommError
from hexad.config import AgreedError, HexadError


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a global tensor.

    Attributes:
        name: of the global tensor.
        shape: global shape.
        offset: where the rectangle begins.
        tensor: its values; saving reads them, loading overwrites them.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor

    def place(self) -> ChunkStorageMetadata:
        """Offset and size in torch's words."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.tensor.shape)

    def index(self) -> MetadataIndex:
        """The key under which torch asks for this chunk."""
        return MetadataIndex(self.name, torch.Size(self.offset))


class _SavePlanner(DefaultSavePlanner):
    """Plans the writing of chunks; the base class drops the copies that several ranks hold and, where
    several ranks write, verifies that the rest covers every tensor exactly once."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self.chunks = {chunk.index(): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk.place(),
                    properties=TensorProperties.create_from_tensor(chunk.tensor),
                    size=torch.Size(chunk.shape),
                ),
            )
            for index, chunk in self.chunks.items()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.chunks[write_item.index].tensor.detach()


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of exactly the rectangles this rank holds."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self.chunks = {chunk.index(): chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for chunk in self.chunks.values():
            found = saved.get(chunk.name)
            if not isinstance(found, TensorStorageMetadata):
                raise HexadError(f"checkpoint: tensor {chunk.name} is missing")
            if tuple(found.size) != chunk.shape:
                raise HexadError(
                    f"checkpoint: tensor {chunk.name} has shape {tuple(found.size)}, "
                    f"the model wants {chunk.shape}"
                )
            if found.properties.dtype != chunk.tensor.dtype:
                raise HexadError(
                    f"precision.dtype: the checkpoint keeps {chunk.name} in {found.properties.dtype}, "
                    f"this run in {chunk.tensor.dtype}; set the dtype it was trained with"
                )
            items += create_read_items_for_chunk_list(chunk.name, found, [chunk.place()])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        chunk = self.chunks[read_item.dest_index]
        tensor = chunk.tensor.detach()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the values were read in place."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a world of one saves and loads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def save_chunks(directory: Path, chunks: Sequence[Chunk], group: dist.ProcessGroup | None) -> None:
    """Write every rank's chunks to ``directory``; collective over ``group`` (None: a world of one)."""
    with _quiet():
        dcp.save(
            {},
            storage_writer=dcp.FileSystemWriter(directory, sync_files=True),
            planner=_SavePlanner(chunks),
            process_group=group,
            no_dist=group is None,
        )


def load_chunks(directory: Path, chunks: Sequence[Chunk], group: dist.ProcessGroup | None) -> None:
    """Fill every rank's chunks from ``directory``; collective over ``group`` (None: a world of one).

    Raises:
        HexadError: a tensor is missing or has another shape or dtype, or the files are damaged.
    """
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(directory)
    try:
        reader.read_metadata()  # by all ranks; a damaged index would be logged with its traceback below
    except Exception as error:
        raise AgreedError(_damaged(directory, error)) from error
    try:
        with _quiet():
            dcp.load(
                state,
                storage_reader=reader,
                planner=_LoadPlanner(chunks),
                process_group=group,
                no_dist=group is None,
            )
    except dcp.CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        ours = next((cause for cause in causes if isinstance(cause, HexadError)), None)
        raise AgreedError(str(ours) if ours else _damaged(directory, causes[0])) from error
    except RuntimeError as error:  # a collective's: what fails on one rank comes as the exception above
        raise CommError(f"loading checkpoint {directory}: {error}") from error


def _damaged(directory: Path, error: BaseException) -> str:
    # torch's messages explain themselves at length; the first sentence names the problem.
    reason = f"{type(error).__name__}: {error}".split(". ")[0].split("; rank local")[0]
    return f"checkpoint {directory}: damaged: {reason}; move it away to go on from the one before"


def stored_tensors(directory: Path) -> dict[str, dict[str, Any]]:
    """Global name -> ``{"shape": [...], "dtype": "float32"}`` of every tensor in a checkpoint.

    Raises:
        HexadError: the checkpoint's metadata cannot be read.
    """
    try:
        metadata = dcp.FileSystemReader(directory).read_metadata()
    except Exception as error:
        raise HexadError(_damaged(directory, error)) from error
    return {
        name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
