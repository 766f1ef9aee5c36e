"""Wrong launch lines of Megatron-LM: what follows ``hexad megatron``."""

_SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 4 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 256 "
    "--eval-iters 0 --save new-megatron"
)
_MORE = (
    ("--data-path", "--data-path: expected at least one argument"),
    (
        "--data-path data/train 0.5",
        "--data-path: found data/train 0.5; expected one prefix",
    ),
    ("--data-path data/train --split 1,2,3,4", "--split: found '1,2,3,4', expected up to three proportions"),
    ("--mock-data --num-layer 2", "--num-layer: not a flag of Megatron-LM that Hexad knows (did you mean"),
    ("--mock-data --num-layers 2.5", "--num-layers: invalid int value: '2.5'"),
    ("--mock-data twice", "found the word 'twice'"),
    ("--mock-data --num-experts 8", "--num-experts: found 8, but experts are not supported yet"),
    (
        "--mock-data --rampup-batch-size 1 1 100",
        "--rampup-batch-size: found 1 1 100, with --train-iters; use --train-samples",
    ),
    (
        "--mock-data --step-batch-size-schedule 0:4",
        "--step-batch-size-schedule: found 0:4, but batches grow by --rampup-batch-size alone",
    ),
    (
        "--mock-data --position-embedding-type alibi",
        "found alibi: the flags fit neither GPT-2",
    ),
    ("--mock-data --normalization RMSNorm", "--normalization: found RMSNorm: the flags fit neither GPT-2"),
    ("--mock-data --optimizer sgd", "--optimizer: found sgd; Hexad has AdamW: use adam"),
    ("--mock-data --fp16 --bf16", "--bf16: found beside --fp16"),
    ("--mock-data --train-samples 9", "--train-samples: found beside --train-iters"),
    ("--mock-data --lr-warmup-samples 9", "use --lr-warmup-iters"),
    ("--mock-data --eod-mask-loss", "--eod-mask-loss: found without --reset-position-ids"),
    (
        "--mock-data --tensor-model-parallel-size 3",
        "found 3, which does not divide model.heads 4",
    ),
    ("--mock-data --tokenizer-type GPT2BPETokenizer", "--vocab-file: GPT2BPETokenizer needs"),
    ("--mock-data --tokenizer-type HuggingFaceTokenizer", "--tokenizer-model: is missing"),
    ("--mock-data --tokenizer-type X", "--tokenizer-type: invalid choice: 'X'"),
    ("--mock-data --window-size 4", "--window-size: found '4', expected LEFT,0"),
    ("--mock-data --deepspeed --deepspeed_config no.json", "--deepspeed_config: no.json: no such"),
    ("--mock-data --deepspeed --deepspeed_config broken.json", "broken.json, line 1, column 2: not valid"),
    ("--mock-data --deepspeed --deepspeed_config ds-unknown.json", "ds-unknown.json: zero_optimisation:"),
    ("--mock-data --deepspeed --deepspeed_config ds.json", "found 1 (batch.global), but ds.json has"),
    (
        "--mock-data --global-batch-size 4 --zero-stage 2 --deepspeed --deepspeed_config ds.json",
        "--zero-stage: found 2 (parallel.zero), but ds.json has zero_optimization.stage 1",
    ),
)
_SETTINGS = (
    ("--mock-data --micro-batch-size 0", "--micro-batch-size: found 0, expected at least 1"),
    ("--mock-data --num-attention-heads 0", "--num-attention-heads: found 0, expected at least 1"),
    ("--mock-data --lr-warmup-fraction nan", "--lr-warmup-fraction: found nan, expected a number from 0"),
    ("--mock-data --lr -1", "optimizer.lr: found -1.0, expected"),
    ("--mock-data --adam-beta1 2", "optimizer.betas[0]: found 2.0"),
    ("--mock-data --train-iters 0", "--train-iters: found 0, expected at least 1"),
    ("--mock-data --pipeline-model-parallel-size 0", "--pipeline-model-parallel-size: found 0, expected at"),
    ("--mock-data --zero-stage 4", "--zero-stage: found 4, expected 0, 1, 2 or 3"),
    (
        "--mock-data --zero-stage 2 --use-distributed-optimizer",
        "--zero-stage: sets ZeRO level 2, but --use-distributed-optimizer sets level 1; leave one out",
    ),
    ("--mock-data --lr-warmup-iters 4", "--lr-warmup-iters: found 4 iterations of warm-up, expected less"),
    ("--mock-data --seq-length 32", "data.sequence: found 32"),
    (
        "--mock-data --global-batch-size 3 --micro-batch-size 2",
        "found 3, expected a multiple of batch.micro 2",
    ),
)
MEGATRON = (
    ("megatron", "--num-layers: is missing"),
    ("checkpoint import --from megatron:no/such --to out", "no/such: no such directory; expected the"),
    ("checkpoint import --from megatron:ds.json --to out", "ds.json: is a file; expected the directory"),
    ("megatron --nproc 0 -- --bf16", "Invalid value for '--nproc': 0 is not in the range x>=1"),
    (
        "megatron --print-confg",
        "--print-confg: not a flag of Megatron-LM that Hexad knows (did you mean '--print-config'?",
    ),
    ("megatron -- --print-config", "--print-config: an option of hexad megatron; give it before --"),
    ("megatron --num-layers 4", "--hidden-size: is missing"),
    *((f"megatron -- {_SMALL} {more}", says) for more, says in _MORE),
    *((f"megatron --print-config -- {_SMALL} {more}", says) for more, says in _SETTINGS),
)
