"""Megatron-Core's ``dist_checkpointing`` over Hexad's checkpoints: any layout loads what another saved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hexad.checkpoint.manifest import MANIFEST_FILE, read_manifest
from hexad.checkpoint.reader import load as load_chunks
from hexad.checkpoint.tensor_file import Chunk
from hexad.comm import agreed, from_first, merged
from hexad.config import Config, HexadError, one_line
from hexad.model.configuration import load_config
from hexad.parallel.data.buckets import StateSharding
from hexad.parallel.rectangle import Rectangle
from hexad.parallel.sharding import Declared, declared_parameters
from hexad.topology.mesh import Axis, Mesh

from ..facade import tags
from ..facade.foreign_names import check_arguments
from . import parallel_state
from .tables import ARGUMENTS

_FOREIGN = "metadata.json"
"""A file of Megatron-Core's checkpoints."""
_STATE = "optimizer."
"""Begins names of the optimizer's state in checkpoints."""
Piece = tuple[int, Rectangle]
"""The first row in a rank's tensor, and the part of a global tensor that is there."""


@dataclass
class ShardedTensor:
    """A tensor of this rank, and where it is in global ones.

    Attributes:
        key: its name.
        data: its values.
        pieces: see :data:`Piece`.
        holder: see :class:`~hexad.checkpoint.tensor_file.Chunk`.
        config: of the model that it belongs to; None without one.
    """

    key: str
    data: Tensor
    pieces: tuple[Piece, ...]
    holder: tuple[int, int] | None = (0, 1)
    config: Config | None = None

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: int | tuple[int, ...] = 0,
        prepend_axis_num: int = 0,
        **others: Any,
    ) -> ShardedTensor:
        """A part of a global tensor that is divided evenly.

        Args:
            key: name of the global tensor.
            data: this rank's values.
            rank_offsets: (dim, number of this part along it, how many parts), each dim once.
            replica_id: all 0 on the ranks that write it.
            prepend_axis_num: leading dims of the global tensor, one element each here.
            others: Megatron-Core's, with their defaults.

        Raises:
            HexadError: a dim that the tensor does not have, or a number that is not one of the parts.
        """
        check_arguments("ShardedTensor", others, ARGUMENTS["ShardedTensor"])
        sizes = [1] * prepend_axis_num + (list(data.shape) or [1])
        shape, offset = list(sizes), [0] * len(sizes)
        for dim, number, parts in rank_offsets:
            if not (0 <= dim < len(sizes) and 0 <= number < parts):
                raise HexadError(
                    f"ShardedTensor {key}: found part {number} of {parts} along dim {dim}, expected one of "
                    f"0 to {parts - 1} along a dim below {len(sizes)}"
                )
            shape[dim], offset[dim] = sizes[dim] * parts, sizes[dim] * number
        rectangle = Rectangle(key, tuple(shape), tuple(offset), tuple(sizes))
        writes = not any(replica_id if isinstance(replica_id, tuple) else (replica_id,))
        return cls(key, data, ((0, rectangle),), (0, 1) if writes else None)

    def chunks(self, values: Tensor) -> Iterator[Chunk]:
        """``values``, of the shape of :attr:`data`, as chunks of global tensors."""
        rows = values if values.dim() else values.view(1)
        for first, rectangle in self.pieces:
            whole = len(self.pieces) == 1
            part = rows.reshape(rectangle.sizes) if whole else rows.narrow(0, first, rectangle.sizes[0])
            name = rectangle.name if rectangle.name.startswith(_STATE) else f"model.{rectangle.name}"
            yield Chunk(rectangle.named(name), part, self.holder)


@dataclass
class ShardedObject:
    """An object of this rank, such as a state of random numbers.

    Attributes:
        key: its name.
        data: numbers, texts, tensors, containers of these.
        global_shape, global_offset: of the grid of such objects, and this one's place in it.
        replica_id: all 0 on the ranks that write it.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0

    @property
    def unique_key(self) -> str:
        """Its name with its place."""
        return f"{self.key}/shard_{'.'.join(map(str, self.global_offset))}"


@dataclass
class LocalNonpersistentObject:
    """What a state has without being saved."""

    obj: Any


LocalNonpersitentObject = LocalNonpersistentObject
"""Earlier releases' spelling."""


def sharded_state_dict(module: nn.Module, prefix: str, config: Config | None) -> dict[str, ShardedTensor]:
    """The parameters of a module as sharded tensors, by their names in its ``state_dict``, after a prefix."""
    mesh = parallel_state.get_mesh()
    by_parameter = {declared.parameter: declared for declared in declared_parameters(module)}
    state: dict[str, ShardedTensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        declared = by_parameter[parameter]
        pieces = tuple(_pieces(declared, prefix))
        holder = _holder(declared, mesh)
        state[f"{prefix}{name}"] = ShardedTensor(f"{prefix}{name}", parameter.data, pieces, holder, config)
    return state


def _pieces(declared: Declared, prefix: str) -> Iterator[Piece]:
    for first, rectangle, _ in declared.pieces:
        yield first, rectangle.named(f"{prefix}{rectangle.name}")


def _holder(declared: Declared, mesh: Mesh) -> tuple[int, int] | None:
    """Which of the ranks with the same values this is; None for a copy of another stage's."""
    weight = declared.declaration.weights[0]
    if declared.declaration.copy:
        return None
    sharding = StateSharding(Axis("alone"), mesh.gradient_axis(weight.grid), mesh.model_axes(weight.grid))
    return sharding.holder(declared.declaration.traits(declared.positions))


def _mapped(state: Any, change: Callable[[Any], Any]) -> Any:
    """A nested state with every leaf changed; dictionaries leave out what becomes :data:`_ABSENT`."""
    if isinstance(state, Mapping):
        changed = {name: _mapped(value, change) for name, value in state.items()}
        return {name: value for name, value in changed.items() if value is not _ABSENT}
    if isinstance(state, list | tuple):
        items = [_mapped(item, change) for item in state]
        return items if isinstance(state, list) else tuple(items)
    return change(state)


def _without_gaps(state: Any) -> Any:
    """A nested state with None in place of what lists lack."""
    return _mapped(state, lambda leaf: None if leaf is _ABSENT else leaf)


_ABSENT = object()
_LOCAL = (ShardedTensor, ShardedObject, LocalNonpersistentObject)


def _leaves(state: Any) -> list[Any]:
    leaves: list[Any] = []
    _mapped(state, leaves.append)
    return leaves


def save(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    *_: Any,
    async_sharded_save: bool = False,
    content_metadata: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """Save a nested state: sharded tensors and objects, and what all ranks have alike, of which the first
    rank's is saved; all ranks together.

    Args:
        sharded_state_dict: the state.
        checkpoint_dir: where; an empty directory, or one with a checkpoint, which is replaced.
        async_sharded_save: has no effect: the state is saved when this returns.
        content_metadata: what :func:`load_content_metadata` returns.
        others: Megatron-Core's strategies and checks, without effect.

    Raises:
        HexadError: the directory holds something else, the state holds what cannot be saved, or the sharded
            tensors that ranks write do not cover global ones exactly.
    """
    check_arguments("dist_checkpointing.save", others, ARGUMENTS["dist_checkpointing.save"])
    mesh, leaves = parallel_state.get_mesh(), _leaves(sharded_state_dict)
    directory = Path(checkpoint_dir).absolute()
    from_first(lambda: _check_free(directory), mesh.world)
    objects = {
        leaf.unique_key: leaf.data
        for leaf in leaves
        if isinstance(leaf, ShardedObject) and not _replica(leaf.replica_id)
    }

    def kept() -> dict[str, Any]:
        common = _mapped(sharded_state_dict, lambda leaf: _ABSENT if isinstance(leaf, _LOCAL) else leaf)
        content = dict(content_metadata) if content_metadata is not None else None
        state = {"common": _without_gaps(common), "content": content, "objects": every}
        return {"step": 0, "updates": 0, "samples": 0, "megatron": tags.encoded(state, "sharded_state_dict")}

    every = merged(objects, mesh.world, or_)
    progress = agreed(kept, mesh.world)
    _note_differences(sharded_state_dict, mesh)
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    chunks = [chunk for tensor in tensors for chunk in tensor.chunks(tensor.data)]
    config = next((tensor.config for tensor in tensors if tensor.config is not None), None)
    where = tags.TagDirectory(directory.parent, directory.name, name_latest=False)
    try:
        tags.save(chunks, config or load_config(), mesh, where, progress)
    except ValueError as error:  # on all ranks: they do not cover the global tensors
        raise HexadError(
            f"dist_checkpointing.save: {one_line(error)}; every value of a global tensor has to be in one "
            "ShardedTensor whose replica_id is 0"
        ) from None


def _note_differences(state: Any, mesh: Mesh) -> None:
    """Report what ranks have differently, of which only the first rank's is saved, once."""
    names = {
        name: frozenset((_digest(leaf),)) for name, leaf in _named(state) if not isinstance(leaf, _LOCAL)
    }

    def both(one: _Digests, other: _Digests) -> _Digests:
        return {name: one.get(name, _LACKS) | other.get(name, _LACKS) for name in one | other}

    different = sorted(name for name, digests in merged(names, mesh.world, both).items() if len(digests) > 1)
    if different and mesh.rank == 0:
        shown = ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
        print(
            f"hexad: dist_checkpointing.save: found other values of {shown} on other ranks; the "
            "first rank's are saved: use ShardedTensor or ShardedObject for the others",
            file=sys.stderr,
        )


_Digests = dict[str, frozenset[str]]
"""Hashes of the values that ranks have under a name."""
_LACKS = frozenset(("",))


def _named(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested state with dotted names."""
    items = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, value in items:
        if isinstance(value, Mapping | list | tuple):
            yield from _named(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _digest(leaf: Any) -> str:
    """Equal for equal values."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    values = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{leaf.dtype} {list(leaf.shape)} {sha256(values.tobytes()).hexdigest()}"


def _replica(replica_id: int | tuple[int, ...]) -> bool:
    return any(replica_id) if isinstance(replica_id, tuple) else bool(replica_id)


def _check_free(directory: Path) -> None:
    """Refuse to replace a directory that is no checkpoint."""
    if directory.is_file() or (
        directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST_FILE).is_file()
    ):
        raise HexadError(
            f"dist_checkpointing.save: {directory} holds other files than a checkpoint; name an empty "
            "directory"
        )


def load(
    sharded_state_dict: Mapping[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    *_: Any,
    **others: Any,
) -> dict[str, Any]:
    """The state that :func:`save` has saved, in any layout; all ranks together.

    Args:
        sharded_state_dict: says which tensors and objects to load; their values are not changed.
        checkpoint_dir: that was saved to.
        others: Megatron-Core's strategies and checks, without effect: every tensor must be there.

    Returns:
        the same nested state with values, and what all ranks have alike.

    Raises:
        HexadError: there is no such checkpoint, or it lacks a tensor.
    """
    check_arguments("dist_checkpointing.load", others, ARGUMENTS["dist_checkpointing.load"])
    mesh, directory = parallel_state.get_mesh(), Path(checkpoint_dir)
    saved = from_first(lambda: _state(directory), mesh.world)
    values: dict[int, Tensor] = {}
    chunks: list[Chunk] = []
    for leaf in _leaves(sharded_state_dict):
        if isinstance(leaf, ShardedTensor):
            values[id(leaf)] = torch.zeros_like(leaf.data)  # padding belongs to no weight
            chunks += leaf.chunks(values[id(leaf)])
    load_chunks(directory, chunks, mesh.world)

    def loaded(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            return values[id(leaf)]
        if isinstance(leaf, ShardedObject):
            if leaf.unique_key not in saved["objects"]:
                raise HexadError(f"dist_checkpointing.load: {directory} has no object {leaf.unique_key}")
            return saved["objects"][leaf.unique_key]
        return leaf.obj if isinstance(leaf, LocalNonpersistentObject) else _ABSENT

    state = agreed(lambda: _mapped(sharded_state_dict, loaded), mesh.world)
    result: dict[str, Any] = _without_gaps(_united(saved["common"], state))
    return result


def _united(one: Any, other: Any) -> Any:
    """Two nested states in one; what ``other`` has comes first."""
    if other is _ABSENT:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{name: _united(one.get(name, _ABSENT), value) for name, value in other.items()}}
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        items = [_united(*pair) for pair in zip_longest(one, other, fillvalue=_ABSENT)]
        return items if isinstance(other, list) else tuple(items)
    return other


def _state(directory: Path) -> dict[str, Any]:
    """What a checkpoint has beside sharded tensors."""
    if not (directory / MANIFEST_FILE).is_file():
        content = "no checkpoint"
        if (directory / _FOREIGN).is_file():
            convert = f"hexad checkpoint import --from megatron:{directory}"
            content = f"a checkpoint of Megatron-Core; convert it: {convert}"
        raise HexadError(f"dist_checkpointing: {directory}: found {content}")
    kept = read_manifest(directory).progress.get("megatron")
    state: dict[str, Any] = {"common": {}, "objects": {}, "content": None}
    return state if kept is None else {**state, **tags.decoded(kept)}


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """What all ranks have alike."""
    common: dict[str, Any] = _state(Path(checkpoint_dir))["common"]
    return common


def load_content_metadata(
    checkpoint_dir: str | os.PathLike[str] | None = None, **_: Any
) -> Mapping[str, Any] | None:
    """The ``content_metadata`` of :func:`save`."""
    content: Mapping[str, Any] | None = None
    if checkpoint_dir is not None:
        content = _state(Path(checkpoint_dir))["content"]
    return content


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Whether it is a checkpoint of :func:`save`, or of a run."""
    return (Path(checkpoint_dir) / MANIFEST_FILE).is_file()


def get_default_save_sharded_strategy(*_: Any, **__: Any) -> None:
    """None: there is one way to save."""


def get_default_load_sharded_strategy(*_: Any, **__: Any) -> None:
    """None: there is one way to load."""


def FullyParallelSaveStrategyWrapper(*_: Any, **__: Any) -> None:  # Megatron-Core's name
    """None: ranks that hold the same values share the work of saving in any case."""


FullyParallelLoadStrategyWrapper = FullyParallelSaveStrategyWrapper


def is_main_replica(replica_id: int | tuple[int, ...]) -> bool:
    """Whether the rank with this ``replica_id`` writes."""
    return not _replica(replica_id)
