"""Every wrong input is refused at once, in one line that names what is wrong."""

import re
from pathlib import Path

import pytest

from .cases import CASES, Case
from .places import clear, make, outcome


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands name."""
    directory = tmp_path_factory.mktemp("wrong")
    make(directory)
    return directory


def test_there_are_enough() -> None:
    assert len({case.command for case in CASES}) == len(CASES) >= 200


def test_each_expects_a_reason_and_not_only_its_own_input() -> None:
    for case in CASES:
        words = re.findall(r"[a-z]{3,}", case.says.lower())
        assert any(word not in case.command.lower() and word != "found" for word in words), case


@pytest.mark.parametrize("case", CASES, ids=[case.command for case in CASES])
def test_refused_in_one_line(place: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    clear()
    result = outcome(case)
    assert result.status == 2, result
    assert case.says in result.error
    assert "object at 0x" not in result.error and len(result.error) < 1000
    if not case.more:
        assert not result.out and len(result.err.splitlines()) == 1, result
        assert not Path("out").exists() and not Path("new/metrics.jsonl").exists(), "something was done"
