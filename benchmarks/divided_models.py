"""A model of ``transformers`` on two tensor ranks: ``hexad.parallelize`` beside ``parallelize_module``.

    python benchmarks/divided_models.py [--output divided_models.json] [--steps 15]

Both divide the same layers (the model's own plan; PyTorch's has ``DTensor`` weights and gathers the head's
logits too), and make the same steps in turns, in one process per rank: forward, backward, AdamW. Reported is
the ratio of neighbouring steps.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from facts import facts
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hexad import Layout, Mesh, parallelize

SIZE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TOKENS = (4, 256)


def model() -> nn.Module:
    """The same on both sides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZE, use_cache=False))


def of_torch(whole: nn.Module, mesh: Any) -> nn.Module:
    """Divided as PyTorch's documentation does it."""
    plan = {f"{name}_proj": ColwiseParallel() for name in ("self_attn.q", "self_attn.k", "self_attn.v")}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in whole.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, plan)
    rows = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(whole, mesh, {**rows, "lm_head": ColwiseParallel(output_layouts=Replicate())})


class Program:
    """A model with its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step(self, number: int) -> tuple[float, float]:
        """Seconds and loss."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(SIZE["vocab_size"], TOKENS, generator=generator)
        dist.barrier()
        begin = time.perf_counter()
        loss = self.module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin, float(loss.detach())


def rank(steps: int, output: str) -> None:
    """What each rank does; the first one reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    ours = parallelize(model(), Mesh.create(Layout(world=world, tensor=world), torch.device("cpu")))
    theirs = of_torch(model(), torch.distributed.device_mesh.init_device_mesh("cpu", (world,)))
    programs = {"hexad": Program(ours), "torch": Program(theirs)}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    losses: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(steps + 2):
        for name in sorted(programs, reverse=bool(number % 2)):
            taken, loss = programs[name].step(number)
            losses[name].append(loss)
            if number >= 2:
                seconds[name].append(taken)
    if dist.get_rank() == 0:
        paired = median(one / other for one, other in zip(seconds["hexad"], seconds["torch"]))
        worst = max(abs(a - b) / b for a, b in zip(losses["hexad"], losses["torch"]))
        result = facts() | {
            "divided": {name: median(times) for name, times in seconds.items()},
            "paired": paired,
            "losses_differ_by": worst,
            "steps": steps,
        }
        print(json.dumps(result["divided"]), f"ratio {paired:.3f}, losses differ by {worst:.1e}")
        if output:
            Path(output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", default="")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options.steps, options.output)
        return
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*start, *sys.argv], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
