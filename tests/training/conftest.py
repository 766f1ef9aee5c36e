"""A tiny data set, run files, and a reference run in two layouts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..pool import Pool
from .command import FOUR, Process, RunFile, call, write_run

MakeRun = Callable[..., RunFile]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few thousand byte tokens; there is also a ``validation`` beside ``train``."""
    directory = tmp_path_factory.mktemp("data")
    for name, count in (("train", 60), ("validation", 20)):
        text = directory / f"{name}.txt"
        lines = (f"{name} line {n}: {n * n} is the square of {n}, {n * n * n} its cube" for n in range(count))
        text.write_text("\n".join(lines))
        prefix = str(directory / name)
        options = ("--tokenizer", "byte", "--workers", "1")
        assert call("data", "build", "--input", str(text), "--output", prefix, *options).status == 0
    return str(directory / "train")


@pytest.fixture
def make_run(tmp_path: Path, data: str) -> MakeRun:
    """Writes run files, each with a directory of its own."""
    count = 0

    def make(**groups: dict[str, Any]) -> RunFile:
        nonlocal count
        count += 1
        return write_run(tmp_path / f"run{count}", data, **groups)

    return make


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, data: str) -> RunFile:
    """An uninterrupted run of 24 steps on one rank."""
    run = write_run(tmp_path_factory.mktemp("alone"), data, run={"steps": 24})
    assert run.train().status == 0
    return run


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory, data: str, pool: Pool) -> RunFile:
    """An uninterrupted run of 24 steps on data 2 x tensor 2."""
    run = write_run(tmp_path_factory.mktemp("four"), data, run={"steps": 24})
    assert run.world(pool, 4, *FOUR) == [(0, "")] * 4
    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts processes and ends what a failed test leaves."""
    started: list[Process] = []

    def begin(arguments: list[str], interpreter: bool = False, **environment: str) -> Process:
        where = tmp_path / f"process{len(started)}"
        where.mkdir()
        started.append(Process.hexad(arguments, where, interpreter, **environment))
        return started[-1]

    yield begin
    for process in started:
        process.end()
