"""One function turns every ``auto`` into a number, from the vocabulary that will be trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hexad.cli.main import run
from hexad.config import Config, ConfigError
from hexad.model.configuration import load_config
from hexad.planning import resolve
from hexad.topology.layout import Layout

from ..small import config_of

# The head of the byte tokenizer's 257 tokens costs as much as several of these layers.
MODEL = {"layers": 8, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn_hidden": 8}
TREE: dict[str, dict[str, Any]] = {
    "model": MODEL,
    "data": {"sequence": 16},
    "batch": {"micro": 1, "global": 8},
    "parallel": {"pipeline": 2},
}
TWO = Layout(world=2, pipeline=2)


def autos(tree: Any, path: str = "") -> list[str]:
    """Names of settings that are ``auto``."""
    if isinstance(tree, dict):
        return [name for key, value in tree.items() for name in autos(value, f"{path}.{key}".lstrip("."))]
    return [path] if tree == "auto" else []


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "auto"])
def test_nothing_is_left_to_resolve(family: str, schedule: str) -> None:
    virtual = 2 if schedule == "interleaved" else 1
    config = config_of(
        TREE,
        model={"family": family},
        parallel={"pipeline": 2, "schedule": schedule, "virtual_stages": virtual},
    )
    assert "model.vocab" in autos(config.model_dump(by_alias=True))
    resolved = resolve(config, TWO)
    # Policies, the place to compute on (which only the process knows), and limits of searches remain.
    policies = {
        "run.device",
        "run.cpu_binding",
        "checkpoint.resume",
        "run.compile",
        "data.bos",
        "data.packing",
        "parallel.schedule",
        "parallel.schedule_memory",
    }
    # What the memory, the device and the process allow.
    policies |= {"inference.cache_tokens", "inference.block", "inference.connections"}
    unused = {"parallel.context_ulysses", "parallel.context_balance"}
    unused |= {"parallel.schedule_group"} if schedule != "interleaved" else set()
    assert set(autos(resolved.config.model_dump(by_alias=True))) <= policies | unused
    assert resolved.config.model.vocab == 257
    assert resolved.config.parallel.data == 1 and resolved.config.lr_schedule.decay_steps == 200
    again = resolve(resolved.config, TWO)
    assert again == resolved


@pytest.mark.parametrize(
    ("overrides", "chunks"),
    [
        (["parallel.tensor=8"], 2),  # 64 MiB
        (["parallel.tensor=8", "batch.micro=4"], 4),
        (["parallel.tensor=8", "precision.dtype=fp32"], 4),
        (["parallel.tensor=4", "parallel.context=2"], 1),
        (["parallel.tensor=1"], 1),
        (["parallel.tensor=8", "precision.dtype=fp8"], 1),
        (["parallel.tensor=8", "parallel.tensor_chunks=3"], 3),
    ],
)
def test_messages_of_32_mib_are_worth_a_chunk(overrides: list[str], chunks: int) -> None:
    config = load_config(
        {"model": {"preset": "llama3-8b"}, "data": {"sequence": 8192}, "batch": {"micro": 1, "global": 8}},
        ["precision.dtype=bf16", *overrides],
    )
    layout = Layout.from_settings(config.parallel, 8)
    assert resolve(config, layout, vocab=128256).config.parallel.tensor_chunks == chunks


def test_the_schedule_that_is_shown_is_the_one_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The split and the placement that ``schedule: auto`` finds depend on the vocabulary."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**TREE, "parallel": {"pipeline": 2, "schedule": "auto"}}))
    wanted = resolve(load_config(path, ["model.vocab=257"]), TWO).plan
    cheap = resolve(load_config(path, ["model.vocab=1"]), TWO).plan
    assert (wanted.schedule, wanted.layers) != (cheap.schedule, cheap.layers)
    assert run(["show", "schedule", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert tuple(shown["placement"]) == wanted.schedule.placement
    ranks = [[(a["kind"], a["stage"], a["microbatch"]) for a in actions] for actions in shown["ranks"]]
    assert ranks == [[tuple(action) for action in actions] for actions in wanted.schedule.ranks]


def test_layers_that_recompute_are_counted_with_the_real_vocabulary(tmp_path: Path) -> None:
    """With a head that costs nothing the stages have 4 layers each; with the tokenizer's, one has 6."""
    path = tmp_path / "run.yaml"
    memory = {"recompute": "full", "recompute_layers": 6}
    model = {**MODEL, "hidden": 8, "ffn_hidden": 4}
    path.write_text(yaml.safe_dump({**TREE, "model": model, "memory": memory}))
    assert run(["config", "check", str(path), "--elsewhere"]) == 0
    assert max(map(len, resolve(load_config(path), TWO).plan.layers)) == 6
    with pytest.raises(ConfigError, match="no stage has more than 6 of the model's 8 layers"):
        resolve(load_config(path, ["memory.recompute_layers=7"]), TWO)


def test_the_tokenizer_is_read_only_where_it_must_be(tmp_path: Path) -> None:
    missing = {"tokenizer": str(tmp_path / "none"), "sequence": 16}
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        resolve(config_of(TREE, data=missing), TWO)
    assert resolve(config_of(TREE, data=missing, model={"vocab": 300}), TWO).config.model.vocab == 300
    with pytest.raises(ConfigError, match=r"model\.vocab: found 300, less than the tokenizer's 301"):
        resolve(config_of(TREE, model={"vocab": 300}), TWO, vocab=301)


def test_a_configuration_without_files_is_completed_first() -> None:
    model = resolve(Config(), Layout(world=1), vocab=100).config.model
    assert (model.vocab, model.head_dim) == (100, model.hidden // model.heads)


def test_learned_positions_have_no_rotary_fraction() -> None:
    config = load_config({"model": {"family": "gpt2", "vocab": 100, "rotary_fraction": 0.5}})
    with pytest.raises(ConfigError, match=r"model.rotary_fraction.*0.5.*gpt2 has learned positions"):
        resolve(config, Layout(world=1))
