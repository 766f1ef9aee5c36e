"""Where a parameter's gradient is accumulated: a view into a flat buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class GradientSlot:
    """Accumulates one parameter's gradient over the microbatches of a step.

    The first contribution of a step overwrites the buffer, so that it never has to be zeroed; weight
    gradients of linear layers are multiplied straight into it. When the last expected contribution of the
    step has arrived, ``on_complete`` is called: from then on the gradient may be reduced.

    Args:
        buffer: view of the flat gradient buffer, in the parameter's shape.
        uses: contributions per microbatch (2 for a weight tied between embedding and head).
        on_complete: called once per step.
    """

    def __init__(self, buffer: torch.Tensor, uses: int, on_complete: Callable[[], None]) -> None:
        self.buffer = buffer
        self.uses = uses
        self._on_complete = on_complete
        self._fresh = True
        self._expected = 0

    def begin(self, microbatches: int) -> None:
        """Start a step of this many microbatches."""
        self._fresh = True
        self._expected = self.uses * microbatches

    def finish(self) -> None:
        """End a step: a gradient that nothing contributed to is zero."""
        if self._fresh:
            self.buffer.zero_()

    def add(self, gradient: torch.Tensor) -> None:
        """Contribute a gradient of the parameter's shape."""
        if self._fresh:
            self.buffer.copy_(gradient)
        else:
            self.buffer.add_(gradient)
        self._contributed()

    def add_product(self, output_gradient: torch.Tensor, inputs: torch.Tensor) -> None:
        """Contribute ``output_gradient.T @ inputs`` of a layer's ``[tokens, out]`` and ``[tokens, in]``."""
        if output_gradient.dtype != self.buffer.dtype:
            self.add(output_gradient.t() @ inputs)
            return
        if self._fresh:
            torch.mm(output_gradient.t(), inputs, out=self.buffer)
        else:
            self.buffer.addmm_(output_gradient.t(), inputs)
        self._contributed()

    def add_rows(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Contribute ``gradient[i]`` to row ``rows[i]``, as an embedding does."""
        if self._fresh:
            self.buffer.zero_()
        self.buffer.index_add_(0, rows, gradient.to(self.buffer.dtype))
        self._contributed()

    def _contributed(self) -> None:
        self._fresh = False
        self._expected -= 1
        if self._expected == 0:
            self._on_complete()


def slot_of(parameter: torch.Tensor) -> GradientSlot | None:
    """The slot that an engine has given this parameter, or None under plain autograd."""
    return getattr(parameter, "gradient_slot", None)


def attach_slot(parameter: nn.Parameter, slot: GradientSlot) -> None:
    """Give ``parameter`` a slot; gradients that autograd computes for it are moved there too."""
    parameter.gradient_slot = slot  # type: ignore[attr-defined]

    def move(p: torch.Tensor) -> None:
        if p.grad is not None:  # None where a layer has contributed to the slot by itself
            slot.add(p.grad)
            p.grad = None

    parameter.register_post_accumulate_grad_hook(move)


def weight_gradient(
    weight: torch.Tensor, output_gradient: torch.Tensor, inputs: torch.Tensor
) -> torch.Tensor | None:
    """``output_gradient.T @ inputs``: into the weight's slot (returning None), else as a new tensor."""
    slot = slot_of(weight)
    if slot is None:
        return output_gradient.t() @ inputs
    slot.add_product(output_gradient, inputs)
    return None


def bias_gradient(bias: torch.Tensor | None, output_gradient: torch.Tensor) -> torch.Tensor | None:
    """The sum over tokens: into the bias's slot (returning None), else as a new tensor."""
    return None if bias is None else own_gradient(bias, output_gradient.sum(0))


def own_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """``gradient``: into the parameter's slot (returning None), else as it is."""
    slot = slot_of(parameter)
    if slot is None:
        return gradient
    slot.add(gradient)
    return None
