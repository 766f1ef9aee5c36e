"""Which data ranks divide the model's state among them, and what of it (ZeRO: Rajbhandari et al.,
arXiv 1910.02054)."""

from __future__ import annotations

from dataclasses import dataclass

from hexad.topology.mesh import Axis, Mesh


@dataclass(frozen=True)
class StateSharding:
    """How the data ranks hold the state.

    Stage 0 is the same machinery with one rank per shard: everybody holds everything.

    Attributes:
        stage: 0 nothing is divided, 1 optimizer state and master weights, 2 gradients too, 3 matrices too.
        shards: the ranks among which it is divided; size 1 in stage 0.
        replicas: the ranks that hold the same share (hybrid sharding, as in MiCS, arXiv 2205.00119).
    """

    stage: int
    shards: Axis
    replicas: Axis

    @classmethod
    def create(cls, stage: int, replicas: int, mesh: Mesh) -> StateSharding:
        """Divide the mesh's data axis; every rank calls this together.

        Args:
            stage: ``parallel.zero``.
            replicas: ``parallel.replicas``, which divides the data degree.
            mesh: of the run.
        """
        size = mesh.data.size // replicas if stage else 1
        return cls(stage, *mesh.split(mesh.data, size))
