"""Every wrong input is refused at once, in one line that names what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import CASES, Case
from .places import clear, make, outcome

LONGEST = 5.0
"""Seconds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands name."""
    directory = tmp_path_factory.mktemp("wrong")
    make(directory)
    return directory


def test_there_are_enough() -> None:
    assert len({case.command for case in CASES}) == len(CASES) >= 200


@pytest.mark.parametrize("case", CASES, ids=[case.command for case in CASES])
def test_refused_in_one_line(place: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    clear()
    result, seconds = outcome(case)
    assert result.status == 2, result
    assert case.says in result.error
    assert "object at 0x" not in result.error and len(result.error) < 1000
    if not case.more:
        assert not result.out and len(result.err.splitlines()) == 1, result
        assert not Path("out").exists() and not Path("new/metrics.jsonl").exists(), "something was done"
    assert seconds < LONGEST
