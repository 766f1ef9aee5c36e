"""A recipe's objects as Hexad's settings: what a ``run.yaml`` would say."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from hexad.config import HexadError, wording
from hexad.model.configuration import load_config

from ..megatron.arguments import defaults, derive_model
from ..megatron.data import Files, data_settings
from ..megatron.layout import layout_settings
from ..megatron.translate import Translation, model_settings
from .configs import Llama31Config
from .data import TextDataModule
from .gpt_config import GPTConfig, further_settings
from .models import GPTModel, activation
from .optim import MegatronOptimizerModule
from .places import models_directory
from .strategy import MegatronMixedPrecision, MegatronStrategy

_SAME = """
num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size normalization position_embedding_type
add_bias_linear add_qkv_bias qk_layernorm init_method_std hidden_dropout attention_dropout rotary_base
rotary_percent recompute_granularity recompute_method recompute_num_layers
""".split()
"""Fields of ``GPTConfig`` that attributes of Megatron-LM's flags are called like."""
_WORDS = {
    "--swiglu": "gated_linear_unit",
    "--disable-bias-linear": "add_bias_linear=False",
    "--norm-epsilon": "layernorm_epsilon",
    "--untie-embeddings-and-output-weights": "share_embeddings_and_output_weights=False",
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "--data-path": "paths",
}
"""Flags of Megatron-LM -> words of NeMo's where they differ."""
_FREE = {
    "hidden_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "seq_len_interpolation_factor": "rope_scaling",
}
"""Fields of ``GPTConfig`` -> settings of a model that count beside loaded weights too."""
_GPT2_IDS = 50257


def configure(trainer: Trainer, model: LightningModule, data: LightningDataModule | None) -> bool:
    """Give a language model the settings of its recipe; whether it is one, whose data Hexad's loader reads.

    Raises:
        HexadError: values that are not supported, or do not fit.
    """
    if not isinstance(model, GPTModel):
        return False
    if not isinstance(trainer.strategy, MegatronStrategy):
        raise HexadError(
            f"Trainer: found strategy {type(trainer.strategy).__name__} with a {type(model).__name__}; use "
            "MegatronStrategy"
        )
    if data is None and model.engine is not None:
        return True
    if not isinstance(data, TextDataModule):
        raise HexadError(
            f"data: found a {type(data).__name__}; use llm.PreTrainingDataModule, MockDataModule, "
            "FineTuningDataModule or ChatDataModule; for other data override HexadModule.train_dataloader"
        )
    trainer.strategy.shard_as(model)
    directory = str(trainer.default_root_dir)
    translation, tree = recipe_settings(trainer, model, data, directory)
    model.config = load_config(tree)
    tokenizer = tree["data"]["tokenizer"]
    model.files = [translation.write_files, *data.files(directory, tokenizer)]
    if not trainer.global_rank:
        model.files.append(partial(_write_settings, Path(directory), translation))
    return True


def _write_settings(directory: Path, translation: Translation) -> None:
    """Write the ``run.yaml`` that says what a recipe says."""
    directory.mkdir(parents=True, exist_ok=True)
    text = translation.yaml("a recipe by hexad.compat.nemo")
    (directory / "run.yaml").write_text(text, encoding="utf-8")


def recipe_settings(
    trainer: Trainer, model: GPTModel, data: TextDataModule, directory: str
) -> tuple[Translation, dict[str, Any]]:
    """A recipe as the groups of a ``run.yaml``. Model and layout are said in Megatron-Core's words, whose
    translation is that of Megatron-LM's interface; all else is NeMo's own.

    Args:
        directory: of the run.

    Raises:
        HexadError: values that are not supported.
    """
    strategy: Any = trainer.strategy
    arguments, steps = defaults(), trainer.max_steps
    if steps < 1:
        raise HexadError(f"Trainer: found max_steps={steps}; name the steps of the run")
    if trainer.accumulate_grad_batches != 1:
        raise HexadError(
            f"Trainer: found accumulate_grad_batches={trainer.accumulate_grad_batches}; set the data "
            "module's micro_batch_size and global_batch_size"
        )
    if not isinstance(model.optim, MegatronOptimizerModule):
        raise HexadError(
            f"optim: found {type(model.optim).__name__}, expected a MegatronOptimizerModule; for another, "
            "override configure_optimizers of the model"
        )
    _model(arguments, model.architecture)
    _data(arguments, model, data)
    _layout(arguments, strategy)
    notes, files = list[str](), Files()
    with wording(_word):
        derive_model(arguments, trainer.world_size)
        groups, vocab = data_settings(arguments, directory, notes, files, need_data=_named(arguments))
        settings = model_settings(arguments) | ({} if vocab is None else {"vocab": vocab})
        layout = layout_settings(arguments)
    tree = {
        "run": {
            "dir": directory,
            "seed": _seed(data),
            "steps": steps,
            "timeout": 60.0 * arguments.distributed_timeout_minutes,
        },
        "model": settings,
        "data": groups | data.settings(directory, groups["tokenizer"]),
        "batch": data.data_sampler.settings,
        **layout,
        "precision": _precision(trainer),
        "checkpoint": {"asynchronous": False},
        "log": {"every": max(1, int(trainer.log_every_n_steps))},  # type: ignore[attr-defined]
        "validate": _validation(trainer),
    }
    tree["parallel"] |= strategy.named
    for group, update in model.optim.settings(steps).items():
        tree[group] = {**tree.get(group, {}), **update}
    _weights(tree, model)
    return Translation(tree, tuple(notes), files), tree


def _seed(data: TextDataModule) -> int:
    """The seed of ``seed_everything``, else of the data module."""
    return int(os.environ.get("PL_GLOBAL_SEED", data.flags.get("seed", 1234)))


def _layout(arguments: Namespace, strategy: Any) -> None:
    """Set the attributes of degrees and stages."""
    named = strategy.named
    degrees = {"tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size"}
    degrees |= {"context": "context_parallel_size", "sequence": "sequence_parallel"}
    vars(arguments).update({name: named[axis] for axis, name in degrees.items()})
    vars(arguments).update({name: value for name, value in strategy.flags.items() if value})
    stages = named["virtual_stages"]
    arguments.num_virtual_stages_per_pipeline_rank = stages if stages > 1 else None


def _model(arguments: Namespace, config: GPTConfig) -> None:
    """Set the attributes of the architecture.

    Raises:
        HexadError: one that no family has.
    """
    for name in ("num_moe_experts", "mtp_num_layers", "transformer_layer_spec"):
        if getattr(config, name) is not None:
            raise HexadError(
                f"GPTConfig.{name}: found {getattr(config, name)}; it is not supported yet: use None"
            )
    vars(arguments).update(further_settings(config))
    vars(arguments).update({name: getattr(config, name) for name in _SAME})
    arguments.swiglu = activation(config) == "silu"
    arguments.norm_epsilon = config.layernorm_epsilon
    arguments.untie_embeddings_and_output_weights = not config.share_embeddings_and_output_weights
    arguments.max_position_embeddings = config.max_position_embeddings or config.seq_length
    arguments.group_query_attention = config.num_query_groups is not None
    arguments.num_query_groups = config.num_query_groups
    if config.window_size is not None:
        arguments.window_size = ",".join(map(str, config.window_size))
    if config.cp_comm_type is not None:
        arguments.cp_comm_type = [config.cp_comm_type]


def _data(arguments: Namespace, model: GPTModel, data: TextDataModule) -> None:
    """Set the attributes of data and tokenizer.

    Raises:
        HexadError: lengths that differ, or no tokenizer.
    """
    config, tokenizer = model.architecture, data.tokenizer or model.tokenizer
    if data.seq_length > config.seq_length:
        raise HexadError(
            f"seq_length: found {data.seq_length} in the data and {config.seq_length} in the model's "
            "configuration; make them equal"
        )
    vars(arguments).update(data.flags)
    arguments.seq_length = data.seq_length
    sampler = data.data_sampler
    arguments.micro_batch_size, arguments.global_batch_size = (
        sampler.micro_batch_size,
        sampler.global_batch_size,
    )
    if tokenizer is not None:
        vars(arguments).update(tokenizer.flags)
    elif arguments.mock_data:
        arguments.vocab_size = (config.vocab_size or _GPT2_IDS) - 1
    else:
        raise HexadError(
            "tokenizer: found none; pass one to the data module or the model, such as "
            "AutoTokenizer('DIR') or get_nmt_tokenizer(...)"
        )


def _named(arguments: Namespace) -> bool:
    return bool(arguments.mock_data or arguments.data_path or arguments.train_data_path)


def _validation(trainer: Trainer) -> dict[str, Any]:
    """The group ``validate``, as far as the trainer counts steps and batches."""
    every, batches = trainer.val_check_interval, trainer.limit_val_batches
    counts = {"every": every if batches else 0, "batches": batches or None}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def _precision(trainer: Trainer) -> dict[str, Any]:
    """The group ``precision``."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, MegatronMixedPrecision):
        return plugin.settings()
    if trainer.precision != "32-true":
        raise HexadError(
            f"Trainer: found precision={trainer.precision!r}; pass plugins=MegatronMixedPrecision(...)"
        )
    return {"dtype": "fp32"}


def _weights(tree: dict[str, Any], model: GPTModel) -> None:
    """Set what the flags do not say of a model, and what its weights begin with."""
    config, settings = model.architecture, tree["model"]
    if config.vocab_size is not None:
        settings["vocab"] = config.vocab_size
    if model.family is not None:
        settings["family"] = model.family
    if isinstance(config, Llama31Config):
        settings["rope_scaling"] = {
            "factor": config.scale_factor,
            "low_freq_factor": config.low_freq_factor,
            "high_freq_factor": config.high_freq_factor,
            "original_positions": config.old_context_len,
        }
    if model.weights is not None:
        # The files say what the model is; a recipe's own sizes are those of its class.
        tree["model"] = {"load": model.weights, **_beside_weights(config, settings)}
    if model.model_transform is not None:
        tree["model"]["lora"] = model.model_transform.settings()


def _beside_weights(config: GPTConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model that a recipe changes and its weights do not determine."""
    plain = type(config)()
    return {
        name: settings[name]
        for field, name in _FREE.items()
        if getattr(config, field) != getattr(plain, field) and name in settings
    }


def _word(name: str) -> str:
    """NeMo's word for a flag of Megatron-LM."""
    return _WORDS.get(name, name.removeprefix("--").replace("-", "_") if name.startswith("--") else name)


def weights_of(path: str) -> str:
    """``model.load`` of a path in NeMo's words: ``hf://ORG/NAME``, ``nemo://NAME``, a directory.

    Raises:
        HexadError: it is a checkpoint of NeMo.
    """
    kind, found, name = path.partition("://")
    if found and kind not in ("hf", "nemo"):
        raise HexadError(f"path: found {path}; use a directory, hf://ORG/NAME or nemo://NAME")
    if kind == "hf":
        return f"hf:{name}"
    place = models_directory() / name if kind == "nemo" else Path(path)
    if (place / "weights").is_dir() and (place / "context").is_dir():
        raise HexadError(
            f"path: {place} is a checkpoint of NeMo; convert it with 'hexad checkpoint import --from "
            f"megatron:{place}/weights --to DIR --model run.yaml' and name DIR"
        )
    return f"hf:{place}" if (place / "config.json").is_file() else str(place)
