"""ZeRO's stages: bytes moved, bytes kept, and PyTorch's own DDP and FSDP2 as oracles."""

import gc
import weakref
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hexad.config import Config
from hexad.dataset.load.microbatch import Microbatch
from hexad.parallel.data.bucket_plan import HeldParameter, plan_buckets
from hexad.parallel.inventory import Parameter, Weight
from hexad.parallel.pipeline.executor import _Walk
from hexad.parallel.sharding import declared_parameters
from hexad.planning import resolve
from hexad.planning.traffic import predicted_traffic
from hexad.topology.layout import Layout

from ..pool import Pool
from ..small import Tree, config_of, engine_of, microbatches
from ..weights import WholeTensors

DEFAULTS: Tree = {
    "model": {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 64, "vocab": 200},
    "parallel": {"bucket_mb": 0.01},
    "optimizer": {"lr": 0.01, "clip": 0.0},
    "lr_schedule": {"kind": "constant", "warmup": 0},
}


def data_config(count: int = 2, dtype: str = "fp32", data: int = 2, **parallel: Any) -> Config:
    """A model on data ranks with ``count`` microbatches each."""
    return config_of(
        DEFAULTS,
        data={"sequence": 8},
        batch={"micro": 2, "global": 2 * data * count},
        parallel={"data": data, **parallel},
        precision={
            "dtype": dtype,
            **(dict.fromkeys(("reduce", "accumulate"), "bf16") if dtype == "bf16" else {}),
        },
    )


def batch_of(config: Config, rank: int, step: int = 0) -> list[Microbatch]:
    """This data rank's microbatches of random tokens."""
    return microbatches(config, rank, int(config.parallel.data), seed=step)


def measured(config: Config) -> tuple[int, list[tuple[str, int]], dict[str, int]]:
    """(bytes sent over the data axis in a step, use and elements of every bucket, bytes kept by kind)."""
    engine = engine_of(config)
    batch = batch_of(config, engine.mesh.data.rank)
    engine.train_step(batch)
    before = engine.mesh.sent_bytes()["data"]
    engine.train_step(batch)
    engine.gatherer.settle()
    sent = engine.mesh.sent_bytes()["data"] - before
    sizes = [(_use(bucket.members[0]), bucket.plan.size) for bucket in engine.buckets]
    storages = {
        "parameters": [bucket.whole for bucket in engine.buckets if bucket.whole is not None],
        "gradients": [bucket.gradient for bucket in engine.buckets],
        "master": [bucket.master for bucket in engine.buckets],
    }
    kept = {
        kind: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        for kind, tensors in storages.items()
    }
    return sent, sizes, kept


def _use(declared: Any) -> str:
    if declared.parameter.dim() == 1:
        return "vector"
    return "block" if declared.declaration.name.startswith("layers.") else "end"


@pytest.mark.parametrize(("data", "replicas"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize(("zero", "microbatches"), [(0, 2), (1, 1), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)])
def test_bytes_sent(zero: int, microbatches: int, data: int, replicas: int, pool: Pool) -> None:
    """Each share moves N - 1 times: reduced per step or microbatch, gathered per step or pass."""
    if zero == 0:
        replicas = 1
    dtype = "bf16" if (zero + data) % 2 else "fp32"
    config = data_config(microbatches, dtype, data=data, zero=zero, replicas=replicas)
    width = gradient = 4 if dtype == "fp32" else 2
    shards = data // replicas if zero else 1
    same = data // shards  # what a share is summed over: replicas, and in stage 0 all data ranks
    reductions = microbatches if zero >= 2 else 1
    gathers = {"block": 1, "end": 1, "vector": 1} if zero else {"block": 0, "end": 0, "vector": 0}
    if zero == 3:
        gathers |= {"block": 2 * microbatches, "end": microbatches}
    resolved = resolve(config, Layout.from_settings(config.parallel, data))
    for rank, (sent, sizes, _) in enumerate(pool.run(data, measured, config)):
        wanted = sum(
            reductions * size * gradient * (shards - 1) // shards
            + 2 * (same - 1) * (size // shards * gradient) // same
            + gathers[use] * (size * width * (shards - 1) // shards)
            for use, size in sizes
        )
        scalars = [(data, 8), (shards, 4), (data, 4)]  # the loss; the norm's squares; the largest norm
        wanted += sum(2 * (size - 1) * nbytes // size for size, nbytes in scalars)
        assert sent == wanted == predicted_traffic(resolved, rank)["data"]


@pytest.mark.parametrize(("data", "replicas"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_kept(zero: int, data: int, replicas: int, pool: Pool) -> None:
    """bf16 with bf16 gradients: 16, 4 + 12/N, 2 + 14/N and 14/N bytes per parameter, with 8/N of moments."""
    if zero == 0:
        replicas = 1
    config = data_config(1, "bf16", data=data, zero=zero, replicas=replicas)
    shards = data // replicas if zero else 1
    for _, sizes, kept in pool.run(data, measured, config):
        total = sum(size for _, size in sizes)
        matrices = sum(size for use, size in sizes if use != "vector" and zero == 3)
        assert kept["parameters"] == 2 * (total - matrices)
        assert kept["gradients"] == 2 * total // (shards if zero >= 2 else 1)
        assert kept["master"] == 4 * total // shards


def torch_losses(config: Config, kind: str) -> list[float]:
    """The same model as plain modules under PyTorch's own DDP or FSDP2."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from hexad.parallel.sharding import initialise

    from ..layers import shard_of, whole_model

    model = whole_model(config.model, shard_of(dtype=torch.float32))
    initialise(declared_parameters(model), config.run.seed)
    decays = {d.parameter.data_ptr(): d.declaration.weights[0].decay for d in declared_parameters(model)}
    flags = [decays[parameter.data_ptr()] for parameter in model.parameters()]
    wrapped: nn.Module = _Loss(model)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(wrapped)
    else:
        for part in (*model.layers.values(), wrapped):
            fully_shard(part)
    groups = [
        {"params": [p for p, flag in zip(model.parameters(), flags) if flag is decay], "weight_decay": value}
        for decay, value in ((True, 0.1), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(3):
        total, batch = 0.0, batch_of(config, dist.get_rank(), step)
        for microbatch in batch:
            loss = wrapped(microbatch) / (microbatch.tokens.numel() * len(batch))
            loss.backward()  # both average over the ranks
            total += float(loss)
        if kind == "fsdp2":
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        adamw.step()
        adamw.zero_grad()
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, microbatch: Microbatch) -> torch.Tensor:
        logits = self.model.logits(self.model(microbatch.tokens))[:, : self.model.vocab]
        return nn.functional.cross_entropy(logits, microbatch.labels.flatten(), reduction="sum")


def our_losses(config: Config) -> list[float]:
    engine = engine_of(config)
    return [engine.train_step(batch_of(config, engine.mesh.data.rank, step)).loss for step in range(3)]


@pytest.mark.parametrize(("zero", "kind"), [(0, "ddp"), (3, "fsdp2")])
@pytest.mark.parametrize("data", [2, 3])
def test_losses_are_pytorchs(zero: int, kind: str, data: int, pool: Pool) -> None:
    config = data_config(2, data=data, zero=zero)
    (ours, *_), (theirs, *_) = (
        pool.run(data, our_losses, config),
        pool.run(data, torch_losses, config, kind),
    )
    assert len(set(ours)) == 3
    assert ours == pytest.approx(theirs, rel=2e-5)


class _Interrupted(Exception):
    pass


def after_an_interruption(config: Config, in_evaluation: bool) -> tuple[list[float], list[float]]:
    """Losses after a step, or an evaluation, that an exception ended in the middle; and without it."""

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if in_evaluation else 4):  # a training step's second microbatch, or its backward pass
            raise _Interrupted

    engine, clean = engine_of(config), engine_of(config)
    rank, calls = engine.mesh.data.rank, 0
    layer = engine.stages[0].layers["1"]
    layer_hooks = [layer.register_forward_hook(interrupt), layer.register_full_backward_pre_hook(interrupt)]
    with pytest.raises(_Interrupted):
        (engine.evaluate if in_evaluation else engine.train_step)(batch_of(config, rank, 9))
    for hook in layer_hooks:
        hook.remove()
    weights = {
        piece.name: torch.full(piece.shape, 0.02) + torch.arange(piece.shape[-1]) / 1e3
        for bucket in engine.buckets
        for declared in bucket.members
        for _, piece, _ in declared.pieces
    }
    for trainer in (engine, clean):
        trainer.load_weights(WholeTensors(weights))
    values = []
    for trainer in (engine, clean):
        losses = [trainer.evaluate(batch_of(config, rank))[0]]
        values.append(losses + [trainer.train_step(batch_of(config, rank, step)).loss for step in range(2)])
    return values[0], values[1]


@pytest.mark.parametrize("in_evaluation", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_interrupted_step_leaves_nothing_behind(zero: int, in_evaluation: bool, pool: Pool) -> None:
    for losses, wanted in pool.run(2, after_an_interruption, data_config(2, zero=zero), in_evaluation):
        assert losses == wanted


def layers_present(config: Config) -> tuple[int, int]:
    """Most layers whose matrices are whole or on their way, in evaluation and in training."""
    from hexad.parallel.data.buckets import BufferPool

    engine = engine_of(config)
    layers = [bucket for bucket in engine.buckets if bucket.members[0].declaration.name.startswith("layers.")]
    take, most = BufferPool.take, 0

    def counting(self: BufferPool, bucket: Any, dtype: torch.dtype) -> torch.Tensor:
        nonlocal most
        waiting = engine.gatherer._gathering
        here = [
            layer
            for layer in layers
            if layer is bucket or layer.whole is not None or engine.buckets.index(layer) in waiting
        ]
        most = max(most, len([bucket for bucket in here if not bucket.plan.resident]))
        return take(self, bucket, dtype)

    counts = []
    with mock.patch.object(BufferPool, "take", counting):
        for step in (engine.evaluate, engine.train_step):
            most = 0
            step(batch_of(config, engine.mesh.data.rank))
            counts.append(most)
    return counts[0], counts[1]


def test_two_layers_are_whole_at_a_time_in_stage_3(pool: Pool) -> None:
    assert pool.run(2, layers_present, data_config(2, zero=3)) == [(2, 2)] * 2


def waited_for(config: Config) -> tuple[int, list[int]]:
    """Buckets, and how many of them are still to be waited for when the layers of the next step begin."""
    engine = engine_of(config)
    assert (
        engine.sharding["dense"].shards.group is not engine.mesh.data.group
    )  # or counts would queue behind them
    batch, left = batch_of(config, engine.mesh.data.rank)[:1], []
    for layer in engine.stages[0].layers.values():
        layer.register_forward_hook(lambda *_: left.append(len(engine.gatherer._gathering)))
    engine.train_step(batch)
    left.clear()
    engine.train_step(batch)
    return len(engine.buckets), left


@pytest.mark.parametrize("zero", [1, 2])
def test_a_step_begins_before_all_parameters_are_gathered(zero: int, pool: Pool) -> None:
    for buckets, left in pool.run(2, waited_for, data_config(1, zero=zero)):
        assert buckets > left[0] > left[1] > left[2] > 0  # the head's is still to come


def held_for_weights(zero: int) -> list[tuple[int, int]]:
    """After each ``B``: buckets of layers' matrices that have a buffer for gradients, and products that are
    left to ``W``."""
    config = data_config(3, data=1, zero=zero, tensor=2, pipeline=2, schedule="zb_h1")
    engine, held = engine_of(config), []
    original = _Walk._backward

    def backward(self: Any, stage: int, microbatch: int, gradient: Any, split: bool) -> Any:
        result = original(self, stage, microbatch, gradient, split)
        matrices = [bucket for bucket in engine.trained if len(bucket.members[0].parameter.shape) > 1]
        layers = [bucket for bucket in matrices if not bucket.plan.outside_layers]
        if split:
            there = sum(bucket.gradients is not None for bucket in layers)
            held.append((there, len(self.weights[stage, microbatch])))
        return result

    with mock.patch.object(_Walk, "_backward", backward):
        engine.train_step(microbatches(config, samples=6))
    return held


def test_gradients_that_are_not_kept_wait_for_w_as_a_whole(pool: Pool) -> None:
    """Else a bucket's buffer would exist from ``B`` to ``W``. Others may begin in ``B``, beside a gather."""
    layers = (2, 1)  # of the stages; four products each
    for rank, held in enumerate(pool.run(4, held_for_weights, 2)):
        assert held and all(entry == (0, 4 * layers[rank // 2]) for entry in held)
    for rank, held in enumerate(pool.run(4, held_for_weights, 1)):
        left = [2 * layers[rank // 2] + (rank >= 2)] * len(held)  # the last, where no embedding follows
        assert held and [products for _, products in held] == left


def test_a_bucket_is_a_multiple_of_its_shards() -> None:
    held = [HeldParameter.of(0, Parameter(f"p{n}", (Weight(f"p{n}", (n,)),)), {}) for n in (1, 32, 33)]
    for shards, size in ((1, 128), (3, 192)):
        (bucket,) = plan_buckets(held, 1e9, 4, 1, {"dense": shards})
        assert bucket.elements == (33, 32, 1) and bucket.offsets == (0, 64, 96)
        assert bucket.size == size and bucket.shard_size * shards == size


def _made_once() -> tuple[int, bool, bool]:
    """Calls of ``torch.full`` in a step of ZeRO 3, of which one is the optimizer's number of updates; whether
    a flat tensor keeps its views, and whether it is freed with them."""
    config = data_config(zero=3)
    engine = engine_of(config)
    batch = batch_of(config, engine.mesh.data.rank)
    engine.train_step(batch)
    made: Counter[str] = Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            made[str(function.overloadpacket)] += 1
            return function(*args, **(kwargs or {}))

    with Counted():
        engine.train_step(batch)
    bucket = engine.buckets[0]
    flat = torch.zeros(bucket.plan.size)
    views = bucket.views(flat)
    same = bucket.views(flat) is views
    left = [weakref.ref(flat), *map(weakref.ref, views)]
    gc.disable()  # it would find a cycle
    try:
        del flat, views
        return made["aten.full"], same, all(reference() is None for reference in left)
    finally:
        gc.enable()


def test_what_stands_for_a_layer_is_made_once(pool: Pool) -> None:
    assert pool.run(2, _made_once) == [(1, True, True)] * 2
