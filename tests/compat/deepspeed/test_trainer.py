"""``transformers.Trainer(args=TrainingArguments(deepspeed=...))``, unchanged, over Hexad."""

import json
import sys
from importlib.metadata import DistributionFinder
from pathlib import Path
from typing import Any

import pytest

from hexad.compat.facade.installed import Finder

from ... import forks
from .published import PUBLISHED

pytest.importorskip("deepspeed")


def log_of(which: str, stage: int, directory: Path) -> list[list[dict[str, float]]]:
    tree = json.loads(json.dumps(PUBLISHED["transformers, stage 3"]))
    tree["zero_optimization"]["stage"] = stage
    tree["optimizer"]["params"]["torch_adam"] = True
    directory.mkdir()
    config = directory / "ds.json"
    config.write_text(json.dumps(tree))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["-m", "tests.compat.deepspeed.trainer_script", which, str(config), str(directory / "out")]
    result = forks.run([sys.executable, *command, *script], capture_output=True, text=True)
    output = directory / "out" / "log.json"
    assert output.exists(), result.stderr[-3000:]
    log: list[list[dict[str, float]]] = json.loads(output.read_text())
    return log


def close(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return log_of("package", 3, directory / "theirs")[0]


@pytest.mark.slow  # importing transformers three times takes longer than training
@pytest.mark.parametrize("stage", [1, 3])
def test_the_trainer_gives_the_same_numbers(directory: Path, theirs: Any, stage: int) -> None:
    first, resumed = log_of("compat", stage, directory / str(stage))
    close(first, theirs)
    close(resumed[:4], theirs)  # the Trainer's log continues after it has resumed
    assert len(resumed) == 6
    assert resumed[-1]["loss"] < first[0]["loss"]
    assert (directory / str(stage) / "out" / "final" / "model.safetensors").stat().st_size > 10_000


def test_libraries_find_the_package_where_there_is_none() -> None:
    (distribution,) = Finder("deepspeed", "0.19.8").find_distributions(
        DistributionFinder.Context(name="deepspeed")
    )
    assert (distribution.metadata["Name"], distribution.version) == ("deepspeed", "0.19.8")
    assert (
        list(Finder("deepspeed", "0.19.8").find_distributions(DistributionFinder.Context(name="torch"))) == []
    )
