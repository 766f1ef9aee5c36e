"""Parameters gathered from the data ranks that keep a share of them.

In stages 1 and 2 every bucket is gathered once per step: its gathering starts as soon as its share has been
updated, and the next forward pass waits for it where it first needs it. In stage 3 matrices are there only
while their layer computes; the next layer's are gathered meanwhile (FSDP: Zhao et al., arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hexad.comm import Pending, all_gather_async

from .buckets import Bucket, units
from .pool import BufferPool
from .sharding import StateSharding


class ParameterGatherer:
    """Sees to it that parameters are there when a module computes.

    Args:
        stages: of this rank, by number; the modules get hooks.
        buckets: with all their parameters.
        sharding: among which ranks to gather.
        pool: buffers for parameters that come and go.
        hooks: wait for parameters where modules need them; otherwise whoever calls these calls :meth:`settle`
            before (compiled modules, whose graphs hooks would break). Not in stage 3.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        buckets: Sequence[Bucket],
        sharding: StateSharding,
        pool: BufferPool,
        hooks: bool = True,
    ) -> None:
        self._shards = sharding.shards
        self._pool = pool
        self._gathering: dict[Bucket, Pending] = {}
        if sharding.stage == 0 or not hooks:
            return
        owner = {declared.parameter: bucket for bucket in buckets for declared in bucket.members}
        for model in stages.values():
            found = [_Unit(module, owner) for module in units(model)]
            coming = [unit for unit in found if unit.absent]
            for unit, after in pairwise(coming):
                unit.after = after
                after.before = unit if unit.block else None
            for unit in found:
                unit.module.register_forward_pre_hook(self._entering(unit))
                if unit.absent:
                    unit.module.register_forward_hook(self._leaving(unit))

    def publish(self, bucket: Bucket) -> None:
        """Hand the bucket's new master values to all ranks that need them."""
        self._renew(bucket)
        bucket.publish()
        if bucket.resident and self._shards.size > 1:
            self._gathering[bucket] = all_gather_async(bucket.source, self._shards, out=bucket.whole)

    def settle(self) -> None:
        """Wait for everything that is being gathered."""
        for bucket in list(self._gathering):
            self._renew(bucket)

    def _renew(self, bucket: Bucket) -> None:
        """Forget values that are there, or on their way, but not for good."""
        self._arrive(bucket)
        if not bucket.resident and bucket.whole is not None:
            self._pool.give(bucket, bucket.detach())

    def _start(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.whole is None and bucket not in self._gathering:
                buffer = self._pool.take(bucket, bucket.members[0].parameter.dtype)
                share = bucket.share(buffer).copy_(bucket.source)
                self._gathering[bucket] = all_gather_async(share, self._shards, out=buffer)

    def _arrive(self, bucket: Bucket) -> None:
        pending = self._gathering.pop(bucket, None)
        if pending is not None:
            whole = pending.wait()
            if not bucket.resident:
                bucket.attach(whole)

    def _fetch(self, unit: _Unit, ahead: _Unit | None) -> None:
        self._start(unit.absent)
        if ahead is not None:
            self._start(ahead.absent)
        for bucket in unit.buckets:
            self._arrive(bucket)

    def _release(self, unit: _Unit) -> None:
        for bucket in unit.absent:
            if bucket.whole is not None:
                self._pool.give(bucket, bucket.detach())

    def _return(self, unit: _Unit) -> None:
        """Backward reaches a layer: the one after it is done, the one before it is next."""
        if unit.after is not None:
            self._release(unit.after)
        self._fetch(unit, unit.before)

    def _entering(self, unit: _Unit) -> Any:
        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            self._fetch(unit, unit.after)
            inputs = arguments[0]
            if unit.absent and unit.block and inputs.requires_grad:
                inputs.register_hook(lambda _: self._release(unit))  # its own backward is over

        return enter

    def _leaving(self, unit: _Unit) -> Any:
        def leave(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> None:
            self._release(unit)
            if unit.block and output.requires_grad:
                output.register_hook(lambda _: self._return(unit))

        return leave


class _Unit:
    """Parameters that are needed together.

    Attributes:
        buckets: that hold them.
        absent: those of the buckets that are not always there.
        block: a transformer layer, which needs its weights in the backward pass too. Embeddings do not, and
            the head computes its gradients in the forward pass.
        after, before: the unit to fetch meanwhile, in the forward and in the backward pass.
    """

    def __init__(self, module: nn.Module, owner: Mapping[nn.Parameter, Bucket]) -> None:
        self.module = module
        self.buckets = list(dict.fromkeys(owner[parameter] for parameter in module.parameters()))
        self.absent = [bucket for bucket in self.buckets if not bucket.resident]
        self.block = any(True for _ in module.children())
        self.after: _Unit | None = None
        self.before: _Unit | None = None
