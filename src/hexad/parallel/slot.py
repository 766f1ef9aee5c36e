"""Where a parameter's gradient is accumulated: a view of a bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from hexad.comm import Pending, all_gather_async
from hexad.topology.mesh import Axis


class Product(NamedTuple):
    """A weight gradient still to be computed: ``output_gradient.T @ inputs``.

    Attributes:
        slot: where it goes.
        output_gradient: ``[tokens, out]``.
        inputs: ``[tokens, in]``, or this rank's share of the tokens where ``gather`` is given.
        gather: the axis over which the inputs are divided.
    """

    slot: GradientSlot
    output_gradient: torch.Tensor
    inputs: torch.Tensor
    gather: Axis | None


class ProductQueue:
    """Whether weight gradients of linear layers are computed in the backward pass or put off.

    A backward pass under :meth:`deferring` computes gradients of activations only and yields the products
    that are missing: the pipeline's ``B`` and ``W`` (Qi et al., arXiv 2401.10241).
    """

    def __init__(self) -> None:
        self.pending: deque[Product] | None = None

    @contextmanager
    def deferring(self) -> Iterator[deque[Product]]:
        """Put products off while inside; yields where they are collected."""
        self.pending = deque()
        try:
            yield self.pending
        finally:
            self.pending = None

    @staticmethod
    @torch.no_grad()
    def compute(products: deque[Product]) -> None:
        """Compute products, first come first served, and let go of their operands one by one.

        Divided inputs are gathered one product ahead, while the one before is computed.
        """
        gathering = _gather(products[0]) if products else None
        while products:
            product = products.popleft()
            inputs = product.inputs if gathering is None else gathering.wait()
            gathering = _gather(products[0]) if products else None
            product.slot.add_product(product.output_gradient, inputs)


def _gather(product: Product) -> Pending | None:
    return None if product.gather is None else all_gather_async(product.inputs, product.gather)


class GradientSlot:
    """Accumulates one parameter's gradient over the microbatches of a step.

    The first contribution of a round overwrites the buffer, so that it never has to be zeroed; weight
    gradients of linear layers are multiplied straight into it. When the last expected contribution of the
    round has arrived, ``on_complete`` is called: from then on the gradient may be reduced. A round is a step,
    or a microbatch where gradients are not kept over the step (ZeRO 2 and 3).

    Args:
        source: gives the place to accumulate in, of the parameter's shape; asked anew for every contribution.
        uses: contributions per microbatch (2 for a weight tied between embedding and head).
        on_complete: called once per round.
        queue: says whether products are put off.
    """

    def __init__(
        self,
        source: Callable[[], torch.Tensor],
        uses: int,
        on_complete: Callable[[], None],
        queue: ProductQueue,
    ) -> None:
        self.uses = uses
        self.queue = queue
        self._source = source
        self._on_complete = on_complete
        self._fresh = True
        self._expected = 0

    @property
    def buffer(self) -> torch.Tensor:
        """Where the gradient is accumulated."""
        return self._source()

    def begin(self, microbatches: int) -> None:
        """Start a round of this many microbatches."""
        self._fresh = True
        self._expected = self.uses * microbatches

    def finish(self) -> None:
        """End a round: a gradient that nothing contributed to is zero."""
        if self._fresh:
            self.buffer.zero_()

    def add(self, gradient: torch.Tensor) -> None:
        """Contribute a gradient of the parameter's shape."""
        self._accumulate(gradient)
        self._contributed()

    def _accumulate(self, gradient: torch.Tensor) -> None:
        if self._fresh:
            self.buffer.copy_(gradient)
        else:
            self.buffer.add_(gradient)

    def add_product(self, output_gradient: torch.Tensor, inputs: torch.Tensor, *, last: bool = True) -> None:
        """Contribute ``output_gradient.T @ inputs`` of a layer's ``[tokens, out]`` and ``[tokens, in]``.

        A contribution that comes in slices of tokens is complete with the ``last`` one.
        """
        buffer = self.buffer
        if output_gradient.dtype != buffer.dtype:
            self._accumulate(output_gradient.t() @ inputs)
        elif self._fresh:
            torch.mm(output_gradient.t(), inputs, out=buffer)
        else:
            buffer.addmm_(output_gradient.t(), inputs)
        self._fresh = False
        if last:
            self._contributed()

    def add_rows(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Contribute ``gradient[i]`` to row ``rows[i]``, as an embedding does."""
        buffer = self.buffer
        if self._fresh:
            buffer.zero_()
        buffer.index_add_(0, rows, gradient.to(buffer.dtype))
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
    parameter.register_post_accumulate_grad_hook(_move)


def _move(parameter: torch.Tensor) -> None:
    # A function that held the slot itself would close a circle through the hook, which is never collected: an
    # engine's buffers and its process groups, with busy threads, would outlive it.
    slot = slot_of(parameter)
    if slot is not None and parameter.grad is not None:  # None where a layer has contributed by itself
        slot.add(parameter.grad)
        parameter.grad = None


def deferred(weight: torch.Tensor) -> bool:
    """Whether the weight's gradient is being put off."""
    slot = slot_of(weight)
    return slot is not None and slot.queue.pending is not None


def weight_gradient(
    weight: torch.Tensor, output_gradient: torch.Tensor, inputs: torch.Tensor, gather: Axis | None = None
) -> torch.Tensor | None:
    """``output_gradient.T @ inputs``: into the weight's slot, now or later (returning None), or returned.

    ``gather`` is the axis over which the inputs are still divided; only where products are being put off.
    """
    slot = slot_of(weight)
    if slot is None:
        return output_gradient.t() @ inputs
    if slot.queue.pending is not None:
        # What autograd saved knows its graph, which would keep the stage's input and that one's gradient.
        slot.queue.pending.append(Product(slot, output_gradient, inputs.detach(), gather))
    else:
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
