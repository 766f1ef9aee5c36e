"""Presets and counts against published figures and against transformers' own models."""

import math
import subprocess
import sys

import pytest

from hexad.config import ConfigError
from hexad.config.model import ModelSettings
from hexad.model.configuration import build_config, load_config
from hexad.model.families import presets
from hexad.model.inventory import ModelInventory
from hexad.planning.costs import flops_per_token, layer_costs, parameter_count

# Parameters of the published checkpoints (safetensors metadata on the Hugging Face hub; for tied
# embeddings counted once).
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
]


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
    return sum(parameter.numel() for parameter in built.parameters())  # shared ones come once


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


@pytest.mark.parametrize("settings", SMALL)
def test_small_models_equal_transformers(settings: dict) -> None:
    model = model_of(settings)
    assert parameter_count(model) == counted_by_transformers(model)


def test_frequency_scaling_belongs_to_llama_3_1_and_3_2() -> None:
    factors = {name: model_of({"preset": name}).rope_scaling for name in presets()}
    scaled = {name: scaling.factor for name, scaling in factors.items() if scaling}
    assert scaled == {
        "llama3.1-8b": 8.0,
        "llama3.1-70b": 8.0,
        "llama3.1-405b": 8.0,
        "llama3.2-1b": 32.0,
        "llama3.2-3b": 32.0,
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


@pytest.mark.parametrize("settings", [{"preset": "llama3-8b"}, *SMALL])
def test_work_of_the_parts_is_the_model_and_the_scores_computed_again(settings: dict) -> None:
    model = model_of(settings)
    work = layer_costs(model, 16)
    total = sum(layer.total for layer in work.layers) + work.head.total
    assert isinstance(model.head_dim, int) and isinstance(model.vocab, int)
    again = model.layers * model.heads * model.head_dim * 16
    assert total == flops_per_token(model, 16) + again
    assert len(work.layers) == model.layers
    layer = work.layers[-1]
    assert layer.weight == 2 * sum(
        math.prod(weight.shape)
        for parameter in ModelInventory(model).block(0).parameters
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
