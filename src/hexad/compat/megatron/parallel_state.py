"""Megatron-LM's ``parallel_state``: groups, ranks and sizes of the current mesh.

Names and meanings are those of ``megatron.core.parallel_state``. Groups of one rank are process groups too.
The mesh is the only state: :func:`initialize_model_parallel` creates one, :func:`use_mesh` uses an existing
one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hexad.comm import Trace, gather_objects
from hexad.config import ConfigError, HexadError
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh

from ..facade import world
from ..facade.foreign_names import check_arguments
from ..facade.installed import refused_name
from .tables import ARGUMENTS

_AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline"}


@dataclass
class _State:
    """The current mesh, its axes, and what setters have set."""

    mesh: Mesh
    axes: dict[str, Axis]  # the mesh's by name, combined ones, and those of the expert grid
    virtual: int | None = None
    virtual_rank: int | None = None
    set_values: dict[tuple[str, str], int] = field(default_factory=dict)  # by axis and fact


class ParallelStateError(HexadError, RuntimeError, AssertionError):
    """Degrees that do not fit, or a missing process group: scripts catch what Megatron-Core raises."""


_current: _State | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    order: str = "tp-cp-ep-dp-pp",
    distributed_timeout_minutes: float = 30,
    device: torch.device | None = None,
    expert_tensor_parallel_size: int | None = None,
    **others: Any,
) -> None:
    """Create the mesh of these degrees over torch's default process group; all its ranks call this together.

    ``device`` is where this rank computes; by default the current GPU with NCCL, else the CPU. ``others`` are
    arguments of Megatron-Core, with their defaults or without effect.

    Raises:
        ParallelStateError: ``torch.distributed`` or the mesh is not in the right state, or degrees do not fit
            the world.
    """
    check_arguments("initialize_model_parallel", others, ARGUMENTS["initialize_model_parallel"])
    if not dist.is_initialized():
        raise ParallelStateError(
            "initialize_model_parallel: call torch.distributed.init_process_group before"
        )
    if is_initialized():
        raise ParallelStateError(
            "initialize_model_parallel: a mesh exists; call destroy_model_parallel before"
        )
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size < 2:
        raise ParallelStateError(
            f"virtual_pipeline_model_parallel_size: found {virtual_pipeline_model_parallel_size} with one "
            "pipeline rank; use more, or None"
        )
    if device is None:
        device = world.join()
    _same_number_of_groups()
    experts = {}
    if expert_model_parallel_size > 1 or expert_tensor_parallel_size is not None:
        tensor = expert_tensor_parallel_size or tensor_model_parallel_size
        experts = {"expert": expert_model_parallel_size, "expert_tensor": tensor}
    try:
        layout = Layout(
            world=dist.get_world_size(),
            tensor=tensor_model_parallel_size,
            context=context_parallel_size,
            pipeline=pipeline_model_parallel_size,
            **experts,
            order="-".join(_AXES.get(name, name) for name in order.split("-")),
        )
    except ConfigError as error:
        raise ParallelStateError(str(error)) from None
    mesh = Mesh.create(layout, device, 60.0 * distributed_timeout_minutes, Trace())
    use_mesh(mesh, virtual_pipeline_model_parallel_size)


def _same_number_of_groups() -> None:
    """Refuse ranks that have created different numbers of process groups: torch numbers groups per process,
    and creating those of a mesh would hang."""
    everyone = Axis("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    counts = gather_objects(len(dist.distributed_c10d._world.pg_names), everyone)
    other = next((count for count in counts if count != counts[0]), None)
    if other is not None:
        raise HexadError(
            f"ranks have created {counts[0]} and {other} process groups; create user-defined groups of "
            "a subset of the ranks after those of the mesh"
        )


def use_mesh(mesh: Mesh, virtual_pipeline_model_parallel_size: int | None = None) -> None:
    """Use an existing mesh, such as that of :func:`hexad.launch`; all its ranks call this together.
    In a world of one it creates the default process group, if there is none.
    """
    global _current
    world.join(mesh.timeout, None if mesh.device.type == "cuda" else "gloo")
    pairs = (("data", "context"), ("tensor", "pipeline"), ("tensor", "context"), ("tensor", "data"))
    combined = {"-".join(names): mesh.combined(*names) for names in (*pairs, ("tensor", "data", "context"))}
    axes = {**mesh.axes, **combined, **_expert_axes(mesh, combined)}
    # Of size 1 on other ranks than the first and the last.
    axes["embedding"] = mesh.some(mesh.pipeline, 0, mesh.pipeline.size - 1)
    axes["alone"] = Axis("alone", (mesh.rank,))
    world.group_of(axes["alone"])  # made now: all ranks make the same groups
    world.use(mesh)
    virtual = virtual_pipeline_model_parallel_size
    _current = _State(mesh, axes, virtual, None if virtual is None else 0)


def _expert_axes(mesh: Mesh, combined: dict[str, Axis]) -> dict[str, Axis]:
    """The axes of the expert grid; without experts those of the dense grid, as in Megatron-Core."""
    names = ("expert_tensor", "expert_data", "expert_tensor-expert", "expert_tensor-expert-pipeline")
    if mesh.layout.expert * mesh.layout.expert_tensor == 1:
        dense = mesh.tensor, combined["data-context"], mesh.tensor, combined["tensor-pipeline"]
        return dict(zip(names, dense))
    tensor, expert = mesh.model_axes("expert")
    both = mesh.combined("expert_tensor", "expert")
    whole = mesh.combined("expert_tensor", "expert", "pipeline")
    axes = (tensor, mesh.gradient_axis("expert"), both, whole)
    return {expert.name: expert, **dict(zip(names, axes))}


def destroy_model_parallel() -> None:
    """Discard the mesh. Its process groups end with ``torch.distributed.destroy_process_group``."""
    global _current
    _current = None


def is_initialized() -> bool:
    """Whether there is a mesh."""
    return _current is not None


model_parallel_is_initialized = is_initialized


def _state() -> _State:
    if _current is None:
        raise HexadError("there is no mesh yet: call initialize_megatron, or initialize_model_parallel")
    return _current


def get_mesh() -> Mesh:
    """Hexad's mesh, for :class:`hexad.Engine`.

    Raises:
        HexadError: there is none; so do all functions that follow.
    """
    return _state().mesh


def axis_of(group: dist.ProcessGroup | None) -> Axis:
    """The axis of a process group of the mesh; the tensor axis for None.

    Raises:
        HexadError: a group that is not of the mesh.
    """
    axes = _state().axes
    if group is None:
        return axes["tensor"]
    for axis in axes.values():
        if world.group_of(axis) is group:
            return axis
    raise HexadError("group: found a process group that parallel_state has not returned; pass one of these")


def embedding_axis() -> Axis:
    """The pipeline ranks with the first and the last stage, which share tied embeddings."""
    return _state().axes["embedding"]


# Facts of axes

_AXES_OF = {
    "tensor_model_parallel": "tensor",
    "pipeline_model_parallel": "pipeline",
    "context_parallel": "context",
    "sequence_parallel": "context",  # DeepSpeed's word
    "sequence_data_parallel": "data-context",
    "data_parallel": "data",
    "model_parallel": "tensor-pipeline",
    "tensor_and_context_parallel": "tensor-context",
    "tensor_and_data_parallel": "tensor-data",
    "expert_model_parallel": "expert",
    "expert_tensor_parallel": "expert_tensor",
    "expert_data_parallel": "expert_data",
    "expert_tensor_and_model_parallel": "expert_tensor-expert",
    "expert_tensor_model_pipeline_parallel": "expert_tensor-expert-pipeline",
    "intra_distributed_optimizer_instance": "data-context",
    "inter_distributed_optimizer_instance": "alone",
}
"""Megatron-Core's words for an axis."""

_FACTS: dict[str, tuple[str, Callable[[Axis], Any]]] = {
    "group": ("The process group of", world.group_of),
    "group_gloo": ("The process group of", world.group_of),
    "global_ranks": ("The global ranks of", lambda axis: list(axis.ranks)),
    "world_size": ("The number of", lambda axis: axis.size),
    "rank": ("This rank's place among", lambda axis: axis.rank),
    "src_rank": ("The global rank of the first of", lambda axis: axis.ranks[0]),
    "first_rank": ("The global rank of the first of", lambda axis: axis.ranks[0]),
    "last_rank": ("The global rank of the last of", lambda axis: axis.ranks[-1]),
    "next_rank": ("The global rank after this one, in a ring of", lambda a: a.ranks[(a.rank + 1) % a.size]),
    "prev_rank": ("The global rank before this one, in a ring of", lambda a: a.ranks[(a.rank - 1) % a.size]),
}
"""Facts of an axis: what they are, for docstrings, and how they are read."""

_CONTEXT_PLACES = {"data": 0, "tensor-data": 1}
"""Axes that may include context ranks, and the place of ``with_context_parallel`` among the arguments."""


def _getter(axis: str, fact: str) -> Callable[..., Any]:
    """A function that returns a fact of an axis; of data ranks, with the context ranks if asked for. What its
    setter has set comes first."""
    what, read = _FACTS[fact]

    def getter(*flags: Any, with_context_parallel: bool = False, **_: Any) -> Any:
        set_value, axes = _state().set_values.get((axis, fact)), _state().axes
        if set_value is not None:
            return set_value
        with_context = with_context_parallel
        if axis in _CONTEXT_PLACES and len(flags) > _CONTEXT_PLACES[axis]:
            with_context = flags[_CONTEXT_PLACES[axis]]
        return read(axes[f"{axis}-context" if with_context and axis in _CONTEXT_PLACES else axis])

    getter.__doc__ = f"{what} the {axis.replace('-', ' x ')} ranks."
    return getter


def _setter(axis: str, fact: str) -> Callable[[int | None], None]:
    """A function that sets what the getter returns, for tests; None: what is so."""

    def setter(value: int | None) -> None:
        values = _state().set_values
        values.pop((axis, fact), None)
        if value is not None:
            values[axis, fact] = value

    setter.__doc__ = f"Set the {fact} that the getter returns, for tests; None: of the mesh again."
    return setter


for (_words, _name), _fact in product(_AXES_OF.items(), _FACTS):
    for _kind, _make in (("get", _getter), ("set", _setter)):
        if _kind == "get" or _fact in ("world_size", "rank"):
            _function = _make(_name, _fact)
            _function.__name__ = _function.__qualname__ = f"{_kind}_{_words}_{_fact}"
            globals()[_function.__name__] = _function

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> dist.ProcessGroup:
    """The process group of the ranks that share scales of 8-bit formats: tensor x data, or tensor alone."""
    name = f"{'tensor' if tp_only_amax_red else 'tensor-data'}{'-context' if with_context_parallel else ''}"
    return world.group_of(_state().axes[name])


def default_embedding_ranks(pp_ranks: list[int], *_: Any, **__: Any) -> list[int]:
    """The pipeline ranks with embedding or head."""
    return list(dict.fromkeys([pp_ranks[0], pp_ranks[-1]]))


def default_position_embedding_ranks(pp_ranks: list[int], *_: Any, **__: Any) -> list[int]:
    """The pipeline ranks with position embeddings."""
    return [pp_ranks[0]]


def is_unitialized() -> bool:
    """Whether there is no mesh (Megatron-Core's spelling)."""
    return not is_initialized()


def has_separate_all_gather_group() -> bool:
    """Never."""
    return False


def get_all_ranks() -> str:
    """This rank's places along the axes, joined by ``_``."""
    mesh = _state().mesh
    axes = mesh.tensor, mesh.data, mesh.context, mesh.pipeline, _state().axes["expert"]
    return "_".join(str(axis.rank) for axis in axes)


class RankGenerator:
    """Groups of ranks on a grid, as Megatron-Core's class of this name.

    Args:
        tp, ep, dp, pp, cp: degrees.
        order: axes, fastest first.
        rank_offset: the first rank.
    """

    def __init__(self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0) -> None:
        degrees = {"tp": tp, "ep": ep, "dp": dp, "pp": pp, "cp": cp}
        self.order = order.split("-")
        self.order += [name for name, degree in degrees.items() if name not in self.order and degree > 1]
        sizes = [degrees[name] for name in reversed(self.order)]
        self.world_size = tp * ep * dp * pp * cp
        self._ranks = np.arange(self.world_size).reshape(sizes) + rank_offset

    def get_ranks(self, token: str) -> list[list[int]]:
        """The groups of ranks that differ only along some axes, such as ``tp-dp``."""
        names = token.split("-")
        places = [n for n, name in enumerate(reversed(self.order)) if name in names]
        moved = np.moveaxis(self._ranks, places, range(-len(places), 0))
        size = int(np.prod([self._ranks.shape[place] for place in places], dtype=int))
        groups: list[list[int]] = moved.reshape(-1, size).tolist()
        return groups


def get_embedding_group() -> dist.ProcessGroup:
    """The process group of the first and the last pipeline rank, which share tied embeddings.

    Raises:
        HexadError: this rank is neither.
    """
    if not is_rank_in_embedding_group():
        raise HexadError("get_embedding_group: this rank holds neither the first nor the last stage")
    return world.group_of(_state().axes["embedding"])


def get_position_embedding_group() -> dist.ProcessGroup:
    """The process group of the pipeline ranks that hold position embeddings: the first one.

    Raises:
        HexadError: this rank holds none.
    """
    if not is_rank_in_position_embedding_group():
        raise HexadError("get_position_embedding_group: this rank does not hold the first stage")
    return world.group_of(_state().axes["alone"])


# Pipeline stages


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the first pipeline rank; unless ``ignore_virtual``, also its first virtual stage."""
    if not ignore_virtual and not _is_virtual_stage(vp_stage, 0):
        return False
    return _state().mesh.pipeline.rank == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the last pipeline rank; unless ``ignore_virtual``, also its last virtual stage."""
    if not ignore_virtual and not _is_virtual_stage(vp_stage, (_state().virtual or 1) - 1):
        return False
    axis = _state().mesh.pipeline
    return axis.rank == axis.size - 1


def _is_virtual_stage(stage: int | None, expected: int) -> bool:
    state = _state()
    return state.virtual is None or (state.virtual_rank if stage is None else stage) == expected


def get_seq_split_idx() -> int:
    """0: sequences are not split for the pipeline (zero-bubble pipeline parallelism's name)."""
    return 0


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the first or the last stage."""
    options = ignore_virtual, vp_stage
    return is_pipeline_first_stage(*options) or is_pipeline_last_stage(*options)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds the first stage."""
    return is_pipeline_first_stage()


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Stages per pipeline rank; None for one."""
    return _state().virtual


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Set the number of stages per pipeline rank; None for one."""
    _state().virtual = size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The current one of this rank's stages; None where it has one."""
    return _state().virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Select the current one of this rank's stages."""
    _state().virtual_rank = rank


_REFUSED = (
    "create_group create_hierarchical_groups create_hybrid_dp_cp_groups destroy_global_memory_buffer "
    "destroy_global_symmetric_memory_buffer generate_masked_orthogonal_rank_groups "
    "get_data_modulo_expert_parallel_group get_global_memory_buffer get_global_symmetric_memory_buffer "
    "get_hierarchical_context_parallel_groups get_hybrid_data_context_parallel_groups get_nccl_options "
    "overwrite_nccl_comm_cfgs update_pg_timeout"
).split()
for _name in _REFUSED:
    globals()[_name] = refused_name(f"parallel_state.{_name}", "groups and buffers are the mesh's")
