"""Users' models divided over tensor ranks: in plain loops and engines, against the undivided model."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hexad import Engine, HexadError, Layout, Mesh, clip_grad_norm_, parallelize
from hexad.checkpoint.checkpointer import Checkpointer

from ..layers import CPU
from ..pool import Pool
from ..training.test_modules import module_config

VOCAB, HIDDEN, HEADS, WIDTH = 37, 12, 6, 36
DTYPE = torch.float64


class ScaledEmbedding(nn.Embedding):
    """A subclass that computes with its base class."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


class Attention(nn.Module):
    """Heads with a norm of each, and a sink for each."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.qkv = nn.Linear(HIDDEN, 2 * HIDDEN)  # queries, then keys that are values too
        self.norm = nn.LayerNorm(self.head_dim)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.same = nn.Identity()
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k = (
            part.view(batch, tokens, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv(x).chunk(2, dim=-1)
        )
        scores = self.norm(q) @ self.same(k).transpose(2, 3)
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        probabilities = torch.softmax(torch.cat([scores, sinks], dim=3), dim=3)[..., :-1]
        return self.out((probabilities @ k).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.before = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        inner = F.gelu(self.up(x))
        return x + self.down(self.mixed(inner) + inner.mean(dim=-1, keepdim=True))


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = ScaledEmbedding(VOCAB, HIDDEN, padding_idx=1)
        self.positions = nn.Embedding(9, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.to(DTYPE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(layer(x))  # each is called twice: gradients of both calls count
        return self.head(self.norm(x))


PLAN = {
    "embed": "vocab",
    "positions": "embedding_colwise",
    "layers.*.attention.qkv": "packed_colwise",
    "layers.*.attention.norm": "partial",
    "layers.*.attention.same": "partial",  # nothing to sum
    "layers.*.attention.sinks": "colwise",
    "layers.*.attention.out": "row",
    "layers.*.up": "column_gather",
    "layers.*.mixed": "rowwise_split_input",
    "layers.*.down": "rowwise_split_input",
    "head": "column_gather",
}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batches(steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (4, 8), generator=generator) for _ in range(steps)]


def plain_loop(
    model: nn.Module, parts: Callable[[Tensor], list[Tensor]] = lambda batch: [batch]
) -> list[float]:
    """Losses and gradient norms of a loop of one's own, each step of one backward pass or several."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in batches():
        for part in parts(batch):
            loss = loss_of(model, part) / len(parts(batch))
            loss.backward()
            losses.append(float(loss.detach()))
        losses.append(float(clip_grad_norm_(model, 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def mesh_of(tensor: int = 1, **degrees: int) -> Mesh:
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Mesh.create(Layout(world=world, tensor=tensor, **degrees), CPU)


def in_a_plain_loop(tied: bool, plan: dict[str, str]) -> tuple[list[float], dict[str, Tensor]]:
    model = Model(tied)
    if dist.get_rank():  # the first rank's values are used
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    parallelize(model, mesh_of(dist.get_world_size()), plan)
    with pytest.raises(HexadError, match="divided already"):
        parallelize(model, mesh_of(dist.get_world_size()), plan)
    model.requires_grad_(False)
    model = copy.deepcopy(model).requires_grad_()  # gradients of copies are complete too
    losses = plain_loop(model, lambda batch: list(batch.split(2)))
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("tied", "world"),
    [
        (True, 3),
        (False, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 2), (False, 3))),
    ],
)
def test_a_plain_loop_computes_what_one_process_does(tied: bool, world: int, pool: Pool) -> None:
    whole = Model(tied)
    losses = plain_loop(whole, lambda batch: list(batch.split(2)))
    for given, state in pool.run(world, in_a_plain_loop, tied, PLAN):
        assert given == pytest.approx(losses, rel=1e-12)
        assert state.keys() == whole.state_dict().keys()
        for name, values in whole.state_dict().items():
            torch.testing.assert_close(state[name], values, rtol=1e-9, atol=1e-11)


def by_engine(
    tensor: int, zero: int, directory: Path | None, load: Path | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of some steps, and the weights that they have trained; the state is saved."""
    mesh = mesh_of(tensor)
    model = Model()
    parallelize(model, mesh, PLAN)
    model.layers[1].down.weight.requires_grad_(False)
    data = mesh.data

    def compute(model: nn.Module, part: Tensor, *_: Any) -> Tensor:
        return loss_of(model, part) / (2 * data.size)

    run = {"run": {"dir": str(directory)}} if directory else {}
    config = module_config(zero, optimizer={"lr": 1e-2, "clip": 0.5}, **run)
    engine = Engine(model, mesh, config, compute=compute)
    checkpointer = Checkpointer(config, mesh)
    if load is not None:
        engine.restored(checkpointer.load(load, engine.chunks()).progress)
    losses, norms = [], []
    for batch in batches():
        engine.begin(2)
        total = engine.accumulate(batch.chunk(data.size)[data.rank].chunk(2))
        engine.reduce()
        norms.append(engine.update(1e-2))
        losses.append(float(total))
    state = engine.state_dict(exclude_frozen=True)
    if directory is not None:
        checkpointer.save(engine.chunks(), engine.progress())
        checkpointer.wait()
    checkpointer.close()
    return losses, norms, state


MORE = ((2, 2, 0), (4, 2, 1), (4, 2, 2), (3, 3, 3), (6, 3, 1))


@pytest.mark.parametrize(
    ("world", "tensor", "zero"),
    [(4, 2, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_an_engine_computes_what_one_process_does(
    world: int, tensor: int, zero: int, pool: Pool, tmp_path: Path
) -> None:
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    losses, norms, weights = by_engine(1, 0, tmp_path / "one")
    results = pool.run(world, by_engine, tensor, zero, tmp_path / "many")
    for _, given, state in results:
        assert given == pytest.approx(norms, rel=1e-11)
        assert state.keys() == weights.keys() and "layers.1.down.weight" not in state
        for name, values in weights.items():
            torch.testing.assert_close(state[name], values, rtol=1e-9, atol=1e-11)
    means = [sum(step) / tensor for step in zip(*(given for given, *_ in results))]
    assert means == pytest.approx(losses, rel=1e-11)
    # What many saved one loads, and what one saved many load; the steps that follow agree.
    (one,), (many,) = ((tmp_path / name / "checkpoints").glob("step-*") for name in ("one", "many"))
    following = by_engine(1, 3, None, many)
    assert following[1] == pytest.approx(pool.run(world, by_engine, tensor, zero, None, one)[0][1], rel=1e-9)
    assert following[1] == pytest.approx(by_engine(1, 0, None, one)[1], rel=1e-9)


# Parts


class InSequence(nn.Module):
    """Norms and sums on a rank's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=1)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.to(DTYPE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, up, down in zip(self.norms, self.up, self.down):
            x = x + down(torch.tanh(up(norm(x))))
        return self.head(self.norms[2](x))


IN_SEQUENCE = {
    "embed": "vocab",
    "norms.*": "sequence",
    "up.*": "column",
    "down.*": "row",
    "head": "column_gather",
}


def in_sequence(by_engine: bool) -> tuple[list[float], dict[str, Tensor], int]:
    mesh = mesh_of(dist.get_world_size())
    model = parallelize(InSequence(), mesh, IN_SEQUENCE)
    widths = []
    model.norms[1].register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[1]))
    if by_engine:
        return engine_steps(model, mesh), {}, widths[0]
    return plain_loop(model, even), model.state_dict(), widths[0]


def even(batch: Tensor) -> list[Tensor]:
    return [batch[:, :7]]  # six tokens and their successors


def engine_steps(model: nn.Module, mesh: Mesh) -> list[float]:
    engine = Engine(model, mesh, module_config(0), compute=lambda m, part, *_: loss_of(m, part))
    losses = []
    for batch in batches():
        engine.begin(1)
        losses.append(float(engine.accumulate(even(batch))))
        engine.reduce()
        engine.update(1e-2)
    return losses


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_sequence_parallel(world: int, pool: Pool) -> None:
    whole = InSequence()
    losses = plain_loop(whole, even)
    for given, state, width in pool.run(world, in_sequence, False):
        assert width == 6 // world
        assert given == pytest.approx(losses, rel=1e-12)
        for name, values in whole.state_dict().items():
            torch.testing.assert_close(state[name], values, rtol=1e-9, atol=1e-11)
    losses = engine_steps(InSequence(), mesh_of())
    assert pool.run(world, in_sequence, True)[1][0] == pytest.approx(losses, rel=1e-12)


def halves(autocast: bool) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
    """Output, gradients and weights of packed layers; a copy's output after its own weights were loaded."""
    torch.manual_seed(6)
    dtype = torch.float32 if autocast else DTYPE  # autocast leaves float64 as it is
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).to(dtype)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    world = dist.get_world_size() if dist.is_initialized() else 1
    parallelize(model, mesh_of(world), {"0": "packed_colwise", "1": "packed_rowwise"})
    x = torch.linspace(-1, 1, 18, dtype=dtype).view(3, 6).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.square().sum().backward()
    again = copy.deepcopy(model)
    again.load_state_dict({name: value + 1 for name, value in state.items()})
    with pytest.raises(RuntimeError, match=r"0.bias: found shape \(4,\), the model has \(8,\)|size mismatch"):
        again.load_state_dict({**state, "0.bias": torch.zeros(4)})
    saved = model.state_dict()
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)
    return y.detach(), x.grad, saved, again(x.detach()).detach()


@pytest.mark.parametrize("autocast", [False, True])
def test_packed_layers_are_saved_and_loaded_whole(autocast: bool, pool: Pool) -> None:
    y, gradient, _, other = halves(autocast)
    tolerance = 2e-2 if autocast else 1e-12
    for values, x_gradient, _, again in pool.run(2, halves, autocast):
        assert values.dtype == (torch.bfloat16 if autocast else DTYPE)
        torch.testing.assert_close(values, y, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(x_gradient, gradient, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(again, other, rtol=1e-5 if autocast else 1e-12, atol=1e-12)


class Narrow(nn.Module):
    """Computes with its own part of a weight, and does not sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def summed() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), Narrow()).double()
    world = dist.get_world_size() if dist.is_initialized() else 1
    parallelize(model, mesh_of(world), {"0": "column", "2.weight": "rowwise", "2": "all_reduce"})
    x = torch.ones(2, 4, dtype=DTYPE, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def test_outputs_that_are_parts_of_a_sum(pool: Pool) -> None:
    wanted = summed()
    for given in pool.run(3, summed):
        torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12)


# What does not fit


class Odd(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) * 2


class Between(Odd):
    """Calls a class that does not call ``torch.nn.Linear``'s."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.weight.norm()


class Misfits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.between, self.scaled, self.named = Between(6, 6), Scaled(6, 6), nn.Linear(6, 6)
        self.named.gathers = True
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.norm, self.good = nn.LayerNorm(6), nn.Embedding(8, 6)
        self.linear, self.other, self.table = nn.Linear(6, 5), Odd(6, 6), nn.Embedding(7, 6, max_norm=1.0)
        self.shared, self.alias = nn.Linear(6, 6), nn.Linear(6, 6)
        self.alias.weight = self.shared.weight
        self.attention = nn.MultiheadAttention(6, 2)
        self.heads = nn.Module()
        self.heads.head_dim, self.heads.q_proj = 2, nn.Linear(6, 6)


REFUSED = {
    "linear.": (
        {"linaer": "column"},
        r"plan: found 'linaer', which matches no module .*did you mean 'linear'",
    ),
    "style": (
        {"linear": "columns"},
        r"plan\['linear'\]: found 'columns' .did you mean 'column'..; expected one of",
    ),
    "experts": (
        {"linear": "moe_tp_experts"},
        r"found moe_tp_experts, a style of experts .* not supported yet",
    ),
    "size": (
        {"linear": "column"},
        r"plan: linear is colwise: found 5 outputs, which do not divide by 2 tensor",
    ),
    "kind": ({"table": "column"}, r"plan: table is colwise: found Embedding; expected torch.nn.Linear"),
    "forward": ({"other": "column"}, r"plan: other is colwise: found Odd; expected torch.nn.Linear"),
    "option": ({"table": "vocab"}, r"plan: table is embedding_rowwise: found max_norm"),
    "shared": (
        {"shared": "column"},
        r"plan: shared is colwise: found a weight that shared shares|that alias shares",
    ),
    "attention": (
        {"attention.out_proj": "row"},
        r"plan: attention.out_proj is rowwise: found (part of a|NonDyn)",
    ),
    "heads": (
        {"heads.q_proj": "column"},
        r"found 3 heads of 2 features, which do not divide by 2 tensor ranks",
    ),
    "none": ({}, r"plan: found none for Misfits"),
    "text": ("auto", r"plan: found 'auto', expected a mapping"),
    "between": ({"between": "column"}, r"found Between; expected torch.nn.Linear"),
    "scaled": ({"scaled": "row"}, r"found Scaled; expected torch.nn.Linear"),
    "attribute": ({"named": "column"}, r"found an attribute 'gathers'"),
    "computed": ({"good": "vocab", "computed": "column"}, r"found a weight that is computed"),
    "parameter": ({"named.weight": "colwise"}, r"found a layer's parameter; name the layer"),
    "container": ({"heads": "partial"}, r"found Module without parameters; name what is inside it"),
    "no embedding": ({"norm": "sequence"}, r"found sequence_parallel without an embedding; give .* 'vocab'"),
    "nothing": ({"norm": "sequence", "good": "vocab"}, r"sequence_parallel and nothing for between.weight"),
    "split": (
        {"norm": "sequence", "scaled": "row_split"},
        r"rowwise_split_input: found with sequence_parallel",
    ),
}


def refusal(case: str) -> str:
    model = Misfits()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(HexadError) as caught:
        parallelize(model, mesh_of(dist.get_world_size()), REFUSED[case][0])
    assert {name: type(module) for name, module in model.named_modules()} == before
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_plans_that_do_not_fit_are_refused_before_anything_changes(case: str, pool: Pool) -> None:
    for said in pool.run(2, refusal, case):
        assert re.search(REFUSED[case][1], said), said
        assert "\n" not in said


def test_an_undivided_model_is_clipped_as_by_torch() -> None:
    one, other = Model(), Model()
    for model in (one, other):
        loss_of(model, batches()[0]).backward()
    assert clip_grad_norm_(one, 0.1) == pytest.approx(
        float(nn.utils.clip_grad_norm_(other.parameters(), 0.1)), rel=1e-12
    )
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(one.get_parameter(name).grad, parameter.grad, rtol=1e-12, atol=0)


def with_context() -> str:
    with pytest.raises(HexadError) as caught:
        parallelize(Model(), mesh_of(context=2), PLAN)
    return str(caught.value)


def test_context_ranks_are_refused(pool: Pool) -> None:
    assert pool.run(2, with_context)[0].startswith("mesh: found 2 context ranks")


def beyond() -> list[str]:
    model = parallelize(Model(), mesh_of(2), PLAN)
    said = []
    for index in (-1, VOCAB):
        with pytest.raises(IndexError) as caught:
            model(torch.full((1, 2), index))
        said.append(str(caught.value))
    return said


def test_indices_outside_a_table_are_an_error(pool: Pool) -> None:
    wanted = [f"found the index {index} in a table of {VOCAB}" for index in (-1, VOCAB)]
    assert pool.run(2, beyond) == [wanted, wanted]
