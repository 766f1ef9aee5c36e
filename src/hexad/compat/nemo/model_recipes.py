"""NeMo 2's recipes of models for NeMo-Run: ``pretrain_recipe``, ``finetune_recipe``, ``model`` and
``trainer`` of every row of ``recipes.txt``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import nemo_run as run

from hexad.config import HexadError

from ..megatron.settings import DistributedDataParallelConfig
from . import llm, models
from .callbacks import GarbageCollectionCallback, MegatronCommOverlapCallback, TimingCallback
from .data import MockDataModule, PackedSequenceSpecs
from .experiment import Trainer
from .models import PEFT_STR2CLS
from .recipe_table import ROWS, RecipeLayout, RecipeRow
from .recipes import (
    bf16_mixed,
    default_finetune_recipe,
    default_log,
    default_resume,
    distributed_fused_adam_with_cosine_annealing,
    fp16_mixed,
    tensorboard_logger,
)
from .strategy import MegatronStrategy
from .tokenizers import AutoTokenizer


@dataclass(frozen=True)
class TrainerOptions:
    """The arguments of a recipe's trainer, under NeMo's names."""

    tensor_parallelism: int
    pipeline_parallelism: int
    virtual_pipeline_parallelism: int | None
    context_parallelism: int
    sequence_parallelism: bool
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool
    num_nodes: int
    num_gpus_per_node: int
    max_steps: int
    val_check_interval: int
    limit_test_batches: int
    pipeline_parallelism_type: Any = None
    expert_parallelism: int = 1
    precision: str = "bf16-mixed"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float = 1.0
    limit_val_batches: int = 32
    log_every_n_steps: int = 10


class ModelRecipe:
    """The recipes of one model.

    Args:
        row: of the table.
    """

    def __init__(self, row: RecipeRow) -> None:
        self._row = row

    def model(self) -> Any:
        """The model."""
        row = self._row
        return run.Config(getattr(models, row.model), config=run.Config(getattr(models, row.config)))

    def _options(self, **changes: Any) -> TrainerOptions:
        row, layout = self._row, self._row.layout
        options = TrainerOptions(
            tensor_parallelism=layout.tensor,
            pipeline_parallelism=layout.pipeline,
            virtual_pipeline_parallelism=layout.virtual,
            context_parallelism=layout.context,
            sequence_parallelism=layout.sequence,
            account_for_embedding_in_pipeline_split=layout.ends,
            account_for_loss_in_pipeline_split=layout.ends,
            num_nodes=layout.nodes,
            num_gpus_per_node=int(row.options.get("gpus", 8)),
            max_steps=int(row.options.get("steps", row.kind.steps)),
            val_check_interval=row.kind.validate,
            limit_test_batches=row.kind.test_batches,
        )
        return replace(options, **changes)

    def trainer(self, *, callbacks: list[Any] | None = None, **changes: Any) -> Any:
        """The trainer.

        Args:
            callbacks: of it.
            changes: fields of :class:`TrainerOptions`.
        """
        options = self._options(**changes)
        formats = {"bf16-mixed": bf16_mixed, "16-mixed": fp16_mixed}
        if options.precision not in formats:
            raise HexadError(
                f"{self._row.name}: found precision={options.precision!r}, expected one of "
                + ", ".join(formats)
            )
        if options.gradient_clip_val != 1.0:
            raise HexadError(
                f"{self._row.name}: found gradient_clip_val={options.gradient_clip_val!r}; set "
                "recipe.optim.config.clip_grad"
            )
        strategy = run.Config(
            MegatronStrategy,
            tensor_model_parallel_size=options.tensor_parallelism,
            pipeline_model_parallel_size=options.pipeline_parallelism,
            pipeline_dtype=options.pipeline_parallelism_type,
            virtual_pipeline_model_parallel_size=options.virtual_pipeline_parallelism,
            context_parallel_size=options.context_parallelism,
            sequence_parallel=options.sequence_parallelism,
            expert_model_parallel_size=options.expert_parallelism,
            account_for_embedding_in_pipeline_split=options.account_for_embedding_in_pipeline_split,
            account_for_loss_in_pipeline_split=options.account_for_loss_in_pipeline_split,
            ddp=run.Config(
                DistributedDataParallelConfig,
                check_for_nan_in_grad=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                average_in_collective=True,
                data_parallel_sharding_strategy="optim_grads_params",  # which fsdp="megatron" reads
            ),
        )
        return run.Config(
            Trainer,
            accelerator="gpu",
            accumulate_grad_batches=options.accumulate_grad_batches,
            callbacks=callbacks,
            devices=options.num_gpus_per_node,
            limit_test_batches=options.limit_test_batches,
            limit_val_batches=options.limit_val_batches,
            log_every_n_steps=options.log_every_n_steps,
            max_steps=options.max_steps,
            num_nodes=options.num_nodes,
            plugins=formats[options.precision](),
            strategy=strategy,
            use_distributed_sampler=False,
            val_check_interval=options.val_check_interval,
        )

    def pretrain_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        *,
        num_nodes: int | None = None,
        performance_mode: bool = False,
        fn: Callable[..., Any] = llm.pretrain,
        global_batch_size: int | None = None,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        warmup_steps: int | None = None,
        constant_steps: int = 0,
        min_lr: float | None = None,
        max_lr: float | None = None,
        **changes: Any,
    ) -> Any:
        """A recipe of ``llm.pretrain``, with counting numbers as data.

        Args:
            dir, name: of the run.
            num_nodes: None: the row's, of which those of NeMo that are made for one host have one.
            performance_mode: the settings that NeMo found fastest.
            fn: what is called.
            global_batch_size, micro_batch_size, seq_length: in place of the row's.
            warmup_steps, constant_steps, min_lr, max_lr: of the learning rate.
            changes: fields of :class:`TrainerOptions`.
        """
        row = self._row
        data = run.Config(
            MockDataModule,
            seq_length=seq_length or row.sequence,
            global_batch_size=global_batch_size or row.kind.batch,
            micro_batch_size=micro_batch_size or row.kind.micro,
        )
        if "tokenizer" in row.options:
            data.tokenizer = run.Config(AutoTokenizer, row.hub)
        callbacks = [run.Config(TimingCallback)]
        recipe = run.Partial(
            fn,
            model=self.model(),
            trainer=self.trainer(num_nodes=num_nodes or row.layout.nodes, callbacks=callbacks, **changes),
            data=data,
            log=default_log(dir=dir, name=name, tensorboard_logger=tensorboard_logger(name=name)),
            optim=distributed_fused_adam_with_cosine_annealing(
                max_lr=max_lr or float(row.options.get("lr", 3e-4)),
                min_lr=row.kind.min_lr if min_lr is None and max_lr is None else min_lr,
                warmup_steps=warmup_steps or row.kind.warmup,
                constant_steps=constant_steps,
            ),
            resume=default_resume(),
        )
        config, tokens = recipe.model.config, recipe.data.seq_length
        if "recompute" in row.options:
            config.recompute_granularity, config.recompute_method = "full", "uniform"
            config.recompute_num_layers = 1
        if row.kind.rank is not None or tokens > config.seq_length:
            config.seq_length = tokens
        return self.pretrain_performance_optimizations(recipe) if performance_mode else recipe

    def pretrain_performance_optimizations(self, recipe: Any) -> Any:
        """A recipe with ``performance_mode``."""
        if self._row.fast:
            _add_callbacks(recipe, garbage="bf16" in self._row.options)
            recipe.trainer.plugins.grad_reduce_in_fp32 = "bf16" not in self._row.options
        return recipe

    def finetune_recipe(
        self,
        dir: str | None = None,
        name: str = "default",
        *,
        resume_path: str | None = None,
        num_nodes: int | None = None,
        num_gpus_per_node: int | None = None,
        peft_scheme: str | None = "lora",
        seq_length: int | None = None,
        packed_sequence: bool | None = None,
        performance_mode: bool = False,
    ) -> Any:
        """A recipe of ``llm.finetune``.

        Args:
            dir, name: of the run.
            resume_path: the model, in place of the row's.
            num_nodes, num_gpus_per_node: in place of the row's.
            peft_scheme: ``lora``, or ``none`` for all weights.
            seq_length: tokens of a sample; by default 2048, and 4096 with ``packed_sequence``.
            packed_sequence: None: as ``performance_mode``; samples are packed in any case.
            performance_mode: the settings that NeMo found fastest.

        Raises:
            HexadError: another scheme.
        """
        row, scheme = self._row, (peft_scheme or "none").lower()
        if scheme not in ("none", *PEFT_STR2CLS):
            raise HexadError(f"{row.name}: found peft_scheme={peft_scheme!r}, expected lora or none")
        layout = row.tuned[scheme != "none", performance_mode]
        gpus = num_gpus_per_node or int(row.options.get("gpus", 8))
        path = resume_path or str(row.hub)
        recipe = default_finetune_recipe(self.model(), path, dir, name, num_nodes or layout.nodes, gpus)
        _set_layout(recipe.trainer.strategy, layout)
        recipe.data.global_batch_size = int(row.options.get("batch", 128))
        if row.kind.rank is not None:  # other kinds keep the model's own length
            packed = performance_mode if packed_sequence is None else packed_sequence
            tokens = seq_length or (4096 if packed and "batch" not in row.options else 2048)
            recipe.model.config.seq_length = recipe.data.seq_length = tokens
            if packed:
                recipe.data.packed_sequence_specs = run.Config(
                    PackedSequenceSpecs, packed_sequence_size=tokens
                )
        if scheme == "none":
            recipe.optim.config.lr = 5e-6
        else:
            self._add_adapters(recipe, scheme)
        if performance_mode and row.fast:
            _add_callbacks(recipe, garbage=True)
            fast = scheme == "none" or "bf16" in row.options
            recipe.trainer.plugins.grad_reduce_in_fp32 = not fast
            if scheme != "none":
                recipe.peft.target_modules = ["linear_qkv"]
        return recipe

    def _add_adapters(self, recipe: Any, scheme: str) -> None:
        row = self._row
        recipe.peft = run.Config(PEFT_STR2CLS[scheme])
        rank = row.options.get("rank", row.kind.rank)
        if rank is not None:
            recipe.peft.dim = int(rank)
        if row.kind.alpha is not None:
            recipe.peft.alpha = row.kind.alpha
            recipe.optim.config.use_distributed_optimizer = False
        if "targets" in row.options:
            recipe.peft.target_modules = row.options["targets"].split(",")


def _set_layout(strategy: Any, layout: RecipeLayout) -> None:
    strategy.tensor_model_parallel_size = layout.tensor
    strategy.pipeline_model_parallel_size = layout.pipeline
    strategy.virtual_pipeline_model_parallel_size = layout.virtual
    strategy.sequence_parallel = layout.sequence
    strategy.account_for_embedding_in_pipeline_split = layout.ends
    strategy.account_for_loss_in_pipeline_split = layout.ends


def _add_callbacks(recipe: Any, garbage: bool) -> None:
    """Add those of ``performance_mode``, which scripts look for."""
    callbacks = list(recipe.trainer.callbacks or [])
    if garbage:
        callbacks.append(run.Config(GarbageCollectionCallback, 100, 100))
    recipe.trainer.callbacks = [*callbacks, run.Config(MegatronCommOverlapCallback)]


_QWEN = {
    "qwen25_3b": "Qwen25Config3B",
    "qwen3_30b_a3b": "Qwen3Config30B_A3B",
    "qwen3_235b_a22b": "Qwen3Config235B_A22B",
}
"""Versions without a row of their own -> configurations."""


def _qwen_model(version: str) -> Any:
    """The model of a version, such as ``qwen2_7b``.

    Raises:
        HexadError: there is none.
    """
    known = {name: row.config for name, row in ROWS.items() if name.startswith("qwen")} | _QWEN
    if version not in known:
        raise HexadError(f"version: found {version!r}, expected one of {', '.join(sorted(known))}")
    kind = models.Qwen3Model if version.startswith("qwen3") else models.Qwen2Model
    return run.Config(kind, config=run.Config(getattr(models, known[version])))


def _qwen_trainer(*, max_steps: int = 1_168_251, val_check_interval: int = 2000, **changes: Any) -> Any:
    """The trainer of Qwen's recipes; see :meth:`ModelRecipe.trainer`."""
    recipe = ModelRecipe(ROWS["qwen3_600m"])
    return recipe.trainer(max_steps=max_steps, val_check_interval=val_check_interval, **changes)


def add_modules() -> None:
    """Give the modules of NeMo's recipes that are installed their functions."""
    for name, row in ROWS.items():
        recipe, module = ModelRecipe(row), sys.modules[f"nemo.collections.llm.recipes.{name}"]
        functions = ["model", "trainer", "pretrain_recipe", "pretrain_performance_optimizations"]
        functions += ["finetune_recipe"] if row.hub else []
        for function in functions:
            setattr(module, function, getattr(recipe, function))
        module.__dict__["NAME"] = name
    for family in ("qwen2", "qwen3"):
        module = sys.modules[f"nemo.collections.llm.recipes.{family}"]
        setattr(module, f"{family}_model", _qwen_model)
        setattr(module, f"{family}_trainer", _qwen_trainer)
