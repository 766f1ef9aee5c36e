"""Presets and counts against published figures and against transformers' own models."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hexad.config import ConfigError
from hexad.config.model import ModelSettings
from hexad.model.configuration import build_config, complete_model, load_config
from hexad.model.families import presets
from hexad.model.hugging_face import config_json, model_settings
from hexad.model.inventory import ModelInventory
from hexad.planning.costs import active_count, flops_per_token, layer_costs, parameter_count, trained_count

# Parameters of the published checkpoints (safetensors metadata on the Hugging Face hub; for tied
# embeddings counted once). Those with experts are the counts of transformers' models of these sizes, which
# agree with the rounded published figures.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "granite3.1-2b": 2_533_531_648,
    "granite3.1-8b": 8_170_848_256,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "phi3-mini-4k": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-4b-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # With the routers' biases, without layers that predict further tokens, which hubs count too.
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "moonlight-16b-a3b": 15_960_110_208,
    "kimi-k2": 1_026_408_232_448,
}

_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 1}
# What the config.json of published models with experts says.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None, "output_router_logits": False, "router_aux_loss_coef": 0.02},
    "mixtral-8x22b": {"model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384,
        "num_hidden_layers": 56, "num_attention_heads": 48, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    "qwen3-235b-a22b": {"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    "deepseek-v2-lite": {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "vocab_size": 102400, **_LATENT, "q_lora_rank": None, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy",
        "rope_scaling": {**_YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek-v3": {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "vocab_size": 129280, **_LATENT, "q_lora_rank": 1536,
        **_SIGMOID, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
        "rope_scaling": {**_YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "moonlight-16b-a3b": {"model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0, "vocab_size": 163840, **_LATENT, "q_lora_rank": None, **_SIGMOID,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "rope_scaling": None,
        "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446},
    "kimi-k2": {"model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0, "vocab_size": 163840, **_LATENT, "q_lora_rank": 1536, **_SIGMOID,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
        "rope_scaling": {**_YARN, "beta_fast": 1.0, "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0}},
}  # fmt: skip
# Billions of parameters in all and per token, as their papers and model cards round them; of DeepSeek-V2-Lite
# and Moonlight without the embedding and the head.
ROUNDED = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v3": (671, 37),
    "moonlight-16b-a3b": (16, 2.24),
    "kimi-k2": (1000, 32),
}

# Small odd shapes, one per way in which a family's count can differ.
SMALL = [
    {"family": "gpt2", "layers": 3, "hidden": 40, "heads": 5, "vocab": 101, "max_positions": 19},
    {"family": "llama", "layers": 2, "hidden": 48, "heads": 6, "kv_heads": 2, "vocab": 97},
    {"family": "llama", "layers": 2, "hidden": 48, "heads": 6, "kv_heads": 3, "head_dim": 10, "vocab": 97},
    {"family": "llama", "layers": 1, "hidden": 64, "heads": 4, "vocab": 97, "tied_embeddings": True},
    {"family": "mistral", "layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 100, "vocab": 97},
    {"family": "qwen2", "layers": 3, "hidden": 64, "heads": 8, "kv_heads": 2, "vocab": 97},
    {"family": "qwen3", "layers": 3, "hidden": 40, "heads": 8, "kv_heads": 4, "head_dim": 16, "vocab": 97},
    {"family": "mixtral", "layers": 2, "hidden": 48, "heads": 6, "vocab": 97, "moe": {"experts": 5}},
    {"family": "qwen3_moe", "layers": 5, "hidden": 48, "heads": 6, "vocab": 97,
     "moe": {"experts": 6, "top_k": 4, "ffn_hidden": 20, "every": 2}},
    {"family": "deepseek_v3", "layers": 4, "hidden": 48, "heads": 6, "vocab": 97,
     "mla": {"q_rank": 14, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 7},
     "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 20, "shared_experts": 3, "score": "sigmoid",
             "first_dense": 1, "groups": 4, "top_groups": 2}},
]  # fmt: skip


def model_of(settings: dict) -> ModelSettings:
    return build_config({"model": settings}).model


def counted_by_transformers(model: ModelSettings) -> int:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if model.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=model.vocab,
            n_positions=model.max_positions,
            n_layer=model.layers,
            n_embd=model.hidden,
            n_head=model.heads,
            n_inner=model.ffn_hidden,
        )
    elif model.moe is not None:
        keys = config_json(model, "float32", {})
        config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    else:
        config = transformers.AutoConfig.for_model(
            model.family,
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_dim,
            intermediate_size=model.ffn_hidden,
            tie_word_embeddings=model.tied_embeddings,
        )
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    biases = [bias for name, bias in built.named_buffers() if name.endswith("e_score_correction_bias")]
    parameters = [*built.parameters(), *biases]
    return sum(parameter.numel() for parameter in parameters)  # shared ones come once


@pytest.mark.parametrize("window", [1, 16, 64, 100])
def test_a_sliding_window_leaves_a_part_of_attention(window: int) -> None:
    length, layers, hidden = 64, 3, 64
    settings = {"family": "mistral", "layers": layers, "hidden": hidden, "heads": 4, "vocab": 97}
    whole, part = (
        flops_per_token(model_of({**settings, "sliding_window": size}), length) for size in (None, window)
    )
    triangle = length**2 / 2
    band = window * length - window**2 / 2 if window < length else triangle
    assert part == pytest.approx(whole - 12 * layers * hidden * (triangle - band) / length)


def test_every_preset_has_a_published_count() -> None:
    assert set(PUBLISHED) == set(presets())


@pytest.mark.parametrize("name", presets())
def test_preset_has_exactly_the_published_parameters(name: str) -> None:
    model = model_of({"preset": name})
    assert parameter_count(model) == PUBLISHED[name]
    assert parameter_count(ModelSettings(preset=name)) == PUBLISHED[name]
    assert "auto" not in {
        getattr(model, key) for key in ("kv_heads", "head_dim", "ffn_hidden", "vocab", "tied_embeddings")
    }


@pytest.mark.parametrize("name", presets())
def test_preset_equals_transformers(name: str) -> None:
    model = model_of({"preset": name})
    assert parameter_count(model) == counted_by_transformers(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_preset_is_the_published_configuration(name: str) -> None:
    keys = {"max_position_embeddings": 4096, **CONFIGS[name]}
    published = complete_model(ModelSettings.model_validate(model_settings(keys, Path("config.json"))))
    ours, free = complete_model(ModelSettings(preset=name)).model_dump(), ("preset", "max_positions")
    assert {key: value for key, value in published.model_dump().items() if key not in free} == {
        key: value for key, value in ours.items() if key not in free
    }


@pytest.mark.parametrize("name", ROUNDED)
def test_active_parameters_are_as_published(name: str) -> None:
    model, (total, active) = model_of({"preset": name}), ROUNDED[name]
    assert parameter_count(model) / 1e9 == pytest.approx(total, rel=0.03)
    ends = 2 * int(model.vocab) * model.hidden if name in ("deepseek-v2-lite", "moonlight-16b-a3b") else 0
    assert (active_count(model) - ends) / 1e9 == pytest.approx(active, rel=0.07)


def test_active_parameters_equal_a_count_by_hand() -> None:
    """mixtral-8x7b: two of eight experts, written out; of dense models all."""
    attention, expert = 4096 * 4096 * 2 + 4096 * 1024 * 2, 3 * 4096 * 14336
    layer = attention + 2 * expert + 8 * 4096 + 2 * 4096
    assert active_count(model_of({"preset": "mixtral-8x7b"})) == 32 * layer + 2 * 32000 * 4096 + 4096
    assert active_count(model_of({"preset": "llama2-7b"})) == PUBLISHED["llama2-7b"]


@pytest.mark.parametrize(("rate", "biases"), [(0.0, 0), (0.001, 26 * 64)])
def test_routers_biases_are_trained_where_loads_change_them(rate: float, biases: int) -> None:
    """moonlight-16b-a3b has one for each of 64 experts in each of 26 layers."""
    model = model_of({"preset": "moonlight-16b-a3b", "moe": {"bias_rate": rate}})
    whole = PUBLISHED["moonlight-16b-a3b"]
    assert (parameter_count(model), trained_count(model)) == (whole, whole - 26 * 64 + biases)


def test_flops_with_experts_are_those_of_active_weights() -> None:
    """qwen3-30b-a3b at 4096 tokens: what a token is multiplied by, and attention."""
    sequence = 4096
    model = model_of({"preset": "qwen3-30b-a3b"})
    vectors = 48 * (2 * 2048 + 2 * 128) + 2048
    multiplied = active_count(model) - vectors - 151936 * 2048
    expected = 6 * multiplied + 6 * 48 * 32 * 128 * sequence
    assert flops_per_token(model, sequence) == expected


def test_settings_of_experts_beside_a_preset_complete_it() -> None:
    model = model_of({"preset": "mixtral-8x7b", "moe": {"aux_loss": 0.01, "experts": 4}})
    assert model.moe is not None
    assert (model.moe.experts, model.moe.top_k, model.moe.ffn_hidden, model.moe.aux_loss) == (
        4, 2, 14336, 0.01
    )  # fmt: skip


@pytest.mark.parametrize("settings", SMALL)
def test_small_models_equal_transformers(settings: dict) -> None:
    model = model_of(settings)
    assert parameter_count(model) == counted_by_transformers(model)


def test_presets_with_frequency_scaling() -> None:
    factors = {name: model_of({"preset": name}).rope_scaling for name in presets()}
    scaled = {name: scaling.factor for name, scaling in factors.items() if scaling}
    assert scaled == {
        "llama3.1-8b": 8.0,
        "llama3.1-70b": 8.0,
        "llama3.1-405b": 8.0,
        "llama3.2-1b": 32.0,
        "llama3.2-3b": 32.0,
        "deepseek-v2-lite": 40.0,
        "deepseek-v3": 40.0,
        "kimi-k2": 32.0,
    }


def test_keys_given_beside_a_preset_win() -> None:
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    whole = model_of({"preset": "llama2-7b"})
    less = model_of({"preset": "llama2-7b", "layers": 31})
    assert parameter_count(whole) - parameter_count(less) == layer


def test_flops_equal_a_count_by_hand() -> None:
    """llama2-7b at 4096 tokens: every matrix product written out."""
    hidden, ffn, layers, vocab, sequence = 4096, 11008, 32, 32000, 4096
    forward = 2 * layers * (4 * hidden * hidden + 3 * hidden * ffn) + 2 * hidden * vocab
    scores_and_values = layers * 2 * 2 * hidden * sequence / 2
    expected = 3 * (forward + scores_and_values)
    assert flops_per_token(model_of({"preset": "llama2-7b"}), sequence) == expected


def test_flops_equal_torchs_counter() -> None:
    """PyTorch counts what transformers' forward pass does; it does not know of the causal half."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    model = model_of({"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 97})
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=model.ffn_hidden,
        attn_implementation="eager",
    )
    built = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        built(tokens)
    attention = 12 * 2 * 64 * 32  # per token, before halving
    ours = flops_per_token(model, 32) * 32 / 3 + attention / 2 * 32 / 3
    assert counter.get_total_flops() == ours


@pytest.mark.parametrize("settings", SMALL)
def test_flops_of_isolated_documents_are_those_of_sequences_of_their_lengths(settings: dict) -> None:
    model, lengths = model_of({**settings, "max_positions": 64}), (1, 40, 16, 7)
    apart = sum(length * flops_per_token(model, length) for length in lengths)
    attended = sum(length**2 for length in lengths) / sum(lengths) ** 2
    assert apart == pytest.approx(64 * flops_per_token(model, 64, attended), rel=1e-12)
    assert apart < 64 * flops_per_token(model, 64)


def test_unresolved_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab: found auto"):
        parameter_count(ModelSettings())
    with pytest.raises(ConfigError, match=r"model\.max_positions: found auto"):
        parameter_count(ModelSettings(family="gpt2", vocab=256))
    short = parameter_count(ModelSettings(family="gpt2", vocab=256), sequence=10)
    assert parameter_count(ModelSettings(family="gpt2", vocab=256), sequence=11) - short == 256
    with pytest.raises(ConfigError, match=r"model\.moe: found null, but mixtral has experts"):
        parameter_count(ModelSettings(family="mixtral", vocab=256))


def test_counting_does_not_import_torch() -> None:
    code = "import sys, hexad.planning.costs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "settings", [{"preset": "llama3-8b"}, *(settings for settings in SMALL if "mla" not in settings)]
)
def test_work_of_the_parts_is_the_model_and_the_scores_computed_again(settings: dict) -> None:
    model = model_of(settings)
    work = layer_costs(model, 16)
    total = sum(layer.total for layer in work.layers) + work.head.total
    assert isinstance(model.head_dim, int) and isinstance(model.vocab, int)
    again = model.layers * model.heads * model.head_dim * 16
    assert total == flops_per_token(model, 16) + again
    assert len(work.layers) == model.layers
    layer, experts = work.layers[-1], model.moe
    assert layer.weight == 2 * sum(
        math.prod(weight.shape)
        if experts is None or ".experts." not in weight.name
        else math.prod(weight.shape[1:]) * experts.top_k
        for parameter in ModelInventory(model).block(model.layers - 1).parameters
        for weight in parameter.weights
        if parameter.matrix
    )
    attention = layer.forward - layer.weight
    assert layer.backward - layer.weight == 2.5 * attention > 0
    assert work.head == (6 * model.vocab * model.hidden, 0, 0)


def test_work_needs_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab: found auto"):
        layer_costs(ModelSettings(), 16)


def test_frozen_layers_cost_what_is_computed() -> None:
    """Leading ones a forward pass, later ones no gradients of weights; stages are divided accordingly."""
    model = load_config(None, ["model.layers=6", "model.vocab=300"]).model
    whole = layer_costs(model, 64).layers[0]
    frozen = layer_costs(model.model_copy(update={"train": ["layers.3", "layers.5"]}), 64).layers
    assert [work.forward for work in frozen] == [whole.forward] * 6
    assert [work.backward for work in frozen] == [0.0] * 3 + [whole.backward] * 3
    assert [work.weight for work in frozen] == [0.0] * 3 + [whole.weight, 0.0, whole.weight]
