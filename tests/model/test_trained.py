"""Patterns select the weights of experts by Hexad's names, those in files, and those of transformers."""

from typing import Any

import pytest

from hexad.config import ConfigError
from hexad.config.model import ModelSettings
from hexad.model.configuration import build_config
from hexad.model.inventory import ModelInventory
from hexad.model.trained import Trained, check_trained

_MOE = {"experts": 12, "top_k": 2, "ffn_hidden": 16}
_MLA = {"q_rank": 14, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 7}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"moe": _MOE},
    "qwen3_moe": {"moe": {**_MOE, "layers": [1]}},
    "deepseek_v3": {
        "moe": {**_MOE, "score": "sigmoid", "shared_experts": 2, "first_dense": 1},
        "mla": _MLA,
    },
    "llama": {"moe": _MOE},
}
_STACKS = {"layers.1.ffn.experts.gate_up", "layers.1.ffn.experts.down"}
_SHARED = {f"layers.1.ffn.shared.{part}.weight" for part in ("gate", "up", "down")}
_ROUTER = {"layers.1.ffn.router.weight"}


def model_of(family: str, **settings: Any) -> ModelSettings:
    sizes = {"layers": 2, "hidden": 48, "heads": 8, "vocab": 97}
    return build_config({"model": {"family": family, **sizes, **MODELS[family], **settings}}).model


def selected(family: str, *patterns: str) -> set[str]:
    """The weights that the patterns train, of layer 1 where all layers are alike."""
    model = model_of(family, train=list(patterns))
    inventory = ModelInventory(model)
    weights = inventory.weights()
    outputs = [
        names for number in range(2) for part in inventory.block(number).parts for names in part.outputs
    ]
    check_trained(model, list(weights), outputs)
    frozen = Trained.of(model).frozen
    return {name for name in weights if not frozen(name) and "layers.0" not in name}


@pytest.mark.parametrize(
    ("family", "patterns", "names"),
    [
        ("mixtral", ["experts"], _STACKS),
        ("mixtral", ["mlp.experts.*"], _STACKS),
        ("mixtral", ["block_sparse_moe.experts"], _STACKS),
        ("mixtral", ["w1", "w3"], {"layers.1.ffn.experts.gate_up"}),
        ("mixtral", ["experts.*.w2"], {"layers.1.ffn.experts.down"}),
        ("mixtral", ["gate"], _ROUTER),
        ("mixtral", ["router", "gate_up_proj"], {*_ROUTER, "layers.1.ffn.experts.gate_up"}),
        ("mixtral", ["layers.1.*.experts"], _STACKS),
        ("qwen3_moe", ["mlp.experts.*"], _STACKS),
        ("qwen3_moe", ["mlp.gate"], _ROUTER),
        ("qwen3_moe", ["experts.gate_up_proj"], {"layers.1.ffn.experts.gate_up"}),
        ("qwen3_moe", ["experts.*.down_proj"], {"layers.1.ffn.experts.down"}),
        ("deepseek_v3", ["mlp.experts"], _STACKS),
        ("deepseek_v3", ["shared_experts"], _SHARED),
        ("deepseek_v3", ["mlp.gate.weight"], _ROUTER),
        ("llama", ["experts"], _STACKS),
    ],
)  # fmt: skip
def test_patterns_select_experts(family: str, patterns: list[str], names: set[str]) -> None:
    assert {name for name in selected(family, *patterns) if "bias" not in name} == names


@pytest.mark.parametrize(
    ("family", "pattern", "left"),
    [
        ("mixtral", "w1", "experts.0.w3"),
        ("mixtral", "experts.[0-9]", "experts.10.w1"),
        ("mixtral", "experts.11", "experts.0.w1"),
        ("mixtral", "layers.1.block_sparse_moe.experts.3.w2", "experts.0.w2"),
        ("qwen3_moe", "experts.*.up_proj", "experts.0.gate_proj"),
        ("deepseek_v3", "mlp.experts.1?", "experts.0.gate_proj"),
    ],
)
def test_a_part_of_a_layers_experts_is_refused(family: str, pattern: str, left: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.train: selects a part of .*ffn\.experts") as caught:
        selected(family, pattern)
    assert left in str(caught.value)


def test_a_pattern_that_matches_no_expert_is_named() -> None:
    for pattern in ("experts.12", "w4", "mlp.expert"):
        with pytest.raises(ConfigError, match="which matches no name"):
            selected("mixtral", pattern)


def test_adapters_are_of_linear_layers() -> None:
    """Shared experts and dense layers have them; experts only where they are named, routers never."""
    model = model_of("deepseek_v3", lora={"rank": 2})
    adapters = {name.rpartition(".")[0] for name in ModelInventory(model).adapters()}
    assert {"layers.0.ffn.gate", "layers.1.ffn.shared.down", "layers.1.attention.out"} <= adapters
    assert not any("router" in name or ".experts" in name for name in adapters)
    for family, target in (("deepseek_v3", "mlp.gate"), ("mixtral", "gate"), ("mixtral", "router.weight")):
        model = model_of(family, lora={"rank": 2, "targets": [target]})
        inventory = ModelInventory(model)
        outputs = [names for part in inventory.block(1).parts for names in part.outputs]
        with pytest.raises(
            ConfigError, match="matches no name of a layer that can have adapters, only layers"
        ):
            check_trained(model, list(inventory.weights()), outputs)


def test_adapters_of_a_part_of_a_stack_are_refused() -> None:
    """``w1`` and ``w3`` are one stack, which has one adapter."""
    model = model_of("mixtral", lora={"rank": 2, "targets": ["w1"]})
    inventory = ModelInventory(model)
    outputs = [names for branch in inventory.block(1).parts for names in branch.outputs]
    with pytest.raises(ConfigError, match=r"selects a part of .*gate_up, but not .*w3") as caught:
        check_trained(model, list(inventory.weights()), outputs)
    assert str(caught.value).startswith("model.lora.targets: ")
