"""What a mutation is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hexad import comm
from hexad.topology.mesh import Mesh

from .harness import Case

Patches = list[Any]


@dataclass(frozen=True)
class Mutation:
    """A way to break the code, and what must fail under it.

    Attributes:
        layout: of few ranks.
        steps: one, where it is enough.
    """

    patches: Callable[[Mesh], Patches]
    layout: Case
    steps: int = 1

    @property
    def case(self) -> Case:
        """The case that must fail."""
        return replace(self.layout, steps=self.steps)


def same(tensor: torch.Tensor, axis: Any, *rest: Any) -> torch.Tensor:
    """A collective that does nothing."""
    return tensor


def same_async(tensor: torch.Tensor, axis: Any, *rest: Any) -> comm.Pending:
    """The same, as if under way."""
    return comm.Pending(tensor)
