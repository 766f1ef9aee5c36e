"""``deepspeed.initialize``, and what scripts call and construct before it."""

import argparse
import logging
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hexad.comm import agreed, identical
from hexad.config import ConfigError, HexadError
from hexad.conversion import parallelize as conversion
from hexad.model.transformer import Transformer
from hexad.topology.mesh import Mesh

from ..facade import world
from ..facade.extensions import extension
from .config import CheckedConfig, effective, read_config, tensor_degree
from .engine import DeepSpeedEngine
from .keys import Keys
from .pipe import PipelineModule
from .pipe_engine import PipelineEngine

DeepSpeedConfigError = ConfigError

log = logging.getLogger("hexad")

# Constants of ``constants``, ``launcher.runner`` and ``runtime.config``
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=10)
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
ADAM_OPTIMIZER, ADAMW_OPTIMIZER, ADAGRAD_OPTIMIZER = "adam", "adamw", "adagrad"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER = "onebitadam", "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    strict: bool = True,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """An engine around a module.

    Args:
        args: with the configuration's path as ``deepspeed_config``, where ``config`` is not given.
        model: any module, the same on all ranks.
        optimizer: a ``torch.optim`` optimizer, or a function of parameters that returns one; by
            default the one that the configuration names.
        model_parameters: parameters, or groups of them, to train; by default all that require gradients.
        training_data: a data set, for the loader that is returned.
        lr_scheduler: of the learning rate, or a function of the optimizer that returns one; by default the
            one that the configuration names.
        distributed_port: accepted; the launcher's ``MASTER_PORT`` is used.
        mpu: tensor and pipeline ranks; those of user-defined modules are of :func:`hexad.parallelize`.
        dist_init_required: accepted; the process group is initialised unless it exists.
        collate_fn: of the loader.
        config, config_params: a path or the keys themselves.
        mesh_param: (data ranks, sequence ranks); only one sequence rank for user-defined modules.
        strict: refuse misspelt keys; otherwise they are unknown ones, which a warning names.

    Returns:
        engine, optimizer, loader, scheduler; None for what there is not.

    Raises:
        AgreedError: a key that is misspelt, malformed or not supported, batch sizes that do not fit each
            other, or settings that differ between ranks.
        HexadError: arguments that do not fit.
    """
    if not isinstance(model, nn.Module):
        problem = "no model" if model is None else f"a model of type {type(model).__name__}"
        raise HexadError(f"initialize: found {problem}; pass a torch.nn.Module as model=")
    _log_to_terminal()
    source = _source(args, config, config_params)
    device = world.join()
    _divide(model, source, device)
    kind, mesh = _kind(model, device)
    data_ranks = mesh.data.size
    checked = agreed(lambda: read_config(source, data_ranks, strict), mesh.world)
    keys = checked.keys
    identical("settings", effective(keys), mesh.world)
    if keys.data_parallel_size not in (None, data_ranks):
        raise ConfigError(
            "data_parallel_size", f"found {keys.data_parallel_size} in a world of {data_ranks} data ranks"
        )
    _check_degrees(keys, model, mesh, mpu, mesh_param)
    engine = kind(
        model, checked, device, optimizer, model_parameters, lr_scheduler, training_data, collate_fn
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _source(args: Any, *given: Any) -> Any:
    """The one configuration, of ``args`` or of the call."""
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    sources = [source for source in (*given, named) if source is not None]
    if not sources:
        raise HexadError("initialize: found no configuration; pass config=, or --deepspeed_config")
    other = next((source for source in sources[1:] if source != sources[0]), None)
    if other is not None:
        raise HexadError(
            f"initialize: found two configurations, {_short(sources[0])} and {_short(other)}; pass one"
        )
    return sources[0]


def _short(source: Any) -> str:
    return "a dictionary" if isinstance(source, Mapping) else str(source)


def _log_to_terminal() -> None:
    """Show what DeepSpeed's users see, where the script has set up no logging."""
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def _kind(model: nn.Module, device: torch.device) -> tuple[type[DeepSpeedEngine], Mesh]:
    """The class of a model's engine, and its mesh."""
    if isinstance(model, PipelineModule):
        return PipelineEngine, model.mesh
    if isinstance(model, Transformer):
        kind: tuple[type[DeepSpeedEngine], Mesh] | None = extension("deepspeed, with GPTModel")(model)
        if kind is not None:
            return kind
    return DeepSpeedEngine, conversion.mesh_of(model) or world.mesh_of(device)


def _divide(model: nn.Module, source: Any, device: torch.device) -> None:
    """Divide a module over tensor ranks, where ``tensor_parallel.autotp_size`` asks for it; all together."""
    if isinstance(model, PipelineModule | Transformer) or conversion.mesh_of(model) is not None:
        return
    everyone = world.mesh_of(device).world
    degree = agreed(lambda: tensor_degree(source), everyone)
    if degree > 1:
        if everyone.size % degree:
            raise ConfigError(
                "tensor_parallel.autotp_size",
                f"found {degree} in a world of {everyone.size} ranks, which it does not divide",
            )
        conversion.parallelize(model, world.mesh_of(device, tensor=degree))


def _check_degrees(keys: Keys, model: nn.Module, mesh: Mesh, mpu: Any, mesh_param: Any) -> None:
    """Refuse degrees other than the model's; a ``GPTModel``'s ``mpu`` fits."""
    tensor = mesh.tensor.size if isinstance(model, Transformer) or mesh.tensor.size > 1 else None
    what = "a user-defined module is not divided" if tensor is None else "the model is not divided so"
    degrees = [
        ("tensor_parallel.autotp_size", keys.tensor_parallel.autotp_size, tensor or 1),
        ("sequence_parallel_size", keys.sequence_parallel_size, 1),
        ("mesh_param[1]", 1 if mesh_param is None else int(mesh_param[1]), 1),
    ]
    names = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    for name in names if tensor is None else ():
        degrees += [(f"mpu.{name}()", int(getattr(mpu, name)()), 1)] if hasattr(mpu, name) else []
    for name, degree, has in degrees:
        if degree > 1 and degree != has:
            raise HexadError(
                f"{name}: found {degree}, but {what}; use {has}, or hexad train with one of Hexad's models "
                "(hexad config from-deepspeed)"
            )


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the world that torchrun or SLURM has started, unless the script has.

    Args:
        dist_backend: of ``torch.distributed``; by default NCCL on GPUs and gloo on CPUs.
        timeout: of collectives.
        auto_mpi_discovery, distributed_port, verbose, dist_init_required, config: accepted without effect.
        init_method, rank, world_size: of ``torch.distributed.init_process_group``, where no launcher has
            started the ranks.
    """
    if init_method is not None and rank >= 0 and not torch.distributed.is_initialized():
        backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
        torch.distributed.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
        )
    world.join(timeout, dist_backend)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a parser."""
    group = parser.add_argument_group("DeepSpeed", "settings of the engine")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the configuration")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser


class DeepSpeedConfig(CheckedConfig):
    """A checked configuration. Its top-level keys are attributes, the batch sizes with inferred values.

    Args:
        config: a file, or its contents.
        mpu: model-parallel ranks; by default all ranks are data ranks.
        mesh_device: accepted without effect.

    Raises:
        ConfigError: a misspelt, malformed or refused key, or batch sizes that do not fit each other.
        HexadError: a file that cannot be read.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        ranks = world.world_size() if mpu is None else int(mpu.get_data_parallel_world_size())
        read = read_config(config, ranks)
        super().__init__(read.keys, read.batch, read.tree)

    def __getattr__(self, name: str) -> Any:
        sizes = {
            "train_batch_size": "total",
            "train_micro_batch_size_per_gpu": "micro",
            "gradient_accumulation_steps": "accumulation",
        }
        if name in sizes:
            return getattr(self.batch, sizes[name])
        if name in Keys.model_fields:
            return getattr(self.keys, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
