"""Complete values of parameters that ZeRO 3 shards: to read and to change."""

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


def owner_of(parameter: Any) -> tuple[Engine, Bucket] | None:
    """The engine and the bucket that a parameter belongs to; None if there are none."""
    engine: Engine | None = _engines[parameter]() if parameter in _engines else None
    if engine is None:
        return None
    buckets = (b for b in engine.buckets if any(d.parameter is parameter for d in b.members))
    return next(((engine, bucket) for bucket in buckets), None)


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
