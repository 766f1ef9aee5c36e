"""Every recipe: accepted, predicted to fit as its head says, listed, and trained when it is made small."""

import math
from pathlib import Path

import pytest
from docs.recipes_page import FILES, planned, prediction

from hexad.config import HexadError
from hexad.config.recipes import cluster_of, recipe_names, recipe_text
from hexad.model.configuration import load_config
from hexad.planning.plan import plan

from ..pool import Pool
from ..training.command import RunFile, call
from .reduced import RANKS, reduced

NAMES = [path.stem for path in FILES]
IN_TURN = ("llama3.1-405b", "deepseek-v3", "qwen3-30b-a3b")
"""Trained by the default tests: pipelines, context and tensor ranks, experts of both kinds, ZeRO 1 and 3."""
QUICK = ("gpt2", "llama3.2-1b", "llama3.1-8b", "llama3.1-8b-128k", "qwen3-8b", "mistral-7b")
"""Those whose search takes seconds."""


def ranks_of(name: str) -> int:
    return int(cluster_of(recipe_text(name)).rpartition(":")[2])


def test_there_are_recipes() -> None:
    assert len(NAMES) >= 12 and sorted(NAMES) == recipe_names()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accepted_without_data_and_gpus(path: Path) -> None:
    result = call("config", "check", str(path), "--world", str(ranks_of(path.stem)), "--elsewhere")
    assert result.status == 0, result.err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_predicted_to_fit_as_its_head_says(path: Path) -> None:
    result, candidate = planned(path)
    assert result.fits(candidate)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert prediction(result, candidate) in lines, "run 'make docs'"
    cluster = f"{result.cluster.name}:{result.cluster.cluster.gpus}"
    assert f"# hexad plan recipes/{path.name} --cluster {cluster} --explain file" in lines


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_among_the_best_layouts(name: str) -> None:
    path = FILES[NAMES.index(name)]
    config = load_config(path)
    _, candidate = planned(path)
    numbers = {"sequence": config.data.sequence, "global_batch": config.batch.global_}
    documents = [f"data.documents={config.data.documents}"]
    best = plan(str(config.model.preset), cluster_of(recipe_text(name)), overrides=documents, **numbers)
    assert candidate.step.total <= 1.03 * best.layouts[0].step.total


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("recipes")
    (directory / "text.txt").write_text("\n".join(f"line {n}: {n * n}" for n in range(400)))
    options = ("--output", str(directory / "data"), "--tokenizer", "byte", "--workers", "1")
    assert call("data", "build", "--input", str(directory / "text.txt"), *options).status == 0
    return str(directory / "data")


@pytest.mark.parametrize(
    "name", [name if name in IN_TURN else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_trains_when_made_small(name: str, prefix: str, pool: Pool, tmp_path: Path) -> None:
    path = FILES[NAMES.index(name)]
    overrides, world = reduced(load_config(path), ranks_of(name))
    assert world <= RANKS
    run = RunFile(path, tmp_path / "run")
    given = [f"run.dir={run.directory}", f"data.train={prefix}", "run.timeout=60"]
    results = run.world(pool, world, *overrides, *given)
    assert all(status == 0 for status, _ in results), results
    assert len(run.losses) == 2 and all(0 < loss < 2 * math.log(320) for loss in run.losses)
    assert run.checkpoints == [2]


def test_written_with_changes(tmp_path: Path) -> None:
    path = tmp_path / "my run.yaml"
    options = ("--data", "data/x", "--tokenizer", "my.model")
    result = call("config", "init", str(path), "--recipe", "llama3.1-8b", *options, "optimizer.lr=1e-4")
    assert result.status == 0 and "--world 64" in result.out, result.err
    text, config, before = path.read_text(), load_config(path), load_config(FILES[NAMES.index("llama3.1-8b")])
    assert f"hexad plan '{path}' --cluster h100:64 --explain file" in text
    assert "# Changed: optimizer.lr=1e-4" in text and "600_000" not in text
    changed = {"train": "data/x", "tokenizer": "my.model"}
    assert config.data == before.data.model_copy(update=changed)
    assert config.optimizer == before.optimizer.model_copy(update={"lr": 1e-4})
    assert (config.run, config.batch, config.parallel) == (before.run, before.batch, before.parallel)


WRONG = {
    "unknown": (["--recipe", "llama3-8b"], "--recipe: found 'llama3-8b', which is no known recipe (did you"),
    "two": (["--recipe", "gpt2", "--preset", "gpt2"], "--recipe: found gpt2 beside --preset gpt2; give one"),
    "ranks": (["--recipe", "llama3.1-8b", "--nproc", "3"], "batch.global: found 512, expected a multiple of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str, tmp_path: Path) -> None:
    arguments, reason = WRONG[name]
    result = call("config", "init", str(tmp_path / "run.yaml"), *arguments)
    assert result.status == 2 and reason in result.error and not list(tmp_path.iterdir())


def test_listed() -> None:
    result = call("config", "recipes")
    assert [line.split()[0] for line in result.out.splitlines()] == recipe_names()
    with pytest.raises(HexadError, match="no known recipe; known: "):
        recipe_text("zzz")
