"""Plans of users, for models of their own and of ``transformers``: the loss and the gradients of one
process, or one line before anything changes."""

import logging.handlers
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hexad import HexadError, Layout, Mesh, parallelize

from ..layers import CPU
from ..pool import Pool
from .foreign_plans import FOREIGN, loss_of
from .user_plans import CASES, QKVO, Attention, Case, built, results

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

SIZES = ((2, 12), (3, 7))
MORE_SIZES = ((1, 1), (1, 4), (2, 2), (4, 3), (5, 8), (7, 5))


def complete(model: nn.Module, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of undivided weights."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = gradients.get(name, torch.zeros_like(parameter))
    state = {name: values.clone() for name, values in model.state_dict().items() if name in weights}
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]
    return state


def measured(case: Case, model: nn.Module, sizes: Any) -> list[tuple[float, Tensor, dict[str, Tensor]]]:
    rows = []
    for size in sizes:
        loss, x, gradients = results(case, model, *size)
        rows.append((loss, x, complete(model, gradients)))
    return rows


def unchanged(model: nn.Module) -> dict[str, Any]:
    """What a refusal leaves as it is."""
    return {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}


def of_a_rank(name: str, sizes: Any) -> Any:
    """The results, or the refusal."""
    case = CASES[name]
    world, model = dist.get_world_size(), built(case)
    mesh = Mesh.create(Layout(world=world, tensor=world), CPU)
    before = unchanged(model)
    try:
        parallelize(model, mesh, case.plan)
        return measured(case, model, sizes)
    except HexadError as error:
        if case.call.__name__ != "of_dicts":
            after = unchanged(model)
            assert after.keys() == before.keys()
            for path, (kind, attributes) in before.items():
                assert after[path][0] is kind and after[path][1].keys() == attributes.keys()
                assert all(after[path][1][key] is value for key, value in attributes.items())
        return str(error)


def on_ranks(names: list[str], sizes: Any) -> dict[str, Any]:
    return {name: of_a_rank(name, sizes) for name in names}


def check(name: str, rank: Any, sizes: Any, refusal: str) -> None:
    case = CASES[name]
    if refusal:
        assert isinstance(rank, str), f"{name}: not refused"
        assert refusal in rank and "\n" not in rank, f"{name}: {rank}"
        return
    assert not isinstance(rank, str), f"{name}: {rank}"
    whole = built(case)
    for one, other in zip(measured(case, whole, sizes), rank, strict=True):
        assert other[0] == pytest.approx(one[0], rel=1e-10), name
        torch.testing.assert_close(other[1], one[1], rtol=1e-9, atol=1e-11)
        assert other[2].keys() == one[2].keys()
        for weight, gradient in one[2].items():
            torch.testing.assert_close(
                other[2][weight], gradient, rtol=1e-9, atol=1e-10, msg=f"{name}: {weight}"
            )


REFUSED_EVERY_TIME = (
    "length computed, heads constant",
    "grouped, every second",
    "one head of keys, partial",
    "temperature",
    "norm of all, partial",
    "slopes",
    "fused, chunked",
    "softmax of features",
    "a result in parts",
    "arguments unknown, heads constant",
)
"""One of each kind; all others are slow."""


def test_plans_of_users(pool: Pool) -> None:
    names = [name for name, case in CASES.items() if not case.refusal or name in REFUSED_EVERY_TIME]
    ranks = pool.run(2, on_ranks, names, SIZES)
    for name in names:
        assert not CASES[name].refusal or ranks[0][name] == ranks[1][name]
        for rank in ranks:
            check(name, rank[name], SIZES, CASES[name].refusal)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_plans_of_users_in_more_sizes(world: int, pool: Pool) -> None:
    """With four ranks a rank has one head, and none of two heads of keys."""
    names = list(CASES)
    ranks = pool.run(world, on_ranks, names, SIZES + MORE_SIZES)
    for name in names:
        refusal = CASES[name].refusal
        if world == 4:
            refusal = "plan: " if refusal or name.startswith("grouped") else ""
        for rank in ranks:
            check(name, rank[name], SIZES + MORE_SIZES, refusal)


class Counted(Attention):
    """Remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.shapes = 0, []
        self.register_buffer("last", torch.zeros(()))
        self.table = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.shapes.append(x.shape)
        self.last.add_(1)
        return super().forward(F.dropout(x, 0.5) * self.table)


class Wrapper(nn.Module):
    """Passes on what it gets."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def without_traces(on_meta: bool) -> tuple[Any, ...]:
    """What a trial changes of a wrapped model, with its number of heads."""
    with torch.device("meta" if on_meta else "cpu"):
        model = Counted()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    world = dist.get_world_size()
    plan = {f"module.{name}": style for name, style in QKVO.items()}
    parallelize(Wrapper(model), Mesh.create(Layout(world=world, tensor=world), CPU), plan)
    values = () if on_meta else (float(model.last), float(model.table))
    return model.count, model.shapes, torch.equal(before, torch.get_rng_state()), values, model.heads


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_trial_leaves_no_traces(on_meta: bool, pool: Pool) -> None:
    expected = (0, [], True, () if on_meta else (0.0, 1.0), 2)
    assert pool.run(2, without_traces, on_meta) == [expected, expected]


def warnings_of_calls() -> list[str]:
    """What is logged by two calls of a model that reads values."""
    case, handler = CASES["values are read"], logging.handlers.BufferingHandler(9)
    model, world = built(case), dist.get_world_size()
    logging.getLogger("hexad").addHandler(handler)
    try:
        parallelize(model, Mesh.create(Layout(world=world, tensor=world), CPU), case.plan)
        for _ in range(2):
            results(case, model, *SIZES[0])
    finally:
        logging.getLogger("hexad").removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def test_a_model_that_cannot_be_tried_is_reported_once(pool: Pool) -> None:
    for messages in pool.run(2, warnings_of_calls):
        (message,) = messages
        assert message.startswith("parallelize: OfDicts was not tried: found DataDependentOutput")


def of_a_foreign_model(name: str, sizes: Any) -> Any:
    """The loss and gradients of each size, or the refusal."""
    case, model = FOREIGN[name], FOREIGN[name].build()
    if dist.is_initialized():
        world = dist.get_world_size()
        try:
            parallelize(model, Mesh.create(Layout(world=world, tensor=world), CPU), case.plan)
        except HexadError as error:
            return str(error)
    rows = []
    for size in sizes:
        model.zero_grad()
        loss = loss_of(model, *size)
        loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        rows.append((float(loss.detach()), complete(model, gradients)))
    return rows


def check_foreign(name: str, pool: Pool, sizes: Any) -> None:
    whole, refusal = of_a_foreign_model(name, sizes), FOREIGN[name].refusal
    for rank in pool.run(2, of_a_foreign_model, name, sizes):
        if refusal:
            assert refusal in rank and "\n" not in rank
            continue
        for one, other in zip(whole, rank, strict=True):
            assert other[0] == pytest.approx(one[0], rel=1e-9)
            assert other[1].keys() == one[1].keys()
            for weight, gradient in one[1].items():
                torch.testing.assert_close(other[1][weight], gradient, rtol=1e-6, atol=1e-8, msg=weight)


EVERY_TIME = ("opt", "bloom")


@pytest.mark.parametrize(
    "name", [n if n in EVERY_TIME else pytest.param(n, marks=pytest.mark.slow) for n in FOREIGN]
)
def test_plans_for_models_of_transformers(name: str, pool: Pool) -> None:
    check_foreign(name, pool, ((2, 8), (3, 7)))
