"""Tokens/s and MFU of one GPU on a model of about a billion parameters, bf16, compiled per block.

    python benchmarks/gpu_step.py [--micro 2] [--steps 10] [--no-compile] [--json FILE]

The model is llama3.2-1b (1.24B parameters) at sequence 4096. MFU counts training FLOPs as
:func:`hexad.model.counts.flops_per_token` does (causal attention halved, nothing recomputed) over the GPU's
dense bf16 peak. The first steps, in which blocks are compiled, are not timed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.model.counts import flops_per_token, parameter_count
from hexad.topology.cluster import peak_flops

_WARM_UP = 3


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train on random tokens and time the steps after warm-up."""
    config = load_config(
        {
            "run": {"compile": not options.no_compile},
            "model": {"preset": options.model},
            "data": {"sequence": options.sequence},
            "batch": {"micro": options.micro, "global": options.micro * options.microbatches},
            "precision": {"dtype": "bf16"},
            "lr_schedule": {"warmup": 10},
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), device))
    generator = torch.Generator().manual_seed(1)
    shape = (options.micro, options.sequence + 1)
    tokens = torch.randint(int(config.model.vocab), shape, generator=generator)
    batch = [Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())] * options.microbatches
    seconds, losses = [], []
    for _ in range(_WARM_UP + options.steps):
        begin = time.perf_counter()
        losses.append(engine.train_step(batch).loss)  # reading the loss waits for the device
        seconds.append(time.perf_counter() - begin)
    step = median(seconds[_WARM_UP:])
    rate = config.batch.global_ * options.sequence / step
    peak = peak_flops(device, torch.bfloat16)
    flops = flops_per_token(config.model, options.sequence)
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "model": options.model,
        "parameters": parameter_count(config.model, options.sequence),
        "sequence": options.sequence,
        "micro": options.micro,
        "microbatches": options.microbatches,
        "compile": not options.no_compile,
        "step_seconds": step,
        "tokens_per_second": rate,
        "mfu": None if peak is None else flops * rate / peak,
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
        "losses": losses,
    }


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama3.2-1b", help="a preset")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--micro", type=int, default=2, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches per step")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_step: no GPU is visible; benchmarks/step_time.py measures CPUs")
    result = measure(options, torch.device("cuda", 0))
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
