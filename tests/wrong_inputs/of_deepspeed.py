"""Wrong files and checkpoints of DeepSpeed and Megatron-Core, see :mod:`.cases`."""

from __future__ import annotations

DEEPSPEED = (
    ("config from-deepspeed", "Missing argument 'ds_config.json'"),
    ("config from-deepspeed no.json", "no.json: no such DeepSpeed configuration"),
    ("config from-deepspeed folder", "folder: cannot be read"),
    ("config from-deepspeed broken.json", "broken.json, line 1, column 2: not valid JSON"),
    ("config from-deepspeed list.json", "list.json: found a list, expected an object with DeepSpeed's keys"),
    ("config from-deepspeed ds-twice.json", "key 'train_batch_size' is given twice"),
    ("config from-deepspeed ds-unknown.json", "did you mean 'zero_optimization'?"),
    ("config from-deepspeed ds-batch.json", "train_batch_size: found 8, expected"),
    ("config from-deepspeed ds.json --world 3", "x 3 data ranks = 3"),
    ("config from-deepspeed ds.json --world 0", "Invalid value for '--world': 0 is not in the range x>=1"),
    ("config from-deepspeed ds.json gradient_clipping", "a key is set as name=value"),
    (
        "config from-deepspeed ds.json zero_optimization.stage=4",
        "zero_optimization.stage: found 4, expected less than or equal to 3",
    ),
    ("config from-deepspeed ds.json zero_optimization.stage.a=4", "'stage' is a value, not a section"),
    ("config from-deepspeed ds.json fp16.enabled=true bf16.enabled=true", "bf16.enabled: found true with"),
    (
        "config from-deepspeed ds.json optimizer.type=Lamb",
        "optimizer.type: found Lamb, but a run.yaml has AdamW",
    ),
    (
        "config from-deepspeed ds.json scheduler.type=OneCycle",
        "scheduler.type: found OneCycle, which has no counterpart in a run.yaml",
    ),
    (
        "config from-deepspeed ds.json zero_optimization.offload_param.device=nvme",
        "zero_optimization.offload_param.device: found nvme, which is not supported",
    ),
    ("checkpoint import --from ds:no/such --to out", "no/such: no such directory"),
    ("checkpoint import --from ds:folder --to out", "folder: no DeepSpeed checkpoint"),
    ("checkpoint import --from ds:good --to out", "good: found a checkpoint of Hexad"),
    ("checkpoint import --from ds: --to out", "--from: found ds: without a directory; write ds:DIR"),
    ("checkpoint import --from ds:ds.json --to out", "ds.json: is a file; expected the directory of"),
    ("checkpoint import --from ds:folder --model hf/typo --to out", "--model: hf/typo: no such directory or"),
    (
        "checkpoint import --from ds:folder --model no/config.json --to out",
        "no/config.json: no such",
    ),
    ("checkpoint import --from ds:folder --model run.yaml --to out", "--model: found the file run.yaml"),
    ("checkpoint import --from megatron:folder --model hf/typo --to out", "--model: hf/typo: no such"),
    ("checkpoint import --from deepspeed:folder --to out", "--from: found the prefix 'deepspeed'"),
    ("checkpoint import --from megatron:folder --to out", "--model: missing"),
    ("checkpoint import --from megatron:folder --model run.yaml --to out", "folder: holds no .metadata"),
    ("checkpoint import --from hf --model run.yaml --to out", "--model: found with --from hf"),
    ("checkpoint import --from hf --weights-only --to out", "--weights-only: found with --from hf"),
)
