"""Flags of a launch line that depend on each other: no effect is reported, contradictions are refused."""

from __future__ import annotations

import pytest

from hexad.compat.megatron.translate import translate

from .test_translate import SMALL, resolved

NEEDS = [
    ("--num-query-groups 2", "--group-query-attention"),
    ("--loss-scale 128 --initial-loss-scale 8 --hysteresis 4 --min-loss-scale 2", "--fp16"),
    ("--rope-scaling-factor 4", "--use-rope-scaling"),
    ("--moe-router-topk 4 --moe-z-loss-coeff 0.1", "--num-experts"),
    ("--data-parallel-sharding-strategy optim", "--use-megatron-fsdp"),
    ("--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
    ("--profile-step-start 3 --profile-step-end 4", "--profile"),
    ("--lr-wsd-decay-iters 3", "--lr-decay-style WSD"),
    ("--hierarchical-context-parallel-sizes 2", "--context-parallel-size"),
    ("--sequence-parallel", "--tensor-model-parallel-size"),
    ("--recompute-method uniform", "--recompute-granularity full"),
    ("--valid-data-path x", "--train-data-path"),
]


@pytest.mark.parametrize(("more", "needed"), NEEDS)
def test_flags_that_need_others(more: str, needed: str) -> None:
    found = translate([*SMALL, *more.split()])
    names = ", ".join(word for word in more.split() if word.startswith("--"))
    assert f"{names}: no effect without {needed}" in found.notes, found.notes
    assert resolved(found).config == resolved(translate(SMALL)).config


def test_flags_with_what_they_need() -> None:
    """Either of the flags that give it its effect; and defaults are not reported."""
    rope = "--rotary-base 5 --use-rotary-position-embeddings --normalization RMSNorm --swiglu"
    for more in (
        "--num-query-groups 2 --group-query-attention",
        "--fp16 --hysteresis 4",
        f"{rope} --disable-bias-linear",
        "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 20",
        "--num-query-groups 1",
    ):
        assert not [note for note in translate([*SMALL, *more.split()]).notes if "no effect" in note], more
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    note = f"{group}: no effect without --num-layers-per-virtual-pipeline-stage, "
    note += "--num-virtual-stages-per-pipeline-rank or --pipeline-model-parallel-layout"
    assert note in translate([*SMALL, "--pipeline-model-parallel-size", "2", group, "2"]).notes
