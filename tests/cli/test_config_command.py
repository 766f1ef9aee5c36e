"""``hexad config`` and bare commands: what is accepted, what is said first, and how help is printed."""

import json
import os
from pathlib import Path

import pytest
import yaml

from hexad.cli.config import commented
from hexad.config import Config, setting_names
from hexad.model.configuration import load_config
from hexad.model.families import presets
from hexad.planning.costs import parameter_count
from hexad.topology.devices import gpu_visible

from ..dataset.chats import TEXT, chat_tokenizer
from ..training.command import call

WRONG = [
    ("run: {dir: ''}", "run.dir: found '', expected a name, not an empty text"),
    ("data: {train: ''}", "data.train: found '', expected a name, not an empty text"),
    ("data: {train: [[1, ' ']]}", "data.train[0][1]: found ' ', expected a name, not an empty text"),
    ("data: {train: []}", "data.train: found [], expected a prefix or [[weight, prefix], ...], not an empty"),
    ("data: {tokenizer: ''}", "data.tokenizer: found '', expected a name"),
    ("validate: {every: 2}", "data.validation: found no data, but validate.every 2 turns evaluation on"),
    ("run.steps: 3", "run.steps: unknown key; names with dots are for the command line, in a file they are "
                     "nested: run: {steps: ...}"),
    ("model: {rope_scaling.factor: 2}", "nested: rope_scaling: {factor: ...}"),
    ("run:", "run: found None, expected settings such as dir, seed, steps; to keep the defaults, leave out"),
    ("model: {rope_scaling: 3}", "model.rope_scaling: found 3, expected settings such as type, factor, "),
    ("model: {heads: 4, hidden: 64, ffn_hidden: 12}\nparallel: {tensor: 3}", "; use 1, 2 or 4"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_check_refuses(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text + "\n")
    result = call("config", "check", str(path))
    assert result.status == 2 and result.out == ""
    assert says in result.error


def test_degrees_advised_fit_the_model(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {heads: 4, hidden: 64}\nparallel: {tensor: 2}\n")
    assert call("config", "check", str(path), "--world", "3").error.endswith(
        "start 2 or 4 ranks, or use tensor 1"
    )


def test_cuda_needs_a_gpu_here_or_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexad.topology.devices.gpu_visible", lambda: False)
    path = tmp_path / "run.yaml"
    path.write_text("run: {device: cuda}\n")
    assert call("config", "check", str(path)).error.startswith(
        "run.device: found cuda, but no GPU is visible"
    )
    assert call("config", "check", str(path), "--elsewhere").status == 0


def test_check_opens_the_data_as_train_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chat_tokenizer(Path("tok"))
    Path("a.txt").write_text("\n".join(TEXT * 3))
    for prefix, tokenizer in (("good", "tok"), ("cut", "tok"), ("bytes", "byte")):
        options = ("--output", prefix, "--tokenizer", tokenizer, "--workers", "1")
        assert call("data", "build", "--input", "a.txt", *options).status == 0
    Path("cut.idx").write_bytes(Path("cut.idx").read_bytes()[:-1])
    settings = {"data": {"tokenizer": "tok", "train": "good", "sequence": 16, "validation": "no/such"}}
    Path("run.yaml").write_text(yaml.safe_dump({"model": {"heads": 4, "hidden": 64}, **settings}))
    wrong = {
        "data.train=no/such": "data.train: no/such.idx: no such file",
        "data.train=cut": "data.train: cut.idx: ",
        "data.tokenizer=byte": "data.train: good was built with tokenizer",
        "data.train=[[1, good], [1, bytes]]": "data.train: bytes was built with tokenizer byte",
        "data.sequence=100000": "data.train: good: holds",
        "validate.every=2": "data.validation: no/such.idx: no such file",
        "model.vocab=99": "model.vocab: found 99, less than the tokenizer's",
        "data.tokenizer=nope": "data.tokenizer: tokenizer 'nope'",
        "log.wandb=project": "log.wandb: needs a package",
    }
    for setting, says in wrong.items():
        checked, trained = call("config", "check", "run.yaml", setting), call("train", "run.yaml", setting)
        assert checked.error == trained.error and checked.error.startswith(says), setting
    assert call("config", "check", "run.yaml").status == 0
    assert call("config", "check", "run.yaml", "data.train=no/such", "--elsewhere").status == 0
    # Before there are data, all else.
    for setting in ("log.wandb=project", "data.tokenizer=nope"):
        assert call("config", "check", "run.yaml", "data.train=null", setting).error.startswith(
            wrong[setting]
        )
    # Ids that the tokenizer lacks, of data with the same end of documents.
    facts = json.loads(Path("good.hexad.json").read_text())
    del facts["xxh3_128"]  # of the rest
    Path("good.hexad.json").write_text(json.dumps({**facts, "max_token": 9999}))
    assert "good holds token id 9999" in call("config", "check", "run.yaml").error


def test_gpus_are_found_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert not gpu_visible(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert gpu_visible(tmp_path)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert not gpu_visible(tmp_path)


@pytest.mark.parametrize("gpu", [False, True])
def test_memory_is_that_of_this_machine(gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop is not told of a GPU, unless another machine is checked for."""
    monkeypatch.setattr("hexad.topology.devices.gpu_visible", lambda: gpu)
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {layers: 1, hidden: 32, heads: 2}\nrun: {steps: 9, dir: none}\nlr_schedule: {warmup: 9}\n"
    )
    text = call("config", "check", str(path)).out
    assert ("GPU" in text.split("note: no GPU")[0]) == gpu and ("in the host's memory" in text) != gpu
    assert ("note: no GPU is visible here" in text) != gpu
    assert "note: lr_schedule.warmup 9 is not below run.steps 9: the rate never reaches its peak" in text
    assert "a GPU's memory" in call("config", "check", str(path), "--elsewhere").out
    assert "lr_schedule.warmup 9" not in call("config", "check", str(path), "run.steps=10").out


def test_the_summary_has_the_published_size(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {preset: llama3-8b}\nbatch: {micro: 1, global: 64}\ndata: {sequence: 8192}\n"
        "parallel: {tensor: 4, pipeline: 2, data: 4, zero: 1}\nrun: {steps: 1000, dir: none}\n"
    )
    text = call("config", "check", str(path)).out
    assert "note: data.train is null" in text
    assert "8,030,261,248 (8.03 B)" in text and "524,288 per step (64 sequences of 8,192)" in text
    assert "32: tensor 4 x pipeline 2 x data 4, zero 1" in text
    facts = json.loads(call("config", "check", str(path), "--elsewhere", "--json").out)["summary"]
    memory = facts["memory_bytes"]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    assert memory["total"] == sum(memory[part] for part in parts)
    shown = call("show", "memory", str(path), "--json")
    assert memory["total"] == json.loads(shown.out)["total"]


@pytest.mark.parametrize("command", [(), ("show",), ("data",), ("checkpoint",), ("config",)])
def test_bare_commands_print_their_help_as_it_is(command: tuple[str, ...]) -> None:
    bare, asked = call(*command), call(*command, "--help")
    assert (bare.status, bare.out) == (2, "")
    assert bare.err == asked.out and "\n  -h, --help" in bare.err


def test_presets_are_listed_with_what_they_fill_in() -> None:
    rows = json.loads(call("config", "presets", "--json").out)
    assert [row["name"] for row in rows] == list(presets())
    for row in rows:
        model = load_config(None, [f"model.preset={row['name']}"]).model
        assert row["parameters"] == parameter_count(model)
        for name in ("family", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"):
            assert row[name] == getattr(model, name)
        assert row["context"] >= 1024
        if model.family == "gpt2":  # a table of positions
            assert row["context"] == model.max_positions
    text = call("config", "presets").out
    assert len(text.splitlines()) == len(rows) + 1
    assert "llama3-8b" in text and "8.03 B" in text and "124 M" in text


def test_init_writes_what_was_asked_for_and_can_be_trained_from(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    options = ("--preset", "gpt2", "--data", "d/train", "--validation", "d/val", "--nproc", "6")
    result = call("config", "init", str(path), *options, "parallel.tensor=2", "model.dropout=0.1")
    assert result.status == 0, result.err
    assert "data.tokenizer is byte" in result.out
    config = load_config(path)
    assert (config.model.preset, config.model.dropout, config.data.sequence) == ("gpt2", 0.1, 1024)
    assert (config.data.train, config.data.validation, config.validate_.every) == ("d/train", "d/val", 100)
    assert config.parallel.tensor == 2 and config.parallel.data == "auto"
    assert config.batch.global_ % (config.batch.micro * 3) == 0  # the ranks can divide it
    assert call("config", "check", str(path), "--world", "6", "--elsewhere").status == 0
    # All else is as without a file.
    given = yaml.safe_load(path.read_text())
    default = Config().model_dump(mode="json", by_alias=True)
    asked = {"dir", "preset", "dropout", "train", "validation", "sequence", "every", "tensor", "global"}
    for group, values in given.items():
        assert {key: default[group][key] for key in values if key not in asked} == {
            key: value for key, value in values.items() if key not in asked
        }


def test_init_never_overwrites_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine\n")
    assert "exists" in call("config", "init", str(path)).error and path.read_text() == "mine\n"
    other = str(tmp_path / "other.yaml")
    assert "did you mean 'llama3-8b'" in call("config", "init", other, "--preset", "lama").error
    assert "start 2 or 4 ranks" in call("config", "init", other, "--nproc", "3", "parallel.tensor=2").error
    assert "unknown key" in call("config", "init", other, "run.stepz=3").error
    assert not Path(other).exists()
    assert "cannot be written" in call("config", "init", str(tmp_path / "no" / "run.yaml")).error


def test_every_setting_can_be_commented() -> None:
    """Whatever is given: the text loads as the same, with a comment before each setting."""
    tree = Config().model_dump(mode="json", by_alias=True)
    text = commented(tree, "Head.")
    assert yaml.safe_load(text) == tree
    lines = text.splitlines()
    settings = [index for index, line in enumerate(lines) if line.startswith("  ") and "# " not in line]
    assert len(settings) == sum(len(group) for group in tree.values()) <= len(setting_names())
    assert all(lines[index - 1].startswith("  # ") for index in settings)
