"""Flags of Megatron-LM that set nothing here, accepted without effect or refused, by the reason. No torch.
Those of its ``arguments.py`` of August 2026 that are not in :mod:`hexad.compat.megatron.flags`."""

TABLE = """\
refused: the order of sums depends on the batch
  batch-invariant-mode
refused: attention masks follow --context-parallel-size
  hybrid-context-parallel
refused: only the next token is predicted
  mtp-standalone
refused: there is softmax attention over all tokens or a window only
  attention-output-gate experimental-attention-variant:str linear-attention-freq:str no-rope-freq:str
  qk-clip qk-l2-norm softmax-type:str=vanilla window-attn-skip-freq:str
refused: the residual stream is in the model's format, and one
  enable-mhc-connections fp32-residual-connection
refused: activations are SwiGLU or GELU
  activation-func-clamp-value:float glu-linear-offset:float=0
refused: all weights are drawn with --init-method-std
  data-parallel-random-init embedding-init-method-std:float use-mup
refused: precision.dtype has no 4-bit format
  fp4-format:str@fp4
refused: experts are not supported yet
  moe-layer-recompute moe-use-upcycling
refused: there are GPT-2's and Llama's layers only
  decoder-num-layers:int encoder-num-layers:int heterogeneous-layers-config-encoded-json:str
  heterogeneous-layers-config-path:str hybrid-layer-pattern:str hybrid-override-pattern:str is-hybrid-model
  sft spec:str* vision-pretraining
refused: norms get no weight decay, other weights do
  apply-wd-to-qk-layernorm no-weight-decay-cond-type:str
refused: batches have one size
  decrease-batch-size-if-needed
refused: all samples are used, in one order
  fim-data iterations-to-skip:int* multiple-validation-sets phase-transition-iterations:str
  sample-rate:float=1
refused: optimizer state is offloaded completely
  optimizer-offload-fraction:float=1
refused: reinforcement learning is not part of Hexad yet
  perform-rl-step
refused: an old name; use --lr-warmup-iters or --lr-warmup-fraction
  warmup:int
refused: model.train names what is trained, in what --print-config prints
  freeze-all-layers
refused: name the checkpoint in --load: RUN/checkpoints/step-00000100
  ckpt-step:int
refused: hexad checkpoint import converts checkpoints
  ckpt-convert-format:str ckpt-convert-save:str ckpt-convert-update-legacy-dist-opt-format
refused: an old name; use --tensor-model-parallel-size
  model-parallel-size:int
refused: state is sharded inside the replicas of --num-distributed-optimizer-instances
  enable-full-sharding-in-hsdp outer-dp-sharding-strategy:str=no_shard
refused: ranks are real
  fake-process-group
refused: hexad evaluate evaluates a run
  skip-train
refused: use --reset-attention-mask
  dataloader-inter-document-masking
refused: logits are neither saved nor learned from
  logits-load-dir:str logits-save-dir:str
refused: all settings are flags
  yaml-cfg:str
refused: no faults are injected
  error-injection-rate:int=0 fault-injector-fault-types:str fault-injector-num-ranks:int
  fault-injector-ranks:str
refused: files are read from the file system
  enable-msc
none: of mixtures of experts
  ep-overlap-early-attn-memory-release expert-tensor-parallel-num-weight-shards:int gtp-expert-remat-nccl-ub
  gtp-remat-nccl-ub gtp-remat-opt-in-modules:str* gtp-remat-reduce-scatter-with-fp32-accumulation
  high-priority-a2a-comm-stream moe-apply-probs-on-input moe-combine-bwd-dtype:str=bf16
  moe-deepep-num-sms:int moe-dispatch-fwd-dtype:str=bf16 moe-enable-deepep moe-enable-routing-replay
  moe-expert-rank-capacity-factor:float moe-flex-dispatcher-backend:str=deepep
  moe-flex-dispatcher-num-sms:int moe-hybridep-num-blocks-permute:int moe-hybridep-num-blocks-unpermute:int
  moe-hybridep-num-sms-preprocessing:int=108 moe-hybridep-num-sms:int
  moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps:float moe-latent-size:int
  moe-layer-freq:str=1 moe-mlp-glu-interleave-size:int moe-ncclep-zero-copy moe-pad-expert-input-to-capacity
  moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-paged-stash-buffer-size-factor-cpu:float=0
  moe-paged-stash-buffer-size-factor-cuda:float=1.1 moe-paged-stash-page-size:int=64 moe-per-layer-logging
  moe-permute-fusion-into-hybridep moe-router-bias-update-rate:float=0.001 moe-router-dtype:str
  moe-router-enable-expert-bias moe-router-force-biased:float moe-router-force-load-balancing
  moe-router-fusion moe-router-group-topk:int moe-router-num-groups:int moe-router-padding-for-fp8
  moe-router-padding-for-quantization moe-router-pre-softmax moe-router-quantile-balancing-ema:float=0
  moe-router-score-function:str=softmax moe-router-topk-scaling-factor:float
  moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits moe-routing-trace-dump-weights
  moe-routing-trace-max-training-iters:int moe-routing-trace-path:str moe-shared-expert-gate
  moe-shared-expert-glu-interleave-size:int moe-shared-expert-overlap moe-single-grouped-bias
  moe-single-grouped-weight moe-token-drop-policy:str=probs moe-upcycling-granularity:int=1
  moe-use-grouped-tensor overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm
  tensor-parallel-num-weight-shards:int use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert
none: Hexad chooses its own kernels
  !no-clone-scatter-output-in-embedding !no-initialization@perform_initialization !no-tp-comm-bulk-dgrad
  !no-tp-comm-bulk-wgrad !no-tp-comm-overlap-ag !no-tp-comm-overlap-rs !no-tp-comm-split-ag
  !no-tp-comm-split-rs config-logger-dir:str= cuda-graph-impl:str=none cuda-graph-warmup-steps:int=3
  delay-wgrad-compute disable-bf16-reduced-precision-matmul enable-cuda-graph enable-experimental
  external-cuda-graph flash-attention-version:int fsdp-db-use-persist-buf-on-alloc-fail
  fused-residual-rmsnorm init-model-with-meta-device max-seqlen-per-dp-cp-rank:int
  megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer
  output-logit-dtype:str@logit_dtype pipeline-model-parallel-comm-backend:str
  reuse-grad-buf-for-mxfp8-param-ag tp-comm-bootstrap-backend:str=nccl tp-comm-overlap-rs-dgrad
  use-fused-weighted-squared-relu use-te-activation-func use-transformer-engine-op-fuser
  wgrad-deferral-limit:int=0
none: of batch-invariant kernels
  batch-invariant-backend:str=te_native
none: activations stay on the device; recomputation saves memory
  activation-offload-fraction:float=1 cpu-offloading-num-layers:int=0
  cpu-offloading-retain-pinned-cpu-buffers delay-offload-until-cuda-graph
  delta-offload-bytes-across-pp-ranks:int=0 fine-grained-activation-offloading
  fine-grained-offloading-max-inflight-offloads:int min-offloaded-tensor-size:int=1048576
  offload-modules:str*
none: of multi-token prediction
  mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern:str mtp-loss-scaling-factor:float=0.1
  mtp-use-repeated-layer
none: of other kinds of attention
  !no-dsa-indexer-rotate-activation !no-dsa-indexer-scoring-relu !no-yarn-correction-range-round-to-int
  cache-mla-latents dsa-indexer-head-dim:int dsa-indexer-k-norm-epsilon:float dsa-indexer-k-norm-fp32
  dsa-indexer-loss-coeff:float dsa-indexer-n-heads:int dsa-indexer-rope-interleaved
  dsa-indexer-skip-topk-offset:int=0 dsa-indexer-topk-freq:int=1 dsa-indexer-topk:int
  dsa-indexer-use-sparse-loss dsa-kernel-backend:str=none kv-lora-rank:int=32 linear-conv-kernel-dim:int=4
  linear-key-head-dim:int=128 linear-num-key-heads:int=16 linear-num-value-heads:int=32
  linear-value-head-dim:int=128 mla-down-proj-fusion mrope-section:int* mscale-all-dim:float=0
  mscale:float=1 q-lora-rank:int qk-clip-alpha:float=0.5 qk-clip-threshold:float=100 qk-head-dim:int=128
  qk-pos-emb-head-dim:int=64 relative-attention-max-distance:int=128 relative-attention-num-buckets:int=32
  rope-type:str rotary-scaling-factor:float=1 v-head-dim:int=128 yarn-beta-fast:float yarn-beta-slow:float
  yarn-correction-range-round-to-int yarn-original-max-position-embeddings:int
none: of maximal update parametrisation
  mup-attn-scale-power:float=1 mup-base-head-dim:float mup-base-hidden-size:int mup-embedding-mult:float=1
  mup-output-mult:float=1 mup-width-mult:float=1
none: of 8-bit and 4-bit formats
  !no-fp8-wgrad first-last-layers-bf16 fp4-param-gather fp4-quantizer-factory:str fp4-recipe:str=nvfp4
  fp8-amax-compute-algo:str=most_recent fp8-amax-history-len:int=1 fp8-interval:int=1 fp8-margin:int=0
  fp8-output-proj fp8-param-gather fp8-quantizer-factory:str fp8-recipe:str=delayed keep-fp8-transpose-cache
  kitchen-attention-backend:str=sdpa num-layers-at-end-in-bf16:int=1 num-layers-at-start-in-bf16:int=1
  te-precision-config-file:str use-kitchen-attention
none: of inference: see hexad generate
  !use-same-sampling-seed-across-dp-ranks@offset_sampling_seed_by_dp_rank bert-embedder-type:str=megatron
  cuda-graph-modules:str* cuda-graph-scope:str*@cuda_graph_scope_deprecated decode-only-cuda-graphs
  enable-chunked-prefill flash-decode inference-batch-times-seqlen-threshold:int=-1
  inference-coordinator-port:int inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens:int=512
  inference-cuda-graph-scope:str inference-disable-ep-consensus inference-disable-triton-nvls-kernels
  inference-dynamic-batching inference-dynamic-batching-async-sched-mode:str=legacy
  inference-dynamic-batching-block-size:int=256 inference-dynamic-batching-buffer-size-gb:float=40
  inference-dynamic-batching-cuda-graph-mixed-prefill-count:int=16
  inference-dynamic-batching-cuda-graph-sizing-distribution:str=exponential
  inference-dynamic-batching-logprobs-mode:str=raw_logprobs
  inference-dynamic-batching-mamba-memory-ratio:float inference-dynamic-batching-max-requests:int
  inference-dynamic-batching-max-tokens:int inference-dynamic-batching-num-cuda-graphs:int=16
  inference-dynamic-batching-paused-buffer-size-gb:float
  inference-dynamic-batching-prefix-caching-coordinator-policy:str=load_balanced
  inference-dynamic-batching-prefix-caching-eviction-policy:str=ref_zero
  inference-dynamic-batching-prefix-caching-mamba-gb:float
  inference-dynamic-batching-prefix-caching-routing-alpha:float=0.5
  inference-dynamic-batching-prefix-caching@inference_dynamic_batching_enable_prefix_caching
  inference-dynamic-batching-sampling-backend:str=torch
  inference-dynamic-batching-track-generated-token-events
  inference-dynamic-batching-track-paused-request-events
  inference-dynamic-batching-unified-memory-level:int=0 inference-fuse-tp-communication
  inference-grouped-gemm-backend:str=vllm inference-logging-step-interval:int=0 inference-max-requests:int=8
  inference-max-seq-length:int=2560 inference-moe-disable-fused-quant-kernels
  inference-moe-token-dispatcher-type:str=nvls inference-rng-tracker inference-shards:str
  inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging
  max-tokens-to-oom:int=12000 mlp-chunks-for-prefill:int=1 mlp-chunks-for-training:int=1
  nccl-all-reduce-for-prefill num-speculative-tokens:int=0 output-bert-embeddings symmetric-ar-type:str
  use-legacy-static-engine
none: of several residual streams
  mhc-init-gating-factor:float=0.01 mhc-num-residual-streams:int=4 mhc-recompute-layer-num:int
  mhc-sinkhorn-iterations:int=20
none: of state-space and hybrid models
  !disable-mamba-mem-eff-path@use_mamba_mem_eff_path gdp-cutedsl-kernel
  gdp-num-chunk-states-to-recompute:int=2 gdp-num-householder:int=3 mamba-head-dim:int=64
  mamba-inference-conv-states-dtype:str=bf16 mamba-inference-ssm-states-dtype:str=bf16
  mamba-num-groups:int=8 mamba-num-heads:int mamba-state-dim:int=128 mamba-training-ssm-states-dtype:str
none: of other models
  onnx-safe:str
none: of BERT, T5 and retrieval models
  !bert-no-binary-head@bert_binary_head bert-load:str biencoder-projection-dim:int=0
  biencoder-shared-query-context-model block-data-path:str decoder-seq-length:int embedding-path:str
  encoder-seq-length:int evidence-data-path:str ict-head-size:int ict-load:str indexer-batch-size:int=128
  indexer-log-interval:int=1000 mask-prob:float=0.15 query-in-block-prob:float=0.1
  retriever-report-topk-accuracies:int* retriever-score-scaling short-seq-prob:float=0.1
  titles-data-path:str use-one-sent-docs vocab-extra-ids:int=0
none: of other optimizers
  !muon-no-split-qkv@muon_split_qkv lion-beta1:float=0.95 lion-beta2:float=0.98
  muon-coefficient-type:str=quintic muon-extra-scale-factor:float=1 muon-fp32-matmul-prec:str=medium
  muon-momentum:float=0.9 muon-nesterov muon-num-ns-steps:int=5 muon-scalar-optimizer:str=adam
  muon-scale-mode:str=spectral muon-tp-mode:str=duplicated muon-use-syrk sgd-momentum:float=0.9
none: torch's profiler records what it records
  memory-snapshot-path:str=snapshot.pickle nvtx-ranges pytorch-profiler-collect-callstack
  pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes record-memory-history record-shapes
none: Hexad paces and checks itself
  !no-manual-gc-eval dump-param-to-param-group-map:str gpu-sniff-test-interval:int tp-comm-overlap-cfg:str
  train-sync-interval:int
none: Hexad has faults of its own: faults.*, and restarts of the launcher
  adlr-autoresume adlr-autoresume-interval:int=1000 calc-ft-timeouts check-for-large-grads
  check-for-spiky-loss enable-ft-package exit-signal-handler-for-dataloader exit-signal-handler-for-training
  exit-signal:str ft-num-warmup-iters:int=5 inprocess-active-world-size:int=1
  inprocess-barrier-timeout:float=120 inprocess-completion-timeout:float=120 inprocess-empty-cuda-cache
  inprocess-granularity:str=node inprocess-hard-timeout:float=90 inprocess-heartbeat-interval:float=30
  inprocess-heartbeat-timeout:float=60 inprocess-last-call-wait:float=1 inprocess-max-iterations:int
  inprocess-monitor-process-interval:float=1 inprocess-monitor-thread-interval:float=1
  inprocess-progress-watchdog-interval:float=1 inprocess-restart inprocess-soft-timeout:float=60
  inprocess-termination-grace-time:float=1 rerun-mode:str=validate_results
  result-rejected-tracker-filename:str
none: optimizer state has one place
  !no-pin-cpu-grads !no-pin-cpu-params optimizer-cuda-graph overlap-cpu-optimizer-d2h-h2d
  use-torch-optimizer-for-cpu-offload
none: of reinforcement learning
  grpo-clamp-eps-lower:float=0.01 grpo-clamp-eps-upper:float=0.01 grpo-entropy-term-weight:float=0
  grpo-filter-groups-with-same-reward grpo-group-size:int=2 grpo-iterations:int=2 grpo-kl-beta:float=0.001
  grpo-prompts-per-step:int=32 langrl-env-config:str refit-method:str=gloo rl-consumption-granularity:str=B
  rl-default-temperature:float=1 rl-default-top-k:int=-1 rl-default-top-p:float=0 rl-durable-rollout-bank
  rl-generation-lag:float rl-importance-sampling-truncation-coef:float
  rl-inference-expert-model-parallel-size:int rl-inference-expert-tensor-model-parallel-size:int
  rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level:int=0
  rl-inference-parsers:str* rl-inference-pipeline-model-parallel-size:int
  rl-inference-tensor-model-parallel-size:int rl-kv-cache-management-mode:str=persist
  rl-max-inflight-requests:int rl-offload-inference-model-weights-when-idle
  rl-offload-optimizer-during-inference rl-partial-rollouts rl-persist-cuda-graphs rl-profile
  rl-profile-dir:str rl-prompts-per-eval:int=32 rl-rollout-bank-dir:str rl-rollout-bank-max-bytes:int=0
  rl-sequence-packing-algo:str=fifo rl-sequence-packing-max-sequences-per-bin:int=50 rl-skip-bos-token
  rl-submission-granularity:str=B rl-training-cuda-graphs rl-use-sequence-packing
  rl-verify-model-weights-swap
none: random numbers are keyed by seed and step
  te-rng-tracker
none: there is one format of checkpoints, complete ones
  !no-ckpt-fully-parallel-save !no-ckpt-load-validate-sharding-integrity !no-save-tokenizer-assets
  !no-strict-fsdp-dtensor-load !no-use-tokenizer-model-from-checkpoint-args async-ckpt-cpu-priority:int=10
  async-ckpt-io-priority:int=3 async-ckpt-use-cpu-shm async-strategy:str=nvrx
  ckpt-drop-redundant-extra-state ckpt-fully-parallel-load-exchange-algo:str=broadcast
  ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-load-process-group:str=dp
  ckpt-fully-parallel-save-process-group:str=dp ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path:str
  dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014
  dist-ckpt-strictness:str=assume_ok_unexpected dist-ckpt-workers:int=1
  distrib-optim-fully-reshardable-mem-efficient load-main-params-from-ckpt non-persistent-ckpt-type:str
  non-persistent-global-ckpt-dir:str non-persistent-local-ckpt-algo:str=fully_parallel
  non-persistent-local-ckpt-dir:str non-persistent-save-interval:int override-ckpt-iteration:int replication
  replication-factor:int=2 replication-jump:int save-activations-interval:int save-dgrads-interval:int
  save-params-interval:int save-tokens-per-expert-interval:int save-wgrads-interval:int
  use-mp-args-from-checkpoint-args use-persistent-ckpt-worker verify-integrity
none: communication is Hexad's own, and overlaps wherever it can
  !disable-gloo-process-groups@use_gloo_process_groups !no-align-grad-reduce !no-align-param-gather
  !no-flight-recorder-dump-on-timeout !no-flight-recorder-extra-dump-on-exec
  !no-flight-recorder-include-only-active !no-gradient-reduce-div-fusion !no-use-layer-wise-param-layout
  !torch-fsdp2-no-reshard-after-forward@torch_fsdp2_reshard_after_forward create-all-gather-group
  ddp-average-in-collective ddp-num-buckets:int ddp-pad-buckets-for-high-nccl-busbw
  ddp-param-name-patterns-for-fp32-local-accumulation:str* ddp-reduce-scatter-with-fp32-accumulation
  disable-jit-fuser disable-symmetric-registration distributed-timeout-seconds-after-init:int
  flight-recorder-dump-path:str flight-recorder-include-stack-trace
  flight-recorder-trace-buffer-size:int=2000 fsdp-double-buffer fsdp-manual-registration
  high-priority-stream-groups:str* lazy-mpu-init megatron-fsdp-version:int=1 sharp-enabled-group:str
  suggested-communication-unit-size:int use-nccl-ub@nccl_ub use-sharp
none: validation reads --eval-iters batches of the training's sizes
  eval-global-batch-size:int eval-micro-batch-size:int full-validation start-eval-at-iter:int
  validation-set-names:str*
none: metrics.jsonl has what is measured
  !no-barrier-with-level-1-timing@barrier_with_L1_time !no-log-loss-scale-to-tensorboard
  !no-one-logger@enable_one_logger app-tag-run-name:str app-tag-run-version:str=0.0.0 log-device-memory-used
  log-energy log-max-attention-logit log-memory-interval:int log-world-size-to-tensorboard logging-level:int
  one-logger-async one-logger-project:str=megatron-lm one-logger-run-name:str otel-enabled
  otel-service-name:str otel-span-groups:str run-workload-inspector-server test-mode
  timing-log-option:str=minmax wandb-entity:str
none: data are indexed once and memory-mapped
  dataloader-defer-npy-index-mmap dataloader-fast-cache-load mid-level-dataset-surplus:float=0.005
  num-dataset-builder-threads:int=1 object-storage-cache-path:str per-dataset-sequences-path:str
none: determined by the tokenizer's file
  !no-tokenizer-sentencepiece-ignore-extra-whitespaces allow-ambiguous-pad-tokens chat-template:str
  sft-tokenizer-prompt-format:str=nemotron-h-aligned tokenizer-hf-no-include-special-tokens
  tokenizer-hf-no-use-fast tokenizer-metadata:str@metadata_path tokenizer-sentencepiece-legacy
  tokenizer-special-tokens:str*@special_tokens trust-remote-code use-gigatoken
none: of fill-in-the-middle data
  fim-eod-token:str=<|endoftext|> fim-fragment-rate:float fim-middle-token:str=<fim_middle>
  fim-no-prefix:str fim-pad-token:str=<fim_pad> fim-prefix-token:str=<fim_prefix> fim-rate:float=0.5
  fim-split-sample:str fim-spm-rate:float=0.5 fim-suffix-token:str=<fim_suffix>
none: padding is internal and not part of the softmax
  !no-pad-vocab-size padded-vocab-size:int
none: of NullTokenizer: no id is special
  null-tokenizer-eod-id:int null-tokenizer-pad-id:int=-1
none: of vision models
  !no-data-sharding classes-fraction:float=1 data-per-class-fraction:float=1 dino-bottleneck-size:int=256
  dino-freeze-last-layer:float=1 dino-head-hidden-size:int=2048 dino-local-crops-number:int=10
  dino-local-img-size:int=96 dino-norm-last-layer dino-teacher-temp:float=0.07
  dino-warmup-teacher-temp-epochs:int=30 dino-warmup-teacher-temp:float=0.04 head-lr-mult:float=1
  img-h:int=224 img-w:int=224 iter-per-epoch:int=1250 mask-factor:float=1 mask-type:str=random
  num-channels:int=3 num-classes:int=1000 patch-dim:int=16 swin-backbone-type:str=tiny
  vision-backbone-type:str=vit vision-pretraining-type:str=classify
none: of distillation
  logits-load-decode-threads:int=4 logits-load-ignore-errors logits-load-kd-loss-alpha:float=1
  logits-load-msc-prefetch-depth:int=2 logits-load-prefetch-factor:int=3 logits-save-dtype:str=fp16
  logits-save-top-k:int logits-save-top-p-min-k:int=1 logits-save-top-p:float
none: log.check_replicas and hexad show run find slow ranks
  disable-straggler-on-startup log-straggler straggler-ctrlr-port:int=65535 straggler-minmax-count:int=1
none: master weights, gradients and moments are fp32
  exp-avg-dtype:str=fp32 exp-avg-sq-dtype:str=fp32 main-grads-dtype:str=fp32 main-params-dtype:str=fp32
  megatron-fsdp-grad-comm-dtype:str=auto megatron-fsdp-main-grads-dtype:str=auto
  megatron-fsdp-main-params-dtype:str=fp32 use-precision-aware-optimizer
none: of injected faults
  error-injection-type:str=transient_error fault-injector-delay-start-iteration:int
  fault-injector-fault-delay:float fault-injector-fault-probabilities:str fault-injector-mtti-seconds:float
  fault-injector-offset-seconds:float fault-injector-seed:int
none: files are read from the file system
  disable-msc@disable_msc_deprecated
"""
"""``EFFECT: REASON`` and then its flags, each as ``NAME`` for a switch, ``!no-NAME`` for one that clears
``NAME`` (``--disable-NAME`` does too), ``NAME:TYPE=DEFAULT`` with a value, ``NAME:TYPE*`` with several;
``@ATTRIBUTE`` follows where the attribute in ``get_args()`` has another name."""
