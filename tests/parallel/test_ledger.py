"""The bytes a step sends per axis equal closed formulas, byte for byte."""

from itertools import product
from typing import Any

import pytest
import torch

from hexad.comm import sent_bytes
from hexad.config import Config
from hexad.dataset.load.microbatch import Microbatch
from hexad.model.configuration import build_config
from hexad.planning import resolve
from hexad.planning.costs import parameter_count
from hexad.planning.memory import per_pipeline_rank
from hexad.planning.traffic import predicted_traffic
from hexad.topology.layout import Layout

from ..pool import Pool
from ..small import Tree, config_of, engine_of

_SEQUENCE, _MICRO, _GLOBAL = 16, 2, 8
_ALIGNMENT = 32  # elements that every parameter's share is rounded up to in a flat buffer
_STEPS = 2


# Sizes whose shards are multiples of the alignment, so that no rounding hides in the formula.
DEFAULTS: Tree = {
    "run": {"steps": 10},
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab": 256},
    "data": {"sequence": _SEQUENCE},
    "batch": {"micro": _MICRO, "global": _GLOBAL},
    "parallel": {"bucket_mb": 0.01},
}


_MLA = {"q_rank": 32, "kv_rank": 64, "nope_dim": 8, "rope_dim": 8, "value_dim": 24}


def _config(
    family: str,
    data: int,
    tensor: int,
    sequence: bool,
    dtype: str,
    tied: bool = False,
    kv_heads: int = 4,
    **pipeline: Any,
) -> Config:
    return config_of(
        DEFAULTS,
        model={
            "family": family,
            "kv_heads": kv_heads,
            "tied_embeddings": tied,
            **({"mla": _MLA} if family.startswith("deepseek") else {}),
        },
        parallel={"data": data, "tensor": tensor, "sequence": sequence, **pipeline},
        precision={"dtype": dtype},
    )


def _measure(config: Config) -> dict[str, int]:
    engine = engine_of(config)
    mesh = engine.mesh
    tokens = torch.arange(_MICRO * _SEQUENCE).view(_MICRO, _SEQUENCE)
    batch = [Microbatch(tokens, tokens)] * (_GLOBAL // _MICRO // mesh.data.size)
    before = mesh.sent_bytes()
    for _ in range(_STEPS):
        engine.train_step(batch)
    return {axis: sent - before[axis] for axis, sent in mesh.sent_bytes().items()}


def _planned(config: Config, world: int) -> list[dict[str, int]]:
    """What the planner says of each rank, for as many steps as are measured."""
    resolved = resolve(config, Layout.from_settings(config.parallel, world))
    of_ranks = (predicted_traffic(resolved, rank) for rank in range(world))
    return [{axis: _STEPS * size for axis, size in sent.items()} for sent in of_ranks]


def _data_bytes(gradients: int, data: int) -> int:
    """Ring all-reduce of every gradient, of the loss, and of the norm, whose maximum counts; targets are
    counted on the hosts."""
    return sum(2 * (data - 1) * nbytes // data for nbytes in (gradients, 8, 4))


def _tensor_bytes(config: Config, tensor: int, microbatches: int, partial: int) -> int:
    layers, hidden = config.model.layers, config.model.hidden
    tokens = _MICRO * _SEQUENCE
    width = 2 if config.precision.dtype == "bf16" else 4
    activation = tokens * hidden * width
    if config.parallel.sequence:
        # Column-parallel: gather; gather again and scatter in backward. Row-parallel: scatter; gather.
        # Four such layers per block, the head (gather; scatter), the embedding (scatter; gather).
        passes = layers * 2 * (3 + 2) + 2 + 2
        per_microbatch = passes * (tensor - 1) * activation // tensor
    else:
        # All-reduce after each row-parallel forward and column-parallel backward, and of the embedding.
        passes = layers * 4 + 1 + 1
        per_microbatch = passes * 2 * (tensor - 1) * activation // tensor
    per_microbatch += sum(2 * (tensor - 1) * tokens * n * 4 // tensor for n in (1, 2))  # maximum; sum, target
    norm = 2 * sent_bytes("all_reduce", tensor, 4)  # its squares; the number that all ranks take
    return microbatches * per_microbatch + 2 * (tensor - 1) * partial // tensor + norm


@pytest.mark.parametrize(
    ("family", "tensor", "sequence", "schedule", "recompute", "kv_heads"),
    [
        ("llama", 2, True, "zb_h1", "full", 4),
        ("qwen3", 2, False, "1f1b", "full", 4),
        ("gpt2", 4, True, "1f1b", "selective", 4),
        ("granite", 4, False, "zb_h1", "none", 4),
        ("qwen2", 4, True, "zb_h1", "full", 2),
        ("qwen3", 2, False, "1f1b", "none", 1),
        ("deepseek_v3", 2, True, "zb_h1", "full", 4),
        ("deepseek_v3", 4, False, "1f1b", "selective", 4),
        ("deepseek_v3", 2, True, "zb_h1", "mla_up", 4),
    ],
)
def test_what_layers_send(
    pool: Pool, family: str, tensor: int, sequence: bool, schedule: str, recompute: str, kv_heads: int
) -> None:
    """For 2 of 4 layers that recompute; with weight gradients in actions of their own, or not. Gradients of
    KV heads that several ranks hold are summed over these."""
    memory: dict[str, Any] = {"recompute": recompute, "recompute_layers": 2}
    if recompute not in ("selective", "full"):
        memory = {} if recompute == "none" else {"recompute_parts": [recompute]}
    config = _config(family, 1, tensor, sequence, "fp32", kv_heads=kv_heads, schedule=schedule)
    config = build_config({**config.model_dump(by_alias=True), "memory": memory})
    assert pool.run(tensor, _measure, config) == _planned(config, tensor)


def _each(cases: list[tuple[Any, ...]], *settings: tuple[str, str]) -> list[Any]:
    """Each case with each combination of the settings' values.

    By default each case has each value of a setting once; where there is one setting, values take turns.
    """
    return [
        pytest.param(
            *(pair[at] for pair, at in zip(settings, chosen)),
            *case,
            marks=pytest.mark.slow if (number + sum(at << i for i, at in enumerate(chosen))) % 4 else (),
        )
        for number, case in enumerate(cases)
        for chosen in product((0, 1), repeat=len(settings))
    ]


_DTYPES, _FAMILIES = ("fp32", "bf16"), ("llama", "gpt2")


@pytest.mark.parametrize(
    ("dtype", "family", "data", "tensor", "sequence"),
    _each(
        [(2, 1, True), (4, 1, True), (1, 2, True), (1, 4, False), (2, 2, True), (2, 2, False)],
        _DTYPES,
        _FAMILIES,
    ),
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
    assert _planned(config, data * tensor) == [wanted] * (data * tensor)
    for rank, sent in enumerate(pool.run(data * tensor, _measure, config)):
        assert sent == wanted, f"rank {rank}"


@pytest.mark.parametrize(
    ("dtype", "tensor", "sequence", "tied", "pipeline", "schedule", "virtual"),
    _each(
        [
            (1, True, False, 2, "1f1b", 1),
            (1, True, True, 2, "interleaved", 2),
            (2, True, True, 2, "zb_h1", 1),
            (2, False, False, 2, "zb_v", 2),
            (1, True, True, 4, "1f1b", 1),
            (1, True, True, 3, "dualpipe_v", 2),
        ],
        _DTYPES,
    ),
)
def test_pipeline_bytes(
    pool: Pool,
    dtype: str,
    tensor: int,
    sequence: bool,
    tied: bool,
    pipeline: int,
    schedule: str,
    virtual: int,
) -> None:
    """One activation or gradient per microbatch over each boundary between ranks; scalars; tied weights."""
    config = _config(
        "gpt2", 1, tensor, sequence, dtype, tied, pipeline=pipeline, schedule=schedule, virtual_stages=virtual
    )
    hidden, microbatches = config.model.hidden, _GLOBAL // _MICRO
    message = _MICRO * _SEQUENCE * hidden * (2 if dtype == "bf16" else 4) // (tensor if sequence else 1)
    v_shaped = schedule in ("zb_v", "dualpipe_v")
    # Of 2 * p * v - 2 boundaries, counted in both directions, each rank sends over its own; in a V shape the
    # middle one lies on one rank.
    boundaries = [2 * virtual] * pipeline
    boundaries[0] -= 1
    boundaries[-1] -= 1
    if v_shaped:
        boundaries = [4] * pipeline
        boundaries[0] = boundaries[-1] = 2
    # The loss; the norm's squares, and the number that all ranks take.
    scalars = sum(2 * (pipeline - 1) * nbytes // pipeline for nbytes in (8, 4, 4))
    weight = 256 // tensor * hidden * 4
    planned = _planned(config, tensor * pipeline)
    for rank, sent in enumerate(pool.run(tensor * pipeline, _measure, config)):
        stage = rank // tensor
        wanted = microbatches * boundaries[stage] * message + scalars
        if tied and not v_shaped and stage in (0, pipeline - 1):
            wanted += weight  # an all-reduce of two ranks
        assert sent["pipeline"] == planned[rank]["pipeline"] == _STEPS * wanted, f"rank {rank}"


@pytest.mark.parametrize(
    ("schedule", "trained_from"), [("1f1b", 3), ("zb_h1", 2), ("interleaved", 4), ("zb_v", 3)]
)
def test_no_gradients_are_sent_to_frozen_stages(pool: Pool, schedule: str, trained_from: int) -> None:
    """Of the stages, only those from the first trained one on pass gradients; activations pass all."""
    virtual = 1 if schedule in ("1f1b", "zb_h1") else 2
    pipeline = 4 // virtual if schedule != "interleaved" else 3
    config = _config(
        "gpt2", 1, 1, False, "fp32", pipeline=pipeline, schedule=schedule, virtual_stages=virtual
    )
    stages = pipeline * virtual
    tree = config.model_dump(by_alias=True)
    tree["model"] |= {"layers": stages, "train": [f"layers.{trained_from}", "norm"]}
    tree["parallel"]["split"] = [1] * stages
    message = _MICRO * _SEQUENCE * config.model.hidden * 4
    placement = [*range(pipeline), *(reversed(range(pipeline)) if schedule == "zb_v" else range(pipeline))][
        :stages
    ]
    scalars = sum(2 * (pipeline - 1) * nbytes // pipeline for nbytes in (8, 4, 4))
    frozen = build_config(tree)
    planned = _planned(frozen, pipeline)
    for rank, of_rank in enumerate(pool.run(pipeline, _measure, frozen)):
        sent = 0
        for stage, owner in enumerate(placement):
            forward, backward = stage + 1 < stages, stage > trained_from
            near = [stage + 1] * forward + [stage - 1] * backward
            sent += sum(placement[other] != rank for other in near) if owner == rank else 0
        wanted = _STEPS * (_GLOBAL // _MICRO * sent * message + scalars)
        assert of_rank["pipeline"] == planned[rank]["pipeline"] == wanted, f"rank {rank}"


_RANK = 8
_LORA = {"lora": {"rank": _RANK}}  # of every linear layer


def _state(config: Config) -> dict[str, int]:
    """Bytes that a rank keeps, by kind; memory that two kinds share counts as the first."""
    engine = engine_of(config)
    kinds: dict[str, list[torch.Tensor | None]] = {
        "parameters": [bucket.whole for bucket in engine.buckets],
        "gradients": [part for bucket in engine.trained for part in (bucket.gradients, bucket.gradient)],
        "master": [bucket.master for bucket in engine.trained],
        "optimizer": [
            tensor for bucket in engine.trained for _, tensor in engine.optimizer.rule.state(bucket)
        ],
    }
    seen: set[int] = set()
    state = dict.fromkeys(kinds, 0)
    for kind, tensors in kinds.items():
        for storage in (tensor.untyped_storage() for tensor in tensors if tensor is not None):
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                state[kind] += storage.nbytes()
    return state


@pytest.mark.parametrize(
    ("dtype", "data", "tensor", "sequence", "zero"),
    [
        ("fp32", 2, 1, True, 0),
        ("bf16", 2, 1, True, 1),
        ("bf16", 1, 2, True, 0),
        ("fp32", 2, 2, False, 1),
    ],
)
def test_lora_sends_and_keeps_what_its_adapters_need(
    pool: Pool, dtype: str, data: int, tensor: int, sequence: bool, zero: int
) -> None:
    """Gradients, wide values and moments of the adapters instead of all weights; over the tensor axis the
    activations of full training, but for the gradient that nothing before the first layer needs."""
    full = _config("llama", data, tensor, sequence, dtype, zero=zero)
    tree = full.model_dump(by_alias=True)
    lora = build_config({**tree, "model": {**tree["model"], **_LORA}})
    layers, hidden, ffn = full.model.layers, full.model.hidden, int(full.model.ffn_hidden)
    # Of an adapter every tensor rank holds one half: A of query, key, value, gate and up; B of o and down.
    replicated = layers * _RANK * 7 * hidden
    adapters = replicated + layers * _RANK * (4 * hidden + 3 * ffn) // tensor
    norms = hidden * (2 * layers + 1)
    weights = norms + (parameter_count(full.model, _SEQUENCE) - norms) // tensor
    width = 2 if dtype == "bf16" else 4
    world, microbatches = data * tensor, _GLOBAL // _MICRO // data
    shards = data if zero else 1
    for config, trained, partial in ((full, weights, norms * sequence), (lora, adapters, replicated)):
        frozen = 0 if config is full else weights
        wanted = {
            "parameters": width * (frozen + trained),
            "gradients": 4 * trained,
            "master": 0 if dtype == "fp32" else 4 * trained // shards,
            "optimizer": 8 * trained // shards,
        }
        plan = per_pipeline_rank(resolve(config, Layout.from_settings(config.parallel, world)))[0].as_tree()
        for state in (*pool.run(world, _state, config), {kind: plan[kind] for kind in wanted}):
            assert state == wanted
        scalars = _data_bytes(0, data) + (2 * (data - 1) * 4 // data if zero else 0)  # and the norm's shards
        over = {"data": scalars + (data - 1) * (4 + (width if zero else 4)) * trained // data, "tensor": 0}
        if tensor > 1:
            over["tensor"] = _tensor_bytes(config, tensor, microbatches, 4 * partial // shards)
            if config is lora:
                activation = _MICRO * _SEQUENCE * hidden * width
                # In sequence parallel the scatter of that gradient and the gather before the embedding's.
                over["tensor"] -= microbatches * 2 * (tensor - 1) * activation // tensor
        for state in (*pool.run(world, _measure, config), *_planned(config, world)):
            assert {axis: state[axis] for axis in over} == {a: _STEPS * n for a, n in over.items()}
