"""Tensors that are computed from a parameter and kept until its values change."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def forget_derived(parameter: Tensor) -> None:
    """Forget what was computed from a parameter: call it whenever its values change. The first call allows
    values to be kept; for a parameter that comes and goes (ZeRO 3) there is none."""
    parameter.derived = {}  # type: ignore[attr-defined]


def derived(parameter: Tensor, name: str, compute: Callable[[], T]) -> T:
    """The result of ``compute`` on the parameter's values, kept until they change."""
    kept: dict[str, Any] | None = getattr(parameter, "derived", None)
    if kept is None or torch.compiler.is_compiling():  # a graph has no side effects
        return compute()
    if name not in kept:
        kept[name] = compute()
    return kept[name]
