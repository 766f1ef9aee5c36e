"""Memory that was predicted beside memory that was allocated: families, formats and what is recomputed."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import torch

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.config import Config
from hexad.planning import resolve
from hexad.planning.memory import predict

from .device import Bench
from .record import Record

SIZE: dict[str, Any] = {"layers": 6, "hidden": 1024, "heads": 16, "ffn_hidden": 3072, "vocab": 32000}
TOY: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 96, "vocab": 300}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 4},
    "gpt2": {"family": "gpt2"},
    "qwen3": {"family": "qwen3", "kv_heads": 4},
}
RECOMPUTE = ("none", "selective", "full")
DTYPES = ("bf16", "fp32", "fp16")


def run(record: Record) -> None:
    """What is not compiled first: it takes a second each."""
    bench = Bench.of(record.pretend)
    cases = [("none", *case) for case in product(FAMILIES, DTYPES, RECOMPUTE)]
    cases += [("pointwise", family, "bf16", kind) for family, kind in product(FAMILIES, RECOMPUTE)]
    for number, (mode, family, dtype, recompute) in enumerate(cases):
        if record.left() < (20 if mode == "pointwise" else 5):
            record.absent("remaining_cases", f"no time for {len(cases) - number} of {len(cases)}")
            return
        row = {"family": family, "dtype": dtype, "compile": mode, "recompute": recompute}
        with record.attempt(", ".join(row.values())):
            record.add("cases", row | _measured(bench, _config(bench, *row.values())))
        if bench.pretend and number == 1:
            return


def _config(bench: Bench, family: str, dtype: str, mode: str, recompute: str) -> Config:
    return load_config(
        {
            "run": {"device": bench.device.type, "compile": mode},
            "model": (TOY if bench.pretend else SIZE) | FAMILIES[family],
            "data": {"sequence": 32 if bench.pretend else 2048},
            "batch": {"micro": 4, "global": 8},
            "precision": {"dtype": dtype},
            "memory": {"recompute": recompute},
        }
    )


def _measured(bench: Bench, config: Config) -> dict[str, Any]:
    """GiB at the most in two steps, above what was allocated before."""
    gc.collect()
    before = 0
    if not bench.pretend:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
    predicted = predict(resolve(config, Layout(world=1)), 0).total / 2**30
    engine = Engine(config, Mesh.create(Layout(world=1), bench.device))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(int(config.model.vocab), (2, 4, config.data.sequence + 1), generator=generator)
    batch = [Microbatch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]
    for _ in range(2):
        engine.train_step(batch)
    if bench.pretend:
        return {"predicted_gib": predicted}
    peak = torch.cuda.max_memory_allocated(bench.device)
    measured = (peak - before) / 2**30
    return {"predicted_gib": predicted, "allocated_gib": measured, "ratio": predicted / measured}
