"""``optimizer.decoupled_lr``: against torch's AdamW with a group of its own for embedding and output head, in
every layout."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.optim.optimizer import Publish
from hexad.optim.schedule import LearningRates

from ..parity.harness import TOLERANCE, VARIANTS, Case, References, errors, run
from ..pool import Pool
from ..small import config_of, engine_of, microbatches

PEAK, LOW = 0.02, 0.002
DECOUPLED = {"decoupled_lr": 0.005}
RATES = {"optimizer": DECOUPLED, "lr_schedule": {"min_lr": 0.001, "decoupled_min_lr": 0.003}}
STEPS, WARMUP = 6, 2


def rate(peak: float, low: float, step: int) -> float:
    """Cosine after a linear warm-up."""
    if step < WARMUP:
        return peak * step / WARMUP
    return low + (peak - low) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def values(engine: Engine, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Copies of all weights' parts of tensors like the buckets' masters."""
    return {
        rectangle.name: part.clone()
        for bucket, tensor in zip(engine.trained, tensors)
        for rectangle, part in bucket.pieces(tensor)
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("low", [None, 0.003])
def test_values_are_those_of_two_groups(tied: bool, low: float | None, monkeypatch: Any) -> None:
    config = config_of(
        run={"steps": STEPS},
        model={"layers": 2, "hidden": 16, "heads": 2, "ffn_hidden": 24, "vocab": 40, "tied_embeddings": tied},
        precision={"dtype": "fp64"},
        optimizer={"lr": PEAK, "clip": 0.3, **DECOUPLED},
        lr_schedule={"warmup": WARMUP, "min_lr": LOW, "decoupled_min_lr": low},
        parallel={"bucket_mb": 0.004},
    )
    engine = engine_of(config)
    masters = [bucket.master for bucket in engine.trained]
    weights = values(engine, masters)
    apart = {"embedding.weight"} if tied else {"embedding.weight", "head.weight"}
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, weight in weights.items():
        groups.setdefault((name in apart, weight.dim() > 1), []).append(weight)
    assert {key: len(group) for key, group in groups.items() if key[0]} == {(True, True): len(apart)}
    plain = torch.optim.AdamW(
        [{"params": group, "weight_decay": 0.1 * decay} for (_, decay), group in groups.items()],
        betas=(0.9, 0.95),
    )
    update = engine.optimizer.rule.update

    def recorded(
        gradients: Iterator[Tensor], rates: LearningRates | None, factor: float, publish: Publish
    ) -> None:
        given = list(gradients)
        for name, gradient in values(engine, given).items():
            weights[name].grad = gradient * factor
        update(iter(given), rates, factor, publish)

    monkeypatch.setattr(engine.optimizer.rule, "update", recorded)
    for step in range(1, STEPS + 1):
        engine.train_step(microbatches(config, seed=step))
        for (vocabulary, _), group in zip(groups, plain.param_groups):
            peak, end = (0.005, LOW if low is None else low) if vocabulary else (PEAK, LOW)
            group["lr"] = rate(peak, end, step)
        plain.step()
        for name, value in values(engine, masters).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-12, atol=1e-14, msg=f"{step}: {name}")


def variant(number: int) -> Any:
    one = VARIANTS[number]
    return replace(one, name=f"{one.name}, decoupled", overrides=RATES)


TIED, UNTIED, GPT2 = variant(1), variant(0), variant(2)
CASES = (
    Case(UNTIED, data=2, zero=0),
    Case(TIED, data=2, zero=1),
    Case(TIED, data=4, zero=2, replicas=2),
    Case(UNTIED, data=4, zero=3),
    Case(TIED, tensor=2, data=2, zero=3),
    Case(TIED, pipeline=2, data=2, zero=1),
    Case(GPT2, pipeline=2, data=2, zero=3, schedule="zb_v", virtual=2),
    Case(UNTIED, pipeline=2, tensor=2, zero=2, schedule="interleaved", virtual=1),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_gives_the_numbers_of_one_process(case: Case, pool: Pool) -> None:
    references = References(pool)
    differences = errors(run(pool, case), references.of(case))
    assert max(differences.values()) < TOLERANCE, differences


def test_it_makes_a_difference_where_it_should(pool: Pool) -> None:
    """After the first step only embedding and head differ from a run without it."""
    case = Case(UNTIED, data=2, zero=3, steps=1)
    one, other = run(pool, case), run(pool, replace(case, variant=VARIANTS[0]))
    differ = {name for name in one.weights if not np.array_equal(one.weights[name], other.weights[name])}
    assert differ == {"embedding.weight", "head.weight"}


def test_a_custom_loop_passes_both_rates() -> None:
    for config, rates, message in (
        (DECOUPLED, {}, "update: found decoupled_lr None, expected a number that is not negative"),
        (DECOUPLED, {"decoupled_lr": -1.0}, "update: found decoupled_lr -1.0, expected a number"),
        ({}, {"decoupled_lr": 1.0}, "update: found decoupled_lr 1.0, expected None without optimizer.decou"),
    ):
        engine = engine_of(config_of(optimizer=config))
        engine.begin(None)
        engine.reduce()
        with pytest.raises(HexadError, match=message):
            engine.update(0.1, **rates)
    engine = engine_of(config_of(optimizer={**DECOUPLED, "weight_decay": 0.5}))
    before = engine.state_dict()
    engine.begin(None)
    engine.reduce()
    engine.update(0.1, decoupled_lr=0.0)
    after = engine.state_dict()
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    decayed = {name for name, value in before.items() if value.dim() > 1}
    assert {"embedding.weight", "head.weight"} == same & decayed
