"""How much exact arithmetic (:mod:`hexad.parallel.exact`) computes at a time, and the memory that this needs
for a moment. No torch."""

CHUNK = 1 << 21
"""Elements of a weight that are converted at a time: 16 MiB of float64."""
ROWS, COLUMNS = 256, 4096
"""Of a product that are computed at a time, so that what is made of the inputs stays in the processor's caches."""
_CACHED, _ON_A_DEVICE = 1 << 17, 1 << 24
_POINTWISE = 32
"""Bytes for each element of a function's result: several values in float32, or three in float64."""


def parts_of(byte: int) -> int:
    """Into how many parts inputs of a product are split, in elements of so many bytes."""
    return 2 if byte == 4 else 1


def columns_at_a_time(inputs: int) -> int:
    """Of a product with so many input features."""
    return max(1, min(COLUMNS, CHUNK // max(1, inputs)))


def elements_at_a_time(cpu: bool) -> int:
    """Of which functions are computed: as many as the processor's caches hold; of other devices, enough to
    keep them busy."""
    return _CACHED if cpu else _ON_A_DEVICE


def product_bytes(rows: int, inputs: int, outputs: int, byte: int) -> int:
    """Bytes that a product needs beside its operands and its result."""
    rows, columns, parts = min(rows, ROWS), min(outputs, columns_at_a_time(inputs)), parts_of(byte)
    weight = 8 * columns * inputs
    split = rows * inputs * (12 * parts + (0 if byte == 4 else 4))
    return weight + max(weight, split, 8 * parts * rows * (inputs + columns))


def function_bytes(elements: int, cpu: bool) -> int:
    """Bytes that a function needs beside its arguments and its result of so many elements."""
    return _POINTWISE * min(elements, elements_at_a_time(cpu))
