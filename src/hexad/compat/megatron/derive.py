"""What Megatron-LM computes from the flags before anything else reads them. No torch."""

from __future__ import annotations

from argparse import Namespace

from hexad.config import ConfigError

from .arguments import shown
from .flags import FLAGS

_REQUIRED = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--seq-length",
    "--max-position-embeddings",
    "--micro-batch-size",
)
_POSITIVE = (
    *_REQUIRED,
    "--global-batch-size",
    "--train-iters",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--recompute-num-layers",
    "--ddp-bucket-size",
)


def derive(arguments: Namespace, world: int | None = None) -> None:
    """Complete the namespace in place, as Megatron-LM's ``validate_args``.

    Args:
        arguments: from :func:`~hexad.compat.megatron.arguments.parse`.
        world: number of ranks; None: as few as the degrees allow.

    Raises:
        ConfigError: a required flag is missing, a size is not positive, or flags exclude each other.
    """
    for flag in _POSITIVE:
        value = getattr(arguments, FLAGS[flag].attribute)
        if value is None and flag in _REQUIRED:
            raise ConfigError(flag, "is missing; give it")
        if value is not None and value < 1:
            raise ConfigError(flag, f"found {value}, expected at least 1")
    _layout(arguments, world)
    _model(arguments)
    _exclude(arguments, "--fp16", "--bf16")
    _iterations(arguments)


def _layout(arguments: Namespace, world: int | None) -> None:
    """World size, data ranks and global batch size."""
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    model = tensor * pipeline * arguments.context_parallel_size
    arguments.world_size = model if world is None else world
    if arguments.world_size % model:
        raise ConfigError(
            "--tensor-model-parallel-size",
            f"found {tensor} x pipeline {pipeline} x context {arguments.context_parallel_size}, which do not "
            f"divide the {arguments.world_size} ranks; change one of them",
        )
    arguments.virtual_pipeline_model_parallel_size = None
    arguments.data_parallel_size = arguments.world_size // model
    if arguments.global_batch_size is None:
        arguments.global_batch_size = arguments.micro_batch_size * arguments.data_parallel_size
    if tensor == 1:
        arguments.sequence_parallel = False


def _model(arguments: Namespace) -> None:
    """Sizes that follow from others."""
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    if arguments.ffn_hidden_size is None:
        arguments.ffn_hidden_size = 8 * hidden // (3 * 64) * 64 if arguments.swiglu else 4 * hidden
    if arguments.kv_channels is None:
        if hidden % heads:
            raise ConfigError(
                "--hidden-size",
                f"found {hidden}, which {heads} heads do not divide; change one, or give --kv-channels",
            )
        arguments.kv_channels = hidden // heads
    if arguments.num_key_value_heads is not None:
        arguments.group_query_attention, arguments.num_query_groups = True, arguments.num_key_value_heads
    if not arguments.group_query_attention:
        arguments.num_query_groups = heads
    if arguments.use_rotary_position_embeddings or arguments.position_embedding_type == "rotary":
        arguments.position_embedding_type = "rope"


def _exclude(arguments: Namespace, *flags: str) -> None:
    """Refuse two of some flags together."""
    given = [flag for flag in flags if getattr(arguments, flag.removeprefix("--").replace("-", "_"))]
    if len(given) > 1:
        raise ConfigError(given[1], f"found beside {given[0]}; give one of them")


def _iterations(arguments: Namespace) -> None:
    """``train_iters``; flags that count samples and flags that count iterations do not mix."""
    _exclude(arguments, "--train-iters", "--train-samples")
    _exclude(arguments, "--lr-warmup-fraction", "--lr-warmup-iters")
    _exclude(arguments, "--lr-warmup-fraction", "--lr-warmup-samples")
    samples = arguments.train_samples is not None
    unit, other = ("iters", "--train-samples") if samples else ("samples", "--train-iters")
    for name in (f"lr_decay_{unit}", f"lr_warmup_{unit}", f"lr_wsd_decay_{unit}"):
        if getattr(arguments, name):
            flag, found = f"--{name.replace('_', '-')}", shown(getattr(arguments, name))
            wanted = flag.replace(unit, "samples" if samples else "iters")
            raise ConfigError(flag, f"found {found} with {other}; use {wanted}")
    if samples:
        arguments.train_iters = arguments.train_samples // arguments.global_batch_size
    if not arguments.train_iters:
        found = f"found {arguments.train_samples} samples, less than one batch" if samples else "is missing"
        raise ConfigError("--train-samples" if samples else "--train-iters", f"{found}; give it")
