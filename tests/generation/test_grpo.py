"""``examples/grpo.py``: the importance ratio before the first update of every batch is exactly 1, in two
layouts, and not so in the usual arithmetic."""

import re
import sys
from pathlib import Path

import pytest

from .. import forks

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo.py"
LINE = re.compile(r"step +\d+  right +([\d.]+)%  largest \|ratio - 1\| in each update: (\S+), (\S+)")


def steps(ranks: int, *arguments: str) -> list[tuple[float, ...]]:
    """Per cent of right answers, and the distances of ratios from 1 before both updates, of each step."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    command = [sys.executable, *launcher, str(SCRIPT), *arguments]
    result = forks.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return [tuple(map(float, match)) for match in LINE.findall(result.stdout)]


def test_the_ratio_is_one_before_the_first_update() -> None:
    made = steps(
        2, "--steps", "2", "--warm", "3", "--generate", "data=2", "parallel.tensor=2", "precision.dtype=bf16"
    )
    assert [first for _, first, _ in made] == [0, 0]
    assert all(second > 0 for _, _, second in made)


@pytest.mark.slow
def test_answers_become_better() -> None:
    made = steps(1)
    before, after = (sum(right for right, _, _ in part) / 20 for part in (made[:20], made[-20:]))
    assert len(made) == 100 and after > before + 5
    assert {first for _, first, _ in made} == {0}
    usual = steps(1, "--steps", "5", "precision.exact=false")
    assert any(first > 0 for _, first, _ in usual)
