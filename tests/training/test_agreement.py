"""What every rank must have in common is compared before the first step."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from hexad.config import AgreedError, HexadError
from hexad.engine.counting import Counting
from hexad.launching.environment import Environment
from hexad.launching.launch import Run
from hexad.model.configuration import load_config
from hexad.topology.devices import published_peaks
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..pool import Pool
from ..small import config_of, engine_of, microbatches
from ..weights import WholeTensors

NONE: Any = None  # no configuration is needed here


def _compare(values: list[object], what: str) -> str:
    mesh = Mesh.create(Layout(world=len(values)), torch.device("cpu"))
    try:
        Run(mesh, Environment(), NONE).identical(what, values[mesh.rank])
    except AgreedError as error:
        return str(error)
    return ""


def test_a_difference_is_named_alike_on_all_ranks(pool: Pool) -> None:
    assert pool.run(3, _compare, ["a", "a", "a"], "x") == [""] * 3
    trees = [
        load_config({"optimizer": {"lr": lr}}).model_dump(mode="json", by_alias=True)
        for lr in (0.1, 0.1, 0.3)
    ]
    wanted = "optimizer.lr: rank 0 has 0.1, rank 2 has 0.3; all ranks need the same"
    assert pool.run(3, _compare, trees, "settings") == [wanted] * 3
    messages = pool.run(2, _compare, ["runs/step-1", "None"], "the newest checkpoint")
    assert (
        messages
        == ["the newest checkpoint: rank 0 has runs/step-1, rank 1 has None; all ranks need the same"] * 2
    )


def _own_directories(parent: str) -> str:
    from contextlib import ExitStack

    from hexad.config.schema import RunSettings
    from hexad.training.rundir import open_run_directory

    mesh = Mesh.create(Layout(world=2), torch.device("cpu"))
    try:
        with ExitStack() as stack:
            settings = RunSettings(dir=f"{parent}/{mesh.rank}")
            open_run_directory(settings, Run(mesh, Environment(), NONE), stack)
    except AgreedError as error:
        return str(error)
    return ""


def test_a_run_directory_that_is_not_shared_is_refused(pool: Pool, tmp_path: object) -> None:
    messages = pool.run(2, _own_directories, str(tmp_path))
    assert messages[0] == messages[1]
    assert "is not the directory of rank 0; use a file system that all hosts share" in messages[0]


def test_loaded_weights_survive_a_step_in_bf16() -> None:
    """The master weights are what counts."""
    from hexad import Microbatch

    engine = engine_of(
        config_of(model={"layers": 1}, batch={"micro": 1, "global": 1}, optimizer={"lr": 1e-8})
    )
    tensors = {
        piece.name: torch.full(piece.shape, 0.3)
        for bucket in engine.buckets
        for piece, _ in bucket.pieces(bucket.master)
    }
    engine.load_weights(WholeTensors(tensors))
    tokens = torch.arange(8)[None]
    engine.train_step([Microbatch(tokens, tokens)])
    for bucket in engine.buckets:
        for piece, values in bucket.pieces(bucket.master):
            assert torch.allclose(values, torch.tensor(0.3), atol=1e-6), piece.name
        for piece, values in bucket.pieces(bucket.shard(bucket.whole)):
            assert torch.equal(values, torch.full_like(values, 0.3)), piece.name
    with pytest.raises(AgreedError, match="expected"):
        engine.load_weights(WholeTensors({name: tensor[:1] for name, tensor in tensors.items()}))
    with pytest.raises(HexadError, match=r"Microbatch.documents: found \(0, 3\)"):
        engine.train_step([Microbatch(tokens, tokens, (0, 3))])
    with pytest.raises(
        HexadError, match=r"Microbatch.labels: found shape \(1, 7\), expected that of the tokens"
    ):
        engine.train_step([Microbatch(tokens, tokens[:, 1:])])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks_go_by_whole_names(name: str, peak: float | None) -> None:
    peaks = published_peaks(name)
    assert (peaks and peaks[0]) == peak


def _steps(ahead: bool) -> tuple[list[float], int]:
    """Losses of steps and of an evaluation in between, and how often the ranks counted; ``ahead``: the second
    step's microbatches are announced, and for the third twice others than are trained."""
    config = config_of(parallel={"data": 2}, batch={"micro": 1, "global": 4})
    engine = engine_of(config)
    batches = [microbatches(config, engine.mesh.data.rank, 2, seed) for seed in range(4)]
    original, counted = Counting._start, 0

    def count(self: Any, given: Any) -> Any:
        nonlocal counted
        counted += 1
        return original(self, given)

    with mock.patch.object(Counting, "_start", count):
        results = [engine.train_step(batches[0]).loss]
        if ahead:
            engine.announce(batches[1])
        results += [engine.evaluate(batches[3])[0], engine.train_step(batches[1]).loss]
        if ahead:
            engine.announce(batches[3])
            engine.announce(batches[1])  # neither is trained
        results.append(engine.train_step(batches[2]).loss)
        wrong = [replace(part, tokens=part.tokens + 40 * engine.mesh.rank) for part in batches[0]]
        if ahead:
            engine.announce(wrong)
        with pytest.raises(HexadError, match=r"token id .* is outside the model's vocabulary of 40"):
            engine.train_step(wrong)
        results.append(engine.train_step(batches[0]).loss)
    return results, counted


def test_counts_that_are_agreed_on_ahead_are_those_of_the_step(pool: Pool) -> None:
    for (losses, counted), (wanted, usual) in zip(pool.run(2, _steps, True), pool.run(2, _steps, False)):
        assert losses == wanted
        assert (usual, counted) == (6, 8)  # two were announced for nothing
