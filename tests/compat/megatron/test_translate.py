"""Launch lines of Megatron-LM: published ones mean what they say, the rest is refused by name."""

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from hexad.compat.megatron.arguments import derive, parse
from hexad.compat.megatron.tables import FLAGS, GROUPS
from hexad.compat.megatron.translate import Translation, translate
from hexad.config import ConfigError, setting_names
from hexad.config.model import RopeScaling
from hexad.model.configuration import build_config
from hexad.model.families import preset
from hexad.optim.schedule import learning_rate, learning_rates
from hexad.planning import Resolved, planned_layout, resolve

from ...forks import PATIENCE
from . import lines

SMALL = lines.words("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 300
""")
LLAMA = lines.words("""
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
""")


def without(line: list[str], *flags: str) -> list[str]:
    """A line without some flags and their values."""
    kept: list[str] = []
    keep = True
    for word in line:
        keep = word not in flags if word.startswith("--") else keep
        if keep:
            kept.append(word)
    return kept


def resolved(translation: Translation, vocab: int = 50257) -> Resolved:
    """The resolved configuration of a translation, wherever data and tokenizer are."""
    config = build_config(translation.tree)
    return resolve(config, planned_layout(config), None if config.model.vocab != "auto" else vocab)


def small(*more: str, world: int | None = None) -> dict[str, dict[str, Any]]:
    """The settings of a small model with further flags; later ones win."""
    translation = translate([*SMALL, *more], world)
    resolved(translation)
    return translation.tree


def problem(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        translate(words)
    assert "\n" not in str(error.value)
    return error.value


def test_gpt3_175b() -> None:
    assert problem(*lines.GPT3_175B).field == "--rampup-batch-size"
    tree = translate(without(lines.GPT3_175B, "--rampup-batch-size")).tree
    config = resolved(translate(without(lines.GPT3_175B, "--rampup-batch-size"))).config
    assert (config.model.family, config.model.layers, config.model.hidden) == ("gpt2", 96, 12288)
    assert (config.model.heads, config.model.ffn_hidden, config.model.head_dim) == (96, 49152, 128)
    assert config.model.tied_embeddings is True and config.model.init_std == 0.006
    assert (config.parallel.tensor, config.parallel.pipeline, config.parallel.split) == (8, 16, "even")
    assert config.model.dropout == config.model.attention_dropout == 0.1
    assert tree["lr_schedule"] == {"kind": "cosine", "warmup": 430, "decay_steps": 430000, "min_lr": 6e-6}
    assert tree["precision"]["loss_scale_initial"] == 2.0**32 and tree["precision"]["dtype"] == "fp16"
    assert tree["data"]["split"] == [949, 50, 1] and tree["data"]["tokenizer"] == "ckpt/tokenizer"
    assert tree["checkpoint"]["every"] == 10000 and "load" not in tree["checkpoint"]
    assert tree["log"] == {"every": 100, "tensorboard": True}
    assert tree["validate"] == {"every": 1000, "batches": 10}


def test_gpt2_345m() -> None:
    config = resolved(translate(lines.GPT2_345M)).config
    shape = preset("gpt2-medium")
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "max_positions")
    assert {name: getattr(config.model, name) for name in names} == {name: shape[name] for name in names}
    assert (config.optimizer.betas, config.optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    assert (config.run.steps, config.run.seed, config.run.timeout) == (500000, 1234, 600.0)
    assert config.lr_schedule.warmup == 3200


def test_gpt3_345m_counted_in_samples() -> None:
    translation = translate(lines.GPT3_345M)
    config = resolved(translation).config
    assert config.run.steps == 146484375 // 512
    assert (config.lr_schedule.warmup, config.lr_schedule.decay_steps) == (318, 247955)
    assert any("317.89 iterations, rounded to 318" in note for note in translation.notes)
    assert (config.parallel.schedule, config.parallel.virtual_stages) == ("interleaved", 2)
    assert config.parallel.zero == 1 and config.parallel.sequence
    assert config.data.train == [(0.3, "data/books"), (0.7, "data/web")]
    assert config.data.validation_sets == {"validation": config.data.train}


def test_llama2_7b() -> None:
    config = resolved(translate(lines.LLAMA2_7B), 32000).config
    shape = preset("llama2-7b")
    names = ("family", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "tied_embeddings", "rope_theta")
    assert {name: getattr(config.model, name) for name in names} == {name: shape[name] for name in names}
    assert config.data.documents == "isolate" and config.data.validation == "data/valid"
    assert config.memory.recompute == "selective" and config.checkpoint.asynchronous
    assert config.log.wandb == "llama" and config.data.tokenizer == "tokenizer.model"


def test_llama3_8b() -> None:
    config = resolved(translate(lines.LLAMA3_8B, world=16)).config
    shape = preset("llama3-8b")
    names = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden")
    assert {name: getattr(config.model, name) for name in names} == {name: shape[name] for name in names}
    assert config.model.vocab == 128257 and config.model.rope_theta == 1e6
    assert (config.parallel.context, config.parallel.context_method) == (2, "ring")
    assert (config.precision.reduce, config.precision.accumulate) == ("bf16", "bf16")
    assert config.optimizer.decoupled_lr == 5e-4 and config.lr_schedule.decoupled_min_lr == 4.5e-5
    assert config.run.timeout == 3600 and config.log.profile is not None
    assert (config.log.profile.start, config.log.profile.steps) == (5, 2)
    assert config.run.steps == 1953125000 // 128 and not config.parallel.sequence  # one tensor rank


def test_llama3_70b() -> None:
    config = resolved(translate(lines.LLAMA3_70B), 128256).config
    shape = preset("llama3.1-70b")
    names = ("family", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "rope_theta")
    assert {name: getattr(config.model, name) for name in names} == {name: shape[name] for name in names}
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling == RopeScaling(**shape["rope_scaling"])
    assert (config.parallel.virtual_stages, config.parallel.schedule) == (5, "interleaved")
    assert config.parallel.order == "tensor-context-expert-pipeline-data"
    assert (config.memory.recompute, config.memory.recompute_layers) == ("full", 2)


def test_bloom_176b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Hexad has no equivalent for is refused flag by flag; the rest is Megatron-DeepSpeed's."""
    monkeypatch.chdir(tmp_path)
    keys = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2048, "gradient_clipping": 1.0}
    keys |= {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}, "steps_per_print": 2000}
    (tmp_path / "ds_config.json").write_text(json.dumps(keys))
    line, refused = [*lines.BLOOM_176B, "--data-path", "data/roots"], []
    while True:
        try:
            config = resolved(translate(line), 250680).config
            break
        except ConfigError as error:
            refused.append(error.field)
            line = without(line, error.field)
    assert sorted(refused) == [
        "--embed-layernorm",
        "--position-embedding-type",
        "--train-weighted-split-paths-path",
        "--valid-weighted-split-paths-path",
    ]
    assert config.parallel.split == [5, *[6] * 10, 5] and config.memory.recompute == "full"
    assert config.batch.ramp == (192, 16, 9_765_625)
    assert (config.run.steps, config.run.seed) == (config.batch.steps(220_000_000), 42)
    assert (config.parallel.tensor, config.parallel.pipeline, config.parallel.zero) == (4, 12, 0)


def test_mixtral_8x7b() -> None:
    assert "experts are not supported" in str(problem(*lines.MIXTRAL_8X7B))
    assert problem(*SMALL, "--expert-model-parallel-size", "2").field == "--expert-model-parallel-size"


def test_llama3_over_context_ranks(tmp_path: Path) -> None:
    translation = translate(without(lines.LLAMA3_LONG, "--pretrained-checkpoint"))
    config = resolved(translation, 128256).config
    assert (config.parallel.tensor, config.parallel.context) == (4, 8)
    assert (config.parallel.context_method, config.parallel.context_ulysses) == ("ulysses_ring", 2)
    assert config.validate_.every == 0 and config.data.sequence == 131072
    assert translate(lines.LLAMA3_LONG).tree["model"]["load"] == "hf:models/llama3"


def test_defaults_are_megatrons() -> None:
    tree = small()
    assert tree["model"]["init_std"] == 0.02 and tree["model"]["dropout"] == 0.1
    assert tree["lr_schedule"] == {"kind": "linear", "warmup": 0, "decay_steps": 100, "min_lr": 0.0}
    assert tree["run"]["seed"] == 1234 and tree["run"]["dir"] == "runs/megatron"
    assert tree["optimizer"] == {
        "name": "adamw",
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "clip": 1.0,
    }
    assert tree["precision"] == {"dtype": "fp32"}
    assert tree["data"]["split"] == [969, 30, 1]
    assert small(*LLAMA)["model"]["ffn_hidden"] == 8 * 64 // 3 // 64 * 64


@pytest.mark.parametrize(
    ("more", "group", "wanted"),
    [
        ("--group-query-attention", "model", {"kv_heads": 1}),
        ("--num-query-groups 2", "model", {"kv_heads": 4}),  # without --group-query-attention
        ("--window-size 15,0", "model", {"sliding_window": 16}),
        ("--use-distributed-optimizer", "parallel", {"zero": 1}),
        ("--use-torch-fsdp2", "parallel", {"zero": 3}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel", {"zero": 2}),
        ("--ddp-bucket-size 10485760", "parallel", {"bucket_mb": 40.0}),
        ("--distributed-backend gloo", "run", {"device": "cpu"}),
        ("--recompute-activations", "memory", {"recompute": "selective"}),
        (
            "--recompute-granularity selective --recompute-modules layernorm moe_act mla_up_proj layernorm",
            "memory",
            {"recompute": "none", "recompute_parts": ["norms", "moe_act", "mla_up"]},
        ),
        (
            "--recompute-activations --recompute-modules core_attn mla_up_proj",
            "memory",
            {"recompute": "selective", "recompute_parts": ["mla_up"]},
        ),
        (
            "--recompute-granularity selective --recompute-modules core_attn",
            "memory",
            {"recompute": "selective"},
        ),
        ("--recompute-granularity full --recompute-method uniform", "memory", {"recompute": "full"}),
        ("--checkpoint-activations", "memory", {"recompute": "full"}),
        ("--fp16 --loss-scale 128", "precision", {"dtype": "fp16", "loss_scale": 128.0}),
        ("--lr-decay-style constant --lr-warmup-iters 5", "lr_schedule", {"kind": "constant", "warmup": 5}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 20",
            "lr_schedule",
            {"kind": "wsd", "decay_steps": 20},
        ),
        ("--lr-warmup-fraction 0.2 --lr-decay-iters 50", "lr_schedule", {"warmup": 10, "decay_steps": 50}),
        ("--decoupled-lr 1e-4", "optimizer", {"lr": 1e-3, "decoupled_lr": 1e-4}),
        ("--eval-iters 0", "validate", {"every": 0}),
        ("--split 100", "validate", {"every": 0}),
        (
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
            "parallel",
            {"split": [1, 3], "schedule": "1f1b"},
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
            "--decoder-last-pipeline-num-layers 2",
            "parallel",
            {"split": [3, 1, 3, 1], "schedule": "interleaved", "virtual_stages": 2},
        ),
        (
            "--num-layers 6 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            "parallel",
            {"split": [1, 2, 2, 1]},
        ),
        (
            "--num-layers 7 --pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 2",
            "parallel",
            {"split": [2, 2, 2, 1], "virtual_stages": 2},
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t|(t,t|)*1tL",
            "parallel",
            {"split": [0, 1, 2, 1], "virtual_stages": 2},
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 4 "
            "--pipeline-model-parallel-layout Et|t*3|(tt|)*1ttL",
            "parallel",
            {"split": [1, 3, 2, 2], "virtual_stages": 1},
        ),
        ("--reset-position-ids --reset-attention-mask --eod-mask-loss", "data", {"documents": "isolate"}),
    ],
)
def test_flags(more: str, group: str, wanted: dict[str, Any]) -> None:
    assert {name: small(*more.split())[group][name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("more", "field", "text"),
    [
        ("--num-layer 2", "--num-layer", "did you mean '--num-layers'?"),
        ("--num-layers two", "--num-layers", "invalid int value: 'two'"),
        ("--num-layers", "--num-layers", "expected"),
        ("stray", "hexad megatron", "'stray'"),
        ("--lr-decay-style exponential", "--lr-decay-style", "invalid choice"),
        ("--optimizer sgd", "--optimizer", "use adam"),
        ("--fp16 --bf16", "--bf16", "beside --fp16"),
        ("--train-samples 800", "--train-samples", "beside --train-iters"),
        ("--lr-decay-samples 800", "--lr-decay-samples", "use --lr-decay-iters"),
        ("--data-path a", "--data-path", "found --data-path, --mock-data"),
        ("--split nine", "--split", "'nine'"),
        ("--eod-mask-loss", "--eod-mask-loss", "--reset-position-ids and --reset-attention-mask"),
        ("--swiglu", "--swiglu", "neither GPT-2"),
        ("--no-position-embedding", "--no-position-embedding", "use rope"),
        ("--position-embedding-type alibi", "--position-embedding-type", "found alibi"),
        ("--vocab-size 0", "--vocab-size", "1 or more"),
        ("--recompute-granularity full", "--recompute-granularity", "add uniform"),
        ("--cp-comm-type p2p a2a --context-parallel-size 2", "--cp-comm-type", "for all layers"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size", "found 0"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 9", "--lr-wsd-decay-style", "use linear"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttm|L",
            "--pipeline-model-parallel-layout",
            "3 stages of 4 layers",
        ),
        (
            "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1",
            "--decoder-first-pipeline-num-layers",
            "leaves 3 of 4 layers for 2",
        ),
        ("--pp-partition-method type:mlp --pipeline-model-parallel-size 2", "--pp-partition-method", "use"),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank",
            "leave it out",
        ),
        (
            "--context-parallel-size 2 --hierarchical-context-parallel-sizes 1 2",
            "--hierarchical-context-parallel-sizes",
            "use a2a+p2p",
        ),
    ],
)
def test_refused(more: str, field: str, text: str) -> None:
    error = problem(*SMALL, *more.split())
    assert error.field == field and text in str(error), str(error)


def test_all_unknown_flags_are_named_at_once() -> None:
    """In their order, each once, before what else is wrong with the line."""
    line = "--num-layer 2 --spam a b --optimizer sgd --eggs=3 --spam -1 --hidden-siz 64 --num-layers two"
    error = problem(*SMALL, *line.split())
    assert error.field == "--num-layer, --spam, --eggs, --hidden-siz"
    assert error.problem == (
        "not flags of Megatron-LM that Hexad knows (did you mean '--num-layers', '--hidden-size'?); "
        "correct them, or ignore them with --ignore --num-layer,--spam,--eggs,--hidden-siz"
    )
    assert "did you mean" not in str(problem(*SMALL, "--spam", "--eggs"))


def test_flags_with_underscores() -> None:
    """As some forks write them; values keep theirs."""
    line = [word.replace("-", "_").replace("__", "--", 1) if word[:2] == "--" else word for word in SMALL]
    assert "--num_layers" in line and translate(line).tree == translate(SMALL).tree
    assert translate([*SMALL, "--save=my_run"]).tree["run"]["dir"] == "my_run"
    assert problem(*SMALL, "--num_layer", "2").field == "--num_layer"


def test_ignored_flags() -> None:
    """Known or not, with their values in either form; each is reported, also one that is not on the line."""
    spare = "--spam a b --eggs=3 --squared-relu --num-experts 8 --ham -1"
    line = [*SMALL[:4], *spare.split(), *SMALL[4:]]
    translation = translate(line, ignore=["--spam,eggs", "--squared-relu, --num-experts,--ham", "--absent"])
    assert translation.tree == translate(SMALL).tree
    assert translation.notes[:2] == (
        "--spam a b, --eggs 3, --squared-relu, --num-experts 8, --ham -1: ignored",
        "--absent: to be ignored, but not on the line",
    )
    with pytest.raises(
        ConfigError, match=r"--ham: not a flag .*; correct it, or ignore it with --ignore --ham"
    ):
        translate(line, ignore=["--spam,--eggs,--squared-relu,--num-experts"])
    with pytest.raises(ConfigError, match="--num-layers: is missing"):
        translate(SMALL, ignore=["--num-layers"])
    notes = parse([*SMALL, "--what", "3"], ignore_unknown=True).notes
    assert "--what 3: ignored" in notes


def test_every_refused_flag_is_refused() -> None:
    for flag in {id(flag): flag for flag in FLAGS.values()}.values():
        if flag.effect == "refused":
            value = [] if flag.kind is bool else ["7"]
            assert problem(*SMALL, flag.name, *value).field == flag.name


def test_flags_without_effect_are_reported_once() -> None:
    base = len(translate(SMALL).notes)
    translation = translate(
        [*SMALL, "--use-flash-attn", "--no-rope-fusion", "--use-flash-attn", "--log-progress"]
    )
    assert len(translation.notes) == base + 2
    assert any("--no-rope-fusion, --use-flash-attn: no effect" in note for note in translation.notes)
    assert resolved(translation).config == resolved(translate(SMALL)).config
    assert yaml.safe_load(translation.yaml()) == translation.tree and "# --log-progress" in translation.yaml()


def test_table_names_settings() -> None:
    """Every target is a setting; every flag has a name, and a reason where it has no effect."""
    known = set(setting_names())
    for flag in (flag for group in GROUPS.values() for flag in group):
        assert not flag.target or flag.target in known or flag.target.startswith("model.moe."), flag
        assert flag.note or flag.effect == "becomes", flag
        assert flag.target or flag.note, flag
        for needed in flag.needs:
            name, _, value = needed.partition(" ")
            assert name in FLAGS and (not value or value in FLAGS[name].choices), flag
    assert len(FLAGS) == len(
        {name for group in GROUPS.values() for flag in group for name in (flag.name, *flag.aliases)}
    )


def test_loading(tmp_path: Path) -> None:
    """A line with --save and --load the same resumes; another directory is a checkpoint to begin with."""
    at = str(tmp_path)
    (tmp_path / "old").mkdir()
    tree = small("--save", f"{at}/new", "--load", f"{at}/new", "--exit-on-missing-checkpoint")
    assert tree["checkpoint"]["resume"] == "must" and tree["run"]["dir"] == f"{at}/new"
    tree = translate([*SMALL, "--save", f"{at}/new", "--load", f"{at}/old", "--save-interval", "7"]).tree
    assert tree["checkpoint"]["load"] == f"{at}/old" and tree["checkpoint"]["every"] == 7
    assert tree["checkpoint"]["resume"] == "never"
    assert small("--save", f"{at}/new")["checkpoint"]["resume"] == "never"
    assert small("--save", f"{at}/new", "--load", f"{at}/new")["checkpoint"]["resume"] == "auto"
    tree = translate([*SMALL, "--load", f"{at}/old", "--finetune", "--no-load-optim", "--no-load-rng"]).tree
    assert tree["model"]["load"] == f"{at}/old" and "load" not in tree["checkpoint"]
    translation = translate([*SMALL, "--load", f"{at}/nothing"])
    assert "load" not in translation.tree["checkpoint"] and any(
        "does not exist" in note for note in translation.notes
    )
    assert problem(*SMALL, "--save", at, "--load", at, "--finetune").field == "--finetune"
    (tmp_path / "old" / "checkpoints").mkdir()
    for save in ("old", "new"):
        line = [*SMALL, "--save", f"{at}/{save}", "--load", f"{at}/old", "--no-load-optim"]
        assert problem(*line).field == "--no-load-optim"
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("100")
    for flags in (["--load", f"{at}/old"], ["--save", f"{at}/old", "--load", f"{at}/old"]):
        assert "hexad checkpoint import" in str(problem(*SMALL, *flags))


def test_global_batch_follows_from_the_world() -> None:
    line = without(SMALL, "--global-batch-size")
    assert translate(line, world=4).tree["batch"] == {"micro": 1, "global": 4}
    with pytest.raises(ConfigError, match="do not divide the 3 ranks"):
        translate([*line, "--tensor-model-parallel-size", "2"], world=3)


def test_scripts_own_flags() -> None:
    line = parse(
        [*SMALL, "--my-flag", "3", "--theirs"],
        {"tokenizer_type": "X", "kv_channels": 8, "own": 1},
        lambda parser: parser.add_argument("--my-flag", type=int, default=1),
        ignore_unknown=True,
    )
    with pytest.raises(ConfigError, match="--step-batch-size-schedule"):
        parse(SMALL, {"step_batch_size_schedule": "0:4"})
    derive(line.arguments)
    arguments = line.arguments
    assert (arguments.my_flag, arguments.tokenizer_type, arguments.kv_channels, arguments.own) == (
        3,
        "NullTokenizer",
        8,
        1,
    )


def test_a_script_may_have_flags_of_the_same_names_as_forks() -> None:
    """Refused, without effect or an alias there; the script's own meaning here."""

    def extra(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("own")
        group.add_argument("--epochs", type=int, default=3)
        group.add_argument("--temperature", type=float, default=1.0)
        group.add_argument("--intermediate-size", type=int, dest="own_size")

    line = parse([*SMALL, "--temperature", "0.5", "--intermediate-size", "96"], extra=extra)
    assert (line.arguments.epochs, line.arguments.temperature, line.arguments.own_size) == (3, 0.5, 96)
    assert line.arguments.ffn_hidden_size is None and not any("--temperature" in note for note in line.notes)
    with pytest.raises(ConfigError, match="--epochs: found 3"):
        parse([*SMALL, "--epochs", "3"])


def test_every_flag_has_one_meaning() -> None:
    """No flag is declared twice, and attributes that several flags share begin alike."""
    declared = [name for group in GROUPS.values() for flag in group for name in (flag.name, *flag.aliases)]
    assert len(declared) == len(set(declared)) == len(FLAGS) > 800
    for switch, value in (("--rl-skip-bos-token", True), ("--no-rl-skip-bos-token", False)):
        assert parse([*SMALL, switch]).arguments.rl_skip_bos_token is value
    assert parse([*SMALL, "--persistent-save-interval", "3"]).arguments.save_interval == 3
    arguments = parse(SMALL).arguments
    assert arguments.dist_ckpt_strictness == "assume_ok_unexpected" and arguments.tp_comm_overlap_ag is True
    assert arguments.moe_router_group_topk is None and arguments.offload_modules is None


def test_flags_of_caches_and_logs_have_no_effect() -> None:
    more = "--dist-ckpt-strictness log_all --max-tokens-to-oom 3 --dist-ckpt-optim-fully-reshardable "
    more += "--no-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --wandb-entity us"
    translation = translate([*SMALL, *more.split()])
    assert translation.tree == small()
    notes = "\n".join(translation.notes)
    assert "--dist-ckpt-strictness: no effect: there is one format" in notes
    assert "--max-tokens-to-oom: no effect: of inference" in notes
    assert "--no-tp-comm-overlap-ag, --no-tp-comm-overlap-rs: no effect" in notes


@pytest.mark.parametrize(
    ("more", "group", "name", "value"),
    [
        (("--split", "'99,1,0'"), "data", "split", [99.0, 1.0, 0.0]),
        (("--exit-interval", "40"), "run", "steps", 40),
        (("--exit-interval", "400"), "run", "steps", 100),
        (("--exit-interval", "40", "--lr-decay-style", "cosine"), "lr_schedule", "decay_steps", 100),
        (("--check-weight-hash-across-dp-replicas-interval", "7"), "log", "check_replicas", 7),
        (("--ds-sequence-parallel-size", "2"), "parallel", "context_method", "ulysses"),
        (("--ds-sequence-parallel-size", "2"), "parallel", "context", 2),
        (("--no-pipeline-parallel",), "parallel", "pipeline", 1),
        (("--lr-decay-tokens", "12800", "--lr-warmup-tokens", "2560"), "lr_schedule", "decay_steps", 50),
        (("--lr-decay-tokens", "12800", "--lr-warmup-tokens", "2560"), "lr_schedule", "warmup", 10),
        (("--vocab-size", "16"), "model", "vocab", 17),
        (("--fp8-format", "hybrid", "--bf16"), "precision", "dtype", "fp8"),
        (("--fp8-format", "hybrid", "--bf16"), "precision", "fp8_weight_gradients", True),
        (("--fp8-hybrid", "--bf16", "--no-fp8-wgrad"), "precision", "fp8_weight_gradients", False),
    ],
)
def test_flags_of_scripts_in_the_wild(more: tuple[str, ...], group: str, name: str, value: Any) -> None:
    assert translate([*SMALL, *more]).tree[group][name] == value


def test_tokens_count_samples() -> None:
    line = [*without(SMALL, "--train-iters"), "--train-tokens", "25700", "--lr-decay-tokens", "12800"]
    tree = translate(line).tree  # 803 samples of 32 tokens, 8 in a step
    assert (tree["run"]["steps"], tree["lr_schedule"]["decay_steps"]) == (100, 50)
    assert translate([*line, "--train-samples", "80"]).tree["run"]["steps"] == 10
    assert problem(*SMALL, "--lr-decay-tokens", "9", "--lr-decay-iters", "9").field == "--lr-decay-tokens"


def test_a_null_tokenizer_reads_numbers(tmp_path: Path) -> None:
    from hexad.dataset.indexed import IndexedDataset
    from hexad.dataset.text.tokenizer import load_tokenizer

    save = str(tmp_path / "run")
    translation = translate([*without(SMALL, "--vocab-size"), "--vocab-size", "16", "--save", save])
    translation.write_files()
    tokenizer = load_tokenizer(translation.tree["data"]["tokenizer"])
    assert tokenizer.vocab_size == translation.tree["model"]["vocab"] == 17
    assert list(tokenizer.encode("3 15 0")) == [3, 15, 0]
    assert max(IndexedDataset(translation.tree["data"]["train"])[0]) < 16


SCHEDULES = (
    "--lr-decay-style linear --lr-warmup-iters 10",
    "--lr-decay-style cosine --lr-warmup-fraction 0.25 --lr-decay-iters 80 --min-lr 1e-4",
    "--lr-decay-style constant --lr-warmup-iters 3",
    "--lr-decay-style inverse-square-root --lr-warmup-iters 10 --min-lr 5e-4",
    "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 30 --lr-warmup-iters 10",
    "--lr-decay-style cosine --lr-warmup-iters 10 --decoupled-lr 5e-4 --min-lr 1e-5",
    "--lr-decay-style inverse-square-root --lr-warmup-iters 9 --decoupled-lr 2e-2 --decoupled-min-lr 5e-3",
    "--lr-decay-style constant --decoupled-lr 5e-4 --decoupled-min-lr 1e-5",
)


@pytest.mark.parametrize("more", SCHEDULES)
def test_learning_rates_are_megatron_cores(more: str) -> None:
    """Step ``n`` has the rate of Megatron-LM's iteration ``n + 1``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    line = parse([*SMALL, *more.split()])
    derive(line.arguments)
    given = line.arguments
    decay = given.lr_decay_iters or given.train_iters
    warmup = given.lr_warmup_iters if given.lr_warmup_fraction is None else given.lr_warmup_fraction * decay

    class Optimizer:
        param_groups: list[dict[str, float]] = []

    own = {"max_lr": given.decoupled_lr, "min_lr": given.decoupled_min_lr}
    decoupled = {name: value for name, value in own.items() if value is not None}
    Optimizer.param_groups = [{"lr": 0.0, "weight_decay": 0.0, **more} for more in ({}, decoupled)]
    theirs = core.OptimizerParamScheduler(
        Optimizer(), 0.0, given.lr, given.min_lr, warmup, decay, given.lr_decay_style, 0.01, 0.01,
        given.train_iters, "constant", wsd_decay_steps=given.lr_wsd_decay_iters,
        lr_wsd_decay_style=given.lr_wsd_decay_style,
    )  # fmt: skip
    config = resolved(translate([*SMALL, *more.split()])).config
    for step in range(1, 101):
        theirs.step(1)
        ours = learning_rates(config.optimizer, config.lr_schedule, config.run.steps, step)
        wanted = [group["lr"] for group in Optimizer.param_groups]
        assert ours == pytest.approx(wanted, rel=1e-12, abs=1e-18), step


def test_facts_about_warm_up() -> None:
    """From .01 to .1 in Megatron-LM's own test; from 0 here: half of the way after half of the steps."""
    schedule = build_config(small("--lr-warmup-iters", "10")).lr_schedule
    assert learning_rate(schedule, 0.1, 100, 5) == pytest.approx(0.05)


def test_translating_needs_no_torch() -> None:
    script = (
        "import sys; from hexad.compat.megatron.translate import translate; translate(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, *SMALL], timeout=PATIENCE).returncode == 0
