"""Fit the constants of hardware files on published measurements of kernels and collectives.

    python benchmarks/fit_kernels.py --measurements DIR [--gpus h100 ...] [--parts products ...] [--dry-run]

``DIR`` holds ``gemm_rates.csv.gz``, ``moe_rates.csv.gz``, ``attention_rates.csv.gz`` and
``nccl_intra_node.csv`` (from ai-dynamo/aiconfigurator), and ``nccl_all_reduce.jsonl`` (from vTrain). The
models are those that the planner calls: :class:`hexad.planning.kernels.Kernels` and
:func:`hexad.planning.links.in_domain_seconds`. Measurements are single runs with outliers: the loss is the
mean of absolute errors of logarithms, each cut off at 0.5. Errors are cross-validated: constants fitted on
one half of the shapes are compared with the other half, and vice versa. The constants that are written are
fitted on both. Everything else in the files stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from hexad.planning.kernels import BYTES, Kernels
from hexad.planning.links import in_domain_seconds
from hexad.topology import hardware as package
from hexad.topology.hardware import (
    AttentionConstants,
    CollectiveConstants,
    Constants,
    Hardware,
    ProductConstants,
    read_hardware,
    write_hardware,
)

FILES = Path(package.__file__).parent
KINDS = {
    "a100": "A100-SXM-80GB",
    "h100": "H100-SXM-80GB",
    "h200": "H200",
    "b200": "B200",
    "gb200": "GB200",
    "gb300": "GB300",
}
"""Hardware file -> name in the tables."""
CUT = 0.5
SHAPES = 500
"""Shapes of a fit, drawn at random; errors are those of all other shapes."""
WIDTHS = (64, 128, 256)
"""Widths of heads that attention is fitted for; kernels of others are rarely tuned."""
NARROW = 1.76
"""Pairs per second of heads of 64, of those of 128, where only those were measured: FlashAttention-2 reaches
0.88 of the rate with them on an A100 (Dao, 2023, figure 5)."""


class Row(NamedTuple):
    """A measurement: what was computed, its size for the table, its weight in the loss, and its seconds."""

    shape: tuple[Any, ...]
    size: float
    weight: float
    seconds: float


@dataclass(frozen=True)
class Model:
    """A time model with free constants.

    Attributes:
        seconds: of a shape, for constants.
        names: of the constants.
        starts: values from which searches start.
        most: the largest value of each.
    """

    seconds: Callable[[Sequence[float]], Callable[[tuple[Any, ...]], float]]
    names: Sequence[str]
    starts: Sequence[Sequence[float]]
    most: Sequence[float]


def fitted(model: Model, rows: Sequence[Row], restarts: int = 3) -> list[float]:
    """The constants with the least robust error, by Nelder and Mead's method on logarithms."""
    rows = Random(0).sample(list(rows), min(SHAPES, len(rows)))
    total = sum(row.weight for row in rows)
    most = np.array(model.most)

    def constants(point: Any) -> Any:
        return np.minimum(np.exp(np.maximum(point, -12.0)), most)

    def loss(point: Any) -> float:
        seconds = model.seconds(constants(point).tolist())
        error = sum(row.weight * min(CUT, abs(log(seconds(row.shape) / row.seconds))) for row in rows)
        outside = np.maximum(point - np.log(most), 0).sum() + np.maximum(-12.0 - point, 0).sum()
        return error / total + 0.01 * float(outside)

    options = {"maxiter": 100 * len(most), "adaptive": True, "xatol": 1e-3, "fatol": 1e-6}
    points = []
    for start in model.starts:
        point = np.log(np.array(start))
        for _ in range(restarts):
            point = minimize(loss, point, method="Nelder-Mead", options=options).x
        points.append(point)
    return list(constants(min(points, key=loss)).tolist())


class Fit(NamedTuple):
    """Constants, and (size, signed relative error) of rows that theirs were not fitted on."""

    constants: list[float]
    errors: list[tuple[float, float]]


def cross_validated(model: Model, rows: Sequence[Row]) -> Fit:
    """A fit on all rows, with the errors of fits on either half for the other."""
    shuffled = Random(1).sample(list(rows), len(rows))
    halves = shuffled[::2], shuffled[1::2]
    errors = []
    for seen, unseen in (halves, halves[::-1]):
        seconds = model.seconds(fitted(model, seen))
        errors += [(row.size, seconds(row.shape) / row.seconds - 1) for row in unseen]
    return Fit(fitted(model, rows), errors)


# Products

PRODUCT = ("tflops", "start_us", "bandwidth", "depth", "area", "waves", "overlap", "power", "power_us")
NARROW_PRODUCT = (*PRODUCT, "quantise_bytes", "quantise_us")
"""The measured products of 8 and 4 bits begin with the conversion of the left operand: their start is at most
``START`` microseconds, about that of bf16 products, the rest the conversion's."""
START = 2.5


def with_group(hardware: Hardware, group: str, name: str, entry: Any) -> Hardware:
    """With one entry of the constants."""
    constants = hardware.constants.model_copy(update={group: {name: entry}})
    return hardware.model_copy(update={"constants": constants})


def product_model(hardware: Hardware, dtype: Any) -> Model:
    """Products of a format."""

    names = product_names(dtype)

    def seconds(values: Sequence[float]) -> Callable[[tuple[Any, ...]], float]:
        entry = ProductConstants.model_construct(**dict(zip(names, values)), grouped=1.0)
        kernels = Kernels(with_group(hardware, "products", dtype, entry))
        return lambda shape: kernels.product(*shape, dtype, quantise=len(names) > len(PRODUCT))

    peak = (hardware.peak(dtype) or 0) / 1e12
    start = (0.9 * peak, 3.0, 0.8, 130.0, 1500.0, 0.5, 0.15, 0.2, 1000.0, 3.0, 4.0)
    most = (peak, 30, 1, 2000, 20000, 1, 1, 1, 1e5, 20, 20)
    if dtype != "bf16":
        start, most = (start[0], 2.0, *start[2:]), (most[0], START, *most[2:])
    return Model(seconds, names, [start[: len(names)]], most[: len(names)])


def product_names(dtype: str) -> tuple[str, ...]:
    """The constants that products of a format are fitted with."""
    return PRODUCT if dtype == "bf16" else NARROW_PRODUCT


def product_rows(path: Path) -> dict[tuple[str, str], list[Row]]:
    """Measured products by GPU and format."""
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for line in _lines(path / "gemm_rates.csv.gz"):
        m, n, k = (int(line[name]) for name in "mnk")
        operations = 2 * m * n * k
        seconds = operations / float(line["tflops"]) / 1e12
        weight = 1.0 if operations > 1e9 else 0.3
        rows[line["gpu"], line["dtype"]].append(Row((m, n, k), operations, weight, seconds))
    return rows


def grouped_ratio(hardware: Hardware, dtype: Any, path: Path) -> tuple[float, Fit]:
    """How many times longer the products of experts take than their tiles, and the errors of experts with it.

    Of the times for one shape the best is used: kernels differ by up to four times, and training uses good
    ones. Shapes with experts on other GPUs, narrow ones, those with few rows and those that were measured
    once (all of the A100, at a third of the usual rate) are left out.
    """
    name = KINDS[hardware.names[0].lower()]
    rows = []
    for line in _lines(path / "moe_rates.csv.gz"):
        if line["gpu"] != name or line["dtype"] != dtype or line["routing"] != "balanced":
            continue
        numbers = {
            key: int(line[key]) for key in ("tokens", "hidden", "ffn", "topk", "experts", "tp", "ep", "gated")
        }
        count, experts = numbers["tokens"] * numbers["topk"], numbers["experts"]
        tuned = int(line["n"]) > 1 and numbers["ep"] == 1
        if tuned and numbers["ffn"] >= 512 * numbers["tp"] and count >= 128 * experts:
            rows.append((numbers, count, experts, float(line["ms_best"]) / 1e3))

    def seconds(factor: float, row: tuple[dict[str, int], int, int, float]) -> float:
        shape, count, experts, _ = row
        entry = hardware.constants.products[dtype].model_copy(update={"grouped": factor})
        kernels = Kernels(with_group(hardware, "products", dtype, entry))
        inner, hidden = shape["ffn"] // shape["tp"], shape["hidden"]
        parts = 1 + shape["gated"]
        up = kernels.product(count, parts * inner, hidden, dtype, groups=experts)
        down = kernels.product(count, hidden, inner, dtype, groups=experts)
        narrow = BYTES[dtype]  # of rows that are permuted and of activations; sums and results are bf16
        moved = (
            count * ((2 * narrow + 2) * hidden + (2 * parts + narrow) * inner)
            + 2.0 * shape["tokens"] * hidden
        )
        return up + down + kernels.passes(moved, 4)

    def errors(factor: float, some: Sequence[Any]) -> list[float]:
        return [seconds(factor, row) / row[3] - 1 for row in some]

    def best(some: Sequence[Any]) -> float:
        candidates = [1.0 + 0.02 * step for step in range(60)]
        return min(candidates, key=lambda factor: abs(float(np.median(errors(factor, some)))))

    if not rows:
        return 1.0, Fit([1.0], [])
    sample = Random(2).sample(rows, min(400, len(rows)))
    halves = sample[::2], sample[1::2]
    unseen = [
        (2.0 * row[1] * (2 + row[0]["gated"]) * row[0]["hidden"] * row[0]["ffn"] / row[0]["tp"], error)
        for seen, other in (halves, halves[::-1])
        for row, error in zip(other, errors(best(seen), other))
    ]
    factor = best(sample)
    return factor, Fit([factor], unseen)


# Attention


def attention_model(hardware: Hardware, dtype: Any, widths: Sequence[int]) -> Model:
    """Forward kernels of a format."""

    def seconds(values: Sequence[float]) -> Callable[[tuple[Any, ...]], float]:
        rates, rest = values[: len(widths)], values[len(widths) :]
        entry = AttentionConstants.model_construct(
            tpairs=dict(zip(widths, rates)), **dict(zip(("start_us", "bandwidth", "padding", "tail"), rest))
        )
        kernels = Kernels(with_group(hardware, "attention", dtype, entry))

        def of(shape: tuple[Any, ...]) -> float:
            heads, length, width, window, kv_heads = shape
            return kernels.attention("forward", heads, length, width, dtype, window=window, kv_heads=kv_heads)

        return of

    peaks = [(hardware.peak(dtype) or 0) / 4 / width / 1e12 for width in widths]
    start = (*(0.6 * peak for peak in peaks), 8.0, 0.8, 200.0, 0.5)
    names = (*(f"width {width}" for width in widths), "start_us", "bandwidth", "padding", "tail")
    return Model(seconds, names, [start], (*peaks, 50, 1, 4000, 1))


def attention_rows(path: Path) -> dict[tuple[str, str], list[Row]]:
    """Measured attention over complete sequences by GPU and format."""
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for line in _lines(path / "attention_rates.csv.gz"):
        if line["kind"] != "causal" or int(line["head_dim"]) not in WIDTHS or int(line["window"] or 0):
            continue
        batch, length, heads, kv_heads, width = (
            int(line[name]) for name in ("batch", "seq", "heads", "kv_heads", "head_dim")
        )
        operations = 2.0 * batch * heads * width * length**2
        shape = (batch * heads, length, width, None, batch * kv_heads)
        weight = 1.0 if length >= 1024 else 0.3
        rows[line["gpu"], line["dtype"]].append(Row(shape, operations, weight, float(line["ms"]) / 1e3))
    return rows


# Collectives

COLLECTIVE = ("start_us", "hop_us", "gb_per_s", "copies", "low_latency", "switch_us")
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}


def collective_model(hardware: Hardware, operation: Any) -> Model:
    """An operation inside a domain."""

    def seconds(values: Sequence[float]) -> Callable[[tuple[Any, ...]], float]:
        constants = CollectiveConstants.model_construct(**dict(zip(COLLECTIVE, values)))
        return lambda shape: in_domain_seconds(operation, *shape, constants)

    link = hardware.link_gb_per_s
    starts = [(6.0, 1.0, 0.75 * link, copies, low, 10.0) for copies in (0.3, 0.9) for low in (0.1, 0.45)]
    return Model(seconds, COLLECTIVE, starts, (100, 20, link, 2, 1, 100))


def collective_rows(path: Path) -> dict[tuple[str, str], list[Row]]:
    """Measured collectives by GPU and operation."""
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    with (path / "nccl_intra_node.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            shape = (int(line["gpus"]), int(line["bytes"]))
            rows[line["gpu"], OPERATIONS[line["op"]]].append(
                Row(shape, shape[1], 1.0, float(line["ms"]) / 1e3)
            )
    for text in (path / "nccl_all_reduce.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["gpu"].startswith("V100") and line["n_gpus"] == 8:  # fewer lack some of the links
            shape = (line["n_gpus"], line["size_bytes"])
            rows["V100", "all_reduce"].append(Row(shape, shape[1], 1.0, line["out_of_place_us"] / 1e6))
    return rows


# The program


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


CLASSES = {
    "products": (0, 1e9, 2e10, 5e11, 1e99),
    "attention": (0, 1e10, 1e12, 1e99),
    "collectives": (0, 2**20, 2**25, 1e99),
    "experts": (0, 1e11, 1e99),
}
"""Limits of the size classes: operations, or bytes."""


def table(part: str, name: str, fit: Fit) -> str:
    """A line of the table: median, 90th percentile and bias, of all and per size class."""
    cells = []
    limits = CLASSES[part]
    for low, high in ((limits[0], limits[-1]), *pairwise(limits)):
        errors = np.array([error for size, error in fit.errors if low <= size < high])
        cells.append(
            f"{np.median(abs(errors)):6.1%} {np.percentile(abs(errors), 90):6.1%} {np.median(errors):+6.1%}"
            if len(errors)
            else " " * 20
        )
    return f"{part:12s}{name:26s} {' | '.join(cells)}"


def _task(part: str, hardware: Hardware, name: str, rows: Sequence[Row]) -> Fit:
    if part == "products":
        model = product_model(hardware, name)
    elif part == "attention":
        model = attention_model(hardware, name, _widths(rows))
    else:
        model = collective_model(hardware, name)
    return cross_validated(model, rows)


def _widths(rows: Sequence[Row]) -> list[int]:
    return sorted({row.shape[2] for row in rows})


def _entry(part: str, name: str, fit: Fit, rows: Sequence[Row]) -> Any:
    if part == "products":
        return ProductConstants(**dict(zip(product_names(name), fit.constants)))
    if part == "collectives":
        return CollectiveConstants(**dict(zip(COLLECTIVE, fit.constants)))
    widths = _widths(rows)
    rates = dict(zip(widths, fit.constants))
    if widths == [128]:
        rates = {64: NARROW * rates[128], **rates}
    rest = dict(zip(("start_us", "bandwidth", "padding", "tail"), fit.constants[len(widths) :]))
    return AttentionConstants(tpairs=rates, **rest)


def main() -> None:
    """Fit, print the table of errors, and write the constants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measurements", type=Path, required=True, help="directory of the tables")
    parser.add_argument("--gpus", nargs="+", choices=[*KINDS, "v100"], default=[*KINDS, "v100"])
    parts = {"products": product_rows, "attention": attention_rows, "collectives": collective_rows}
    parser.add_argument("--parts", nargs="+", choices=[*parts, "experts"], default=[*parts, "experts"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    options = parser.parse_args()
    kinds = {**KINDS, "v100": "V100"}
    tasks = []
    for part in (part for part in options.parts if part in parts):
        rows = parts[part](options.measurements)
        tasks += [
            (part, gpu, name, rows[kinds[gpu], name])
            for gpu in options.gpus
            for kind, name in sorted(rows)
            if kind == kinds[gpu]
        ]
    print("median, 90th percentile and bias; of all, and by size class", *CLASSES.items(), sep="\n")
    entries: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    with ProcessPoolExecutor(options.processes) as pool:
        fits = [
            pool.submit(partial(_task, part, read_hardware(gpu), name, rows))
            for part, gpu, name, rows in tasks
        ]
        for (part, gpu, name, rows), pending in zip(tasks, fits):
            fit = pending.result()
            entries[gpu][part][name] = _entry(part, name, fit, rows)
            print(table(part, f"{gpu} {name}", fit), flush=True)
    for gpu in options.gpus:
        hardware = updated(read_hardware(gpu), entries[gpu])
        if "experts" in options.parts and gpu in KINDS:
            hardware = with_grouped(hardware, gpu, options.measurements)
        if not options.dry_run:
            write_hardware(FILES / f"{gpu}.yaml", hardware)


def updated(hardware: Hardware, groups: dict[str, dict[str, Any]]) -> Hardware:
    """With newly fitted constants in place of old ones."""
    constants: Constants = hardware.constants
    update = {group: getattr(constants, group) | entries for group, entries in groups.items()}
    return hardware.model_copy(update={"constants": constants.model_copy(update=update)})


def with_grouped(hardware: Hardware, gpu: str, path: Path) -> Hardware:
    """With the constants of grouped products, printing their errors."""
    entries = dict(hardware.constants.products)
    for dtype, entry in hardware.constants.products.items():
        factor, fit = grouped_ratio(hardware, dtype, path)
        if not fit.errors:
            continue
        print(table("experts", f"{gpu} {dtype} x {factor:.2f}", fit), flush=True)
        entries[dtype] = entry.model_copy(update={"grouped": factor})
    return updated(hardware, {"products": entries})


if __name__ == "__main__":
    main()
