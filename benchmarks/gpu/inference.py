"""Forward passes without gradients: tokens per second and launches of generation with a model of the 8B
class, with and without ``torch.inference_mode``; and what exact arithmetic costs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest import mock

import torch

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.config import Config
from hexad.dataset.text.token_text import TokenText
from hexad.dataset.text.tokenizer import ByteTokenizer
from hexad.generation.loading import build_model, converted, make_replica
from hexad.generation.replica import Replica
from hexad.generation.requests import Request
from hexad.generation.sampling import Sampling
from hexad.generation.weights import StageWeights
from hexad.planning import resolve

from .device import Bench
from .profile import profiled
from .record import Record

LARGE: dict[str, Any] = {"preset": "llama3-8b"}
SMALL: dict[str, Any] = {"preset": "llama3.2-1b"}
TOY: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "vocab": 300}
BATCHES = (1, 64)
CONTEXT, TOKENS = 1024, 48


def run(record: Record) -> None:
    """Generation first."""
    bench = Bench.of(record.pretend)
    with record.attempt("generation"):
        _generation(record, bench)
    gc.collect()
    if not bench.pretend:
        torch.cuda.empty_cache()
    for exact in (False, True):
        with record.attempt(f"forward pass, exact {exact}"):
            record.add("forward_pass", {"exact": exact} | _forward(bench, exact))


def _generation(record: Record, bench: Bench) -> None:
    """One model, requests of one length at a time."""
    toy = bench.pretend
    config = load_config(
        {
            "run": {"device": bench.device.type, "compile": "none" if toy else "pointwise"},
            "model": TOY if toy else LARGE,
            "data": {"sequence": 64 if toy else 2048},
            "batch": {"micro": 1, "global": 1},
            "precision": {"dtype": "bf16"},
            "inference": {"cache_tokens": 4096 if toy else 64 * 1280, "sequences": 64},
        }
    )
    mesh = Mesh.create(Layout(world=1), bench.device)
    resolved = resolve(config, mesh.layout)
    model = build_model(resolved.config, mesh, resolved.plan.layers, torch.bfloat16)
    for parameter in model.parameters():
        values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=bench.device)
        parameter.data = values.normal_(std=0.02)
    model = converted(model, torch.bfloat16)
    StageWeights(model).pack()
    replica = make_replica(model, resolved.config, mesh, 8192, TokenText(ByteTokenizer()))
    number = 0
    for batch in (1, 4) if toy else BATCHES:
        for name, context in (("inference_mode", nullcontext), ("no_grad", _no_grad)):
            with record.attempt(f"batch {batch}, {name}"):
                row = {"batch": batch, "guards": name}
                with context(replica):
                    row |= _decoded(bench, replica, resolved.config, batch, number)
                number += batch
                record.add("generation", row)
    replica.stop()


@contextmanager
def _no_grad(replica: Replica) -> Iterator[None]:
    """The worker's computation under ``no_grad``, under which compiled functions need no guards."""
    worker = replica.worker
    plain = type(worker).compute_batch.__wrapped__  # type: ignore[attr-defined]
    with mock.patch.object(worker, "compute_batch", lambda step: plain(worker, step)), torch.no_grad():
        yield


def _decoded(bench: Bench, replica: Replica, config: Config, batch: int, first: int) -> dict[str, Any]:
    """Figures of a batch: of its prompts, of a step of all sequences, kernels."""
    context, tokens = (16, 8) if bench.pretend else (CONTEXT, TOKENS)
    vocab = int(config.model.vocab)
    generator = torch.Generator().manual_seed(first)
    replica.scheduler.pool.forget()
    for number in range(first + 1, first + batch + 1):
        prompt = torch.randint(vocab, (context,), generator=generator).tolist()
        replica.add(number, Request(tuple(prompt), Sampling(tokens=tokens)))
    begin, begun = time.perf_counter(), set[int]()
    while len(begun) < batch:
        begun |= {update.number for update in replica.advance() if update.tokens}
    bench.synchronize()
    prompts = time.perf_counter() - begin
    steps: list[float] = []
    for _ in range(2 if bench.pretend else 24):
        begin = time.perf_counter()
        replica.advance()
        steps.append(time.perf_counter() - begin)
    profile = profiled(bench, replica.advance)
    while not replica.idle:
        replica.advance()
    seconds = median(steps)
    return {
        "context": context,
        "prompt_tokens_per_second": batch * context / prompts,
        "step_ms": 1e3 * seconds,
        "tokens_per_second": batch / seconds,
        "busy_ms": profile["busy_ms"],
        "launches": profile["launches"],
        "kinds_ms": profile["kinds_ms"],
    }


def _forward(bench: Bench, exact: bool) -> dict[str, Any]:
    """Figures of the training forward pass without gradients, in bf16."""
    toy = bench.pretend
    config = load_config(
        {
            "run": {"device": bench.device.type, "compile": "none"},
            "model": TOY if toy else SMALL,
            "data": {"sequence": 32 if toy else 2048},
            "batch": {"micro": 2, "global": 2},
            "precision": {"dtype": "bf16", "exact": exact},
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), bench.device), training=False)
    sequence = config.data.sequence
    tokens = torch.randint(
        int(config.model.vocab), (2, sequence + 1), generator=torch.Generator().manual_seed(1)
    )
    batch = [Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    losses: list[float] = []
    seconds = bench.seconds(lambda: losses.append(engine.evaluate(batch)[0]), 3, 1)
    profile = profiled(bench, lambda: engine.evaluate(batch), 1)
    return {
        "tokens": tokens[:, 1:].numel(),
        "ms": 1e3 * seconds,
        "tokens_per_second": tokens[:, 1:].numel() / seconds,
        "loss": losses[-1] / tokens[:, 1:].numel(),
        **{name: profile[name] for name in ("busy_ms", "launches", "kinds_ms", "kernels")},
    }
