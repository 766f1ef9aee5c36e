"""Conversion of DeepSpeed's checkpoints: weights, Adam's moments and progress."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hexad.checkpoint.hugging_face.importing import check_target, with_precision
from hexad.checkpoint.hugging_face.names import (
    HEAD,
    PublishedForm,
    PublishedTensor,
    assembled,
    located,
    published_tensors,
)
from hexad.checkpoint.tensor_file import SAFETENSORS, dtype_name
from hexad.config import Config, HexadError
from hexad.config.model import ModelSettings
from hexad.model.configuration import build_config
from hexad.model.trained import Trained
from hexad.parallel.rectangle import Rectangle

from ..facade.imported import ForeignTensor, ImportResult, model_directory, published_config, write_import
from .saved_state import SavedState, SavedTensor
from .zero_files import FOLDER, read_universal, read_zero

_LATEST = ("latest", "latest_universal")


def tag_directory(source: Path) -> Path:
    """The directory with a checkpoint's files: the one that ``latest`` in ``source`` names, or ``source``."""
    if not source.is_dir():
        problem = "is a file" if source.exists() else "no such directory"
        raise HexadError(f"{source}: {problem}; expected the directory of a DeepSpeed checkpoint")
    named = next((source / name for name in _LATEST if (source / name).is_file()), None)
    if named is None:
        return source
    try:
        tag = named.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise HexadError(f"{named}: cannot be read: {error}") from None
    if not tag or Path(tag).name != tag or not (source / tag).is_dir():
        raise HexadError(
            f"{named}: found {tag!r}, which is no directory in {source}; name the tag's directory"
        )
    return source / tag


def read_state(source: Path) -> SavedState:
    """The state in a checkpoint's directory, or one of its tags; sizes are checked, values read when needed.

    Raises:
        HexadError: a file is missing, damaged, of another checkpoint, or could run code; or the state is of a
            kind that is not read.
    """
    directory = tag_directory(source)
    state = read_universal(directory) if (directory / FOLDER).is_dir() else read_zero(directory)
    state.check()
    return state


def import_checkpoint(
    source: Path,
    to: Path,
    check: Callable[[Config], object],
    model: Path | None = None,
    weights_only: bool = False,
) -> ImportResult:
    """Write a checkpoint with the state that DeepSpeed saved. Of the tensors, one is in memory at a time.

    Args:
        source: DeepSpeed's directory, or that of a tag.
        to: the checkpoint's directory; it is renamed into place when all is on disk.
        check: refuses a configuration that this version cannot run.
        model: the Hugging Face directory (or ``config.json``) of the model that was trained, which Hexad then
            trains as its own; None: the names stay those of the module, for an engine over the same module.
        weights_only: leave out optimizer state and progress.

    Raises:
        HexadError: as for :func:`read_state`; there are no Adam moments; the model is not supported, or not
            that of the state; or ``to`` is not empty or cannot be written.
    """
    check_target(to)
    folder = None if model is None else model_directory(model)
    state = read_state(source)
    if weights_only:
        state.moments, state.progress = {}, {"step": 0, "updates": 0, "samples": 0}
    elif not state.moments:
        problem = state.lacking or "holds no exp_avg and exp_avg_sq of all parameters"
        raise HexadError(f"{state.directory}: {problem}; add --weights-only to import the weights")
    else:
        state.progress["optimizer"] = _numbers(state)
    if folder is None:
        return write_import(list(_of_module(state)), to, source, state.progress)
    config = with_precision(_config(published_config(folder), state), state.dtype)
    entries, trained = _of_model(state, config.model)
    config = _freezing(config, trained)
    check(config)
    return write_import(entries, to, source, state.progress, config, folder)


def _numbers(state: SavedState) -> dict[str, Any]:
    """The settings and counts that an optimizer of ``torch.optim`` resumes from."""
    settings = ("lr", "initial_lr", "betas", "eps", "weight_decay")
    plain = (int, float, tuple, list)
    groups = [
        {name: group[name] for name in settings if isinstance(group.get(name), plain)}
        for group in state.groups
    ]
    return {"groups": groups, "counts": {"step": {"tensor": float(state.progress["updates"])}}}


def _kinds(state: SavedState) -> dict[str, dict[str, SavedTensor]]:
    """The tensors of a state by the prefix of our names for them."""
    return {
        "model": state.weights,
        **{f"optimizer.{kind}": tensors for kind, tensors in state.moments.items()},
    }


def _of_module(state: SavedState) -> Iterator[ForeignTensor]:
    """The tensors under the module's names, as an engine keeps those of plain modules: single values as
    vectors of one, complex ones as pairs, and none that are empty."""
    for kind, tensors in _kinds(state).items():
        for name, saved in tensors.items():
            if not saved.numel:
                continue
            dtype, shape = saved.dtype, saved.shape or (1,)
            if dtype.is_complex:
                dtype, shape = dtype.to_real(), (*shape, 2)
            if dtype not in SAFETENSORS:
                known = ", ".join(dtype_name(supported) for supported in SAFETENSORS)
                raise HexadError(f"{saved.file}: {name} is {dtype_name(dtype)}; supported: {known}")

            def read(name: str = name, saved: SavedTensor = saved) -> Tensor:
                values = saved.read(name)
                return torch.view_as_real(values) if values.is_complex() else values

            yield ForeignTensor(f"{kind}.{name}", shape, dtype, read)


def _of_model(state: SavedState, model: ModelSettings) -> tuple[list[ForeignTensor], list[str] | None]:
    """The tensors under the names of the model that the settings describe, and which of its weights have
    moments; None: all."""
    tensors = published_tensors(model)
    _unwrap(state, tensors["embedding.weight"].forms[0][0].name)
    forms = located(tensors, state.weights, model, state.directory)
    if model.tied_embeddings and HEAD in state.weights:
        raise HexadError(
            f"{state.directory}: found {HEAD} with values of its own, but config.json says "
            "tie_word_embeddings; set it to false there"
        )
    kinds = _kinds(state)

    @lru_cache(maxsize=1)  # several of our tensors may be parts of one of theirs
    def whole(kind: str, name: str) -> Tensor:
        return kinds[kind][name].read(name)

    entries, trained = [], []
    for kind, held in kinds.items():
        for ours, form in forms.items():
            saved = [held.get(part.name) for part in form]
            if not any(saved):
                continue
            dtype = _checked(list(zip(form, saved)))
            if kind != "model":
                trained.append(ours)

            read = partial(_values, form, tensors[ours].shape, dtype, partial(whole, kind))
            entries.append(ForeignTensor(f"{kind}.{ours}", tensors[ours].shape, dtype, read))
    complete = not state.moments or set(trained) == set(tensors)
    return entries, None if complete else sorted(set(trained))


def _values(
    form: PublishedForm, shape: tuple[int, ...], dtype: torch.dtype, whole: Callable[[str], Tensor]
) -> Tensor:
    """One of our tensors, from the complete tensors of its parts."""

    def read(part: PublishedTensor, rectangle: Rectangle) -> Tensor:
        return part.ours(whole(part.name)[part.place(rectangle)], rectangle)

    return assembled(form, Rectangle.whole("", shape), read, dtype)


def _checked(parts: Sequence[tuple[PublishedTensor, SavedTensor | None]]) -> torch.dtype:
    """Check that all parts of one of our tensors are there, in their shapes; returns a format that holds
    all."""
    file = next(saved.file for _, saved in parts if saved is not None)
    dtypes = []
    for part, saved in parts:
        if saved is None:
            raise HexadError(f"{file}: {part.name} is missing beside others of its layer")
        if saved.shape != part.stored_shape:
            raise HexadError(
                f"{saved.file}: {part.name} has shape {saved.shape}, the model has {part.stored_shape}"
            )
        dtypes.append(saved.dtype)
    return reduce(torch.promote_types, dtypes)


def _unwrap(state: SavedState, embedding: str) -> None:
    """Remove the prefix of a state's names where the model is a submodule, by the published name of the
    embedding."""
    prefix = next((name.removesuffix(embedding) for name in state.weights if name.endswith(embedding)), "")
    for tensors in (state.weights, *state.moments.values()):
        short = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(short)


def _config(tree: dict[str, Any], state: SavedState) -> Config:
    """The settings of a model, and those of the optimizer in the state."""
    groups = [group for group in state.groups if {"betas", "eps", "weight_decay"} <= group.keys()]
    if groups and state.moments:
        tree["optimizer"] = {
            "betas": list(groups[0]["betas"]),
            "eps": groups[0]["eps"],
            "weight_decay": max(group["weight_decay"] for group in groups),
        }
    return build_config(tree)


def _freezing(config: Config, trained: list[str] | None) -> Config:
    """The configuration that trains only the weights with moments."""
    if trained is None:
        return config
    tree = config.model_dump(mode="json", by_alias=True)
    tree["model"]["train"] = trained
    config = build_config(tree)
    frozen = Trained.of(config.model).frozen
    selected = [name for name in published_tensors(config.model) if not frozen(name)]
    if sorted(selected) != trained:
        other = next(iter(set(selected) ^ set(trained)))
        raise HexadError(
            f"model.train: {other} cannot be distinguished from the weights that were frozen in DeepSpeed"
        )
    return config
