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
    """Scaling of rotary frequencies for sequences longer than in the first training phase."""

    type: Literal["llama3", "yarn", "longrope", "linear", "dynamic"] = "llama3"
    """Method. ``llama3``: Llama 3.1 (its model card). ``yarn``: YaRN (Peng et al., arXiv 2309.00071).
    ``longrope``: LongRoPE (Ding et al., arXiv 2402.13753; Phi-3). ``linear``: position interpolation (Chen et
    al., arXiv 2306.15595). ``dynamic``: NTK-aware scaling as in ``transformers``, with a base that grows with
    the document."""
    factor: PositiveFloat = 8.0
    """Ratio of the new to the original sequence length. llama3 and yarn divide low frequencies by it, linear
    divides all frequencies."""
    original_positions: Positive = 8192
    """Sequence length of the first training phase, in tokens. With dynamic, the frequencies of documents up
    to this length are not scaled."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above ``original_positions / low_freq_factor`` are scaled fully."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below ``original_positions / high_freq_factor`` are not scaled."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies that turn more often than this in ``original_positions`` tokens are not scaled."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies that turn less often than this in ``original_positions`` tokens are scaled fully."""
    truncate: bool = True
    """yarn: widen the range between ``beta_fast`` and ``beta_slow`` to whole frequencies."""
    short_factors: tuple[PositiveFloat, ...] = ()
    """longrope: divisors of the frequencies in documents of up to ``original_positions`` tokens. The list has
    one number per frequency, which is half the number of rotated elements of a head."""
    long_factors: tuple[PositiveFloat, ...] = ()
    """longrope: divisors of the frequencies in longer documents."""
    attention_factor: PositiveFloat | Literal["auto"] = "auto"
    """yarn and longrope: factor of rotated queries and keys. ``auto``, as in the papers: ``0.1 ln(factor) +
    1`` with yarn, ``sqrt(1 + ln(factor) / ln(original_positions))`` with longrope. If ``factor`` is at most
    1, it is 1."""

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
    """Multi-head latent attention (DeepSeek-V2: arXiv 2405.04434, section 2.1). Keys and values are projected
    from one narrow latent vector per token. Generation caches this vector instead of keys and values."""

    q_rank: Width | None = 1536
    """Width of the latent vector from which queries are projected. null: queries are projected from the
    residual stream, as in DeepSeek-V2-Lite."""
    kv_rank: Width = 512
    """Width of the latent vector from which keys and values are projected."""
    nope_dim: Width = 128
    """Elements of a query or key head that are not rotated."""
    rope_dim: Width = 64
    """Elements of a query or key head that are rotated. They follow the other elements. All key heads share
    them."""
    value_dim: Width = 128
    """Width of a value head."""

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim


class LoraSettings(SettingsGroup):
    """Low-rank adapters (LoRA: Hu et al., arXiv 2106.09685)."""

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapters: their product is multiplied by ``alpha / rank``."""
    dropout: Fraction = 0.0
    """Dropout probability of the adapters' inputs in training. The adapters of one linear layer (query, key
    and value; gate and up) drop the same elements."""
    targets: Literal["all"] | tuple[str, ...] = "all"
    """Linear layers that have adapters: ``all``, or patterns as for ``model.train``, such as ``[q_proj,
    v_proj]``. ``all`` does not include experts. Patterns may name them (``experts.gate_up``,
    ``experts.down``). Each expert then has its own adapter, and ``dropout`` must be 0, as in PEFT's
    ``target_parameters``."""


DispatcherName = Literal["alltoall", "all_gather", "nvshmem", "deepep"]


class MoeSettings(SettingsGroup):
    """A mixture of experts in place of the feed-forward layer (Shazeer et al., arXiv 1701.06538)."""

    experts: Annotated[Integer, Field(ge=1, le=2**15)] = 8
    """Experts per layer, not counting shared experts."""
    top_k: Positive = 2
    """Experts that are chosen for each token."""
    ffn_hidden: Width | Literal["auto"] = "auto"
    """Inner width of an expert. ``auto``: ``model.ffn_hidden``."""
    shared_experts: Count = 0
    """Experts that process every token, in addition to the chosen ones. They are computed as one layer of
    this many times ``ffn_hidden``."""
    shared_gate: bool = False
    """Multiply the shared experts' output by a gate: the sigmoid of a linear projection of the token
    (Qwen2-MoE)."""
    every: Positive = 1
    """Distance between layers with experts. A layer has experts if its number, counted from 1, is a multiple
    of this, and if it is not among the first ``first_dense`` layers. The other layers are dense."""
    first_dense: Count = 0
    """Number of leading layers that are dense."""
    layers: Literal["auto"] | tuple[Count, ...] = "auto"
    """Numbers, from 0, of the layers with experts. ``auto``: determined by ``every`` and ``first_dense``."""
    score: Literal["softmax_topk", "topk_softmax", "sigmoid"] = "softmax_topk"
    """Weights of the experts. ``softmax_topk``: a softmax over all experts, then the largest are chosen
    (Mixtral, Qwen3). ``topk_softmax``: the largest are chosen, then a softmax over these. ``sigmoid``:
    sigmoids; a bias that balances loads is added for the choice (DeepSeek-V3, arXiv 2412.19437). Scores are
    computed in at least float32."""
    groups: Positive = 1
    """Number of groups of neighbouring experts. The experts of a token are chosen from ``top_groups`` of them
    (DeepSeek-V2, arXiv 2405.04434). Groups are ranked by their largest score; with ``sigmoid`` by the sum of
    their two largest scores."""
    top_groups: Positive = 1
    """Number of groups from which the experts of a token are chosen."""
    scale: PositiveFloat = 1.0
    """Factor of the chosen experts' weights (routed scaling factor)."""
    normalise: bool = True
    """Divide the weights of the chosen experts by their sum."""
    balance: Literal["microbatch", "sequence", "step"] = "microbatch"
    """Tokens over which ``aux_loss`` averages loads and scores. ``microbatch``: a microbatch, as in
    Megatron-LM. ``sequence``: each sequence, as in DeepSeek-V3. ``step``: the global batch. With ``step`` the
    loads are those of the step before, because the loads of a step are known only at its end."""
    aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss. The loss is the number of experts times the sum of load times
    mean score (Fedus et al., arXiv 2101.03961). It is averaged over microbatches and added for each layer."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the mean square of the router's log-sum-exp (Zoph et al., arXiv 2202.08906)."""
    bias_rate: NonNegativeFloat = 0.0
    """Change of each expert's bias after a step, towards an even load (Wang et al., arXiv 2408.15664), with
    ``score: sigmoid``."""
    capacity_factor: PositiveFloat | None = None
    """Maximum number of tokens of an expert in a microbatch, as a multiple of an even load. Tokens beyond it,
    the last of the microbatch, skip the expert. Generation has no maximum. null: no token skips an expert
    (dropless)."""
    dispatcher: Literal["auto", DispatcherName] = "auto"
    """How tokens are sent to experts on other ranks. ``alltoall``: each row is sent to the ranks of its
    experts. ``all_gather``: all rows are sent to all ranks of the group. ``auto``: whichever of these two
    sends less. Two further dispatchers need GPUs. ``nvshmem``: as ``alltoall``, with PyTorch's operators on
    NVSHMEM. ``deepep``: a token is sent once to each rank of its experts, by the package ``deep_ep``."""
    allowance: Annotated[Number, Field(ge=1, allow_inf_nan=False)] | Literal["auto"] = "auto"
    """Size of the receive buffers of a rank's experts, as a multiple of the rows of an even load, where
    buffers have a fixed size (on GPUs). A step with more rows is refused. ``auto``: 2."""
    forced: bool = False
    """Spread tokens evenly over experts, regardless of scores. For benchmarks."""

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
    """The model's architecture, and which of its weights are trained."""

    preset: Name | None = None
    """Published model (``llama3-8b``, ``gpt2-xl``, ...) that provides the settings below. Keys that are also
    given override it."""
    load: Name | None = None
    """Initial weights if ``run.dir`` has no checkpoint: ``hf:DIR``, a Hugging Face model; ``hf:ORG/NAME`` or
    ``hf:ORG/NAME@REVISION``, a model on the hub; or a run or checkpoint of Hexad. Only the weights are
    loaded. The settings below are filled in from there."""
    family: Family = "llama"
    """Architecture family. It also sets the defaults of several settings below."""
    layers: Layers = 4
    """Number of transformer blocks."""
    hidden: Width = 256
    """Width of the residual stream."""
    heads: Width = 8
    """Query heads per layer."""
    kv_heads: Width | Literal["auto"] = "auto"
    """Key/value heads per layer (grouped-query attention). ``auto``: ``heads`` for gpt2 and with ``mla``;
    otherwise 4 if 4 divides ``heads``, else ``heads``."""
    head_dim: Width | Literal["auto"] = "auto"
    """Width of a query or key head. ``auto``: ``hidden / heads``; with ``mla`` ``nope_dim + rope_dim``."""
    ffn_hidden: Width | Literal["auto"] = "auto"
    """Inner width of the feed-forward layer. ``auto``: ``4 * hidden`` for gpt2, else ``8/3 * hidden`` rounded
    up to a multiple of 64."""
    vocab: Positive | Literal["auto"] = "auto"
    """Vocabulary size. ``auto``: the size of the tokenizer's vocabulary. It is padded internally. Padding
    never changes results."""
    max_positions: Positive | Literal["auto"] = "auto"
    """Longest sequence of the model, in tokens. For gpt2 it is the number of rows of the position table.
    ``auto``: ``data.sequence``, or the length that ``rope_scaling`` reaches if that is longer."""
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
    """Scaling of the rotary frequencies for longer sequences. null: none."""
    rotary_fraction: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Part of each query and key head that is rotated, from its first element (partial rotary factor)."""
    sliding_window: Positive | None = None
    """Sliding-window attention: a token attends to itself and to the ``sliding_window - 1`` tokens before it.
    null: to all tokens before it."""
    attention_multiplier: PositiveFloat | Literal["auto"] = "auto"
    """Factor of attention scores. ``auto``: ``1 / sqrt(head_dim)``."""
    mla: MlaSettings | None = None
    """Multi-head latent attention, as in deepseek_v2 and deepseek_v3. null: grouped-query attention."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor of token embeddings."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor of the outputs of both branches of a layer before they are added to the residual stream."""
    logits_scaling: PositiveFloat = 1.0
    """Divisor of the logits."""
    dropout: Fraction = 0.0
    """Dropout probability of the embeddings' sum and of both residual branches' outputs in training. The
    dropped elements depend only on seed, step and element, never on the layout."""
    attention_dropout: Fraction = 0.0
    """Dropout probability of the attention probabilities in training. Above 0, attention does not use
    PyTorch's fused kernels. It computes the scores of some queries at a time."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. For projections back into the residual stream it is divided
    by ``sqrt(2 * layers)`` (GPT-2 paper)."""
    train: Literal["all"] | tuple[str, ...] = "all"
    """Weights that are trained: ``all``, or patterns. A pattern (with ``*``, ``?``, ``[...]``) matches one or
    more consecutive parts of a weight's name, in Hexad or in ``transformers``: ``[head, "layers.3"]``,
    ``["*.bias"]``. The other weights are frozen: they have no gradients, optimizer state or reductions. With
    ``lora``, ``all`` means the adapters, and patterns name weights that are trained in addition."""
    lora: LoraSettings | None = None
    """Low-rank adapters, which are trained instead of the weights. null: none."""
    moe: MoeSettings | None = None
    """Mixture of experts. null: all layers are dense."""

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        moe = self.moe
        return () if moe is None else tuple(number for number in range(self.layers) if moe.in_layer(number))

    @property
    def rotary_width(self) -> int:
        """Elements of a query or key head that are rotated, once ``head_dim`` is a number."""
        return self.mla.rope_dim if self.mla is not None else int(int(self.head_dim) * self.rotary_fraction)
