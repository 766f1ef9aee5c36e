"""What a mutation is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hexad import comm
from hexad.topology.mesh import Mesh

from .harness import Case

Patches = list[Any]


@dataclass(frozen=True)
class Mutation:
    """A way to break the code, and a case that must fail under it."""

    patches: Callable[[Mesh], Patches]
    case: Case


def same(tensor: torch.Tensor, axis: Any, *rest: Any) -> torch.Tensor:
    """A collective that does nothing."""
    return tensor


def same_async(tensor: torch.Tensor, axis: Any, *rest: Any) -> comm.Pending:
    """The same, as if under way."""
    return comm.Pending(tensor)
