"""Seconds of a layer of experts that two ranks divide, on CPUs: Hexad's beside megatron-core's, in one run.

    python benchmarks/expert_layer_time.py [--sizes mixtral|fine] [--steps 7] [--json FILE]

Two ranks of one thread, ``expert`` 2, fp32. A step: four microbatches of 1,024 tokens on each rank, forward
and backward, weight gradients added up. megatron-core's layer is its ``MoELayer`` with ``SequentialMLP``, the
one that computes on a host, and the ``alltoall`` dispatcher; what it asks of CUDA is done by the host, as in
``conformance/megatron_adapter.py``. Both have the same weights and inputs; before anything is timed, norms of
the last output, its input's gradient and all weight gradients, and products of these with random numbers, are
compared. The programs alternate, a step each; printed are medians, and the median ratio of neighbours."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from experts_step_time import COUNT, LENGTH, MICRO, SHAPE, SIZES
from facts import facts
from turns import Program, Step, serve, wall

RANKS, HIDDEN, TOKENS = 2, SHAPE["hidden"], MICRO * LENGTH
NAMES = ("hexad", "megatron")


def _weights(sizes: str) -> tuple[Any, Any, Any]:
    """Of the router ``[experts, hidden]``, of gate and up ``[experts, 2, width, hidden]``, and of down
    ``[experts, hidden, width]``."""
    import torch

    experts, _, width = SIZES[sizes]
    generator = torch.Generator().manual_seed(1)
    shapes = (experts, HIDDEN), (experts, 2, width, HIDDEN), (experts, HIDDEN, width)
    return tuple(torch.randn(shape, generator=generator) * 0.05 for shape in shapes)  # type: ignore[return-value]


def _inputs(rank: int) -> list[tuple[Any, Any]]:
    """Of each microbatch the layer's input and the gradient of its output, ``[tokens, hidden]``."""
    import torch

    generator = torch.Generator().manual_seed(2 + rank)
    made = (torch.randn((2, TOKENS, HIDDEN), generator=generator) for _ in range(COUNT))
    return [(x.requires_grad_(), gradient) for x, gradient in (pair.unbind() for pair in made)]


def _figures(parts: Iterable[Any]) -> dict[str, Any]:
    """Of each tensor its norm, and its product with random numbers, in which every element has its own
    place."""
    import torch

    figures = []
    for part in parts:
        values = part.detach().flatten().double()
        numbers = torch.randn(len(values), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        figures.append((float(values.norm()), float(values @ numbers)))
    return {"figures": figures}


class _Totals:
    """Where Hexad's layers contribute: a total for each parameter, as in the buckets of an engine."""

    deferring = False

    def __init__(self) -> None:
        self.totals: dict[Any, Any] = {}
        self.fresh: set[Any] = set()

    def compute_aside(self) -> None:
        """Nothing is set aside."""

    def contribute(self, parameter: Any, contribution: Any, last: bool = True) -> None:
        """Add to the parameter's total."""
        contribution.add_to(self.totals[parameter], parameter in self.fresh)
        self.fresh.discard(parameter)


def _hexad(sizes: str, rank: int) -> Step:
    import torch

    from hexad import Layout, Mesh, load_config
    from hexad.model.experts import MixtureOfExperts
    from hexad.model.inventory import ModelInventory
    from hexad.model.positions import Geometry
    from hexad.model.transformer import make_shard
    from hexad.parallel.context.spans import Spans
    from hexad.parallel.contributions import attach

    experts, top_k, width = SIZES[sizes]
    moe = {"experts": experts, "top_k": top_k, "ffn_hidden": width, "dispatcher": "alltoall"}
    config = load_config({"model": {**SHAPE, "layers": 1, "moe": moe}, "parallel": {"data": 2, "expert": 2}})
    mesh = Mesh.create(Layout.from_settings(config.parallel, RANKS), torch.device("cpu"))
    shard = make_shard(config.parallel, mesh, torch.float32)
    layer: Any = MixtureOfExperts(ModelInventory(config.model).layer(0).parts[1], shard, 0)  # type: ignore[arg-type]
    router, gate_up, down = _weights(sizes)
    mine = slice(rank * experts // RANKS, (rank + 1) * experts // RANKS)
    totals = _Totals()
    for parameter, values in (
        (layer.router.weight, router),
        (layer.experts.gate_up, gate_up[mine]),
        (layer.experts.down, down[mine]),
    ):
        parameter.data.copy_(values)
        totals.totals[parameter] = torch.empty_like(parameter)
        attach(parameter, totals, direct=True)  # type: ignore[arg-type]
    where = Geometry(Spans(TOKENS, MICRO), torch.arange(TOKENS) % LENGTH)
    batches = _inputs(rank)

    def step(command: str) -> dict[str, Any]:
        totals.fresh = set(totals.totals)
        for x, gradient in batches:
            x.grad = None
            y = layer(x, where)
            y.backward(gradient)
        return _figures((y, x.grad, *totals.totals.values())) if command == "compare" else {}

    return step


def _megatron(sizes: str, rank: int) -> Step:
    import torch
    from conformance.megatron_adapter import on_host
    from torch.nn import functional as F

    on_host()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    experts, top_k, width = SIZES[sizes]
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS, expert_tensor_parallel_size=1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=SHAPE["heads"],
        ffn_hidden_size=width,
        moe_ffn_hidden_size=width,
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        expert_model_parallel_size=RANKS,
        params_dtype=torch.float32,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    layer = MoELayer(config, spec.submodules, layer_number=1)
    router, gate_up, down = _weights(sizes)
    layer.router.weight.data.copy_(router)
    for number, expert in enumerate(layer.experts.local_experts, rank * experts // RANKS):
        expert.linear_fc1.weight.data.copy_(gate_up[number].flatten(0, 1))
        expert.linear_fc2.weight.data.copy_(down[number])
    batches = _inputs(rank)

    def step(command: str) -> dict[str, Any]:
        layer.zero_grad()
        for x, gradient in batches:
            x.grad = None
            y, _ = layer(x.view(LENGTH, MICRO, HIDDEN))
            y.backward(gradient.view_as(y))
        if command != "compare":
            return {}
        first, second = (
            torch.stack([getattr(expert, name).weight.grad for expert in layer.experts.local_experts])
            for name in ("linear_fc1", "linear_fc2")
        )
        return _figures((y, x.grad, layer.router.weight.grad, first, second))

    return step


def compare(sizes: str, steps: int) -> dict[str, Any]:
    """Both in turns: medians of seconds, and of the ratios of neighbouring steps."""
    programs = {
        name: Program(
            [
                [sys.executable, __file__, "--sizes", sizes, "--worker", name, "--rank", str(rank)]
                for rank in range(RANKS)
            ]
        )
        for name in NAMES
    }
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    try:
        for program in programs.values():
            program.wait()
        figures = [
            [pair for rank in program.step("compare") for pair in rank["figures"]]
            for program in programs.values()
        ]
        for number in range(steps + 1):
            for name, program in programs.items():
                taken = wall(program.step("step"))
                if number:
                    seconds[name].append(taken)
    finally:
        for program in programs.values():
            program.close()
    # A product with random numbers is about as large as the norm.
    difference = max(
        max(abs(ours - theirs) for ours, theirs in zip(one, other)) / one[0]
        for one, other in zip(*figures, strict=True)
    )
    ratio = median(a / b for a, b in zip(*(seconds[name] for name in NAMES)))
    return {
        "seconds": {name: median(values) for name, values in seconds.items()},
        "ratios": {"hexad / megatron": ratio},
        "differences": {"of any tensor": difference},
    }


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", choices=list(SIZES), default="mixtral")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=NAMES)
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    if options.worker:
        make = {"hexad": _hexad, "megatron": _megatron}[options.worker]
        serve(lambda: make(options.sizes, options.rank), RANKS)
        return
    result = compare(options.sizes, options.steps)
    for group, values in result.items():
        for name, value in values.items():
            print(f"{group:12} {name:22} {value:.3g}")
    if options.json:
        options.json.write_text(json.dumps({**facts("megatron-core"), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
