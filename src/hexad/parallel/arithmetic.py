"""The kinds of arithmetic in which products are computed: usual, in 8 bits, exact, with packed weights.

A shard has one of them (:attr:`hexad.parallel.sharding.Shard.arithmetic`), chosen from the settings; layers
ask it for products. What each kind keeps, sends and needs is in :mod:`.arithmetic_inventory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from hexad.topology.mesh import Axis

from . import exact
from .contributions import add_product, widening_products
from .tensor import fp8, packed

if TYPE_CHECKING:
    from .tensor.adapters import Adapters


class Arithmetic:
    """The usual arithmetic, in the operands' format; the base of the others.

    Attributes:
        batched: products of several runs of rows may be one batched product of PyTorch's, whose rows are
            those of separate products.
    """

    batched: bool = True

    @property
    def unrounded(self) -> Arithmetic:
        """The arithmetic of products that are never rounded to 8 bits: of adapters, experts and the head."""
        return self

    def reading(self, weight: Tensor) -> Arithmetic:
        """The arithmetic of products with a weight: that of the form in which a generator keeps it."""
        return _PACKED if weight.is_mkldnn else self

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """``x [tokens, in]``, ``weight [out, in]`` -> ``x W^T + b``; written to ``out`` if it is not None."""
        if out is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def widened_product(self, x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
        """``x W^T`` in a wider format than that of both."""
        if x.dtype.itemsize == 2 and widening_products(x.device):
            return torch.mm(x, weight.t(), out_dtype=wide)
        return F.linear(x.to(wide), weight.to(wide))

    def summed_product(
        self, x: Tensor, weight: Tensor, axis: Axis, total: exact.Total, adapters: Adapters | None
    ) -> tuple[Tensor, Tensor | None]:
        """A product whose sum is over the ranks of an axis, and the activations between adapters' matrices if
        they are kept for backward.

        Args:
            x: ``[tokens, in]``, this rank's features.
            weight: ``[out, in]``, this rank's columns.
            axis: of the ranks.
            total: sums ``[tokens, out]`` over them; may return some of the tokens only.
            adapters: of the layer; their outputs are added.
        """
        y = self.product(x, weight)
        inner = None if adapters is None else adapters.add_(y, x, self)
        return total(y), inner

    def add_scaled_product_(self, y: Tensor, x: Tensor, weight: Tensor, scale: float) -> None:
        """Add ``scale * x W^T`` to ``y [tokens, out]``."""
        y.addmm_(x, weight.t(), alpha=scale)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """``gradient [tokens, out]``, ``weight [out, in]`` -> ``gradient W``."""
        return gradient @ weight

    def add_input_gradient_(self, total: Tensor, gradient: Tensor, weight: Tensor) -> None:
        """Add :meth:`input_gradient` to ``total [tokens, in]``."""
        total.addmm_(gradient, weight)

    def add_weight_gradient(self, total: Tensor, gradient: Tensor, inputs: Tensor, fresh: bool) -> None:
        """Add ``gradient [tokens, out].T @ inputs [tokens, in]`` to ``total``, or overwrite it."""
        add_product(total, gradient, inputs, fresh)

    def by_autograd(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """:meth:`product` under plain autograd, inside a compiled block."""
        return F.linear(x, weight, bias)


class _PackedArithmetic(Arithmetic):
    """Forward products with weights in oneDNN's layout; see :mod:`.tensor.packed`."""

    batched = False

    @property
    def unrounded(self) -> Arithmetic:
        """The usual arithmetic: adapters are not packed."""
        return USUAL

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return _written(packed.product(x, weight, bias), out)


@dataclass(frozen=True)
class EightBits(Arithmetic):
    """Products in 8-bit floating point; see :mod:`.tensor.fp8`. Every product has scales of its own, so that
    none is computed in parts.

    Attributes:
        weight_gradients: weight gradients are products in 8 bits, too.
        compiled: operands are rounded by compiled functions.
    """

    weight_gradients: bool = False
    compiled: bool = False

    batched = False

    @property
    def unrounded(self) -> Arithmetic:
        """The usual arithmetic."""
        return USUAL

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Product of operands in e4m3."""
        return _written(fp8.product(x, weight, bias, self.compiled), out)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Input gradient from a gradient in e5m2."""
        return fp8.input_gradient(gradient, weight, self.compiled)

    def add_input_gradient_(self, total: Tensor, gradient: Tensor, weight: Tensor) -> None:
        """Add the input gradient to ``total`` after its product is complete."""
        total += self.input_gradient(gradient, weight)

    def add_weight_gradient(self, total: Tensor, gradient: Tensor, inputs: Tensor, fresh: bool) -> None:
        """Add the weight gradient, in 8 bits if weight gradients are."""
        if self.weight_gradients:
            fp8.add_weight_gradient(total, gradient, inputs, fresh, self.compiled)
        else:
            add_product(total, gradient, inputs, fresh)

    def by_autograd(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """:meth:`product` under plain autograd, inside a compiled block."""
        return fp8.linear(x, weight, bias, self.weight_gradients)


class _Exact(Arithmetic):
    """Forward products that depend neither on the layout nor on other tokens; see :mod:`.exact`. Backward
    products are the usual ones."""

    batched = False

    def reading(self, weight: Tensor) -> Arithmetic:
        """Itself: a weight that a generator has rounded to the grid gives the same products."""
        return self

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return _written(exact.product(x, weight, bias), out)

    def widened_product(self, x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
        """Product in exact arithmetic and in a wider format."""
        return exact.product(x.to(wide), weight.to(wide))

    def summed_product(
        self, x: Tensor, weight: Tensor, axis: Axis, total: exact.Total, adapters: Adapters | None
    ) -> tuple[Tensor, Tensor | None]:
        """Product in exact arithmetic, summed over the ranks before it is rounded. The activations between
        adapters' matrices are summed too, so that backward computes this rank's part of it again."""
        y = exact.product(x, weight, axis=axis, total=total)
        if adapters is not None:
            inner = exact.product(adapters.dropped(x), adapters.a, axis=axis, total=total)
            adapters.add_outputs_(y, inner, self)
        return y, None

    def add_scaled_product_(self, y: Tensor, x: Tensor, weight: Tensor, scale: float) -> None:
        """Add a scaled product, rounded before it is added."""
        y.add_(exact.product(x, weight).mul_(scale))


def _written(y: Tensor, out: Tensor | None) -> Tensor:
    """A result, copied to ``out`` if that is not None."""
    return y if out is None else out.copy_(y)


USUAL = Arithmetic()
"""Products in the operands' format."""
_PACKED, _EXACT = _PackedArithmetic(), _Exact()


def arithmetic_of(
    exactly: bool, eight_bits: bool, eight_bit_weight_gradients: bool, compiled: bool
) -> Arithmetic:
    """The arithmetic for settings; see :class:`hexad.parallel.sharding.Shard`."""
    if exactly:
        return _EXACT
    return EightBits(eight_bit_weight_gradients, compiled) if eight_bits else USUAL
