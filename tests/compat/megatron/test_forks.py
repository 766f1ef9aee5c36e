"""Flags of Megatron-LM's forks: what they mean here, and which have no effect."""

from typing import Any

import pytest

from hexad.compat.facade.foreign_names import ForeignName
from hexad.compat.megatron.tables import FORKS, GROUPS
from hexad.compat.megatron.translate import translate
from hexad.model.configuration import build_config

from .test_translate import LLAMA, SMALL, problem, resolved, small, without

ROPE = " ".join(LLAMA)


@pytest.mark.parametrize("title", GROUPS)
def test_flags_without_effect_change_nothing(title: str) -> None:
    """All of them at once, but one of those with the same attribute; each is reported."""
    flags = list({flag.attribute: flag for flag in GROUPS[title] if flag.effect == "none"}.values())
    translation = translate([*SMALL, *(word for flag in flags for word in _written(flag))])
    assert translation.tree == small()
    reported = ", ".join(note.split(": ")[0] for note in translation.notes if "no effect" in note).split(", ")
    assert sorted(reported) == sorted(flag.name for flag in flags) or not flags


def _written(flag: ForeignName) -> list[str]:
    """A flag with another value than its default."""
    return [flag.name] if flag.kind is bool else [flag.name, flag.choices[-1] if flag.choices else "77"]


def test_forks_have_flags_of_their_own() -> None:
    assert len(FORKS) == 8 and all(FORKS.values())


@pytest.mark.parametrize(
    ("more", "group", "wanted"),
    [
        (f"{ROPE} --rotary-theta 5e5", "model", {"rope_theta": 5e5}),
        (f"{ROPE} --rotary-position-embeddings-theta 5", "model", {"rope_theta": 5.0}),
        (f"{ROPE} --partial-rotary-factor 0.5", "model", {"rotary_fraction": 0.5}),
        (
            f"{ROPE} --rotary-seq-len-interpolation-factor 2",
            "model",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            f"{ROPE} --rope-scaling-type llama3 --rope-scaling-factor 4 --low-freq-factor 2 "
            "--high-freq-factor 8 --original-max-position-embeddings 4096",
            "model",
            {
                "rope_scaling": {
                    "factor": 4.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 8.0,
                    "original_positions": 4096,
                }
            },
        ),
        (f"{ROPE} --add-dense-bias", "model", {"out_bias": True, "qkv_bias": False, "mlp_bias": False}),
        (
            "--normalization rmsnorm --use-llama2-rotary-position-embeddings --glu-activation swiglu "
            "--disable-bias-linear",
            "model",
            {"family": "llama", "ffn_hidden": 256},
        ),
        ("--normalization layernorm", "model", {"family": "gpt2"}),
        (
            f"{ROPE} --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec",
            "model",
            {"family": "llama"},
        ),
        ("--attention-head-type multiquery", "model", {"kv_heads": 1}),
        ("--activations-checkpoint-method uniform", "memory", {"recompute": "full"}),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 2",
            "memory",
            {"recompute": "full", "recompute_layers": 2},
        ),
        ("--n-head-kv 2", "model", {"kv_heads": 2}),
        ("--intermediate-size 96", "model", {"ffn_hidden": 96}),
        ("--input-embeddings-multiplier 3", "model", {"embedding_multiplier": 3.0}),
        ("--distributed-timeout 90", "run", {"timeout": 90.0}),
        ("--cpu-optimizer --use-distributed-optimizer", "memory", {"offload": "optimizer"}),
        (
            "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo",
            "parallel",
            {"context_method": "ulysses"},
        ),
        (
            "--context-parallel-size 2 --context-parallel-algo kvallgather_cp_algo",
            "parallel",
            {"context_method": "all_gather"},
        ),
        (
            "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2",
            "parallel",
            {"context_method": "ulysses_ring", "context_ulysses": 2},
        ),
        ("--pipeline-model-parallel-size 2 --num-layer-list 1,3", "parallel", {"split": [1, 3]}),
        ("--pipeline-model-parallel-size 2 --enable-zbh1-pipeline", "parallel", {"schedule": "zb_h1"}),
        ("--pipeline-model-parallel-size 2 --enable-zero-bubble", "parallel", {"schedule": "zb_h1"}),
        (
            "--pipeline-model-parallel-size 2 --enable-zero-bubble --zero-bubble-v-schedule",
            "parallel",
            {"schedule": "zb_v", "virtual_stages": 2},
        ),
        ("--num-experts 1 --deepspeed", "model", {"family": "gpt2"}),
    ],
)
def test_flags_of_forks(more: str, group: str, wanted: dict[str, Any]) -> None:
    assert {name: small(*more.split())[group][name] for name in wanted} == wanted


def test_tokenizers_of_forks() -> None:
    """Pai-Megatron-Patch's is beside the checkpoint, BigCode's a file."""
    line = without(SMALL, "--tokenizer-type", "--vocab-size")
    tree = translate([*line, "--patch-tokenizer-type", "Qwen2Tokenizer", "--load", "qwen"]).tree
    assert tree["data"]["tokenizer"] == "qwen"
    tree = translate([*line, "--tokenizer-type", "TokenizerFromFile", "--tokenizer-file", "t.json"]).tree
    assert tree["data"]["tokenizer"] == "t.json"


def test_mindspeed_loads_a_hugging_face_model() -> None:
    tree = translate([*SMALL, "--load", "models/qwen", "--enable-hf2mg-convert", "--save", "new"]).tree
    assert tree["model"]["load"] == "hf:models/qwen" and "load" not in tree["checkpoint"]


@pytest.mark.parametrize(
    ("more", "field", "text"),
    [
        ("--glu-activation geglu", "--glu-activation", "invalid choice"),
        ("--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec", "--spec", "Llama's layers only"),
        ("--train-mode finetune", "--train-mode", "supervised fine-tuning"),
        ("--num-experts 8 16 --deepspeed", "--num-experts", "found 8 16, but experts"),
        ("--num-experts 1", "--num-experts", "found 1, but experts"),
        (f"{ROPE} --rope-scaling-type llama3", "--low-freq-factor", "is missing"),
        (f"{ROPE} --rope-scaling-type yarn", "--rope-scaling-type", "invalid choice"),
        (
            f"{ROPE} --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            "--rotary-seq-len-interpolation-factor",
            "beside --use-rope-scaling",
        ),
        (
            "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 3",
            "--ulysses-degree-in-cp",
            "a divisor of --context-parallel-size 4",
        ),
        ("--pipeline-model-parallel-size 2 --num-layer-list 1,2", "--num-layer-list", "whose sum is 4"),
        ("--pipeline-model-parallel-size 2 --num-layer-list 4", "--num-layer-list", "expected 2 numbers"),
        ("--pipeline-model-parallel-size 2 --num-layer-list 1,x", "--num-layer-list", "'1,x'"),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 --enable-zero-bubble "
            "--num-virtual-stages-per-pipeline-rank 2",
            "--enable-zero-bubble",
            "add --zero-bubble-v-schedule",
        ),
    ],
)
def test_refused(more: str, field: str, text: str) -> None:
    error = problem(*SMALL, *more.split())
    assert error.field == field and text in str(error), str(error)


@pytest.mark.parametrize(
    ("more", "family", "biases"),
    [
        ("", "gpt2", (True, True, True)),
        ("--disable-bias-linear", "gpt2", (False, False, False)),
        ("--disable-bias-linear --add-qkv-bias", "gpt2", (True, False, False)),
        (ROPE, "llama", (False, False, False)),
        (f"{ROPE} --add-qkv-bias", "qwen2", (True, False, False)),
        (f"{ROPE} --qk-layernorm", "qwen3", (False, False, False)),
        (ROPE.replace("--disable-bias-linear", ""), "llama", (True, True, True)),
        (ROPE.replace("--disable-bias-linear", "--add-qkv-bias"), "llama", (True, True, True)),
        (ROPE.replace("--disable-bias-linear", "--qk-layernorm"), "qwen3", (True, True, True)),
    ],
)
def test_biases(more: str, family: str, biases: tuple[bool, ...]) -> None:
    """Megatron-LM's linear layers have biases unless the line turns them off, in every architecture."""
    model = resolved(translate([*SMALL, *more.split()])).config.model
    assert (model.family, (model.qkv_bias, model.out_bias, model.mlp_bias)) == (family, biases)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("--recompute-method block --recompute-num-layers 0", {"recompute": "none"}),
        (
            "--recompute-method block --recompute-num-layers 1",
            {"recompute": "full", "recompute_layers": 1},
        ),
        ("--recompute-method uniform --recompute-num-layers 1", {"recompute": "full"}),
    ],
)
def test_recomputed_layers(more: str, wanted: dict[str, Any]) -> None:
    tree = small("--recompute-granularity", "full", *more.split())
    assert tree["memory"] == wanted
    build_config(tree)


def test_numbers_of_recomputed_layers() -> None:
    full = ["--recompute-granularity", "full", "--recompute-method"]
    assert "at least 1 with uniform" in str(problem(*SMALL, *full, "uniform", "--recompute-num-layers", "0"))
    assert "at least 0 with block" in str(problem(*SMALL, *full, "block", "--recompute-num-layers", "-1"))
    assert small("--recompute-num-layers", "0") == small()


def test_optimizer_states_that_are_not_saved() -> None:
    translation = translate([*SMALL, "--no-save-optim"])
    assert translation.tree == small()
    assert any(note.startswith("--no-save-optim: no effect: checkpoints are") for note in translation.notes)
