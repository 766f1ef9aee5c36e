"""Users' models in pipeline stages, with tensor and data ranks, against one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hexad import Engine, Layout, Mesh, parallelize, pipeline
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.manifest import read_manifest
from hexad.comm import all_reduce

from ..layers import CPU
from ..pool import Pool
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
    if load is not None:
        steps_of(engine, mesh)  # steps of which nothing is left
        resume(engine, load)
    return steps_of(engine, mesh)


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
        result = steps_of(engine, mesh)
    return result


@pytest.mark.parametrize(
    ("folder", "world", "degrees", "zero", "schedule", "virtual"),
    [
        ("gemma3", 4, {"tensor": 2, "pipeline": 2}, 1, "interleaved", 2),
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
    """Saved by tensor 2 x pipeline 2 (x data 2), with a tied head and another one; read by one process."""
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
