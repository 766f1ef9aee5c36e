"""Lightning's strategy over an engine: data parallel, with sharded state, for any LightningModule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from hexad.config import ConfigError, HexadError
from hexad.config.schema import ParallelSettings
from hexad.engine.engine import Engine
from hexad.launching.launch import deterministic
from hexad.model.configuration import load_config
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..facade import world
from ..facade.foreign_names import read_foreign_names
from . import checkpoints
from .data import batches_done, resumable, unrepeated
from .module import WORDS, ConfiguredOptimizer, EngineModule, HexadModule, has_engine
from .pipeline import PipelineModule
from .precision import adapted, adapted_class
from .training import ModuleTraining, engine_settings, send_buffers

_REFUSED = {
    getattr(lightning_callbacks, row.name): row.note
    for row in read_foreign_names(__package__, "callbacks.txt")[""]
}
"""Callbacks that need parameters or optimizers of their own, and why."""

_BETWEEN_STEPS = (
    "optimizer_step",
    *("on_before_zero_grad", "on_train_start", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_end"),
)
"""Hooks that run between a step's update and the next forward pass."""


def _settings(named: Mapping[str, Any]) -> ParallelSettings:
    """Arguments of the strategy as settings of ``parallel``.

    Raises:
        HexadError: one is out of range, or not supported.
    """
    try:
        settings = load_config({"parallel": dict(named)}).parallel
    except ConfigError as error:
        raise HexadError(f"HexadStrategy: {error.worded(_word)}") from None
    if settings.expert > 1:
        raise HexadError(
            f"HexadStrategy: found {WORDS['expert']}={settings.expert}; expert parallelism is not supported "
            "yet, use 1"
        )
    return settings


def _word(name: str) -> str:
    """The strategy's argument that determines a setting."""
    return WORDS.get(name.removeprefix("parallel."), name)


def _check_trainer(trainer: Trainer, plugin: Precision, module: EngineModule) -> None:
    """Refuse settings of a trainer that a module with an engine of its own has, or cannot have.

    Raises:
        HexadError: naming the setting.
    """
    name = type(module).__name__
    if isinstance(module, HexadModule):
        if type(plugin) is not adapted_class(Precision) and not getattr(plugin, "is_configured", False):
            raise HexadError(
                f"Trainer: found precision={plugin.precision!r} with a {name}, whose configuration has "
                "precision.dtype; set that"
            )
        return
    if isinstance(plugin, MixedPrecision):
        raise HexadError(
            f"Trainer: found precision={plugin.precision!r} with a {name}, whose stages exchange tensors in "
            "the format of its layers; use 32-true, 64-true or bf16-true"
        )
    if trainer.accumulate_grad_batches != 1:
        raise HexadError(
            f"Trainer: found accumulate_grad_batches={trainer.accumulate_grad_batches} with a {name}, which "
            "cuts each batch into microbatches; use 1, larger batches, and more microbatches"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise HexadError(f"Trainer: found gradient_clip_algorithm='value' with a {name}; use 'norm'")


class HexadStrategy(DDPStrategy):
    """Trains any LightningModule data parallel, in place of Lightning's DDP and FSDP strategies; a
    :class:`HexadModule` in any layout, and modules whose ``configure_model`` divides them
    (:func:`hexad.parallelize`) tensor-parallel.

    Processes are started as by ``DDPStrategy``: by Lightning itself, from the script or by ``start_method``,
    by torchrun or SLURM. Losses, gradients and buffers are those of ``DDPStrategy``.

    Args:
        tensor_model_parallel_size, pipeline_model_parallel_size: degrees, as ``parallel.tensor`` and
            ``parallel.pipeline`` of a configuration; by default those of a HexadModule's, or 1.
        virtual_pipeline_model_parallel_size: stages per pipeline rank, ``parallel.virtual_stages``.
        context_parallel_size, sequence_parallel: ``parallel.context`` and ``parallel.sequence``.
        expert_model_parallel_size: 1.
        zero: what is sharded over ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        replicas: state is sharded inside groups of ``world / replicas`` ranks, and replicated across.
        schedule: of the pipeline, ``parallel.schedule``.
        accelerator, parallel_devices, cluster_environment, precision_plugin: as of ``DDPStrategy``.
        process_group_backend, timeout, start_method: likewise.

    Raises:
        HexadError: an argument out of range, or expert parallelism.
    """

    strategy_name = "hexad"

    def __init__(
        self,
        *,
        tensor_model_parallel_size: int | None = None,
        pipeline_model_parallel_size: int | None = None,
        virtual_pipeline_model_parallel_size: int | None = None,
        context_parallel_size: int | None = None,
        sequence_parallel: bool | None = None,
        expert_model_parallel_size: int | None = None,
        zero: int | None = None,
        replicas: int | None = None,
        schedule: str | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        named = {
            "tensor": tensor_model_parallel_size,
            "pipeline": pipeline_model_parallel_size,
            "virtual_stages": virtual_pipeline_model_parallel_size,
            "context": context_parallel_size,
            "sequence": sequence_parallel,
            "expert": expert_model_parallel_size,
            "zero": zero,
            "replicas": replicas,
            "schedule": schedule,
        }
        self.use({name: value for name, value in named.items() if value is not None})
        self.timeout, self.start_method = timeout, start_method
        self._training: ModuleTraining | None = None
        self._synchronised = True
        self._fresh_buffers = False  # those of rank 0 have been sent
        self._failed = False
        self._left = ExitStack()
        self._dumped: dict[str, Any] = {}  # of the checkpoint that is being made
        self._checkpoint: checkpoints.Saved | None = None  # to be loaded
        self._strict = True
        self.reads_gradients = self._reads_after_backward = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    def use(self, named: Mapping[str, Any]) -> None:
        """Name settings of ``parallel``.

        Raises:
            HexadError: one is out of range, or expert parallelism.
        """
        self.named = dict(named)
        self.parallel = _settings(self.named)

    @property
    def precision_plugin(self) -> Precision:
        """The plugin of ``Trainer(precision=...)``, with gradients in an engine."""
        if self._precision_plugin is None:
            self.precision_plugin = Precision()
        assert self._precision_plugin is not None
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None
        if plugin is not None:
            self._precision_plugin = adapted(plugin, self)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's own, which reads and removes; checkpoints are written by the strategy."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise HexadError(
            f"HexadStrategy: found the plugin {type(io).__name__}, but the strategy writes checkpoints "
            "itself, all ranks together; leave it out"
        )

    @property
    def in_fit(self) -> ModuleTraining | None:
        """What the fit that is under way trains with."""
        training = self._training
        return None if training is None or training.released else training

    @property
    def engine_module(self) -> EngineModule | None:
        """The trainer's module, if it has an engine of its own."""
        module = self.lightning_module
        return module if isinstance(module, EngineModule) else None

    @property
    def mesh(self) -> Mesh:
        """The ranks, in the layout of the strategy and the configuration; from ``configure_model`` on."""
        return world.mesh_in(self._layout(world.world_size()), self.root_device)

    def _layout(self, ranks: int) -> Layout:
        module, engine_module, parallel = self.lightning_module, self.engine_module, self.parallel
        if engine_module is not None:
            return engine_module.layout(ranks, self.named)
        if parallel.pipeline * parallel.context > 1:
            raise HexadError(
                f"HexadStrategy: found {WORDS['pipeline']} {parallel.pipeline} and {WORDS['context']} "
                f"{parallel.context} with a {type(module).__name__}; these need a HexadModule, or a "
                "PipelineModule"
            )
        return Layout(world=ranks, tensor=parallel.tensor)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data ranks get different samples, the other ranks of one data rank the same. Lightning may ask
        before the process group exists, for the number of steps."""
        layout = self._layout(self.num_nodes * self.num_processes)
        return {
            "num_replicas": layout.degree("data"),
            "rank": layout.coordinates(self.global_rank)["data"],
        }

    @property
    def _set_up_apart(self) -> bool:
        """Whether ranks may have different parts of the model, which Lightning does not know."""
        return self.engine_module is not None or self.mesh.layout.world > self.mesh.data.size

    def clip_by_norm(self, norm: float) -> None:
        """Clip the next step by the norm of all ranks' gradient."""
        if self.in_fit is not None:
            self.in_fit.clip = norm
        elif isinstance(self.lightning_module, PipelineModule):
            self.lightning_module.clip(norm)

    # Setting up

    def setup(self, trainer: Trainer) -> None:
        """Set up the module, and in a fit what trains it."""
        module, self._failed = self.engine_module, False
        if self.start_method != "popen" and self._set_up_apart:
            raise HexadError(
                f"HexadStrategy: found start_method={self.start_method!r} with a "
                f"{type(self.lightning_module).__name__}, of which every process has its own part; Lightning "
                "returns the first one's weights to the script only; leave it out"
            )
        if module is not None:
            _check_trainer(trainer, self.precision_plugin, module)
        if isinstance(module, HexadModule):
            self._left.enter_context(deterministic(module.config.run.deterministic, self.root_device))
        if trainer.state.fn == TrainerFn.FITTING or not self._set_up_apart:
            super().setup(trainer)
            return
        # Not Lightning's, which sends the first rank's parameters to all.
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if module is not None:
            module.set_up(self.mesh, False, None)
        self._load_checkpoint()
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move the module, but not one whose engine has its parameters."""
        if not has_engine(self.engine_module):
            super().model_to_device()

    def configure_ddp(self) -> None:
        """No wrapper: the engine hooks the module's parameters."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create optimizer and schedules, and the engine around the module.

        Raises:
            HexadError: several optimizers, or one that cannot be sharded.
        """
        module, engine_module = self.lightning_module, self.engine_module
        assert module is not None
        if engine_module is not None:
            self._check_callbacks(trainer)
            engine_module.set_up(self.mesh, True, partial(self._optimizer_of, engine_module, trainer))
            if not isinstance(self.optimizers[0], ConfiguredOptimizer):
                self.optimizers = [engine_module.stepped(self.optimizers[0])]
            self._load_checkpoint()
            return
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise HexadError(
                f"configure_optimizers: found {len(self.optimizers)} optimizers, expected one; use one with "
                "several parameter groups, or Lightning's DDPStrategy"
            )
        self._check_callbacks(trainer)
        self._training, self._fresh_buffers = None, False
        if not self.optimizers[0].param_groups:  # configure_optimizers has returned None: nothing is updated
            self._load_checkpoint()
            return
        settings = engine_settings(module, self.parallel, self.timeout.total_seconds())
        self._training = ModuleTraining(module, self.mesh, settings, self.optimizers[0])
        self._training.written = self._has_hooks(trainer, module)
        self.optimizers = [self._training.optimizer]
        self._load_checkpoint()

    def _optimizer_of(self, module: EngineModule, trainer: Trainer, stages: Any) -> Any:
        """The optimizer of ``configure_optimizers`` for an engine; None for that of the configuration."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) > 1:
            raise HexadError(
                f"configure_optimizers: found {len(self.optimizers)} optimizers, expected one; use one with "
                "several parameter groups"
            )
        inner = self.optimizers[0]
        configured = isinstance(inner, ConfiguredOptimizer)
        if configured and self.lr_scheduler_configs:
            raise HexadError(
                "configure_optimizers: found a schedule for the configuration's optimizer, which follows "
                "lr_schedule; set that, or return an optimizer of torch.optim too"
            )
        return None if configured else module.adopted(inner, stages)

    def _load_checkpoint(self) -> None:
        """Load the weights of the checkpoint that was found, and in a fit the optimizer's state."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            return
        if self.engine_module is not None:
            self.engine_module.load(checkpoint.path, checkpoint.manifest, self._strict)
        elif self._training is not None:
            checkpoints.fill_training(checkpoint, self._training, self._strict)
        else:
            assert self.lightning_module is not None
            with self._plain_engine() as engine:
                checkpoints.fill_module(checkpoint, self.lightning_module, self.mesh, self._strict, engine)

    @contextmanager
    def _plain_engine(self) -> Iterator[Engine | None]:
        """An engine for evaluation around a divided module, which knows what a rank's part is; None for
        another."""
        module = self.lightning_module
        if module is None or not self._set_up_apart:
            yield None
            return
        settings = engine_settings(module, self.parallel, self.timeout.total_seconds())
        engine = Engine(module, self.mesh, settings, training=False, initialise=False)
        try:
            yield engine
        finally:
            engine.release(self.root_device)

    def _check_callbacks(self, trainer: Trainer) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            reason = next((why for kind, why in _REFUSED.items() if isinstance(callback, kind)), None)
            if reason is not None:
                raise HexadError(
                    f"callbacks: found {type(callback).__name__}, which {reason}; leave it out, or use "
                    "Lightning's DDPStrategy"
                )
        module = self.lightning_module
        assert module is not None
        self.reads_gradients = (
            is_overridden("on_before_optimizer_step", module)
            or is_overridden("configure_gradient_clipping", module)
            or any(is_overridden("on_before_optimizer_step", one, parent=Callback) for one in callbacks)
        )
        self._reads_after_backward = is_overridden("on_after_backward", module) or any(
            is_overridden("on_after_backward", one, parent=Callback) for one in callbacks
        )

    @staticmethod
    def _has_hooks(trainer: Trainer, module: LightningModule) -> bool:
        """Whether hooks of the script run between steps, which may write to parameters; Lightning's own
        callbacks do not. In manual optimization the step itself may."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [one for one in callbacks if not type(one).__module__.startswith("lightning.")]
        return not module.automatic_optimization or any(
            is_overridden(name, module) or any(is_overridden(name, one, parent=Callback) for one in others)
            for name in _BETWEEN_STEPS
        )

    def process_dataloader(self, dataloader: object) -> object:
        """A loader of training that resumes after the samples consumed, one of evaluation that repeats
        none."""
        module = self.lightning_module
        stage = None if module is None else module.trainer.state.stage
        if module is None or stage is None:
            return dataloader
        if stage.evaluating:
            return unrepeated(dataloader)
        overfit = module.trainer.overfit_batches  # type: ignore[attr-defined]
        if stage == RunningStage.TRAINING and not overfit:
            ranks = self.distributed_sampler_kwargs["num_replicas"]
            return resumable(dataloader, ranks, partial(batches_done, module.trainer))
        return dataloader

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce like ``DDPStrategy``, but with exact means of integers: Lightning divides logged sums by the
        mean number of samples, which may differ between ranks in evaluation."""
        mean = str(reduce_op).lower() in ("none", "mean", "avg") or reduce_op == ReduceOp.AVG
        if mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(torch.float64)
        return super().reduce(tensor, group, reduce_op)

    # A step

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backward passes inside are not the last of their step."""
        self._synchronised = False
        try:
            yield
        finally:
            self._synchronised = True

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Add to the gradients of the step."""
        training, module = self.in_fit, self.lightning_module
        assert module is not None
        if training is not None:
            if module.automatic_optimization:
                passes: int | None = module.trainer.accumulate_grad_batches
            else:
                passes = 1 if self._synchronised else None
            training.expect(passes)
        result = super().backward(closure_loss, optimizer, *args, **kwargs)
        if training is not None and not kwargs.get("retain_graph"):
            training.reads.release()
        return result

    def backward_ended(self) -> None:
        """Show gradients to hooks and scripts that read them after the last backward pass of a step."""
        training, module = self.in_fit, self.lightning_module
        if training is None or module is None or not self._synchronised:
            return
        if self._reads_after_backward or not module.automatic_optimization:
            training.show()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with the buffers of rank 0, as in DDP."""
        with self._step():
            self._synchronise_buffers()
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with the buffers of rank 0, as in DDP."""
        with self._step():
            self._synchronise_buffers()
            return super().validation_step(*args, **kwargs)

    def _step(self) -> AbstractContextManager[None]:
        return nullcontext() if self.in_fit is None else self.in_fit.step()

    def _synchronise_buffers(self) -> None:
        """Send the buffers of rank 0, such as running averages, to all ranks where DDP does: before the first
        forward pass of a fit and each that follows one whose gradients were reduced."""
        module = self.lightning_module
        if self.in_fit is None or module is None:
            return
        if not self._fresh_buffers:
            send_buffers(list(module.buffers()), self.mesh.data)
        automatic = module.automatic_optimization
        self._fresh_buffers = not (torch.is_grad_enabled() and automatic and self._synchronised)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict``; with ``zero=3``, during a fit, and of divided layers, with the
        parameters themselves, whose values are sharded."""
        module = self.lightning_module
        assert module is not None
        sharded = self._set_up_apart or (self.parallel.zero == 3 and self.in_fit is not None)
        self._dumped = module.state_dict(keep_vars=sharded)
        return dict(self._dumped)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: :meth:`save_checkpoint` writes it, every rank its shard."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint to a directory of this path, all ranks together; any layout loads it.

        Raises:
            HexadError: with ``storage_options``, a path that is not local, or weights that a hook has
                changed.
        """
        if storage_options is not None:
            raise HexadError(
                "save_checkpoint: found storage_options, which a directory does not have; leave it out"
            )
        module = self.lightning_module
        assert module is not None
        path = checkpoints.local_path(self.broadcast(filepath))
        state = checkpoint.pop("state_dict")
        changed = [name for name, value in state.items() if value is not self._dumped.get(name)]
        if changed:
            raise HexadError(
                f"on_save_checkpoint: found {changed[0]} changed in checkpoint['state_dict']; a hook may "
                "leave weights out; save others under a key of their own"
            )
        omitted = set(self._dumped) - set(state)
        self._dumped = {}
        if self.engine_module is not None:
            checkpoints.save_model(path, checkpoint, self.engine_module)
            return
        training = self._training if self._training is not None and self._training.module is module else None
        if training is not None:
            checkpoints.save(path, checkpoint, module, training, self.mesh, omitted)
            return
        with self._plain_engine() as engine:
            checkpoints.save(path, checkpoint, module, engine, self.mesh, omitted)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what the trainer restores: from a directory of :meth:`save_checkpoint`, of which weights and
        optimizer state are loaded later, or from a file of Lightning's other strategies."""
        path = self.broadcast(checkpoint_path)
        self._checkpoint = None
        if "://" not in str(path):
            self._checkpoint = checkpoints.find(checkpoints.local_path(path), self.mesh.world)
        if self._checkpoint is None:
            return super().load_checkpoint(path, weights_only=weights_only)
        return checkpoints.lightning_part(self._checkpoint, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights: in a fit those of a directory when there is an engine, with the optimizer's state."""
        module = self.lightning_module
        assert module is not None
        self._training, self._strict = None, strict
        if self._checkpoint is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif module.trainer.state.fn != TrainerFn.FITTING and not self._set_up_apart:
            self._load_checkpoint()  # else in setup

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state from a file of Lightning's other strategies."""
        if self._training is not None and checkpoint["optimizer_states"]:
            step = int(checkpoint.get("global_step", 0))
            checkpoints.fill_optimizer(checkpoint["optimizer_states"][0], self._training, step)

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Remember that other ranks may be gone."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Make the module plain again, on the host, with complete parameters; a HexadModule keeps its
        engine."""
        self._left.close()
        if self.engine_module is not None:
            self.engine_module.close(self._failed)
        if self._training is not None:
            self._training.release(gather=not self._failed)
        super().teardown()
