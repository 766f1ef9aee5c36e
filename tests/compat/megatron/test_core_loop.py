"""Training loops of Megatron-Core without flags: model, data, reduction and checkpoints, against the package."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hexad.compat.megatron import distributed, parallel_state, transformer
from hexad.compat.megatron.gpt import GPTModel
from hexad.compat.megatron.schedules import forward_backward
from hexad.compat.megatron.settings import DistributedDataParallelConfig
from hexad.compat.megatron.tensor_parallel import model_parallel_cuda_manual_seed

from ...layers import load_global
from ...pool import Pool
from .core import core_config
from .test_gpt import core_on_cpu, global_tensors

S, BATCH, VOCAB, STEPS = 16, 4, 100, 3


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CONFIG = {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_func": gelu}
LLAMA = {
    **CONFIG,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, S + 1), generator=torch.Generator().manual_seed(0))


def _core_steps(llama: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Initial weights of megatron-core's model, and the losses of steps of Adam."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    with core_on_cpu() as kind:
        torch.manual_seed(1)
        sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 40 if llama else 256}
        config = core_config(llama, params_dtype=torch.float64, pipeline_dtype=torch.float64, **sizes)
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        rope = {"position_embedding_type": "rope"} if llama else {}
        model = kind(config, spec, vocab_size=VOCAB, max_sequence_length=S, **rope).double()
        weights = {
            n: v.clone() for n, v in global_tensors(model.state_dict(), llama).items() if v is not None
        }
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
        mask = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
        for _ in range(STEPS):
            rows = tokens()
            optimizer.zero_grad()
            places = torch.arange(S).expand(BATCH, -1)
            loss = model(rows[:, :-1], places, mask, labels=rows[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return weights, losses


class World:
    """``parallel_state`` of some degrees in the pool's world."""

    def __init__(self, tensor: int = 1, pipeline: int = 1, virtual: int | None = None) -> None:
        self._degrees = tensor, pipeline, virtual

    def __enter__(self) -> None:
        self._joined = dist.is_initialized()
        if not self._joined:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(*self._degrees, device=torch.device("cpu"))

    def __exit__(self, *_: object) -> None:
        parallel_state.destroy_model_parallel()
        if not self._joined:
            dist.destroy_process_group()


def build(settings: dict[str, Any], **more: Any) -> Any:
    """This rank's stages of a model without flags, in a list where there are several."""
    config = transformer.TransformerConfig(**{"params_dtype": torch.float64, **settings})
    rope = {"position_embedding_type": "rope"} if config.gated_linear_unit else {}
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    spec = transformer.get_gpt_layer_local_spec()
    stages = [
        GPTModel(config, spec, VOCAB, S, vp_stage=number, **rope, **more) for number in range(virtual or 1)
    ]
    return stages if virtual else stages[0]


def forward_step(rows: Iterator[torch.Tensor], model: Any) -> Any:
    batch = next(rows)
    places = torch.arange(S).expand(len(batch), -1)
    labels = batch[:, 1:] if distributed.unwrapped(model).post_process else None
    output = model(batch[:, :-1], places, None, labels=labels)
    return output, lambda losses: (losses.mean(), {"lm loss": losses.mean().item()})


def rows_of(micro: int) -> list[torch.Tensor]:
    """This data rank's microbatches."""
    data, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return list(tokens().split(micro))[data::ranks]


def _our_steps(
    settings: dict[str, Any],
    weights: dict[str, torch.Tensor] | None,
    degrees: dict[str, int],
    micro: int,
    tied: bool = False,
) -> list[float]:
    """Losses of the same steps on this rank's data ranks; empty but on the last stage."""
    with World(**degrees):
        model_parallel_cuda_manual_seed(3)
        built = build(settings, share_embeddings_and_output_weights=tied)
        chunks = built if isinstance(built, list) else [built]
        for chunk in chunks if weights is not None else ():
            load_global(chunk, weights)
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=micro == 1)
        wrapped = [distributed.DistributedDataParallel(c.config, ddp, c, bool(micro == 2)) for c in chunks]
        parameters = [parameter for chunk in wrapped for parameter in chunk.parameters()]
        optimizer, losses = torch.optim.Adam(parameters, lr=1e-2), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            batches = rows_of(micro)
            reported = forward_backward(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in wrapped],
                model=wrapped if isinstance(built, list) else wrapped[0],
                num_microbatches=len(batches),
                seq_length=S,
                micro_batch_size=micro,
            )
            distributed.finalize_model_grads(wrapped)
            optimizer.step()
            losses += [sum(row["lm loss"] for row in reported) / len(reported)] if reported else []
        return losses


def mean_over_data(results: list[list[float]], ranks: int) -> list[float]:
    """The losses of all data ranks; every rank of a last stage has those of one."""
    found = np.array([losses for losses in results if losses])
    assert len(found) >= ranks
    return list(found.mean(axis=0))


LAYOUTS: list[tuple[dict[str, int], int, dict[str, Any], int]] = [
    # degrees, ranks, settings, sequences of a microbatch
    ({"tensor": 2}, 4, {"sequence_parallel": True}, 1),
    ({"pipeline": 2}, 4, {}, 1),
    ({"pipeline": 2, "virtual": 2}, 2, {"num_layers": 4}, 2),
    ({"tensor": 2}, 2, {}, BATCH),
]


@pytest.mark.slow
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
def test_losses_of_a_loop_are_megatron_cores(pool: Pool, llama: bool) -> None:
    pytest.importorskip("megatron.core")
    ((weights, losses),) = pool.run(1, _core_steps, llama)
    for degrees, ranks, more, micro in LAYOUTS[:2]:
        settings = {**(LLAMA if llama else CONFIG), **more}
        results = pool.run(ranks, _our_steps, settings, weights, degrees, micro)
        # megatron-core computes the loss and rotary factors in float32.
        assert mean_over_data(results, 1) == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("degrees", "ranks", "more", "micro"), LAYOUTS)
def test_losses_of_a_loop_are_one_ranks(
    pool: Pool, degrees: dict[str, int], ranks: int, more: dict[str, Any], micro: int
) -> None:
    """With tied embeddings; with dropout where microbatches are the same."""
    dropout = 0.1 if micro == BATCH else 0.0
    settings = {**CONFIG, "hidden_dropout": dropout, "attention_dropout": dropout, **more}
    alone = {**settings, "sequence_parallel": False}
    (losses,) = pool.run(1, _our_steps, alone, None, {}, BATCH, True)
    results = pool.run(ranks, _our_steps, settings, None, degrees, micro, True)
    assert mean_over_data(results, 1) == pytest.approx(losses, rel=1e-9)
    assert losses[-1] < losses[0]
