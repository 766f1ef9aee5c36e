"""What crosses the boundaries of users' stages: any form, found by a forward pass, against one process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hexad import Engine, HexadError, Layout, Mesh, pipeline
from hexad.comm import all_reduce
from hexad.engine.forms import Form, signature
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.planning import PipelinePlan

from ..layers import CPU
from ..pool import Pool, RankError
from ..training.test_modules import module_config

WIDTH, STEPS, MICROBATCHES = 5, 2, 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)


def random_result(chance: random.Random, depth: int = 2) -> Any:
    """Nested containers of tensors and None."""
    kind = chance.choice(["tensor", "tensor", "none", *(["tuple", "list", "dict"] if depth else [])])
    if kind == "none":
        return None
    if kind == "tensor":
        shape = [chance.randint(0, 4) for _ in range(chance.randint(0, 3))]
        dtype = chance.choice(DTYPES)
        return torch.randint(0, 2 if dtype == torch.bool else 9, shape).to(dtype)
    parts = [random_result(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    if kind == "dict":
        return dict(zip("abc", parts))
    return tuple(parts) if kind == "tuple" else parts


def tensors(result: Any) -> list[Tensor | None]:
    if result is None or isinstance(result, Tensor):
        return [result]
    return [
        tensor
        for part in (result.values() if isinstance(result, dict) else result)
        for tensor in tensors(part)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_a_message_carries_any_result(seed: int) -> None:
    result = random_result(random.Random(seed))
    if all(tensor is None for tensor in tensors(result)):
        with pytest.raises(HexadError, match="found no tensor in the result of a stage's last layer"):
            Form.of(result, True)
        return
    form = Form.of(result, True)
    message = form.message(result)
    assert message.shape == form.empty(CPU).shape and message.dtype == form.empty(CPU).dtype
    received = form.result(message)
    assert signature(received) == signature(result)
    for one, other in zip(tensors(received), tensors(result), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("result", ["text", (torch.ones(2), 3), {"x": torch.ones(2), "y": object()}])
def test_other_values_do_not_cross_boundaries(result: Any) -> None:
    with pytest.raises(HexadError, match=r"found a (str|int|object) in the result of a stage's last layer"):
        Form.of(result, True)


def test_a_result_of_another_form_is_refused() -> None:
    form = Form.of((torch.ones(2), None), True)
    for other in (
        torch.ones(2),
        (torch.ones(3), None),
        (torch.ones(2), torch.ones(2)),
        (torch.ones(2).half(), None),
    ):
        with pytest.raises(HexadError, match="a stage's result has another form"):
            form.message(other)


@dataclass
class Batch:
    """A microbatch of a user's own class."""

    tokens: Tensor
    note: str = ""


@dataclass(slots=True)
class SlottedBatch:
    """As :class:`Batch`, without a ``__dict__``."""

    tokens: Tensor


def test_shapes_in_any_container_make_another_signature() -> None:
    two, three = torch.zeros(2, 3), torch.zeros(3, 3)
    for wrap in (
        lambda x: x,
        lambda x: (x, 1),
        lambda x: {"x": [x]},
        Batch,
        lambda x: [Batch(x)],
        SlottedBatch,
        lambda x: (Batch, x),
    ):
        assert signature(wrap(two)) == signature(wrap(two + 1)) != signature(wrap(three))
        assert signature(wrap(two)) != signature(wrap(two.double()))


# In a pipeline


class First(nn.Module):
    """Passes on hidden states, a mask, nothing, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        return torch.tanh(self.linear(x)), x > 0, None, torch.arange(len(x))


class Middle(nn.Module):
    """Passes on a dictionary of two trained tensors and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, passed: Any) -> Any:
        x, mask, nothing, numbers = passed
        assert nothing is None and numbers.dtype == torch.int64 and mask.dtype == torch.bool
        y = self.norm(self.linear(x)) * mask
        return {"x": x * numbers[:, None], "y": [y, mask]}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, passed: Any) -> Tensor:
        return self.linear(passed["x"] + passed["y"][0]).square().sum()


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [layer.double() for layer in (First(), Middle(), nn.Identity(), Last())]


def batches(step: int, rank: int) -> list[Tensor]:
    """Microbatches of several shapes, other ones on each data rank."""
    generator = torch.Generator().manual_seed(7 * step + rank)
    sizes = [(2, 5, 2), (3, 3, 4)][rank % 2] if step % 2 == 0 else (4, 2, 3)
    return [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for rows in sizes]


def trained(engine: Engine, mesh: Mesh) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(STEPS):
        microbatches = batches(step, mesh.data.rank)
        engine.begin(MICROBATCHES)
        total = engine.accumulate(microbatches, scale=0.1)
        engine.reduce()
        norms.append(engine.update(0.01))
        evaluated = engine.total_loss(batches(0, mesh.data.rank))
        pair = torch.stack(
            [torch.zeros(2, dtype=torch.float64)[0] if t is None else t for t in (total, evaluated)]
        )
        losses += all_reduce(all_reduce(pair, mesh.data), mesh.pipeline).tolist()
    return losses, norms


def staged(schedule: str, virtual: int, zero: int, how: str, ranks: int = 2) -> tuple[Any, int, list[float]]:
    """(losses and norms, passes of the first layer on this rank, running means of the second)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh.create(Layout(world=world, pipeline=ranks), CPU)
    listed = layers()
    if how == "list":
        engine = pipeline(listed, mesh, schedule=schedule, virtual_stages=virtual, split="even").engine(
            module_config(zero)
        )
    else:
        planned = build_schedule(schedule, ranks, ranks, virtual)
        parts = [range(4 * n // planned.stages, 4 * (n + 1) // planned.stages) for n in range(planned.stages)]
        own = planned.stages_of(mesh.pipeline.rank)
        stages = {n: nn.Sequential(*(listed[number] for number in parts[n])) for n in own}
        config = module_config(zero)
        parallel = config.parallel.model_copy(update={"schedule": schedule, "virtual_stages": virtual})
        config = config.model_copy(update={"parallel": parallel})
        engine = Engine(stages, mesh, config, plan=PipelinePlan(planned, tuple(parts)), initialise=False)
    first, middle = listed[:2]
    return trained(engine, mesh), first.passes, middle.norm.running_mean.tolist()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("world", "schedule", "virtual", "zero", "how"),
    [
        (2, "1f1b", 1, 1, "engine"),
        (4, "zb_h1", 1, 3, "list"),
        pytest.param(2, "interleaved", 2, 0, "list", marks=pytest.mark.slow),
        pytest.param(4, "zb_v", 2, 2, "engine", marks=pytest.mark.slow),
        pytest.param(4, "gpipe", 1, 3, "engine", marks=pytest.mark.slow),
    ],
)
def test_stages_pass_on_what_they_like(
    world: int, schedule: str, virtual: int, zero: int, how: str, pool: Pool
) -> None:
    """Several tensors, None, integers and masks, of shapes that differ between microbatches and data ranks;
    the forward passes that find them leave no trace in running means."""
    expected = pool.run(world // 2, staged, "1f1b", 1, 0, "list", 1)
    found = pool.run(world, staged, schedule, virtual, zero, how)
    for result in found:
        assert result[0][0] == pytest.approx(expected[0][0][0], rel=1e-12)
        assert result[0][1] == pytest.approx(expected[0][0][1], rel=1e-10)
    means = [result[2] for result in found if any(result[2])]
    assert means and all(one in [pytest.approx(other[2], rel=1e-9) for other in expected] for one in means)


def bad(kind: str) -> None:
    mesh = Mesh.create(Layout(world=2, pipeline=2), CPU)

    class Names(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return "names" if kind == "text" else [None]

    stages = {0: Names(2, 2), 1: nn.Linear(2, 2)}
    engine = Engine({mesh.pipeline.rank: stages[mesh.pipeline.rank]}, mesh, module_config(0))
    engine.begin(2)
    engine.accumulate([torch.zeros(1, 2)] * 2)


@pytest.mark.parametrize(("kind", "message"), [("text", "found a str"), ("none", "found no tensor")])
def test_a_result_that_cannot_be_sent_is_named(kind: str, message: str, pool: Pool) -> None:
    with pytest.raises(RankError, match=f"{message} in the result of a stage's last layer"):
        pool.run(2, bad, kind)
