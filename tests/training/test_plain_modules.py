"""Plain modules: names, values, stages that have nothing to train, and what is refused."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hexad import Engine, Layout, Mesh
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.comm import all_reduce
from hexad.config import HexadError
from hexad.parallel.sharding import Shard
from hexad.topology.mesh import Axis

from ..layers import CPU
from ..pool import Pool
from .test_modules import EXPERTS, ROWS, WIDTH, Experts, module_config, samples_of

FLOAT = torch.float64


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d, nn.Bilinear])
def test_inputs_of_another_format_than_16_bit_weights_are_named(kind: type[nn.Module]) -> None:
    module = kind(3, 1) if kind is nn.Linear else kind(3, 3, 1)

    def loss(module: nn.Module, batch: torch.Tensor, inputs: Any, scale: Any) -> torch.Tensor:
        return module(*[batch] * (2 if isinstance(module, nn.Bilinear) else 1)).sum()

    engine = Engine(module, mesh_of(), module_config(0, precision={"dtype": "bf16"}), compute=loss)
    engine.begin(1)
    with pytest.raises(HexadError, match=r"^precision\.dtype bf16: the modules' weights have this format"):
        engine.accumulate([torch.ones(3, 3)])
    engine.begin(1)
    with pytest.raises(RuntimeError, match=r"size|shape|channels"):  # other errors stay what they are
        engine.accumulate([torch.ones(2, 2, 5, dtype=torch.bfloat16)])


def mesh_of(**degrees: int) -> Mesh:
    return Mesh.create(Layout(world=dist.get_world_size() if dist.is_initialized() else 1, **degrees), CPU)


def boundary(_: Any, stage: int) -> torch.Tensor:
    return torch.empty(ROWS // 2, WIDTH, dtype=FLOAT)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, dtype=FLOAT)


class Last(nn.Module):
    """Counts what it is given, and may train nothing."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=trained, dtype=FLOAT)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.odd[1] = True
        return self.norm(x)


def stage_modules(kind: str) -> list[nn.Module]:
    """Two stages whose parameters have the same names; of ``first`` or ``last`` nothing is trained, of
    ``mixed`` every stage has a part that is not."""
    torch.manual_seed(7)

    def stage(*extra: nn.Module) -> nn.Module:
        return nn.Sequential(linear(), nn.Tanh(), linear(), *extra)

    stages = [stage(), Last(False) if kind == "last" else stage(Last())]
    if kind == "first":
        stages[0].requires_grad_(False)
    if kind == "mixed":
        for module in stages:
            module[0].requires_grad_(False)
    return stages


def loss_of(stage: nn.Module, part: Any, inputs: torch.Tensor | None, _: Any = None) -> torch.Tensor:
    """A stage of two, the last with the loss."""
    if inputs is None:
        return stage(part[0])
    return (stage(inputs) - part[1]).square().sum() / (ROWS * WIDTH)


def by_torch(kind: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    stages = nn.ModuleList(stage_modules(kind))
    trained = [p for p in stages.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if (p.dim() > 1) == decay], "weight_decay": 0.1 * decay}
              for decay in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(stages[1], samples_of(step), stages[0](samples_of(step)[0]))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {f"stages.{name}": p.detach() for name, p in stages.named_parameters()}


def by_engine(kind: str, zero: int, directory: str, schedule: str) -> tuple[list[float], dict[str, Any]]:
    """Two steps, saved; two others, forgotten by loading; two more. Losses of the last, and all values."""
    mesh = mesh_of(pipeline=2)
    stage = stage_modules(kind)[mesh.pipeline.rank]
    groups = {"optimizer": {"lr": 0.02, "clip": 0}, "run": {"dir": directory}}
    config = module_config(zero, **groups, parallel={"zero": zero, "bucket_mb": 1e-4, "schedule": schedule})
    engine = Engine(stage, mesh, config, compute=loss_of, boundary=boundary)
    checkpointer = Checkpointer(config, mesh)

    def steps(first: int) -> list[float]:
        losses = []
        for step in range(first, first + 2):
            parts = [
                part.chunk(2) for part in (x.chunk(mesh.data.size)[mesh.data.rank] for x in samples_of(step))
            ]
            engine.begin(2)
            total = engine.accumulate([tuple(part) for part in zip(*parts)])
            engine.reduce()
            engine.update(0.02)
            total = torch.zeros((), dtype=FLOAT) if total is None else total
            losses.append(float(all_reduce(all_reduce(total, mesh.data), mesh.pipeline)))
        return losses

    steps(0)
    checkpointer.save(engine.chunks(), engine.progress())
    checkpointer.wait()
    seen = int(stage.state_dict(keep_vars=True).get("3.seen", 0))
    steps(7)
    saved = checkpointer.find()
    engine.restored(checkpointer.load(saved, engine.chunks()).progress)
    checkpointer.close()
    assert int(stage.state_dict(keep_vars=True).get("3.seen", 0)) == seen
    losses = steps(2)
    engine.gatherer.settle()
    weights = {c.name: (c.rectangle, c.tensor.clone()) for c in engine.chunks() if "model." in c.name}
    return losses, weights


@pytest.mark.parametrize("kind", ["first", "last", "mixed", "all"])
@pytest.mark.parametrize(("zero", "schedule"), [(0, "1f1b"), (3, "zb_h1"), (3, "1f1b"), (0, "zb_h1")])
def test_stages_with_the_same_names_and_nothing_to_train(
    kind: str, zero: int, schedule: str, pool: Pool, tmp_path: Path
) -> None:
    losses, weights = by_torch(kind, 4)
    results = pool.run(2, by_engine, kind, zero, str(tmp_path), schedule)
    stored_values = {
        name.removeprefix("model."): values for _, held in results for name, values in held.items()
    }
    prefix = "stages." if kind != "last" else ""
    for name, values in weights.items():
        stored = name if prefix else name.removeprefix("stages.0.")
        torch.testing.assert_close(
            stored_values[stored][1].view(values.shape), values, rtol=1e-10, atol=1e-12
        )
    assert not any("cache" in name for name in stored_values)
    assert stored_values["stages.1.3.seen" if prefix else "seen"][1].tolist() == [4 * ROWS]
    for rank_losses, _ in results:
        assert rank_losses == pytest.approx(losses[2:], rel=1e-12)


# Values at the beginning


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(2, 2), requires_grad=False)
        self.register_buffer("random", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x.view(len(x), 1, 2, -1))).mean() * self.scale + self.frozen.sum()


def begun(zero: int, directory: str) -> tuple[bool, list[torch.Tensor]]:
    """Whether this rank begins with rank 0's values; and those it has after a step, saved and loaded."""
    mesh = mesh_of(tensor=2)
    torch.manual_seed(mesh.rank)
    module = Convolved().double()
    config = module_config(zero, run={"dir": directory})
    engine = Engine(module, mesh, config, compute=lambda module, x, *_: module(x))
    engine.gatherer.settle()
    torch.manual_seed(0)
    first = Convolved().double()
    same, expected = torch.equal(module.random, first.random), first.state_dict()
    with engine.gathered():
        for name, values in module.state_dict().items():
            same &= torch.equal(values, expected[name])
    engine.begin(1)
    engine.accumulate([samples_of(0)[0].chunk(mesh.data.size)[mesh.data.rank]])
    engine.reduce()
    engine.update(0.1)
    checkpointer = Checkpointer(config, mesh)
    checkpointer.save(engine.chunks(), engine.progress())
    checkpointer.wait()
    checkpointer.load(checkpointer.find(), engine.chunks())
    checkpointer.close()
    return same, [module.random, module.norm.running_mean, module.frozen.data, engine.buckets[0].master]


@pytest.mark.parametrize("zero", [0, 3])
def test_copies_begin_with_the_values_of_the_first_rank(zero: int, pool: Pool, tmp_path: Path) -> None:
    results = pool.run(4, begun, zero, str(tmp_path))
    assert all(same for same, _ in results)
    for _, of_rank in results:
        for values, expected in zip(of_rank[:3], results[0][1]):
            assert torch.equal(values, expected)
    if zero == 0:
        assert torch.equal(results[0][1][3], results[3][1][3])


# Outputs of every form


@dataclass
class Output:
    x: torch.Tensor
    kept: torch.Tensor | None = None


class Hidden:
    """Not searched for tensors."""

    def __init__(self, *parts: torch.Tensor) -> None:
        self.parts = parts


def parts_of(given: Any) -> list[torch.Tensor]:
    if isinstance(given, (Output, dict)):
        return list((given if isinstance(given, dict) else vars(given)).values())
    return list(given.parts if isinstance(given, Hidden) else given)


FORMS: dict[str, Callable[..., Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "dataclass": Output,
    "hidden": Hidden,
    "others": lambda x, y: (y, x, None, 3),
}


class Layer(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.other, self.form = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), FORMS[form]

    def forward(self, given: Any) -> Any:
        x, y = parts_of(given)[:2]
        return self.form(torch.tanh(self.linear(x)), self.other(y) * x)


class Stack(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([Layer(form) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: Any = (x, x)
        for layer in self.layers:
            given = layer(given)
        x, y = parts_of(given)[:2]
        return x.square().sum() + y.sum()


class Nested(nn.Module):
    """Lists in lists, and parameters in lists, none of which is ever called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        inner = nn.ModuleList([linear(), nn.Sequential(linear(), nn.Tanh())])
        self.branches = nn.ModuleList([inner, nn.ModuleDict({"a": linear()})])
        self.matrices = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])
        self.gains = nn.ParameterDict({"b": torch.randn(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (one, two), three = self.branches
        x = torch.tanh(two(one(x) @ self.matrices[0]) * self.gains["b"])
        return (three["a"](x) @ self.matrices[1]).square().sum()


def made(form: str) -> nn.Module:
    return (Nested() if form == "nested" else Stack(form)).double()


def norm_of(form: str) -> tuple[float, float]:
    """Of the gradient, by torch and by the engine."""
    x, model = samples_of(0)[0], made(form)
    model(x).backward()
    expected = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    mesh = mesh_of()
    model = made(form)
    engine = Engine(model, mesh, module_config(3))
    engine.begin(2)
    # The forward passes of both before either's backward: weights come to lie in other buffers than before.
    for loss in [model(rows) for rows in x.chunk(mesh.data.size)[mesh.data.rank].chunk(2)]:
        loss.backward()
    engine.reduce()
    return float(expected), engine.update(0.0)


@pytest.mark.parametrize("form", [*FORMS, "nested"])
def test_sharded_modules_of_any_structure(form: str, pool: Pool) -> None:
    for expected, norm in pool.run(2, norm_of, form):
        assert norm == pytest.approx(expected, rel=1e-12)


# What is refused


def mean(module: nn.Module, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return module(x).square().mean()


def test_settings_that_do_not_fit_are_refused() -> None:
    def build(module: nn.Module = linear(), **parallel: Any) -> None:  # noqa: B008
        Engine(module, mesh_of(), module_config(0, parallel=parallel))

    with pytest.raises(HexadError, match=r"parallel\.replicas: found 2, .* data degree 1; use 1"):
        build(zero=1, replicas=2)
    with pytest.raises(HexadError, match=r"parallel\.replicas: found 2 with parallel\.zero 0"):
        build(zero=0, replicas=2)
    cases = (("memory", "recompute", "full", "none"), ("precision", "dtype", "fp8", "bf16"))
    for group, name, value, fix in cases:
        config = module_config(0, **{group: {name: value}})
        with pytest.raises(HexadError, match=rf"{group}\.{name}: found {value}, .*; use {fix}"):
            Engine(linear(), mesh_of(), config)
    with pytest.raises(HexadError, match=r"config: found None; pass Engine\(stages, mesh, config\)"):
        Engine(linear(), mesh_of())
    for module in (nn.Tanh(), linear().requires_grad_(False)):
        with pytest.raises(HexadError, match="stages: found no parameter that requires a gradient"):
            build(module)
    with pytest.raises(HexadError, match="stages: found numbers"):
        Engine({1: linear()}, mesh_of(), module_config(0))
    experts = Experts(Shard({}, dtype=FLOAT), Axis("expert"))
    with pytest.raises(HexadError, match=r"experts\.weight: found requires_grad False, but it is declared"):
        build(experts.requires_grad_(False))
    with pytest.raises(HexadError, match=r"weight: found torch\.complex64"):
        build(nn.Linear(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize("zero", [0, 2])
def test_passes_that_begin_was_not_called_for_are_refused(zero: int) -> None:
    module, x = linear(), samples_of(0)[0]
    engine = Engine(module, mesh_of(), module_config(zero), compute=mean)
    with pytest.raises(HexadError, match="accumulate: found 1 microbatches, but 0 are left"):
        engine.accumulate([x])
    with pytest.raises(HexadError, match="gradients: found more backward passes"):
        mean(module, x).backward()
    with pytest.raises(HexadError, match="begin: found 0 microbatches"):
        engine.begin(0)
    engine.begin(2)
    engine.accumulate([x])
    engine.accumulate([x])
    with pytest.raises(HexadError, match="accumulate: found 1 microbatches, but 0 are left"):
        engine.accumulate([x])
    engine.reduce()
    assert engine.update(0.1) > 0


def message(case: str) -> str:
    """What this rank says."""
    rank, mesh = dist.get_rank(), mesh_of(pipeline=1)
    module = linear()
    if case == "shape" and rank:
        module = nn.Linear(WIDTH, 2, dtype=FLOAT)
    if case == "fewer" and rank:
        module = nn.Linear(WIDTH, WIDTH, bias=False, dtype=FLOAT)
    if case == "frozen" and rank:
        module.requires_grad_(False)
    try:
        Engine({rank: module} if case == "numbers" else module, mesh, module_config(0))
    except HexadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("shape", "found weight a trained float64 tensor of shape (2, 6) on rank 1 where rank 0 has weight"),
        ("fewer", "found nothing on rank 1 where rank 0 has bias"),
        ("frozen", "found weight an untrained float64 tensor of shape (6, 6) on rank 1 where rank 0 has"),
        ("numbers", "rank 1: stages: found numbers [1] on pipeline rank 0 of 1"),
    ],
)
def test_all_ranks_refuse_alike(case: str, expected: str, pool: Pool) -> None:
    one, other = pool.run(2, message, case)
    assert expected in one
    assert one == other


# Stages of other grids


class Routed(nn.Module):
    """The second of two stages, the only one with experts."""

    def __init__(self, shard: Shard, axis: Axis, first: int) -> None:
        super().__init__()
        self.experts, self.first = Experts(shard, axis), first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, (torch.arange(len(x)) + self.first) % EXPERTS)


def routed(zero: int) -> float:
    mesh = mesh_of(pipeline=2, expert=2 if dist.get_world_size() > 2 else 1)
    axes = {axis.name: axis for axis in mesh.model_axes("expert")}
    torch.manual_seed(1)
    stage, rows = linear(), ROWS // mesh.data.size
    if mesh.pipeline.rank:
        stage = Routed(Shard(axes, dtype=FLOAT), mesh.axes["expert"], rows * mesh.data.rank)

    def make(_: Any, stage: int) -> torch.Tensor:
        return torch.empty(rows, WIDTH, dtype=FLOAT)

    engine = Engine(stage, mesh, module_config(zero), compute=loss_of, boundary=make)
    # As a mesh does: torch names such a group after how many the process has made before.
    group = dist.new_group([*range(dist.get_world_size())], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=group)
    engine.begin(1)
    engine.accumulate([tuple(values.chunk(mesh.data.size)[mesh.data.rank] for values in samples_of(0))])
    engine.reduce()
    return engine.update(0.1)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_experts_on_one_stage_only(zero: int, pool: Pool) -> None:
    """All ranks make the same process groups, and the norm is that of both grids."""
    expected = pool.run(2, routed, zero)[0]
    assert pool.run(4, routed, zero) == pytest.approx([expected] * 4, rel=1e-12)


def copied_at_once(zero: int) -> list[torch.Tensor]:
    """The parameters of a copy of a module that is made directly after an update."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(WIDTH, 97, dtype=FLOAT), nn.Linear(97, 1, dtype=FLOAT))
    engine = Engine(module, mesh_of(), module_config(zero), compute=lambda module, x, *_: module(x).sum())
    engine.begin(1)
    engine.accumulate([torch.ones(2, WIDTH, dtype=FLOAT)])
    engine.reduce()
    engine.update(0.1)
    with engine.gathered() if zero == 3 else nullcontext():
        copy = deepcopy(module)
    assert {type(parameter) for parameter in copy.parameters()} == {nn.Parameter}
    return [parameter.detach() for parameter in copy.parameters()]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_module_is_copied_after_an_update(zero: int, pool: Pool) -> None:
    expected = pool.run(2, copied_at_once, 0)[0]
    for copied in pool.run(2, copied_at_once, zero):
        assert all(
            torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in zip(copied, expected, strict=True)
        )


def read_at_once(zero: int) -> tuple[list[torch.Tensor], list[str]]:
    """A weight read directly after every update, and what reading a sharded one raises."""
    mesh = mesh_of()
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(96, 97, dtype=FLOAT), nn.Tanh(), nn.Linear(97, 1, dtype=FLOAT))
    engine = Engine(module, mesh, module_config(zero), compute=lambda module, x, *_: module(x).sum())
    values, errors = [], []
    for step in range(6):
        engine.begin(1)
        engine.accumulate([torch.full((2, 96), 1.0 + step + mesh.rank, dtype=FLOAT)])
        engine.reduce()
        engine.update(0.1)
        try:
            values.append(module[0].weight.detach().clone())
            copied = {name: value.clone() for name, value in module.state_dict().items()}
        except HexadError as error:
            errors.append(str(error))
            with engine.gathered():
                values.append(module[0].weight.detach())
                copied = {name: value.clone() for name, value in module.state_dict().items()}
        complete = engine.state_dict()
        assert list(complete) == list(copied) and all(torch.equal(complete[n], copied[n]) for n in copied)
        assert "not gathered" in repr(module[0].weight) or zero < 3
        assert module[0].weight.shape == (97, 96) and module[0].weight.grad is None
        assert (
            module[0].weight.nbytes == 97 * 96 * module[0].weight.itemsize and not module[0].weight.is_sparse
        )
    first = engine.state_dict(first_only=True)
    assert len(first) == (0 if mesh.rank else 4)
    return values, errors


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_read_after_an_update_are_current(zero: int, pool: Pool) -> None:
    expected = pool.run(2, read_at_once, 0)[0][0]
    for values, errors in pool.run(2, read_at_once, zero):
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(values, expected, strict=True))
        assert len(errors) == (6 if zero == 3 else 0)
        assert all(
            re.match(r"parameter of shape \(97, 96\): its values are sharded .* engine.state_dict", error)
            for error in errors
        )


def misused(kind: str) -> str:
    mesh = mesh_of()
    module = nn.Linear(3, 1, dtype=FLOAT)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0) if kind == "own rate" else None
    loss = lambda module, x, *_: module(x).sum()  # noqa: E731
    engine = Engine(module, mesh, module_config(1), compute=loss, optimizer=optimizer)
    before = engine.state_dict()
    engine.begin(3 if kind == "too few" else 1)
    engine.accumulate([torch.ones(1, 3, dtype=FLOAT)] * (2 if kind == "too few" else 1))
    try:
        if kind == "unreduced":
            engine.update(0.1)
        engine.reduce()
        if kind == "negative":
            engine.update(-1.0)
        if kind in ("none", "own rate"):
            engine.update(None if kind == "none" else 0.1)
        if kind == "twice":
            engine.update(0.1)
            before = engine.state_dict()
            engine.update(0.1)
    except HexadError as error:
        after = engine.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unreduced", "update: found no reduced gradients; call begin, accumulate and reduce before"),
        ("twice", "update: found no reduced gradients"),
        ("too few", "reduce: found 1 backward passes less than begin was called with"),
        ("negative", "update: found lr -1.0, expected a number that is not negative"),
        ("none", "update: found lr None, expected a number"),
        ("own rate", "update: found lr 0.1, expected None: the optimizer's groups have rates"),
    ],
)
def test_parts_of_a_step_in_a_wrong_order_are_refused(kind: str, message: str, pool: Pool) -> None:
    for error in pool.run(2, misused, kind):
        assert error.startswith(message)
