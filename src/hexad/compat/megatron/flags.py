"""Every flag of Megatron-LM that ``hexad megatron`` knows: the source of the parser, of the translation's
refusals and of the table in ``docs/megatron.md``. No torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .other_flags import TABLE

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
        """The name of its attribute in ``get_args()``."""
        return self.dest or self.name.removeprefix("--").replace("-", "_")


def flag_of(attribute: str) -> str:
    """The flag of an attribute that has its name."""
    return f"--{attribute.replace('_', '-')}"


def alternatives(flags: Sequence[str]) -> str:
    """Flags in words: ``--a, --b or --c``."""
    return " or ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))


_TABLE = """\
# Model
--num-layers                            int         model.layers              required
--hidden-size                           int         model.hidden              required
--num-attention-heads                   int         model.heads               required
--ffn-hidden-size                       int         model.ffn_hidden
      default: 4h; with --swiglu floor(8h / 3) rounded down to a multiple of 64
--group-query-attention                 switch      model.kv_heads
with --group-query-attention:
  --num-query-groups                    int=1       model.kv_heads
--num-key-value-heads                   int         model.kv_heads            Megatron-DeepSpeed's
--kv-channels                           int         model.head_dim            default: hidden size / heads
--max-position-embeddings               int         model.max_positions
      required; the rows of the position table with learned_absolute
--position-embedding-type               str=learned_absolute  model.family  other values are refused
      one of learned_absolute, rope, yarn, mrope, relative, none, alibi, rotary
--use-rotary-position-embeddings        switch      model.family  the same as --position-embedding-type rope
--no-position-embedding  clears add_position_embedding  -  with rope only, where it changes nothing
with --position-embedding-type rope, --position-embedding-type rotary, --use-rotary-position-embeddings:
  --rotary-base                         float=10000  model.rope_theta
  --rotary-percent                      float=1     model.rotary_fraction
  --use-rope-scaling                    switch      model.rope_scaling        Llama 3.1's
with --use-rope-scaling:
  --rope-scaling-factor                 float=8     model.rope_scaling
--rotary-interleaved  switch  refused  rotary pairs are the elements i and i + width / 2 of a head
--rotary-seq-len-interpolation-factor   int         refused                   positions are not interpolated
--swiglu                                switch      model.family
--normalization                         str=LayerNorm  model.family
      one of LayerNorm, RMSNorm
--norm-epsilon/--layernorm-epsilon      float=1e-05  model.norm_eps
--disable-bias-linear                   clears add_bias_linear  model.family
--add-qkv-bias                          switch      model.qkv_bias
--qk-layernorm                          switch      model.qk_norm             with RMSNorm
--untie-embeddings-and-output-weights   switch      model.tied_embeddings
--init-method-std                       float=0.02  model.init_std
--attention-dropout                     float=0.1   model.attention_dropout
--hidden-dropout                        float=0.1   model.dropout
--window-size                           str  model.sliding_window  LEFT,0; Hexad counts the token itself too
--apply-layernorm-1p                    switch      none  weights around 0 or around 1 give the same model
--apply-query-key-layer-scaling --attention-softmax-in-fp32  switch  none
      scores are computed in at least float32
--openai-gelu                           switch      none  GELU is always this approximation
--make-vocab-size-divisible-by          int=128     none  padding is internal and not part of the softmax
--pad-vocab-size-to                     int         none  padding is internal and not part of the softmax
--use-mcore-models --use-legacy-models  switch      none                      there is one model
--transformer-impl                      str=transformer_engine  none  Hexad chooses its own kernels
--attention-backend                     str=auto    none                      Hexad chooses its own kernels
--use-flash-attn/--use-flash-attn-v2 --no-persist-layer-norm --cross-entropy-loss-fusion  switch  none
      Hexad chooses its own kernels
--no-masked-softmax-fusion              clears masked_softmax_fusion  none  Hexad chooses its own kernels
--no-bias-gelu-fusion  clears bias_gelu_fusion  none  GELU is the tanh approximation, as with it
--no-bias-swiglu-fusion                 clears bias_swiglu_fusion  none  Hexad chooses its own kernels
--no-bias-dropout-fusion                clears bias_dropout_fusion  none  Hexad chooses its own kernels
--no-rope-fusion                        clears apply_rope_fusion  none  Hexad chooses its own kernels
--cross-entropy-fusion-impl             str=native  none                      Hexad chooses its own kernels
--no-gradient-accumulation-fusion  clears gradient_accumulation_fusion  none  Hexad chooses its own kernels
--squared-relu --quick-geglu            switch      refused                   activations are SwiGLU or GELU
--apply-residual-connection-post-layernorm  switch      refused  the residual stream is not normalised
--embed-layernorm                       switch      refused                   embeddings are not normalised
--multi-latent-attention                switch      refused  attention is multi-head or grouped-query
--mtp-num-layers                        int         refused                   only the next token is predicted
--init-method-xavier-uniform            switch      refused  weights are drawn from a normal distribution
--fp8-format  str as fp8  precision.dtype  with Hexad's scaling, per tensor; on GPUs that have it
      one of hybrid, e4m3
--fp8-hybrid                            switch      precision.dtype           older: --fp8-format hybrid
# Experts
--num-experts                           int         later:model.moe.experts   experts are not supported yet
with --num-experts:
  --moe-router-topk                     int=2       model.moe.top_k
  --moe-ffn-hidden-size                 int         model.moe.ffn_hidden
  --moe-shared-expert-intermediate-size  int         model.moe.shared_experts
  --moe-aux-loss-coeff                  float=0     model.moe.aux_loss
  --moe-z-loss-coeff                    float       model.moe.z_loss
  --moe-expert-capacity-factor          float       model.moe.capacity_factor
  --moe-router-load-balancing-type      str=aux_loss  model.moe.balance
  --moe-token-dispatcher-type           str=allgather  model.moe.dispatcher
--moe-grouped-gemm --moe-permute-fusion  switch      none                      Hexad chooses its own kernels
--expert-model-parallel-size            int=1       later:parallel.expert     experts are not supported yet
--expert-tensor-parallel-size           int  later:parallel.expert_tensor  experts are not supported yet
# Layout
--tensor-model-parallel-size            int=1       parallel.tensor
with --tensor-model-parallel-size:
  --sequence-parallel                   switch      parallel.sequence
--pipeline-model-parallel-size          int=1       parallel.pipeline
--num-layers-per-virtual-pipeline-stage  int         parallel.virtual_stages
      the schedule is then interleaved, otherwise 1f1b
--num-virtual-stages-per-pipeline-rank  int         parallel.virtual_stages
--decoder-first-pipeline-num-layers     int         parallel.split
--decoder-last-pipeline-num-layers      int         parallel.split
with --pipeline-model-parallel-size:
  --account-for-embedding-in-pipeline-split  switch      parallel.split
  --account-for-loss-in-pipeline-split  switch      parallel.split
--pipeline-model-parallel-layout        str         parallel.split            with stages of E, t and L
with --pipeline-model-parallel-size:
  --pp-partition-method                 str         parallel.split
      Megatron-DeepSpeed's: uniform, or type:transformer, with embedding for the first and last layer
with --num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank,
      --pipeline-model-parallel-layout:
  --microbatch-group-size-per-virtual-pipeline-stage  int as microbatch_group_size_per_vp_stage  \
parallel.schedule_group
--context-parallel-size                 int=1       parallel.context
with --context-parallel-size:
  --cp-comm-type  str*=p2p  parallel.context_method  p2p, a2a, allgather or a2a+p2p, the same for all layers
  --hierarchical-context-parallel-sizes  int*        parallel.context_ulysses
      with a2a+p2p: ranks that exchange heads, then those of the ring
--ds-sequence-parallel-size  int=1  parallel.context  Megatron-DeepSpeed's, with ulysses
--use-tp-pp-dp-mapping                  switch      parallel.order
--use-distributed-optimizer             switch      parallel.zero             level 1
--use-torch-fsdp2                       switch      parallel.zero             level 3
with --data-parallel-sharding-strategy:
  --use-megatron-fsdp/--use-custom-fsdp  switch      parallel.zero
with --use-megatron-fsdp:
  --data-parallel-sharding-strategy     str=no_shard  parallel.zero             levels 0 to 3
      one of no_shard, optim, optim_grads, optim_grads_params
--zero-stage                            int         parallel.zero             Megatron-DeepSpeed's
--num-distributed-optimizer-instances   int=1       parallel.replicas
--ddp-bucket-size                       int  parallel.bucket_mb  in parameters, of which each takes 4 bytes
--distributed-timeout-minutes           float=10    run.timeout
--distributed-backend                   str=nccl    run.device                gloo: cpu
      one of nccl, gloo
--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step --tp-comm-overlap
      --overlap-p2p-communication-warmup-flush  switch  none  communication overlaps wherever it can
--no-overlap-p2p-communication          clears overlap_p2p_comm  none  communication overlaps
--no-async-tensor-model-parallel-allreduce  clears async_tensor_model_parallel_allreduce  none
      communication overlaps wherever it can
--defer-embedding-wgrad-compute         switch      none  parallel.schedule decides what is deferred
--no-pipeline-parallel                  switch      none  one stage has no pipeline
--deallocate-pipeline-outputs           switch      none                      always so
--no-scatter-gather-tensors-in-pipeline  clears scatter_gather_tensors_in_pipeline  none  not needed
--DDP-impl                              str=local   none                      there is one implementation
--use-cpu-initialization                switch      none  initial values do not depend on the device
--use-ring-exchange-p2p                 switch      none  messages between stages have one implementation
--local-rank                            int         none  the launcher's variables are used
--deepspeed                             switch      -                         with --deepspeed_config
--deepspeed_config  str  -  with --deepspeed: ZeRO, precision, clipping and offload are those of the file
--deepspeed-activation-checkpointing --partition-activations --contigious-checkpointing
      --checkpoint-in-cpu --synchronize-each-layer  switch  none  see --checkpoint-activations
--universal-checkpoint                  switch      none                      checkpoints have no layout
--nccl-communicator-config-path         str         none  NCCL's environment variables apply
# Recomputation
--recompute-granularity                 str         memory.recompute
      one of full, selective
with --recompute-granularity full:
  --recompute-method                    str         memory.recompute_layers
      uniform: all layers, each by itself; block: the first --recompute-num-layers of a stage
      one of uniform, block
with --recompute-method block:
  --recompute-num-layers                int         memory.recompute_layers
--recompute-activations                 switch      memory.recompute          selective
--checkpoint-activations                switch      memory.recompute          full; older versions'
--checkpoint-num-layers                 int         none  each layer is recomputed by itself
--distribute-saved-activations --distribute-checkpointed-activations  switch  none
      sequence parallel shards them
--recompute-modules                     str*        refused  what selective recomputes is fixed
--optimizer-cpu-offload                 switch      memory.offload
# Batches and training
--micro-batch-size/--batch-size         int         batch.micro               required
--global-batch-size                     int         batch.global  default: micro batch size x data ranks
--rampup-batch-size                     str*        refused                   batches have one size
--step-batch-size-schedule              str         refused                   batches have one size
--train-iters                           int         run.steps
--train-samples                         int         run.steps  divided by the global batch size, rounded down
--train-tokens  int  run.steps  Megatron-DeepSpeed's; with --train-samples the smaller one
--seed                                  int=1234    run.seed
--optimizer                             str=adam    optimizer.name            adam, which is AdamW
      one of adam, sgd
--lr                                    float       optimizer.lr              required
--min-lr                                float=0     lr_schedule.min_lr
--lr-decay-style                        str=linear  lr_schedule.kind
      one of constant, linear, cosine, inverse-square-root, WSD
--lr-decay-iters                        int         lr_schedule.decay_steps   default: all iterations
--lr-decay-samples                      int         lr_schedule.decay_steps   with --train-samples
--lr-decay-tokens                       int         lr_schedule.decay_steps   Megatron-DeepSpeed's
--lr-warmup-tokens                      int         lr_schedule.warmup        Megatron-DeepSpeed's
--lr-warmup-iters                       int=0       lr_schedule.warmup
--lr-warmup-samples                     int=0       lr_schedule.warmup        with --train-samples
--lr-warmup-fraction                    float       lr_schedule.warmup        of the iterations of the decay
--lr-warmup-init                        float=0     refused                   warm-up begins at 0
with --lr-decay-style WSD:
  --lr-wsd-decay-style                  str=exponential  lr_schedule.kind          linear only
      one of exponential, linear, cosine, minus_sqrt
  --lr-wsd-decay-iters                  int         lr_schedule.decay_steps
  --lr-wsd-decay-samples                int         lr_schedule.decay_steps   with --train-samples
--decoupled-lr --decoupled-min-lr       float       refused  one learning rate applies to all weights
--weight-decay                          float=0.01  optimizer.weight_decay
--start-weight-decay --end-weight-decay  float       refused                   weight decay is constant
--weight-decay-incr-style               str=constant  refused                   weight decay is constant
--clip-grad                             float=1     optimizer.clip
--adam-beta1                            float=0.9   optimizer.betas
--adam-beta2                            float=0.999  optimizer.betas
--adam-eps                              float=1e-08  optimizer.eps
--calculate-per-token-loss  switch  none  losses are always averaged over the global batch's tokens
--deterministic-mode                    switch      run.deterministic
--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler  switch  none
      the schedule is that of the flags
--use-checkpoint-args                   switch      none                      settings are those of the flags
--check-weight-hash-across-dp-replicas-interval  int  log.check_replicas
--manual-gc                             switch      none  garbage is collected between steps
--manual-gc-interval                    int=0       none  garbage is collected between steps
--empty-unused-memory-level             int=0       none  PyTorch's allocator keeps its memory
--check-for-nan-in-loss-and-grad        switch      none                      always so, see faults.not_finite
--no-check-for-nan-in-loss-and-grad     clears check_for_nan_in_loss_and_grad  none
      they are always checked, see faults.not_finite
--exit-duration-in-mins                 int         none  SIGTERM and SIGUSR1 make a run save and stop
--exit-interval                         int         run.steps                 the first such iteration
--exit-signal-handler                   switch      none  SIGTERM and SIGUSR1 make a run save and stop
--kill-switch-path                      str         none  SIGTERM and SIGUSR1 make a run save and stop
--abort-on-unmet-fused-kernel-constraints  switch      none                      Hexad has its own
# Precision
--bf16                                  switch      precision.dtype
--fp16                                  switch      precision.dtype
with --fp16:
  --loss-scale                          float       precision.loss_scale      default: dynamic
  --initial-loss-scale                  float=4294967296  precision.loss_scale_initial
  --loss-scale-window                   float=1000  precision.loss_scale_window
  --hysteresis                          int=2       precision.loss_scale_hysteresis
  --min-loss-scale                      float=1     precision.loss_scale_min
--grad-reduce-in-bf16                   switch      precision.reduce          and precision.accumulate
--accumulate-allreduce-grads-in-fp32    switch      none                      the default
--fp16-lm-cross-entropy                 switch      refused  the loss is computed in at least float32
# Data
--seq-length                            int         data.sequence             required
--data-path                             str*        data.train  a prefix, or weights and prefixes
--data-args-path                        str         data.train  a file that holds the value of --data-path
with --data-path, --data-args-path, --mock-data:
  --split  str=969, 30, 1  data.split  by documents, as there; the third part is not used
--train-data-path                       str*        data.train
with --train-data-path:
  --valid-data-path                     str*        data.validation
--test-data-path                        str*  none  nothing is evaluated after training: see hexad evaluate
--mock-data  switch  data.train  a data set of counting numbers, written to the run's directory
--train-weighted-split-paths-path       str         refused                   use --data-path and --split
--valid-weighted-split-paths-path       str         refused                   use --valid-data-path
--per-split-data-args-path              str         refused  use --train-data-path and --valid-data-path
--tokenizer-type                        str         data.tokenizer
      GPT2BPETokenizer: --vocab-file and --merge-file as one tokenizer.json in the run's directory;
      NullTokenizer: model.vocab is --vocab-size + 1; others are loaded from --tokenizer-model
      one of GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer,
      Llama2Tokenizer, TikTokenizer, NullTokenizer, PretrainedFromHF
--tokenizer-model                       str         data.tokenizer
with --tokenizer-type PretrainedFromHF:
  --tokenizer-name-or-path              str         data.tokenizer            a directory
--tiktoken-pattern                      str         none  determined by the tokenizer's file
--tiktoken-num-special-tokens           int=1000    none  determined by the tokenizer's file
--vocab-file --merge-file                str         data.tokenizer
--vocab-size                            int         model.vocab  with NullTokenizer; others have their own
--reset-position-ids                    switch      data.documents  isolate, together with the next two
--reset-attention-mask                  switch      data.documents            isolate
--eod-mask-loss                         switch      data.documents            isolate
--num-workers                           int=2       none  samples are read ahead by a thread
--dataloader-type                       str         -                         single, the default
      one of single, cyclic, external
--data-impl                             str=mmap    none  data are indexed and memory-mapped
--data-cache-path                       str  none  indexes are kept beside the data, or in the run's directory
--no-mmap-bin-files                     clears mmap_bin_files  none  data are memory-mapped
--no-create-attention-mask-in-dataloader  clears create_attention_mask_in_dataloader  none  there is none
# Checkpoints
--save                                  str         run.dir                   default: runs/megatron
--load  str  checkpoint.load  a run or checkpoint of Hexad; none if it is --save
with --load:
  --finetune                            switch      model.load                weights only
--pretrained-checkpoint                 str         model.load                weights only
--save-interval                         int         checkpoint.every          default: only at the end
--save-retain-interval                  int         none                      all checkpoints are kept
--async-save                            switch      checkpoint.asynchronous
with --load:
  --exit-on-missing-checkpoint          switch      checkpoint.resume         must, where --load is --save
--no-load-optim                         switch      -  with --finetune, or where there is nothing to load
--no-load-rng --no-save-rng  switch  none
      there is no generator's state: random numbers are keyed by seed and step
--no-save-optim                         switch      refused                   checkpoints are complete
--ckpt-format                           str=torch_dist  none                      there is one format
--use-dist-ckpt --auto-detect-ckpt-format  switch      none                      there is one format
--dist-ckpt-format                      str         none                      there is one format
--ckpt-fully-parallel-save  switch as ckpt_fully_parallel_save_deprecated  none
      every rank writes what it holds
--ckpt-fully-parallel-load              switch      none                      every rank reads what it holds
--ckpt-assume-constant-structure        switch      none                      checkpoints have no layout
# Evaluation and logs
--eval-interval                         int=1000    validate.every            off without validation data
--eval-iters                            int=100     validate.batches
--log-interval                          int=100     log.every
--tensorboard-dir                       str         log.tensorboard           written to run.dir/tensorboard
--wandb-project                         str=        log.wandb
--wandb-exp-name                        str=        none                      the run is named after run.dir
--wandb-save-dir                        str=        none                      it is written to run.dir
--tensorboard-queue-size                int=1000    none                      every line is written
--tensorboard-log-interval              int=1       none                      as --log-interval
--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
      --log-memory-to-tensorboard --log-params-norm --log-num-zeros-in-grad --log-throughput --log-progress  \
switch  none  metrics.jsonl has what is measured
--timing-log-level                      int=0       none  metrics.jsonl has what is measured
--profile                               switch      log.profile  of every rank, by torch's profiler
with --profile:
  --profile-step-start                  int=10      log.profile.start         Hexad counts from 1
  --profile-step-end                    int=12      log.profile.steps
--profile-ranks                         int*        none                      every rank is profiled
--use-pytorch-profiler                  switch      none                      always so
"""
"""One flag per row, in columns that are separated by two or more blanks:

- its name, with aliases as ``--name/--alias``; several flags that are alike, separated by one blank;
- its value: ``TYPE=DEFAULT``, ``TYPE`` where the default is None, ``TYPE*`` for a list of values, ``switch``
  for a flag without one, ``clears ATTRIBUTE`` for a switch that is on by default; ``as ATTRIBUTE`` follows
  where the attribute in ``get_args()`` has another name;
- its effect: the settings that it determines (``-``: no single one), ``none``, ``refused``, or
  ``later:SETTINGS`` for a refused flag that will determine these;
- a note, and the values that are accepted (``one of``).

``with FLAGS:`` precedes the indented rows of flags that need one of these. Lines that are indented further
continue a row.
"""


def _groups(table: str) -> dict[str, tuple[Flag, ...]]:
    groups: dict[str, tuple[Flag, ...]] = {}
    title, needs = "", tuple[str, ...]()
    for line in table.replace("\n      ", " ").splitlines():
        if line.startswith("# "):
            title = line.removeprefix("# ")
            groups[title] = ()
        elif line.startswith("with "):
            needs = tuple(line.removeprefix("with ").removesuffix(":").split(", "))
        else:
            names, value, rest = re.split(" {2,}", line.strip(), maxsplit=2)
            wanted = needs if line.startswith(" ") else ()
            groups[title] += tuple(_flag(name, value, rest, wanted) for name in names.split(" "))
    return groups


_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "switch": bool, "cleared": bool}
_SWITCHES = {"switch": False, "cleared": True}


def _flag(names: str, value: str, rest: str, needs: tuple[str, ...]) -> Flag:
    name, *aliases = names.split("/")
    form, _, dest = value.replace("clears ", "cleared as ").partition(" as ")
    word, given, text = form.partition("=")
    kind, several = _KINDS[word.rstrip("*")], word.endswith("*")
    default = kind(text) if given else _SWITCHES.get(word)
    effect, _, text = rest.partition(" ")
    note, _, choices = text.partition("one of ")
    later = effect.startswith("later:")
    return Flag(
        name,
        kind,
        (default,) if several and given else default,
        "" if effect in ("-", "none", "refused") else effect.removeprefix("later:"),
        note.strip(),
        "none" if effect == "none" else "refused" if later or effect == "refused" else "sets",
        several,
        tuple(choices.split(", ")) if choices else (),
        dest,
        tuple(aliases),
        needs,
    )


def _others(table: str) -> tuple[Flag, ...]:
    """The flags of :data:`hexad.compat.megatron.other_flags.TABLE`."""
    flags: list[Flag] = []
    for line in table.splitlines():
        if not line.startswith(" "):
            effect, reason = line.split(": ", 1)
            continue
        for word in line.split():
            spelled, _, dest = word.partition("@")
            spelled, _, value = spelled.partition(":")
            names = "/".join(f"--{name}" for name in spelled.removeprefix("!").split("/"))
            if word.startswith("!no-"):
                cleared = names.split("/")[0].removeprefix("--no-")
                names = "/".join(dict.fromkeys([*names.split("/"), f"--disable-{cleared}"]))
                dest = dest or cleared.replace("-", "_")
            kind = "cleared" if word.startswith("!") else value or "switch"
            flags.append(_flag(names, kind + (f" as {dest}" if dest else ""), f"{effect} {reason}", ()))
    return tuple(flags)


OTHERS = "Other flags"
"""The title of those that set nothing."""
GROUPS: dict[str, tuple[Flag, ...]] = {**_groups(_TABLE), OTHERS: _others(TABLE)}
"""By title."""

FLAGS: dict[str, Flag] = {
    name: flag for group in GROUPS.values() for flag in group for name in (flag.name, *flag.aliases)
}
"""By name, aliases included."""
