"""The peer to beat: the best plain PyTorch training step for a 32M-parameter llama on CPUs.

Only what PyTorch itself offers: ``nn.Linear``, ``nn.RMSNorm``, SDPA with grouped queries, DDP, DTensor's
``parallelize_module``, fused AdamW; fp32, no gradient clipping, one thread per rank. A benchmark imports
:func:`make_step` and interleaves its steps with those of another program on the same weights
(:func:`reference_weights`) and tokens. By hand, which prints medians and losses as JSON::

    OMP_NUM_THREADS=1 python benchmarks/peers/plain_torch.py single
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/peers/plain_torch.py \\
        data2 tensor2 tensor2_sequence --steps 7
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

MODES = ("single", "data2", "tensor2", "tensor2_sequence")
MICRO = 2
"""Sequences per microbatch."""
GLOBAL = 8
"""Sequences per step."""
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
"""The optimizer's settings."""


@dataclass(frozen=True)
class Shape:
    """The model: 32M parameters; ``sequence`` is in tokens."""

    vocab: int = 8192
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    ffn_hidden: int = 1408
    sequence: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# The model, with Hugging Face's names for parameters


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Heads are counted from the projections' width, which is local under tensor parallelism.
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves paired as in Hugging Face's llama. ``x``: [batch, heads, tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.down_proj = nn.Linear(shape.ffn_hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        angles = torch.outer(torch.arange(shape.sequence, dtype=torch.float64), shape.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)


class Llama(nn.Module):
    """[batch, tokens] token ids to [batch, tokens, vocab] logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Trunk(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


# Weights


def reference_weights(shape: Shape | None = None, seed: int = 1234) -> dict[str, Tensor]:
    """Initial weights by name: norms one, all else normal with standard deviation 0.02."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Llama(shape or Shape()).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(size) if len(size) == 1 else torch.empty(size).normal_(0, 0.02, generator=generator)
        for name, size in shapes.items()
    }


def load_reference_weights(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy whole tensors into a model that is not parallelized yet.

    Raises:
        KeyError: names that the model lacks or that are missing.
    """
    parameters = dict(model.named_parameters())
    if different := sorted(parameters.keys() ^ state.keys()):
        raise KeyError(f"names in only one of model and state: {', '.join(different)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


# Parallel plans


def _block_plan(sequence: bool) -> dict[str, ParallelStyle]:
    """Megatron's columns then rows; with ``sequence`` the residual stream is divided along tokens."""
    outside = Shard(1) if sequence else Replicate()
    # Entering here, not in each projection, sums the projections' input gradients before communicating.
    enter_attention = PrepareModuleInput(
        input_layouts=(outside, None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan: dict[str, ParallelStyle] = {
        "self_attn": enter_attention,
        "mlp": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(Replicate(),)),
    }
    plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {f"{name}_proj": RowwiseParallel(output_layouts=outside) for name in ("self_attn.o", "mlp.down")}
    if sequence:
        plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    return plan


def _ends_plan(sequence: bool) -> dict[str, ParallelStyle]:
    """Embedding and head divided along the vocabulary; logits stay divided for ``loss_parallel``."""
    outside = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "lm_head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["model.norm"] = SequenceParallel()
    return plan


def parallelize(model: Llama, mode: str) -> nn.Module:
    """``model`` as ``mode`` runs it; the default process group must exist and have two ranks."""
    if mode == "single":
        return model
    if dist.get_world_size() != 2:
        raise ValueError(f"{mode} runs on 2 ranks, found {dist.get_world_size()}")
    if mode == "data2":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    sequence = mode == "tensor2_sequence"
    for layer in model.model.layers:
        parallelize_module(layer, mesh, _block_plan(sequence))
    return parallelize_module(model, mesh, _ends_plan(sequence))


# The step


def make_step(
    mode: str, tokens: Tensor, state: dict[str, Tensor] | None = None, shape: Shape | None = None
) -> Callable[[], float]:
    """A closure that trains one step and returns the loss before the update.

    Args:
        mode: one of :data:`MODES`; all but ``single`` need ``torch.distributed`` with two ranks.
        tokens: [global batch, sequence + 1] token ids, the same on every rank, used in every step; or
            [steps, global batch, sequence + 1], used in turn.
        state: initial weights; :func:`reference_weights` by default.
        shape: the model; 32M parameters by default.

    Returns:
        The step. Its result is the mean cross-entropy per target token of the whole batch, in nats.
    """
    if mode not in MODES:
        raise ValueError(f"found mode '{mode}', expected one of {', '.join(MODES)}")
    shape = shape or Shape()
    plain = Llama(shape)
    load_reference_weights(plain, state if state is not None else reference_weights(shape))
    model = parallelize(plain, mode)
    optimizer = torch.optim.AdamW(decay_groups(model), **ADAMW)
    batches = _batches(tokens, mode)
    in_loss = loss_parallel if mode.startswith("tensor2") else nullcontext

    def step() -> float:
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for index, sample in enumerate(batch):
            with _no_sync(model, mode, last=index == len(batch) - 1), in_loss():
                logits = model(sample[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten()) / len(batch)
                loss.backward()
            total += _local(loss)
        optimizer.step()
        if mode == "data2":
            dist.all_reduce(total, dist.ReduceOp.AVG)
        return float(total)

    return step


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]


def _batches(tokens: Tensor, mode: str) -> Iterator[tuple[Tensor, ...]]:
    """This rank's microbatches, step after step."""
    steps = tokens if tokens.dim() == 3 else tokens[None]
    while True:
        for batch in steps:
            mine = batch.chunk(2)[dist.get_rank()] if mode == "data2" else batch
            yield mine.split(MICRO)


def _no_sync(model: nn.Module, mode: str, last: bool) -> AbstractContextManager[None]:
    """DDP reduces gradients in the last microbatch only."""
    if mode == "data2" and not last:
        assert isinstance(model, DistributedDataParallel)
        return model.no_sync()
    return nullcontext()


def _local(loss: Tensor) -> Tensor:
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


# By hand


def random_tokens(shape: Shape, steps: int = 1, seed: int = 5) -> Tensor:
    """[steps, global batch, sequence + 1] uniform token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab, (steps, GLOBAL, shape.sequence + 1), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time plain PyTorch steps, alternating between modes.")
    parser.add_argument("modes", nargs="+", choices=MODES)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per mode")
    parser.add_argument("--warmup", type=int, default=1, help="steps before, not timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    tokens = random_tokens(Shape(), steps=arguments.warmup + arguments.steps)
    steps = {mode: make_step(mode, tokens) for mode in arguments.modes}
    losses: dict[str, list[float]] = {mode: [] for mode in steps}
    wall: dict[str, list[float]] = {mode: [] for mode in steps}
    cpu: dict[str, list[float]] = {mode: [] for mode in steps}
    for index in range(arguments.warmup + arguments.steps):
        for mode, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            losses[mode].append(step())
            if index >= arguments.warmup:
                wall[mode].append(time.perf_counter() - start)
                cpu[mode].append(time.process_time() - start_cpu)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for mode in steps:
            result = {"mode": mode, "step_seconds": median(wall[mode]), "cpu_seconds": median(cpu[mode])}
            print(json.dumps({**result, "all": wall[mode], "losses": losses[mode]}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
