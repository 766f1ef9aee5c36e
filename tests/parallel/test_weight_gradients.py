"""The kernel that adds experts' weight gradients on GPUs, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = Path(sys.prefix) / "kernels"
"""Where ``make setup`` puts Triton: a package of PyTorch for GPUs."""


def _answer(action: str) -> Any:
    if not (KERNELS / "triton").is_dir():
        pytest.skip("Triton is not there (make setup brings it, on Linux with x86-64)")
    path = os.pathsep.join((str(KERNELS), str(ROOT / "src"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1" if action == "run" else "0"}
    command = [sys.executable, "-m", "tests.parallel.weight_gradients", action]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernel_adds_products_of_uneven_runs() -> None:
    """Experts without rows, and tiles that are not full; rows beyond the last offset are not read."""
    errors = _answer("run")
    assert len(errors) == 4
    assert max(errors) < 1e-4


@pytest.mark.slow
def test_the_kernel_compiles_ahead() -> None:
    assert all(size > 10_000 for size in _answer("compile"))
