"""Settings of experts go to ``config.json`` and back, over random ones of every family."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import transformers

from hexad.config import ConfigError
from hexad.config.model import ModelSettings
from hexad.model.configuration import complete_model
from hexad.model.families import families, family
from hexad.model.hugging_face import architecture, config_json, model_settings

_MLA = {"q_rank": 14, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 7}
_CHOICES: dict[str, list[Any]] = {
    "experts": [4, 8, 12],
    "top_k": [1, 2, 3],
    "ffn_hidden": ["auto", 20],
    "shared_experts": [0, 0, 2],
    "shared_gate": [False, False, False, True],
    "every": [1, 1, 2, 3],
    "first_dense": [0, 0, 1, 2],
    "score": ["softmax_topk", "topk_softmax", "sigmoid"],
    "groups": [1, 1, 2, 4],
    "top_groups": [1, 2],
    "scale": [1.0, 1.0, 2.5],
    "normalise": [True, False],
    "forced": [False, False, False, True],
}


def drawn(name: str, chance: Random) -> ModelSettings:
    """A random model of a family; settings that contradict each other are none."""
    moe = {key: chance.choice(values) for key, values in _CHOICES.items()}
    moe["top_groups"] = min(moe["top_groups"], moe["groups"])
    if chance.random() < 0.3:
        moe |= {"layers": sorted(chance.sample(range(5), 3)), "every": 1, "first_dense": 0}
    tree = {"family": name, "layers": 5, "hidden": 48, "heads": 6, "vocab": 97, "moe": moe}
    if family(name).latent:
        tree["mla"] = _MLA
    return complete_model(ModelSettings.model_validate(tree), 40)


def meaning(model: ModelSettings) -> dict[str, Any]:
    """What a model's experts compute, in one form for settings that are the same."""
    moe = model.moe
    assert moe is not None
    restricted = moe.groups != moe.top_groups
    return {
        "layers": [number for number in range(model.layers) if moe.in_layer(number)],
        "sizes": (moe.experts, moe.top_k, moe.ffn_hidden, moe.shared_experts),
        "biased": moe.biased,
        "sum": moe.score == "topk_softmax" or (moe.normalise and moe.top_k > 1),
        "groups": (moe.groups, moe.top_groups) if restricted else None,
        "scale": moe.scale,
    }


@pytest.mark.parametrize("name", [name for name in families() if family(name).gated])
def test_what_is_written_is_read_as_the_same(name: str) -> None:
    chance, written, refused = Random(name), 0, 0
    for _ in range(300):
        model = drawn(name, chance)
        if not any(model.moe.in_layer(number) for number in range(5)):  # type: ignore[union-attr]
            continue
        try:
            keys = config_json(model, "float32", {})
        except ConfigError as error:
            refused += 1
            assert str(error).startswith("model.family: found ") and "moe {" in str(error)
            continue
        written += 1
        back = complete_model(ModelSettings.model_validate(model_settings(keys, Path("config.json"))), 40)
        assert meaning(back) == meaning(model), keys
        assert back.family == architecture(model).name
        config = transformers.AutoConfig.for_model(**keys)  # which checks its own values
        moe = model.moe
        assert moe is not None
        assert config.num_experts_per_tok == moe.top_k
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        assert moe.experts in [getattr(config, key, None) for key in names]
    assert refused
    assert bool(written) == (name != "qwen2")  # no such class has biases of queries and keys alone
