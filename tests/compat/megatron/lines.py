"""Launch lines as they are published for Megatron-LM, one list of flags each, with the paths that scripts
leave to the user. Under each is its source; those without a path are composed of the flags that its pages
recommend."""


def words(text: str) -> list[str]:
    """The words of a line; ``#`` begins a comment."""
    return [word for line in text.splitlines() for word in line.partition("#")[0].split()]


GPT3_175B = words("""
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
    --max-position-embeddings 2048 --attention-backend auto
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16
    --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
    --data-path data/pile --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt --eval-iters 10
    --tensorboard-dir tb
""")
"""examples/gpt3/train_gpt3_175b_distributed.sh"""

GPT2_345M = words("""
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 64 --lr 0.00015
    --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16
    --data-path data/text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --data-impl mmap --split 949,50,1
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --distributed-backend nccl --save ckpt --load ckpt
""")
"""examples/pretrain_gpt_distributed.sh of version 3"""

GPT3_345M = words("""
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --attention-dropout 0.1 --hidden-dropout 0.1
    --micro-batch-size 4 --global-batch-size 512 --train-samples 146484375
    --lr-decay-samples 126953125 --lr-warmup-samples 162761 --lr 3.0e-4 --min-lr 3.0e-5
    --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.02
    --clip-grad 1.0 --bf16 --num-workers 2 --use-mcore-models --transformer-impl transformer_engine
    --use-flash-attn --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
    --num-layers-per-virtual-pipeline-stage 6 --no-async-tensor-model-parallel-allreduce
    --data-path 0.3 data/books 0.7 data/web --split 98,2,0
    --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --log-interval 10 --eval-iters 50 --eval-interval 2000 --save-interval 2000 --save ckpt --load ckpt
    --exit-duration-in-mins 230 --log-params-norm --log-num-zeros-in-grad
""")
"""A distributed GPT-3 example counted in samples, interleaved"""

LLAMA2_7B = words("""
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 1024
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model
    --position-embedding-type rope --rotary-percent 1.0 --swiglu --normalization RMSNorm
    --norm-epsilon 1e-5 --untie-embeddings-and-output-weights --disable-bias-linear
    --no-position-embedding --no-masked-softmax-fusion --attention-softmax-in-fp32
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --train-iters 500000
    --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --bf16
    --use-distributed-optimizer --recompute-activations --use-flash-attn
    --train-data-path data/train --valid-data-path data/valid
    --reset-position-ids --reset-attention-mask --eod-mask-loss
    --log-interval 1 --save-interval 1000 --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt
    --ckpt-format torch_dist --async-save --wandb-project llama --wandb-exp-name llama2-7b
""")
"""Llama 2 7B, by the flags of docs/llama_mistral.md"""

LLAMA3_8B = words("""
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
    --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
    --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm
    --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
    --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
    --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --exit-duration-in-mins 235 --tensor-model-parallel-size 1 --context-parallel-size 2
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache
    --tiktoken-pattern v2 --split 99,1,0 --no-create-attention-mask-in-dataloader --no-mmap-bin-files
    --num-workers 1
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
    --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
    --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb
""")
"""examples/llama/train_llama3_8b_h100_fp8.sh with DTYPE=bf16: data 8, context 2"""

LLAMA3_70B = words("""
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel
    --num-virtual-stages-per-pipeline-rank 5 --num-layers 80 --hidden-size 8192
    --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 131072 --position-embedding-type rope
    --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0 --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 512 --train-iters 100000
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 90000 --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --recompute-granularity full
    --recompute-method block --recompute-num-layers 2 --use-tp-pp-dp-mapping
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model models/llama3-70b
    --data-path data/web --split 99,1,0 --save ckpt --save-interval 500 --log-interval 1
""")
"""Llama 3 70B, interleaved, with tensor-pipeline-data rank order"""

BLOOM_176B = words("""
    --pp-partition-method type:transformer|embedding --num-layers 70 --hidden-size 14336
    --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2
    --rampup-batch-size 192 16 9_765_625 --global-batch-size 2048 --train-samples 220_000_000
    --vocab-file gpt2-vocab.json --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path bigscience/tokenizer --init-method-std 0.0048 --embed-layernorm --fp16
    --seed 42 --position-embedding-type alibi --checkpoint-activations
    --abort-on-unmet-fused-kernel-constraints --kill-switch-path kill --pad-vocab-size-to 250880
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6
    --lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 --clip-grad 1.0
    --weight-decay 1e-1 --exit-duration-in-mins 5990 --log-interval 1 --save-interval 100
    --eval-interval 1000 --eval-iters 1 --tensorboard-dir tb --tensorboard-queue-size 5
    --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
    --save ckpt --load ckpt --train-weighted-split-paths-path train.txt
    --valid-weighted-split-paths-path valid.txt --num-workers 2 --data-impl mmap
    --distributed-backend nccl --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12
    --deepspeed --deepspeed_config ds_config.json --zero-stage 0 --deepspeed-activation-checkpointing
""")
"""bigscience/train/tr11-176B-ml/tr11-176B-ml.slurm (its first phase has --bf16, others --fp16)"""

MIXTRAL_8X7B = words("""
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --no-position-embedding
    --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path data/web
    --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1
    --lr-warmup-iters 500 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer
    --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save ckpt --load ckpt --tensorboard-dir ckpt/tensorboard --no-load-optim --no-load-rng
    --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B
""")
"""examples/mixtral/train_mixtral_8x7b_distributed.sh"""

LLAMA3_LONG = words("""
    --tensor-model-parallel-size 4 --context-parallel-size 8 --cp-comm-type a2a+p2p
    --hierarchical-context-parallel-sizes 2 4 --sequence-parallel --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 131072 --max-position-embeddings 131072 --position-embedding-type rope
    --rotary-base 500000 --use-rope-scaling --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 32 --train-iters 1000 --lr 1e-5 --min-lr 1e-6
    --lr-decay-style cosine --lr-warmup-iters 50 --weight-decay 0.1 --bf16
    --use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer --tokenizer-model models/llama3
    --data-path data/long --split 100,0,0 --pretrained-checkpoint hf:models/llama3 --save ckpt
""")
"""Llama 3.1 8B at 128k tokens over context ranks"""
