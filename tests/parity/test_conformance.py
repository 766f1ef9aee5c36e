"""Hexad passes the checks of ``benchmarks/moe_conformance.py``, and each of them notices broken code."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.conformance.checks import CHECKS, Check
from benchmarks.conformance.hexad_adapter import HexadAdapter
from benchmarks.conformance.playing import Bench
from benchmarks.conformance.reference import update
from benchmarks.conformance.scenario import Scenario

from ..pool import Pool, RankError
from .conformance_mutations import CONFORMANCE_MUTATIONS, broken

BY_NUMBER = {check.number: check for check in CHECKS}
MEASURED = 10
"""The check that counts live bytes: collectives' threads release tensors some time after they end, so that
the benchmark alone makes it."""
TESTED = [check for check in CHECKS if check.number != MEASURED]
FIRST = {mutation.check: name for name, mutation in reversed(CONFORMANCE_MUTATIONS.items())}
NOTICED = [
    name if name == FIRST[mutation.check] else pytest.param(name, marks=pytest.mark.slow)
    for name, mutation in CONFORMANCE_MUTATIONS.items()
    if mutation.check != MEASURED
]
"""One of each check by default; the parity grid notices most of them, too."""


def run_broken(
    name: str, function: Callable[..., Any], make: Callable[[], Any], scenario: Scenario, *arguments: Any
) -> Any:
    """A rank with the code broken."""
    with broken(name, HexadAdapter.mesh_of(scenario)):
        return function(make, scenario, *arguments)


@pytest.fixture(scope="module")
def bench(pool: Pool) -> Bench:
    return Bench(HexadAdapter, pool.run, failures=(RankError,))


@pytest.mark.parametrize("check", TESTED, ids=lambda check: str(check.number))
def test_hexad_passes(check: Check, bench: Bench) -> None:
    (finding,) = check.findings(bench, check.scenarios[:1])
    assert finding.outcome == "passed", finding


class GatheringAdapter(HexadAdapter):
    """Every rank of a group receives all tokens."""

    dispatcher = "all_gather"


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [HexadAdapter, GatheringAdapter])
@pytest.mark.parametrize("check", TESTED, ids=lambda check: str(check.number))
def test_hexad_passes_every_scenario(check: Check, adapter: type[HexadAdapter], pool: Pool) -> None:
    for finding in check.findings(Bench(adapter, pool.run, failures=(RankError,))):
        assert finding.outcome == "passed", finding


@pytest.mark.parametrize("name", NOTICED)
def test_a_check_notices_broken_code(name: str, pool: Pool) -> None:
    mutation = CONFORMANCE_MUTATIONS[name]

    def run(world: int, *job: Any) -> list[Any]:
        return pool.run(world, run_broken, name, *job)

    check = BY_NUMBER[mutation.check]
    bench = Bench(HexadAdapter, run, failures=())  # broken code must give wrong numbers, not fail
    (finding,) = check.findings(bench, [check.scenarios[mutation.scenario]])
    assert finding.outcome == "failed", finding


def test_every_check_has_a_mutation() -> None:
    assert {mutation.check for mutation in CONFORMANCE_MUTATIONS.values()} == set(BY_NUMBER)


def test_the_reference_updates_as_torch_does() -> None:
    scenario, generator = Scenario(), torch.Generator().manual_seed(3)
    start = torch.randn((3, 4), generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(start.clone())
    rule = partial(torch.optim.AdamW, lr=scenario.lr, betas=scenario.betas, eps=scenario.eps)
    optimizer, moments = rule([parameter], weight_decay=scenario.decay), (start * 0, start * 0)
    for step in range(1, 4):
        gradient = torch.randn((3, 4), generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        update(scenario, step, start, gradient, moments)
    np.testing.assert_allclose(start.numpy(), parameter.detach().numpy(), rtol=1e-12)
