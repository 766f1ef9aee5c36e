"""Seconds of single operations of a job's ranks on a cluster. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hexad.parallel.inventory import Collective, Pass, Product
from hexad.topology.hardware.constants import Format

from .implementation import Implementation
from .job import Job
from .kernels import Kernels
from .links import Cluster, CollectiveKind, Group

DOMAIN, NETWORK = "domain", "network"
"""Links: among the devices of a domain, and between domains."""


_SECOND = 1.75
"""Time of FlashAttention 2 on a Hopper GPU, in that of a kernel made for it: 1.5 to 2 forward, 1.5 to 1.75
backward (Shah et al., FlashAttention-3, arXiv 2407.08608)."""


class RankRates:
    """Seconds of operations, as :class:`~hexad.planning.timeline.OperationTimes` says.

    Args:
        job: whose operations they are.
        cluster: on which it runs.
        implementation: of what computes it.
    """

    def __init__(self, job: Job, cluster: Cluster, implementation: Implementation) -> None:
        self.job, self.cluster, self.implementation = job, cluster, implementation
        constants = cluster.hardware.constants
        self.kernels = Kernels(cluster.hardware, in_step=True)
        taken = constants.overlap.multiprocessors / cluster.hardware.multiprocessors
        self.taken = min(0.5, taken)
        host = constants.host
        started = 0.0 if implementation.graphs else 1e-6
        self.operator_seconds = host.operator_us * started * implementation.calls * implementation.kernels
        self.collective_seconds = host.collective_us * started * implementation.collective_calls
        self.aside, self.beside = implementation.aside, implementation.tensor == "overlapped"
        self._products: dict[Product, float] = {}
        self._collectives: dict[tuple[str, str, int], tuple[float, str]] = {}

    def product(self, product: Product) -> float:
        """Seconds of matrix products; a weight gradient is added to its sum."""
        plain = product._replace(aside=False)
        seconds = self._products.get(plain)
        if seconds is None:
            seconds = self._products[plain] = self._product(plain)
        return seconds

    def _product(self, product: Product) -> float:
        run, weights = self.job.run, product.action == "W"
        result = 2.0 * run.gradient if weights else float(run.byte)
        format_ = self._format(product)
        seconds = self.kernels.product(
            product.m,
            product.n,
            product.k,
            format_,
            groups=product.groups,
            divided="k" if weights else "m",
            result_bytes=result,
        )
        if format_ == self.job.eight and not weights:
            # A weight's gradient is computed from operands that were converted for the other two products.
            converting = self.kernels.quantising(product.m, product.k, format_)
            seconds += self.implementation.quantise * converting / self.implementation.products
        # Those of a layer's input gradient are as large as those of its forward pass.
        repeated = 1 + self.job.repeated if product.action == "B" and not product.again else 1.0
        return seconds * product.times * repeated * self.implementation.products

    def _format(self, product: Product) -> Format:
        run = self.job.run
        if product.eight and (product.action != "W" or run.fp8_weight_gradients):
            return self.job.eight
        byte = run.wide if product.wide else run.byte
        return "bf16" if byte == 2 else "fp32" if byte == 4 else "fp64"

    def attention(self, products: Sequence[Product]) -> float:
        """Seconds of a fused attention kernel. Windows and documents count as fewer heads."""
        scores, run = products[0], self.job.run
        width, length = scores.k, scores.m
        value = next((product.n for product in products if product.n != length), width)
        forward = scores.action == "F"
        heads = sum(product.flops for product in products) / length**2
        heads /= (width + value) if forward else (3 * width + 2 * value)
        format_: Format = "bf16" if run.byte == 2 else "fp32" if run.byte == 4 else "fp64"
        if self.implementation.unfused:
            return self._unfused(forward, heads, length, width, value, format_)
        if self.job.eight_attention:
            format_ = "fp8"
        seconds = self.kernels.attention(
            "forward" if forward else "backward", heads, length, width, format_, value_width=value
        )
        if not forward and self.job.attention_again:
            seconds += self.kernels.attention("forward", heads, length, width, format_, value_width=value)
        if self.implementation.flash == "second" and self.cluster.hardware.capability >= (9, 0):
            seconds *= _SECOND
        return seconds * self.implementation.attention

    def _unfused(
        self, forward: bool, heads: float, length: int, width: int, value: int, format_: Format
    ) -> float:
        """Seconds of attention whose scores are in memory, of all pairs: batched products, masks, softmax,
        dropout."""
        count, product = max(1, round(heads)), self.kernels.product
        once = product(count * length, length, width, format_, groups=count)
        once += product(count * length, value, length, format_, groups=count)
        once *= self.implementation.products
        moved = self.kernels.passes(heads * length**2 * self.implementation.scores, 3)
        times = 1 if forward else 3 if self.job.attention_again else 2
        return times * (once + moved)

    def passes(self, function: Pass) -> float:
        """Seconds of passes over memory."""
        factors = self.implementation
        kernels = round(function.kernels * factors.kernels)
        nbytes = function.nbytes * factors.passes
        nbytes *= 1.0 if self.job.run.compiled else factors.uncompiled
        return self.kernels.passes(nbytes, kernels, self.job.run.byte == 2)

    def collective(self, collective: Collective) -> tuple[float, str]:
        """Seconds of a collective, and the link that it occupies."""
        key = collective.axis, collective.operation, collective.nbytes
        if key not in self._collectives:
            self._collectives[key] = self._collective(*key)
        return self._collectives[key]

    def _collective(self, axis: str, operation: str, nbytes: int) -> tuple[float, str]:
        group = self.groups[axis]
        link = DOMAIN if group.domains == 1 else NETWORK
        if operation == "exchange":  # a message in every round
            rounds = max(1, group.size - 1)
            pair = Group(2, 2, 1) if group.domains == 1 else Group(2, 1, 2)
            return self._slower(rounds * self.cluster.seconds("send", nbytes / rounds, pair)), link
        kind: CollectiveKind = operation  # type: ignore[assignment]
        return self._slower(self.cluster.seconds(kind, nbytes, group)), link

    def _slower(self, seconds: float) -> float:
        return seconds * self.implementation.collectives

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The ranks of collectives, by axis."""
        layout, domain, run = self.job.layout, self.cluster.domain_size, self.job.run
        groups = {axis: self.cluster.group(layout, axis) for axis in ("tensor", "context", "data")}
        groups["gradient"] = self.cluster.group(layout, "context", "data")
        groups["expert"] = self.cluster.group(layout, "expert_tensor", "expert")
        groups["expert_data"] = self.cluster.group(layout, "expert_data")
        groups["pipeline"] = self.cluster.group(layout, "pipeline")
        for grid, axes in (("dense", ("context", "data")), ("expert", ("expert_data",))):
            shards = self.job.shards(grid)  # type: ignore[arg-type]
            split = Group.split(layout, axes, shards, domain)
            groups[f"shards of {grid}"], groups[f"replicas of {grid}"] = split
        digits = layout.digits("context")
        if digits:
            ((_, stride),) = digits
            groups["ulysses"] = Group.strided(run.ulysses, stride, domain)
            groups["ring"] = Group.strided(run.ring, stride * run.ulysses, domain)
        return groups

    @cached_property
    def places(self) -> tuple[object, ...]:
        """All that the time of a layer's operations depends on, besides the operations."""
        axes = ("tensor", "ring", "ulysses", "expert")
        return (
            self.job.run,
            self.job.attention_again,
            self.job.repeated,
            self.job.eight,
            self.job.eight_attention,
            *(self.groups.get(axis) for axis in axes),
        )

    def message(self, nbytes: int) -> float:
        """Seconds of a message to the next pipeline rank."""
        layout, run = self.job.layout, self.job.run
        if layout.pipeline == 1:
            return 0.0
        ((_, stride),) = layout.digits("pipeline")
        pair = Group.strided(2, stride, self.cluster.domain_size)
        if self.implementation.scattered and layout.tensor > 1 and not run.sequence:
            gather = self.cluster.seconds("all_gather", nbytes, self.groups["tensor"])
            return self.cluster.seconds("send", nbytes / layout.tensor, pair) + gather
        return self.cluster.seconds("send", nbytes, pair)
