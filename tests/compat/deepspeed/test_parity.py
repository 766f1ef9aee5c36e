"""One script with the ``deepspeed`` package and with ours: losses, norms, rates and scales."""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

from .layers import trained_in_one_process
from .program import Case, Results, results_of

pytest.importorskip("deepspeed")

ADAM = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
L2 = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False}}


def keys(stage: int, **more: Any) -> dict[str, Any]:
    return {"optimizer": ADAM, "zero_optimization": {"stage": stage}, **more}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


EXACT = {
    **{f"stage {n}": Case(keys=keys(n)) for n in range(4)},
    **{
        f"stage {n}, accumulated, clipped": Case(keys=keys(n, gradient_clipping=0.3), accumulation=3, steps=3)
        for n in range(4)
    },
    **{f"stage {n}, GPT-2": Case("gpt2", keys(n, gradient_clipping=0.5), steps=3) for n in range(4)},
    "clipped by default": Case(keys={**keys(1), "gradient_clipping": 1.0}, steps=3),
    "Adam with L2": Case(keys={**keys(1), "optimizer": L2}),
    "WarmupLR": Case(keys=keys(1, **scheduler("WarmupLR", warmup_num_steps=3, warmup_max_lr=0.02))),
    "WarmupDecayLR": Case(
        keys=keys(
            2,
            **scheduler(
                "WarmupDecayLR",
                total_num_steps=6,
                warmup_num_steps=2,
                warmup_max_lr=0.02,
                warmup_type="linear",
            ),
        ),
        steps=8,
    ),
    "WarmupCosineLR": Case(
        keys=keys(1, **scheduler("WarmupCosineLR", total_num_steps=6, warmup_num_steps=2)), steps=8
    ),
    "OneCycle": Case(
        keys=keys(
            1,
            **scheduler(
                "OneCycle",
                cycle_min_lr=1e-3,
                cycle_max_lr=2e-2,
                cycle_first_step_size=3,
                decay_step_size=2,
                decay_lr_rate=0.5,
            ),
        ),
        steps=9,
    ),
    "LRRangeTest": Case(keys=keys(3, **scheduler("LRRangeTest", lr_range_test_step_size=2))),
    "SGD of the script, groups": Case(optimizer="SGD", groups=True, scheduler="ExponentialLR"),
    "groups, stage 2": Case(keys=keys(2), groups=True),
    "groups, stage 3": Case(keys=keys(3), groups=True),
    "Adagrad of the script, stage 3": Case(
        keys={"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}, optimizer="Adagrad"
    ),
}
"""In float32: equal but for the order of sums."""

COMPILED = {
    f"{kind} without bias correction, stage {n}": Case(
        keys={
            **keys(n),
            "optimizer": {
                "type": kind,
                "params": {"lr": 1e-3, "weight_decay": 0.1, "bias_correction": False, "adam_w_mode": w},
            },
        }
    )
    for n, kind, w in ((0, "AdamW", True), (1, "Adam", False), (2, "AdamW", True))
}
"""With an optimizer that the package compiles, for a minute or more; others need not wait for it."""

NARROW = {
    **{f"bf16, stage {n}": Case(keys=keys(n, bf16={"enabled": True})) for n in (1, 3)},
    **{
        f"fp16, stage {n}": Case(
            keys=keys(n, fp16={"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}),
            poison=2,
            steps=9,
        )
        for n in range(4)
    },
}
"""In 16 bits: gradients are reduced in float32 here, in 16 bits there."""

SCRIPTS = {
    "one loss through two engines": Case("adversarial", {"stage": 0}),  # the package's other stages fail
    **{f"values read and written, stage {n}": Case("values", {"stage": n}) for n in (1, 2, 3)},
    **{f"the optimizer's own step, stage {n}": Case("alone", {"stage": n}) for n in (0, 1, 2)},
    **{f"epochs, stage {n}": Case("epochs", {"stage": n}) for n in (0, 2)},
}
"""What upstream scripts do beside forward, backward and step."""

# After the others: the package remembers the pipeline.
PIPELINES = {
    "pipeline": Case("pipe", keys(0, gradient_clipping=0.0), accumulation=3, steps=4),
    "pipeline, stage 1": Case("pipe", keys(1, gradient_clipping=0.0), accumulation=2, steps=3),
    "pipeline, stage 1, clipped": Case("pipe", keys(1, gradient_clipping=0.3), accumulation=2, steps=3),
}
CLIPPED = {"pipeline, clipped": Case("pipe", keys(0, gradient_clipping=0.3), accumulation=2, steps=3)}
IN_PLACE = {f"in place, stage {n}": Case("in_place", {"stage": n}) for n in (0, 1)}


QUICK = (
    *(f"stage {n}, accumulated, clipped" for n in range(4)),
    "stage 0, GPT-2",
    "stage 3, GPT-2",
    "WarmupDecayLR",
    "SGD of the script, groups",
    "groups, stage 2",
    "bf16, stage 1",
    "fp16, stage 2",
    "pipeline, stage 1",
    "pipeline, stage 1, clipped",
    *CLIPPED,
    *SCRIPTS,
    "in place, stage 0",
)
"""The others are slow."""

Both = Callable[[str], tuple[Results, Results]]


@pytest.fixture(scope="module")
def both() -> Both:
    """The results of both packages by a case's name, from one run of all that run with it."""

    every = EXACT | COMPILED | NARROW | SCRIPTS | PIPELINES | CLIPPED | IN_PLACE

    def kind(name: str) -> str:
        return "compiled" if name in COMPILED else "quick" if name in QUICK else "slow"

    @cache
    def results(of_kind: str) -> tuple[Results, Results]:
        return results_of({name: case for name, case in every.items() if kind(name) == of_kind})

    return lambda name: results(kind(name))


def marked(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def errors(theirs: list[Any], ours: list[Any]) -> float:
    """The largest relative error; 0 for what is not finite in both, infinite for what is in one."""
    assert len(theirs) == len(ours)
    largest = 0.0
    for one, other in zip(theirs, ours):
        if one is None:
            continue  # the package has no norm
        if math.isfinite(one) and math.isfinite(other):
            largest = max(largest, abs(one - other) / max(abs(one), 1e-12))
        elif math.isfinite(one) or math.isfinite(other):
            return math.inf
    return largest


def same(both: Both, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    theirs, ours = (results[name] for results in both(name))
    assert "error" not in theirs, theirs["error"]
    assert "error" not in ours, ours["error"]
    for what in ("steps", "skipped", "samples", "scale"):
        assert theirs[what] == ours[what], what
    assert len(theirs["lr"]) == len(ours["lr"])
    for one, other in zip(theirs["lr"], ours["lr"]):
        assert errors(one, other) < 1e-14
    return theirs, ours


@pytest.mark.parametrize("name", marked(EXACT | COMPILED | PIPELINES))
def test_numbers_are_those_of_the_package(both: Both, name: str) -> None:
    theirs, ours = same(both, name)
    assert errors(theirs["loss"], ours["loss"]) < 1e-6
    assert errors(theirs["norm"], ours["norm"]) < 1e-6
    assert len(set(ours["loss"])) == len(ours["loss"])  # it trains


def test_a_pipeline_is_clipped_by_the_norm_of_all_stages_and_in_the_package_by_that_of_the_first(
    both: Both,
) -> None:
    """In float32 without ZeRO: the package's other stages contribute nothing to the norm. Its first stage has
    the embedding and two blocks."""
    theirs, ours = same(both, "pipeline, clipped")
    assert errors(trained_in_one_process(2, 3, 0.3, 3), theirs["loss"]) < 1e-6
    assert errors(trained_in_one_process(2, 3, 0.3, None), ours["loss"]) < 1e-6
    assert errors(theirs["loss"], ours["loss"]) > 1e-4


@pytest.mark.parametrize("name", marked(SCRIPTS | IN_PLACE))
def test_scripts_compute_what_they_do_with_the_package(both: Both, name: str) -> None:
    theirs, ours = same(both, name)
    assert errors(theirs["loss"], ours["loss"]) < (1e-2 if name.startswith("values") else 1e-6)
    assert errors(theirs.get("seen", []), ours.get("seen", [])) < 2e-2


@pytest.mark.parametrize("name", marked(NARROW))
def test_sixteen_bits_agree_as_far_as_their_rounding(both: Both, name: str) -> None:
    theirs, ours = same(both, name)
    assert errors(theirs["loss"], ours["loss"]) < 3e-2
    if name.startswith("bf16"):
        assert errors(theirs["norm"], ours["norm"]) < 3e-2
    if name.startswith("fp16"):
        assert ours["skipped"] == 1


@pytest.mark.slow
def test_other_cases_differ(both: Both) -> None:
    """These comparisons can fail: stages agree, schedules and formats do not."""
    ours = both("stage 0")[1]
    assert errors(ours["stage 0"]["loss"], ours["stage 3"]["loss"]) < 1e-6
    assert errors(ours["stage 1"]["loss"], ours["WarmupLR"]["loss"]) > 1e-3
    assert 1e-5 < errors(ours["stage 3"]["loss"], ours["bf16, stage 3"]["loss"]) < 3e-2
