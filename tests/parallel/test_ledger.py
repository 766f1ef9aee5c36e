"""The bytes a step sends per axis equal closed formulas, byte for byte."""

from __future__ import annotations

import pytest
import torch

from hexad.config import Config, build_config
from hexad.dataset.microbatch import Microbatch
from hexad.model.counts import parameter_count
from hexad.topology.layout import Layout

from ..pool import Pool

_SEQUENCE, _MICRO, _GLOBAL = 16, 2, 16
_ALIGNMENT = 32  # elements that every parameter's share is rounded up to in a flat buffer
_STEPS = 2


def _config(family: str, data: int, tensor: int, sequence: bool, dtype: str) -> Config:
    # Sizes whose shares are multiples of the alignment, so that no rounding hides in the formula.
    model = {"family": family, "layers": 3, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn_hidden": 128}
    return build_config(
        {
            "run": {"steps": 10},
            "model": {**model, "vocab": 256, "tied_embeddings": False},
            "data": {"sequence": _SEQUENCE},
            "batch": {"micro": _MICRO, "global": _GLOBAL},
            "parallel": {"data": data, "tensor": tensor, "sequence": sequence, "bucket_mb": 0.01},
            "precision": {"dtype": dtype},
        }
    )


def _measure(config: Config, world: int) -> dict[str, int]:
    from hexad.topology.mesh import Mesh
    from hexad.train.engine import Engine

    mesh = Mesh.create(Layout.from_settings(config.parallel, world), torch.device("cpu"))
    engine = Engine(config, mesh)
    tokens = torch.arange(_MICRO * _SEQUENCE).view(_MICRO, _SEQUENCE)
    batch = [Microbatch(tokens, tokens)] * (_GLOBAL // _MICRO // mesh.data.size)
    before = mesh.sent_bytes()
    for _ in range(_STEPS):
        engine.train_step(batch)
    return {axis: sent - before[axis] for axis, sent in mesh.sent_bytes().items()}


def _data_bytes(gradients: int, data: int) -> int:
    """Ring all-reduce of every gradient, of the loss, and of three counts."""
    return sum(2 * (data - 1) * nbytes // data for nbytes in (gradients, 8, 3 * 8))


def _tensor_bytes(config: Config, tensor: int, microbatches: int, partial: int) -> int:
    layers, hidden = config.model.layers, config.model.hidden
    tokens = _MICRO * _SEQUENCE
    width = 2 if config.precision.dtype == "bf16" else 4
    activation = tokens * hidden * width
    if config.parallel.sequence:
        # Column-parallel: gather; gather again and scatter in backward. Row-parallel: scatter; gather.
        # Four such layers per block, the head (column), the embedding (scatter; gather).
        passes = layers * 2 * (3 + 2) + 3 + 2
        per_microbatch = passes * (tensor - 1) * activation // tensor
    else:
        # All-reduce after each row-parallel forward and column-parallel backward, and of the embedding.
        passes = layers * 4 + 1 + 1
        per_microbatch = passes * 2 * (tensor - 1) * activation // tensor
    per_microbatch += sum(2 * (tensor - 1) * tokens * n * 4 // tensor for n in (1, 2))  # maximum; sum, target
    norm = 2 * (tensor - 1) * 4 // tensor
    return microbatches * per_microbatch + 2 * (tensor - 1) * partial // tensor + norm


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("data", "tensor", "sequence"),
    [(2, 1, True), (4, 1, True), (1, 2, True), (1, 4, False), (2, 2, True), (2, 2, False)],
)
def test_step_bytes(pool: Pool, family: str, dtype: str, data: int, tensor: int, sequence: bool) -> None:
    config = _config(family, data, tensor, sequence, dtype)
    model = config.model
    layers, hidden, ffn = model.layers, model.hidden, int(model.ffn_hidden)
    total = parameter_count(model, _SEQUENCE)
    if family == "gpt2":
        # LayerNorm weights and biases, biases after row-parallel layers, the position table.
        replicated = hidden * (2 * (2 * layers + 1) + 2 * layers + _SEQUENCE)
    else:
        replicated = hidden * (2 * layers + 1)
    assert data == 1 or hidden % (_ALIGNMENT * tensor) == ffn % (_ALIGNMENT * tensor) == 0
    gradients = 4 * ((total - replicated) // tensor + replicated)  # fp32 in fp32 and in bf16
    partial = 4 * replicated if sequence and tensor > 1 else 0
    microbatches = _GLOBAL // _MICRO // data
    wanted = {
        "data": _data_bytes(gradients, data) if data > 1 else 0,
        "tensor": _tensor_bytes(config, tensor, microbatches, partial) if tensor > 1 else 0,
        "context": 0,
        "pipeline": 0,
        "expert": 0,
    }
    wanted = {axis: _STEPS * count for axis, count in wanted.items()}
    for rank, found in enumerate(pool.run(data * tensor, _measure, config, data * tensor)):
        assert found == wanted, f"rank {rank}"
