"""Low-rank adapters inside linear layers (LoRA: Hu et al., arXiv 2106.09685).

They work on what a layer has on one rank: its gathered input, its output before the sum over tensor ranks,
and the gradients of both, so that they need no collective of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from hexad.topology.mesh import Axis

from ..contributions import weight_gradient
from ..sharding import Shard, ShardedModule
from .linear_inventory import LinearSpec
from .lora_inventory import b_name

Drop = Callable[[torch.Tensor], torch.Tensor]
"""Drops elements of a layer's input ``[tokens, inputs on this rank]``: multiplies it by a mask that is the
same whenever it is called, also with a gradient."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of one layer in one pass: ``output += scale * drop(x) A^T B^T``.

    Attributes:
        a: ``[adapters * rank, inputs on this rank]``.
        b: of every adapter, ``[outputs on this rank, rank]``.
        columns: of every adapter, (first column, columns) of the layer's output on this rank.
        scale: alpha / rank.
        drop: of the input, in training with dropout.
    """

    a: nn.Parameter
    b: tuple[nn.Parameter, ...]
    columns: tuple[tuple[int, int], ...]
    scale: float
    drop: Drop | None = None

    @property
    def tensors(self) -> tuple[nn.Parameter, ...]:
        """All parameters."""
        return (self.a, *self.b)

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Values, or their gradient, with elements dropped."""
        return x if self.drop is None else self.drop(x)

    def _parts(self, inner: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inner.split(self.b[0].shape[1], dim=1)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, adapters * rank]``: what lies between ``A`` and ``B``."""
        return F.linear(self.dropped(x), self.a)

    def add_(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add to a layer's output, in place; returns what lies between ``A`` and ``B``, for backward."""
        inner = self.inner(x)
        for part, b, (start, width) in zip(self._parts(inner), self.b, self.columns):
            y.narrow(1, start, width).addmm_(part, b.t(), alpha=self.scale)
        return inner

    def inner_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of what lies between ``A`` and ``B``, given that of the output."""
        parts = [gradient.narrow(1, start, width) @ b for b, (start, width) in zip(self.b, self.columns)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).mul_(self.scale)

    def add_input_gradient_(self, total: torch.Tensor, inner: torch.Tensor) -> None:
        """Add to the gradient of the layer's input, in place, given :meth:`inner_gradient`."""
        if self.drop is None:
            total.addmm_(inner, self.a)
        else:
            total += self.drop(inner @ self.a)

    def weight_gradients(
        self,
        gradient: torch.Tensor,
        inner_gradient: torch.Tensor,
        inner: torch.Tensor,
        x: torch.Tensor,
        gather: Axis | None = None,
    ) -> list[torch.Tensor | None]:
        """Of all parameters, as :func:`~hexad.parallel.contributions.weight_gradient` returns them.

        Args:
            gradient: of the layer's output.
            inner_gradient: see :meth:`inner_gradient`.
            inner: what :meth:`add_` returned.
            x: the layer's input, without elements dropped.
            gather: the axis over which ``x`` is still divided; without dropout only.
        """
        found = [weight_gradient(self.a, inner_gradient, self.dropped(x), gather)]
        for part, b, (start, width) in zip(self._parts(inner * self.scale), self.b, self.columns):
            found.append(weight_gradient(b, gradient.narrow(1, start, width), part))
        return found

    def added(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As :meth:`add_`, to a new tensor under plain autograd."""
        found, end = [], 0
        for part, b, (start, width) in zip(self._parts(self.inner(x)), self.b, self.columns):
            found += [y[:, end:start], y[:, start : start + width] + F.linear(part, b) * self.scale]
            end = start + width
        return torch.cat([*found, y[:, end:]], dim=1)


class AdaptedLinear(ShardedModule):
    """A linear layer's parameters, and those of its adapters.

    Args:
        inventory: what it holds.
        shard: of the layer.
    """

    lora_a: nn.Parameter

    def __init__(self, inventory: LinearSpec, shard: Shard) -> None:
        super().__init__(shard)
        self.declare(*inventory.parameters)
        self._adapted = inventory.adapters
        if self._adapted is not None:
            self._columns = _columns(inventory, shard)

    def adapters(self, drop: Drop | None = None) -> Adapters | None:
        """The layer's adapters for one pass; None if it has none."""
        if self._adapted is None:
            return None
        b = tuple(getattr(self, b_name(name)) for name in self._adapted.outputs)
        return Adapters(self.lora_a, b, self._columns, self._adapted.kind.scale, drop)


def _columns(inventory: LinearSpec, shard: Shard) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of each adapted output on this rank."""
    found, start = [], 0
    for parameter in inventory.layers:
        for weight in parameter.weights if parameter.matrix else ():
            width = weight.local_shape(shard.positions)[0]
            if weight.name.removesuffix(".weight") in inventory.adapted:
                found.append((start, width))
            start += width
    return tuple(found)
