"""Whether ranks that should hold the same values do: a hash of the bits of every weight is compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.comm import all_reduce, merged
from hexad.config import AgreedError
from hexad.topology.mesh import Axis

from ..rectangle import Rectangle
from .buckets import Bucket, Shardings

_BLOCK = 1 << 20
"""Elements hashed at a time."""
_MOST_WEIGHTS, _MOST_VALUES, _MOST_RANKS = 100, 64, 8
"""Limits of the report on weights that differ, so that a report does not grow with the world."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x3C6EF372FE94F82A  # twice SplitMix64's increment: times an index and plus one it is odd


Differences = dict[Rectangle, dict[int, tuple[int, tuple[int, ...]]]]
"""The hashes of weights that differ: of each, how many ranks hold it, and the lowest of these."""


@dataclass(frozen=True)
class Replicas:
    """The replicated weights of a rank.

    Attributes:
        sharding: among which ranks the state is sharded.
        ties: by name, the ranks that hold copies of the same parameters for several stages.
        world: all ranks, which agree by its tree.
    """

    buckets: Sequence[Bucket]
    sharding: Shardings
    ties: Mapping[str, Axis]
    world: Axis

    @torch.no_grad()
    def check(self) -> None:
        """Compare all replicas; every rank calls this together, while no values are gathered.

        Raises:
            AgreedError: a weight differs, naming it and the ranks; the same on every rank.
        """
        different: Differences = {}
        for axes, buckets in self._groups():
            hashes = {
                rectangle: _hash(values)
                for bucket in buckets
                for rectangle, _, values in bucket.weights(*bucket.held)
            }
            if not hashes:
                continue
            mine = torch.stack(list(hashes.values()))
            # The largest hash and, of the complements, the smallest in one reduction.
            both = torch.cat((mine, ~mine))
            for axis in axes:
                both = all_reduce(both, axis, "max")
            largest, smallest = both[: len(mine)], ~both[len(mine) :]
            if not torch.equal(largest, smallest):
                wrong = (largest != smallest).tolist()
                different |= {
                    r: {int(h): (1, (self.world.rank,))} for (r, h), bad in zip(hashes.items(), wrong) if bad
                }
        different = merged(different, self.world, _merge)
        if different:
            raise AgreedError(_report(different))

    def _groups(self) -> list[tuple[list[Axis], list[Bucket]]]:
        """Buckets by the axes along which ranks hold the same, in an order that is the same on all these."""
        groups: dict[tuple[object, ...], tuple[list[Axis], list[Bucket]]] = {}
        for bucket in self.buckets:
            traits, sharding = bucket.traits, self.sharding[bucket.traits.grid]
            axes = [sharding.replicas, *([sharding.shards] if bucket.plan.resident else [])]
            axes += sharding.copies(traits)
            axes += [self.ties[traits.tied]] if traits.tied else []
            axes = [axis for axis in axes if axis.size > 1]
            key = (traits.grid, bucket.plan.resident, *sorted(traits.divided), traits.tied)
            if axes:
                groups.setdefault(key, (axes, []))[1].append(bucket)
        return [groups[key] for key in sorted(groups, key=repr)]


def _hash(values: Tensor) -> Tensor:
    """A 64-bit hash of bits and their order: any change of one element changes it. Sums of integers are the
    same in any order."""
    flat = values.reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _BLOCK):
        part = flat[start : start + _BLOCK].to(torch.int64)
        odd = torch.arange(start, start + len(part), device=flat.device).mul_(_FACTOR).add_(1)
        total += odd.mul_(part).sum()  # not the other way round: parts of 64-bit weights are the weights
    return total


def _merge(differences: Differences, other: Differences) -> Differences:
    """The differences that two sets of ranks have found: of the first weights by name, the values that the
    lowest ranks have."""
    both: Differences = {}
    for rectangle in sorted(differences.keys() | other.keys(), key=lambda r: (r.name, r.offset))[
        :_MOST_WEIGHTS
    ]:
        values = dict(differences.get(rectangle, {}))
        for value, (count, ranks) in other.get(rectangle, {}).items():
            before, lowest = values.get(value, (0, ()))
            values[value] = before + count, tuple(sorted(lowest + ranks)[:_MOST_RANKS])
        by_rank = sorted(values.items(), key=lambda item: item[1][1])
        both[rectangle] = dict(by_rank[:_MOST_VALUES])
    return both


def _report(different: Differences) -> str:
    """The ranks that differ from most replicas, or from the first, of the first weights that differ."""
    lines = []
    for rectangle, values in list(different.items())[:3]:
        common = max(values, key=lambda value: (values[value][0], -values[value][1][0]))
        right = values.pop(common)[1][0]
        wrong = sorted(rank for _, ranks in values.values() for rank in ranks)
        several = f"ranks {', '.join(map(str, wrong[:_MOST_RANKS]))}"
        ranks = f"rank {wrong[0]}" if len(wrong) == 1 else several
        lines.append(f"{rectangle.name} on {ranks} differs from that on rank {right}")
    least = "at least " if len(different) == _MOST_WEIGHTS else ""
    more = f", and {least}{len(different) - 3} more" if len(different) > 3 else ""
    return (
        f"replicas differ: {'; '.join(lines)}{more} (log.check_replicas); most often a fault of memory or of "
        "a link: resume from an earlier checkpoint, without that host if it happens again"
    )
