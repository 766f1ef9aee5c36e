"""Checkpoints that Megatron-Core itself writes on two tensor-parallel ranks, with the losses that follow.

It needs a GPU in a few places, which are replaced, and leaves state in a process: two separate ranks write
all, once per test session.
"""

import contextlib
import sys
import tempfile
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ..forked import run_forked, written_by
from .core import core_config

RANKS, STEPS, AFTER = 2, 3, 3
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
VOCAB, PADDED, SEQUENCE = 13, 16, 8

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"metadata": {}},
    "llama": {"metadata": {"non_homogeneous_layers": True}},
    "llama_bf16": {"metadata": {}, "bf16": True},
}
_SIZES = {"layers": 2, "hidden": 16, "heads": 4, "vocab": VOCAB}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "max_positions": SEQUENCE, "dropout": 0.0} | _SIZES,
    "llama": {"family": "llama", "kv_heads": 2, "ffn_hidden": 20, "norm_eps": 1e-5} | _SIZES,
}
"""In Hexad's words."""


def samples_of(step: int) -> Tensor:
    """Two rows, and a token more than the inputs."""
    return torch.randint(0, VOCAB, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


@cache
def _written() -> tempfile.TemporaryDirectory[str]:
    pytest.importorskip("megatron.core")
    return written_by(__name__)


def saved(name: str) -> Path:
    """A path among the checkpoints, which are written once per session: ``<case>`` (Megatron's directory), or
    ``<case>.pt`` (losses)."""
    return Path(_written().name) / name


def _model(kind: str, bf16: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    llama = kind == "llama"
    config = core_config(
        llama,
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=20 if llama else 64,
        tensor_model_parallel_size=RANKS,
        persist_layer_norm=False,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm" if llama else None),
        vocab_size=PADDED,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=not llama,
        position_embedding_type="rope" if llama else "learned_absolute",
        parallel_output=False,
    )


def _optimizer(model: Any, bf16: bool) -> Any:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decay], "weight_decay": DECAY * decay,
         "is_expert_parallel": False}
        for decay in (True, False)
    ]  # fmt: skip
    inner = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    config = OptimizerConfig(lr=LR, clip_grad=0.0, bf16=bf16, use_distributed_optimizer=False)
    if bf16:
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        return Float16OptimizerWithFloat16Params(inner, config, None, lambda *_: None)
    return FP32Optimizer(inner, config, lambda *_: None)


def _loss(model: Any, tokens: Tensor) -> Tensor:
    """The mean over tokens; the padded vocabulary has no part in it."""
    inputs = tokens[:, :-1]
    positions = torch.arange(SEQUENCE).expand_as(inputs)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()
    logits = model(inputs, positions, mask)[..., :VOCAB]
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _train(directory: Path, name: str, case: dict[str, Any], rank: int) -> None:
    from megatron.core import dist_checkpointing

    torch.manual_seed(3)
    bf16 = case.get("bf16", False)
    model = _model(name.removesuffix("_bf16"), bf16)
    if bf16:
        model.bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():  # nothing is 0 or 1, and replicated values are equal
            if not getattr(parameter, "tensor_model_parallel", False):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    optimizer, losses = _optimizer(model, bf16), []
    for step in range(STEPS + AFTER):
        if step == STEPS:
            weights = model.sharded_state_dict(metadata=case["metadata"])
            args = Namespace(consumed_train_samples=2 * STEPS, apply_layernorm_1p=False)
            content = {
                "model": weights,
                "optimizer": optimizer.sharded_state_dict(
                    model.state_dict(keep_vars=True) and weights, metadata=case["metadata"]
                ),
                "iteration": STEPS,
                "checkpoint_version": 3.0,
                "args": args,
            }
            folder = directory / name / f"iter_{STEPS:07d}"
            folder.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(content, str(folder))
        loss = _loss(model, samples_of(step))
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.main_grad = parameter.grad.float()
        optimizer.step()
        losses.append(float(loss.detach()))
    if not rank:
        (directory / name / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        torch.save(losses[STEPS:], directory / f"{name}.pt")


def _main(directory: Path) -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    tensor, kind = torch.tensor, torch.Tensor.type
    torch.tensor = lambda *given, device=None, **more: tensor(*given, **more)
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else f"torch.cuda.{kind(self)[6:]}"
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import GPTModel  # noqa: F401 (imported once)
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()

    def write(rank: int) -> None:
        parallel_state.initialize_model_parallel(RANKS)
        with torch.multiprocessing.get_context("fork").Manager() as manager:
            queue = manager.Queue()
            filesystem_async._get_write_results_queue = lambda: queue  # instead of an interpreter per save
            for name, case in CASES.items():
                _train(directory, name, case, rank)

    run_forked(RANKS, directory, write)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
