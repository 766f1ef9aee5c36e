"""How much exact arithmetic (:mod:`hexad.parallel.exact`) computes at a time, and the memory that this needs
for a moment. No torch."""

CHUNK = 1 << 21
"""Elements of a weight that are converted at a time: 16 MiB of float64."""
ROWS, COLUMNS = 256, 4096
"""The block of a product that is computed at a time: what is made of the inputs stays in the processor's
caches."""
SCORES = 1 << 18
"""The number of attention's scores that exist at a time, in the processor's caches."""
_CACHED, _ON_A_DEVICE = 1 << 17, 1 << 24
"""Elements at a time on a CPU, and on other devices."""
NORMALISER = 20
"""Bytes that the normaliser of log-probabilities needs for each of these elements."""


def parts_of(byte: int) -> int:
    """Into how many parts inputs of a product are split, in elements of so many bytes."""
    return 2 if byte == 4 else 1


def columns_at_a_time(inputs: int) -> int:
    """Columns of a product with so many input features that are computed at a time."""
    return max(1, min(COLUMNS, CHUNK // max(1, inputs)))


def elements_at_a_time(cpu: bool) -> int:
    """Elements of which a function is computed at a time: as many as the processor's caches hold; on other
    devices enough to keep them busy."""
    return _CACHED if cpu else _ON_A_DEVICE


def product_bytes(rows: int, inputs: int, outputs: int, byte: int) -> int:
    """Bytes that a product needs beside its operands and its result."""
    rows, columns, parts = min(rows, ROWS), min(outputs, columns_at_a_time(inputs)), parts_of(byte)
    weight, split = 8 * columns * inputs, 12 * parts * rows * inputs
    return weight + max(weight, split, 8 * parts * rows * (inputs + columns))


def function_bytes(elements: int, cpu: bool, each: int) -> int:
    """Bytes that a function needs beside its arguments and its result: ``each`` for every element of those
    that are computed at a time."""
    return each * min(elements, elements_at_a_time(cpu))


def function_each(byte: int) -> int:
    """Bytes that a norm or an activation needs for each element of its result, which has ``byte`` bytes: up
    to five values in float32, or two and a half in float64; the result of a part; arguments of 16 bits in
    float32."""
    return 24 if byte == 4 else 28


def scores_bytes(heads: int, groups: int, queries: int, keys: int, byte: int) -> int:
    """Bytes that attention's scores need at a time: those of a sequence's ``queries`` and ``keys``, with
    ``groups`` key/value heads that ``heads`` query heads each share."""
    return (32 if byte == 4 else 27) * max(heads * keys, min(SCORES, groups * heads * queries * keys))
