"""Megatron-Core's collections of process groups."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from hexad.config import HexadError

from . import parallel_state


def _embedding(get: Callable[[], dist.ProcessGroup], here: Callable[[], bool]) -> Any:
    """A group that some ranks have; None on others."""
    return get() if here() else None


_GETTERS: dict[str, Callable[[], Any]] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "mp": parallel_state.get_model_parallel_group,
    "embd": partial(
        _embedding, parallel_state.get_embedding_group, parallel_state.is_rank_in_embedding_group
    ),
    "pos_embd": partial(
        _embedding,
        parallel_state.get_position_embedding_group,
        parallel_state.is_rank_in_position_embedding_group,
    ),
    "cp": parallel_state.get_context_parallel_group,
    "tp_cp": parallel_state.get_tensor_and_context_parallel_group,
    "hcp": lambda: None,
    "ep": parallel_state.get_expert_model_parallel_group,
    "expt_tp": parallel_state.get_expert_tensor_parallel_group,
    "tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group,
    "tp_ep_pp": parallel_state.get_expert_tensor_model_pipeline_parallel_group,
    "tp_dp_cp": partial(parallel_state.get_tensor_and_data_parallel_group, with_context_parallel=True),
    "dp": parallel_state.get_data_parallel_group,
    "dp_cp": partial(parallel_state.get_data_parallel_group, with_context_parallel=True),
    "expt_dp": parallel_state.get_expert_data_parallel_group,
    "intra_dp_cp": partial(parallel_state.get_data_parallel_group, with_context_parallel=True),
    "intra_expt_dp": parallel_state.get_expert_data_parallel_group,
    "inter_dist_opt": parallel_state.get_inter_distributed_optimizer_instance_group,
    "intra_dist_opt": parallel_state.get_intra_distributed_optimizer_instance_group,
}
"""Name of a group in a collection -> the function that returns it."""


class ProcessGroupCollection:
    """Process groups by Megatron-Core's short names, as ``tp``, ``pp``, ``dp``, ``dp_cp``.

    Args:
        groups: by name.

    Raises:
        HexadError: an unknown name.
    """

    def __init__(self, **groups: Any) -> None:
        _check(groups)
        vars(self).update(groups)

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: list[str] | None = None) -> "ProcessGroupCollection":
        """The groups of the mesh; all, or those of some names.

        Raises:
            HexadError: an unknown name, or there is no mesh.
        """
        names = list(_GETTERS) if required_pgs is None else required_pgs
        _check(names)
        return cls(**{name: _GETTERS[name]() for name in names})


def _check(names: Any) -> None:
    for name in names:
        if name not in _GETTERS:
            raise HexadError(
                f"ProcessGroupCollection: found {name!r}; expected some of {', '.join(_GETTERS)}"
            )


ModelCommProcessGroups = GradCommProcessGroups = ProcessGroupCollection
