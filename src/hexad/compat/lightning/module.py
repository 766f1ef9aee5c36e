"""LightningModules whose steps an engine makes, among them the model of a configuration in any layout."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self
from weakref import WeakMethod

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from hexad.checkpoint.base import Base, recorded
from hexad.checkpoint.directory import check_same_model
from hexad.checkpoint.manifest import Manifest
from hexad.comm import agreed, identical
from hexad.config import AgreedError, Config, ConfigError, HexadError, blaming
from hexad.config.schema import prefixes
from hexad.dataset.built import Identity, check_same_data, identities
from hexad.dataset.load.loader import loader_from_config
from hexad.dataset.load.microbatch import Microbatch
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.engine.engine import Engine
from hexad.engine.evaluation import Score, ValidationSets, total
from hexad.engine.faults import FaultGuard, StepResult
from hexad.engine.losses import Outputs
from hexad.launching.launch import naming_operators, resolved_alike
from hexad.model.configuration import load_config
from hexad.planning import check_vocab, working_layout
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh
from hexad.training.saves import loaded_base, start

from ..facade import tags
from ..facade.optimizer import adopted_optimizer, call_method
from .data import StepLoader, batches_done
from .training import FitOptimizer, visible

log = logging.getLogger("hexad")

WORDS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_stages": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "sequence": "sequence_parallel",
    "expert": "expert_model_parallel_size",
    "zero": "zero",
    "replicas": "replicas",
    "schedule": "schedule",
}
"""Settings of ``parallel``, and the arguments of the strategy that name them."""


class ConfiguredOptimizer(torch.optim.Optimizer):
    """The optimizer of a configuration, which the engine steps; ``lr`` is that of the last step.

    Args:
        parameters: of this rank's stages.
        lr: before the first step.
        step: a method that clips and updates.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, step: Callable[[], None]) -> None:
        super().__init__(parameters, {"lr": lr})
        self._update = WeakMethod(step)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, which makes the backward passes, then update; returns its result."""
        result = None if closure is None else closure()
        call_method(self._update)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """No-op: a step begins without gradients."""


class _Head(nn.Module):
    """An overridden ``loss``, with the modules and parameters that its LightningModule has for it."""

    def __init__(self, module: HexadModule) -> None:
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._call = module.loss

    def forward(self, outputs: Outputs, microbatch: Microbatch) -> Tensor:
        """The loss."""
        return self._call(outputs, microbatch)


class EngineModule(LightningModule):
    """A LightningModule whose steps an engine makes, on the ranks of any layout.

    Its stages are no submodules, which Lightning would move, synchronise and save.

    Attributes:
        engine: the model, its gradients and optimizer, once a trainer has set it up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self._mesh: Mesh | None = None
        self._stages: Mapping[int, nn.Module] = {}

    # Setting up

    @abstractmethod
    def layout(self, ranks: int, named: Mapping[str, Any]) -> Layout:
        """The layout of so many ranks; ``named`` are settings of ``parallel`` by the strategy."""

    @abstractmethod
    def make_engine(self, mesh: Mesh, training: bool, optimizer: Any) -> Engine:
        """An engine with the values that a fit begins with; ``optimizer`` as of :class:`hexad.Engine`. All
        ranks together."""

    def set_up(self, mesh: Mesh, training: bool, optimizer: Callable[[Any], Any] | None) -> None:
        """Make the engine, unless there is one; all ranks together.

        Args:
            mesh: of :meth:`layout`.
            training: False for evaluation only.
            optimizer: a function of this rank's stages, as of :class:`hexad.Engine`.

        Raises:
            HexadError: settings that do not fit, or differ between ranks.
        """
        if self.engine is not None and self.engine.training >= training and self._mesh is mesh:
            if training:
                assert optimizer is not None
                optimizer(self.engine.stages)
            return
        if self.engine is not None and training:
            name = type(self).__name__
            raise HexadError(
                f"{name}: found a model that was set up for evaluation, or in another layout; make a new "
                f"{name} for the fit, and pass ckpt_path"
            )

        def made(stages: Mapping[int, nn.Module]) -> Any:
            self._stages = stages
            return None if optimizer is None else optimizer(stages)

        self._mesh = mesh
        self.engine = self.make_engine(mesh, training, made)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of the module, and of this rank's stages once they exist."""
        pairs = super().named_parameters(prefix, recurse, remove_duplicate)
        if not recurse or not self._stages:
            return pairs
        modules = nn.ModuleDict({str(number): stage for number, stage in self._stages.items()})
        begin = f"{prefix}." if prefix else ""
        stages = modules.named_parameters(f"{begin}stages", True, remove_duplicate)
        mine = set(modules.parameters())
        return chain((pair for pair in pairs if pair[1] not in mine), stages)

    def configured_optimizer(self, config: Config) -> ConfiguredOptimizer:
        """The optimizer of a configuration, which the engine steps."""
        parameters = list(dict.fromkeys(p for stage in self._stages.values() for p in stage.parameters()))
        return ConfiguredOptimizer(parameters, config.optimizer.lr, self.update)

    def adopted(self, optimizer: torch.optim.Optimizer, stages: Mapping[int, nn.Module]) -> Any:
        """An optimizer of :meth:`parameters`, restricted to those of this rank's stages."""
        modules = nn.ModuleList(stages.values())
        elsewhere = set(self.parameters()) - set(modules.parameters())  # of other stages' ranks
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in elsewhere]
        return adopted_optimizer(modules, optimizer, keeps_groups=True)

    def stepped(self, optimizer: torch.optim.Optimizer) -> FitOptimizer:
        """What hooks and callbacks see of an optimizer that the engine steps."""
        return visible(optimizer)(optimizer, self._made(), self.update, self.discard)

    def load(self, path: Path, manifest: Manifest, strict: bool) -> None:
        """Load weights and, in a fit, optimizer state and progress, all ranks together.

        Raises:
            AgreedError: the checkpoint is damaged, or of another model.
        """
        engine = self._made()
        tags.load(engine, path, engine.training, strict, "LightningModule.strict_loading = False")

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the engine's chunks."""
        return self._made().progress()

    def close(self, failed: bool) -> None:
        """The trainer is done; ``failed``: other ranks may be gone."""

    def cpu(self) -> Self:
        """No-op with an engine, which keeps its parameters on its device."""
        return self if self.engine is not None else super().cpu()

    def _made(self) -> Engine:
        if self.engine is None:
            name = type(self).__name__
            raise HexadError(f"{name}: found no engine; Trainer(strategy=HexadStrategy(...)) makes it")
        return self.engine

    # A step

    @abstractmethod
    def update(self) -> None:
        """Clip and update with reduced gradients; the optimizer's step calls it."""

    def discard(self) -> None:
        """No-op: a step begins without gradients."""

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """The stages are in evaluation mode, which a trainer sets in its module only; then as before."""
        modes = [(part, part.training) for stage in self._stages.values() for part in stage.modules()]
        for stage in self._stages.values():
            stage.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training


def layout_of_module(name: str, named: Mapping[str, Any], ranks: int) -> Layout:
    """The layout of a user's module, which knows nothing of context ranks.

    Args:
        name: of the module's class.
        named: settings of ``parallel``.
        ranks: of the world.

    Raises:
        HexadError: settings that do not fit.
    """
    parallel = load_config({"parallel": dict(named)}).parallel
    if parallel.context > 1:
        raise HexadError(
            f"{name}: found context_parallel_size={parallel.context}; the attention of its layers knows "
            "nothing of context ranks, use 1"
        )
    return Layout.from_settings(parallel, ranks)


def check_fault(guard: FaultGuard, result: StepResult) -> None:
    """Warn of a faulty step, or stop, as ``faults`` says.

    Raises:
        AgreedError: it says to stop.
    """
    if result.fault is None:
        return
    what = guard.describe(result.step, result.loss, result.fault, result.limit)
    if guard.action(result.fault) == "skip" and not guard.exhausted:
        log.warning("%s: its update was skipped", what)
        return
    raise AgreedError(f"{what}; lower optimizer.lr, or resume from an earlier checkpoint with ckpt_path")


def has_engine(module: object) -> bool:
    """Whether the parameters of a module belong to an engine of its own."""
    return isinstance(module, EngineModule) and module.engine is not None


class HexadModule(EngineModule):
    """The language model of a configuration, under :class:`HexadStrategy`, in any layout.

    The configuration's model, data, batch, optimizer, learning rates and precision are trained; the trainer
    decides when it validates, saves and logs. Override any hook: :meth:`training_step`,
    :meth:`validation_step`, :meth:`configure_optimizers`, :meth:`loss`, :meth:`train_dataloader`.

    Args:
        config: settings as of a ``run.yaml``: its path, a mapping, or from :func:`hexad.load_config`. Degrees
            may be named here (``parallel``) or in the strategy.
        overrides: ``model.layers=2`` style strings; with a path or a mapping only.

    Attributes:
        config: resolved, once a trainer has set it up.
        engine: the model, its gradients and optimizer, likewise.

    Raises:
        HexadError: settings that do not fit.
    """

    def __init__(
        self, config: Config | str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
    ) -> None:
        super().__init__()
        if isinstance(config, Config) and overrides:
            raise HexadError(f"overrides: found {[*overrides]} with a Config; pass them to hexad.load_config")
        self.automatic_optimization = False
        self.config = config if isinstance(config, Config) else load_config(config, overrides)
        self._base: Base | None = None
        self._data: Mapping[str, Identity] = {}
        self._validation: ValidationSets | None = None
        self._open: list[Any] = []
        self._sums: dict[str, list[Score]] = {}
        self._finish: Callable[[], StepResult] | None = None
        self._result: StepResult | None = None

    # Setting up

    def layout(self, ranks: int, named: Mapping[str, Any]) -> Layout:
        """The layout of so many ranks; ``named`` are settings of ``parallel`` by the strategy.

        Raises:
            ConfigError: configuration and strategy name different ones, or they do not fit.
        """
        settings = self.config.parallel
        for name, value in named.items():
            found = getattr(settings, name)
            if name in settings.model_fields_set and found != value:
                raise ConfigError(
                    f"parallel.{name}",
                    f"found {found!r}, but HexadStrategy has {WORDS[name]}={value!r}; name it in one place",
                )
        parallel = settings.model_copy(update=dict(named))
        self.config = self.config.model_copy(update={"parallel": parallel})
        layout = working_layout(self.config, ranks)
        if layout.world < ranks:
            raise HexadError(
                f"HexadModule: found {ranks} ranks, of which {ranks - layout.world} have no work in this "
                "layout; start fewer, or another layout"
            )
        return layout

    def make_engine(self, mesh: Mesh, training: bool, optimizer: Any) -> Engine:
        """An engine of the model, with the values that a new run begins with.

        Raises:
            HexadError: settings that do not fit, or differ between ranks.
        """
        device = self.config.run.device
        if device not in ("auto", mesh.device.type):
            raise ConfigError(
                "run.device", f"found {device}, but the trainer uses {mesh.device.type}; use auto"
            )
        resolved = resolved_alike(self.config, mesh)
        self.config = resolved.config
        overridden = is_overridden("loss", self, HexadModule)
        trained = next(self.parameters(), None) is not None
        loss: Any = (_Head(self) if trained else self.loss) if overridden else None
        engine = Engine(resolved, mesh, initialise=False, training=training, loss=loss, optimizer=optimizer)
        self._base = start(engine, mesh.world)
        return engine

    def load(self, path: Path, manifest: Manifest, strict: bool) -> None:
        """Load like the base class, and the weights that adapters belong to."""
        engine = self._made()
        agreed(lambda: check_same_model(path, manifest.config, engine.config), engine.mesh.world)
        if engine.training and (saved := manifest.progress.get("data")):
            names = prefixes(engine.config.data.train)
            agreed(lambda: check_same_data(saved, identities(names), str(path)), engine.mesh.world)
        self._base = loaded_base(engine, path, manifest, engine.mesh.world)
        super().load(path, manifest, strict)

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the engine's chunks."""
        data = {"data": self._data} if self._data else {}
        return {**super().progress(), **recorded(self._base), **data}

    # A step

    def loss(self, outputs: Outputs, microbatch: Microbatch) -> Tensor:
        """Override for a loss in place of the model's own, on the ranks of the last stage: this rank's part
        of a sum, see :mod:`hexad.engine.losses`. Modules and parameters of the LightningModule are trained
        with the model's, and saved as ``loss.*``.

        Args:
            outputs: of the model.
            microbatch: what the rank holds of it.
        """
        raise NotImplementedError("override loss")

    def training_step(self, dataloader_iter: Any) -> Any:
        """One step by the pipeline's schedule: take its microbatches, and log ``train_loss`` and
        ``grad_norm``. Returns the loss, float64; NaN of a step without a target, which logs none."""
        microbatches, _, _ = next(dataloader_iter)
        result = self.train_step(microbatches)
        if result.targets:
            self.log("train_loss", result.loss, prog_bar=True, batch_size=1)
        self.log("grad_norm", result.grad_norm, batch_size=1)
        for name, value in result.auxiliary.items():
            self.log(name, value, batch_size=1)
        return torch.tensor(result.loss, dtype=torch.float64)

    def train_step(self, microbatches: Sequence[Microbatch], divisor: int | None = None) -> StepResult:
        """Accumulate, reduce, clip and update, and step the schedules of :meth:`configure_optimizers`; all
        ranks together, see :meth:`hexad.Engine.train_step`.

        Raises:
            AgreedError: the step failed, and ``faults`` says to stop.
        """
        engine, optimizer = self._made(), self.optimizers()
        assert not isinstance(optimizer, list)

        def closure() -> None:
            with naming_operators():
                self._finish = engine.start_step(microbatches, divisor=divisor)

        optimizer.step(closure)
        result = self._result
        assert result is not None
        if isinstance(optimizer.optimizer, ConfiguredOptimizer):
            optimizer.optimizer.param_groups[0]["lr"] = result.lr
        schedules: Any = self.lr_schedulers() or []
        for schedule in schedules if isinstance(schedules, list) else [schedules]:
            schedule.step()
        check_fault(engine.guard, result)
        if engine.step >= self.config.run.steps:
            self.trainer.should_stop = True
        return result

    def update(self) -> None:
        """Clip and update with the gradients of :meth:`train_step`; the optimizer's step calls it."""
        assert self._finish is not None
        with naming_operators():
            self._result, self._finish = self._finish(), None

    def configure_optimizers(self) -> Any:
        """The optimizer and the learning rates of the configuration; or override for one of ``torch.optim``,
        with schedules, which are stepped after every step."""
        return self.configured_optimizer(self.config)

    # Data

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """No-op: the engine moves microbatches."""
        return batch

    def train_dataloader(self) -> Any:
        """``data.train``, after the samples consumed; an item is a step's microbatches of this data rank."""
        engine, config = self._made(), self.config
        mesh = engine.mesh

        def opened() -> Any:
            with blaming("data.tokenizer"):
                tokenizer = load_tokenizer(config.data.tokenizer)
            check_vocab(config, tokenizer.vocab_size)
            place = mesh.data.rank, mesh.data.size
            loader = loader_from_config(config, *place, tokenizer, context_rank=mesh.context.rank)
            loader.prepare(engine.samples)
            return loader

        loader = agreed(opened, mesh.world)
        self._data = agreed(lambda: identities(prefixes(config.data.train)), mesh.world)
        identical("data", [sampled for sampled, _ in self._data.values()], mesh.world)
        self._open.append(loader)

        def announce() -> None:
            if engine.step + 1 < config.run.steps:
                with suppress(HexadError, OSError):  # raised where the data is needed
                    engine.announce(loader.ahead())

        engine.after_passes = announce
        left = max(0, config.run.steps - engine.step)

        def steps() -> Iterator[list[Microbatch]]:
            while engine.step < config.run.steps:
                yield loader.step(engine.samples)

        return StepLoader(steps, left and left + batches_done(self.trainer))

    def val_dataloader(self) -> Any:
        """The validation sets of the configuration, ``validate.batches`` global batches of each."""
        config, mesh = self.config, self._made().mesh
        if not config.data.validation_sets:
            return []

        def opened() -> ValidationSets:
            sets = ValidationSets(config, mesh, load_tokenizer(config.data.tokenizer))
            sets.prepare()
            return sets

        sets = self._validation = agreed(opened, mesh.world)
        self._open.append(sets)
        most = config.validate_.batches
        return [StepLoader(partial(sets.batches, name, most), most) for name in sets.names]

    test_dataloader = val_dataloader

    def close(self, failed: bool) -> None:
        """Stop reading ahead; ``failed``: other ranks may be gone."""
        while self._open:
            self._open.pop().close()
        if self.engine is not None and not failed:
            self.engine.after_passes = None
            self.engine.workload.settle()

    # Validation

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Evaluate a global batch; its token losses are added up. ``val_loss`` is logged at the end, the mean
        over all tokens, and of several sets each one's, ``val_loss/NAME``."""
        assert self._validation is not None
        score = Score(*self._made().evaluate(batch))
        self._sums.setdefault(self._validation.names[dataloader_idx], []).append(score)
        return torch.tensor(score.loss, dtype=torch.float64)

    def on_validation_epoch_end(self) -> None:
        """Log the means."""
        self._log_scores("val_loss")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Evaluate like :meth:`validation_step`; ``test_loss`` is logged."""
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Log the means."""
        self._log_scores("test_loss")

    def _log_scores(self, name: str) -> None:
        added = [(key, total(dict(enumerate(scores)))) for key, scores in self._sums.items()]  # type: ignore[arg-type]
        self._sums = {}
        if added:
            self.log(name, total(dict(added)).loss, prog_bar=True)
        for key, score in added if len(added) > 1 else ():
            self.log(f"{name}/{key}", score.loss)
