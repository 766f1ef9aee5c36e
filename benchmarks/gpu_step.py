"""Tokens/s, MFU and memory of one GPU on models of the 1B and the 8B class, in bf16.

    python benchmarks/gpu_step.py [--models llama3.2-1b llama3-8b:16] [--micro 2] [--steps 10]
                                  [--compile pointwise] [--json FILE]

A model is a preset, with a number of layers where all of them would not fit: llama3-8b with 16 of its 32
layers has 4.5 billion parameters. MFU counts training FLOPs as :func:`hexad.planning.costs.flops_per_token`
does (causal attention halved, nothing recomputed) over the GPU's dense bf16 peak. The first steps, in which
functions are compiled, are not timed. Memory is the allocator's peak beside :mod:`hexad.planning.memory`'s.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.config import Config
from hexad.planning import resolve
from hexad.planning.costs import flops_per_token, parameter_count
from hexad.planning.memory import predict
from hexad.topology.cluster import peak_flops

_WARM_UP = 3
MODELS = ("llama3.2-1b", "llama3-8b:16")


def config_of(model: str, options: argparse.Namespace) -> Config:
    """Of ``PRESET`` or ``PRESET:LAYERS``."""
    preset, _, layers = model.partition(":")
    return load_config(
        {
            "run": {"device": "cuda", "compile": options.compile},
            "model": {"preset": preset, **({"layers": int(layers)} if layers else {})},
            "data": {"sequence": options.sequence},
            "batch": {"micro": options.micro, "global": options.micro * options.microbatches},
            "precision": {"dtype": "bf16"},
            "lr_schedule": {"warmup": 10},
        }
    )


def measure(model: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train on random tokens and time the steps after warm-up."""
    torch.cuda.reset_peak_memory_stats(device)
    config = config_of(model, options)
    layout = Layout(world=1)
    engine = Engine(config, Mesh.create(layout, device))
    generator = torch.Generator().manual_seed(1)
    shape = (options.micro, options.sequence + 1)
    tokens = torch.randint(int(config.model.vocab), shape, generator=generator)
    batch = [Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())] * options.microbatches
    seconds, losses = [], []
    for _ in range(_WARM_UP + options.steps):
        begin = time.perf_counter()
        losses.append(engine.train_step(batch).loss)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    step = median(seconds[_WARM_UP:])
    rate = config.batch.global_ * options.sequence / step
    peak = peak_flops(device, torch.bfloat16)
    measured = torch.cuda.max_memory_allocated(device)
    predicted = predict(resolve(config, layout), 0).total
    return {
        "model": model,
        "parameters": parameter_count(config.model, options.sequence),
        "sequence": options.sequence,
        "micro": options.micro,
        "microbatches": options.microbatches,
        "compile": options.compile,
        "step_seconds": step,
        "tokens_per_second": rate,
        "mfu": None if peak is None else flops_per_token(config.model, options.sequence) * rate / peak,
        "peak_memory_gib": measured / 2**30,
        "predicted_memory_gib": predicted / 2**30,
        "predicted_over_measured": predicted / measured,
        "losses": losses,
    }


def main() -> None:
    """Measure every model and print one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="PRESET or PRESET:LAYERS")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--micro", type=int, default=2, help="sequences per microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches per step")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--compile", choices=("none", "pointwise", "full"), default="pointwise")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_step: no GPU is visible; benchmarks/step_time.py measures CPUs")
    device = torch.device("cuda", 0)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    result["models"] = []
    for model in options.models:
        try:
            result["models"].append(measure(model, options, device))
        except torch.OutOfMemoryError as error:
            result["models"].append({"model": model, "error": str(error).splitlines()[0]})
        gc.collect()  # the engine of this model refers to itself
        torch.cuda.empty_cache()
        print(json.dumps(result["models"][-1], indent=1), flush=True)
        if options.json:  # after every model: what is measured is not lost
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
