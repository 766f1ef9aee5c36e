"""The bytes that each kind of arithmetic (:mod:`.arithmetic`) keeps, sends and needs for a moment in linear
layers. No torch.

Sizes are those of a rank: input features, and output features of each fused weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from .exact_inventory import parts_of, product_bytes
from .inventory import Collective, Execution, Operation

_FLOAT64 = 8
"""Bytes of an element of exact arithmetic's sums."""


class ArithmeticSpec:
    """The usual arithmetic; the base of the others.

    Attributes:
        batched: products of several runs of rows may be one batched product.
        eight: products are computed in 8 bits.
    """

    batched: bool = True
    eight: bool = False

    def summed(
        self, run: Execution, forward: list[Operation], operation: str, outputs: Sequence[int]
    ) -> list[Operation]:
        """The forward pass of a layer whose products are summed over the tensor axis by a collective.

        Args:
            run: how a rank computes.
            forward: the products, and the collective on their result in the layer's format.
            operation: the collective.
            outputs: output features of the layer, and of its adapters' first product.
        """
        return forward

    def column_forward(self, run: Execution, inputs: int, widths: Sequence[int], adapters: int) -> int:
        """Bytes that a column-parallel layer's products need beside its input, as the layer received it, and
        its result; ``adapters``: those of adapters' outputs."""
        return 0

    def row_forward(self, run: Execution, inputs: int, outputs: int, adapters: int) -> int:
        """Bytes that a row-parallel layer's product needs beside its input and its result."""
        return 0

    def adapter_outputs(self, run: Execution, rank: int, widths: Sequence[int]) -> int:
        """Bytes that adapters' outputs need before they are added to the result."""
        return 0

    def forward_copies(self, run: Execution, inputs: int, outputs: int) -> int:
        """Bytes of the copies of input and weight that a forward product multiplies."""
        return 0

    def input_gradient(self, run: Execution, inputs: int, widths: Sequence[int]) -> int:
        """Bytes that the products for the input's gradient need, their result included, where they need more
        than that."""
        return 0

    def weight_gradient(self, run: Execution, inputs: int, widths: Sequence[int]) -> int:
        """Bytes of the largest weight's gradient before it is added in another format."""
        return run.weight_product(inputs * max(widths))

    def kept_weights(self, run: Execution, inputs: int, widths: Sequence[int]) -> int:
        """Bytes of copies of weights that are kept until the next update."""
        return 0


class EightBitSpec(ArithmeticSpec):
    """Products in 8 bits."""

    batched = False
    eight = True

    def forward_copies(self, run: Execution, inputs: int, outputs: int) -> int:
        """The operands; the weight has passed through a scaled copy in 16 bits."""
        return run.whole(inputs) // 2 + (2 if run.rounded_once else 3) * inputs * outputs

    def input_gradient(self, run: Execution, inputs: int, widths: Sequence[int]) -> int:
        """Copies of the output's gradient and of a weight that is not kept, first scaled in 16 bits, the
        weight's then transposed."""
        most, before = 0, 0
        for outputs in widths:
            gradient, weight, result = run.whole(outputs) // 2, inputs * outputs, run.whole(inputs)
            if run.rounded_once:
                needed = gradient + max(2 * gradient, result)
            else:
                needed = gradient + max(3 * weight, 2 * weight + result)
            most, before = max(most, before + needed), result  # to which the next one's is added
        return most

    def kept_weights(self, run: Execution, inputs: int, widths: Sequence[int]) -> int:
        """Weights in 8 bits, for forward passes and, transposed, for backward."""
        return 2 * inputs * sum(widths) if run.rounded_once else 0


class EightBitGradientsSpec(EightBitSpec):
    """Products in 8 bits, those of weight gradients too."""

    def weight_gradient(self, run: Execution, inputs: int, widths: Sequence[int]) -> int:
        """Copies of both operands, one after the other, each first scaled in 16 bits; then the product."""
        right = run.whole(inputs) // 2

        def needed(outputs: int) -> int:
            left = run.whole(outputs) // 2
            return max(3 * left, left + 3 * right, left + right + inputs * outputs * run.gradient)

        return max(map(needed, widths))


class ExactSpec(ArithmeticSpec):
    """Exact arithmetic, in the forward pass."""

    batched = False

    def summed(
        self, run: Execution, forward: list[Operation], operation: str, outputs: Sequence[int]
    ) -> list[Operation]:
        """After the products: the largest elements of input and weight, and the products of each part of the
        input, in float64; of adapters too."""
        operations: list[Operation] = [op for op in forward if not isinstance(op, Collective)]
        for features in outputs:
            tops = (run.tokens * _FLOAT64, features * _FLOAT64)
            operations += [Collective("F", "tensor", "all_reduce", nbytes) for nbytes in tops]
            products = Collective("F", "tensor", operation, run.tokens * features * _FLOAT64)
            operations += [products] * parts_of(run.byte)
        return operations

    def column_forward(self, run: Execution, inputs: int, widths: Sequence[int], adapters: int) -> int:
        """The gathered input, and the largest product: a fused one is copied to its place."""
        copied = run.whole(max(widths)) if len(widths) > 1 else 0
        product = copied + max(self._product(run, inputs, outputs) for outputs in widths)
        return run.gathered(inputs) + max(product, adapters)

    def row_forward(self, run: Execution, inputs: int, outputs: int, adapters: int) -> int:
        """The product, and its sums over ranks."""
        product = self._product(run, inputs, outputs)
        if run.tensor > 1:
            # The sums of each part of the input, and one that is scattered: the rank's tokens, on a CPU also
            # what all ranks send for them. The result is made of them, and not there yet.
            received = run.rows + (run.tokens if run.cpu else 0) if run.sequence else 0
            sums = _FLOAT64 * parts_of(run.byte) * run.tokens * outputs
            product = sums + max(product, _FLOAT64 * received * outputs) - run.stream(outputs)
        return max(product, adapters)

    def adapter_outputs(self, run: Execution, rank: int, widths: Sequence[int]) -> int:
        """Each output, and its product."""
        return max(run.whole(width) + self._product(run, rank, width) for width in widths)

    @staticmethod
    def _product(run: Execution, inputs: int, outputs: int) -> int:
        return product_bytes(run.tokens, inputs, outputs, run.byte, run.cpu)


_USUAL, _EXACT = ArithmeticSpec(), ExactSpec()
_EIGHT_BITS, _EIGHT_BIT_GRADIENTS = EightBitSpec(), EightBitGradientsSpec()


def arithmetic_spec(run: Execution) -> ArithmeticSpec:
    """The arithmetic of linear layers, as :func:`hexad.parallel.arithmetic.arithmetic_of` chooses it."""
    if run.exact:
        return _EXACT
    if not run.fp8:
        return _USUAL
    return _EIGHT_BIT_GRADIENTS if run.fp8_weight_gradients else _EIGHT_BITS
