"""``examples/first_run.ipynb``: it holds no results, and its cells run in their order."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/first_run.ipynb"
PICTURE = "from IPython.display import SVG"
WITHOUT_IPYTHON = """
def SVG(filename):
    assert "<svg" in Path(filename).read_text()
"""
"""In its place: tests do not need it."""


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_no_results_are_committed() -> None:
    cells = code_cells()
    assert len(cells) >= 8
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        ast.parse("".join(cell["source"]))


@pytest.mark.slow
def test_all_cells_run(tmp_path: Path) -> None:
    source = "\n\n".join("".join(cell["source"]) for cell in code_cells())
    assert PICTURE in source
    script = tmp_path / "cells.py"
    script.write_text(source.replace(PICTURE, WITHOUT_IPYTHON))
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    command = [sys.executable, str(script)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "152" in result.stdout and "bits per byte" in result.stdout
    written = {path.name for path in (tmp_path / "first-run").iterdir()}
    assert {"schedule.svg", "memory.svg", "70b.yaml", "run"} <= written
