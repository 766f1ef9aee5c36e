"""``deepspeed.utils.groups``, an engine's ``grid``, and the topologies of ``PipelineModule``."""

import re
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from hexad.config import HexadError
from hexad.topology.mesh import Mesh

from ..facade import world

_AXES = {
    "data_parallel": "data",
    "model_parallel": "tensor",
    "tensor_model_parallel": "tensor",
    "slice_parallel": "tensor",
    "sequence_parallel": "context",
    "sequence_data_parallel": "data",
    "pipe_parallel": "pipeline",
    "pipeline_model_parallel": "pipeline",
}
_FACTS = {"group": "group", "rank": "rank", "world_size": "size", "group_ranks": "ranks", "src_rank": "first"}
"""DeepSpeed's words for an axis, and for a fact of :data:`~hexad.compat.facade.world.FACTS`."""


def accessor(name: str, mesh: Callable[[], Mesh]) -> Callable[[], Any]:
    """``get_data_parallel_rank`` and the like, with or without a leading underscore.

    Raises:
        AttributeError: there is no such axis or fact.
    """
    match = re.fullmatch(rf"_?get_({'|'.join(_AXES)})_({'|'.join(_FACTS)})", name)
    if match is None:
        raise AttributeError(
            f"there is no {name!r}: get_AXIS_FACT, with {', '.join(_AXES)}; {', '.join(_FACTS)}"
        )
    axis, read = _AXES[match[1]], world.FACTS[_FACTS[match[2]]]
    return lambda: read(mesh().axes[axis])


def __getattr__(name: str) -> Any:
    """Facts of the mesh of the last engine."""
    return accessor(name, world.current_mesh)


class PipelineGrid:
    """A pipeline engine's ``grid``: ``get_data_parallel_rank()`` and the like, of its own mesh.

    Attributes:
        stage_id: this rank's place in the pipeline.
        data_parallel_id: this rank's place among data ranks.
        is_first_stage, is_last_stage: whether this rank is the first, or the last, of the pipeline.
        pipe_parallel_size, data_parallel_size, model_parallel_size: ranks along an axis.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.global_rank, self.world_size = mesh.rank, mesh.layout.world
        self.stage_id, self.data_parallel_id = mesh.pipeline.rank, mesh.data.rank
        self.pipe_parallel_size, self.data_parallel_size = mesh.pipeline.size, mesh.data.size
        self.model_parallel_size = mesh.tensor.size
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == mesh.pipeline.size - 1
        self.get_stage_id = self.get_pipe_parallel_rank
        self.get_data_parallel_id = self.get_data_parallel_rank

    def __getattr__(self, name: str) -> Any:
        return accessor(name, lambda: self._mesh)

    def get_global_rank(self) -> int:
        """This rank's number."""
        return self.global_rank

    def stage_to_global(self, stage_id: int) -> int:
        """The number of the rank with another stage of this data rank."""
        return self._mesh.pipeline.ranks[stage_id]


class ProcessTopology:
    """Ranks on a grid, in the order of ``itertools.product``: the last axis varies fastest.

    Args:
        axes: names.
        dims: ranks along each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        coordinates: Any = namedtuple
        self.ProcessCoord = coordinates("ProcessCoord", axes)
        places = product(*map(range, dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **place: int) -> int:
        """The rank at a place, given by all axes."""
        return self.mapping[self.ProcessCoord(**place)]

    def get_axis_names(self) -> list[str]:
        """The names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis; 0 for an unknown one."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The place of a rank."""
        return next(place for place, number in self.mapping.items() if number == rank)

    def filter_match(self, **places: int) -> list[int]:
        """The ranks whose places agree with some axes."""
        coordinates = places.items()
        return [rank for at, rank in self.mapping.items() if coordinates <= at._asdict().items()]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks with a place along an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ only along an axis."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for at, rank in self.mapping.items() if axis in self.axes else ():
            groups.setdefault(tuple(v for k, v in at._asdict().items() if k != axis), []).append(rank)
        return list(groups.values())

    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and tensor ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def stages_of(topology: Any) -> int:
    """The pipeline ranks of a topology.

    Raises:
        HexadError: it has tensor ranks, which a list of layers cannot use.
    """
    tensor = int(topology.get_dim("model"))
    if tensor > 1:
        raise HexadError(
            f"topology: found {tensor} model-parallel ranks, but the layers of a PipelineModule are not "
            "divided; use 1, or Hexad's models (hexad train)"
        )
    return int(topology.get_dim("pipe"))
