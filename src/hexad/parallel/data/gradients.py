"""Gradients accumulated in buckets and summed over the data ranks while backward still runs.

A bucket's reduction starts as soon as its last gradient is complete, as in PyTorch DDP (Li et al., arXiv
2006.15704), Megatron's distributed optimizer and ZeRO (arXiv 1910.02054). Gradients are *summed*: the loss is
already divided by the global number of target tokens.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hexad.comm import (
    Pending,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    reduce_scatter_async,
    streams,
)
from hexad.comm.memory import same_place
from hexad.config import HexadError
from hexad.topology.mesh import Axis

from ..contributions import Contribution, Dense, WeightGradient, attach, detach
from .buckets import Bucket, BufferPool, Shardings
from .ordering import Rounds

Deferred = deque[tuple[Tensor, WeightGradient]]
"""Parameters, and products that are missing from their gradients."""


class Gradients:
    """The gradients of this rank's pipeline stages.

    Every parameter's contributions of a step are added up in its bucket: weight gradients of linear layers
    are multiplied straight into it, and the first contribution overwrites it, so that it is never zeroed.
    In ZeRO 0 and 1 a bucket is reduced once per step; in ZeRO 2 and 3 its gradients exist from the first
    contribution of a microbatch to the last one only, and this rank's shard of their sum is added up.

    Args:
        buckets: of this rank's pipeline stages.
        sharding: over which data ranks to reduce, and what remains here.
        axes: by name, those over which gradients may be partial.
        ties: by name, the ranks that hold copies of the same parameters for several stages.
        pool: buffers for gradients that are not kept.
        reduced: number format in which they are sent and reduced.
        extends: accept more backward passes than announced, of any graph, the same on all data ranks.
        factor: what contributions are multiplied by, such as 1 / ranks for means.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        sharding: Shardings,
        axes: Mapping[str, Axis],
        ties: Mapping[str, Axis],
        pool: BufferPool,
        reduced: torch.dtype,
        extends: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.extends, self.factor = extends, factor
        self._buckets, self._sharding, self._axes, self._ties = buckets, sharding, axes, ties
        self._pool, self._format = pool, reduced
        turns = any(declared.given for bucket in buckets for declared in bucket.members)
        beside = not all(self._in_place(bucket) for bucket in buckets if bucket.plan.keeps_gradients)
        self._rounds = Rounds([bucket.plan for bucket in buckets], self, beside, turns=turns)
        self._reducing: dict[int, deque[tuple[Pending | None, Tensor, bool]]] = {}
        self._summing: list[tuple[Pending, Tensor]] = []
        self._deferred: Deferred | None = None
        self._aside: Deferred = deque()
        self._extended, self._later = False, dict[int, Tensor]()
        self._places: dict[Tensor, tuple[int, int]] = {}
        self._attached = {}
        for number, bucket in enumerate(buckets):
            for member, declared in enumerate(bucket.members):
                self._places[declared.parameter] = number, member
                hook = attach(declared.parameter, self, direct=not declared.given)
                self._attached[declared.parameter] = hook

    def detach(self) -> None:
        """Leave the parameters' gradients to autograd from now on."""
        while self._attached:
            detach(*self._attached.popitem())

    # For layers

    @property
    def deferring(self) -> bool:
        """Whether products are kept for later instead of computed."""
        return self._deferred is not None

    def contribute(self, parameter: Tensor, contribution: Contribution, last: bool = True) -> None:
        """Add to a parameter's gradient, ``last`` unless further parts of the contribution follow; a product
        is kept for later while :meth:`defer` is in force."""
        if self._deferred is not None and isinstance(contribution, WeightGradient):
            self._deferred.append((parameter, contribution))
            return
        if self.factor != 1:
            contribution = contribution.scaled(self.factor)
        number, member = self._places[parameter]
        fresh = self._rounds.fresh(number, member)  # first: it may extend the step
        contribution.add_to(self._buckets[number].views(self._whole(number))[member], fresh)
        self._rounds.added(number, member, last)

    def set_aside(self, parameter: Tensor, product: WeightGradient) -> None:
        """Keep a product until :meth:`compute_aside`, at most to the end of the backward pass under way.

        While products are deferred, a product whose gradient is not kept over the step (ZeRO 2 and 3) is
        deferred like the others: its bucket would have a buffer from here to the end of ``W``.
        """
        bucket = self._buckets[self._places[parameter][0]]
        if self._deferred is not None and not bucket.plan.keeps_gradients:
            self._deferred.append((parameter, product))
            return
        if not self._aside and self._deferred is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.compute_aside)
        self._aside.append((parameter, product))

    def compute_aside(self) -> None:
        """Compute the products that were set aside, also while others are deferred: the device would only
        wait for a collective."""
        if not self._aside:
            return
        deferred, self._deferred = self._deferred, None
        try:
            with torch.no_grad():
                while self._aside:
                    self.contribute(*self._aside.popleft())
        finally:
            self._deferred = deferred

    @contextmanager
    def defer(self) -> Iterator[Deferred]:
        """Keep products for later while inside; yields where they are collected.

        A backward pass inside computes gradients of activations, and of weights only what has been set aside
        and fits beside a collective: the pipeline's ``B``, to which :meth:`compute_deferred` is the ``W``
        (Qi et al., arXiv 2401.10241).
        """
        self._deferred = deque()
        try:
            yield self._deferred
            self._deferred += self._aside
        finally:
            self._aside.clear()
            self._deferred = None

    @torch.no_grad()
    def compute_deferred(self, products: Deferred) -> None:
        """Compute deferred products, first come first served, and give up their operands one by one.

        Divided inputs are gathered one product ahead, while the one before is computed, and once for all
        products of the same ones.
        """
        gathering = _gather(products[0][1]) if products else None
        while products:
            parameter, product = products.popleft()
            inputs = product.inputs if gathering is None else gathering.wait()
            if not products or not _same_inputs(products[0][1], product):
                gathering = _gather(products[0][1]) if products else None
            self.contribute(parameter, product._replace(inputs=inputs, gather=None))

    # For the step

    def begin(self, microbatches: int | None) -> None:
        """Start a step in which every parameter is contributed to by this many microbatches, or (None) by any
        number, whose gradients are kept and reduced at the end.

        What an interrupted step has left behind is thrown away.
        """
        self._aside.clear()
        self._rounds.begin(microbatches)
        self._wait()
        self._extended = False
        for number in list(self._later):
            self._pool.give(self._buckets[number], self._later.pop(number))
        for bucket in self._buckets:
            if not bucket.plan.keeps_gradients and bucket.gradients is not None:
                self._pool.give(bucket, bucket.gradients)
                bucket.gradients = None

    def extend(self) -> None:
        """Accept one microbatch more than :meth:`begin` announced, whose gradients are reduced by themselves
        and added."""
        self._rounds.extend()
        self._wait()
        self._extended = True

    @property
    def contributed(self) -> bool:
        """Whether anything has been contributed in this step."""
        return self._rounds.contributed()

    @property
    def missing(self) -> int:
        """Backward passes that :meth:`begin` was called with and that contributed to no parameter; 0 where
        their number is open, or with :attr:`extends`."""
        return 0 if self.extends else self._rounds.missing()

    def finish(self) -> None:
        """Reduce what has not been reduced yet and wait for everything; a gradient that nothing contributed
        to is zero."""
        self._rounds.finish()
        self._wait()
        # Last, so that those who share a parameter end with the same bits, whatever the order in which their
        # data ranks were added up.
        for bucket in self._buckets:
            for name in sorted(bucket.traits.partial):
                all_reduce(bucket.gradient, self._axes[name])
        # In one order on all ranks, whatever that of their stages is.
        for bucket in sorted(self._buckets, key=lambda bucket: bucket.traits.tied):
            if bucket.traits.tied:
                all_reduce(bucket.gradient, self._ties[bucket.traits.tied])

    def _wait(self) -> None:
        for pending, gradient in self._summing:
            total = pending.wait()
            if not same_place(total, gradient):
                gradient.copy_(total)
        self._summing.clear()

    def _whole(self, number: int) -> Tensor:
        bucket = self._buckets[number]
        later = bucket.plan.keeps_gradients and not self._rounds.first(number)
        if later:  # those of the step stay as they are
            if number not in self._later:
                self._later[number] = self._pool.take(bucket, bucket.gradient.dtype)
            return self._later[number]
        if bucket.gradients is None:
            bucket.gradients = self._pool.take(bucket, bucket.gradient.dtype)
        return bucket.gradients

    # As Rounds decides

    def overrun(self) -> None:
        """Extend the step by another backward pass.

        Raises:
            HexadError: unless :attr:`extends`.
        """
        if not self.extends:
            raise HexadError(
                "gradients: found more backward passes than begin was called with; call begin(microbatches) "
                "before each step, with the number of its backward passes"
            )
        self.extend()

    def start(self, number: int, first: bool, last: bool, absent: Sequence[int]) -> None:
        """Start reducing a bucket."""
        bucket, gradients = self._buckets[number], self._whole(number)
        for member in absent:
            bucket.views(gradients)[member].zero_()
        shards, replicas = self._axes_of(bucket)
        sent = self._narrowed(gradients, shards)
        # The first shard of a step is written where it belongs, later ones are added to it.
        out = bucket.gradient if first and sent.dtype == bucket.gradient.dtype else None
        pending: Pending | None = reduce_scatter_async(sent, shards, out)
        if self._in_place(bucket) and last and not self._extended and 1 not in (shards.size, replicas.size):
            # A device sums over replicas when it has summed over shards: the computation waits for neither.
            assert pending is not None
            with streams.of(gradients.device).beside(streams.REPLICAS):
                self._summing.append((all_reduce_async(pending.wait(), replicas), bucket.gradient))
            pending = None
        self._reducing.setdefault(number, deque()).append((pending, gradients, first))
        if not bucket.plan.keeps_gradients:
            bucket.gradients = None
        self._later.pop(number, None)

    def retire(self, number: int, last: bool) -> None:
        """Wait for a bucket's oldest reduction."""
        bucket = self._buckets[number]
        pending, gradients, first = self._reducing[number].popleft()
        if pending is None:
            return  # the sum over replicas follows it
        shard, replicas = pending.wait(), self._axes_of(bucket)[1]
        if self._extended:  # what there was is the sum of all replicas already
            shard = all_reduce(self._narrowed(shard, replicas).contiguous(), replicas)
        if not same_place(shard, bucket.gradient):
            Dense(shard).add_to(bucket.gradient, first)
        if bucket.gradients is not gradients:
            self._pool.give(bucket, gradients)
        if last and not self._extended:
            sent = self._narrowed(bucket.gradient, replicas)
            self._summing.append((all_reduce_async(sent, replicas), bucket.gradient))

    def _in_place(self, bucket: Bucket) -> bool:
        """Whether gradients that are kept are summed where they are: by devices, unless a copy in another
        format is sent."""
        kept = bucket.plan.keeps_gradients and bucket.gradient.dtype == self._format
        return kept and not self._axes_of(bucket)[0].on_host

    def _axes_of(self, bucket: Bucket) -> tuple[Axis, Axis]:
        """The ranks that hold other shards of a bucket, and those that hold the same one."""
        sharding = self._sharding[bucket.traits.grid]
        return sharding.shards, sharding.replicas

    def _narrowed(self, gradients: Tensor, axis: Axis) -> Tensor:
        """Gradients in the format in which they are sent; unchanged where nothing is sent."""
        return gradients if axis.size == 1 else gradients.to(self._format)


def _gather(product: WeightGradient) -> Pending | None:
    return None if product.gather is None else all_gather_async(product.inputs, product.gather)


def _same_inputs(product: WeightGradient, other: WeightGradient) -> bool:
    """Whether both are products of the same inputs, gathered alike: of a stream divided over tokens, one
    layer may multiply the rows of all ranks, another this rank's."""
    return product.gather is other.gather and same_place(product.inputs, other.inputs)
