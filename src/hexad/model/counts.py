"""How many parameters a model has and how much arithmetic a token costs, without building it."""

from __future__ import annotations

from typing import NamedTuple

from hexad.config import ConfigError
from hexad.config.families import complete_model
from hexad.config.schema import ModelSettings


class LayerCounts(NamedTuple):
    """Parameters of one transformer block."""

    matmul: int
    """Weights that every token is multiplied by."""
    other: int
    """Biases and normalisation weights."""


class Work(NamedTuple):
    """Arithmetic per token, in FLOPs, by the pipeline's actions."""

    forward: float
    """``F``."""
    backward: float
    """``B``: the gradient of the input."""
    weight: float
    """``W``: the gradient of the weights."""

    @property
    def total(self) -> float:
        """Of all three."""
        return self.forward + self.backward + self.weight


class ModelWork(NamedTuple):
    """Arithmetic per token of what a pipeline's stages are made of."""

    block: Work
    """One transformer block."""
    embedding: Work
    """The embedding, part of the first stage."""
    head: Work
    """The output head, part of the last stage."""


def parameter_count(model: ModelSettings, sequence: int | None = None) -> int:
    """Exact number of parameters: unpadded vocabulary, a tied embedding counted once.

    Args:
        model: the architecture; what it leaves to its preset or family is filled in.
        sequence: rows of a learned position table whose ``max_positions`` is ``auto``.

    Raises:
        ConfigError: ``model.vocab`` or a needed ``model.max_positions`` is still ``auto``, or the
            architecture is a mixture of experts.
    """
    model = _complete(model)
    layer = layer_counts(model)
    table = _vocab(model) * model.hidden
    embeddings = table if model.tied_embeddings else 2 * table
    if model.family == "gpt2":
        embeddings += _positions(model, sequence) * model.hidden
    return embeddings + model.layers * (layer.matmul + layer.other) + _norm(model)


def flops_per_token(model: ModelSettings, sequence: int) -> float:
    """Training arithmetic per token in FLOPs: forward and backward, nothing recomputed.

    ``6 * P + 6 * layers * heads * head_dim * sequence``. P are the weights a token is multiplied by: the
    output head counts, the embedding look-up, biases and norms do not; a multiplication and an addition are
    two operations, and the backward pass costs twice the forward pass. The second term is attention's two
    products (scores and weighted values), ``12 * layers * heads * head_dim * sequence`` in PaLM's appendix B
    (arXiv 2204.02311) and in Megatron-LM, halved here because a causal mask leaves half of the scores.

    Args:
        model: the architecture; what it leaves to its preset or family is filled in.
        sequence: tokens per sample, all attended to (one document).
    """
    model = _complete(model)
    matmul = model.layers * layer_counts(model).matmul + _vocab(model) * model.hidden
    attention = model.layers * model.heads * _int(model.head_dim) * sequence
    return 6.0 * matmul + 6.0 * attention


def layer_costs(model: ModelSettings, sequence: int) -> ModelWork:
    """Arithmetic per token of a block, of the embedding and of the output head.

    A matrix product costs the same in ``F``, ``B`` and ``W``: 2 FLOPs per weight. The output head's three are
    all in ``F``, where the loss and its gradients are computed slice by slice. Attention's products have
    no weights; with a causal mask the two of the forward pass cost ``2 * heads * head_dim * sequence``. Its
    backward pass makes five products of the same size where the forward pass makes two, since it computes the
    scores again (FlashAttention-2, arXiv 2307.08691), all of them in ``B``. Because of those scores the sum
    over the model is larger than :func:`flops_per_token`, which leaves out what is recomputed, by ``layers *
    heads * head_dim * sequence``. The embedding's look-up moves memory but multiplies nothing, and counts as
    0; so do norms, activation functions and the loss.

    Args:
        model: the architecture; what it leaves to its preset or family is filled in.
        sequence: tokens per sample, all attended to (one document).

    Raises:
        ConfigError: ``model.vocab`` is still ``auto``, or the architecture is a mixture of experts.
    """
    model = _complete(model)
    product = 2.0 * layer_counts(model).matmul
    attention = 2.0 * model.heads * _int(model.head_dim) * sequence
    block = Work(product + attention, product + 2.5 * attention, product)
    logits = 2.0 * _vocab(model) * model.hidden
    return ModelWork(block, Work(0.0, 0.0, 0.0), Work(3 * logits, 0.0, 0.0))


def layer_counts(model: ModelSettings) -> LayerCounts:
    """Parameters of one block of a completed ``model``."""
    hidden, ffn = model.hidden, _int(model.ffn_hidden)
    queries = model.heads * _int(model.head_dim)
    keys = _int(model.kv_heads) * _int(model.head_dim)
    projections = 2 if model.family == "gpt2" else 3  # up and down, or SwiGLU's gate, up and down
    matmul = hidden * (queries + 2 * keys) + queries * hidden + projections * hidden * ffn
    other = 2 * _norm(model)
    if model.qkv_bias:
        other += queries + 2 * keys
    if model.qk_norm:
        other += 2 * _int(model.head_dim)
    if model.family == "gpt2":
        other += hidden + ffn + hidden  # biases of the attention output, up and down projections
    return LayerCounts(matmul, other)


def _complete(model: ModelSettings) -> ModelSettings:
    if model.moe is not None or model.family in ("mixtral", "qwen3_moe"):
        field = "model.moe" if model.moe is not None else "model.family"
        raise ConfigError(
            field, f"found {model.moe or model.family}: mixtures of experts are not supported yet"
        )
    return complete_model(model)


def _norm(model: ModelSettings) -> int:
    """RMSNorm has a weight, gpt2's LayerNorm a weight and a bias."""
    return model.hidden * (2 if model.family == "gpt2" else 1)


def _vocab(model: ModelSettings) -> int:
    if model.vocab == "auto":
        raise ConfigError("model.vocab", "found auto: set a number, or fill it in from the tokenizer first")
    return model.vocab


def _positions(model: ModelSettings, sequence: int | None) -> int:
    if model.max_positions != "auto":
        return model.max_positions
    if sequence is None:
        raise ConfigError("model.max_positions", "found auto: set a number, or give the sequence length")
    return sequence


def _int(value: int | str) -> int:
    """A setting that completion has made a number."""
    assert isinstance(value, int)
    return value
