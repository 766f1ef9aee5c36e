"""Parts of layers that are recomputed (``memory.recompute_parts``): gradients are the same to the last bit,
and what is wrong with a part is noticed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hexad.config import ConfigError
from hexad.model import recompute as recomputation
from hexad.model.configuration import build_config, load_config
from hexad.model.dropout import DropoutKey
from hexad.model.recompute_inventory import SELECTIVE, WHOLE, Recompute, RecomputedPart
from hexad.model.transformer import Transformer
from hexad.parallel.context.spans import Spans
from hexad.parallel.sharding import declared_parameters, initialise
from hexad.planning.checks import check_config
from hexad.topology.layout import Layout

from ..layers import Sums, shard_of, whole_model

LENGTH = 10
_SIZES = {"layers": 2, "hidden": 24, "heads": 4, "ffn_hidden": 20, "vocab": 53, "dropout": 0.1}
_EXPERTS = {"experts": 6, "top_k": 2, "ffn_hidden": 12}
_MLA = {"q_rank": 14, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 7}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "mixtral": {"family": "mixtral", "kv_heads": 2, "moe": _EXPERTS},
    "qwen3_moe": {"family": "qwen3_moe", "kv_heads": 2, "moe": {**_EXPERTS, "every": 2}},
    "deepseek_v2": {
        "family": "deepseek_v2",
        "mla": {**_MLA, "q_rank": None, "value_dim": 13},
        "moe": {**_EXPERTS, "shared_experts": 2, "shared_gate": True, "first_dense": 1},
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "mla": _MLA,
        "moe": {**_EXPERTS, "score": "sigmoid", "shared_experts": 1, "groups": 3, "top_groups": 2},
        "lora": {"rank": 3, "dropout": 0.2},
        "train": ["*"],
    },
}
PARTS: tuple[RecomputedPart, ...] = ("norms", "moe_act", "mla_up")
OF_MODEL = {name: {"norms"} | ({"moe_act"} if "moe" in model else set()) for name, model in MODELS.items()}
for _name in ("deepseek_v2", "deepseek_v3"):
    OF_MODEL[_name].add("mla_up")


def parts_of(*parts: RecomputedPart) -> Recompute:
    return Recompute(parts=frozenset(parts))


def model_of(name: str, recompute: Recompute, dtype: torch.dtype, exact: bool = False) -> Transformer:
    model = build_config({"model": {**_SIZES, **MODELS[name]}}).model
    built = whole_model(model, replace(shard_of(dtype=dtype), exact=exact), recompute)
    initialise(declared_parameters(built), 3)
    return built


def gradients(
    name: str,
    recompute: Recompute,
    dtype: torch.dtype = torch.float64,
    split: bool = False,
    exact: bool = False,
) -> dict[str, torch.Tensor]:
    """Of every parameter, and the loss; ``split``: weight gradients are deferred."""
    model = model_of(name, recompute, dtype, exact)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 53
    spans = Spans(tokens.numel(), len(tokens), (0, 3, 10, 12, 20))
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if split:
        sums = Sums({parameter: torch.full_like(parameter, torch.nan) for parameter in parameters.values()})
    loss = model.loss_sum(tokens, tokens.roll(1, 1), spans, key=DropoutKey(1, 2, 3))
    if split:
        with sums.defer():
            loss.backward()
        totals = {name: sums.totals[parameter] for name, parameter in parameters.items()}
    else:
        loss.backward()
        totals = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return {"loss": loss.detach(), **totals}


def different(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys() and len(wanted) > 5
    assert all(gradient.isfinite().all() for gradient in wanted.values())
    return [name for name, gradient in wanted.items() if not torch.equal(found[name], gradient)]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_to_the_last_bit(name: str) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        wanted = gradients(name, Recompute(), dtype)
        for recompute in (
            *(parts_of(part) for part in PARTS),
            parts_of(*PARTS),
            Recompute("selective", parts=frozenset(PARTS)),
            Recompute("full", 1, frozenset(PARTS)),
        ):
            assert not different(gradients(name, recompute, dtype), wanted)
            if dtype == torch.float64:
                assert not different(gradients(name, recompute, dtype, split=True), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_exact_gradients_are_the_same_to_the_last_bit(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        wanted = gradients(name, Recompute(), dtype, exact=True)
        assert not different(gradients(name, parts_of(*PARTS), dtype, exact=True), wanted)


def test_which_parts_a_layer_recomputes() -> None:
    every = frozenset(PARTS)
    assert Recompute().of(0) == frozenset() and parts_of("norms").of(7) == {"norms"}
    assert Recompute("selective", 1).of(0) == SELECTIVE and not Recompute("selective", 1).of(1)
    assert Recompute("selective", 1, every).of(0) == SELECTIVE | {"mla_up"}
    assert Recompute("selective", 1, every).of(1) == every
    assert Recompute("full", 1, every).of(0) == WHOLE and Recompute("full", 1, every).of(1) == every


def _flops(name: str, recompute: Recompute) -> int:
    model = model_of(name, recompute, torch.float32)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    with FlopCounterMode(display=False) as counter:
        model.loss_sum(tokens, tokens).backward()
    return int(counter.get_total_flops())


def test_only_projections_of_latent_vectors_repeat_products() -> None:
    """Those of queries, keys and values, once per layer, with their adapters, of whose two products the
    counter leaves out the second, which is added in place."""
    tokens, per_head = 2 * LENGTH, _MLA["nope_dim"] + 13
    for name in MODELS:
        assert _flops(name, parts_of("norms", "moe_act")) == _flops(name, Recompute())
    again = _flops("deepseek_v2", parts_of("mla_up")) - _flops("deepseek_v2", Recompute())
    weights = 24 * 4 * 10 + 10 * 4 * per_head
    assert again == 2 * 2 * tokens * weights
    again = _flops("deepseek_v3", parts_of("mla_up")) - _flops("deepseek_v3", Recompute())
    weights = 14 * (40 + 3) + 10 * (4 * 13 + 3)
    assert again == 2 * 2 * tokens * weights


def _scaled_again(part: RecomputedPart) -> Callable[..., Any]:
    """In place of :func:`recomputable`: what is recomputed of the part is not what was there."""

    def recomputable(of: RecomputedPart, function: Callable[..., Any], *arguments: Any) -> Any:
        calls = 0

        def changing(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*arguments)
            if calls == 1 or of != part:
                return result
            scaled = [tensor * 1.001 for tensor in (result if isinstance(result, tuple) else (result,))]
            return torch.cat(scaled, 1) if isinstance(result, tuple) else scaled[0]

        return recomputation.recomputable(of, changing, *arguments)

    return recomputable


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for name, parts in OF_MODEL.items() for part in PARTS if part in parts]
)
def test_a_part_that_is_recomputed_wrongly_is_noticed(
    part: RecomputedPart, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is also: it is recomputed, and used."""
    wanted = gradients(name, Recompute())
    for module in ("norms", "experts", "latent_attention"):
        monkeypatch.setattr(f"hexad.model.{module}.recomputable", _scaled_again(part))
    assert different(gradients(name, parts_of(part)), wanted)
    others = parts_of(*(other for other in PARTS if other != part))
    assert not different(gradients(name, others), wanted)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("[norms, mlp]", "memory.recompute_parts[1]: found 'mlp', expected moe_act, norms or mla_up"),
        ("norms", "memory.recompute_parts: found 'norms', expected a list such as [norms, moe_act]"),
        ("{norms: true}", "memory.recompute_parts: found {'norms': True}, expected a list such"),
        ("[norms, norms]", "memory.recompute_parts: found ['norms', 'norms'], expected each part once"),
        ("[3]", "memory.recompute_parts[0]: found 3, expected moe_act, norms or mla_up"),
        ("null", "memory.recompute_parts: found None, expected a list such as [norms, moe_act]"),
    ],
)
def test_wrong_parts(given: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"memory.recompute_parts={given}"])
    assert str(error.value).startswith(problem) and "\n" not in str(error.value)
    assert "did you mean" not in str(error.value)


def test_compiled_blocks_recompute_nothing() -> None:
    config = build_config({"memory": {"recompute_parts": ["norms"]}, "run": {"compile": "full"}})
    with pytest.raises(ConfigError) as error:
        check_config(config, Layout(world=1))
    assert str(error.value).startswith("run.compile: found full with memory.recompute_parts norms")


def test_layers_recompute_the_parts_of_the_settings() -> None:
    for parts in chain.from_iterable(combinations(PARTS, number) for number in range(4)):
        config = build_config({"memory": {"recompute_parts": list(parts)}})
        assert Recompute.from_settings(config.memory).of(0) == frozenset(parts)
