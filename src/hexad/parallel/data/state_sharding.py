"""Among which data ranks the model's state is sharded, and what of it (ZeRO: Rajbhandari et al.,
arXiv 1910.02054)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hexad.topology.mesh import Axis, Mesh

from ..inventory import Grid, Traits
from .bucket_plan import state_shards


@dataclass(frozen=True)
class StateSharding:
    """How the data ranks of one grid hold the state of its weights.

    Level 0 is the same machinery with one rank per shard: every rank holds everything.

    Attributes:
        shards: the ranks among which it is sharded; size 1 in level 0.
        replicas: the ranks that hold the same shard (hybrid sharding, as in MiCS, arXiv 2205.00119).
        model: the axes of the grid that may divide a weight; ranks along them hold other shards of it, or
            copies.
    """

    shards: Axis
    replicas: Axis
    model: tuple[Axis, ...]

    def copies(self, traits: Traits) -> list[Axis]:
        """The axes of ``model`` along which ranks hold the same shards of weights with these traits. Weights
        that are divided over one part of an axis are copied along its other parts."""
        found: list[Axis] = []
        for axis in self.model:
            if axis.name not in traits.divided:
                parts = [part for part in axis.parts if part.name not in traits.divided]
                found += parts if len(parts) < len(axis.parts) else [axis]
        return found

    def holder(self, traits: Traits) -> tuple[int, int]:
        """This rank's number among those that hold the same shards, and how many they are."""
        number, holders = self.replicas.rank, self.replicas.size
        for axis in self.copies(traits):
            number, holders = number * axis.size + axis.rank, holders * axis.size
        return number, holders

    @classmethod
    def create(cls, zero: int, replicas: int, mesh: Mesh, grid: Grid = "dense") -> StateSharding:
        """Split the axis over which the grid's gradients are reduced; every rank calls this together.

        Args:
            zero: ``parallel.zero``.
            replicas: ``parallel.replicas``, which divides the axis's degree.
            mesh: of the run.
            grid: whose weights.
        """
        data = mesh.gradient_axis(grid)
        return cls(*mesh.split(data, state_shards(data.size, zero, replicas)), mesh.model_axes(grid))


Shardings = Mapping[Grid, StateSharding]
"""The state sharding of every grid that has weights."""
