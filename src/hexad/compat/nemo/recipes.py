"""What NeMo 2's recipes are made of, for NeMo-Run: configurations of logger, optimizer and precision."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import nemo_run as run
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from ..megatron.settings import OptimizerConfig
from .callbacks import TimingCallback
from .data import FineTuningDataModule, PackedSequenceSpecs
from .experiment import AutoResume, ModelCheckpoint, NeMoLogger, RestoreConfig, Trainer
from .llm import finetune
from .optim import CosineAnnealingScheduler, MegatronOptimizerModule
from .places import datasets_directory
from .strategy import MegatronMixedPrecision, MegatronStrategy


def tensorboard_logger(name: str, save_dir: str = "tb_logs") -> Any:
    """A TensorBoard logger."""
    return run.Config(TensorBoardLogger, save_dir=save_dir, name=name)


def wandb_logger(project: str, name: str, entity: str | None = None) -> Any:
    """A Weights & Biases logger."""
    named = {} if entity is None else {"entity": entity}
    return run.Config(WandbLogger, project=project, name=name, config={}, **named)


def default_log(
    dir: str | None = None, name: str = "default", tensorboard_logger: Any = None, wandb_logger: Any = None
) -> Any:
    """A logger that saves every quarter of an hour."""
    checkpoints = run.Config(
        ModelCheckpoint,
        save_last=True,
        save_top_k=10,
        train_time_interval=run.Config(timedelta, minutes=15),
        filename="{model_name}--{val_loss:.2f}-{step}-{consumed_samples}",
    )
    loggers = {"tensorboard": tensorboard_logger, "wandb": wandb_logger}
    return run.Config(NeMoLogger, ckpt=checkpoints, name=name, log_dir=dir, **loggers)


def default_resume(resume_if_exists: bool = True, resume_ignore_no_checkpoint: bool = True) -> Any:
    """What a run begins with."""
    return run.Config(
        AutoResume, resume_if_exists=resume_if_exists, resume_ignore_no_checkpoint=resume_ignore_no_checkpoint
    )


def nemo_resume(model_id: str) -> Any:
    """What a fine-tuning run begins with: weights that ``llm.import_ckpt`` has written."""
    return run.Config(AutoResume, restore_config=run.Config(RestoreConfig, path=f"nemo://{model_id}"))


def distributed_fused_adam_with_cosine_annealing(
    precision: str = "bf16-mixed",
    warmup_steps: int = 2000,
    constant_steps: int = 0,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    max_lr: float = 1e-4,
    min_lr: float | None = None,
    clip_grad: float = 1.0,
) -> Any:
    """AdamW with a cosine."""
    config = run.Config(
        OptimizerConfig,
        optimizer="adam",
        lr=max_lr,
        weight_decay=0.1,
        bf16=precision == "bf16-mixed",
        fp16=precision == "16-mixed",
        adam_beta1=adam_beta1,
        adam_beta2=adam_beta2,
        adam_eps=1e-5,
        use_distributed_optimizer=True,
        clip_grad=clip_grad,
    )
    schedule = run.Config(
        CosineAnnealingScheduler,
        warmup_steps=warmup_steps,
        constant_steps=constant_steps,
        min_lr=0.1 * max_lr if min_lr is None else min_lr,
    )
    return run.Config(MegatronOptimizerModule, config=config, lr_scheduler=schedule)


def default_finetune_recipe(
    model: Any,
    resume_path: str,
    dir: str | None = None,
    name: str = "default",
    num_nodes: int = 1,
    num_gpus_per_node: int = 8,
    packed_sequence: bool = False,
    tokenizer: Any = "model",
) -> Any:
    """A recipe of ``llm.finetune``; set ``recipe.data.dataset_root``, or ``recipe.data``: by default the
    directory in which NeMo keeps SQuAD. Samples are packed in any case; ``packed_sequence`` has the smaller
    steps of NeMo's packed ones."""
    packed = run.Config(PackedSequenceSpecs, packed_sequence_size=2048) if packed_sequence else None
    strategy = run.Config(
        MegatronStrategy,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        sequence_parallel=False,
    )
    trainer = run.Config(
        Trainer,
        accelerator="gpu",
        accumulate_grad_batches=1,
        devices=num_gpus_per_node,
        limit_val_batches=None,
        log_every_n_steps=1,
        max_steps=1000,
        num_nodes=num_nodes,
        plugins=bf16_mixed(),
        strategy=strategy,
        use_distributed_sampler=False,
        val_check_interval=30,
        callbacks=[run.Config(TimingCallback)],
    )
    return run.Partial(
        finetune,
        model=model,
        trainer=trainer,
        data=run.Config(
            FineTuningDataModule,
            dataset_root=str(datasets_directory() / "squad"),
            seq_length=2048,
            global_batch_size=8 if packed_sequence else 128,
            micro_batch_size=1,
            packed_sequence_specs=packed,
        ),
        log=default_log(dir, name, tensorboard_logger(name)),
        optim=distributed_fused_adam_with_cosine_annealing(
            max_lr=1e-4, min_lr=0, warmup_steps=50, adam_beta2=0.98
        ),
        resume=nemo_resume(resume_path),
        tokenizer=tokenizer,
    )


def bf16_mixed() -> Any:
    """Products in bf16."""
    return run.Config(MegatronMixedPrecision, precision="bf16-mixed", grad_reduce_in_fp32=True)


def fp16_mixed() -> Any:
    """Products in fp16."""
    return run.Config(MegatronMixedPrecision, precision="16-mixed", grad_reduce_in_fp32=False)


def _fp8(precision: Any, recipe: str, layers_in_bf16: int = 0) -> Any:
    """Products in fp8, scaled as a recipe of Transformer Engine says; Hexad has one way of scaling.

    Args:
        precision: the other format.
        recipe: its name, without effect.
        layers_in_bf16: first and last ones, which are refused.
    """
    precision.fp8, precision.fp8_recipe = "hybrid", recipe
    if layers_in_bf16:
        precision.first_last_layers_bf16 = True
        precision.num_layers_at_start_in_bf16 = precision.num_layers_at_end_in_bf16 = layers_in_bf16
    return precision


def bf16_with_fp8_mixed() -> Any:
    """Products in fp8."""
    return _fp8(bf16_mixed(), "delayed")


def bf16_with_mxfp8_mixed() -> Any:
    """Products in fp8."""
    return _fp8(bf16_mixed(), "mxfp8")


def bf16_with_fp8_current_scaling_mixed() -> Any:
    """Products in fp8, without those of the first and last layer, which is refused unless
    ``first_last_layers_bf16`` is set to False."""
    return _fp8(bf16_mixed(), "tensorwise", 1)


def nemotron_h_bf16_with_fp8_current_scaling_mixed() -> Any:
    """Products in fp8, without those of the first two and last two layers, see
    :func:`bf16_with_fp8_current_scaling_mixed`."""
    return _fp8(bf16_mixed(), "tensorwise", 2)


def nanov2_bf16_with_fp8_current_scaling_mixed() -> Any:
    """Products in fp8, scaled by blocks, without those of the first two and last two layers, see
    :func:`bf16_with_fp8_current_scaling_mixed`."""
    return _fp8(bf16_mixed(), "blockwise", 2)


def bf16_with_fp8_subchannel_scaling_mixed() -> Any:
    """Products in fp8."""
    return _fp8(bf16_mixed(), "blockwise")


def fp16_with_fp8_mixed() -> Any:
    """Products in fp8 with fp16, which is refused when it is used: fp8 needs bf16."""
    return _fp8(fp16_mixed(), "delayed")


fp16_with_mxfp8_mixed = fp16_with_fp8_mixed
fp16_with_fp8_current_scaling_mixed = fp16_with_fp8_mixed
fp16_with_fp8_subchannel_scaling_mixed = fp16_with_fp8_mixed


def torchrun(devices: int | None = None) -> Any:
    """An executor that starts ranks on this host by torchrun; by default one for each GPU, or one."""
    ranks = torch.cuda.device_count() if devices is None else devices
    return run.Config(run.LocalExecutor, ntasks_per_node=ranks or 1, launcher="torchrun", env_vars={})
