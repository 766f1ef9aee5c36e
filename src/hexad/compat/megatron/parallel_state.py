"""Megatron-LM's ``parallel_state``: groups, ranks and sizes of the current mesh.

Names and meanings are those of ``megatron.core.parallel_state``. Groups of one rank are process groups too.
The mesh is the only state: :func:`initialize_model_parallel` creates one, :func:`use_mesh` uses an existing
one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hexad.comm import gather_objects
from hexad.config import HexadError
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh

from ..facade import world

_AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline"}


@dataclass
class _State:
    """The current mesh.

    Attributes:
        mesh: of the run.
        alone: the process group of this rank alone.
        together: combined axes, by name.
        embedding: the first and the last pipeline rank; an axis of size 1 on others.
        virtual, virtual_rank: Megatron-LM's virtual pipeline size, and the current virtual stage.
    """

    mesh: Mesh
    alone: dist.ProcessGroup
    together: dict[str, Axis]
    embedding: Axis
    virtual: int | None = None
    virtual_rank: int | None = None


_current: _State | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    order: str = "tp-cp-ep-dp-pp",
    distributed_timeout_minutes: float = 30,
    device: torch.device | None = None,
) -> None:
    """Create the mesh of these degrees over torch's default process group; all its ranks call this together.

    ``device`` is where this rank computes; by default the current GPU with NCCL, else the CPU.

    Raises:
        HexadError: ``torch.distributed`` or the mesh is not in the right state, or experts are asked for.
        ConfigError: degrees that do not fit the world.
    """
    if not dist.is_initialized():
        raise HexadError("initialize_model_parallel: call torch.distributed.init_process_group before")
    if is_initialized():
        raise HexadError("initialize_model_parallel: a mesh exists; call destroy_model_parallel before")
    if expert_model_parallel_size != 1:
        raise HexadError(
            f"initialize_model_parallel: found expert_model_parallel_size {expert_model_parallel_size}; "
            "experts are not supported yet: use 1"
        )
    if device is None:
        gpu = "nccl" in str(dist.get_backend()) and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    _same_number_of_groups()
    layout = Layout(
        world=dist.get_world_size(),
        tensor=tensor_model_parallel_size,
        context=context_parallel_size,
        pipeline=pipeline_model_parallel_size,
        order="-".join(_AXES.get(name, name) for name in order.split("-")),
    )
    mesh = Mesh.create(layout, device, 60.0 * distributed_timeout_minutes)
    use_mesh(mesh, virtual_pipeline_model_parallel_size)


def _same_number_of_groups() -> None:
    """Torch numbers process groups per process: if ranks have created different numbers of them, creating
    those of a mesh would hang."""
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
    alone = dist.new_group([dist.get_rank()], timeout=mesh.timeout, use_local_synchronization=True)
    pairs = (("data", "context"), ("tensor", "pipeline"), ("tensor", "context"), ("tensor", "data"))
    together = {"-".join(pair): mesh.combined(*pair) for pair in (*pairs, ("tensor", "data", "context"))}
    embedding = mesh.some(mesh.pipeline, 0, mesh.pipeline.size - 1)
    _current = _State(mesh, alone, together, embedding, virtual_pipeline_model_parallel_size)
    if virtual_pipeline_model_parallel_size is not None:
        _current.virtual_rank = 0


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
    state = _state()
    if group is None:
        return state.mesh.tensor
    if group is state.alone:
        return Axis("tensor", (state.mesh.rank,))
    for axis in (*state.mesh.axes.values(), *state.together.values(), state.embedding):
        if axis.group is group:
            return axis
    raise HexadError("group: found a process group that parallel_state has not returned; pass one of these")


def _group(axis: Axis) -> dist.ProcessGroup:
    if axis.group is None:
        return _state().alone
    return axis.group


def _data(with_context_parallel: bool) -> Axis:
    state = _state()
    return state.together["data-context"] if with_context_parallel else state.mesh.data


# Process groups


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """This rank's tensor ranks."""
    return _group(_state().mesh.tensor)


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """This rank's pipeline ranks."""
    return _group(_state().mesh.pipeline)


def get_context_parallel_group() -> dist.ProcessGroup:
    """This rank's context ranks."""
    return _group(_state().mesh.context)


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of this rank's context ranks."""
    return list(_state().mesh.context.ranks)


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """This rank's data ranks, with their context ranks if asked for."""
    return _group(_data(with_context_parallel))


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold one copy of the model: tensor x pipeline."""
    return _group(_state().together["tensor-pipeline"])


def get_tensor_and_context_parallel_group() -> dist.ProcessGroup:
    """tensor x context."""
    return _group(_state().together["tensor-context"])


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """tensor x data, with context if asked for."""
    name = "tensor-data-context" if with_context_parallel else "tensor-data"
    return _group(_state().together[name])


def get_expert_model_parallel_group() -> dist.ProcessGroup:
    """This rank alone: there are no experts yet."""
    return _state().alone


def get_embedding_group() -> dist.ProcessGroup:
    """The first and the last pipeline rank, which share tied embeddings.

    Raises:
        HexadError: this rank is neither.
    """
    if not is_rank_in_embedding_group():
        raise HexadError("get_embedding_group: this rank holds neither the first nor the last stage")
    return _group(_state().embedding)


def get_position_embedding_group() -> dist.ProcessGroup:
    """The pipeline ranks that hold position embeddings: the first one.

    Raises:
        HexadError: this rank holds none.
    """
    if not is_rank_in_position_embedding_group():
        raise HexadError("get_position_embedding_group: this rank does not hold the first stage")
    return _state().alone


# Sizes and ranks


def get_tensor_model_parallel_world_size() -> int:
    """The tensor degree."""
    return _state().mesh.tensor.size


def get_tensor_model_parallel_rank() -> int:
    """This rank's place among its tensor ranks."""
    return _state().mesh.tensor.rank


def get_pipeline_model_parallel_world_size() -> int:
    """The pipeline degree."""
    return _state().mesh.pipeline.size


def get_pipeline_model_parallel_rank() -> int:
    """This rank's place among its pipeline ranks."""
    return _state().mesh.pipeline.rank


def get_context_parallel_world_size() -> int:
    """The context degree."""
    return _state().mesh.context.size


def get_context_parallel_rank() -> int:
    """This rank's place among its context ranks."""
    return _state().mesh.context.rank


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """The data degree, times the context degree if asked for."""
    return _data(with_context_parallel).size


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """This rank's place among its data ranks."""
    return _data(with_context_parallel).rank


def get_model_parallel_world_size() -> int:
    """Ranks that hold one copy of the model: tensor x pipeline."""
    return _state().together["tensor-pipeline"].size


def get_model_parallel_rank() -> int:
    """This rank's place among them."""
    return _state().together["tensor-pipeline"].rank


def get_tensor_and_context_parallel_world_size() -> int:
    """tensor x context."""
    return _state().together["tensor-context"].size


def get_tensor_and_context_parallel_rank() -> int:
    """This rank's place among these."""
    return _state().together["tensor-context"].rank


def get_expert_model_parallel_world_size() -> int:
    """1: there are no experts yet."""
    return _state().mesh.axes["expert"].size


def get_expert_model_parallel_rank() -> int:
    """0: there are no experts yet."""
    return _state().mesh.axes["expert"].rank


# Global ranks


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first of this rank's tensor ranks."""
    return _state().mesh.tensor.ranks[0]


def get_model_parallel_src_rank() -> int:
    """Global rank of the first of the ranks that hold this copy of the model."""
    return _state().together["tensor-pipeline"].ranks[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first of this rank's data ranks."""
    return _data(with_context_parallel).ranks[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first of this rank's pipeline ranks."""
    return _state().mesh.pipeline.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last of this rank's pipeline ranks."""
    return _state().mesh.pipeline.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the pipeline rank after this one; after the last the first."""
    axis = _state().mesh.pipeline
    return axis.ranks[(axis.rank + 1) % axis.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the pipeline rank before this one; before the first the last."""
    axis = _state().mesh.pipeline
    return axis.ranks[(axis.rank - 1) % axis.size]


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


def _is_virtual_stage(given: int | None, wanted: int) -> bool:
    state = _state()
    return state.virtual is None or (state.virtual_rank if given is None else given) == wanted


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the first or the last stage."""
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(
        ignore_virtual, vp_stage
    )


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds the first stage."""
    return is_pipeline_first_stage()


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Stages per pipeline rank; None for one."""
    return _state().virtual


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Say how many stages a pipeline rank has."""
    _state().virtual = size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The current one of this rank's stages; None where it has one."""
    return _state().virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Make one of this rank's stages the current one."""
    _state().virtual_rank = rank
