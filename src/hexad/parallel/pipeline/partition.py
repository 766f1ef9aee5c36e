"""The division of layers into stages: contiguous, every layer exactly once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import isfinite
from typing import Literal, NamedTuple

from hexad.config import ConfigError, did_you_mean


@dataclass(frozen=True)
class LayerCosts:
    """Time of one microbatch, in any unit. All are finite and not negative.

    Attributes:
        embedding: of the token (and position) embedding, computed by the first stage besides its layers.
        layers: of each layer.
        head: of the last norm, the output head and the loss, computed by the last stage besides its layers.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float


def partition(
    split: Literal["cost", "even"] | Sequence[int], layers: int, stages: int, costs: LayerCosts
) -> tuple[range, ...]:
    """The global indices of each stage's layers, stage after stage.

    With one stage it holds all layers. Otherwise:

    - ``cost``: the time of the slowest stage is minimal. Among such divisions the sum of the stages' squared
      times is minimal, and of equal ones later stages have more layers: earlier ones hold more activations.
      The first and the last stage, which hold the embedding and the head, may have no layer.
    - ``even``: numbers of layers differ by at most one, for any ``costs``. The larger ones are just before
      the last stage, so that the stages with embedding and head are the last to get one more.
    - a list: the number of layers of each. The first and the last entry may be 0.

    ``stages`` counts those over all pipeline ranks, ``pipeline * virtual_stages``.

    Raises:
        ConfigError: too few layers for the stages, or a list that does not fit.
    """
    if stages < 1:
        raise ConfigError("parallel.pipeline", f"found {stages} stages, expected at least 1")
    if isinstance(split, str):
        sizes = _by_name(split, layers, stages, costs)
    else:
        sizes = _checked(list(split), layers, stages)
    bounds = list(accumulate(sizes, initial=0))
    parts = tuple(range(begin, end) for begin, end in pairwise(bounds))
    assert [layer for part in parts for layer in part] == list(range(layers)) and len(parts) == stages
    return parts


def _by_name(split: str, layers: int, stages: int, costs: LayerCosts) -> list[int]:
    if split not in ("cost", "even"):
        hint = did_you_mean(split, ("cost", "even"))
        raise ConfigError("parallel.split", f"found '{split}', expected cost, even or [layers, ...]{hint}")
    if stages == 1:
        return [layers]
    if split == "even":
        _check_enough(split, layers, stages, most=layers)
        count, extra = divmod(layers, stages)
        return [count + (stages - 1 - extra <= stage < stages - 1) for stage in range(stages)]
    _check_enough(split, layers, stages, most=layers + 2)
    return list(_by_cost(layers, stages, costs))


def _check_enough(split: str, layers: int, stages: int, most: int) -> None:
    if stages > most:
        need = "every stage" if split == "even" else "every stage but the first and the last"
        raise ConfigError(
            "parallel.pipeline",
            f"found {stages} stages (pipeline * virtual_stages) for {layers} layers, but {need} needs a "
            f"layer with split {split}; use at most {most} stages or more layers",
        )


def _checked(sizes: list[int], layers: int, stages: int) -> list[int]:
    if len(sizes) != stages:
        problem = f"it has {len(sizes)} entries, expected one for each of {stages} stages"
        raise ConfigError("parallel.split", f"found {sizes}: {problem} (pipeline * virtual_stages)")
    low = [stage for stage, size in enumerate(sizes) if size < (0 if stage in (0, stages - 1) else 1)]
    if low:
        problem = (
            f"stage {low[0]} has {sizes[low[0]]} layers, expected at least 1 (the first and last stage: 0)"
        )
        raise ConfigError("parallel.split", f"found {sizes}: {problem}")
    if sum(sizes) != layers:
        problem = f"its sum is {sum(sizes)}, expected model.layers, which is {layers}"
        raise ConfigError("parallel.split", f"found {sizes}: {problem}")
    return sizes


class _Ends(NamedTuple):
    """A kind of stage: from which ``starts[begin]`` and ``ends[end]`` its time is the difference.

    Layers ``begin`` to ``end - 1`` are the stage's, and it has at least ``fewest`` of them.
    """

    starts: list[int]
    ends: list[int]
    fewest: int


@lru_cache(maxsize=64)
def _by_cost(layers: int, stages: int, costs: LayerCosts) -> tuple[int, ...]:
    """Layers per stage, for at least two stages and enough layers."""
    assert len(costs.layers) == layers, f"{len(costs.layers)} costs for {layers} layers"
    embedding, *inner, head = _whole_numbers((costs.embedding, *costs.layers, costs.head))
    before = list(accumulate(inner, initial=0))
    first = _Ends([-embedding, *before[1:]], before, 0)
    last = _Ends(before, [cost + head for cost in before], 0)
    kinds = [first, *[_Ends(before, before, 1)] * (stages - 2), last]
    limit = _least_limit(kinds, embedding + before[-1] + head)
    return tuple(_balanced(kinds, limit))


def _least_limit(kinds: list[_Ends], total: int) -> int:
    """The least time that every stage can meet."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        if _furthest(kinds, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _furthest(kinds: list[_Ends], limit: int) -> list[int]:
    """The largest end of each stage's layers, all within ``limit``; empty if there is none.

    The largest end is never worse: costs are not negative.
    """
    layers = len(kinds[0].starts) - 1
    spare = sum(kind.fewest for kind in kinds)
    reached, begin = [], 0
    for kind in kinds:
        spare -= kind.fewest
        end = begin
        while end < layers - spare and kind.ends[end + 1] - kind.starts[begin] <= limit:
            end += 1
        if end - begin < kind.fewest or kind.ends[end] - kind.starts[begin] > limit:
            return []
        reached.append(end)
        begin = end
    return reached if begin == layers else []


def _balanced(kinds: list[_Ends], limit: int) -> list[int]:
    """The sizes with the least sum of squared times, every one within ``limit``: dynamic programming."""
    layers = len(kinds[0].starts) - 1
    unreachable = len(kinds) * limit * limit + 1
    best = [0, *[unreachable] * layers]
    choices = []
    for (starts, ends, fewest), furthest in zip(kinds, _furthest(kinds, limit)):
        after = [unreachable] * (layers + 1)
        chosen = [0] * (layers + 1)
        for end in range(fewest, furthest + 1):
            for begin in range(end - fewest, -1, -1):
                time = ends[end] - starts[begin]
                if time > limit:
                    break
                if best[begin] + time * time <= after[end]:
                    after[end], chosen[end] = best[begin] + time * time, begin
        choices.append(chosen)
        best = after
    assert best[layers] < unreachable
    bounds = [layers]
    for chosen in reversed(choices):
        bounds.append(chosen[bounds[-1]])
    return [end - begin for end, begin in pairwise(bounds)][::-1]


def _whole_numbers(values: Sequence[float]) -> list[int]:
    """``values`` in a unit in which all are integers: sums are exact, so that equal ones compare equal."""
    if not all(isfinite(value) and value >= 0 for value in values):
        raise ValueError(f"found costs {list(values)}, expected finite numbers from 0")
    ratios = [float(value).as_integer_ratio() for value in values]
    unit = max(denominator for _, denominator in ratios)  # all are powers of two
    return [numerator * (unit // denominator) for numerator, denominator in ratios]
