"""Seconds of a kernel as a function of its shape: matrix products, attention, kernels that only move data.

The constants are those of a hardware file (:mod:`hexad.topology.hardware`); ``benchmarks/fit_kernels.py``
fits them on published measurements. Times are those of a kernel alone on its device. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hexad.config import HexadError
from hexad.topology.hardware import AttentionConstants, Hardware, ProductConstants
from hexad.topology.hardware.constants import Format

BYTES: dict[Format, float] = {
    "fp64": 8.0,
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / 128,
    "nvfp4": 0.5 + 1 / 16,
}
"""Bytes of an operand's element with its part of the scales."""
_SPLITS = (1, 2, 4, 8)
"""Parts of k that different multiprocessors may sum, where tiles are few."""
_QUERIES = 128
"""Queries of a tile of attention."""
_PLAIN = 2.0
"""Bytes written per element of a result that is not added to anything."""
_ADDING = 1.2
"""How badly other traffic of the result overlaps with the product: exponent of a sum of powers (1: not at
all). On an H100, weight gradients of 1,024, 2,048, 4,096 and 16,384 tokens, added to float32, took 135, 183,
288 and 1,033 us; the products alone would take 74, 145, 270 and 1,050, the traffic 52."""


_HOST_UPDATE = 28.0
"""Bytes that PyTorch's fused AdamW reads and writes for a parameter: seven values of 32 bits."""


class _Shape(NamedTuple):
    """``groups`` products [m, k] x [k, n] of equal shape, whose sizes may be fractions."""

    groups: int
    m: float
    n: float
    k: float


@dataclass(frozen=True)
class Kernels:
    """Times of the kernels of one kind of device.

    Args:
        hardware: the kind.
        in_step: whether at the clocks of a training step, which are lower than those of a kernel alone
            (``constants.overlap.step``).
        multiprocessors: those that are available, where a collective takes some; None for all.
    """

    hardware: Hardware
    in_step: bool = False
    multiprocessors: int | None = None

    def product(
        self,
        m: int,
        n: int,
        k: int,
        dtype: Format,
        *,
        groups: int = 1,
        divided: Literal["m", "k"] = "m",
        result_bytes: float = 2.0,
        quantise: bool = False,
    ) -> float:
        """Seconds of [m, k] x [k, n], one product or a grouped one.

        A layer with ``t`` tokens from ``i`` to ``o`` features multiplies (t, o, i) forward, (t, i, o) for the
        input gradient and (o, i, t) for the weight gradient. Grouped over experts, the first two divide their
        m rows (``divided="m"``: each group has a matrix [k, n]), the weight gradient the rows that it sums
        over (``divided="k"``: each group has a result [m, n]).

        Args:
            m, n, k: sizes of all groups together; empty products take no time.
            dtype: of the operands.
            groups: matrices over which ``divided`` is divided evenly.
            divided: which size.
            result_bytes: bytes moved per element of the result: 2 for a bf16 one, 8 where it is added to a
                float32 total.
            quantise: whether with the kernels that convert the left operand from bf16 to ``dtype``.
        """
        if min(m, n, k, groups) < 1:
            return 0.0
        constants = self._product_constants(dtype)
        rows, summed = (m / groups, float(k)) if divided == "m" else (float(m), k / groups)
        shape = _Shape(groups, rows, n, summed)
        operations = 2.0 * groups * rows * n * summed
        bandwidth = constants.bandwidth * self.hardware.memory_gb_per_s * 1e9
        operands = BYTES[dtype] * groups * summed * (rows + n)
        traffic = (operands + min(result_bytes, _PLAIN) * groups * rows * n) / bandwidth
        full = operations / (constants.tflops * 1e12)
        throttled = 1.0 + constants.power * full / (full + constants.power_us * 1e-6)
        computing = self._tiled(shape, constants, bandwidth) * throttled
        if groups > 1:
            computing *= constants.grouped
        longer, shorter = max(computing, traffic), min(computing, traffic)
        busy = longer + constants.overlap * shorter
        adding = max(0.0, result_bytes - _PLAIN) * groups * rows * n / bandwidth
        busy = (busy**_ADDING + adding**_ADDING) ** (1 / _ADDING)
        seconds = constants.start_us * 1e-6 + busy
        if quantise:
            seconds += self._quantising(m, k, constants)
        return self._step(max(seconds, operations / self._peak(dtype)))

    def quantising(self, m: int, k: int, dtype: Format) -> float:
        """Seconds of the kernels that convert a product's left operand [m, k] from bf16 to ``dtype``."""
        return self._step(self._quantising(m, k, self._product_constants(dtype)))

    def _quantising(self, m: int, k: int, constants: ProductConstants) -> float:
        bandwidth = constants.bandwidth * self.hardware.memory_gb_per_s * 1e9
        return constants.quantise_us * 1e-6 + constants.quantise_bytes * m * k / bandwidth

    def _tiled(self, shape: _Shape, constants: ProductConstants, bandwidth: float) -> float:
        """Seconds of the tiles, with the size of tiles and the split of k that take the least."""
        units = self.multiprocessors or self.hardware.multiprocessors
        per_unit = constants.tflops * 1e12 / self.hardware.multiprocessors
        partial = 8.0 * shape.groups * shape.m * shape.n / bandwidth
        best = float("inf")
        for rows, columns in self.hardware.tiles:
            tiles = shape.groups * -(-shape.m // rows) * -(-shape.n // columns)
            step = 2.0 * (rows * columns + constants.area) / per_unit
            for parts in _SPLITS:
                waves = tiles * parts / units
                rounded = constants.waves * -(-waves // 1) + (1.0 - constants.waves) * waves
                seconds = max(1.0, rounded) * step * (shape.k / parts + constants.depth)
                if parts > 1:
                    seconds += parts * partial + constants.start_us * 1e-6
                best = min(best, seconds)
                if waves >= 8:
                    break  # more parts of k fill no more multiprocessors
        return best

    def attention(
        self,
        action: Literal["forward", "backward"],
        heads: float,
        length: int,
        width: int,
        dtype: Format,
        *,
        keys: int | None = None,
        causal: bool = True,
        window: int | None = None,
        kv_heads: int | None = None,
        value_width: int | None = None,
    ) -> float:
        """Seconds of a fused attention kernel.

        Args:
            action: forward, or all three gradients.
            heads: heads of all sequences: sequences x heads; parts of one count by their pairs.
            length: queries of a sequence.
            width: of a head's queries and keys.
            dtype: of the inputs.
            keys: of a sequence; None for as many as queries. With ``causal`` the queries are the last ones.
            causal: whether a query sees only the keys up to its own.
            window: keys that a query sees at most; None for no limit.
            kv_heads: heads of keys and values, of all sequences; None for ``heads``.
            value_width: of a head's values; None for ``width``.
        """
        keys = length if keys is None else keys
        if heads <= 0 or min(length, keys, width) < 1:  # a context rank may have half a head's pairs
            return 0.0
        value_width = width if value_width is None else value_width
        constants = self._attention_constants(dtype)
        pairs = _pairs(length, keys, causal, window)
        units = self.multiprocessors or self.hardware.multiprocessors
        per_pair = _seconds_per_pair(constants.tpairs, (width + value_width) / 2)
        work = heads * (pairs + constants.padding * length) * per_pair
        seen = min(keys, window or keys)
        tile = min(_QUERIES, length) * (seen + constants.padding) * per_pair * self.hardware.multiprocessors
        computing = work * self.hardware.multiprocessors / units + constants.tail * tile
        bandwidth = constants.bandwidth * self.hardware.memory_gb_per_s * 1e9
        elements = (heads * length + (kv_heads or heads) * keys) * (width + value_width)
        busy = max(computing, BYTES[dtype] * elements / bandwidth)
        operations = 2.0 * heads * pairs * (width + value_width)
        factor, more = (constants.backward, 2.5) if action == "backward" else (1.0, 1.0)
        seconds = constants.start_us * 1e-6 + busy * factor
        return self._step(max(seconds, more * operations / self._peak(dtype)))

    def passes(self, nbytes: float, kernels: int = 1, half: bool = False) -> float:
        """Seconds of kernels that only move data, such as norms, activations and sums.

        Args:
            nbytes: bytes that all of them read and write.
            kernels: how many.
            half: what they move has 16 bits.
        """
        memory = self.hardware.constants.memory
        return self._moving(nbytes, kernels, memory.half if half else None)

    def _moving(self, nbytes: float, kernels: int, share: float | None) -> float:
        memory = self.hardware.constants.memory
        moving = nbytes / ((share or memory.bandwidth) * self.hardware.memory_gb_per_s * 1e9)
        return kernels * memory.launch_us * 1e-6 + moving

    def update(self, nbytes: float, kernels: int = 1) -> float:
        """Seconds of an optimizer's update that moves so many bytes, in so many kernels."""
        return self._moving(nbytes, kernels, self.hardware.constants.memory.update)

    def update_on_host(self, elements: float) -> float:
        """Seconds of an optimizer's update of state in the host's memory; meanwhile gradients arrive and new
        values leave."""
        return elements * _HOST_UPDATE / (self.hardware.constants.host.update_gb_per_s * 1e9)

    def beside_collective(self) -> Kernels:
        """Times of this device while a collective takes some of its multiprocessors."""
        hardware = self.hardware
        left = hardware.multiprocessors - int(hardware.constants.overlap.multiprocessors)
        return Kernels(hardware, self.in_step, max(1, left))

    def _step(self, seconds: float) -> float:
        return seconds * self.hardware.constants.overlap.step if self.in_step else seconds

    def _peak(self, dtype: Format) -> float:
        return self._peaks[dtype]

    @cached_property
    def _peaks(self) -> dict[Format, float]:
        return {dtype: peak for dtype in BYTES if (peak := self.hardware.peak(dtype)) is not None}

    def _product_constants(self, dtype: Format) -> ProductConstants:
        if dtype not in self._products:
            base, ratio = self._nearest(dtype, list(self.hardware.constants.products))
            entry = self.hardware.constants.products[base]
            self._products[dtype] = entry.model_copy(update={"tflops": entry.tflops * ratio})
        return self._products[dtype]

    def _attention_constants(self, dtype: Format) -> AttentionConstants:
        if dtype not in self._attention:
            base, ratio = self._nearest(dtype, list(self.hardware.constants.attention))
            entry = self.hardware.constants.attention[base]
            rates = {width: rate * ratio for width, rate in entry.tpairs.items()}
            self._attention[dtype] = entry.model_copy(update={"tpairs": rates})
        return self._attention[dtype]

    @cached_property
    def _products(self) -> dict[Format, ProductConstants]:
        return dict(self.hardware.constants.products)

    @cached_property
    def _attention(self) -> dict[Format, AttentionConstants]:
        return dict(self.hardware.constants.attention)

    def _nearest(self, dtype: Format, known: list[Format]) -> tuple[Format, float]:
        """The format whose constants serve for one without, and the ratio of their peaks."""
        name = self.hardware.names[0]
        if dtype not in self._peaks:
            peaks = ", ".join(self.hardware.peaks_tflops)
            raise HexadError(f"{name}: found format {dtype}, of which no peak is known; known: {peaks}")
        usable = [base for base in ("bf16", "fp32", *known) if base in known and base in self._peaks]
        if not usable:
            raise HexadError(f"{name}: constants for {dtype} are missing in the hardware file, and for bf16")
        return usable[0], self._peaks[dtype] / self._peaks[usable[0]]


def _pairs(length: int, keys: int, causal: bool, window: int | None) -> float:
    """Pairs of query and key that attention computes."""
    seen = min(keys, window or keys)
    if not causal:
        return float(length) * seen
    # Query i sees keys - length + i + 1 keys, at least none, at most a window.
    first = max(0, keys - length)  # keys before those of the first query that sees any
    growing = min(length, keys, max(0, seen - first))
    last = min(length, keys)
    return growing * first + growing * growing / 2 + (last - growing) * float(seen)


def _seconds_per_pair(tpairs: dict[int, float], width: float) -> float:
    """Linear between the widths that are known, proportional above, constant below."""
    widths = sorted(tpairs)
    if width <= widths[0]:
        return 1e-12 / tpairs[widths[0]]
    if width >= widths[-1]:
        return 1e-12 / tpairs[widths[-1]] * width / widths[-1]
    upper = bisect_left(widths, width)
    low, high = widths[upper - 1], widths[upper]
    part = (width - low) / (high - low)
    return 1e-12 * ((1.0 - part) / tpairs[low] + part / tpairs[high])
