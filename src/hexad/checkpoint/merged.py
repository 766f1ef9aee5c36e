"""A checkpoint's weights as one complete model: adapters are added, slice by slice, to the weights that they
belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch

from hexad.config import Config, HexadError, blaming
from hexad.model.inventory import ModelInventory
from hexad.model.pretrained import hugging_face_directory
from hexad.parallel.rectangle import Rectangle

from .base import Base, absolute
from .directory import check_same_model, find_checkpoint
from .hugging_face.weights import opened_model
from .manifest import manifest_checksum
from .reader import Checkpoint


class Weights(Protocol):
    """Global tensors of a model, by our names."""

    @property
    def weights_only(self) -> bool:
        """Whether they are no run's, but an imported model's."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The format in which a tensor is stored."""
        ...

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing or has another shape.

        Raises:
            HexadError: naming it.
        """
        ...

    def read(self, name: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A rectangle of a tensor.

        Raises:
            HexadError: it is damaged or cannot be read.
        """
        ...


class _Saved:
    """Of a checkpoint that holds them all."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.weights_only = checkpoint.manifest.weights_only

    def holds(self, name: str) -> bool:
        return f"model.{name}" in self._checkpoint.manifest.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.manifest.tensors[f"model.{name}"].shape

    def dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._checkpoint.manifest.tensors[f"model.{name}"].dtype)
        return found

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = self._checkpoint.manifest.tensors.get(f"model.{name}")
        if tensor is None or tensor.shape != shape:
            problem = "is missing" if tensor is None else f"has shape {tensor.shape}"
            raise HexadError(
                f"checkpoint {self._checkpoint.path}: tensor model.{name} {problem}, the model has {shape}"
            )

    def read(self, name: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return self._checkpoint.read(f"model.{name}", offset, sizes)


class _Published:
    """Of a Hugging Face directory."""

    weights_only = True

    def __init__(self, directory: Path, config: Config, stack: ExitStack) -> None:
        self._model, self.identity = stack.enter_context(opened_model(directory, config.model))

    def dtype(self, name: str) -> torch.dtype:
        return self._model.dtypes[name]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """All have been checked when the directory was opened."""

    def read(self, name: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        rectangle = Rectangle(name, self._model.tensors[name].shape, tuple(offset), tuple(sizes))
        return self._model.read(rectangle)


class _Merged:
    """``W + scale * B A``, in at least float32, of a checkpoint's adapters and the weights that they belong
    to; weights that were trained besides are the checkpoint's."""

    weights_only = False

    def __init__(self, own: _Saved, base: Weights, config: Config) -> None:
        self._own, self._base = own, base
        lora = ModelInventory(config.model).trained.lora
        assert lora is not None
        self._scale = lora.scale

    def _of(self, name: str) -> Weights:
        return self._own if self._own.holds(name) else self._base

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype(name)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self._of(name).check(name, shape)

    def read(self, name: str, offset: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        values, module = self._of(name).read(name, offset, sizes), name.removesuffix(".weight")
        first, second = f"{module}.lora_a", f"{module}.lora_b"
        if not self._own.holds(first):
            return values
        rank = self._own.shape(first)[0]
        a = self._own.read(first, (0, offset[1]), (rank, sizes[1]))
        b = self._own.read(second, (offset[0], 0), (sizes[0], rank))
        wide = torch.promote_types(torch.promote_types(values.dtype, a.dtype), torch.float32)
        return torch.addmm(values.to(wide), b.to(wide), a.to(wide), alpha=self._scale)


@contextmanager
def opened_weights(checkpoint: Checkpoint, config: Config, load: str | None = None) -> Iterator[Weights]:
    """The weights of an opened checkpoint: its own, or merged from its adapters and their base.

    Args:
        checkpoint: opened.
        config: its own.
        load: where the base is, as ``model.load``, if it is not where the checkpoint says.

    Raises:
        HexadError: the base is missing, damaged, or not what the adapters were trained with; the adapters
            belong to initial values; or ``load`` is given and there are no adapters.
    """
    own, base = _Saved(checkpoint), Base.of(checkpoint.manifest)
    if base is None:
        if load is not None:
            raise HexadError(
                f"--base: checkpoint {checkpoint.path} has no adapters (model.lora); leave it out"
            )
        yield own
        return
    name = base.load if load is None else load
    if name is None:
        raise HexadError(
            f"checkpoint {checkpoint.path}: its adapters belong to initial values, not to weights that were "
            "loaded (model.load); there is no model to merge them with"
        )
    with ExitStack() as stack:
        source: Weights
        with blaming("model.load" if load is None else "--base"):
            directory = hugging_face_directory(name)
            if directory is not None:
                published = _Published(directory, config, stack)
                source, identity = published, published.identity
            else:
                path = find_checkpoint(name)
                opened = stack.enter_context(Checkpoint(path))
                check_same_model(path, opened.manifest.config, config, adapters=False)
                source, identity = _Saved(opened), (manifest_checksum(path) or b"").hex()
        base.check(Base(absolute(name), identity))
        yield _Merged(own, source, config)
