"""A first training step, and what the device reaches at most: matrix products, copies, attention kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.model import attention_kernels
from hexad.model.transformer import build_stages
from hexad.parallel.context.spans import Spans
from hexad.parallel.contributions import WeightGradient
from hexad.parallel.sharding import Shard, declared_parameters
from hexad.topology.mesh import Axis

from .device import Bench
from .record import Record

TOY = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "vocab": 300}
MODELS = {"1B": {"preset": "llama3.2-1b"}, "8B": {"preset": "llama3-8b"}}
DEGREES = (1, 2, 8)
TOKENS = 8192
NARROW = ((4096, 512), (8192, 1024), (2048, 1024))
"""Weights ``[out, in]`` of row-parallel layers, narrow as those of many tensor ranks."""
HEADS = {"1B": (32, 8, 64), "8B": (32, 8, 128)}
"""Heads, KV heads, and width."""


def run(record: Record) -> None:
    """In the order of what is wanted first."""
    bench = Bench.of(record.pretend)
    with record.attempt("first steps"):
        _first_step(record, bench)
    with record.attempt("copies"):
        _copies(record, bench)
    for name, settings in {"toy": TOY}.items() if bench.pretend else MODELS.items():
        for tensor in (1, 2) if bench.pretend else DEGREES:
            for parameter, shape in products(settings, tensor).items():
                row = {"model": name, "tensor": tensor, "weight": parameter}
                with record.attempt(f"product with {parameter} of {name}, tensor {tensor}"):
                    rates = product_rates(bench, TOKENS if not bench.pretend else 64, *shape)
                    record.add("matrix_products", row | rates)
    for shape in ((64, 32),) if bench.pretend else NARROW:
        with record.attempt(f"forms of the weight gradient {shape}"):
            record.add("weight_gradient_forms", _forms(bench, *shape))
    for name, heads in {"toy": (4, 2, 16)}.items() if bench.pretend else HEADS.items():
        for tokens in (64,) if bench.pretend else (4096, 8192):
            for kernel, action in _kernels(bench, *heads, tokens):
                row = {"model": name, "tokens": tokens, "kernel": kernel}
                record.add("attention", row | attention_rates(bench, *heads, tokens, action))


def _first_step(record: Record, bench: Bench) -> None:
    """Three bf16 steps of a small model: losses, and seconds of each."""
    size = TOY if bench.pretend else TOY | {"layers": 4, "hidden": 512, "heads": 8, "ffn_hidden": 1536}
    config = load_config(
        {
            "run": {"compile": "pointwise" if not bench.pretend else "none"},
            "model": size,
            "data": {"sequence": 16 if bench.pretend else 1024},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": "bf16"},
            "lr_schedule": {"warmup": 1},
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), bench.device))
    tokens = torch.randint(300, (2, config.data.sequence + 1), generator=torch.Generator().manual_seed(1))
    batch = [Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())] * 2
    for step in range(3):
        losses: list[float] = []
        seconds = bench.seconds(lambda: losses.append(engine.train_step(batch).loss), 1, 0)  # noqa: B023
        record.add("first_steps", {"step": step, "loss": losses[-1], "seconds": seconds})


def products(settings: dict[str, Any], tensor: int) -> dict[str, tuple[int, int]]:
    """The weights ``[out, in]`` of one layer and the head that a tensor rank multiplies by, by name."""
    model = load_config({"model": settings | {"layers": 1, "tied_embeddings": False}}).model
    axis = Axis("tensor", tuple(range(tensor)), 0)
    shard = Shard({"tensor": axis}, tensor > 1, torch.bfloat16, torch.device("meta"))
    (stage,) = build_stages(model, shard, [range(1)], [0], 0).values()
    return {
        declared.declaration.name: tuple(declared.parameter.shape)
        for declared in declared_parameters(stage)
        if declared.parameter.dim() == 2 and declared.declaration.unit != "embedding"
    }


def product_rates(bench: Bench, tokens: int, out: int, inputs: int) -> dict[str, Any]:
    """Shapes and TFLOP/s of the three products with a weight, as Hexad's layers make them."""
    x, weight, gradient = (bench.random(*shape) for shape in ((tokens, inputs), (out, inputs), (tokens, out)))
    total = torch.zeros((out, inputs), device=bench.device)
    actions: dict[str, Callable[[], Any]] = {
        "forward": lambda: F.linear(x, weight),
        "input_gradient": lambda: gradient @ weight,
        "weight_gradient": lambda: WeightGradient(gradient, x).add_to(total, False),
    }
    flops = 2.0 * tokens * out * inputs
    rates = {f"{name}_tflops": flops / bench.seconds(action) / 1e12 for name, action in actions.items()}
    return {"tokens": tokens, "out": out, "in": inputs} | rates


def _forms(bench: Bench, out: int, inputs: int) -> dict[str, Any]:
    """TFLOP/s of a weight gradient that is added to a float32 total, in several forms."""
    tokens = 64 if bench.pretend else 8192
    x, gradient = bench.random(tokens, inputs), bench.random(tokens, out)
    total = torch.zeros((out, inputs), device=bench.device)
    half = tokens // 2

    def in_halves() -> None:
        for rows in (slice(half), slice(half, None)):
            WeightGradient(gradient[rows], x[rows]).add_to(total, False)

    actions: dict[str, Callable[[], Any]] = {
        "added": lambda: WeightGradient(gradient, x).add_to(total, False),
        "overwritten": lambda: WeightGradient(gradient, x).add_to(total, True),
        "transposed": lambda: WeightGradient(x, gradient).add_to(total.t(), False),
        "in halves": in_halves,
        "bf16, then added": lambda: total.add_(gradient.t() @ x),
        "bf16 alone": lambda: gradient.t() @ x,
    }
    flops = 2.0 * tokens * out * inputs
    return {"out": out, "in": inputs} | {
        f"{name}, tflops": flops / bench.seconds(action) / 1e12 for name, action in actions.items()
    }


def _copies(record: Record, bench: Bench) -> None:
    """TB/s of copies: on the device reads and writes count, between host and device each byte once."""
    size = 2**20 if bench.pretend else 2**30
    source, target = (torch.empty(size, dtype=torch.uint8, device=bench.device).fill_(1) for _ in range(2))
    rows = {"device": (2 * size, lambda: target.copy_(source))}
    wide = source.view(torch.float32)
    rows["device, add in place"] = (2 * size, lambda: wide.add_(1.0))
    if bench.pretend:
        record.absent("host_copies", "there is no device that a host could copy to")
    else:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        rows["host to device"] = (size, lambda: target.copy_(host, non_blocking=True))
        rows["device to host"] = (size, lambda: host.copy_(source, non_blocking=True))
    for name, (nbytes, action) in rows.items():
        record.add("copies", {"copy": name, "tb_per_second": nbytes / bench.seconds(action) / 1e12})


def _kernels(
    bench: Bench, heads: int, kv_heads: int, width: int, tokens: int
) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    """Attention kernels by name, each a function of ``[tokens, heads, width]``; those that cannot compute
    here raise."""
    scale, spans = width**-0.5, Spans(tokens, 1)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> torch.Tensor:
        if not grouped:
            k, v = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (k, v))
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)

    def only(backend: SDPBackend, grouped: bool, *operands: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return dense(*operands, grouped)

    yield "flash", partial(only, SDPBackend.FLASH_ATTENTION, True)
    if bench.pretend:
        yield "math", partial(only, SDPBackend.MATH, True)
    else:
        yield "cudnn", partial(only, SDPBackend.CUDNN_ATTENTION, True)
        yield "efficient, keys repeated", partial(only, SDPBackend.EFFICIENT_ATTENTION, False)
    kernel = attention_kernels.device_kernel(
        bench.device, torch.bfloat16, heads, kv_heads, width, scale, None
    )
    yield "hexad", lambda q, k, v: kernel(q, k, v, spans)
    offsets = spans.offsets(bench.device)

    def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if kernel.varlen is None:
            raise RuntimeError("there is no varlen kernel here")
        return kernel.varlen(q, k, v, offsets, offsets, tokens, tokens, scale=scale, window_size=(-1, 0))

    yield "varlen", varlen
    for name in ("FA3", "FA4"):
        yield f"flash of {name}", partial(_newest, name, partial(only, SDPBackend.FLASH_ATTENTION, True))


def _newest(name: str, action: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """The action with the flash kernels of a FlashAttention package."""
    from torch.nn import attention

    if attention.current_flash_attention_impl() != name:
        attention.activate_flash_attention_impl(name)
    return action(*operands)


def attention_rates(
    bench: Bench, heads: int, kv_heads: int, width: int, tokens: int, kernel: Callable[..., torch.Tensor]
) -> dict[str, Any]:
    """TFLOP/s of causal attention, half of the pairs counted, forward and with backward; or why not."""
    q, k, v = (bench.random(tokens, count, width).requires_grad_() for count in (heads, kv_heads, kv_heads))
    flops = 2.0 * tokens * tokens * heads * width
    try:
        out = kernel(q, k, v)
        gradient = torch.randn_like(out)
        with torch.no_grad():
            forward = bench.seconds(lambda: kernel(q, k, v))
        both = bench.seconds(lambda: torch.autograd.grad(kernel(q, k, v), (q, k, v), gradient))
    except Exception as error:
        return {"why_not": (str(error).strip() or type(error).__name__).splitlines()[0][:200]}
    return {
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / max(both - forward, 1e-9) / 1e12,
        "both_ms": both * 1e3,
    }
