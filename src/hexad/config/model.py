"""The settings of the model, and the kinds of values, with their bounds, that all settings have."""

import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _not_a_switch(value: Any) -> Any:
    """Refuse ``true`` for 1, which Python accepts: it hides a mistyped line."""
    if isinstance(value, bool):
        raise ValueError("a number, not true or false")
    return value


Integer = Annotated[int, BeforeValidator(_not_a_switch)]
Number = Annotated[float, BeforeValidator(_not_a_switch)]

# Upper bounds exclude values that are mistakes: what is computed before a run grows with layers and degrees,
# and samples are counted in 64 bits.
Positive = Annotated[Integer, Field(ge=1, le=10**9)]
Count = Annotated[Integer, Field(ge=0, le=10**9)]
Seed = Annotated[Integer, Field(ge=0, lt=2**63)]
Layers = Annotated[Integer, Field(ge=1, le=1024)]
Width = Annotated[Integer, Field(ge=1, le=2**24)]
Degree = Annotated[Integer, Field(ge=1, le=2**16)]
PositiveFloat = Annotated[Number, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[Number, Field(ge=0, lt=1, allow_inf_nan=False)]


_LONGEST_NAME = 255
"""Bytes of a file's name that Linux and macOS allow."""


def _usable(name: str) -> str:
    """text"""
    if not name.strip():
        raise ValueError("a name, not an empty text")
    if name.startswith("~"):
        raise ValueError("a name without '~', which only a shell replaces")
    if "\0" in name or any(len(os.fsencode(part)) > _LONGEST_NAME for part in name.split("/")):
        raise ValueError(f"a name without NUL, with at most {_LONGEST_NAME} bytes between two '/'")
    return name


def _path(value: Any) -> Any:
    """text"""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Name = Annotated[str, BeforeValidator(_path), AfterValidator(_usable)]
"""A text; from Python also a path."""


def _schedule_file(path: str) -> str:
    """a `.json` file"""
    if not path.endswith(".json"):
        raise ValueError("a file ending in .json")
    return path


ScheduleFile = Annotated[str, AfterValidator(_schedule_file)]


class SettingsGroup(BaseModel):
    """A strict, immutable group of settings: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RopeScaling(SettingsGroup):
    """Scaling of rotary frequencies for sequences longer than those of the first training phase."""

    type: Literal["llama3", "yarn", "longrope", "linear", "dynamic"] = "llama3"
    """How: as Llama 3.1 (its model card), YaRN (Peng et al., arXiv 2309.00071), LongRoPE (Ding et al., arXiv
    2402.13753; Phi-3), by position interpolation (``linear``: Chen et al., arXiv 2306.15595), or with a base
    that grows with the document (``dynamic``: NTK-aware scaling as in ``transformers``)."""
    factor: PositiveFloat = 8.0
    """How much longer sequences become. llama3 and yarn slow low frequencies down by it, linear all."""
    original_positions: Positive = 8192
    """Sequence length of the first training phase, in tokens. dynamic: documents up to it have the plain
    frequencies."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above ``original_positions / low_freq_factor`` are scaled fully."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below ``original_positions / high_freq_factor`` are left alone."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies that turn more often than this in ``original_positions`` are left alone."""
    beta_slow: PositiveFloat = 1.0
    """yarn: those that turn less often are scaled fully."""
    truncate: bool = True
    """yarn: whether the range between the two is widened to whole frequencies."""
    short_factors: tuple[PositiveFloat, ...] = ()
    """longrope: what every frequency is divided by in documents of up to ``original_positions`` tokens; half
    as many numbers as elements of a head are rotated."""
    long_factors: tuple[PositiveFloat, ...] = ()
    """longrope: the same in longer documents."""
    attention_factor: PositiveFloat | Literal["auto"] = "auto"
    """yarn and longrope: what rotated queries and keys are multiplied by. ``auto``, as in the papers:
    ``0.1 ln(factor) + 1`` or ``sqrt(1 + ln(factor) / ln(original_positions))``; 1 up to a factor of 1."""

    _COMMON: ClassVar = ("type", "factor", "original_positions")
    USED: ClassVar[dict[str, tuple[str, ...]]] = {
        "llama3": (*_COMMON, "low_freq_factor", "high_freq_factor"),
        "yarn": (*_COMMON, "beta_fast", "beta_slow", "truncate", "attention_factor"),
        "longrope": (*_COMMON, "short_factors", "long_factors", "attention_factor"),
        "linear": ("type", "factor"),
        "dynamic": _COMMON,
    }
    """The settings of each type."""


Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "gpt2", "deepseek_v2", "deepseek_v3", "mixtral",
    "qwen3_moe",
]  # fmt: skip


class MlaSettings(SettingsGroup):
    """Multi-head latent attention (DeepSeek-V2: arXiv 2405.04434, section 2.1): keys and values are products
    of one narrow latent vector per token, which is what generation keeps of a token."""

    q_rank: Width | None = 1536
    """Width of the latent vector that queries are made of. null: queries are a product of the residual
    stream, as in DeepSeek-V2-Lite."""
    kv_rank: Width = 512
    """Width of the latent vector that keys and values are made of."""
    nope_dim: Width = 128
    """Elements of a query or key head without positions."""
    rope_dim: Width = 64
    """Elements of a query or key head that are rotated, after the others; in keys the same for all heads."""
    value_dim: Width = 128
    """Width of a value head."""

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim


class LoraSettings(SettingsGroup):
    """Low-rank adapters (LoRA: Hu et al., arXiv 2106.09685)."""

    rank: Positive = 8
    """Rank of the products that are added to the matrices."""
    alpha: PositiveFloat = 16.0
    """Factor of these products, times ``rank``."""
    dropout: Fraction = 0.0
    """Probability with which elements of the adapters' inputs are dropped in training; the adapters of one
    linear layer (query, key and value; gate and up) drop the same ones."""
    targets: Literal["all"] | tuple[str, ...] = "all"
    """The linear layers' outputs that are adapted: ``all``, or patterns as for ``model.train``, such as
    ``[q_proj, v_proj]``. Experts (``experts.gate_up``, ``experts.down``, each with a product of its own) by
    patterns only, and without dropout, as PEFT's ``target_parameters``."""


DispatcherName = Literal["alltoall", "all_gather", "nvshmem", "deepep"]


class MoeSettings(SettingsGroup):
    """A mixture of experts in place of the feed-forward layer (Shazeer et al., arXiv 1701.06538)."""

    experts: Annotated[Integer, Field(ge=1, le=2**15)] = 8
    """Experts per layer, without shared ones."""
    top_k: Positive = 2
    """Experts that a token passes."""
    ffn_hidden: Width | Literal["auto"] = "auto"
    """Inner width of an expert. ``auto``: ``model.ffn_hidden``."""
    shared_experts: Count = 0
    """Experts that every token passes besides, computed as one layer of that many times ``ffn_hidden``."""
    shared_gate: bool = False
    """Whether the shared experts' output is multiplied by a sigmoid of a product with the token
    (Qwen2-MoE)."""
    every: Positive = 1
    """Distance between layers with experts: those whose number, counted from 1, is a multiple of this, and
    that are not among the first ``first_dense``. The others are dense."""
    first_dense: Count = 0
    """Leading layers that are dense."""
    layers: Literal["auto"] | tuple[Count, ...] = "auto"
    """Numbers, from 0, of the layers with experts. ``auto``: as ``every`` and ``first_dense`` say."""
    score: Literal["softmax_topk", "topk_softmax", "sigmoid"] = "softmax_topk"
    """How experts are weighted: by a softmax over all experts, of which the largest are chosen (Mixtral,
    Qwen3); by a softmax over the chosen ones; or by sigmoids, chosen with a bias that balances loads
    (DeepSeek-V3, arXiv 2412.19437). Scores are computed in float32 at least."""
    groups: Positive = 1
    """Groups of neighbouring experts, of which a token's are chosen from ``top_groups`` (DeepSeek-V2, arXiv
    2405.04434). A group counts by its largest score; with ``sigmoid`` by the sum of its two largest."""
    top_groups: Positive = 1
    """Groups that a token's experts are chosen from."""
    scale: PositiveFloat = 1.0
    """Factor of the weights of the chosen experts (routed scaling factor)."""
    normalise: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    balance: Literal["microbatch", "sequence", "step"] = "microbatch"
    """Over which tokens loads and scores are averaged in ``aux_loss``: those of a microbatch, as in
    Megatron-LM; of each sequence, as in DeepSeek-V3; or of the global batch, with the loads of the step
    before (``step``): those of a step are known only at its end."""
    aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss: experts times the sum of load times mean score (Fedus et al.,
    arXiv 2101.03961), a mean over microbatches, added for each layer."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the mean square of the router's log-sum-exp (Zoph et al., arXiv 2202.08906)."""
    bias_rate: NonNegativeFloat = 0.0
    """Amount by which the bias of an expert is changed after each step towards an even load (Wang et al.,
    arXiv 2408.15664), with ``score: sigmoid``."""
    capacity_factor: PositiveFloat | None = None
    """Most tokens of an expert in a microbatch, as a multiple of an even load; those beyond, the last ones of
    the microbatch, skip it, but not in generation. null: no token skips an expert (dropless)."""
    dispatcher: Literal["auto", DispatcherName] = "auto"
    """How tokens reach experts on other ranks: ``alltoall`` sends each row to the ranks of its experts;
    ``all_gather`` sends all rows to all ranks of the group. ``auto``: which of these sends less. On GPUs,
    ``nvshmem`` sends as ``alltoall``, by PyTorch's operators on NVSHMEM; ``deepep`` sends a token once to
    each rank of its experts, by the package ``deep_ep``."""
    allowance: Annotated[Number, Field(ge=1, allow_inf_nan=False)] | Literal["auto"] = "auto"
    """Rows that a rank's experts can receive, as a multiple of an even load, where buffers have a fixed size:
    on GPUs. A step with more is refused. ``auto``: 2."""
    forced: bool = False
    """Whether tokens are spread evenly, whatever their scores: for benchmarks."""

    OF_TRAINING: ClassVar[tuple[str, ...]] = (
        *("balance", "aux_loss", "z_loss", "bias_rate", "capacity_factor"),
        *("dispatcher", "allowance", "forced"),
    )
    """The settings that weights do not depend on."""

    def in_layer(self, number: int) -> bool:
        """Whether a layer has experts."""
        if self.layers != "auto":
            return number in self.layers
        return number >= self.first_dense and (number + 1) % self.every == 0

    @property
    def room(self) -> float:
        """``allowance`` as a number."""
        return 2.0 if self.allowance == "auto" else float(self.allowance)

    @property
    def biased(self) -> bool:
        """Whether a bias is added to the scores by which experts are chosen."""
        return self.score == "sigmoid"


class ModelSettings(SettingsGroup):
    """The transformer's architecture, and what of it is trained."""

    preset: Name | None = None
    """A published model (``llama3-8b``, ``gpt2-xl``, ...) that fills in all that follows; keys that are also
    given override it."""
    load: Name | None = None
    """Initial weights if ``run.dir`` has no checkpoint: ``hf:DIR``, a Hugging Face model, ``hf:ORG/NAME`` (or
    ``hf:ORG/NAME@REVISION``), one on the hub, or a run or checkpoint of Hexad. Only the weights are loaded;
    the settings that follow are filled in from there."""
    family: Family = "llama"
    """Architecture family; it also sets the defaults of the variant switches below."""
    layers: Layers = 4
    """Transformer blocks."""
    hidden: Width = 256
    """Width of the residual stream."""
    heads: Width = 8
    """Query heads per layer."""
    kv_heads: Width | Literal["auto"] = "auto"
    """Key/value heads per layer (grouped-query attention). ``auto``: ``heads`` for gpt2 and with ``mla``;
    otherwise 4 where that divides ``heads``, else ``heads``."""
    head_dim: Width | Literal["auto"] = "auto"
    """Width of one query or key head. ``auto``: ``hidden / heads``; with ``mla`` ``nope_dim + rope_dim``."""
    ffn_hidden: Width | Literal["auto"] = "auto"
    """Inner width of the feed-forward layer. ``auto``: ``4 * hidden`` for gpt2, else ``8/3 * hidden`` rounded
    up to a multiple of 64."""
    vocab: Positive | Literal["auto"] = "auto"
    """Vocabulary size. ``auto``: the tokenizer's. Padded internally; results never depend on padding."""
    max_positions: Positive | Literal["auto"] = "auto"
    """Longest sequence of the model, in tokens; for gpt2 the rows of the position table. ``auto``:
    ``data.sequence``, or the length that ``rope_scaling`` reaches if that is longer."""
    tied_embeddings: bool | Literal["auto"] = "auto"
    """Whether the output head shares the embedding's weight. ``auto``: true for gpt2, else false."""
    qkv_bias: bool | Literal["auto"] = "auto"
    """Bias on the query, key and value projections. ``auto``: true for gpt2 and qwen2."""
    out_bias: bool | Literal["auto"] = "auto"
    """Bias on the attention's output projection. ``auto``: true for gpt2."""
    mlp_bias: bool | Literal["auto"] = "auto"
    """Biases in the feed-forward layer. ``auto``: true for gpt2."""
    qk_norm: bool | Literal["auto"] = "auto"
    """RMSNorm on each query and key head before rotation. ``auto``: true for qwen3."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the normalisations."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of these frequencies for longer sequences, or null."""
    rotary_fraction: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Part of each query and key head that is rotated, from its first element on (partial rotary factor)."""
    sliding_window: Positive | None = None
    """Sliding-window attention: a token sees itself and the ``sliding_window - 1`` tokens before it. null:
    all tokens before it."""
    attention_multiplier: PositiveFloat | Literal["auto"] = "auto"
    """Factor of attention scores. ``auto``: ``1 / sqrt(head_dim)``."""
    mla: MlaSettings | None = None
    """Multi-head latent attention, which deepseek_v2 and deepseek_v3 have; null: attention with grouped
    heads."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor of token embeddings."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor of both branches of a layer before they are added to the residual stream."""
    logits_scaling: PositiveFloat = 1.0
    """Divisor of logits."""
    dropout: Fraction = 0.0
    """Probability with which elements of the embeddings' sum and of both residual branches' outputs are
    dropped in training. Which ones depends on seed, step and element only, never on the layout."""
    attention_dropout: Fraction = 0.0
    """Probability with which attention probabilities are dropped in training. Above 0, attention is computed
    without PyTorch's fused kernels, the scores of some queries at a time."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights; projections back into the residual stream are divided by
    ``sqrt(2 * layers)`` (GPT-2 paper)."""
    train: Literal["all"] | tuple[str, ...] = "all"
    """The weights that are trained: ``all``, or patterns, each of which (with ``*``, ``?``, ``[...]``) is one
    or more consecutive parts of a weight's name, in Hexad or in ``transformers``: ``[head, "layers.3"]``,
    ``["*.bias"]``. The rest is frozen: no gradients, no optimizer state, no reductions. With ``lora``,
    ``all`` are the adapters, and patterns are trained besides."""
    lora: LoraSettings | None = None
    """Low-rank adapters, which are trained in place of the weights; null for none."""
    moe: MoeSettings | None = None
    """Mixture of experts; null: all layers are dense."""

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        moe = self.moe
        return () if moe is None else tuple(number for number in range(self.layers) if moe.in_layer(number))

    @property
    def rotary_width(self) -> int:
        """Elements of a query or key head that are rotated, once ``head_dim`` is a number."""
        return self.mla.rope_dim if self.mla is not None else int(int(self.head_dim) * self.rotary_fraction)
