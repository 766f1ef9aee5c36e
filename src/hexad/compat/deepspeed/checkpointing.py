"""``deepspeed.checkpointing``: activations that are recomputed, over ``torch.utils.checkpoint``."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..facade.random_states import MODEL_PARALLEL, seed_ranks, tracker
from ..facade.random_states import get_cuda_rng_tracker as get_cuda_rng_tracker
from .accelerator import get_accelerator
from .config import checked, known, read_json
from .keys import ActivationCheckpointing

_settings: ActivationCheckpointing | None = None
_mpu: Any = None


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how :func:`checkpoint` keeps inputs: ``checkpoint_in_cpu`` in the host's memory. ``mpu_`` knows the
    tensor ranks; the other arguments are accepted without effect.

    Raises:
        HexadError: the section ``activation_checkpointing`` of the configuration is wrong.
    """
    global _settings, _mpu
    _mpu = mpu_
    tree = {} if deepspeed_config is None else read_json(deepspeed_config)
    keys = tree.get("activation_checkpointing") or {}
    if checkpoint_in_cpu is not None:
        keys = {**keys, "cpu_checkpointing": checkpoint_in_cpu}
    prefix = "activation_checkpointing."
    _settings = checked(known(keys, ActivationCheckpointing, prefix), ActivationCheckpointing, prefix)


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return _settings is not None


def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Set the state of the device's generator."""
    get_accelerator().set_rng_state(new_state)


_CUDA_RNG_STATE_TRACKER = tracker
_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generators: the default one and the data ranks' as ``seed``, the tensor ranks' apart."""
    names = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")
    ask = next((getattr(_mpu, name) for name in names if hasattr(_mpu, name)), None)
    seed_ranks(seed, 0 if ask is None else ask())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the tensor ranks' generator anew; see :func:`model_parallel_cuda_manual_seed`."""
    model_parallel_cuda_manual_seed(seed)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Accepted without effect: inputs of checkpoints stay where they are."""


def set_num_layers(nlayers: int) -> None:
    """Accepted without effect: inputs of checkpoints have no common buffer."""


def reset() -> None:
    """No effect: no state is kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **named: Any) -> Any:
    """``function(*args, **named)``, whose activations are recomputed in the backward pass (Chen et al., arXiv
    1604.06174), with the same random numbers. ``use_reentrant`` has no effect."""
    on_host = _settings is not None and _settings.cpu_checkpointing
    pinned = torch.cuda.is_available()
    with torch.autograd.graph.save_on_cpu(pinned) if on_host else nullcontext():
        return torch_checkpoint(function, *args, use_reentrant=False, **named)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """:func:`checkpoint` under the name that Megatron-DeepSpeed calls."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """``function(*args)``, recomputed in the backward pass; ``all_outputs`` receives the results too."""
        result = checkpoint(function, *args)
        all_outputs += result if isinstance(result, tuple) else [result]
        return result
