"""Users' models in pipeline stages, with tensor and data ranks, against one process."""

import math
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hexad import Engine, HexadError, Layout, Mesh, parallelize, pipeline
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.manifest import read_manifest
from hexad.comm import all_reduce

from ..layers import CPU
from ..pool import Pool, RankError
from ..training.test_modules import module_config
from .small_models import Kind, Wide
from .test_transformers import USUAL

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

MICROBATCHES, LAYERS, STEPS = 4, 5, 2
Batch = dict[str, Tensor]


def microbatches(step: int) -> list[Batch]:
    """Of a whole step, for two data ranks; one has padding."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for _ in range(2 * MICROBATCHES):
        ids = torch.randint(3, 60, (2, 6), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, :2] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return batches


def loss_of(output: Any, batch: Batch) -> Tensor:
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def steps_of(engine: Engine, mesh: Mesh) -> tuple[list[float], list[float]]:
    """Mean losses and gradient norms."""
    losses, norms = [], []
    for step in range(STEPS):
        mine = microbatches(step)[mesh.data.rank :: mesh.data.size]
        engine.begin(len(mine))
        with Wide():
            total = engine.accumulate(mine, scale=1 / (2 * MICROBATCHES))
        engine.reduce()
        norms.append(engine.update(0.01))
        total = torch.zeros((), dtype=torch.float64) if total is None else total
        losses.append(float(all_reduce(all_reduce(total, mesh.data), mesh.pipeline)) / (2 * MICROBATCHES))
    return losses, norms


def one_process(kind: Kind, load: Path | None = None) -> tuple[list[float], list[float]]:
    model, mesh = kind.build(num_hidden_layers=LAYERS), Mesh.create(Layout(world=1), CPU)

    def compute(module: nn.Module, batch: Batch, *_: Any) -> Tensor:
        return loss_of(module(batch["input_ids"], attention_mask=batch["attention_mask"]), batch)

    engine = Engine(model, mesh, module_config(0), compute=compute, initialise=False)
    first = steps_of(engine, mesh)
    if load is None:
        return first
    resume(engine, load)
    return added(first, steps_of(engine, mesh))


def added(*results: tuple[list[float], list[float]]) -> tuple[list[float], list[float]]:
    """The losses and norms of several runs of steps."""
    losses, norms = zip(*results)
    return [*chain(*losses)], [*chain(*norms)]


def resume(engine: Engine, checkpoint: Path) -> None:
    checkpointer = Checkpointer(engine.config, engine.mesh)
    engine.restored(checkpointer.load(checkpoint, engine.chunks()).progress)
    checkpointer.close()


def many(
    kind: Kind, degrees: dict[str, int], zero: int, schedule: str, virtual: int, directory: str = ""
) -> tuple[list[float], list[float]]:
    mesh = Mesh.create(Layout(world=dist.get_world_size(), **degrees), CPU)
    model = kind.build(num_hidden_layers=LAYERS)
    if mesh.tensor.size > 1:
        parallelize(model, mesh)
    pipelined = pipeline(model, mesh, loss=loss_of, schedule=schedule, virtual_stages=virtual)
    run = {"run": {"dir": directory}} if directory else {}
    config = module_config(zero, **run)
    engine = pipelined.engine(config)
    result = steps_of(engine, mesh)
    if directory:
        checkpointer = Checkpointer(config, mesh)
        checkpointer.save(engine.chunks(), engine.progress())
        checkpointer.wait()
        checkpointer.close()
        result = added(result, steps_of(engine, mesh))
    return result


@pytest.mark.parametrize(
    ("folder", "world", "degrees", "zero", "schedule", "virtual"),
    [
        ("qwen3", 4, {"pipeline": 2}, 3, "zb_h1", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", 8, {"tensor": 2, "pipeline": 2}, 1, "1f1b", 1),
                ("gemma3", 8, {"tensor": 2, "pipeline": 2}, 1, "interleaved", 2),
                ("cohere", 8, {"tensor": 2, "pipeline": 2}, 1, "zb_v", 1),
                ("qwen3", 8, {"tensor": 2, "pipeline": 2}, 1, "zb_h1", 1),
                ("gpt_neox", 8, {"tensor": 2, "pipeline": 2}, 1, "gpipe", 1),
                ("olmo2", 8, {"tensor": 2, "pipeline": 2}, 1, "1f1b", 1),
                ("phi3", 4, {"tensor": 2, "pipeline": 2}, 3, "1f1b", 1),
                ("granite", 3, {"pipeline": 3}, 1, "1f1b", 1),
            )
        ),
    ],
)
def test_models_of_transformers(
    folder: str, world: int, degrees: dict[str, int], zero: int, schedule: str, virtual: int, pool: Pool
) -> None:
    kind = Kind(folder, USUAL[folder])
    losses, norms = one_process(kind)
    for given in pool.run(world, many, kind, degrees, zero, schedule, virtual):
        assert given[0] == pytest.approx(losses, rel=1e-11)
        assert given[1] == pytest.approx(norms, rel=1e-9)


@pytest.mark.parametrize(
    ("folder", "schedule"),
    [("gemma3", "interleaved"), pytest.param("llama", "1f1b", marks=pytest.mark.slow)],
)
def test_a_checkpoint_is_that_of_the_undivided_model(
    folder: str, schedule: str, pool: Pool, tmp_path: Path
) -> None:
    """Saved by tensor 2 x pipeline 2 (x data 2), with a tied head and another one; read by one process, with
    the numbers of which the steps before and after agree."""
    kind = Kind(folder, USUAL[folder])
    degrees, virtual = {"tensor": 2, "pipeline": 2}, 2 if schedule == "interleaved" else 1
    results = pool.run(
        4 if schedule == "interleaved" else 8, many, kind, degrees, 1, schedule, virtual, str(tmp_path)
    )
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    names = {
        name.removeprefix("model.")
        for name in read_manifest(saved).index.tensors
        if name.startswith("model.")
    }
    model = kind.build(num_hidden_layers=LAYERS)
    assert names == {name for name, _ in model.named_parameters()} | {
        name for name, _ in model.named_buffers() if name in model.state_dict()
    }
    losses, norms = one_process(kind, saved)
    assert results[0][0] == pytest.approx(losses, rel=1e-11)
    assert results[0][1] == pytest.approx(norms, rel=1e-9)


class Plain(nn.Module):
    """Of a user's own: how its layers are called, or what they return, can be unfit for stages."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.embed = kind, nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))
        if kind == "shared":
            self.blocks[3].linear.weight = self.blocks[0].linear.weight
        self.head = nn.Linear(8, 20)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for block in self.blocks:
            if self.kind.startswith("checkpoint"):
                x = checkpoint(block, x, use_reentrant=self.kind == "checkpoint, reentrant")
            else:
                x = block(x, first) if self.kind == "first" else block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)

    def forward(self, x: Tensor, *first: Tensor) -> Any:
        y = x + torch.tanh(self.linear(x)) + sum(first)
        return (y, None) if self.kind == "tuple" else y


def staged(kind: str, world: int = 2, **how: Any) -> tuple[list[float], str]:
    """Losses of a user's model in stages, or what is said about it."""
    mesh = Mesh.create(Layout(world=world, pipeline=world), CPU)
    losses = []
    try:
        places = {"layers": "blocks", "before": "embed", "after": ["head"], **how}
        pipelined = pipeline(
            Plain(kind), mesh, boundary=lambda batch: (*batch.shape, 8), loss=square_sum, **places
        )
        engine = pipelined.engine(module_config(0))
        for step in range(STEPS):
            tokens = torch.randint(20, (4, 3), generator=torch.Generator().manual_seed(step))
            engine.begin(2)
            total = engine.accumulate(list(tokens.split(2)))
            engine.reduce()
            engine.update(0.01)
            losses.append(float("nan") if total is None else float(total))
    except HexadError as error:
        if world > 1:
            raise
        return [], str(error)
    return losses, ""


def square_sum(output: Tensor, _: Tensor) -> Tensor:
    return output.square().sum()


def test_a_users_model(pool: Pool) -> None:
    (losses, said), wanted = pool.run(2, staged, "plain")[1], staged("plain", 1)[0]
    assert not said and losses == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shared", "layers: found blocks.3.linear.weight, which a layer of another stage shares"),
        ("tuple", "layers: found tuple as the result of Block, expected one tensor"),
        ("checkpoint", "pipeline: found torch.utils.checkpoint around the layers"),
        ("checkpoint, reentrant", "pipeline: found torch.utils.checkpoint around the layers"),
    ],
)
def test_models_that_do_not_fit_stages(kind: str, message: str, pool: Pool) -> None:
    with pytest.raises(RankError) as caught:  # a rank fails, and its neighbour finds it gone
        pool.run(2, staged, kind)
    assert message in str(caught.value)


def test_what_is_used_beyond_the_first_layer_is_seen(pool: Pool) -> None:
    assert math.isnan(pool.run(2, staged, "first")[1][0][0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layers": "block"}, "layers: found 'block', expected the path of a list in Plain"),
        (
            {"after": []},
            "pipeline: found the parameter head.weight, which is neither in the layers nor before",
        ),
        ({"schedule": "auto"}, "schedule: found auto"),
    ],
)
def test_wrong_places_are_refused(how: dict[str, Any], message: str) -> None:
    assert staged("plain", 1, **how)[1].startswith(message)
