"""Constants of several modules of DeepSpeed: ``constants``, ``launcher.runner``, ``runtime.config``."""

from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=10)
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "adagrad"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = (
    "onebitadam",
    "onebitlamb",
    "zerooneadam",
)
