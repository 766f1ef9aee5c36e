"""Repeats with ``run.deterministic``: two processes that train beside each other on one GPU, each with caches
of the compiler and addresses of its own. Gradients, moments and master values are hashed in every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.launching.launch import deterministic, start_on

from .record import Record

MODEL = {"preset": "llama3.2-1b", "layers": 4}
TOY = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 96, "vocab": 300}
STEPS = 20
MICROBATCHES = 2
_PART = 2**24
"""Elements that are hashed at a time."""
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""An odd number whose multiples are far apart: 2^64 over the golden ratio."""


def run(record: Record) -> None:
    """Runs that ask for the same bits, and the same ones without ``run.deterministic``."""
    for fixed in (True, False):
        name = "deterministic" if fixed else "as it comes"
        with record.attempt(name), tempfile.TemporaryDirectory(prefix="hexad-bits-") as directory:
            steps = _both(record, Path(directory), fixed)
            different = [number for number, kinds in enumerate(steps) if kinds]
            kinds = sorted({kind for kinds in steps for kind in kinds})
            row = {"setting": name, "steps": len(steps), "different_steps": len(different)}
            row |= {"first_different": different[0] if different else None, "kinds": kinds}
            record.add("repeats", row)
            if fixed and different:
                raise RuntimeError(f"step {different[0]} has other bits of {', '.join(kinds)}")


def _both(record: Record, directory: Path, fixed: bool) -> list[list[str]]:
    """Per step the kinds of numbers whose hashes differ."""
    processes = []
    for number in range(2):
        caches = {name: str(directory / f"{name}-{number}") for name in _CACHES}
        arguments = [
            str(number),
            str(int(fixed)),
            str(int(record.pretend)),
            str(directory / f"{number}.json"),
        ]
        command = [sys.executable, "-m", "gpu.bits", *arguments]
        processes.append(subprocess.Popen(command, env=os.environ | caches))
    try:
        statuses = [process.wait(timeout=max(1.0, record.left() - 2)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        raise RuntimeError(f"exit statuses {statuses}")
    one, other = (json.loads((directory / f"{number}.json").read_text()) for number in range(2))
    return [[kind for kind in a if a[kind] != b[kind]] for a, b in zip(one, other, strict=True)]


_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def train(number: int, fixed: bool, pretend: bool) -> list[dict[str, Any]]:
    """Hashes of every step, by what was hashed; ``number`` is the process's."""
    device = torch.device("cpu") if pretend else torch.device("cuda", 0)
    config = load_config(
        {
            "run": {"device": device.type, "compile": "none" if pretend else "pointwise"},
            "model": TOY if pretend else MODEL,
            "data": {"sequence": 32 if pretend else 2048},
            "batch": {"micro": 2, "global": 2 * MICROBATCHES},
            "precision": {"dtype": "bf16"},
            "lr_schedule": {"warmup": 2},
        }
    )
    with deterministic(fixed, device):
        if not pretend:
            start_on(device)
        others = [torch.empty((5 + 3 * number) * 1_000_003, device=device)]  # other addresses
        engine = Engine(config, Mesh.create(Layout(world=1), device))
        hashes = []
        for step in range(3 if pretend else STEPS):
            complete = engine.start_step(_batch(config.data.sequence, int(config.model.vocab), step))
            buckets = engine.optimizer.buckets
            row: dict[str, Any] = {"gradients": _hashes([bucket.gradient for bucket in buckets])}
            result = complete()
            row["loss and norm"] = [result.loss.hex(), result.grad_norm.hex()]
            row["masters"] = _hashes([bucket.master for bucket in buckets])
            for bucket in buckets:
                for name, tensor in engine.optimizer.rule.state(bucket):
                    row.setdefault(name, []).extend(_hashes([tensor]))
            hashes.append(row)
        del others
    return hashes


def _batch(sequence: int, vocab: int, step: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(vocab, (MICROBATCHES, 2, sequence + 1), generator=generator)
    return [Microbatch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def _hashes(tensors: list[torch.Tensor]) -> list[int]:
    """One number per tensor, of its bits and where they are: whole numbers, whose sum has no order."""
    sums = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        bits = tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
        for begin in range(0, bits.numel(), _PART):
            part = bits[begin : begin + _PART].to(torch.int64)
            places = torch.arange(begin + 1, begin + 1 + len(part), device=tensor.device)
            mixed = (part + places * _FACTOR) * _FACTOR
            total += ((mixed ^ (mixed >> 29)) * _FACTOR).sum()
        sums.append(total)
    return torch.stack(sums).tolist()


if __name__ == "__main__":
    process, asked, simulated, file = sys.argv[1:]
    Path(file).write_text(json.dumps(train(int(process), asked == "1", simulated == "1")))
