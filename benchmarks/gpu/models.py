"""Models of the 1B and the 8B class: step time, MFU, kernels and memory, beside what was predicted.

Tokens per second and MFU are medians over steps of random tokens after those in which functions are compiled.
MFU counts training FLOPs as :func:`hexad.planning.costs.flops_per_token` does (causal attention halved,
nothing recomputed) over the GPU's published dense bf16 peak.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import roofline
import torch

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.config import Config
from hexad.parallel import pointwise
from hexad.planning import resolve
from hexad.planning.costs import flops_per_token, parameter_count
from hexad.planning.memory import predict
from hexad.topology.cluster import peak_flops
from hexad.topology.devices import Attainable, known_gpu

from .device import Bench
from .plain import make_step
from .profile import profiled
from .record import Record

MODELS: dict[str, dict[str, Any]] = {
    "llama3.2-1b": {"preset": "llama3.2-1b"},
    "llama3-8b, 10 layers": {"preset": "llama3-8b", "layers": 10},
}
TOY: dict[str, dict[str, Any]] = {
    "toy": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "vocab": 300}
}
WARM_UP, STEPS = 3, 8
SEQUENCES = 8
"""Of a step."""
USABLE = 0.9
"""Part of the memory that a plan may fill: the rest is the context's, the libraries' and the heap's."""


def run(record: Record) -> None:
    """Per model Hexad, its profile, and plain PyTorch; then the other modes of compilation."""
    bench = Bench.of(record.pretend)
    models = TOY if bench.pretend else MODELS
    modes = ("none",) if bench.pretend else ("pointwise", "none", "full")
    if bench.pretend:
        record.absent("mfu", "a CPU has no published peak")
    for name, settings in models.items():
        config, micro = _fitting(settings, modes[0], bench)
        _measure(record, bench, name, config, f"hexad, {modes[0]}", _hexad)
        with record.attempt(f"roofline of {name}"):
            _predicted(record, bench, name, config, micro)
        while not _measure(record, bench, name, config, "plain PyTorch, compiled", _plain) and micro > 1:
            micro //= 2  # it has no plan that says what fits
            config = _config(settings, micro, modes[0], bench)
    for name, settings in models.items():
        for mode in modes[1:]:
            config, _ = _fitting(settings, mode, bench)
            if record.left() < 25:
                record.absent("further_modes", f"no time for {mode} of {name} and what comes after")
                return
            _measure(record, bench, name, config, f"hexad, {mode}", _hexad)


def _config(settings: dict[str, Any], micro: int, mode: str, bench: Bench) -> Config:
    return load_config(
        {
            "run": {"device": bench.device.type, "compile": mode},
            "model": settings,
            "data": {"sequence": 32 if bench.pretend else 4096},
            "batch": {"micro": micro, "global": SEQUENCES},
            "precision": {"dtype": "bf16"},
            "lr_schedule": {"warmup": 10},
        }
    )


def _fitting(settings: dict[str, Any], mode: str, bench: Bench) -> tuple[Config, int]:
    """With as many sequences in a microbatch as fit by the plan, four at most."""
    for micro in (4, 2, 1):
        config = _config(settings, micro, mode, bench)
        if predict(resolve(config, Layout(world=1)), 0).total < USABLE * bench.capacity():
            break
    return config, micro


def _batch(config: Config) -> list[Microbatch]:
    shape = (config.batch.micro, config.data.sequence + 1)
    generator = torch.Generator().manual_seed(1)
    rows = (
        torch.randint(int(config.model.vocab), shape, generator=generator)
        for _ in range(config.batch.global_ // config.batch.micro)
    )
    return [Microbatch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def _hexad(config: Config, bench: Bench) -> Callable[[], float]:
    engine, batch = Engine(config, Mesh.create(Layout(world=1), bench.device)), _batch(config)
    return lambda: engine.train_step(batch).loss


def _plain(config: Config, bench: Bench) -> Callable[[], float]:
    return make_step(config.model, _batch(config), bench.device, compiled=not bench.pretend)


def _measure(
    record: Record,
    bench: Bench,
    name: str,
    config: Config,
    program: str,
    make: Callable[[Config, Bench], Callable[[], float]],
) -> bool:
    """Time the steps of a program and profile two of them; returns whether its memory was enough."""
    row: dict[str, Any] = {"model": name, "program": program, "micro": config.batch.micro}
    if make is _hexad:
        row["predicted_gib"] = predict(resolve(config, Layout(world=1)), 0).total / 2**30
    fits = True
    with record.attempt(f"{program} of {name}"):
        try:
            for update in _figures(bench, config, make):
                for table in ("kernels", "host_calls"):
                    for line in update.pop(table, []):
                        record.add(table, {"model": name, "program": program, **line})
                row |= update
                _replace(record, "steps", row)
        except torch.OutOfMemoryError as error:
            _replace(record, "steps", row | {"why_not": str(error).splitlines()[0]})
            if make is _hexad:  # whose plan said that it fits
                raise
            fits = False
    gc.collect()  # an engine refers to itself
    pointwise._compiled.cache_clear()
    torch.compiler.reset()  # the next one's functions would be compiled for any size
    if not bench.pretend:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
        torch.cuda.reset_accumulated_memory_stats(bench.device)
    return fits


def _replace(record: Record, table: str, row: dict[str, Any]) -> None:
    """The row in the place of an earlier one of the same program."""
    known = record.document["figures"].get(table, [])
    others = [r for r in known if (r["model"], r["program"]) != (row["model"], row["program"])]
    record.put(table, [*others, dict(row)])


def _figures(
    bench: Bench, config: Config, make: Callable[[Config, Bench], Callable[[], float]]
) -> Iterator[dict[str, Any]]:
    """Of a program, as they come."""
    step, losses = make(config, bench), []
    for _ in range(WARM_UP):
        losses.append(step())
        bench.synchronize()
    yield {"first_loss": losses[0]}
    seconds = bench.seconds(lambda: losses.append(step()), STEPS, 0)
    rate = config.batch.global_ * config.data.sequence / seconds
    peak = None if bench.pretend else peak_flops(bench.device, torch.bfloat16)
    work = flops_per_token(config.model, config.data.sequence)
    yield {
        "parameters": parameter_count(config.model, config.data.sequence),
        "step_ms": 1e3 * seconds,
        "tokens_per_second": rate,
        "mfu": None if peak is None else work * rate / peak,
        "last_loss": losses[-1],
        **(bench.memory() or {"allocated_gib": None}),
    }
    profile = profiled(bench, step)
    # The profiler slows the host, not the kernels.
    idle = max(0.0, 1 - profile["busy_ms"] / (1e3 * seconds))
    yield {"idle_share": idle, "launches": profile["launches"]}
    yield {key: profile[key] for key in ("kinds_ms", "kernels", "host_calls")}


def _predicted(record: Record, bench: Bench, name: str, config: Config, micro: int) -> None:
    """The roofline's milliseconds per kind of operator beside those measured."""
    gpu = None if bench.pretend else known_gpu(torch.cuda.get_device_name(bench.device))
    rates = Attainable(1e11, 1e11, 1e10, "invented") if bench.pretend else gpu and gpu.attainable
    measured = next(
        (row for row in record.document["figures"]["steps"] if row["model"] == name and "kinds_ms" in row),
        None,  # Hexad is the first
    )
    if rates is None or measured is None:
        why = "nobody has measured what this GPU reaches" if rates is None else f"{name} was not measured"
        record.absent("roofline", why)
        return
    cost = roofline.run(config.model, config.data.sequence, 1, not bench.pretend, rates, micro)
    spent = dict(measured["kinds_ms"])
    for kind, seconds in cost.by_kind().items():
        predicted = 1e3 * seconds * SEQUENCES / micro
        took = spent.pop(kind, 0.0) if kind != "others" else sum(spent.get(k, 0.0) for k in _POINTWISE)
        record.add("roofline", {"model": name, "kind": kind, "predicted_ms": predicted, "measured_ms": took})
    record.add("roofline", {"model": name, "kind": "optimizer", "measured_ms": spent.get("optimizer", 0.0)})


_POINTWISE = ("compiled", "copies", "others")
"""Kinds of kernels that the roofline counts as others."""
