"""``deepspeed.comm``: the names of ``torch.distributed``, over the process group that was joined."""

import os
from typing import Any

import torch.distributed as dist

from hexad.config import HexadError
from hexad.launching.environment import environment

from .accelerator import get_accelerator
from .entry import init_distributed

__all__ = ["init_distributed"]

_SAME = {
    "all_gather_coalesced": "all_gather_coalesced",
    "allgather_fn": "all_gather_into_tensor",
    "get_all_ranks_from_group": "get_process_group_ranks",
    "inference_all_reduce": "all_reduce",
    "reduce_scatter_fn": "reduce_scatter_tensor",
}
"""Name of DeepSpeed -> that of ``torch.distributed``."""
_ALWAYS = ("has_all_gather_into_tensor", "has_reduce_scatter_tensor", "has_all_reduce_coalesced")


def __getattr__(name: str) -> Any:
    """Everything else is ``torch.distributed``'s."""
    if name in _ALWAYS or name == "has_coalescing_manager":
        return lambda: True
    known = _SAME.get(name, name)
    if name.startswith("__") or not hasattr(dist, known):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(dist, known)


def get_local_rank() -> int:
    """This rank's number on its host."""
    return environment().local_rank


get_local_rank_from_launcher = get_local_rank


def get_world_rank_from_launcher() -> int:
    """This rank's number, before the process group is joined."""
    return environment().rank


def get_world_size_from_launcher() -> int:
    """The number of ranks, before the process group is joined."""
    return environment().world


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def initialize_mesh_device(mesh_shape: Any, mesh_dim_names: Any) -> Any:
    """A device mesh of ``torch.distributed`` over all ranks."""
    kind = get_accelerator().device_name().partition(":")[0]
    return dist.init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """No effect where torchrun or SLURM has started the ranks.

    Raises:
        HexadError: another launcher has.
    """
    if not environment().joined:
        raise HexadError("mpi_discovery: found no ranks of torchrun or SLURM; start the script with them")


def configure(*_: Any, **__: Any) -> None:
    """Accepted without effect: measure messages with ``torch.profiler``."""


log_summary = reset_log = configure


def in_aml() -> bool:
    """Whether the process runs in Azure Machine Learning."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Whether the process runs in SageMaker."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Whether the process runs in DLTS."""
    return "DLTS_JOB_ID" in os.environ
