"""Measurements of a CPU rank: operators inside Hexad's own steps, whole steps, and collectives."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hexad import comm
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.engine import Engine
from hexad.topology.devices import cpu_has_bf16
from hexad.topology.hardware.constants import Format
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh

from .figures import (
    MODELS,
    AttentionFigure,
    CollectiveFigure,
    Figures,
    ProductFigure,
    StepFigure,
    calibration_config,
)

_STEPS = 5
"""Steps of each kind, of which the median counts."""
_SIZES = (2**12, 2**15, 2**18, 2**20, 2**22, 2**24)
"""Bytes of collectives."""
_BETWEEN = 5e-3
"""Seconds of computation between two collectives."""
_CALLS = 20
"""Collectives of a loop."""
_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm"})
_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_ATTENTION = frozenset({_FORWARD, f"{_FORWARD}_backward"})


def measure(world: Axis | None) -> Figures:
    """Measure this rank while the others measure themselves, then collectives of all of them.

    Args:
        world: all ranks; None if there is one.
    """
    figures = Figures(_copies())
    formats: list[Format] = ["fp32", "bf16"] if cpu_has_bf16() else ["fp32"]
    for dtype in formats:
        for model in MODELS:
            _steps(model, dtype, figures)
    if world is not None:
        figures.collectives = list(_collectives(world))
    return figures


def _copies() -> float:
    """Bytes per second of a copy that no cache holds."""
    source, target = torch.empty(2**24), torch.empty(2**24)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _seconds(action: Callable[[], object], times: int = _STEPS) -> float:
    """The median of several runs, after one that does not count."""
    action()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


@dataclass
class _Timing(TorchDispatchMode):
    """Seconds of every matrix product and attention kernel, by shape."""

    products: defaultdict[tuple[int, int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    attention: defaultdict[tuple[bool, int, int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        name = function.overloadpacket.__name__
        if name in _PRODUCTS:
            left, right = [value for value in args if isinstance(value, Tensor)][-2:]
            self.products[left.shape[-2], right.shape[-1], left.shape[-1]].append(seconds)
        elif name in _ATTENTION:
            queries = args[0] if name == _FORWARD else args[1]
            sequences, heads, length, width = queries.shape
            self.attention[name == _FORWARD, sequences * heads, length, width].append(seconds)
        return result


def _steps(model: tuple[int, ...], dtype: Format, figures: Figures) -> None:
    """Steps of a model with one and with three microbatches, and what one of three does."""
    config = calibration_config(model, 3, dtype)
    mesh = Mesh.create(Layout.from_settings(config.parallel, 1), torch.device("cpu"))
    engine = Engine(config, mesh)
    _, _, _, _, vocab, sequence, micro, _ = model
    ids = torch.randint(0, vocab, (3, micro, sequence + 1))
    batch = [Microbatch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]
    engine.train_step(batch)
    short, long, timed = [], [], []
    for _ in range(_STEPS):  # in turns: the machine may be slower for a while
        short.append(_seconds_once(lambda: engine.train_step(batch[:1])))
        long.append(_seconds_once(lambda: engine.train_step(batch)))
    for _ in range(3):
        with _Timing() as timing:
            engine.train_step(batch)
        timed.append(timing)
    microbatch = (median(long) - median(short)) / 2
    products = _middle([timing.products for timing in timed])
    attention = _middle([timing.attention for timing in timed])
    for (m, n, k), (seconds, _) in products.items():
        figures.products.append(ProductFigure(dtype, m, n, k, seconds))
    for (forward, heads, length, width), (seconds, _) in attention.items():
        figures.attention.append(AttentionFigure(dtype, forward, heads, length, width, seconds))
    spent = (_total(products) / 3, _total(attention) / 3)
    figures.steps.append(StepFigure(dtype, model, microbatch, median(short) - microbatch, *spent))


def _seconds_once(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _total(kernels: dict[Any, tuple[float, int]]) -> float:
    return sum(seconds * calls for seconds, calls in kernels.values())


def _middle(runs: list[Any]) -> dict[Any, tuple[float, int]]:
    """Median seconds of a call, and calls per step, by shape."""
    return {
        shape: (median(seconds for run in runs for seconds in run[shape]), len(runs[0][shape]))
        for shape in runs[0]
    }


def _collectives(world: Axis) -> Iterator[CollectiveFigure]:
    """The time that a collective adds to the computation before and after it: alone, ranks would meet at once
    and threads be awake."""
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    times = max(1, round(_BETWEEN / _seconds(lambda: left @ right)))

    def loop(call: Callable[[], object]) -> float:
        comm.all_reduce(torch.zeros(1), world)  # begin together
        start = time.perf_counter()
        for _ in range(_CALLS):
            for _ in range(times):
                left @ right
            call()
        return (time.perf_counter() - start) / _CALLS

    for nbytes in _SIZES:
        tensor = torch.zeros(nbytes // 4)
        part = tensor[: nbytes // 4 // world.size].clone()
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(comm.all_reduce, tensor, world),
            "all_gather": partial(comm.all_gather, part, world),
            "reduce_scatter": partial(comm.reduce_scatter, tensor, world),
            "all_to_all": partial(comm.all_to_all, tensor, world),
        }
        for operation, call in calls.items():
            call()
            pairs = [(loop(call), loop(lambda: None)) for _ in range(_STEPS)]
            seconds = max(1e-5, median(longer - shorter for longer, shorter in pairs))
            yield CollectiveFigure(operation, world.size, nbytes, seconds)
