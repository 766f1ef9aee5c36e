"""The engine with modules that are not ours, and a loop that is not ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hexad import Engine, Layout, Mesh
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.comm import all_reduce, all_to_all
from hexad.config import Config, HexadError
from hexad.parallel.inventory import Parameter, Weight
from hexad.parallel.sharding import Shard, ShardedModule
from hexad.topology.mesh import Axis

from ..layers import CPU
from ..pool import Pool
from ..small import Tree, config_of, merged

WIDTH, ROWS, STEPS = 6, 12, 3


DEFAULTS: Tree = {
    "precision": {"dtype": "fp64"},
    "parallel": {"bucket_mb": 1e-4},
    "optimizer": {"lr": 0.02, "clip": 0.5},
}


def module_config(zero: int, **groups: dict[str, Any]) -> Config:
    return config_of(DEFAULTS, **merged({"parallel": {"zero": zero}}, groups))


def samples_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))


# Plain modules


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Plain(nn.Module):
    """Layers in a list, a parameter of the root's own, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Residual() for _ in range(3)])
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x * self.gain)


def by_torch() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """A plain loop in one process: losses, gradient norms, and the weights at its end."""
    model = Plain().double()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = samples_of(step)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()))
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.5 / norms[-1]))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def by_engine(
    zero: int, microbatches: int, own_loop: bool
) -> tuple[list[float], list[float], dict[str, Any]]:
    """The same on this data rank, with the step's parts called one by one."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    mesh = Mesh.create(Layout(world=world, data=world), CPU)
    torch.manual_seed(mesh.rank)
    model = Plain().double()
    if mesh.rank:  # a rank that has begun with other values is given the first one's
        with torch.no_grad():
            model.gain.add_(1.0)

    def loss_of(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor], *_: Any) -> torch.Tensor:
        return (model(part[0]) - part[1]).square().sum() / (ROWS * WIDTH)

    engine = Engine(model, mesh, module_config(zero), compute=loss_of)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = (part.chunk(world)[mesh.rank].chunk(microbatches) for part in samples_of(step))
        parts = list(zip(x, y))
        engine.begin(len(parts))
        if own_loop:
            total = torch.zeros((), dtype=torch.float64)
            for part in parts:
                loss = loss_of(model, part)
                loss.backward()
                total += loss.detach()
        else:
            total = engine.accumulate(parts)
        engine.reduce()
        norms.append(engine.update(0.02))
        losses.append(float(all_reduce(total.clone(), mesh.data)))
    weights = {c.name.removeprefix("model."): c for c in engine.chunks() if c.name.startswith("model.")}
    return (
        losses,
        norms,
        {name: (chunk.rectangle.slices, chunk.tensor.clone()) for name, chunk in weights.items()},
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "microbatches", "own_loop"), [(1, 2, True), (2, 3, False), (3, 2, True)])
def test_plain_modules_train_as_in_a_plain_loop(
    zero: int, world: int, microbatches: int, own_loop: bool, pool: Pool
) -> None:
    losses, norms, weights = by_torch()
    results = pool.run(world, by_engine, zero, microbatches, own_loop)
    assert {name for *_, pieces in results for name in pieces} == weights.keys()
    for rank_losses, rank_norms, pieces in results:
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        assert rank_norms == pytest.approx(norms, rel=1e-12)
        for name, (where, values) in pieces.items():
            torch.testing.assert_close(values, weights[name][where], rtol=1e-10, atol=1e-12, msg=name)


def skipping_loss(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor, int], *_: Any) -> torch.Tensor:
    """Of a part that leaves out one of the layers, another one on every rank and in every microbatch."""
    x, y, skipped = part
    x = model.first(x)
    for number, layer in enumerate(model.layers):
        x = x if number == skipped else layer(x)
    return (model.last(x * model.gain) - y).square().sum() / (ROWS * WIDTH)


def skipping_engine(zero: int, microbatches: int) -> list[float]:
    world = torch.distributed.get_world_size()
    mesh = Mesh.create(Layout(world=world, data=world), CPU)
    engine = Engine(Plain().double(), mesh, module_config(zero), compute=skipping_loss)
    norms = []
    for step in range(STEPS):
        parts = list(zip(*(values.chunk(world * microbatches) for values in samples_of(step)), range(ROWS)))
        engine.begin(microbatches)
        engine.accumulate(parts[mesh.rank * microbatches : (mesh.rank + 1) * microbatches])
        engine.reduce()
        norms.append(engine.update(0.02))
    return norms


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_data_ranks_may_leave_out_different_parameters(zero: int, pool: Pool) -> None:
    model = Plain().double()
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": vectors}]
    groups[1]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in zip(*(values.chunk(6) for values in samples_of(step)), range(6)):
            skipping_loss(model, part).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    for of_rank in pool.run(3, skipping_engine, zero, 2):
        assert of_rank == pytest.approx(norms, rel=1e-5)  # torch's clipping adds 1e-6 to the norm


@pytest.mark.parametrize("own_loop", [True, False])
def test_the_loss_scale_of_fp16_is_no_part_of_the_norm(own_loop: bool) -> None:
    norms = {}
    for dtype in ("fp32", "fp16"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        config = module_config(0, precision={"dtype": dtype})
        mesh = Mesh.create(Layout(world=1), CPU)
        engine = Engine(model, mesh, config, compute=lambda model, x, *_: model(x).float().square().mean())
        x = samples_of(0)[0].to(torch.float16 if dtype == "fp16" else torch.float32)
        engine.begin(1)
        if own_loop:
            (model(x).float().square().mean() * engine.scaler.scale).backward()
        else:
            engine.accumulate([x])
        engine.reduce()
        norms[dtype] = engine.update(0.0)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=2e-2)


def test_complete_steps_are_those_of_a_language_model() -> None:
    engine = Engine(Plain().double(), Mesh.create(Layout(world=1), CPU), module_config(0))
    with pytest.raises(HexadError, match="begin, accumulate, reduce and update"):
        engine.train_step([])


# A weight divided over an axis that no layer of ours divides


class Exchange(torch.autograd.Function):
    """Rows sent to the ranks of an axis; backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.arguments = axis, receive, send
        return all_to_all(x.contiguous(), axis, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_to_all(gradient.contiguous(), *ctx.arguments), None, None, None


EXPERTS = 4


class Experts(ShardedModule):
    """One matrix per expert, experts divided over the expert axis; row i of a batch goes to its expert."""

    weight: nn.Parameter

    def __init__(self, shard: Shard, axis: Axis) -> None:
        super().__init__(shard)
        self.axis = axis
        shape = (EXPERTS, WIDTH, WIDTH)
        weight = Weight(
            "experts.weight", shape, {"expert": 0}, grid="expert", decay=True, std=0.3, unit="experts"
        )
        self.declare(Parameter("experts.weight", (weight,)))

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=EXPERTS)
        per_rank = counts.view(self.axis.size, -1)
        known = all_to_all(counts, self.axis)  # [ranks * own experts]: what every rank sends to mine
        own = known.view(self.axis.size, -1)
        send, receive = per_rank.sum(1).tolist(), own.sum(1).tolist()
        rows = Exchange.apply(x[order], self.axis, send, receive)
        labels = torch.arange(own.shape[1]).repeat(self.axis.size).repeat_interleave(own.flatten())
        out = (
            torch.stack([self.weight[label] @ row for row, label in zip(rows, labels.tolist())])
            if len(rows)
            else rows
        )
        back = Exchange.apply(out, self.axis, receive, send)
        return torch.empty_like(back).index_copy(0, order, back)


class Toy(nn.Module):
    def __init__(self, shard: Shard, axis: Axis) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(WIDTH, WIDTH).double()
        self.experts = Experts(shard, axis)

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return x + self.experts(torch.tanh(self.dense(x)), experts)


def toy(expert: int, zero: int, directory: str, load: bool) -> tuple[list[float], list[float], list[Any]]:
    """Losses, norms and pieces of the weights; saved to, or begun from, a checkpoint in ``directory``."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    mesh = Mesh.create(Layout(world=world, expert=expert), CPU)
    axes = {axis.name: axis for axis in mesh.model_axes("expert")}
    shard = Shard(axes, dtype=torch.float64)
    model = Toy(shard, mesh.axes["expert"])

    def loss_of(model: nn.Module, part: tuple[torch.Tensor, ...], *_: Any) -> torch.Tensor:
        return (model(part[0], part[2]) - part[1]).square().sum() / (ROWS * WIDTH)

    Path(directory).mkdir(exist_ok=True)
    config = module_config(zero, run={"dir": directory, "seed": 3})
    engine = Engine(model, mesh, config, compute=loss_of)
    grids = {bucket.traits.grid for bucket in engine.buckets}
    assert grids == {"dense", "expert"}
    checkpointer = Checkpointer(config, mesh)
    if load:
        engine.restored(
            checkpointer.load(Path(directory) / "checkpoints" / "step-00000002", engine.chunks()).progress
        )
    losses, norms = [], []
    while engine.step < 4:
        x, y = samples_of(engine.step)
        experts = torch.randint(EXPERTS, (ROWS,), generator=torch.Generator().manual_seed(engine.step))
        part = tuple(values.chunk(world)[mesh.rank] for values in (x, y, experts))
        engine.begin(1)
        total = engine.accumulate([part])
        engine.reduce()
        norms.append(engine.update(0.02))
        losses.append(float(all_reduce(total, mesh.data)))
        if engine.step == 2 and not load:
            checkpointer.save(engine.chunks(), engine.progress())
            checkpointer.wait()
    checkpointer.close()
    pieces = [
        (c.name, c.rectangle.slices, c.tensor.clone()) for c in engine.chunks() if c.name.startswith("model.")
    ]
    return losses, norms, pieces


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("world", "expert"),
    [(4, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (4, 4)))],
)
def test_a_weight_divided_over_another_axis(
    world: int, expert: int, zero: int, pool: Pool, tmp_path: Path
) -> None:
    """Through buckets of both grids, the norm, checkpoints of any layout, and parity with one process."""
    ((losses, norms, whole),) = pool.run(1, toy, 1, 0, str(tmp_path / "one"), False)
    weights = {name: values for name, _, values in whole}
    for load, directory in ((False, "many"), (True, "one")):
        begin = 2 if load else 0
        results = pool.run(world, toy, expert, zero, str(tmp_path / directory), load)
        for rank_losses, rank_norms, pieces in results:
            assert rank_losses == pytest.approx(losses[begin:], rel=1e-10)
            assert rank_norms == pytest.approx(norms[begin:], rel=1e-10)
            for name, where, values in pieces:
                torch.testing.assert_close(values, weights[name][where], rtol=1e-9, atol=1e-12, msg=name)
    ((rank_losses, _, _),) = pool.run(1, toy, 1, 0, str(tmp_path / "many"), True)
    assert rank_losses == pytest.approx(losses[2:], rel=1e-10)
