"""Every flag of Megatron-LM that ``hexad megatron`` knows: the source of the parser, of the translation's
refusals and of the table in ``docs/megatron.md``. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Effect = Literal["sets", "none", "refused"]
"""``sets``: it determines settings; ``none``: accepted without effect; ``refused``: with any value but the
default."""


@dataclass(frozen=True)
class Flag:
    """One flag of a launch line.

    Attributes:
        name: as it is written, ``--num-layers``.
        kind: of its value; ``bool`` for a switch, which has none.
        default: Megatron-LM's. A switch whose default is true is turned off (``--no-...``).
        target: the settings that it determines, for the documentation.
        note: what is particular; of flags without effect and of refused ones the reason.
        effect: what Hexad does with it.
        several: it takes a list of values.
        choices: values that Megatron-LM accepts; empty for any.
        dest: its attribute in ``get_args()``; by default its name.
        aliases: other names of it.
        needs: flags of which one must have another value than its default, or the value that follows its
            name; without any of them this flag has no effect.
    """

    name: str
    kind: type = str
    default: Any = None
    target: str = ""
    note: str = ""
    effect: Effect = "sets"
    several: bool = False
    choices: Sequence[str] = ()
    dest: str = ""
    aliases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """Its attribute in ``get_args()``."""
        return self.dest or self.name.removeprefix("--").replace("-", "_")


def alternatives(flags: Sequence[str]) -> str:
    """Flags in words: ``--a, --b or --c``."""
    return " or ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))


def switch(name: str, target: str = "", note: str = "", **rest: Any) -> Flag:
    """A flag without a value that is off by default."""
    return Flag(name, bool, False, target, note, **rest)


def unused(name: str, note: str, kind: type = bool, default: Any = None, **rest: Any) -> Flag:
    """A flag that is accepted without effect."""
    value = False if kind is bool and default is None else default
    return Flag(name, kind, value, "", note, "none", **rest)


def negated(name: str, dest: str, target: str = "", note: str = "", **rest: Any) -> Flag:
    """A switch whose attribute is true by default."""
    return Flag(name, bool, True, target, note, dest=dest, **rest)


def turned_off(name: str, dest: str, note: str) -> Flag:
    """A switch without effect whose attribute is true by default."""
    return negated(name, dest, note=note, effect="none")


def refused(name: str, note: str, kind: type = bool, default: Any = None, **rest: Any) -> Flag:
    """A flag that is refused with any value but the default."""
    value = False if kind is bool and default is None else default
    return Flag(name, kind, value, "", note, "refused", **rest)


_FUSED = "Hexad chooses its own kernels"
_EXPERT = "experts are not supported yet"
_EXPERTS = ("--num-experts",)
_ROPE = (
    "--position-embedding-type rope",
    "--position-embedding-type rotary",
    "--use-rotary-position-embeddings",
)
_PIPELINE = ("--pipeline-model-parallel-size",)

MODEL = (
    Flag("--num-layers", int, None, "model.layers", "required"),
    Flag("--hidden-size", int, None, "model.hidden", "required"),
    Flag("--num-attention-heads", int, None, "model.heads", "required"),
    Flag(
        "--ffn-hidden-size",
        int,
        None,
        "model.ffn_hidden",
        "default: 4h; with --swiglu floor(8h / 3) rounded down to a multiple of 64",
    ),
    switch("--group-query-attention", "model.kv_heads"),
    Flag("--num-query-groups", int, 1, "model.kv_heads", needs=("--group-query-attention",)),
    Flag("--num-key-value-heads", int, None, "model.kv_heads", "Megatron-DeepSpeed's"),
    Flag("--kv-channels", int, None, "model.head_dim", "default: hidden size / heads"),
    Flag(
        "--max-position-embeddings",
        int,
        None,
        "model.max_positions",
        "required; the rows of the position table with learned_absolute",
    ),
    Flag(
        "--position-embedding-type",
        str,
        "learned_absolute",
        "model.family",
        "other values are refused",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none", "alibi", "rotary"),
    ),
    switch("--use-rotary-position-embeddings", "model.family", "the same as --position-embedding-type rope"),
    negated(
        "--no-position-embedding", "add_position_embedding", "", "with rope only, where it changes nothing"
    ),
    Flag("--rotary-base", float, 10000.0, "model.rope_theta", needs=_ROPE),
    Flag("--rotary-percent", float, 1.0, "model.rotary_fraction", needs=_ROPE),
    switch("--use-rope-scaling", "model.rope_scaling", "Llama 3.1's", needs=_ROPE),
    Flag("--rope-scaling-factor", float, 8.0, "model.rope_scaling", needs=("--use-rope-scaling",)),
    refused("--rotary-interleaved", "rotary pairs are the elements i and i + width / 2 of a head"),
    refused("--rotary-seq-len-interpolation-factor", "positions are not interpolated", int),
    switch("--swiglu", "model.family"),
    Flag("--normalization", str, "LayerNorm", "model.family", choices=("LayerNorm", "RMSNorm")),
    Flag("--norm-epsilon", float, 1e-5, "model.norm_eps", aliases=("--layernorm-epsilon",)),
    negated("--disable-bias-linear", "add_bias_linear", "model.family"),
    switch("--add-qkv-bias", "model.qkv_bias"),
    switch("--qk-layernorm", "model.qk_norm", "with RMSNorm"),
    switch("--untie-embeddings-and-output-weights", "model.tied_embeddings"),
    Flag("--init-method-std", float, 0.02, "model.init_std"),
    Flag("--attention-dropout", float, 0.1, "model.attention_dropout"),
    Flag("--hidden-dropout", float, 0.1, "model.dropout"),
    Flag("--window-size", str, None, "model.sliding_window", "LEFT,0; Hexad counts the token itself too"),
    unused("--apply-layernorm-1p", "weights around 0 or around 1 give the same model"),
    unused("--apply-query-key-layer-scaling", "scores are computed in at least float32"),
    unused("--attention-softmax-in-fp32", "scores are computed in at least float32"),
    unused("--openai-gelu", "GELU is always this approximation"),
    unused("--make-vocab-size-divisible-by", "padding is internal and not part of the softmax", int, 128),
    unused("--pad-vocab-size-to", "padding is internal and not part of the softmax", int, None),
    unused("--use-mcore-models", "there is one model"),
    unused("--use-legacy-models", "there is one model"),
    unused("--transformer-impl", _FUSED, str, "transformer_engine"),
    unused("--attention-backend", _FUSED, str, "auto"),
    unused("--use-flash-attn", _FUSED, aliases=("--use-flash-attn-v2",)),
    turned_off("--no-masked-softmax-fusion", "masked_softmax_fusion", _FUSED),
    turned_off("--no-bias-gelu-fusion", "bias_gelu_fusion", "GELU is the tanh approximation, as with it"),
    turned_off("--no-bias-swiglu-fusion", "bias_swiglu_fusion", _FUSED),
    turned_off("--no-bias-dropout-fusion", "bias_dropout_fusion", _FUSED),
    turned_off("--no-rope-fusion", "apply_rope_fusion", _FUSED),
    unused("--no-persist-layer-norm", _FUSED),
    unused("--cross-entropy-loss-fusion", _FUSED),
    unused("--cross-entropy-fusion-impl", _FUSED, str, "native"),
    turned_off("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", _FUSED),
    refused("--squared-relu", "activations are SwiGLU or GELU"),
    refused("--quick-geglu", "activations are SwiGLU or GELU"),
    refused("--apply-residual-connection-post-layernorm", "the residual stream is not normalised"),
    refused("--embed-layernorm", "embeddings are not normalised"),
    refused("--multi-latent-attention", "attention is multi-head or grouped-query"),
    refused("--mtp-num-layers", "only the next token is predicted", int),
    refused("--init-method-xavier-uniform", "weights are drawn from a normal distribution"),
    refused("--fp8-format", "set precision.dtype: fp8 in what --print-config prints", str, dest="fp8"),
    refused("--fp8-hybrid", "set precision.dtype: fp8 in what --print-config prints"),
)

EXPERTS = (
    Flag("--num-experts", int, None, "model.moe.experts", _EXPERT, "refused"),
    Flag("--moe-router-topk", int, 2, "model.moe.top_k", needs=_EXPERTS),
    Flag("--moe-ffn-hidden-size", int, None, "model.moe.ffn_hidden", needs=_EXPERTS),
    Flag("--moe-shared-expert-intermediate-size", int, None, "model.moe.shared_experts", needs=_EXPERTS),
    Flag("--moe-aux-loss-coeff", float, 0.0, "model.moe.aux_loss", needs=_EXPERTS),
    Flag("--moe-z-loss-coeff", float, None, "model.moe.z_loss", needs=_EXPERTS),
    Flag("--moe-expert-capacity-factor", float, None, "model.moe.capacity_factor", needs=_EXPERTS),
    Flag("--moe-router-load-balancing-type", str, "aux_loss", "model.moe.balance", needs=_EXPERTS),
    Flag("--moe-token-dispatcher-type", str, "allgather", "model.moe.dispatcher", needs=_EXPERTS),
    unused("--moe-grouped-gemm", _FUSED),
    unused("--moe-permute-fusion", _FUSED),
    Flag("--expert-model-parallel-size", int, 1, "parallel.expert", _EXPERT, "refused"),
    Flag("--expert-tensor-parallel-size", int, None, "parallel.expert_tensor", _EXPERT, "refused"),
)

PARALLEL = (
    Flag("--tensor-model-parallel-size", int, 1, "parallel.tensor"),
    switch("--sequence-parallel", "parallel.sequence", needs=("--tensor-model-parallel-size",)),
    Flag("--pipeline-model-parallel-size", int, 1, "parallel.pipeline"),
    Flag(
        "--num-layers-per-virtual-pipeline-stage",
        int,
        None,
        "parallel.virtual_stages",
        "the schedule is then interleaved, otherwise 1f1b",
    ),
    Flag("--num-virtual-stages-per-pipeline-rank", int, None, "parallel.virtual_stages"),
    Flag("--decoder-first-pipeline-num-layers", int, None, "parallel.split"),
    Flag("--decoder-last-pipeline-num-layers", int, None, "parallel.split"),
    switch("--account-for-embedding-in-pipeline-split", "parallel.split", needs=_PIPELINE),
    switch("--account-for-loss-in-pipeline-split", "parallel.split", needs=_PIPELINE),
    Flag("--pipeline-model-parallel-layout", str, None, "parallel.split", "with stages of E, t and L"),
    Flag(
        "--pp-partition-method",
        str,
        None,
        "parallel.split",
        "Megatron-DeepSpeed's: uniform, or type:transformer, with embedding for the first and last layer",
        needs=_PIPELINE,
    ),
    Flag(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        int,
        None,
        "parallel.schedule_group",
        dest="microbatch_group_size_per_vp_stage",
        needs=(
            "--num-layers-per-virtual-pipeline-stage",
            "--num-virtual-stages-per-pipeline-rank",
            "--pipeline-model-parallel-layout",
        ),
    ),
    Flag("--context-parallel-size", int, 1, "parallel.context"),
    Flag(
        "--cp-comm-type",
        str,
        ("p2p",),
        "parallel.context_method",
        "p2p, a2a, allgather or a2a+p2p, the same for all layers",
        several=True,
        needs=("--context-parallel-size",),
    ),
    Flag(
        "--hierarchical-context-parallel-sizes",
        int,
        None,
        "parallel.context_ulysses",
        "with a2a+p2p: ranks that exchange heads, then those of the ring",
        several=True,
        needs=("--context-parallel-size",),
    ),
    switch("--use-tp-pp-dp-mapping", "parallel.order"),
    switch("--use-distributed-optimizer", "parallel.zero", "level 1"),
    switch("--use-torch-fsdp2", "parallel.zero", "level 3"),
    switch(
        "--use-megatron-fsdp",
        "parallel.zero",
        aliases=("--use-custom-fsdp",),
        needs=("--data-parallel-sharding-strategy",),
    ),
    Flag(
        "--data-parallel-sharding-strategy",
        str,
        "no_shard",
        "parallel.zero",
        "levels 0 to 3",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        needs=("--use-megatron-fsdp",),
    ),
    Flag("--zero-stage", int, None, "parallel.zero", "Megatron-DeepSpeed's"),
    Flag("--num-distributed-optimizer-instances", int, 1, "parallel.replicas"),
    Flag("--ddp-bucket-size", int, None, "parallel.bucket_mb", "in parameters, of which each takes 4 bytes"),
    Flag("--distributed-timeout-minutes", float, 10.0, "run.timeout"),
    Flag("--distributed-backend", str, "nccl", "run.device", "gloo: cpu", choices=("nccl", "gloo")),
    unused("--overlap-grad-reduce", "communication overlaps wherever it can"),
    unused("--overlap-param-gather", "communication overlaps wherever it can"),
    unused("--overlap-param-gather-with-optimizer-step", "communication overlaps wherever it can"),
    unused("--tp-comm-overlap", "communication overlaps wherever it can"),
    unused("--overlap-p2p-communication-warmup-flush", "communication overlaps wherever it can"),
    turned_off("--no-overlap-p2p-communication", "overlap_p2p_comm", "communication overlaps"),
    turned_off(
        "--no-async-tensor-model-parallel-allreduce",
        "async_tensor_model_parallel_allreduce",
        "communication overlaps wherever it can",
    ),
    unused("--defer-embedding-wgrad-compute", "parallel.schedule decides what is deferred"),
    unused("--deallocate-pipeline-outputs", "always so"),
    turned_off("--no-scatter-gather-tensors-in-pipeline", "scatter_gather_tensors_in_pipeline", "not needed"),
    unused("--DDP-impl", "there is one implementation", str, "local"),
    unused("--use-cpu-initialization", "initial values do not depend on the device"),
    unused("--use-ring-exchange-p2p", "messages between stages have one implementation"),
    unused("--local-rank", "the launcher's variables are used", int, None),
    switch("--deepspeed", "", "with --deepspeed_config"),
    Flag(
        "--deepspeed_config",
        str,
        None,
        "",
        "with --deepspeed: ZeRO, precision, clipping and offload are those of the file",
    ),
    unused("--deepspeed-activation-checkpointing", "see --checkpoint-activations"),
    unused("--nccl-communicator-config-path", "NCCL's environment variables apply", str),
)

RECOMPUTE = (
    Flag("--recompute-granularity", str, None, "memory.recompute", choices=("full", "selective")),
    Flag(
        "--recompute-method",
        str,
        None,
        "memory.recompute_layers",
        "uniform: all layers, each by itself; block: the first --recompute-num-layers of a stage",
        choices=("uniform", "block"),
        needs=("--recompute-granularity full",),
    ),
    Flag("--recompute-num-layers", int, None, "memory.recompute_layers", needs=("--recompute-method block",)),
    switch("--recompute-activations", "memory.recompute", "selective"),
    switch("--checkpoint-activations", "memory.recompute", "full; older versions'"),
    Flag("--checkpoint-num-layers", int, None, "", "each layer is recomputed by itself", "none"),
    unused("--distribute-saved-activations", "sequence parallel shards them"),
    unused("--distribute-checkpointed-activations", "sequence parallel shards them"),
    refused("--recompute-modules", "what selective recomputes is fixed", str, None, several=True),
    switch("--optimizer-cpu-offload", "memory.offload"),
)

_RAMP = "batches have one size"
_KERNELS = "Hexad has its own"
_WSD = ("--lr-decay-style WSD",)
_FP16 = ("--fp16",)
_LOAD = ("--load",)
_PROFILE = ("--profile",)

TRAINING = (
    Flag("--micro-batch-size", int, None, "batch.micro", "required", aliases=("--batch-size",)),
    Flag("--global-batch-size", int, None, "batch.global", "default: micro batch size x data ranks"),
    refused("--rampup-batch-size", _RAMP, str, None, several=True),
    refused("--step-batch-size-schedule", _RAMP, str),
    Flag("--train-iters", int, None, "run.steps"),
    Flag("--train-samples", int, None, "run.steps", "divided by the global batch size, rounded down"),
    Flag("--seed", int, 1234, "run.seed"),
    Flag("--optimizer", str, "adam", "optimizer.name", "adam, which is AdamW", choices=("adam", "sgd")),
    Flag("--lr", float, None, "optimizer.lr", "required"),
    Flag("--min-lr", float, 0.0, "lr_schedule.min_lr"),
    Flag(
        "--lr-decay-style",
        str,
        "linear",
        "lr_schedule.kind",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    ),
    Flag("--lr-decay-iters", int, None, "lr_schedule.decay_steps", "default: all iterations"),
    Flag("--lr-decay-samples", int, None, "lr_schedule.decay_steps", "with --train-samples"),
    Flag("--lr-warmup-iters", int, 0, "lr_schedule.warmup"),
    Flag("--lr-warmup-samples", int, 0, "lr_schedule.warmup", "with --train-samples"),
    Flag("--lr-warmup-fraction", float, None, "lr_schedule.warmup", "of the iterations of the decay"),
    refused("--lr-warmup-init", "warm-up begins at 0", float, 0.0),
    Flag(
        "--lr-wsd-decay-style",
        str,
        "exponential",
        "lr_schedule.kind",
        "linear only",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        needs=_WSD,
    ),
    Flag("--lr-wsd-decay-iters", int, None, "lr_schedule.decay_steps", needs=_WSD),
    Flag("--lr-wsd-decay-samples", int, None, "lr_schedule.decay_steps", "with --train-samples", needs=_WSD),
    refused("--decoupled-lr", "one learning rate applies to all weights", float),
    refused("--decoupled-min-lr", "one learning rate applies to all weights", float),
    Flag("--weight-decay", float, 0.01, "optimizer.weight_decay"),
    refused("--start-weight-decay", "weight decay is constant", float),
    refused("--end-weight-decay", "weight decay is constant", float),
    refused("--weight-decay-incr-style", "weight decay is constant", str, "constant"),
    Flag("--clip-grad", float, 1.0, "optimizer.clip"),
    Flag("--adam-beta1", float, 0.9, "optimizer.betas"),
    Flag("--adam-beta2", float, 0.999, "optimizer.betas"),
    Flag("--adam-eps", float, 1e-8, "optimizer.eps"),
    unused("--calculate-per-token-loss", "losses are always averaged over the global batch's tokens"),
    switch("--deterministic-mode", "run.deterministic"),
    unused("--override-opt_param-scheduler", "the schedule is that of the flags"),
    unused("--use-checkpoint-opt_param-scheduler", "the schedule is that of the flags"),
    unused("--use-checkpoint-args", "settings are those of the flags"),
    unused("--manual-gc", "garbage is collected between steps"),
    unused("--manual-gc-interval", "garbage is collected between steps", int, 0),
    unused("--empty-unused-memory-level", "PyTorch's allocator keeps its memory", int, 0),
    unused("--check-for-nan-in-loss-and-grad", "always so, see faults.not_finite"),
    turned_off(
        "--no-check-for-nan-in-loss-and-grad",
        "check_for_nan_in_loss_and_grad",
        "they are always checked, see faults.not_finite",
    ),
    unused("--exit-duration-in-mins", "SIGTERM and SIGUSR1 make a run save and stop", int),
    refused("--exit-interval", "a run stops at --train-iters", int),
    unused("--exit-signal-handler", "SIGTERM and SIGUSR1 make a run save and stop"),
    unused("--kill-switch-path", "SIGTERM and SIGUSR1 make a run save and stop", str),
    unused("--abort-on-unmet-fused-kernel-constraints", _KERNELS),
)

PRECISION = (
    switch("--bf16", "precision.dtype"),
    switch("--fp16", "precision.dtype"),
    Flag("--loss-scale", float, None, "precision.loss_scale", "default: dynamic", needs=_FP16),
    Flag("--initial-loss-scale", float, 2.0**32, "precision.loss_scale_initial", needs=_FP16),
    Flag("--loss-scale-window", float, 1000.0, "precision.loss_scale_window", needs=_FP16),
    Flag("--hysteresis", int, 2, "precision.loss_scale_hysteresis", needs=_FP16),
    Flag("--min-loss-scale", float, 1.0, "precision.loss_scale_min", needs=_FP16),
    switch("--grad-reduce-in-bf16", "precision.reduce", "and precision.accumulate"),
    unused("--accumulate-allreduce-grads-in-fp32", "the default"),
    refused("--fp16-lm-cross-entropy", "the loss is computed in at least float32"),
)

DATA = (
    Flag("--seq-length", int, None, "data.sequence", "required"),
    Flag("--data-path", str, None, "data.train", "a prefix, or weights and prefixes", several=True),
    Flag("--data-args-path", str, None, "data.train", "a file that holds the value of --data-path"),
    Flag(
        "--split",
        str,
        "969, 30, 1",
        "data.split",
        "by documents, as there; the third part is not used",
        needs=("--data-path", "--data-args-path", "--mock-data"),
    ),
    Flag("--train-data-path", str, None, "data.train", several=True),
    Flag("--valid-data-path", str, None, "data.validation", several=True, needs=("--train-data-path",)),
    unused("--test-data-path", "nothing is evaluated after training: see hexad evaluate", str, several=True),
    switch("--mock-data", "data.train", "a data set of counting numbers, written to the run's directory"),
    refused("--train-weighted-split-paths-path", "use --data-path and --split", str),
    refused("--valid-weighted-split-paths-path", "use --valid-data-path", str),
    refused("--per-split-data-args-path", "use --train-data-path and --valid-data-path", str),
    Flag(
        "--tokenizer-type",
        str,
        None,
        "data.tokenizer",
        "GPT2BPETokenizer: --vocab-file and --merge-file as one tokenizer.json in the run's directory; "
        "NullTokenizer: model.vocab is --vocab-size + 1; others are loaded from --tokenizer-model",
        choices=(
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "NullTokenizer",
            "PretrainedFromHF",
        ),
    ),
    Flag("--tokenizer-model", str, None, "data.tokenizer"),
    Flag(
        "--tokenizer-name-or-path",
        str,
        None,
        "data.tokenizer",
        "a directory",
        needs=("--tokenizer-type PretrainedFromHF",),
    ),
    unused("--tiktoken-pattern", "determined by the tokenizer's file", str),
    unused("--tiktoken-num-special-tokens", "determined by the tokenizer's file", int, 1000),
    Flag("--vocab-file", str, None, "data.tokenizer"),
    Flag("--merge-file", str, None, "data.tokenizer"),
    Flag("--vocab-size", int, None, "model.vocab", "with NullTokenizer; others have their own"),
    switch("--reset-position-ids", "data.documents", "isolate, together with the next two"),
    switch("--reset-attention-mask", "data.documents", "isolate"),
    switch("--eod-mask-loss", "data.documents", "isolate"),
    unused("--num-workers", "samples are read ahead by a thread", int, 2),
    Flag("--dataloader-type", str, None, "", "single, the default", choices=("single", "cyclic", "external")),
    unused("--data-impl", "data are indexed and memory-mapped", str, "mmap"),
    unused("--data-cache-path", "indexes are kept beside the data, or in the run's directory", str),
    turned_off("--no-mmap-bin-files", "mmap_bin_files", "data are memory-mapped"),
    turned_off(
        "--no-create-attention-mask-in-dataloader", "create_attention_mask_in_dataloader", "there is none"
    ),
)

CHECKPOINT = (
    Flag("--save", str, None, "run.dir", "default: runs/megatron"),
    Flag("--load", str, None, "checkpoint.load", "a run or checkpoint of Hexad; none if it is --save"),
    switch("--finetune", "model.load", "weights only", needs=_LOAD),
    Flag("--pretrained-checkpoint", str, None, "model.load", "weights only"),
    Flag("--save-interval", int, None, "checkpoint.every", "default: only at the end"),
    Flag("--save-retain-interval", int, None, "", "all checkpoints are kept", "none"),
    switch("--async-save", "checkpoint.asynchronous"),
    switch("--exit-on-missing-checkpoint", "checkpoint.resume", "must, where --load is --save", needs=_LOAD),
    switch("--no-load-optim", "", "with --finetune, or where there is nothing to load"),
    unused("--no-load-rng", "there is no generator's state: random numbers are keyed by seed and step"),
    refused("--no-save-optim", "checkpoints are complete"),
    unused("--no-save-rng", "there is no generator's state: random numbers are keyed by seed and step"),
    unused("--ckpt-format", "there is one format", str, "torch_dist"),
    unused("--use-dist-ckpt", "there is one format"),
    unused("--dist-ckpt-format", "there is one format", str),
    unused("--ckpt-fully-parallel-save", "every rank writes what it holds"),
    unused("--ckpt-fully-parallel-load", "every rank reads what it holds"),
    unused("--ckpt-assume-constant-structure", "checkpoints have no layout"),
    unused("--auto-detect-ckpt-format", "there is one format"),
)

LOGGING = (
    Flag("--eval-interval", int, 1000, "validate.every", "off without validation data"),
    Flag("--eval-iters", int, 100, "validate.batches"),
    Flag("--log-interval", int, 100, "log.every"),
    Flag("--tensorboard-dir", str, None, "log.tensorboard", "written to run.dir/tensorboard"),
    Flag("--wandb-project", str, "", "log.wandb"),
    unused("--wandb-exp-name", "the run is named after run.dir", str, ""),
    unused("--wandb-save-dir", "it is written to run.dir", str, ""),
    unused("--tensorboard-queue-size", "every line is written", int, 1000),
    unused("--tensorboard-log-interval", "as --log-interval", int, 1),
    unused("--log-timers-to-tensorboard", "metrics.jsonl has what is measured"),
    unused("--log-batch-size-to-tensorboard", "metrics.jsonl has what is measured"),
    unused("--log-validation-ppl-to-tensorboard", "metrics.jsonl has what is measured"),
    unused("--log-memory-to-tensorboard", "metrics.jsonl has what is measured"),
    unused("--log-params-norm", "metrics.jsonl has what is measured"),
    unused("--log-num-zeros-in-grad", "metrics.jsonl has what is measured"),
    unused("--log-throughput", "metrics.jsonl has what is measured"),
    unused("--log-progress", "metrics.jsonl has what is measured"),
    unused("--timing-log-level", "metrics.jsonl has what is measured", int, 0),
    switch("--profile", "log.profile", "of every rank, by torch's profiler"),
    Flag("--profile-step-start", int, 10, "log.profile.start", "Hexad counts from 1", needs=_PROFILE),
    Flag("--profile-step-end", int, 12, "log.profile.steps", needs=_PROFILE),
    unused("--profile-ranks", "every rank is profiled", int, None, several=True),
    unused("--use-pytorch-profiler", "always so"),
)

GROUPS: dict[str, tuple[Flag, ...]] = {
    "Model": MODEL,
    "Experts": EXPERTS,
    "Layout": PARALLEL,
    "Recomputation": RECOMPUTE,
    "Batches and training": TRAINING,
    "Precision": PRECISION,
    "Data": DATA,
    "Checkpoints": CHECKPOINT,
    "Evaluation and logs": LOGGING,
}
"""By title."""

FLAGS: dict[str, Flag] = {
    name: flag for group in GROUPS.values() for flag in group for name in (flag.name, *flag.aliases)
}
"""By name, aliases included."""
