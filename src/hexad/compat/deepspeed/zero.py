"""``deepspeed.zero``: creating, reading and changing modules whose parameters are sharded."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, IntEnum, StrEnum
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hexad.comm import broadcast
from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.parallel.data.buckets import Bucket
from hexad.parallel.sharding import Guarded

from .config import read_json
from .keys import Zero

_owners: Any = WeakTensorKeyDictionary()
"""Parameter -> weak references to its engine and its bucket."""


def register(engine: Engine) -> None:
    """Record an engine as that of its parameters."""
    for bucket in engine.buckets:
        for declared in bucket.members:
            _owners[declared.parameter] = weakref.ref(engine), weakref.ref(bucket)


def owner_of(parameter: Tensor) -> tuple[Engine, Bucket] | None:
    """The engine and the bucket that a parameter belongs to; None if there are none."""
    references = _owners.get(parameter)
    if references is None or references[0]() is None:
        return None
    return references[0](), references[1]()


@contextmanager
def GatheredParameters(
    params: Tensor | Iterable[Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Complete values of parameters while inside; all ranks together.

    Args:
        params: of an engine; others are complete anyway.
        modifier_rank: the rank whose changes are kept; None if there are none.
        fwd_module: accepted without effect.
        enabled: False does nothing.
    """
    if isinstance(params, nn.Module):
        raise HexadError("GatheredParameters: found a module; pass module.parameters()")
    tensors = [params] if isinstance(params, Tensor) else params
    parameters = [p for p in tensors if isinstance(p, Tensor)]  # transformers lists biases that are None
    found = dict.fromkeys(owner for p in parameters if (owner := owner_of(p)) is not None) if enabled else {}
    owners = sorted(found, key=lambda owner: owner[0].buckets.index(owner[1]))  # the same on all ranks
    for engine, _ in owners if modifier_rank is not None else ():
        mesh = engine.mesh
        if mesh.tensor.size * mesh.pipeline.size > 1 or modifier_rank not in range(mesh.layout.world):
            raise HexadError(
                f"GatheredParameters: found modifier_rank {modifier_rank} in a world of {mesh.layout.world} "
                "ranks; use one of them, and without tensor and pipeline ranks, which have other values"
            )
    for engine, bucket in owners:
        engine.gatherer.acquire(bucket)
    try:
        yield
    finally:
        for engine, bucket in owners:
            if modifier_rank is not None:
                _adopt(bucket, engine, modifier_rank)
            engine.gatherer.release(bucket)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """An engine whose parameters are complete while inside, so that it generates without gathering any."""
    with GatheredParameters(model.parameters()):
        yield model


@torch.no_grad()
def _adopt(bucket: Bucket, engine: Engine, rank: int) -> None:
    """Take over a rank's changes on all ranks."""
    assert bucket.whole is not None
    axis = engine.mesh.gradient_axis()
    if axis.size > 1:
        broadcast(bucket.whole, axis, axis.ranks.index(rank))
    bucket.adopt()
    bucket.publish()


class ZeroParamStatus(Enum):
    """Whether a parameter's values are complete on this rank."""

    AVAILABLE, NOT_AVAILABLE, INFLIGHT = 1, 2, 3


class Partitioned(nn.Parameter):
    """A module's parameter at ZeRO 3, with DeepSpeed's attributes.

    Attributes:
        ds_id: a number, different for all parameters of this process.
        ds_shape, ds_numel: of the complete values.
        ds_active_sub_modules: empty: a bucket counts for how many modules it is gathered.
    """

    ds_id: int
    ds_shape: torch.Size
    ds_numel: int
    ds_active_sub_modules: set[int]

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the values are complete on this rank now."""
        return ZeroParamStatus.NOT_AVAILABLE if isinstance(self, Guarded) else ZeroParamStatus.AVAILABLE

    @property
    def ds_persist(self) -> bool:
        """Whether the values are always complete on this rank."""
        owner = owner_of(self)
        return owner is None or owner[1].plan.resident

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's elements of the values, flat, perhaps none; all of a parameter that is not sharded."""
        owner = owner_of(self)
        if owner is None:
            return self.detach().view(-1)
        bucket = owner[1]
        values, low = bucket.held
        begin = bucket.offset_of(self) - low
        return values[max(begin, 0) : max(begin + self.ds_numel, 0)]


# Where state is offloaded to, and kinds of state of ``engine.offload_states``, which is refused
OffloadDeviceEnum = StrEnum("OffloadDeviceEnum", "none cpu nvme")
OffloadStateTypeEnum = StrEnum(
    "OffloadStateTypeEnum", "optim_states hp_params lp_params lp_grads contiguous_grad_buffer"
)


DeepSpeedZeroConfig = Zero


class ZeroStageEnum(IntEnum):
    """The levels of ``zero_optimization.stage``."""

    disabled, optimizer_states, gradients, weights = 0, 1, 2, 3
    max_stage = 3


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter is one of a module at ZeRO 3."""
    return isinstance(parameter, Partitioned)


_numbers = count()


@cache
def _partitioned(kind: type[nn.Parameter]) -> type[Partitioned]:
    return type(f"Partitioned{kind.__name__}", (Partitioned, kind), {})


class _ExternalParameters:
    """A module's ``ds_external_parameters``: those that it was registered for, by numbers."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._items = list(enumerate(parameters))

    def __call__(self) -> list[tuple[int, nn.Parameter]]:
        return self._items


class ParameterOffload:
    """A ZeRO 3 optimizer's ``parameter_offload``, whose hooks libraries remove while they generate, and
    register again. Here an engine keeps its hooks: complete values that are gathered stay where they are.

    Attributes:
        module: whose parameters are sharded.
        forward_hooks, backward_hooks: none that could be removed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def setup_zero_stage3_hooks(self, *_: Any, **__: Any) -> None:
        """No effect: the hooks are registered."""

    _register_deepspeed_module = _remove_module_hooks = destroy = setup_zero_stage3_hooks


DeepSpeedZeRoOffload = ParameterOffload


def mark_partitioned(module: nn.Module) -> None:
    """Give a module's parameters DeepSpeed's attributes, before an engine shards them."""
    parameter: Any
    for part in module.modules():
        external = _ExternalParameters(getattr(part, "external_parameters", ()))
        object.__setattr__(part, "ds_external_parameters", external)
    for parameter in module.parameters():
        if not isinstance(parameter, Partitioned):
            kind: type[nn.Parameter] = type(parameter)
            parameter.__class__ = _partitioned(kind)
            parameter.ds_id = next(_numbers)
            parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
            parameter.ds_active_sub_modules = set()


def read_empty(parameter: Tensor) -> Tensor:
    """What is read of a parameter that is not gathered: an empty tensor, as in DeepSpeed."""
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Gather another module's parameter too while ``module`` runs (ZeRO 3); call it before ``initialize``.
    Without it, the parameter is gathered when it is read, and stays until the backward pass is over."""
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
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
        for name, kind in kinds.items():
            section = tree.get(name)
            if isinstance(section, Mapping) and section.get("enabled") is True:
                dtype = kind  # what is wrong in the configuration is reported by initialize
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
