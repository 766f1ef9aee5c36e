"""Flags of a launch line that depend on each other: no effect is reported, contradictions are refused."""

import argparse

import pytest

from hexad.compat.facade.foreign_names import ForeignName
from hexad.compat.megatron.arguments import parse
from hexad.compat.megatron.tables import FLAGS
from hexad.compat.megatron.translate import translate
from hexad.config import ConfigError

from .test_translate import SMALL, problem, resolved, small

NEEDS = [
    ("--num-query-groups 2", "--group-query-attention"),
    ("--loss-scale 128 --initial-loss-scale 8 --hysteresis 4 --min-loss-scale 2", "--fp16"),
    ("--rope-scaling-factor 4", "--use-rope-scaling or --rope-scaling-type llama3"),
    ("--moe-router-topk 4 --moe-z-loss-coeff 0.1", "--num-experts"),
    ("--data-parallel-sharding-strategy optim", "--use-megatron-fsdp"),
    ("--profile-step-start 3 --profile-step-end 4", "--profile"),
    ("--lr-wsd-decay-iters 3", "--lr-decay-style WSD"),
    ("--decoupled-min-lr 1e-5", "--decoupled-lr"),
    ("--hierarchical-context-parallel-sizes 2", "--context-parallel-size"),
    ("--sequence-parallel", "--tensor-model-parallel-size"),
    ("--recompute-method uniform", "--recompute-granularity full"),
    ("--recompute-modules layernorm", "--recompute-granularity selective or --recompute-activations"),
    ("--valid-data-path x", "--train-data-path"),
]


@pytest.mark.parametrize(("more", "needed"), NEEDS)
def test_flags_that_need_others(more: str, needed: str) -> None:
    translation = translate([*SMALL, *more.split()])
    names = ", ".join(word for word in more.split() if word.startswith("--"))
    assert f"{names}: no effect without {needed}" in translation.notes, translation.notes
    assert resolved(translation).config == resolved(translate(SMALL)).config


def test_flags_with_what_they_need() -> None:
    """Any one of the needed flags suffices; defaults are not reported."""
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


REFUSED = [
    (
        "--use-distributed-optimizer --zero-stage 2",
        "--zero-stage: sets ZeRO level 2, but --use-distributed-optimizer sets level 1; leave one out",
    ),
    ("--use-torch-fsdp2 --zero-stage 1", "--zero-stage: sets ZeRO level 1, but --use-torch-fsdp2 sets"),
    (
        "--use-torch-fsdp2 --use-distributed-optimizer",
        "--use-distributed-optimizer: sets ZeRO level 1, but --use-torch",
    ),
    (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim --use-torch-fsdp2",
        "--data-parallel-sharding-strategy: sets ZeRO level 1, but --use-torch-fsdp2 sets level 3",
    ),
    ("--zero-stage 4", "--zero-stage: found 4, expected 0, 1, 2 or 3"),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-activations",
        "--recompute-activations: found with --recompute-granularity full; leave one out",
    ),
    (
        "--recompute-granularity selective --checkpoint-activations",
        "--checkpoint-activations: found with --recompute-granularity selective",
    ),
    (
        "--recompute-granularity selective --recompute-method uniform",
        "--recompute-method: found uniform with --recompute-granularity selective; leave it out",
    ),
    (
        "--recompute-granularity selective --recompute-modules core_attn mlp",
        "--recompute-modules: invalid choice: 'mlp' (choose from",
    ),
    (
        "--recompute-activations --recompute-method block",
        "--recompute-method: found block with --recompute-activations",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL "
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-virtual-stages-per-pipeline-rank: found beside --pipeline-model-parallel-layout; give one",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-virtual-stages-per-pipeline-rank: found beside --num-layers-per-virtual-pipeline-stage; give",
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 "
        "--account-for-loss-in-pipeline-split",
        "--account-for-loss-in-pipeline-split: found beside --decoder-last-pipeline-num-layers; give one",
    ),
    ("--train-iters 0", "--train-iters: found 0, expected at least 1"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size: found 0, expected at least 1"),
    ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size: found 0, expected at least 1"),
    ("--context-parallel-size -1", "--context-parallel-size: found -1, expected at least 1"),
    ("--ddp-bucket-size 0", "--ddp-bucket-size: found 0, expected at least 1"),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 0",
        "--num-layers-per-virtual-pipeline-stage: found 0, expected at least 1",
    ),
    ("--profile --profile-step-start 15", "--profile-step-end: found 12, expected more than --profile-step"),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 9",
        "--recompute-num-layers: found 9, expected at most --num-layers 4; lower it",
    ),
    (
        "--lr-warmup-iters 100",
        "--lr-warmup-iters: found 100 iterations of warm-up, expected less than the 100 of --train-iters",
    ),
    ("--lr-warmup-iters 30 --lr-decay-iters 20", "less than the 20 of --lr-decay-iters; lower it"),
    ("--lr-warmup-fraction 1", "--lr-warmup-fraction: found 100 iterations of warm-up"),
]


@pytest.mark.parametrize(("more", "says"), REFUSED)
def test_refused(more: str, says: str) -> None:
    assert says in str(problem(*SMALL, *more.split()))


@pytest.mark.parametrize(
    ("more", "level"),
    [
        ("--use-distributed-optimizer --zero-stage 1", 1),
        ("--use-torch-fsdp2 --zero-stage 3", 3),
        (
            "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy "
            "optim_grads_params",
            3,
        ),
        ("--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy no_shard", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", 0),
        ("--use-megatron-fsdp", 3),
    ],
)
def test_flags_that_agree(more: str, level: int) -> None:
    assert small(*more.split())["parallel"]["zero"] == level
    same = ["--recompute-granularity", "selective", "--recompute-activations"]
    assert small(*same)["memory"]["recompute"] == "selective"


@pytest.mark.parametrize("flag", [flag for flag in dict.fromkeys(FLAGS.values()) if flag.choices])
def test_choices_in_other_spellings(flag: ForeignName) -> None:
    """Of other cases, and with other signs between words."""
    for choice in flag.choices if flag.effect != "refused" else ():
        signs = choice.replace("_", "-"), choice.replace("-", "_")
        for word in (choice, choice.lower(), choice.upper(), *signs):
            value = getattr(parse([*SMALL, flag.name, word]).arguments, flag.attribute)
            assert value in (choice, [choice])
    with pytest.raises(ConfigError, match=f"{flag.name}: invalid choice: 'spam'"):
        parse([*SMALL, flag.name, "spam"])


def test_scripts_add_choices() -> None:
    """As Pai-Megatron-Patch's do; the parser of other lines stays as it is."""

    def extra(parser: argparse.ArgumentParser) -> None:
        action = next(action for action in parser._actions if action.dest == "optimizer")
        assert isinstance(action.choices, list)
        action.choices.append("spam")

    line = [*SMALL, "--optimizer", "spam"]
    assert parse(line, extra=extra).arguments.optimizer == "spam"
    with pytest.raises(ConfigError, match="--optimizer: invalid choice: 'spam'"):
        parse(line)
