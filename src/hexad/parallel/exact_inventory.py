"""How much exact arithmetic (:mod:`hexad.parallel.exact`) computes at a time, and the memory that this needs
for a moment. No torch."""

from typing import NamedTuple


class Blocks(NamedTuple):
    """The sizes of what is computed at a time.

    Attributes:
        elements: of a function.
        rows, columns: of a product.
        chunk: elements of a weight that are converted to float64.
        scores: of attention.
    """

    elements: int
    rows: int
    columns: int
    chunk: int
    scores: int


_ON_CPU = Blocks(1 << 17, 256, 4096, 1 << 21, 1 << 18)
"""Sizes with which intermediate results of the inputs stay in the processor's caches."""
_ON_DEVICE = Blocks(1 << 24, 1024, 1 << 16, 1 << 25, 1 << 23)
"""Enough to keep a GPU busy: each block is a few kernels."""
NORMALISER = 20
"""Bytes that the normaliser of log-probabilities needs for each of a function's elements."""


def blocks(cpu: bool) -> Blocks:
    """The sizes on a CPU, or on other devices. Results do not depend on them."""
    return _ON_CPU if cpu else _ON_DEVICE


def parts_of(byte: int) -> int:
    """Into how many parts inputs of a product are split, in elements of so many bytes."""
    return 2 if byte == 4 else 1


def columns_at_a_time(inputs: int, cpu: bool) -> int:
    """Columns of a product with so many input features that are computed at a time."""
    sizes = blocks(cpu)
    return max(1, min(sizes.columns, sizes.chunk // max(1, inputs)))


def product_bytes(rows: int, inputs: int, outputs: int, byte: int, cpu: bool) -> int:
    """Bytes that a product needs beside its operands and its result."""
    rows, columns = min(rows, blocks(cpu).rows), min(outputs, columns_at_a_time(inputs, cpu))
    parts = parts_of(byte)
    weight, split = 8 * columns * inputs, 12 * parts * rows * inputs
    return weight + max(weight, split, 8 * parts * rows * (inputs + columns))


def function_bytes(elements: int, cpu: bool, width: int) -> int:
    """Bytes that a function needs beside its arguments and its result: ``width`` for every element of those
    that are computed at a time."""
    return width * min(elements, blocks(cpu).elements)


def function_each(byte: int) -> int:
    """Bytes that a norm or an activation needs for each element of its result, which has ``byte`` bytes: up
    to five values in float32, or two and a half in float64; the result of a part; arguments of 16 bits in
    float32."""
    return 24 if byte == 4 else 28


def scores_bytes(heads: int, groups: int, queries: int, keys: int, byte: int, cpu: bool) -> int:
    """Bytes that attention's scores need at a time: those of a sequence's ``queries`` and ``keys``, with
    ``groups`` key/value heads that ``heads`` query heads each share."""
    return (32 if byte == 4 else 27) * max(
        heads * keys, min(blocks(cpu).scores, groups * heads * queries * keys)
    )
