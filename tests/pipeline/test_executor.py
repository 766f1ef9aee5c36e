"""The executor against PyTorch's own pipelines, and what it holds in memory while it runs."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hexad.comm import streams
from hexad.config import Config
from hexad.dataset.load.microbatch import Microbatch
from hexad.model.configuration import build_config
from hexad.model.transformer import Transformer, build_stages
from hexad.parallel.data.buckets import BufferPool, Formats, StateSharding, make_buckets
from hexad.parallel.data.gradients import Deferred, Gradients
from hexad.parallel.pipeline.executor import Executor, MessageBuffers
from hexad.parallel.pipeline.schedule import Schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.validate import validate
from hexad.parallel.sharding import declared_parameters, initialise, stage_parameters
from hexad.topology.mesh import Axis

from ..layers import CPU, shard_of
from ..pool import Pool
from ..small import random_tokens

_MICRO, _SEQUENCE, _VOCAB, _HIDDEN = 2, 6, 31, 12


def llama(layers: int) -> Config:
    model = {
        "layers": layers,
        "hidden": _HIDDEN,
        "heads": 2,
        "ffn_hidden": 20,
        "vocab": _VOCAB,
        "init_std": 0.2,
    }
    return build_config({"model": model})


def stages_on(rank: int, layers: int, schedule: Schedule) -> dict[int, Transformer]:
    """One layer per stage."""
    spans = [range(layer, layer + 1) for layer in range(layers)]
    stages = build_stages(llama(layers).model, shard_of(), spans, schedule.placement, rank)
    initialise(declared_parameters(*stages.values()), 3)
    return stages


class Alone(nn.Module):
    """A stage as PyTorch's pipelines want it: one tensor in, one out."""

    def __init__(self, stage: Transformer) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stage.inventory.first:
            return self.stage(x)
        tokens = torch.zeros(_MICRO, _SEQUENCE, dtype=torch.int64)
        hidden = self.stage(tokens, inputs=x)
        return self.stage.logits(hidden) if self.stage.inventory.last else hidden


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :_VOCAB], labels.flatten(), reduction="sum")


def samples_of(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    tokens = random_tokens(_VOCAB, microbatches * _MICRO, _SEQUENCE, seed=8)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(stages: dict[int, Transformer]) -> dict[str, torch.Tensor]:
    totals = {}
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            totals[name], parameter.grad = parameter.grad, None
    return totals


def both(name: str, virtual: int, microbatches: int) -> tuple[dict[str, Any], ...]:
    """This rank's gradients by Hexad's executor and by PyTorch's pipelines."""
    from benchmarks.peers.torch_pipelining import pipeline

    world, rank = dist.get_world_size(), dist.get_rank()
    schedule = build_schedule(name, world, microbatches, virtual)
    stages = stages_on(rank, schedule.stages, schedule)
    tokens, labels = samples_of(microbatches)

    run = pipeline(name, {n: Alone(s) for n, s in stages.items()}, schedule.stages, microbatches, loss_of)
    losses = run(tokens, labels)
    theirs = gradients(stages)

    axis = Axis("pipeline", tuple(range(world)), rank, dist.group.WORLD)
    total = executor_of(schedule, stages, axis).run(microbatches_of(tokens, labels), 1.0)
    if losses:
        assert total is not None
        torch.testing.assert_close(total, torch.stack(losses).sum(), rtol=1e-12, atol=0)
    return gradients(stages), theirs


def microbatches_of(tokens: torch.Tensor, labels: torch.Tensor) -> list[Microbatch]:
    return [Microbatch(rows, wanted) for rows, wanted in zip(tokens.split(_MICRO), labels.split(_MICRO))]


def executor_of(
    schedule: Schedule,
    stages: dict[int, Transformer],
    axis: Axis,
    wrap: Callable[..., Any] = lambda compute: compute,
    sums: Gradients | None = None,
) -> Executor[Microbatch]:
    def runner(stage: Transformer) -> Callable[..., torch.Tensor]:
        def compute(microbatch: Microbatch, inputs: torch.Tensor | None, _: float | None) -> torch.Tensor:
            if stage.inventory.last:
                return stage.loss_sum(microbatch.tokens, microbatch.labels, None, inputs)
            return stage(microbatch.tokens, inputs=inputs)

        return compute

    def buffer(microbatch: Microbatch, _: int) -> torch.Tensor:
        return torch.empty(microbatch.tokens.numel(), _HIDDEN, dtype=torch.float64)

    runners = {number: wrap(runner(stage)) for number, stage in stages.items()}
    sums = sums or Gradients([], {}, {}, {}, BufferPool(CPU), torch.float64)
    return Executor(schedule, runners, axis, buffer, sums, CPU, MessageBuffers(CPU))


@pytest.mark.parametrize(
    ("name", "world", "virtual", "microbatches"),
    [
        ("1f1b", 2, 1, 4),
        ("1f1b", 3, 1, 5),
        ("interleaved", 2, 2, 4),
        ("interleaved", 2, 3, 6),
        ("gpipe", 2, 1, 3),
    ],
)
def test_the_gradients_of_torch_pipelining(
    name: str, world: int, virtual: int, microbatches: int, pool: Pool
) -> None:
    for ours, theirs in pool.run(world, both, name, virtual, microbatches):
        assert ours.keys() == theirs.keys() and ours
        for parameter, gradient in theirs.items():
            torch.testing.assert_close(ours[parameter], gradient, rtol=1e-11, atol=1e-13, msg=parameter)


class WatchedGradients(Gradients):
    """Remembers which deferred products are still held, by backward pass."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.passes: list[list[weakref.ref[torch.Tensor]]] = []

    @contextmanager
    def defer(self) -> Iterator[Deferred]:
        with super().defer() as later:
            yield later
        assert later, "no linear layer deferred its weight gradient"
        self.passes.append([weakref.ref(operand) for _, product in later for operand in product[:2]])

    def held(self) -> int:
        """Backward passes of which any operand is alive."""
        return sum(any(operand() is not None for operand in operands) for operands in self.passes)


class Mark(torch.autograd.Function):
    """Lives as long as the graph of one forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: weakref.WeakSet[Any]) -> torch.Tensor:
        alive.add(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def held_at_once(name: str, virtual: int, microbatches: int) -> tuple[int, int, int]:
    """(most activations the executor counts, most that are really alive, what is alive afterwards)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    schedule = build_schedule(name, world, microbatches, virtual)
    stages = stages_on(rank, schedule.stages, schedule)
    alone = Axis("data")
    formats = Formats(*[torch.float64] * 4)
    sharding = {"dense": StateSharding(alone, alone, ())}
    buckets = make_buckets(stage_parameters(stages), 1e9, formats, 0, sharding)
    for bucket in buckets:
        bucket.allocate(formats, False)
        bucket.initialise(3)
    sums = WatchedGradients(buckets, sharding, {}, {}, BufferPool(CPU), torch.float64)
    axis = Axis("pipeline", tuple(range(world)), rank, dist.group.WORLD)
    graphs: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def marking(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*arguments: Any) -> torch.Tensor:
            nonlocal most
            result = Mark.apply(compute(*arguments), graphs)
            most = max(most, len(graphs) + sums.held())
            return result

        return run

    executor = executor_of(schedule, stages, axis, marking, sums)
    for _ in range(2):
        sums.begin(microbatches)
        executor.run(microbatches_of(*samples_of(microbatches)), 1.0)
        sums.finish()
    gc.collect()
    return executor.peak_activations, most, len(graphs) + sums.held()


@pytest.mark.parametrize(
    ("name", "virtual", "microbatches"),
    [("gpipe", 1, 5), ("1f1b", 1, 7), ("interleaved", 2, 6), ("zb_h1", 1, 7), ("zb_h2", 1, 7), ("zb_v", 2, 5),
     ("dualpipe_v", 2, 7)],
)  # fmt: skip
def test_activations_are_held_as_long_as_the_validator_says(
    name: str, virtual: int, microbatches: int, pool: Pool
) -> None:
    world = 3
    schedule = build_schedule(name, world, microbatches, virtual)
    report = validate(schedule)
    for rank, (counted, alive, left) in enumerate(pool.run(world, held_at_once, name, virtual, microbatches)):
        assert counted == alive == report.peak_activations[rank]
        assert left == 0


def test_another_number_of_microbatches_is_refused() -> None:
    schedule = build_schedule("1f1b", 1, 3)
    executor = executor_of(schedule, stages_on(0, 1, schedule), Axis("pipeline"))
    with pytest.raises(ValueError, match="2 microbatches, scheduled are 3"):
        executor.run(microbatches_of(*samples_of(2)), 1.0)


def test_memory_of_messages_is_used_again_once_nothing_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "of", lambda device: SimpleNamespace(apart=True))
    memory, template = MessageBuffers(CPU), torch.zeros(3, 5)
    first = memory.like(template).fill_(2.0).requires_grad_()
    place = first.data_ptr()
    output = (first * first).sum()
    del first
    assert memory.like(template).data_ptr() != place  # the graph still has it
    output.backward()
    del output
    again = memory.of(torch.ones(5, 3, dtype=torch.bfloat16).t())  # a smaller one fits; copied, contiguous
    assert again.data_ptr() == place and again.is_contiguous() and again.sum() == 15
    larger = memory.like(torch.zeros(100))
    assert larger.shape == (100,) and len(memory._buffers) == 2  # in place of the free one
    monkeypatch.undo()
    kept = MessageBuffers(CPU)
    assert kept.like(template) is template and kept.of(template) is template and not kept._buffers
