"""Nothing races, and nothing hangs, on the way that a GPU would take; broken code is noticed."""

from __future__ import annotations

import pytest

from ..pool import Pool
from . import nccl, scenarios
from .mutations import MUTATIONS, WAITS
from .scenarios import SCENARIOS

QUICK = (
    "data 4, zero 3, 2 replicas, full",
    "tensor 2 + sequence, data 2, zero 3",
    "1f1b, tied, data 2, zero 1",
    "zb_h1, tensor 2 + sequence",
    "gpipe of 4, frozen stages",
    "experts, data 2, tensor 2, zero 3",
    "context ring",
    "bf16, zero 2, 2 replicas",
    "saved and resumed, offload, zero 2",
    "saved and resumed, pipeline, zero 3",
    "generation, pipeline 2, tensor 2",
    "deepspeed, pipeline, zero 3",
)
"""The others are in the slow sweep."""
NOTICED = (
    "no wait in parallel/data/gatherer.py:_arrive",
    "no wait in parallel/data/gradients.py:start",
    "no wait in parallel/pipeline/transfers.py:receive",
    "no wait in parallel/tensor/linear.py:_gathered_products",
    "operands freed before they are reduced",
    "activations written while they are sent",
    "weights given back when their gathering starts",
    "masters updated before the gradients have arrived",
    "values saved on a stream that does not wait",
    "replicas summed on a stream that does not wait",
    "masters copied to the device on another stream",
    "gradients narrowed on another stream",
)
"""Four of each kind; the others are in the slow sweep."""


def _some(every: object, quick: tuple[str, ...]) -> list[object]:
    names = list(every)  # type: ignore[call-overload]
    assert set(quick) <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _some(SCENARIOS, QUICK))
def test_nothing_races_and_nothing_hangs(name: str, pool: Pool) -> None:
    ranks = scenarios.run(pool, SCENARIOS[name])
    assert sorted({race for seen in ranks for race in seen.races}) == []
    assert {place for seen in ranks for place in seen.waits} <= WAITS.keys()  # each has a mutation
    programs = {rank: seen.events for rank, seen in enumerate(ranks)}
    for lazily in (False, True):
        assert nccl.play(programs, lazily=lazily).problems == []


@pytest.mark.parametrize("name", _some(MUTATIONS, NOTICED))
def test_broken_order_of_streams_is_noticed(name: str, pool: Pool) -> None:
    ranks = scenarios.run(pool, SCENARIOS[MUTATIONS[name].scenario], name)
    assert any(seen.races for seen in ranks)
