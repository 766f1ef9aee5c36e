"""Constants of a hardware file from what ranks have measured. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product as combinations
from math import log
from statistics import median
from typing import Any, Literal, TypeVar

import numpy as np

from hexad.parallel.inventory import Pass, Product
from hexad.planning import resolve
from hexad.planning.job import Job
from hexad.planning.kernels import Kernels
from hexad.planning.links import Cluster, in_domain_seconds
from hexad.planning.step_time import Predictor
from hexad.topology.hardware import (
    AttentionConstants,
    CollectiveConstants,
    Constants,
    Hardware,
    ProductConstants,
)
from hexad.topology.hardware.constants import Format, HostConstants, MemoryConstants, OverlapConstants
from hexad.topology.layout import Layout

from .figures import (
    AttentionFigure,
    CollectiveFigure,
    Figures,
    ProductFigure,
    StepFigure,
    calibration_config,
)

_DEPTHS = (0, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_OVERLAPS = (0.0, 0.25, 0.5, 0.75, 1.0)
_STARTS = (0.0, 2.0, 5.0, 10.0, 20.0)
_PADDINGS = (0, 8, 16, 32, 64, 96, 128, 192, 256, 384)
_ABOVE = 1.05
"""A peak, in the rate of the fastest product."""
Timed = TypeVar("Timed", ProductFigure, AttentionFigure)
_SIZE = 8, 16
"""Rows and columns of the results that a CPU's kernels compute as a unit."""


def fitted(figures: Figures, name: str, memory: int, ranks: int) -> Hardware:
    """The hardware file of a host.

    Args:
        figures: of all its ranks.
        name: of its processor.
        memory: bytes of the host.
        ranks: that it has been measured with.
    """
    formats = sorted({figure.dtype for figure in figures.products})
    peaks = {dtype: _ABOVE * max(map(_rate, _of(figures.products, dtype))) / 1e12 for dtype in formats}
    bare = Hardware(
        names=(name,),
        source=f"hexad plan --calibrate, {ranks} ranks of one thread",
        vendor="cpu",
        multiprocessors=1,
        tiles=(_SIZE,),
        peaks_tflops=peaks,
        memory_gib={max(1, round(memory / ranks / 1e9)): memory / ranks / 2**30},
        memory_gb_per_s=figures.copies / 1e9,
        domain=ranks,
        link_gb_per_s=max([1.0, *(_sent(figure) / figure.seconds / 1e9 for figure in figures.collectives)]),
        network_gb_per_s=1.0,
        constants=Constants(source="calibrated"),
    )
    constants = Constants(
        source="calibrated",
        products={dtype: _products(bare, dtype, _of(figures.products, dtype)) for dtype in formats},
        attention={dtype: _attention(bare, dtype, _of(figures.attention, dtype)) for dtype in formats},
        memory=_memory(bare, figures.steps),
        overlap=OverlapConstants(multiprocessors=0.0, slowdown=1.0, step=1.0),
        host=HostConstants(operator_us=0.0, collective_us=0.0),
        collectives=_collectives(figures.collectives),
    )
    return bare.model_copy(update={"constants": constants})


def _of(figures: Iterable[Timed], dtype: Format) -> list[Timed]:
    return [figure for figure in figures if figure.dtype == dtype]


def _rate(product: ProductFigure) -> float:
    return 2.0 * product.m * product.n * product.k / product.seconds


def _error(pairs: Iterable[tuple[float, float]]) -> float:
    """The mean absolute error of the logarithms of (predicted, measured); what takes long counts more."""
    values = [(abs(log(predicted / measured)), measured**0.5) for predicted, measured in pairs]
    return sum(error * weight for error, weight in values) / sum(weight for _, weight in values)


def _with(hardware: Hardware, **parts: Any) -> Kernels:
    return Kernels(hardware.model_copy(update={"constants": Constants(source="calibrated", **parts)}))


def _products(hardware: Hardware, dtype: Format, figures: Sequence[ProductFigure]) -> ProductConstants:
    best, least, peak = None, float("inf"), (hardware.peak(dtype) or 0.0) / 1e12
    for depth, overlap, start in combinations(_DEPTHS, _OVERLAPS, _STARTS):
        entry = ProductConstants(tflops=peak, start_us=start, bandwidth=1.0, depth=depth, overlap=overlap)
        for _ in range(3):
            kernels = _with(hardware, products={dtype: entry})
            pairs = [
                (kernels.product(figure.m, figure.n, figure.k, dtype), figure.seconds) for figure in figures
            ]
            if (error := _error(pairs)) < least:
                best, least = entry, error
            entry = entry.model_copy(update={"tflops": min(peak, entry.tflops * _middle_ratio(pairs))})
    assert best is not None
    return best


def _middle_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The ratio that predicts as many seconds too long as too short."""
    half, total = sum(seconds for _, seconds in pairs) / 2, 0.0
    for ratio, seconds in sorted((predicted / seconds, seconds) for predicted, seconds in pairs):
        total += seconds
        if total >= half:
            return ratio
    return 1.0


def _attention(hardware: Hardware, dtype: Format, figures: Sequence[AttentionFigure]) -> AttentionConstants:
    best, least = None, float("inf")
    for padding in _PADDINGS:
        done: defaultdict[int, list[float]] = defaultdict(list)
        for figure in figures:
            if figure.forward:
                pairs = figure.heads * (figure.length**2 / 2 + padding * figure.length)
                done[figure.width].append(pairs / figure.seconds)
        rates = {width: median(values) / 1e12 for width, values in sorted(done.items())}
        entry = AttentionConstants(tpairs=rates, start_us=10.0, bandwidth=1.0, padding=padding)
        times = _attention_times(hardware, dtype, entry, figures)
        slower = [
            measured / predicted
            for (predicted, measured), figure in zip(times, figures)
            if not figure.forward
        ]
        entry = entry.model_copy(update={"backward": max(1.0, median(slower) * entry.backward)})
        error = _error(_attention_times(hardware, dtype, entry, figures))
        if error < least:
            best, least = entry, error
    assert best is not None
    return best


def _attention_times(
    hardware: Hardware, dtype: Format, entry: AttentionConstants, figures: Iterable[AttentionFigure]
) -> list[tuple[float, float]]:
    kernels = _with(hardware, attention={dtype: entry})
    return [(_attended(kernels, figure), figure.seconds) for figure in figures]


def _multiplied(kernels: Kernels, figure: ProductFigure) -> float:
    return kernels.product(figure.m, figure.n, figure.k, figure.dtype)


def _attended(kernels: Kernels, figure: AttentionFigure) -> float:
    action: Literal["forward", "backward"] = "forward" if figure.forward else "backward"
    return kernels.attention(action, figure.heads, figure.length, figure.width, figure.dtype)


def _memory(hardware: Hardware, figures: Sequence[StepFigure]) -> MemoryConstants:
    """Time of steps besides products and attention, as time per byte and per operator."""
    formats = sorted({figure.dtype for figure in figures}, reverse=True)
    rows, updates = [], []
    for figure in figures:
        job = job_of(figure)
        passes, operators = declared(job)
        rest = max(1e-6, figure.microbatch - figure.products - figure.attention)
        nbytes = sum(function.nbytes for function in passes)
        rows.append([*(nbytes * (figure.dtype == dtype) for dtype in formats), operators, rest])
        updated = sum(sum(grids.values()) for grids in job.elements.values()) * job.update
        updates.append(updated / max(1e-6, figure.besides))
    table = np.array(rows)
    scaled = table / table[:, -1:]  # errors relative to the time
    solution = _positive(scaled[:, :-1], scaled[:, -1])
    memory = hardware.memory_gb_per_s * 1e9
    shares = {dtype: min(1.0, 1 / max(seconds, 1e-15) / memory) for dtype, seconds in zip(formats, solution)}
    return MemoryConstants(
        bandwidth=shares["fp32"],
        half=shares.get("bf16"),
        launch_us=solution[-1] * 1e6,
        update=min(1.0, median(updates) / memory),
    )


def _positive(table: Any, values: Any) -> list[float]:
    """Least squares with coefficients of 0 and more: those below are left out, one after the other."""
    kept = list(range(table.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(table[:, kept], values, rcond=None)
        worst = min(range(len(kept)), key=lambda place: solution[place])
        if solution[worst] >= 0:
            break
        del kept[worst]
    coefficients = dict(zip(kept, map(float, solution)))
    return [coefficients.get(column, 0.0) for column in range(table.shape[1])]


def job_of(figure: StepFigure) -> Job:
    """The job that was measured, with one microbatch."""
    config = calibration_config(figure.model, 1, figure.dtype)
    return Job.of(resolve(config, Layout.from_settings(config.parallel, 1)))


def declared(job: Job) -> tuple[list[Pass], int]:
    """Passes over memory of a microbatch, and the number of all its operators."""
    (stage,) = job.stages.values()
    parts = [stage.before_layers(job.run), stage.after_layers(job.run)]
    parts += stage.layer_operations(job.run, job.recompute, False)
    operations = [operation for part in parts for operation in (*part.forward, *part.backward)]
    passes = [operation for operation in operations if isinstance(operation, Pass)]
    products = sum(isinstance(operation, Product) for operation in operations)
    return passes, sum(function.kernels for function in passes) + products


def _sent(figure: CollectiveFigure) -> float:
    """Bytes that a rank sends."""
    times = 2 if figure.operation == "all_reduce" else 1
    return times * figure.nbytes * (figure.ranks - 1) / figure.ranks


def _collectives(figures: Sequence[CollectiveFigure]) -> dict[Any, CollectiveConstants]:
    kinds = _by_operation(figures)
    constants: dict[Any, CollectiveConstants] = {}
    for operation, measured in kinds.items():
        rates = [_sent(figure) / figure.seconds / 1e9 for figure in measured if figure.nbytes >= 2**20]
        start = min(figure.seconds for figure in measured) * 1e6
        best, least = None, float("inf")
        for slower, share in combinations(np.linspace(0.8, 1.6, 17), (0.5, 0.7, 0.85, 1.0)):
            entry = CollectiveConstants(start_us=start * share, gb_per_s=median(rates) * float(slower))
            error = _error(
                (in_domain_seconds(operation, figure.ranks, figure.nbytes, entry), figure.seconds)  # type: ignore[arg-type]
                for figure in measured
            )
            if error < least:
                best, least = entry, error
        assert best is not None
        constants[operation] = best
    return constants


def _by_operation(figures: Iterable[CollectiveFigure]) -> dict[str, list[CollectiveFigure]]:
    kinds: defaultdict[str, list[CollectiveFigure]] = defaultdict(list)
    for figure in figures:
        kinds[figure.operation].append(figure)
    return kinds


def errors(hardware: Hardware, figures: Figures) -> dict[str, float]:
    """Median absolute errors of what was measured, by kind: of those of 100 us and more."""
    kernels = Kernels(hardware)
    predicted: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for product in figures.products:
        predicted["products"].append((_multiplied(kernels, product), product.seconds))
    for call in figures.attention:
        predicted["attention"].append((_attended(kernels, call), call.seconds))
    for sent in figures.collectives:
        operation: Any = sent.operation
        constants = hardware.constants.collectives[operation]
        seconds = in_domain_seconds(operation, sent.ranks, sent.nbytes, constants)
        predicted["collectives"].append((seconds, sent.seconds))
    cluster = Cluster(hardware, hardware.domain)
    for figure in figures.steps:
        seconds = Predictor(job_of(figure), cluster).step.total
        predicted["steps"].append((seconds, figure.microbatch + figure.besides))
    return {
        kind: median(abs(guess / seconds - 1) for guess, seconds in pairs if seconds >= 1e-4)
        for kind, pairs in predicted.items()
    }
