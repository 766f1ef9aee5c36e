"""What a planner has to know of a device: rates of products by shape, of grouped products, of attention by
length, what the host takes for an operator's call and for a collective's, and memory that is reserved."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.comm import all_reduce_async
from hexad.model import attention_kernels
from hexad.parallel.context.spans import Spans

from .ceilings import attention_rates, product_rates
from .device import Bench
from .nccl import Alone, join_alone
from .record import Record

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
"""Weights ``[out, in]`` of a layer of the 8B class."""
ROWS = (1024, 2048, 4096, 16384, 65536)
VOCABULARIES = (128256, 128512, 131072)
"""Of the output head: the model's, and it with padding."""
EXPERTS = (
    (8, 4096, 14336, 16384),
    (64, 2048, 1408, 49152),
    (128, 2048, 768, 65536),
    (256, 7168, 2048, 65536),
)
"""Number, hidden size, an expert's width, rows of all: of Mixtral, DeepSeekMoE, Qwen3-30B and DeepSeek-V3."""
LENGTHS = (1024, 4096, 16384)


def run(record: Record) -> None:
    """In the order of what nothing else tells."""
    bench = Bench.of(record.pretend)
    parts: dict[str, Callable[[Record, Bench], None]] = {
        "host": _host,
        "grouped": _grouped,
        "products": _products,
        "head": _head,
        "attention": _lengths,
        "reserved": _reserved,
    }
    for name, part in parts.items():
        with record.attempt(name):
            part(record, bench)
        gc.collect()
        if not bench.pretend:
            torch.cuda.empty_cache()


def _host(record: Record, bench: Bench) -> None:
    """Microseconds of the host for calls of the smallest size, many in a row without waiting."""
    x, weight = bench.random(16, 16), bench.random(16, 16)
    leaf = bench.random(16, 16).requires_grad_()
    join_alone(bench)
    axis = Alone("tensor", (0,), 0, dist.group.WORLD, bench.device)
    calls: dict[str, Callable[[], Any]] = {
        "add in place": lambda: x.add_(0.0),
        "product": lambda: torch.mm(x, weight),
        "view": lambda: x.view(4, 64),
        "empty": lambda: torch.empty_like(x),
        "product, recorded": lambda: leaf @ weight,
        "all_reduce and wait": lambda: all_reduce_async(x, axis).wait(),
    }
    repeats = 20 if bench.pretend else 500
    for name, call in calls.items():
        call()
        times = []
        for _ in range(5):
            bench.synchronize()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            times.append((time.perf_counter() - begin) / repeats)
        record.add("host", {"call": name, "us": 1e6 * median(times)})
    dist.destroy_process_group()


def _grouped(record: Record, bench: Bench) -> None:
    """TFLOP/s of ``torch._grouped_mm`` with balanced and with uneven groups, both in its three forms."""
    if bench.pretend:
        record.absent("grouped_products", "the CPU's grouped product is no kernel of its own")
        return
    for experts, hidden, width, rows in EXPERTS:
        for spread in ("balanced", "uneven"):
            row = {"experts": experts, "hidden": hidden, "width": width, "rows": rows, "groups": spread}
            with record.attempt(f"{experts} experts, {spread}"):
                record.add(
                    "grouped_products", row | _grouped_rates(bench, experts, hidden, width, rows, spread)
                )


def _grouped_rates(
    bench: Bench, experts: int, hidden: int, width: int, rows: int, spread: str
) -> dict[str, float]:
    shares = torch.ones(experts) if spread == "balanced" else torch.arange(1, experts + 1).float()
    counts = (shares / shares.sum() * rows / 16).floor().to(torch.int64) * 16
    counts[-1] += rows - counts.sum()
    offsets = counts.cumsum(0).to(torch.int32).to(bench.device)
    x, gradient = bench.random(rows, hidden), bench.random(rows, width)
    weight = bench.random(experts, width, hidden)
    product = torch._grouped_mm
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: product(x, weight.transpose(1, 2), offs=offsets),
        "input_gradient": lambda: product(gradient, weight, offs=offsets),
        "weight_gradient": lambda: product(gradient.t(), x, offs=offsets),
    }
    flops = 2.0 * rows * hidden * width
    return {f"{name}_tflops": flops / bench.seconds(form, 5, 2) / 1e12 for name, form in forms.items()}


def _products(record: Record, bench: Bench) -> None:
    """Rows of several lengths by the weights of a layer."""
    for name, (out, inputs) in {"toy": (32, 64)}.items() if bench.pretend else SHAPES.items():
        for rows in (64,) if bench.pretend else ROWS:
            record.add("products", {"weight": name} | product_rates(bench, rows, out, inputs))


def _head(record: Record, bench: Bench) -> None:
    """The output head's products by rows at a time and size of the vocabulary."""
    for vocab in (300,) if bench.pretend else VOCABULARIES:
        for rows in (64,) if bench.pretend else (2048, 4096, 8192):
            record.add("head", product_rates(bench, rows, vocab, 64 if bench.pretend else 4096))


def _lengths(record: Record, bench: Bench) -> None:
    """The kernel that Hexad chooses, by length, with two widths of heads."""
    for width in (16,) if bench.pretend else (64, 128):
        heads, kv_heads = (4, 2) if bench.pretend else (32, 8)
        kernel = attention_kernels.device_kernel(
            bench.device, torch.bfloat16, heads, kv_heads, width, width**-0.5, None
        )
        for tokens in (64,) if bench.pretend else LENGTHS:
            spans = Spans(tokens, 1)
            action = partial(_with_spans, kernel, spans)
            rates = attention_rates(bench, heads, kv_heads, width, tokens, action)
            record.add("attention", {"width": width, "tokens": tokens} | rates)


def _with_spans(kernel: Callable[..., torch.Tensor], spans: Spans, *operands: torch.Tensor) -> torch.Tensor:
    return kernel(*operands, spans)


def _reserved(record: Record, bench: Bench) -> None:
    """Memory of three steps of an 8B model with 10 layers: what was allocated at most, what is reserved, and
    the largest free pieces of it after the steps."""
    if bench.pretend:
        record.absent("reserved", "a CPU's allocator reserves nothing")
        return
    torch.cuda.reset_peak_memory_stats(bench.device)
    config = load_config(
        {
            "run": {"device": "cuda", "compile": "pointwise"},
            "model": {"preset": "llama3-8b", "layers": 10},
            "data": {"sequence": 4096},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": "bf16"},
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), bench.device))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(int(config.model.vocab), (2, 2, 4097), generator=generator)
    batch = [Microbatch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]
    for step in range(3):
        engine.train_step(batch)
        statistics = torch.cuda.memory_stats(bench.device)
        free = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        gib = 2.0**30
        row = {"step": step, **(bench.memory() or {})}
        row["requested_gib"] = statistics["requested_bytes.all.peak"] / gib
        row["free_pieces"], row["free_gib"] = len(free), sum(free) / gib
        row["largest_free_gib"] = [round(size / gib, 2) for size in sorted(free)[-6:]]
        context = torch.cuda.mem_get_info(bench.device)
        row["used_on_device_gib"] = (context[1] - context[0]) / gib
        record.add("reserved", row)
