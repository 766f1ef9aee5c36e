"""Whether ranks that should hold the same values do: a hash of the bits of every weight is compared."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.comm import all_reduce, gather_objects
from hexad.config import AgreedError
from hexad.topology.mesh import Axis

from ..rectangle import Rectangle
from .buckets import Bucket, Shardings

_BLOCK = 1 << 20
"""Elements hashed at a time."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x3C6EF372FE94F82A  # twice SplitMix64's increment: times an index and plus one it is odd


@dataclass(frozen=True)
class Replicas:
    """The replicated weights of a rank.

    Attributes:
        sharding: among which ranks the state is sharded.
        ties: by name, the ranks that hold copies of the same parameters for several stages.
        world: all ranks.
    """

    buckets: Sequence[Bucket]
    sharding: Shardings
    ties: Mapping[str, Axis]
    world: Axis
    device: torch.device

    @torch.no_grad()
    def check(self) -> None:
        """Compare all replicas; every rank calls this together, while no values are gathered.

        Raises:
            AgreedError: a weight differs, naming it and the ranks; the same on every rank.
        """
        different: dict[Rectangle, int] = {}
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
                different |= {r: int(h) for (r, h), bad in zip(hashes.items(), wrong) if bad}
        differences = torch.tensor(len(different), device=self.device)
        if int(all_reduce(differences, self.world, "max")):
            raise AgreedError(_report(gather_objects(different, self.world)))

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


def _report(by_rank: Sequence[dict[Rectangle, int]]) -> str:
    """The ranks that differ from most replicas, or from the first, of the first weights that differ."""
    lines = []
    rectangles = dict.fromkeys(rectangle for digests in by_rank for rectangle in digests)
    for rectangle in list(rectangles)[:3]:
        held = {rank: digests[rectangle] for rank, digests in enumerate(by_rank) if rectangle in digests}
        common = Counter(held.values()).most_common(1)[0][0]
        right = next(rank for rank, value in held.items() if value == common)
        wrong = [str(rank) for rank, value in held.items() if value != common]
        ranks = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(wrong[:8])}"
        lines.append(f"{rectangle.name} on {ranks} differs from that on rank {right}")
    more = f", and {len(rectangles) - 3} more" if len(rectangles) > 3 else ""
    return (
        f"replicas differ: {'; '.join(lines)}{more} (log.check_replicas); most often a fault of memory or of "
        "a link: resume from an earlier checkpoint, without that host if it happens again"
    )
