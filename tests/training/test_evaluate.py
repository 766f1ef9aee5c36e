"""``hexad evaluate`` and several validation sets: the trainer's numbers in every layout, transformers' for a
published model, every sample once."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hexad.checkpoint.directory import find_checkpoint
from hexad.dataset.indexed import IndexedDataset
from hexad.dataset.load.loader import DataLoader

from ..checkpoint import hugging_face as theirs
from ..pool import Pool
from .command import RunFile, call, free_port, rank_variables, write_run
from .test_lora import lora_run


def _rank(rank: int, world: int, request: dict[str, Any], port: int) -> str:
    """One rank's output, as torchrun would start it."""
    import contextlib
    import io

    from hexad.cli.evaluate import evaluate_here

    out = io.StringIO()
    with rank_variables(rank, world, port), contextlib.redirect_stdout(out):
        evaluate_here(request)
    return out.getvalue()


def evaluated(
    pool: Pool | None, source: Path | str, ranks: int, *overrides: str, **options: Any
) -> dict[str, Any]:
    """The command's results by data set."""
    request = {"source": str(source), "overrides": overrides, "data": {}, "batches": None}
    request |= {"as_json": True, **options}
    if pool is None:
        out = [_rank(0, 1, request, free_port())]
    else:
        out = pool.apart(ranks, _rank, request, free_port())
    assert out[1:] == [""] * (ranks - 1)
    return json.loads(out[0])["results"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data: str) -> RunFile:
    """A run that has evaluated on two sets."""
    sets = {"one": data, "two": data.replace("train", "validation")}
    groups = {"data": {"validation": sets}, "validate": {"every": 2, "batches": 3}, "run": {"steps": 2}}
    run = write_run(tmp_path_factory.mktemp("evaluate"), data, model={"layers": 2}, **groups)
    assert run.train().status == 0
    return run


LAYOUTS = {
    "one rank": (1, ()),
    "tensor 2 x pipeline 2": (4, ("parallel.tensor=2", "parallel.pipeline=2", "parallel.data=1")),
    "data 2, zero 3": (2, ("parallel.zero=3",)),
    "data 4": (4, ("batch.micro=1",)),
    "context 2": (2, ("parallel.context=2",)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_the_trainers_validation(layout: str, trained: RunFile, pool: Pool) -> None:
    ranks, overrides = LAYOUTS[layout]
    scores = evaluated(pool if ranks > 1 else None, trained.newest, ranks, *overrides, batches=3)
    line = trained.metrics[-1]
    assert {name: score["loss"] for name, score in scores.items()} == pytest.approx(
        line["validation_losses"], rel=1e-12
    )
    tokens = sum(score["tokens"] for score in scores.values())
    loss_sum = sum(score["loss"] * score["tokens"] for score in scores.values())
    assert line["validation_loss"] == pytest.approx(loss_sum / tokens, rel=1e-12)


@pytest.mark.parametrize("overrides", [(), ("data.documents=isolate", "batch.micro=3", "batch.global=9")])
def test_all_samples_are_evaluated_once(overrides: tuple[str, ...], trained: RunFile, data: str) -> None:
    """Also where the last batch is not full; bytes are those of the targets."""
    score = evaluated(None, trained.newest, 1, *overrides, data={"train": data})["train"]
    isolate = bool(overrides)
    documents: Any = "isolate" if isolate else "join"
    with DataLoader(data, sequence=16, documents=documents, micro=1, global_batch=1, seed=1234) as loader:
        samples = loader.samples
        labels = [loader.step(index)[0].labels for index in range(samples)]
    assert samples % 9 and samples == (len(IndexedDataset(data).tokens) - 1) // 16
    assert score["tokens"] == sum(int((label >= 0).sum()) for label in labels)
    assert score["bytes"] == sum(int(((label >= 0) & (label < 256)).sum()) for label in labels)
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    bits = score["loss"] * score["tokens"] / math.log(2) / score["bytes"]
    assert score["bits_per_byte"] == pytest.approx(bits)


def test_a_published_model_has_the_loss_of_transformers(tmp_path: Path, data: str) -> None:
    source = theirs.save("qwen2", tmp_path / "hf", torch.float64)
    options = ("data.tokenizer=byte", "data.sequence=24", "precision.dtype=fp64")
    score = evaluated(None, f"hf:{source}", 1, *options, data={"mine": data})["mine"]
    model, total, count = theirs.load(source), 0.0, 0
    with DataLoader(data, sequence=24, micro=1, global_batch=1, seed=1234) as loader:
        batches = [loader.step(index)[0] for index in range(loader.samples)]
    with theirs.exact_functions(), torch.no_grad():
        for batch in batches:
            logits = model(batch.tokens).logits.flatten(0, 1)
            total += torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum").item()
            count += batch.labels.numel()
    assert score["tokens"] == count
    assert score["loss"] == pytest.approx(total / count, rel=1e-10)


def test_adapters_are_evaluated_with_their_base(tmp_path: Path, data: str, pool: Pool) -> None:
    source = theirs.save("llama", tmp_path / "hf", torch.float64)
    run = lora_run(tmp_path / "run", data, source)
    overrides = (f"data.validation={data}", "validate.every=4", "validate.batches=2", "optimizer.lr=0.1")
    assert run.train(*overrides).status == 0
    wanted = run.metrics[-1]["validation_loss"]
    for ranks, layout in ((1, ()), (2, ("parallel.tensor=2",)), (2, ("parallel.zero=3",))):
        scores = evaluated(pool if ranks > 1 else None, run.newest, ranks, *layout, batches=2)
        assert scores["validation"]["loss"] == pytest.approx(wanted, rel=1e-12)


def test_evaluation_needs_no_gradients_or_optimizer_state(trained: RunFile) -> None:
    from hexad.checkpoint.manifest import read_manifest
    from hexad.engine.engine import Engine
    from hexad.model.configuration import build_config
    from hexad.topology.layout import Layout
    from hexad.topology.mesh import Mesh

    config = build_config(read_manifest(trained.newest).config)
    engine = Engine(config, Mesh.create(Layout(world=1), torch.device("cpu")), training=False)
    assert engine.trained == [] and all(bucket.gradients is None for bucket in engine.buckets)
    assert {chunk.name.partition(".")[0] for chunk in engine.chunks()} == {"model"}
    assert all(bucket.master.data_ptr() == bucket.whole.data_ptr() for bucket in engine.buckets)


def test_mistakes_are_named(trained: RunFile, data: str, tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        return call("evaluate", *arguments).error

    run = str(trained.directory)
    assert error(run, "--data", str(tmp_path / "none")).startswith(
        f"--data: {tmp_path / 'none'}.idx: no such"
    )
    assert "neither a checkpoint nor a run" in error(str(tmp_path))
    assert "parallel.tensor: found 3" in error(run, "parallel.tensor=3", "--nproc", "3")
    assert "is given twice" in error(run, "--data", data, data)
    assert error(run, "model.hidden=8").startswith("model.hidden: found 8, but checkpoint")
    assert "unknown key" in error(run, "--data", data, "batch.macro=2")
    plain = write_run(tmp_path, data, run={"steps": 1})
    assert plain.train().status == 0
    assert error(str(plain.directory)).startswith("--data: found none, and the run has no data.validation")
    assert error(str(find_checkpoint(plain.directory)), "--data", data, "data.tokenizer=/none").startswith(
        "data.tok"
    )


def test_names_of_data_may_have_dots(trained: RunFile, data: str) -> None:
    """What begins with a group of settings is one of them."""
    options = ("--data", f"web.v2={data}", f"a.b.c={data}", "batch.micro=1", "--batches", "1", "--json")
    result = call("evaluate", str(trained.directory), *options)
    assert set(json.loads(result.out)["results"]) == {"web.v2", "a.b.c"}, result.err
    wrong = call("evaluate", str(trained.directory), "--data", data, f"data.v2={data}")
    assert wrong.error.startswith("data.v2: unknown key")
    missing = call("evaluate", str(trained.directory), "--data", data, "batchs.micro=2").error
    message = "--data: found 'batchs.micro=2', but 2.idx: no such file"
    assert missing == f"{message} (did you mean the setting 'batch.micro'?)"


def test_a_name_that_is_given_stays(trained: RunFile, data: str) -> None:
    last = Path(data).name
    options = ("--data", data, f"{last}={data}", "--batches", "1", "--json")
    result = call("evaluate", str(trained.directory), *options)
    assert set(json.loads(result.out)["results"]) == {data, last}, result.err
    twice = call("evaluate", str(trained.directory), "--data", f"a={data}", "a=/none").error
    assert twice == "--data: a is given twice; give each data set once, by a name of its own"


def test_several_sets_are_checked_by_name(trained: RunFile, tmp_path: Path) -> None:
    error = trained.train("data.validation={one: /none}", "run.steps=4").error
    assert error.startswith("data.validation.one: /none.idx: no such file")
    assert "data.validation: found 5, expected a prefix" in trained.train("data.validation=5").error
    assert "turns evaluation on" in trained.train("data.validation={}").error


def test_byte_counts_ignore_ids_beyond_the_tokenizer() -> None:
    from hexad.engine.evaluation import Score, total

    scores = {"a": Score(2.0, 4, 8), "b": Score(6.0, 4, None)}
    assert (total(scores).loss, total(scores).bits_per_byte) == (1.0, None)
    assert Score(1e6, 1).perplexity == math.inf
    assert Score(np.log(2.0), 1, 1).bits_per_byte == pytest.approx(1.0)


def test_progress_is_said_into_pipes(
    trained: RunFile, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hexad.cli.evaluate._Lines.SECONDS", 0.0)
    size = trained.metrics[0]["samples"]
    evaluated(None, trained.newest, 1, batches=3)
    lines = [line for line in capfd.readouterr().err.splitlines() if "samples" in line]
    expected = [
        f"{name}: {size * n} of {size * 3} samples, 0:00:00 left" for name in ("one", "two") for n in (2, 3)
    ]
    assert lines == expected


def test_the_seed_of_a_run_does_not_change_what_it_is_evaluated_on(trained: RunFile) -> None:
    options = ("evaluate", str(trained.directory), "--batches", "1", "--json")
    losses = [json.loads(call(*options, f"run.seed={seed}").out)["results"] for seed in (1, 2, 77)]
    assert losses[0] == losses[1] == losses[2]
