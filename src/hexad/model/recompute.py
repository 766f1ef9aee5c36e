"""Activations that are computed again in the backward pass instead of kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.graph import saved_tensors_hooks

from hexad.config.schema import MemorySettings

Kind = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Recompute:
    """What the layers of a stage compute again (Korthikanti et al., arXiv 2205.05198, section 5).

    Attributes:
        kind: ``full``: everything but the layer's input (Chen et al., arXiv 1604.06174). ``selective``: what
            costs neither a matrix product nor communication: normalised and activated values, rotated
            queries and keys.
        layers: how many layers of the stage, from its first on; None for all.
    """

    kind: Kind = "none"
    layers: int | None = None

    @classmethod
    def from_settings(cls, settings: MemorySettings) -> Recompute:
        """As ``memory.recompute`` and ``memory.recompute_layers`` say."""
        layers = settings.recompute_layers
        return cls(settings.recompute, None if layers == "all" else layers)

    def of(self, position: int) -> Kind:
        """What the stage's layer number ``position`` does."""
        return self.kind if self.layers is None or position < self.layers else "none"


class made_again(saved_tensors_hooks):
    """While inside, ``tensor`` is not kept for the backward pass: ``make`` computes it again when it is due.

    Whatever shares its memory, such as a slice, is cut from the new one. ``make`` must return the same values
    in the same memory layout, and be quick: it runs once for all slices that are needed at a time.
    """

    def __init__(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        address = tensor.untyped_storage().data_ptr()
        source = _Source(make)

        def pack(saved: torch.Tensor) -> Any:
            if saved.untyped_storage().data_ptr() != address:
                return saved
            source.uses += 1
            return source, saved.shape, saved.stride(), saved.storage_offset()

        super().__init__(pack, _unpack)


class _Source:
    """Makes a tensor again, and holds it until all that was cut from it has been asked for."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self.uses = 0
        self._make = make
        self._made: torch.Tensor | None = None
        self._asked = 0

    def get(self) -> torch.Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made = self._make()
        made = self._made
        self._asked += 1
        if self._asked % self.uses == 0:
            self._made = None
        return made


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    source, shape, stride, offset = packed
    return source.get().as_strided(shape, stride, offset)
