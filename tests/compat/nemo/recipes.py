"""A recipe in NeMo 2's words, in the ranks of a pool; and the same run by ``hexad train``."""

from pathlib import Path
from typing import Any

from ..lightning.program import launched

SIZES = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 24,
}
STEPS = 6


def objects(directory: str, data: Any, given: dict[str, Any], world: int, **trainer: Any) -> dict[str, Any]:
    """The arguments of ``llm.pretrain``."""
    from hexad.compat import nemo as nl
    from hexad.compat.megatron import OptimizerConfig
    from hexad.compat.nemo import llm

    options = {"max_steps": STEPS, "val_check_interval": 3, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    options |= {
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    }
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.5, use_distributed_optimizer=True)
    schedule = nl.lr_scheduler.CosineAnnealingScheduler(warmup_steps=2, constant_steps=0, min_lr=0.001)
    return {
        "model": llm.LlamaModel(llm.Llama3Config8B(**SIZES)),
        "data": data,
        "trainer": nl.Trainer(
            accelerator="cpu", devices=world, strategy=nl.MegatronStrategy(**given), **{**options, **trainer}
        ),
        "log": nl.NeMoLogger(
            "run", directory, use_datetime_version=False, ckpt=nl.ModelCheckpoint(every_n_train_steps=3)
        ),
        "optim": nl.MegatronOptimizerModule(config, schedule),
    }


def pretrained(
    directory: str,
    prefix: str,
    given: dict[str, Any],
    resume: dict[str, Any] | None = None,
    stop: int | None = None,
) -> dict[str, Any]:
    """Pretrain, until step ``stop`` if any; losses, rates, evaluations."""
    import torch.distributed as dist
    from lightning.pytorch import Callback

    from hexad.compat import nemo as nl
    from hexad.compat.nemo import llm

    seen: dict[str, Any] = {"losses": [], "rates": [], "val": []}

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen["losses"].append(float(trainer.callback_metrics["reduced_train_loss"]))
            seen["rates"].append(float(trainer.callback_metrics["lr"]))
            trainer.should_stop = trainer.global_step == stop

        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            seen["val"].append(float(trainer.callback_metrics["val_loss"]))

    with launched():
        world = dist.get_world_size() if dist.is_initialized() else 1
        tokenizer = nl.tokenizers.AutoTokenizer("byte")
        data = llm.PreTrainingDataModule(prefix, 24, tokenizer, 2, 8, split="8,2,0")
        parts = objects(directory, data, given, world, callbacks=[Seen()])
        if resume is not None:
            parts["resume"] = nl.AutoResume(**resume)
        place = llm.pretrain(**parts)
        seen["samples"] = parts["model"].engine.samples
        seen["kept"] = sorted(path.name for path in (Path(place) / "checkpoints").iterdir())
    return seen
