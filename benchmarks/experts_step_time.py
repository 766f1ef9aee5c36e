"""Step time with experts on CPUs, in one run: Hexad beside transformers' Mixtral, and beside itself without
experts.

    python benchmarks/experts_step_time.py [--sizes mixtral|fine] [--steps 5] [--json FILE]
    python benchmarks/experts_step_time.py --causes       # where Hexad's step goes, by part of the layer

One process, one thread, fp32, AdamW without clipping: the sizes of ``step_time.py``'s model. transformers'
model takes each of its implementations of experts; ``dense`` is Hexad's model of equal active parameters.
All processes hold as many tokens, and alternate, a step each. Printed are medians of the wall seconds of a
step, and ratios (Hexad / other): medians of neighbours'."""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from facts import facts
from turns import Program, Step, serve, wall

SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "vocab": 8192}
LENGTH, MICRO, COUNT = 512, 2, 4
SIZES = {"mixtral": (8, 2, 704), "fine": (64, 8, 176)}
"""Experts, those of a token, and their width: large ones, and many small ones of as many active
parameters."""
IMPLEMENTATIONS = ("eager", "grouped_mm")
"""Of experts, in transformers; batched_mm copies the weights of each token, which takes more memory than
there is."""


def _tokens() -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(SHAPE["vocab"], (COUNT, MICRO, LENGTH + 1), generator=generator)


def _hexad(sizes: str, experts: bool) -> Step:
    import torch

    from hexad import Engine, Layout, Mesh, Microbatch, load_config

    count, top_k, width = SIZES[sizes]
    moe = {"experts": count, "top_k": top_k, "ffn_hidden": width} if experts else None
    config = load_config(
        {
            "run": {"device": "cpu", "compile": "none", "steps": 1000},
            "model": {**SHAPE, "ffn_hidden": width * top_k, "moe": moe},
            "data": {"sequence": LENGTH},
            "batch": {"micro": MICRO, "global": MICRO * COUNT},
            "precision": {"dtype": "fp32"},
            "optimizer": {"clip": 0.0},
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), torch.device("cpu")))
    batch = [Microbatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in _tokens()]
    return lambda _: {"loss": engine.train_step(batch).loss}


def _transformers(sizes: str, implementation: str) -> Step:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    count, top_k, width = SIZES[sizes]
    config = MixtralConfig(
        vocab_size=SHAPE["vocab"],
        hidden_size=SHAPE["hidden"],
        intermediate_size=width,
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv_heads"],
        num_local_experts=count,
        num_experts_per_tok=top_k,
        use_cache=False,
        experts_implementation=implementation,
        attn_implementation="sdpa",
    )
    model = MixtralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batch = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in _tokens()]

    def step(_: str) -> dict[str, Any]:
        total = 0.0
        optimizer.zero_grad()
        for tokens, labels in batch:
            logits = model(input_ids=tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / COUNT
            loss.backward()
            total += loss.item()
        optimizer.step()
        return {"loss": total}

    return step


def make_step(sizes: str, name: str) -> Step:
    """The step of a program."""
    if name in ("hexad", "dense"):
        return _hexad(sizes, name == "hexad")
    return _transformers(sizes, name)


def compare(sizes: str, steps: int) -> dict[str, Any]:
    """All programs in turns: medians of seconds, and of the ratios of neighbouring steps."""
    names = ("hexad", *IMPLEMENTATIONS, "dense")
    programs = {
        name: Program([[sys.executable, __file__, "--sizes", sizes, "--worker", name]]) for name in names
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for program in programs.values():
            program.wait()
        for number in range(steps + 1):
            for name, program in programs.items():
                taken = wall(program.step("step"))
                if number:
                    seconds[name].append(taken)
    finally:
        for program in programs.values():
            program.close()
    ratios = {
        name: median(a / b for a, b in zip(seconds["hexad"], seconds[name]))
        for name in names
        if name != "hexad"
    }
    return {"seconds": {name: median(values) for name, values in seconds.items()}, "ratios": ratios}


def causes(sizes: str) -> dict[str, float]:
    """Seconds of a step of each part of the expert layers, forward and backward, on one thread."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from hexad.model import router
    from hexad.parallel.expert import dispatch, grouped

    torch.set_num_threads(1)
    parts = {
        "router": (router.Router, "forward"),
        "route": (dispatch.Dispatcher, "route"),
        "scatter": (dispatch.Local, "scatter"),
        "collect": (dispatch.Local, "collect"),
        "products": (grouped, "product"),
        "weight gradients": (grouped, "add_gradients"),
    }

    def named(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with record_function(f"part {name}"):
                return function(*arguments, **options)

        return call

    for name, (owner, attribute) in parts.items():
        setattr(owner, attribute, named(name, getattr(owner, attribute)))
    step = _hexad(sizes, True)
    step("warm")
    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step("step")
    taken = {"step": time.perf_counter() - began}
    for event in trace.key_averages():
        if event.key.startswith("part "):
            taken[event.key.removeprefix("part ")] = event.cpu_time_total / 1e6
    return taken


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=list(SIZES), default="mixtral")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--causes", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker")
    options = parser.parse_args()
    if options.worker:
        serve(lambda: make_step(options.sizes, options.worker), 1)
        return
    result: dict[str, Any] = (
        {"causes": causes(options.sizes)} if options.causes else compare(options.sizes, options.steps)
    )
    for group, values in result.items():
        for name, value in values.items():
            print(f"{group:8} {name:18} {value:.3f}")
    if options.json:
        options.json.write_text(json.dumps({**facts("transformers"), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
