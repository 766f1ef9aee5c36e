"""``nemo.collections.llm``: models, data, and what is done with them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from hexad.api import generate as generate_texts
from hexad.checkpoint.directory import find_checkpoint
from hexad.checkpoint.hugging_face.exporting import export_checkpoint
from hexad.checkpoint.hugging_face.importing import import_model
from hexad.checkpoint.kept_tokenizer import tokenizer_of_checkpoint
from hexad.checkpoint.manifest import read_manifest
from hexad.config import HexadError
from hexad.config.hub import PREFIX, local
from hexad.planning import resolve
from hexad.topology.layout import Layout

from ..facade import world
from ..facade.foreign_names import check_arguments
from . import models as peft
from .data import ChatDataModule, FineTuningDataModule, MockDataModule, PreTrainingDataModule
from .experiment import AutoResume, NeMoLogger, Trainer
from .models import *  # noqa: F403
from .models import GPTConfig, GPTModel, LoRA
from .optim import OptimizerModule
from .places import models_directory
from .recipe import weights_of
from .tables import ARGUMENTS
from .tokenizers import AutoTokenizer, TokenizerSpec

__all__ = [
    "ChatDataModule",
    "FineTuningDataModule",
    "MockDataModule",
    "PreTrainingDataModule",
    "export_ckpt",
    "finetune",
    "generate",
    "import_ckpt",
    "peft",
    "pretrain",
    "train",
    "validate",
]
__all__ += peft.__all__


def train(
    model: pl.LightningModule | str,
    data: pl.LightningDataModule,
    trainer: Trainer,
    log: NeMoLogger | None = None,
    resume: AutoResume | None = None,
    optim: OptimizerModule | None = None,
    tokenizer: TokenizerSpec | str | None = None,
    model_transform: LoRA | None = None,
) -> Path:
    """Train a model as a recipe says.

    Args:
        model: an ``llm.GPTModel``, or a LightningModule with NeMo's hooks; or the path of a checkpoint, whose
            weights and tokenizer it has.
        data: a data module of :mod:`hexad.compat.nemo.llm`; for a module with hooks any with a
            ``data_sampler``.
        trainer: with :class:`MegatronStrategy`.
        log: where it is logged and saved.
        resume: what it begins with.
        optim: in place of the model's.
        tokenizer: ``data`` or ``model``: whose counts; or one.
        model_transform: adapters.

    Returns:
        The directory of ``log``.

    Raises:
        HexadError: anything the user can fix; the same on every rank.
    """
    model = _model(model)
    place = _set_up(model, trainer, log, resume, optim)
    _set_tokenizer(model, data, tokenizer)
    _set_transform(model, model_transform)
    trainer.fit(model, datamodule=data)
    return place


def pretrain(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: Trainer,
    log: NeMoLogger | None = None,
    resume: AutoResume | None = None,
    optim: OptimizerModule | None = None,
) -> Path:
    """Train a model with the data's tokenizer; see :func:`train`."""
    return train(model, data, trainer, log, resume, optim, "data")


def finetune(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: Trainer,
    log: NeMoLogger | None = None,
    resume: AutoResume | None = None,
    optim: OptimizerModule | None = None,
    peft: LoRA | None = None,
    tokenizer: TokenizerSpec | str | None = "model",
) -> Path:
    """Train a model with its own tokenizer, from the weights that ``resume`` names, or adapters ``peft`` of
    them; see :func:`train`."""
    return train(model, data, trainer, log, resume, optim, tokenizer, peft)


def validate(
    model: pl.LightningModule | str,
    data: pl.LightningDataModule,
    trainer: Trainer,
    log: NeMoLogger | None = None,
    resume: AutoResume | None = None,
    optim: OptimizerModule | None = None,
    tokenizer: TokenizerSpec | str | None = None,
    model_transform: LoRA | None = None,
) -> Path:
    """Evaluate a model; see :func:`train`."""
    model = _model(model)
    place = _set_up(model, trainer, log, resume, optim)
    _set_tokenizer(model, data, tokenizer)
    _set_transform(model, model_transform)
    trainer.validate(model, datamodule=data)
    return place


def _model(model: Any) -> Any:
    """The model, that of a checkpoint's path included."""
    if not isinstance(model, str | Path):
        return model
    weights = weights_of(str(model))
    # What is loaded says what it is; no sample is too long for this.
    loaded = GPTModel(GPTConfig(num_layers=1, hidden_size=64, num_attention_heads=1, seq_length=2**24))
    loaded.weights = weights
    if weights.startswith(PREFIX):
        loaded.tokenizer = AutoTokenizer(weights.removeprefix(PREFIX))
    else:
        path = find_checkpoint(weights)
        loaded.tokenizer = AutoTokenizer(tokenizer_of_checkpoint(path, read_manifest(path).config))
    return loaded


def _set_up(
    model: Any,
    trainer: Trainer,
    log: NeMoLogger | None,
    resume: AutoResume | None,
    optim: OptimizerModule | None,
) -> Path:
    """Give trainer and model what a recipe says beside them; returns the directory."""
    if not isinstance(model, pl.LightningModule):
        raise HexadError(
            f"model: found {model!r}; pass llm.LlamaModel(...) or another, or a checkpoint's path"
        )
    state = (log or NeMoLogger()).setup(trainer, resume is not None and resume.resume_if_exists)
    if resume is not None:
        resume.setup(trainer, model)
    if optim is not None:
        optim.connect(model)  # type: ignore[attr-defined]
    place: Path = state.log_dir
    return place


def _set_tokenizer(model: Any, data: Any, tokenizer: TokenizerSpec | str | None) -> None:
    """Give model and data one tokenizer."""
    chosen = {"data": getattr(data, "tokenizer", None), "model": getattr(model, "tokenizer", None)}
    if isinstance(tokenizer, str):
        if tokenizer not in chosen:
            raise HexadError(f"tokenizer: found {tokenizer!r}; use data, model, or a tokenizer")
        tokenizer = chosen[tokenizer]
    if tokenizer is not None:
        model.tokenizer = data.tokenizer = tokenizer


def _set_transform(model: Any, transform: LoRA | None) -> None:
    """Give a model adapters."""
    if transform is None:
        return
    if not isinstance(model, GPTModel):
        raise HexadError(f"model_transform: found with a {type(model).__name__}; it is for an llm.GPTModel")
    model.model_transform = transform


def import_ckpt(
    model: pl.LightningModule, source: str, output_path: str | Path | None = None, overwrite: bool = False
) -> Path:
    """Convert a model of Hugging Face's format to a checkpoint; returns its directory, which
    ``RestoreConfig(path=...)`` takes.

    Args:
        model: accepted without effect: the files say what it is.
        source: ``hf://ORG/NAME``, or ``hf://`` and a directory.
        output_path: the directory to write; by default the name's in ``$NEMO_HOME/models``.
        overwrite: replace it.

    Raises:
        HexadError: it cannot be read, or the directory is not empty.
    """
    name = source.partition("://")[2] or source
    place = Path(output_path or models_directory() / name)
    if overwrite and (place / "manifest.json").is_file():
        shutil.rmtree(place)
    directory = name if Path(name).is_dir() else local(weights_of(source)).removeprefix(PREFIX)
    import_model(Path(directory), place, lambda config: resolve(config, Layout(world=1)))
    return place


def export_ckpt(
    path: str | Path,
    target: str,
    output_path: str | Path | None = None,
    overwrite: bool = False,
    load_connector: Any = None,
    modelopt_export_kwargs: Any = None,
) -> Path:
    """Write a checkpoint as a Hugging Face model; returns its directory.

    Args:
        path: of a checkpoint, or the ``checkpoints`` of an experiment.
        target: ``hf``.
        output_path: the directory to write; by default ``hf`` in the checkpoint's.
        overwrite: replace it.
        load_connector, modelopt_export_kwargs: accepted without effect.

    Raises:
        HexadError: it cannot be read or written.
    """
    if target != "hf":
        raise HexadError(f"export_ckpt: found target={target!r}, expected hf")
    checkpoint = find_checkpoint(str(path))
    place = Path(output_path or checkpoint.parent / f"{checkpoint.name}-hf")
    if overwrite and (place / "config.json").is_file():
        shutil.rmtree(place)
    export_checkpoint(checkpoint, place)
    return place


def generate(
    path: str | Path,
    trainer: Trainer | None = None,
    prompts: Sequence[str] | None = None,
    *,
    max_batch_size: int = 4,
    random_seed: int | None = None,
    inference_params: Any = None,
    text_only: bool = False,
    **others: Any,
) -> list[Any]:
    """Continue prompts with a checkpoint; the texts with ``text_only``, else
    :class:`~hexad.generation.texts.Continuation`. All ranks call this together.

    Args:
        path: of the checkpoint.
        trainer: whose strategy names the layout.
        prompts: texts.
        max_batch_size: texts written at once.
        random_seed: of sampling.
        inference_params: with ``temperature``, ``top_k``, ``top_p`` and ``num_tokens_to_generate``.
        others: NeMo 2's, without effect.

    Raises:
        HexadError: the model or a prompt cannot be used.
    """
    check_arguments("generate", others, ARGUMENTS["generate"])
    for name in ("return_log_probs", "num_tokens_total", "top_n_logprobs"):
        if value := getattr(inference_params, name, None):
            raise HexadError(f"generate: found inference_params.{name}={value!r}; it is not supported")
    if prompts is None:
        raise HexadError("generate: found prompts=None; pass a list of texts")
    read = partial(getattr, inference_params)
    temperature, top_k, top_p = read("temperature", 1.0), read("top_k", 0), read("top_p", 0.0)
    named: Mapping[str, Any] = getattr(getattr(trainer, "strategy", None), "named", {})
    layout = [f"parallel.{name}={named[name]}" for name in ("tensor", "pipeline") if name in named]
    results = generate_texts(
        path,
        list(prompts),
        tokens=read("num_tokens_to_generate", 30) or 30,
        temperature=0.0 if top_k == 1 else temperature,
        top_k=0 if top_k == 1 else top_k,
        top_p=top_p or 1.0,
        seed=1234 if random_seed is None else random_seed,
        overrides=[*layout, f"inference.sequences={max_batch_size}"],
    )
    world.join()  # the generator has left it, and scripts ask for their rank
    return [result.text for result in results] if text_only else results
