"""Where our global tensors stand in published (Hugging Face) checkpoints, after the family's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hexad.config.model import ModelSettings
from hexad.model.families import Family, family
from hexad.model.inventory import ModelInventory
from hexad.parallel.inventory import Weight
from hexad.parallel.rectangle import Rectangle


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
        """The shape of theirs."""
        shape = (self.rows, *self.shape[1:])
        return shape[::-1] if self.transposed else shape

    def place(self, rectangle: Rectangle) -> tuple[slice, ...]:
        """The index of a rectangle of ours in theirs; transposed there, if ours is."""
        first, *rest = rectangle.slices
        place = (slice(first.start + self.row, first.stop + self.row), *rest)
        return place[::-1] if self.transposed else place

    def read(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Our tensor, as a view into theirs. Raises KeyError naming a missing key."""
        tensor = state[self.name][self.place(Rectangle.whole("", self.shape))]
        return tensor.t() if self.transposed else tensor


def published_tensors(model: ModelSettings, kind: Family | None = None) -> dict[str, PublishedTensor]:
    """Our global tensor name -> where it stands in a published state dict.

    Args:
        model: resolved: its sizes are numbers.
        kind: the family as which the files are written; by default the model's own.
    """
    kind = kind or family(model.family)
    weights = ModelInventory(model).weights()
    fused: dict[str, list[Weight]] = {}
    for weight in weights.values():
        fused.setdefault(kind.published(weight.name), []).append(weight)
    found = {}
    for name, parts in fused.items():
        row, rows = 0, sum(part.shape[0] for part in parts)
        for part in parts:
            turned = kind.transposed and part.name.startswith("layers.") and len(part.shape) == 2
            found[part.name] = PublishedTensor(name, part.shape, turned, row, rows)
            row += part.shape[0]
    return {name: found[name] for name in weights}


def base_prefix(model: ModelSettings) -> str:
    """What all names but the head's begin with in published files, unless they were saved without head."""
    return family(model.family).base


def is_buffer(model: ModelSettings, name: str) -> bool:
    """Whether a tensor of a published file holds no weights: what follows from the settings."""
    kind = family(model.family)
    return re.fullmatch(kind.buffers, name.removeprefix(kind.base)) is not None
