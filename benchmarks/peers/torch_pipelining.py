"""The peer for pipelines: plain_torch.py's llama in the stages of ``torch.distributed.pipelining``.

Schedules are PyTorch's own; inside a stage, tensor parallel is plain_torch.py's DTensor plan without sequence
parallel. :func:`pipeline` puts any stage modules under any of PyTorch's schedules, and so serves tests as an
oracle too. By hand, in ``benchmarks/``, which prints medians and losses as JSON::

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m peers.torch_pipelining \\
        pipeline2_1f1b pipeline2_interleaved pipeline2_zb_v
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 -m peers.torch_pipelining \\
        tensor2_pipeline2_1f1b tensor2_pipeline2_interleaved tensor2_pipeline2_zb_v
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, ScheduleDualPipeV
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from .plain_torch import (
    MICRO,
    Block,
    Shape,
    _block_plan,
    _local,
    load_reference_weights,
    random_tokens,
    reference_weights,
)

SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}
V_SHAPED = ("zb_v", "dualpipe_v")
"""Schedules whose ranks hold one stage on the way there and one on the way back."""

MODES = tuple(
    f"{layout}_{schedule}"
    for layout in ("pipeline2", "tensor2_pipeline2")
    for schedule in ("1f1b", "interleaved", "zb_v")
)
PIPELINE = 2
SPLITS = {2: (5, 3), 4: (2, 2, 3, 1)}
"""Layers per stage, by number of stages: the slowest stage is fastest, the head counting as 1.4 layers."""


# Any stages under any of PyTorch's schedules


def stages_of(schedule: str, rank: int, pipeline: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """The numbers of the stages that pipeline rank ``rank`` holds, ascending."""
    if schedule in V_SHAPED:
        return rank, 2 * pipeline - 1 - rank
    return tuple(range(rank, pipeline * virtual_stages, pipeline))


def pipeline(
    schedule: str,
    stages: Mapping[int, nn.Module],
    count: int,
    microbatches: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup | None = None,
) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """A function that runs forward and backward of one step; gradients add up in the modules.

    Args:
        schedule: one of :data:`SCHEDULES`.
        stages: this rank's modules by number (:func:`stages_of`). Each takes and gives one tensor: the first
            the inputs, the last what ``loss`` takes.
        count: of all stages, over all ranks.
        microbatches: into which inputs and targets are cut, along their first dim.
        loss: of (output, targets) of a microbatch. Gradients are those of the losses' sum, not of their mean.
        group: the pipeline's ranks; the world by default.

    Returns:
        A function of (inputs, targets), the same on every rank, which gives the microbatches' losses on the
        rank that holds the last stage and an empty list on others.
    """
    kind = SCHEDULES[schedule]
    parts = [
        PipelineStage(module, number, count, torch.device("cpu"), group=group)
        for number, module in sorted(stages.items())
    ]
    single = issubclass(kind, PipelineScheduleSingle)
    runner = kind(parts[0] if single else parts, microbatches, loss_fn=loss, scale_grads=False)

    def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        arguments = (inputs,) if 0 in stages else ()
        # PyTorch wants targets and losses where the last stage is, and no outputs kept anywhere.
        last = {"target": targets, "losses": losses} if count - 1 in stages else {}
        runner.step(*arguments, **last, return_outputs=False)
        return losses

    return run


# The llama in stages


class Stage(nn.Module):
    """Consecutive layers of :class:`Llama`, with the embedding before or the head behind them.

    Its parameters have the model's names without ``model.``.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(shape) for layer in layers})
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps) if last else None
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False) if last else None
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        angles = torch.outer(torch.arange(shape.sequence, dtype=torch.float64), shape.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy this stage's share of the whole model's weights."""
        mine = {name for name, _ in self.named_parameters()}
        short = {name.removeprefix("model."): tensor for name, tensor in state.items()}
        load_reference_weights(self, {name: tensor for name, tensor in short.items() if name in mine})


def llama_stages(
    shape: Shape, state: Mapping[str, Tensor], numbers: tuple[int, ...], split: tuple[int, ...]
) -> dict[int, Stage]:
    """The stages ``numbers`` of a llama that is cut into ``split`` layers per stage."""
    bounds = list(accumulate(split, initial=0))
    assert bounds[-1] == shape.layers, f"{split} for {shape.layers} layers"
    stages = {}
    for number in numbers:
        layers = range(bounds[number], bounds[number + 1])
        stages[number] = Stage(shape, layers, first=number == 0, last=number == len(split) - 1)
        stages[number].load(state)
    return stages


def parallelize(stage: Stage, mesh: DeviceMesh) -> None:
    """Divide a stage among the tensor ranks as plain_torch.py divides the model."""
    for layer in stage.layers.values():
        parallelize_module(layer, mesh, _block_plan(sequence=False))
    plan: dict[str, ParallelStyle] = {}
    if stage.embed_tokens is not None:
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if stage.lm_head is not None:
        plan["lm_head"] = ColwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
        )
    parallelize_module(stage, mesh, plan)


# The step


def make_step(
    mode: str, tokens: Tensor, state: dict[str, Tensor] | None = None, shape: Shape | None = None
) -> Callable[[], float | None]:
    """A closure that trains one step and returns the loss before the update.

    Args:
        mode: one of :data:`MODES`; needs ``torch.distributed`` with two ranks, or four with ``tensor2_``.
        tokens: [global batch, sequence + 1] token ids, the same on every rank, used in every step; or
            [steps, global batch, sequence + 1], used in turn.
        state: initial weights; plain_torch.py's by default.
        shape: the model; 32M parameters, 8 layers by default.

    Returns:
        The step. Its result is the mean cross-entropy per target token of the whole batch, in nats, on the
        ranks that hold the last stage, and None on others.
    """
    if mode not in MODES:
        raise ValueError(f"found mode '{mode}', expected one of {', '.join(MODES)}")
    shape = shape or Shape()
    layout, schedule = mode.split("pipeline2_")
    tensor = 2 if layout else 1
    if dist.get_world_size() != tensor * PIPELINE:
        raise ValueError(f"{mode} runs on {tensor * PIPELINE} ranks, found {dist.get_world_size()}")
    mesh = init_device_mesh("cpu", (PIPELINE, tensor), mesh_dim_names=("pipeline", "tensor"))
    count = PIPELINE if schedule == "1f1b" else 2 * PIPELINE
    numbers = stages_of(schedule, mesh.get_local_rank("pipeline"), PIPELINE, count // PIPELINE)
    stages = llama_stages(shape, state or reference_weights(shape), numbers, SPLITS[count])
    if tensor > 1:
        for stage in stages.values():
            parallelize(stage, mesh["tensor"])
    optimizer = _optimizer(stages)
    batches = _batches(tokens)
    batch_size = tokens.shape[-2]
    microbatches = batch_size // MICRO

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / microbatches

    run = pipeline(schedule, stages, count, microbatches, loss, mesh.get_group("pipeline"))
    in_loss = loss_parallel if tensor > 1 else nullcontext

    def step() -> float | None:
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with in_loss():
            losses = run(batch[:, :-1], batch[:, 1:])
        optimizer.step()
        return float(sum(_local(part) for part in losses)) if losses else None

    return step


def _optimizer(stages: Mapping[int, nn.Module]) -> torch.optim.Optimizer:
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    matrices = [p for p in parameters if p.dim() > 1]
    norms = [p for p in parameters if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)


def _batches(tokens: Tensor) -> Iterator[Tensor]:
    steps = tokens if tokens.dim() == 3 else tokens[None]
    while True:
        yield from steps


# By hand


def main() -> None:
    parser = argparse.ArgumentParser(description="Time PyTorch's pipelines, alternating between modes.")
    parser.add_argument("modes", nargs="+", choices=MODES)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per mode")
    parser.add_argument("--warmup", type=int, default=1, help="steps before, not timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = random_tokens(Shape(), steps=arguments.warmup + arguments.steps)
    steps = {mode: make_step(mode, tokens) for mode in arguments.modes}
    losses: dict[str, list[float]] = {mode: [] for mode in steps}
    wall: dict[str, list[float]] = {mode: [] for mode in steps}
    for _ in range(arguments.warmup + arguments.steps):
        for mode, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            loss = torch.tensor(step() or 0.0)
            dist.barrier()
            wall[mode].append(time.perf_counter() - start)
            # Ranks without the last stage know none; with tensor parallel two ranks know the same.
            dist.all_reduce(loss, dist.ReduceOp.MAX)
            losses[mode].append(float(loss))
    if dist.get_rank() == 0:
        for mode in steps:
            timed = wall[mode][arguments.warmup :]
            result = {"mode": mode, "step_seconds": median(timed), "all": timed, "losses": losses[mode]}
            print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
