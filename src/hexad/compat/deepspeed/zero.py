"""``deepspeed.zero``: creating and reading modules whose parameters are sharded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..facade.gathered import gathered_parameters as GatheredParameters
from .config import read_json

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather another module's parameter too while ``module`` runs (ZeRO 3); call it before ``initialize``."""
    module.external_parameters = [*getattr(module, "external_parameters", ()), parameter]  # type: ignore[assignment]


_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Any, *_: Any, **__: Any) -> Any:
    """``fn``: constructors of tensors are not replaced here. transformers looks for this name."""
    return fn


@contextmanager
def Init(
    module: Any = None,
    data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: str | Path | Mapping[str, Any] | None = None,
    config: Any = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: Any = None,
    **_: Any,
) -> Iterator[None]:
    """Create a module's parameters in the format they are trained in, in the host's memory.

    They are complete until ``initialize`` puts them into buckets and keeps this rank's shard: a host needs
    memory for one complete copy per rank for that time, a GPU for none.

    Args:
        config_dict_or_path, config: the configuration, whose fp16 or bf16 is the format.
        dtype: the format.
        enabled: False does nothing.
        module, data_parallel_group, mem_efficient_linear, remote_device, pin_memory, mpu: accepted without
            effect.
    """
    if not enabled:
        yield
        return
    source = config_dict_or_path if config_dict_or_path is not None else config
    if dtype is None and source is not None:
        tree = read_json(source)
        for names, kind in ((("fp16",), torch.float16), (("bf16", "bfloat16"), torch.bfloat16)):
            if any((tree.get(name) or {}).get("enabled") is True for name in names):
                dtype = kind
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
