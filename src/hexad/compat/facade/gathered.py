"""Complete values of parameters that ZeRO 3 shards: to read, to change, and as a ``state_dict``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hexad.comm import broadcast
from hexad.config import HexadError

if TYPE_CHECKING:
    from hexad.engine.engine import Engine
    from hexad.parallel.data.buckets import Bucket

_engines: Any = WeakTensorKeyDictionary()
"""Parameter -> weak reference to its engine."""


def register(engine: Engine) -> None:
    """Record an engine as that of its parameters."""
    for bucket in engine.buckets:
        for declared in bucket.members:
            _engines[declared.parameter] = weakref.ref(engine)


@contextmanager
def gathered_parameters(
    params: nn.Module | Tensor | Iterable[Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """``deepspeed.zero.GatheredParameters``: complete values while inside, all ranks together.

    Args:
        params: of an engine; others are complete anyway.
        modifier_rank: the rank whose changes are kept; None if there are none.
        fwd_module: accepted without effect.
        enabled: False does nothing.
    """
    buckets = _buckets(params) if enabled else {}
    for engine in buckets.values() if modifier_rank is not None else ():
        mesh = engine.mesh
        if mesh.tensor.size * mesh.pipeline.size > 1 or modifier_rank not in range(mesh.layout.world):
            raise HexadError(
                f"GatheredParameters: found modifier_rank {modifier_rank} in a world of {mesh.layout.world} "
                "ranks; use one of them, and without tensor and pipeline ranks, which have other values"
            )
    for bucket, engine in buckets.items():
        engine.gatherer.acquire(bucket)
    try:
        yield
    finally:
        for bucket, engine in buckets.items():
            if modifier_rank is not None:
                _adopt(bucket, engine, modifier_rank)
            engine.gatherer.release(bucket)


def _buckets(params: Any) -> dict[Bucket, Engine]:
    if isinstance(params, nn.Module):
        raise HexadError("GatheredParameters: found a module; pass module.parameters()")
    wanted = dict.fromkeys([params] if isinstance(params, Tensor) else params)
    known = (_engines[parameter]() for parameter in wanted if parameter in _engines)
    engines = dict.fromkeys(engine for engine in known if engine is not None)
    return {
        bucket: engine
        for engine in engines
        for bucket in engine.buckets
        if any(declared.parameter in wanted for declared in bucket.members)
    }


@torch.no_grad()
def _adopt(bucket: Bucket, engine: Engine, rank: int) -> None:
    """Take over a rank's changes on all ranks."""
    assert bucket.whole is not None
    axis = engine.mesh.gradient_axis()
    if axis.size > 1:
        broadcast(bucket.whole, axis, axis.ranks.index(rank))
    bucket.adopt()
    bucket.publish()


_collects = False
"""Whether :func:`state_dict` is calling that of a module."""


def refuse_shards(*_: Any) -> None:
    """Refuse the ``state_dict`` of a module that ZeRO 3 shards: it would have placeholders.

    Raises:
        HexadError: unless :func:`state_dict` calls it.
    """
    if not _collects:
        raise HexadError(
            "state_dict: found ZeRO stage 3, which shards the values; call engine.module_state_dict() or "
            "engine.save_16bit_model() on all ranks"
        )


def state_dict(
    engine: Engine, module: nn.Module, exclude_frozen: bool = False, first_only: bool = False
) -> dict[str, Tensor]:
    """A module's ``state_dict`` with complete values on the host; all ranks together.

    Args:
        exclude_frozen: leave out parameters that are not trained.
        first_only: nothing on the other ranks, whose hosts hold no copy.
    """
    global _collects
    keeps = not (first_only and engine.mesh.rank)
    engine.gatherer.settle()
    values: dict[Tensor, Tensor] = {}
    for bucket in engine.buckets:
        engine.gatherer.acquire(bucket)
        for declared in bucket.members if keeps else ():
            values[declared.parameter] = declared.parameter.detach().to("cpu", copy=True)
        engine.gatherer.release(bucket)
    state: dict[str, Any] = {}
    _collects = True
    try:
        held = module.state_dict(keep_vars=True) if keeps else {}
    finally:
        _collects = False
    for name, value in held.items():
        frozen = isinstance(value, nn.Parameter) and not value.requires_grad
        if not (frozen and exclude_frozen):
            state[name] = values[value] if value in values else value.detach().to("cpu", copy=True)
    return state
