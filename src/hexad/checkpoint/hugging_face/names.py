"""Where our global tensors stand in published (Hugging Face) checkpoints, after the family's names."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hexad.config import HexadError
from hexad.config.model import ModelSettings
from hexad.model.families import Family, family
from hexad.model.inventory import ModelInventory
from hexad.parallel.inventory import Weight
from hexad.parallel.rectangle import Rectangle

HEAD = "lm_head.weight"
"""The published name of the weight that ``tie_word_embeddings`` makes the embedding's."""


@dataclass(frozen=True)
class PublishedTensor:
    """Where one of our global tensors stands in a published state dict.

    Attributes:
        name: its key.
        shape: of ours.
        transposed: stored as ``[in, out]``.
        row: first of our rows in theirs, where several of ours are fused.
        rows: rows of theirs.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    row: int
    rows: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the published tensor."""
        shape = (self.rows, *self.shape[1:])
        return shape[::-1] if self.transposed else shape

    def place(self, rectangle: Rectangle) -> tuple[slice, ...]:
        """The index of a rectangle in the published tensor, transposed if that is stored so."""
        first, *rest = rectangle.slices
        place = (slice(first.start + self.row, first.stop + self.row), *rest)
        return place[::-1] if self.transposed else place

    def read(self, state: Mapping[str, Tensor]) -> Tensor:
        """Our tensor, as a view into theirs. Raises KeyError naming a missing key."""
        tensor = state[self.name][self.place(Rectangle.whole("", self.shape))]
        return tensor.t() if self.transposed else tensor


def published_tensors(model: ModelSettings, kind: Family | None = None) -> dict[str, PublishedTensor]:
    """The place of each global tensor, by our name, in a published state dict of a family, by default the
    model's own. ``model`` is resolved: its sizes are numbers."""
    kind = kind or family(model.family)
    weights = ModelInventory(model).weights()
    fused: dict[str, list[Weight]] = {}
    for weight in weights.values():
        fused.setdefault(kind.published(weight.name), []).append(weight)
    places = {}
    for name, parts in fused.items():
        row, rows = 0, sum(part.shape[0] for part in parts)
        for part in parts:
            turned = kind.transposed and part.name.startswith("layers.") and len(part.shape) == 2
            places[part.name] = PublishedTensor(name, part.shape, turned, row, rows)
            row += part.shape[0]
    return {name: places[name] for name in weights}


def located(
    tensors: Mapping[str, PublishedTensor], present: Collection[str], model: ModelSettings, where: Path
) -> dict[str, str]:
    """The published name of each tensor, by our name; with or without the prefix of a model with a head.
    ``present``: the names of the tensors ``where`` they are.

    Raises:
        HexadError: one is missing, or there is one that the model does not have.
    """
    kind = family(model.family)
    names, used = {}, {HEAD} if model.tied_embeddings else set()
    for ours, place in tensors.items():
        short = place.name.removeprefix(kind.base)
        name = place.name if place.name in present else short
        if name not in present and ours == "embedding.weight" and model.tied_embeddings:
            name = HEAD  # one matrix under either of its names
        if name not in present:
            raise HexadError(f"{where}: tensor {place.name} (model.{ours}) is missing")
        names[ours] = name
        used.add(name)
    for name in present:  # buffers follow from the settings
        if name not in used and not re.fullmatch(kind.buffers, name.removeprefix(kind.base)):
            raise HexadError(
                f"{where}: found tensor {name}, which a {model.family} model with the settings of "
                "config.json does not have"
            )
    return names
