"""NeMo 2's strategy and precision plugin over :class:`~hexad.compat.lightning.HexadStrategy`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor

from hexad.config import Config, HexadError
from hexad.model.configuration import load_config

from ..facade.foreign_names import check_arguments
from ..lightning.data import batches_done
from ..lightning.module import EngineModule
from ..lightning.strategy import HexadStrategy
from ..lightning.training import format_settings
from ..megatron import parallel_state
from ..megatron.initialize import seed_generators
from ..megatron.settings import DistributedDataParallelConfig, check_reduction
from .hooks import HookedModule, has_hooks
from .optim import MegatronOptimizerModule
from .sampler import MegatronDataSampler
from .tables import ARGUMENTS

_SHARDED = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""``data_parallel_sharding_strategy``, by level of ZeRO."""


class MegatronStrategy(HexadStrategy):
    """Trains NeMo 2's models (``llm.GPTModel``), and LightningModules with its hooks, in any layout.

    Args:
        tensor_model_parallel_size, pipeline_model_parallel_size: degrees.
        virtual_pipeline_model_parallel_size: stages per pipeline rank.
        microbatch_group_size_per_vp_stage: ``parallel.schedule_group``.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: others are divided evenly.
        account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: each counts as a layer.
        pipeline_model_parallel_layout: ``E``, ``t``, ``L`` and ``|`` of Megatron-LM.
        context_parallel_size, sequence_parallel: degrees; sequence parallel needs tensor ranks.
        expert_model_parallel_size: 1.
        data_sampler: of a data module that has none.
        ddp: ``megatron``, or settings; with ``use_distributed_optimizer`` here, or in the optimizer's
            ``OptimizerConfig``, the state is sharded as by ZeRO 1.
        fsdp: ``torch`` for ZeRO 3; ``megatron`` for ``data_parallel_sharding_strategy`` of ``ddp``.
        num_distributed_optimizer_instances: groups of ranks inside which the state is sharded.
        use_tp_pp_dp_mapping: pipeline ranks are neighbours of tensor ranks.
        restore_config: weights to begin with, see :class:`AutoResume`.
        schedule, zero: Hexad's own, in place of 1F1B or interleaved, and of what ``ddp`` says.
        accelerator, parallel_devices, cluster_environment, process_group_backend, timeout: as of
            ``DDPStrategy``.
        precision_plugin: of the trainer.
        others: NeMo 2's, with their defaults or without effect.

    Raises:
        HexadError: values that are not supported.
    """

    strategy_name = "megatron"

    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        *,
        virtual_pipeline_model_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        sequence_parallel: bool = False,
        expert_model_parallel_size: int | None = 1,
        microbatch_group_size_per_vp_stage: int | None = None,
        num_layers_in_first_pipeline_stage: int | None = None,
        num_layers_in_last_pipeline_stage: int | None = None,
        account_for_embedding_in_pipeline_split: bool = False,
        account_for_loss_in_pipeline_split: bool = False,
        pipeline_model_parallel_layout: str | None = None,
        data_sampler: MegatronDataSampler | None = None,
        ddp: Literal["megatron", "pytorch"] | DistributedDataParallelConfig = "megatron",
        fsdp: Literal["megatron", "torch"] | None = None,
        num_distributed_optimizer_instances: int = 1,
        use_tp_pp_dp_mapping: bool = False,
        restore_config: Any = None,
        schedule: str | None = None,
        zero: int | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **others: Any,
    ) -> None:
        check_arguments("MegatronStrategy", others, ARGUMENTS["MegatronStrategy"])
        if not isinstance(ddp, DistributedDataParallelConfig) and ddp not in ("megatron", "pytorch"):
            raise HexadError(
                f"MegatronStrategy: found ddp={ddp!r}, expected megatron, pytorch or a "
                "DistributedDataParallelConfig"
            )
        virtual = virtual_pipeline_model_parallel_size
        self.ddp = ddp if isinstance(ddp, DistributedDataParallelConfig) else DistributedDataParallelConfig()
        check_reduction(self.ddp)
        self.fsdp, self.own_zero = fsdp, zero
        self.data_sampler, self.restore_config = data_sampler, restore_config
        self.flags = {
            "microbatch_group_size_per_vp_stage": microbatch_group_size_per_vp_stage,
            "decoder_first_pipeline_num_layers": num_layers_in_first_pipeline_stage,
            "decoder_last_pipeline_num_layers": num_layers_in_last_pipeline_stage,
            "account_for_embedding_in_pipeline_split": account_for_embedding_in_pipeline_split,
            "account_for_loss_in_pipeline_split": account_for_loss_in_pipeline_split,
            "pipeline_model_parallel_layout": pipeline_model_parallel_layout,
            "use_tp_pp_dp_mapping": use_tp_pp_dp_mapping,
        }
        instances = max(num_distributed_optimizer_instances, self.ddp.num_distributed_optimizer_instances)
        self._driver: HookedModule | None = None
        super().__init__(
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual or 1,
            context_parallel_size=context_parallel_size,
            sequence_parallel=sequence_parallel and tensor_model_parallel_size > 1,
            expert_model_parallel_size=expert_model_parallel_size or 1,
            zero=self._zero(None),
            replicas=instances if instances > 1 else None,
            schedule=schedule or ("interleaved" if virtual and virtual > 1 else None),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def _zero(self, module: LightningModule | None) -> int:
        """``parallel.zero`` of a module and its optimizer."""
        if self.own_zero is not None:
            return self.own_zero
        if self.fsdp == "torch":
            return 3
        if self.fsdp == "megatron":
            sharded = self.ddp.data_parallel_sharding_strategy
            if sharded not in _SHARDED:
                known = ", ".join(_SHARDED)
                raise HexadError(
                    f"ddp.data_parallel_sharding_strategy: found {sharded!r}, expected one of {known}"
                )
            return _SHARDED.index(sharded)
        if self.fsdp is not None:
            raise HexadError(f"MegatronStrategy: found fsdp={self.fsdp!r}, expected megatron, torch or None")
        optim = getattr(module, "optim", None)
        distributed = isinstance(optim, MegatronOptimizerModule) and optim.config.use_distributed_optimizer
        return int(distributed or self.ddp.use_distributed_optimizer)

    # The module

    @property
    def engine_module(self) -> EngineModule | None:
        """The module with an engine of its own: the trainer's, or what drives its hooks."""
        return self._driver or super().engine_module

    def connect(self, model: Any) -> None:
        """Take the trainer's module, and prepare to drive its hooks."""
        super().connect(model)
        self.shard_as(model)
        if not has_hooks(model) or isinstance(model, EngineModule):
            self._driver = None
        elif self._driver is None or self._driver.user is not model:
            self._driver = HookedModule(model, self._configured)
        _describe(getattr(model, "config", None), self.named)

    def shard_as(self, model: LightningModule) -> None:
        """Shard what a module's optimizer says."""
        self.use({**self.named, "zero": self._zero(model)})

    def setup_environment(self) -> None:
        """Join the world, and make its groups those of ``parallel_state``."""
        super().setup_environment()
        if self.engine_module is None:
            return
        stages = self.parallel.virtual_stages
        parallel_state.use_mesh(self.mesh, stages if stages > 1 else None)
        if stages > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(0)
        seed_generators(int(os.environ.get("PL_GLOBAL_SEED", "1234")))

    def setup(self, trainer: Trainer) -> None:
        """Set up the module, and in a fit what trains it."""
        if trainer.gradient_clip_val:
            raise HexadError(
                f"Trainer: found gradient_clip_val={trainer.gradient_clip_val} with MegatronStrategy; set "
                "OptimizerConfig.clip_grad"
            )
        if trainer.overfit_batches and self._driver is not None:  # type: ignore[attr-defined]
            raise HexadError("Trainer: found overfit_batches with MegatronStrategy; pass a smaller data set")
        super().setup(trainer)

    def _sampler(self) -> MegatronDataSampler:
        """The sampler of the trainer's data module, or of the strategy.

        Raises:
            HexadError: there is none.
        """
        module = self.lightning_module
        assert module is not None
        data: Any = getattr(module.trainer, "datamodule", None)
        sampler = getattr(data, "data_sampler", None) or self.data_sampler
        if not isinstance(sampler, MegatronDataSampler):
            raise HexadError(
                "data_sampler: found none; set data_sampler = MegatronDataSampler(seq_len=..., "
                "micro_batch_size=..., global_batch_size=...) in the data module, or pass it to the strategy"
            )
        return sampler

    def _configured(self) -> Config:
        """The settings of an engine around the module's stages."""
        module, sampler, plugin = self.lightning_module, self._sampler(), self.precision_plugin
        assert module is not None
        trainer: Any = module.trainer
        sampler.check(self.mesh.data.size)
        tree: dict[str, Any] = {
            "run": {"timeout": self.timeout.total_seconds()},
            "data": {"sequence": sampler.seq_len},
            "batch": sampler.settings,
            "parallel": dict(self.named),
            "checkpoint": {"asynchronous": False},
        }
        if trainer.max_steps > 0:
            tree["run"]["steps"] = trainer.max_steps
        has_settings = isinstance(plugin, MegatronMixedPrecision)
        tree["precision"] = plugin.settings() if has_settings else format_settings(module)  # type: ignore[attr-defined]
        optim = getattr(module, "optim", None)
        if isinstance(optim, MegatronOptimizerModule):
            tree |= optim.settings(trainer.max_steps)
        else:
            tree["optimizer"] = {"clip": 0.0}
        return load_config(tree)

    # Data

    def process_dataloader(self, dataloader: object) -> object:
        """A loader of a module with hooks: an item has a step's microbatches of this data rank."""
        driver, module = self._driver, self.lightning_module
        if driver is None or module is None:
            return super().process_dataloader(dataloader)
        sampler, trainer = self._sampler(), module.trainer
        stage = trainer.state.stage
        if stage is not None and (stage.evaluating or trainer.predicting):
            stages = self.mesh.pipeline.size
            return sampler.evaluation(dataloader, self.mesh.data, stages, not trainer.predicting)
        engine = driver.engine
        assert engine is not None
        return sampler.training(dataloader, self.mesh.data, lambda: engine.samples, batches_done(trainer))

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's; that of one with hooks by the pipeline's schedule."""
        if self._driver is None:
            return super().training_step(*args, **kwargs)
        result = self._driver.training_step(_microbatches(args, kwargs))
        self._log(self._driver)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a step of validation, like :meth:`training_step`."""
        if self._driver is None:
            return super().validation_step(*args, **kwargs)
        return self._driver.validation_step(_microbatches(args, kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a step of a test, like :meth:`training_step`."""
        if self._driver is None:
            return super().test_step(*args, **kwargs)
        return self._driver.test_step(_microbatches(args, kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a step of predictions, like :meth:`training_step`."""
        if self._driver is None:
            return super().predict_step(*args, **kwargs)
        return self._driver.predict_step(_microbatches(args, kwargs))

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The module's; the schedule has made those of a module with hooks."""
        if self._driver is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return closure_loss

    def _log(self, driver: HookedModule) -> None:
        sampler, engine = self._sampler(), driver.engine
        assert engine is not None
        if sampler.output_log:
            size = sampler.batch.size(engine.samples)
            consumed = sampler.init_consumed_samples + engine.samples + size
            driver.user.log("consumed_samples", float(consumed), batch_size=1)
            driver.user.log("global_batch_size", float(size), batch_size=1)


def _microbatches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a trainer passes to a step."""
    values = [*args, *kwargs.values()]
    if not values or not isinstance(values[0], list):
        raise HexadError(
            f"training_step: found a {type(values[0]).__name__ if values else 'step without arguments'}, "
            "expected a step's microbatches; its signature is training_step(self, batch, batch_idx=None)"
        )
    return values[0]


def _describe(config: Any, named: Mapping[str, Any]) -> None:
    """Give a module's configuration the degrees of the run, under Megatron-Core's names."""
    degrees = {
        "tensor_model_parallel_size": named.get("tensor", 1),
        "pipeline_model_parallel_size": named.get("pipeline", 1),
        "virtual_pipeline_model_parallel_size": named["virtual_stages"]
        if named.get("virtual_stages", 1) > 1
        else None,
        "context_parallel_size": named.get("context", 1),
        "sequence_parallel": named.get("sequence", False),
    }
    for name, value in degrees.items():
        if hasattr(config, name):
            setattr(config, name, value)


class MegatronMixedPrecision(Precision):
    """The format of parameters and products, with fp32 master values, as ``precision`` of a configuration.

    Args:
        precision: ``bf16-mixed``, ``16-mixed`` or ``32``.
        grad_reduce_in_fp32: reduce gradients in fp32; False: in bf16, with that.
        fp8: ``hybrid`` for products in fp8, with bf16.
        fp8_wgrad: products of weights' gradients too.
        fp16_loss_scale: a fixed loss scale; None: a dynamic one.
        fp16_initial_loss_scale, fp16_min_loss_scale, fp16_loss_scale_window, fp16_hysteresis: of that.
        others: NeMo 2's, with their defaults or without effect.

    Attributes:
        is_configured: what it says is in the settings of a module's engine.

    Raises:
        HexadError: a format that is not known.
    """

    is_configured = True

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed", "32"] | int,
        *,
        grad_reduce_in_fp32: bool = True,
        fp8: str | None = None,
        fp8_wgrad: bool = True,
        fp16_loss_scale: float | None = None,
        fp16_initial_loss_scale: float = 2.0**32,
        fp16_min_loss_scale: float = 1.0,
        fp16_loss_scale_window: int = 1000,
        fp16_hysteresis: int = 2,
        **others: Any,
    ) -> None:
        check_arguments("MegatronMixedPrecision", others, ARGUMENTS["MegatronMixedPrecision"])
        names = {"bf16": "bf16", "16": "fp16", "fp16": "fp16", "32": "fp32", "fp32": "fp32"}
        dtype = names.get(str(precision).removesuffix("-mixed").removesuffix("-true"))
        if dtype is None or (fp8 is not None and (fp8 != "hybrid" or dtype != "bf16")):
            found = f"precision={precision!r}" + (f" with fp8={fp8!r}" if fp8 is not None else "")
            raise HexadError(
                f"MegatronMixedPrecision: found {found}, expected bf16-mixed, 16-mixed or 32, and "
                "fp8='hybrid' with bf16-mixed only"
            )
        super().__init__()
        self.precision = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}[dtype]  # type: ignore[assignment]
        self._settings: dict[str, Any] = {"dtype": dtype if fp8 is None else "fp8"}
        if fp8 is not None:
            self._settings["fp8_weight_gradients"] = fp8_wgrad
        if dtype == "bf16" and not grad_reduce_in_fp32:
            self._settings |= {"reduce": "bf16", "accumulate": "bf16"}
        if dtype == "fp16":
            self._settings |= {
                "loss_scale": fp16_loss_scale or "dynamic",
                "loss_scale_initial": fp16_initial_loss_scale,
                "loss_scale_window": int(fp16_loss_scale_window),
                "loss_scale_hysteresis": fp16_hysteresis,
                "loss_scale_min": fp16_min_loss_scale,
            }

    def settings(self) -> dict[str, Any]:
        """The group ``precision``."""
        return dict(self._settings)
