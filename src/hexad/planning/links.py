"""Seconds of a collective or a message as a function of its size and of where its ranks are.

A cluster is made of domains, inside which GPUs are connected by NVLink, and of a network between them. The
constants are those of a hardware file (:mod:`hexad.topology.hardware`). Times are those of a collective
alone; beside computation it takes ``constants.overlap.slowdown`` times as long. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, gcd, log2
from typing import Literal

from hexad.config import HexadError
from hexad.topology.hardware import CollectiveConstants, Hardware
from hexad.topology.hardware.constants import MeasuredCollective
from hexad.topology.layout import Layout

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
"""Operations as :func:`hexad.comm.sent_bytes` counts them; ``send`` is one message of its ``exchange``."""
_LIKE: dict[CollectiveKind, MeasuredCollective] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "all_gather",
    "send": "all_to_all",
}
"""The operation whose constants an operation uses."""


@dataclass(frozen=True)
class Group:
    """Ranks of a collective: how many, and where.

    Attributes:
        size: ranks.
        local: ranks in one domain; where domains have different numbers, the smallest, which sends the most
            through each of its network cards.
        domains: domains that have ranks of the group.
    """

    size: int
    local: int
    domains: int

    @classmethod
    def of_ranks(cls, ranks: Iterable[int], domain: int) -> Group:
        """Ranks by number, where ``domain`` neighbouring ranks are in one domain."""
        counts = Counter(rank // domain for rank in ranks)
        return cls(sum(counts.values()), min(counts.values()), len(counts))

    @classmethod
    def strided(cls, size: int, stride: int, domain: int) -> Group:
        """``size`` ranks, each ``stride`` after the one before, from rank 0."""
        aligned = cls._aligned(((size, stride),), domain)
        return aligned or cls.of_ranks(range(0, size * stride, stride), domain)

    @classmethod
    def of_axes(cls, layout: Layout, axes: Sequence[str], domain: int) -> Group:
        """The slowest of the groups along axes of a layout: where domains do not divide groups evenly, one in
        the most domains, and of those one with the fewest ranks in a domain. Lists ranks only then."""
        aligned = cls._aligned(layout.digits(*axes), domain)
        if aligned is not None:
            return aligned
        groups = {cls.of_ranks(ranks, domain) for ranks in layout.iter_groups(*axes)}
        return max(groups, key=lambda group: (group.domains, -group.local))

    @classmethod
    def split(cls, layout: Layout, axes: Sequence[str], size: int, domain: int) -> tuple[Group, Group]:
        """Two groups that divide those along axes, as :meth:`hexad.topology.mesh.Mesh.split` does: ``size``
        neighbouring ranks, and the ranks with one place in each such run. Both are the slowest of their kind
        (see :meth:`of_axes`)."""
        run: list[tuple[int, int]] = []
        across: list[tuple[int, int]] = []
        left, whole = size, True
        for degree, stride in layout.digits(*axes):
            inside = gcd(degree, left)
            run.append((inside, stride))
            across.append((degree // inside, stride * inside))
            left //= inside
            whole = whole and (inside == degree or left == 1)  # no digit is divided before the last one
        groups = cls._aligned(run, domain), cls._aligned(across, domain)
        if whole and None not in groups:
            return groups  # type: ignore[return-value]
        runs, places = set(), set()
        for ranks in layout.iter_groups(*axes):
            runs |= {cls.of_ranks(ranks[i : i + size], domain) for i in range(0, len(ranks), size)}
            places |= {cls.of_ranks(ranks[place::size], domain) for place in range(size)}
        slowest = (max(groups, key=lambda group: (group.domains, -group.local)) for groups in (runs, places))
        return next(slowest), next(slowest)

    @classmethod
    def _aligned(cls, digits: Iterable[tuple[int, int]], domain: int) -> Group | None:
        """The group of (degree, stride) pairs; None unless domains divide all such groups evenly."""
        size, local = 1, 1
        for degree, stride in digits:
            size *= degree
            if degree == 1 or stride % domain == 0:
                continue
            if domain % (degree * stride) == 0:
                local *= degree
            elif domain % stride == 0 and degree * stride % domain == 0:
                local *= domain // stride
            else:
                return None
        return cls(size, local, size // local)


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind.

    Args:
        hardware: the kind.
        gpus: how many.
        network: bytes per second that a GPU sends to other domains; None for the typical figure of the kind.
        domain: GPUs of one domain; None for the kind's.

    Raises:
        HexadError: a number that is not positive.
    """

    hardware: Hardware
    gpus: int
    network: float | None = None
    domain: int | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "network", "domain"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise HexadError(f"cluster: {name}: found {value}, expected a positive number")

    @property
    def domain_size(self) -> int:
        """GPUs of one domain."""
        return self.domain or self.hardware.domain

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second that collectives reach between domains, per GPU."""
        typical = self.hardware.network_gb_per_s * 1e9
        return (self.network or typical) * self.hardware.constants.network.efficiency

    def group(self, layout: Layout, *axes: str) -> Group:
        """The slowest of the groups along axes of a layout."""
        return Group.of_axes(layout, axes, self.domain_size)

    def seconds(self, operation: CollectiveKind, nbytes: float, group: Group) -> float:
        """Seconds of a collective, from its start on all ranks.

        Args:
            operation: which.
            nbytes: bytes of the *whole* tensor, as :func:`hexad.comm.sent_bytes` counts it: what all_reduce
                and broadcast hold, what all_gather returns, what reduce_scatter and all_to_all are given by
                one rank; of send, those of the message.
            group: its ranks; for send, the two.

        Raises:
            HexadError: a group that is larger than the cluster, or constants that are missing.
        """
        if group.size > self.gpus:
            raise HexadError(f"cluster: found a group of {group.size} ranks, but {self.gpus} GPUs")
        if group.size == 1 or nbytes <= 0:
            return 0.0
        constants = self._constants(_LIKE[operation])
        if group.domains == 1:
            return in_domain_seconds(operation, group.size, nbytes, constants)
        traffic = _traffic(operation, nbytes, group, constants.copies)
        latency = self.hardware.constants.network.latency_us
        start = (constants.start_us + latency + self._hops_us(operation, group, constants)) * 1e-6
        return start + max(_inside(traffic, constants), traffic.outside / self.network_bandwidth)

    def _hops_us(self, operation: CollectiveKind, group: Group, constants: CollectiveConstants) -> float:
        """Microseconds of the steps, of a ring or, where it is faster and NCCL has one, of a tree."""
        network, between = self.hardware.constants.network, group.domains - 1
        if operation == "send":
            return network.hop_us
        if operation == "all_to_all":  # messages of one domain's ranks leave it together
            return (group.local - 1) * constants.hop_us + between * network.hop_us
        ring = group.domains * (group.local - 1) * constants.hop_us + between * network.hop_us
        levels = ceil(log2(group.domains)) * network.tree_hop_us
        if operation == "all_reduce":
            return 2 * min(ring, (group.local - 1) * constants.hop_us + levels)
        return min(ring, levels) if group.local == 1 else ring

    def _constants(self, operation: MeasuredCollective) -> CollectiveConstants:
        known = self.hardware.constants.collectives
        if operation not in known:
            name = self.hardware.names[0]
            raise HexadError(
                f"{name}: constants.collectives.{operation} is missing in the hardware file; add it, or plan "
                "for one GPU"
            )
        return known[operation]


@dataclass(frozen=True)
class _Traffic:
    """Bytes that a rank sends inside its domain, and the steps of a ring there; bytes through its card."""

    inside: float
    steps: int
    outside: float


def _traffic(operation: CollectiveKind, nbytes: float, group: Group, copies: float) -> _Traffic:
    """The traffic of a collective, which every rank of a domain shares equally.

    NCCL's rings pass through all ranks of a domain and then leave it, one ring through each of its ranks'
    cards: all but the receiver's own part of a tensor that is gathered enters a domain, also what its other
    ranks hold. Inside, the rings of a reduce-scatter are the same in the opposite direction; an all-reduce is
    both.
    """
    size, local = group.size, group.local
    copied = copies * nbytes / size
    steps = local - 1
    if operation == "send":
        return _Traffic(nbytes if group.domains == 1 else 0.0, 1, nbytes)
    if operation == "broadcast":
        return _Traffic(nbytes if local > 1 else 0.0, steps, nbytes / local)
    if operation == "all_to_all":
        return _Traffic(nbytes * (local - 1) / size + copied, steps, nbytes * (size - local) / size)
    times = 2 if operation == "all_reduce" else 1
    inside = times * nbytes * (local - 1) / local + copied
    return _Traffic(inside, times * steps, times * nbytes * (size - 1) / size / local)


def _inside(traffic: _Traffic, constants: CollectiveConstants) -> float:
    """Seconds of sending inside a domain with the faster of two protocols."""
    simple = traffic.inside / (constants.gb_per_s * 1e9)
    return min(simple / constants.low_latency, simple + constants.switch_us * 1e-6)


def in_domain_seconds(
    operation: CollectiveKind, ranks: int, nbytes: float, constants: CollectiveConstants
) -> float:
    """Seconds of a collective of ranks in one domain; ``nbytes`` as of :meth:`Cluster.seconds`."""
    traffic = _traffic(operation, nbytes, Group(ranks, ranks, 1), constants.copies)
    start = (constants.start_us + traffic.steps * constants.hop_us) * 1e-6
    return start + _inside(traffic, constants)
