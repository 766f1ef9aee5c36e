"""A checkpoint's weights as one complete model: adapters are added, slice by slice, to the weights that they
belong to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.config import Config, HexadError, blaming
from hexad.model.inventory import ModelInventory
from hexad.model.pretrained import hugging_face_directory
from hexad.parallel.rectangle import Rectangle

from .base import Base, absolute, manifest_identity
from .directory import check_same_model, find_checkpoint
from .hugging_face.weights import HuggingFaceModel, opened_model
from .reader import Checkpoint


@dataclass(frozen=True)
class StoredWeights:
    """Global tensors of a model, by our names.

    Attributes:
        where: they are, for messages.
        weights_only: whether they are no run's, but an imported model's.
        tensors: the format and shape in which each is stored.
        read: reads a rectangle (name, offset, sizes) of a tensor; a HexadError says that it is damaged.
    """

    where: str
    weights_only: bool
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    read: Callable[[str, Sequence[int], Sequence[int]], Tensor]

    def dtype(self, name: str) -> torch.dtype:
        """The format in which a tensor is stored."""
        return self.tensors[name][0]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing or has another shape.

        Raises:
            HexadError: naming it.
        """
        stored = self.tensors[name][1] if name in self.tensors else None
        if stored != shape:
            problem = "is missing" if stored is None else f"has shape {stored}"
            raise HexadError(f"{self.where}: tensor model.{name} {problem}, the model has {shape}")


def _saved(checkpoint: Checkpoint) -> StoredWeights:
    """The weights that a checkpoint itself holds."""
    tensors = {
        name.removeprefix("model."): (getattr(torch, tensor.dtype), tensor.shape)
        for name, tensor in checkpoint.manifest.tensors.items()
        if name.startswith("model.")
    }

    def read(name: str, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return checkpoint.read(f"model.{name}", offset, sizes)

    return StoredWeights(f"checkpoint {checkpoint.path}", checkpoint.manifest.weights_only, tensors, read)


def published_weights(model: HuggingFaceModel) -> StoredWeights:
    """The weights of a Hugging Face directory."""
    tensors = {name: (model.dtypes[name], place.shape) for name, place in model.tensors.items()}

    def read(name: str, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return model.read(Rectangle(name, tensors[name][1], tuple(offset), tuple(sizes)))

    return StoredWeights(str(model.directory), True, tensors, read)


def _merged(adapters: StoredWeights, base: StoredWeights, config: Config) -> StoredWeights:
    """``W + scale * B A``, in at least float32, of a checkpoint's adapters and the weights that they belong
    to; weights that were trained besides are the checkpoint's."""
    lora = ModelInventory(config.model).trained.lora
    assert lora is not None

    def read(name: str, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
        values = (adapters if name in adapters.tensors else base).read(name, offset, sizes)
        first, second = (f"{name.removesuffix('.weight')}.lora_{which}" for which in "ab")
        if first not in adapters.tensors:
            return values
        stacked = len(offset) > 2  # a product for each expert: of all [experts], then as for a matrix
        rank = adapters.tensors[first][1][-2 if stacked else 0]
        before, parts = (tuple(offset[:1]), tuple(sizes[:1])) if stacked else ((), ())
        a = adapters.read(first, (*before, 0, offset[-1]), (*parts, rank, sizes[-1]))
        b = adapters.read(second, (*offset[:-1], 0), (*sizes[:-1], rank))
        wide = torch.promote_types(torch.promote_types(values.dtype, a.dtype), torch.float32)
        if stacked:
            product = torch.bmm(b.to(wide).flatten(1, -2), a.to(wide)).view(values.shape)
            return torch.add(values.to(wide), product, alpha=lora.scale)
        return torch.addmm(values.to(wide), b.to(wide), a.to(wide), alpha=lora.scale)

    return StoredWeights(adapters.where, False, {**base.tensors, **adapters.tensors}, read)


@contextmanager
def opened_weights(
    checkpoint: Checkpoint, config: Config, load: str | None = None
) -> Iterator[StoredWeights]:
    """The weights of an opened checkpoint with its configuration: its own, or merged from its adapters and
    their base, at ``load`` (as ``model.load``) if that is not the checkpoint's.

    Raises:
        HexadError: the base is missing, damaged, or not what the adapters were trained with; the adapters
            belong to initial values; or ``load`` is given and there are no adapters.
    """
    saved, base = _saved(checkpoint), Base.of(checkpoint.manifest)
    if base is None:
        if load is not None:
            raise HexadError(
                f"``base``: checkpoint {checkpoint.path} has no adapters (model.lora); leave it out"
            )
        yield saved
        return
    name = base.load if load is None else load
    if name is None:
        raise HexadError(
            f"checkpoint {checkpoint.path}: its adapters belong to initial values, not to weights that were "
            "loaded (model.load); there is no model to merge them with"
        )
    with ExitStack() as stack:
        with blaming("model.load" if load is None else "base"):
            directory = hugging_face_directory(name)
            if directory is not None:
                model, identity = stack.enter_context(opened_model(directory, config.model))
                source = published_weights(model)
            else:
                path = find_checkpoint(name)
                opened = stack.enter_context(Checkpoint(path))
                check_same_model(path, opened.manifest.config, config, adapters=False)
                source, identity = _saved(opened), manifest_identity(path)
        base.check(Base(absolute(name), identity))
        yield _merged(saved, source, config)
