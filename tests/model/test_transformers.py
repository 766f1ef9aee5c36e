"""Logits, gradients and training steps equal to Hugging Face transformers on random weights, in float64."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from hexad.checkpoint.hugging_face.names import published_tensors
from hexad.config import Config
from hexad.config.model import ModelSettings
from hexad.model.inventory import ModelInventory
from hexad.parallel.context.spans import Spans
from hexad.parallel.sharding import declared_parameters

from ..checkpoint.hugging_face import exact_functions, randomise
from ..layers import load_global, shard_of, whole_model
from ..small import Tree, config_of, engine_of, microbatch_of, random_tokens

TOLERANCE = 1e-10
VOCAB, LENGTH, LAYERS, HIDDEN, HEADS = 103, 23, 3, 48, 6

_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 16}
_YARN = {"type": "yarn", "factor": 4.0, "original_positions": 16, "beta_fast": 3.0, "beta_slow": 0.5}
_LONG = {"type": "longrope", "factor": 4.0, "short_factors": [1.0, 1.1, 1.3, 1.5],
         "long_factors": [1.0, 1.7, 2.9, 4.3]}  # fmt: skip
_LLAMA = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": 2, "ffn_hidden": 80, "vocab": VOCAB}
_MLA = {"q_rank": 20, "kv_rank": 14, "nope_dim": 10, "rope_dim": 6, "value_dim": 12}
_LATENT = {**{key: value for key, value in _LLAMA.items() if key != "kv_heads"}, "mla": _MLA,
           "norm_eps": 1e-4}  # fmt: skip
_MOE = {"experts": 6, "top_k": 3, "ffn_hidden": 20}
_SHARED = {"experts": 8, "top_k": 3, "ffn_hidden": 20, "shared_experts": 2}
_MAGNITUDE = 0.1 * 0.8 * math.log(4.0) + 1
CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **_LLAMA},
    "llama-tied": {"family": "llama", **_LLAMA, "tied_embeddings": True},
    "llama3.1": {"family": "llama", **_LLAMA, "rope_theta": 500000.0, "rope_scaling": _SCALING},
    "yarn": {"family": "qwen2", **_LLAMA, "rope_theta": 100.0, "rope_scaling": _YARN},
    "yarn, not whole": {"family": "llama", **_LLAMA, "rope_theta": 50.0, "rope_scaling": {
        **_YARN, "truncate": False, "attention_factor": 0.7}},
    "yarn, one frequency": {"family": "llama", **_LLAMA, "rope_theta": 50.0, "rope_scaling": {
        **_YARN, "beta_fast": 1.0, "beta_slow": 1.0}},
    "yarn, one frequency, not whole": {"family": "llama", **_LLAMA, "rope_theta": 50.0, "rope_scaling": {
        **_YARN, "truncate": False, "beta_fast": 1.0, "beta_slow": 1.0}},
    "longrope, short": {"family": "phi3", **_LLAMA, "rope_scaling": {**_LONG, "original_positions": LENGTH}},
    "longrope, long": {"family": "phi3", **_LLAMA, "rope_scaling": {**_LONG, "original_positions": 22}},
    "mistral": {"family": "mistral", **_LLAMA, "head_dim": 10},
    "mistral-window": {"family": "mistral", **_LLAMA, "sliding_window": 6},
    "phi3-window": {"family": "phi3", **_LLAMA, "sliding_window": 11},
    "qwen2": {"family": "qwen2", **_LLAMA, "norm_eps": 1e-6},
    "qwen3": {"family": "qwen3", **_LLAMA, "head_dim": 12, "tied_embeddings": True},
    "phi3": {"family": "phi3", **_LLAMA},
    "phi3-partial": {"family": "phi3", **_LLAMA, "rotary_fraction": 0.75},
    "granite": {"family": "granite", **_LLAMA, "embedding_multiplier": 12.0, "attention_multiplier": 0.3,
                "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "deepseek_v3": {"family": "deepseek_v3", **_LATENT},
    "deepseek_v3, experts": {"family": "deepseek_v3", **_LATENT, "moe": {
        **_SHARED, "score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "first_dense": 1}},
    "deepseek_v3, experts, not normalised": {"family": "deepseek_v3", **_LATENT, "mla": {
        **_MLA, "q_rank": None}, "moe": {**_SHARED, "score": "sigmoid", "normalise": False}},
    "deepseek_v2, experts": {"family": "deepseek_v2", **_LATENT, "moe": {
        **_SHARED, "normalise": False, "first_dense": 2}},
    "deepseek_v2, experts in groups": {"family": "deepseek_v2", **_LATENT, "moe": {
        **_SHARED, "normalise": False, "groups": 2, "top_groups": 1, "scale": 4.0}},
    "deepseek_v3, direct queries": {"family": "deepseek_v3", **_LATENT, "mla": {**_MLA, "q_rank": None}},
    "deepseek_v3, wide values": {"family": "deepseek_v3", **_LATENT, "mla": {**_MLA, "value_dim": 22}},
    "deepseek_v3, equal widths": {"family": "deepseek_v3", **_LATENT, "mla": {**_MLA, "value_dim": 16}},
    "deepseek_v3, yarn": {
        "family": "deepseek_v3", **_LATENT, "rope_theta": 100.0,
        "rope_scaling": {**_YARN, "attention_factor": (0.1 * 0.6 * math.log(4.0) + 1) / _MAGNITUDE},
        "attention_multiplier": _MAGNITUDE**2 / 4},
    "deepseek_v3, yarn of rotated elements": {
        "family": "deepseek_v3", **_LATENT, "rope_theta": 100.0, "rope_scaling": _YARN},
    "mixtral": {"family": "mixtral", **_LLAMA, "moe": {"experts": 5, "top_k": 2}},
    "mixtral, one expert": {"family": "mixtral", **_LLAMA, "moe": {"experts": 3, "top_k": 1,
                                                                  "score": "topk_softmax"}},
    "qwen3_moe": {"family": "qwen3_moe", **_LLAMA, "moe": {**_MOE, "normalise": False}},
    "qwen3_moe, normalised": {"family": "qwen3_moe", **_LLAMA, "moe": {**_MOE, "every": 2}},
    "qwen3_moe, some dense": {"family": "qwen3_moe", **_LLAMA, "tied_embeddings": True,
                              "moe": {**_MOE, "layers": [0, 2], "score": "topk_softmax"}},
    "gpt2": {"family": "gpt2", "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB,
             "max_positions": 40},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_exact_as_ours() -> Iterator[None]:
    with exact_functions():
        yield


DEFAULTS: Tree = {
    "run": {"steps": 10},
    "data": {"sequence": LENGTH},
    "batch": {"micro": 2, "global": 4},
    "precision": {"dtype": "fp64"},
    "optimizer": {"lr": 0.01, "clip": 0.7, "weight_decay": 0.1},
    "lr_schedule": {"kind": "constant", "warmup": 1},
}


def settings(name: str) -> Config:
    return config_of(DEFAULTS, model=CASES[name])


def oracle(name: str) -> transformers.PreTrainedModel:
    """The same architecture in transformers, with random weights (biases and norms too)."""
    model = settings(name).model
    torch.manual_seed(7)
    if model.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=40, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=model.norm_eps,
        )  # fmt: skip
        theirs: transformers.PreTrainedModel = GPT2LMHeadModel(config)
    else:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
        if model.rope_scaling is not None:
            names = {"type": "rope_type", "original_positions": "original_max_position_embeddings",
                     "short_factors": "short_factor", "long_factors": "long_factor"}  # fmt: skip
            given = CASES[name]["rope_scaling"] | {"type": model.rope_scaling.type}
            rope |= {names.get(key, key): value for key, value in given.items()}
        further: dict[str, Any] = {}
        if model.family == "granite":
            names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
            further = {name: getattr(model, name) for name in names}
        elif model.family == "phi3":
            rope["partial_rotary_factor"] = model.rotary_fraction
            further = {"pad_token_id": None, "eos_token_id": None}
            if model.rope_scaling is not None:
                further["original_max_position_embeddings"] = model.rope_scaling.original_positions
        if model.mla is not None:
            keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            further |= dict(zip(keys, CASES[name]["mla"].values()))
            further |= {"first_k_dense_replace": LAYERS, "num_mtp_layers": 0}
            if model.attention_multiplier != 1 / 4:
                rope |= {"mscale": 0.6, "mscale_all_dim": 0.8}
                del rope["attention_factor"]
        if model.moe is not None:
            further |= experts_of(model)
        if model.family in ("mistral", "phi3"):
            further["sliding_window"] = model.sliding_window
        if model.head_dim != HIDDEN // HEADS and model.mla is None:
            further["head_dim"] = model.head_dim
        config = transformers.AutoConfig.for_model(
            model.family, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=80,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=model.kv_heads,
            rms_norm_eps=model.norm_eps, rope_parameters=rope,
            tie_word_embeddings=bool(model.tied_embeddings), **further,
        )  # fmt: skip
        theirs = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    theirs = theirs.double()
    randomise(theirs)
    return theirs


def experts_of(model: ModelSettings) -> dict[str, Any]:
    """The keys of transformers for a model's experts, from what papers call them."""
    moe, layers = model.moe, range(model.layers)
    assert moe is not None
    normalised = moe.normalise or moe.score == "topk_softmax"
    keys: dict[str, Any] = {"num_experts_per_tok": moe.top_k}
    if model.family == "mixtral":
        return {**keys, "num_local_experts": moe.experts}
    keys |= {"moe_intermediate_size": moe.ffn_hidden, "norm_topk_prob": normalised}
    if model.mla is not None:
        grouped = "group_limited_greedy" if moe.groups > 1 else "greedy"
        keys |= {"topk_method": grouped, "n_group": moe.groups, "topk_group": moe.top_groups}
        sizes = {"n_shared_experts": moe.shared_experts, "first_k_dense_replace": moe.first_dense}
        return {**keys, **sizes, "n_routed_experts": moe.experts, "routed_scaling_factor": moe.scale}
    dense = [] if moe.layers == "auto" else [number for number in layers if number not in moe.layers]
    steps = {"decoder_sparse_step": moe.every, "mlp_only_layers": dense}
    return {**keys, **steps, "num_experts": moe.experts}


def translated(
    name: str, tensors: Mapping[str, torch.Tensor], trained: bool = False
) -> dict[str, torch.Tensor]:
    """Their tensors under our names; ``trained``: of what gradients train."""
    model = settings(name).model
    weights = ModelInventory(model).weights()
    return {
        ours: place.read(tensors)
        for ours, place in published_tensors(model).items()
        if not (trained and weights[ours].frozen)
    }


def tokens_of(step: int = 0) -> torch.Tensor:
    """A global batch of a step: four samples."""
    return random_tokens(VOCAB, 4, LENGTH, seed=step)


def relative(values: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((values - wanted).detach().abs().max() / wanted.detach().abs().max())


def pieces(model: torch.nn.Module, gradients: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for declared in declared_parameters(model):
        if gradients and declared.declaration.frozen:
            assert declared.parameter.grad is None
            continue
        tensor = declared.parameter.grad if gradients else declared.parameter
        assert tensor is not None, declared.declaration.name
        for start, piece, _ in declared.pieces:
            yield piece.name, tensor.narrow(0, start, piece.sizes[0])


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients(name: str) -> None:
    theirs = oracle(name)
    ours = whole_model(settings(name).model, shard_of())
    load_global(ours, translated(name, theirs.state_dict()))
    tokens, labels = tokens_of()[:, :-1], tokens_of()[:, 1:]
    wanted = theirs(tokens).logits
    logits = ours.head(ours(tokens))[:, :VOCAB].view_as(wanted)
    assert relative(logits, wanted) < TOLERANCE
    torch.nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    loss = ours.loss_sum(tokens, labels)
    loss.backward()
    wanted_gradients = translated(
        name, {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}, trained=True
    )
    scale = max(float(g.abs().max()) for g in wanted_gradients.values())
    seen = set()
    for piece, gradient in pieces(ours, gradients=True):
        seen.add(piece)
        wanted_gradient = wanted_gradients[piece]
        # A key bias has no gradient in exact arithmetic: compare with the model's largest instead.
        floor = max(float(wanted_gradient.abs().max()), 1e-6 * scale)
        assert float((gradient - wanted_gradient).abs().max()) / floor < TOLERANCE, piece
    assert seen == wanted_gradients.keys()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral", "deepseek_v3, experts"])
def test_three_engine_steps_equal_a_plain_training_loop(name: str) -> None:
    theirs = oracle(name)
    config = settings(name)
    engine = engine_of(config)
    load_global(engine.stages[0], translated(name, theirs.state_dict()))
    decayed = [p for p in theirs.parameters() if p.ndim > 1]
    others = [p for p in theirs.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for step in range(3):
        samples = tokens_of(step)
        tokens, labels = samples[:, :-1], samples[:, 1:]
        loss = torch.nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters() if p.grad is not None])
        for parameter in theirs.parameters():  # not clip_grad_norm_, which divides by norm + 1e-6
            if parameter.grad is not None:
                parameter.grad.mul_((0.7 / norm).clamp(max=1.0))
        optimizer.step()
        result = engine.train_step([microbatch_of(rows) for rows in samples.split(2)])
        wanted_loss = float(loss.detach())
        assert abs(result.loss - wanted_loss) / wanted_loss < TOLERANCE
        assert abs(result.grad_norm - float(norm)) / float(norm) < TOLERANCE
    wanted = translated(name, theirs.state_dict())
    for piece, weight in pieces(engine.stages[0], gradients=False):
        error = float((weight - wanted[piece]).detach().abs().max())
        # A key bias's gradient is rounding noise, which Adam scales up to at most lr * noise / eps.
        noise = 1e-9 if piece.endswith("k.bias") else 0.0
        assert error < 1e-10 * float(wanted[piece].detach().abs().max()) + noise, piece


def test_packed_documents_equal_separate_sequences() -> None:
    """``isolate``: the loss of a packed sample is the sum of its documents' losses, each run alone."""
    for name in ("llama", "gpt2"):
        model = whole_model(settings(name).model, shard_of())
        load_global(model, translated(name, oracle(name).state_dict()))
        tokens, labels = tokens_of()[:2, :-1].contiguous(), tokens_of()[:2, 1:].contiguous()
        bounds = (0, 5, 6, LENGTH, LENGTH + 11, 2 * LENGTH)
        with torch.no_grad():
            packed = model.loss_sum(tokens, labels, Spans(tokens.numel(), 2, bounds))
            alone = sum(
                model.loss_sum(tokens.flatten()[None, a:b], labels.flatten()[None, a:b])
                for a, b in pairwise(bounds)
            )
        assert abs(float(packed - alone)) / float(packed) < 1e-13
