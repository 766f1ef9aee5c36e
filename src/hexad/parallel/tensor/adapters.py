"""Low-rank adapters inside a linear layer (LoRA: Hu et al., arXiv 2106.09685)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexad.topology.mesh import Axis

from ..arithmetic import Arithmetic
from ..contributions import weight_gradient
from ..sharding import Shard
from .linear_inventory import LinearSpec

Drop = Callable[[Tensor], Tensor]
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
        """All parameters of the adapters."""
        return (self.a, *self.b)

    def dropped(self, x: Tensor) -> Tensor:
        """Values, or their gradient, with elements dropped."""
        return x if self.drop is None else self.drop(x)

    def _parts(self, inner: Tensor) -> tuple[Tensor, ...]:
        return inner.split(self.b[0].shape[1], dim=1)

    def inner(self, x: Tensor) -> Tensor:
        """``[tokens, adapters * rank]``: the activations between ``A`` and ``B``, in the usual arithmetic."""
        return F.linear(self.dropped(x), self.a)

    def add_(self, y: Tensor, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        """Add the adapters' outputs of ``x [tokens, inputs]`` to ``y [tokens, outputs]``, in place; returns
        the activations between ``A`` and ``B``, for backward."""
        inner = arithmetic.unrounded.product(self.dropped(x), self.a)
        self.add_outputs_(y, inner, arithmetic)
        return inner

    def add_outputs_(self, y: Tensor, inner: Tensor, arithmetic: Arithmetic) -> None:
        """Add the adapters' outputs of ``inner [tokens, adapters * rank]`` to ``y [tokens, outputs]``."""
        for part, b, (start, width) in zip(self._parts(inner), self.b, self.columns):
            arithmetic.add_scaled_product_(y.narrow(1, start, width), part, b, self.scale)

    def inner_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of :meth:`inner` for the gradient ``[tokens, outputs]`` of the layer's output."""
        parts = [gradient.narrow(1, start, width) @ b for b, (start, width) in zip(self.b, self.columns)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).mul_(self.scale)

    def add_input_gradient_(self, total: Tensor, inner: Tensor) -> None:
        """Add the adapters' part, from :meth:`inner_gradient`, to the input gradient ``[tokens, inputs]``."""
        if self.drop is None:
            total.addmm_(inner, self.a)
        else:
            total += self.drop(inner @ self.a)

    def weight_gradients(
        self, gradient: Tensor, inner_gradient: Tensor, inner: Tensor, x: Tensor, gather: Axis | None = None
    ) -> list[Tensor | None]:
        """Gradients of ``A`` and every ``B``, each contributed (None) or returned.

        Args:
            gradient: ``[tokens, outputs]``, of the layer's output.
            inner_gradient: see :meth:`inner_gradient`.
            inner: what :meth:`add_` returned.
            x: ``[tokens, inputs]``, the layer's input, without elements dropped.
            gather: the axis over which ``x`` is still divided; without dropout only.
        """
        gradients = [weight_gradient(self.a, inner_gradient, self.dropped(x), gather)]
        for part, b, (start, width) in zip(self._parts(inner * self.scale), self.b, self.columns):
            gradients.append(weight_gradient(b, gradient.narrow(1, start, width), part))
        return gradients

    def added(self, y: Tensor, x: Tensor) -> Tensor:
        """The outputs added (:meth:`add_`) to a new tensor under plain autograd."""
        outputs, end = [], 0
        for part, b, (start, width) in zip(self._parts(self.inner(x)), self.b, self.columns):
            outputs += [y[:, end:start], y[:, start : start + width] + F.linear(part, b) * self.scale]
            end = start + width
        return torch.cat([*outputs, y[:, end:]], dim=1)


def adapted_columns(inventory: LinearSpec, shard: Shard) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of each adapted output on this rank."""
    columns, start = [], 0
    for parameter in inventory.layers:
        for weight in parameter.weights if parameter.matrix else ():
            width = weight.local_shape(shard.positions)[0]
            if weight.name.removesuffix(".weight") in inventory.adapted:
                columns.append((start, width))
            start += width
    return tuple(columns)
