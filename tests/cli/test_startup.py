"""Commands that need no tensors import no torch, so that they answer at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hexad.cli.main import run

_SCRIPT = """
import json, sys
from hexad.cli.main import run
try:
    status = run(sys.argv[1:])
except SystemExit as ending:
    status = ending.code
heavy = [name for name in ("torch", "matplotlib", "pyarrow", "transformers") if name in sys.modules]
print("\\n" + json.dumps([status or 0, heavy]))
"""


def modules_of(arguments: list[str]) -> tuple[int, list[str]]:
    """(exit status, heavy modules imported)."""
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    status, heavy = json.loads(result.stdout.splitlines()[-1])
    return status, heavy


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["generate", "--help"],
        ["show", "layout", "--world", "16", "--tensor", "2"],
        ["show", "layout", "--world", "16", "--tensor", "2", "--json"],
        ["config", "show", "RUN"],
        ["config", "check", "RUN", "parallel.tensor=2", "--elsewhere"],
    ],
    ids=" ".join,
)
def test_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    assert modules_of(_with_run(tmp_path, arguments)) == (0, [])


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "RUN", "model.layer=2"],
        ["train", "RUN", "parallel.tensor=3", "--dry-run"],
        ["train", "RUN", "--dry-run", "data.train=no/such"],
        ["config", "check", "RUN", "data.train=no/such"],
        ["train", "RUN"],  # data.train is null
        ["generate", "nowhere", "--prompt", "a"],
        ["no-such-command"],
    ],
    ids=" ".join,
)
def test_errors_come_before_torch(tmp_path: Path, arguments: list[str]) -> None:
    assert modules_of(_with_run(tmp_path, arguments)) == (2, [])


def _with_run(directory: Path, arguments: list[str]) -> list[str]:
    path = directory / "run.yaml"
    path.write_text("model: {hidden: 64}\n")
    return [str(path) if argument == "RUN" else argument for argument in arguments]


def test_help_says_where_the_traceback_of_a_rank_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "run.dir/log-rankN.txt" in "".join(capsys.readouterr().out.split())  # wherever it is wrapped


def test_a_step_needs_no_compiler() -> None:
    """Its import takes a rank longer than that of PyTorch itself; ``torch.optim`` imports it."""
    code = """
import sys
import torch
from hexad import Engine, Layout, Mesh, Microbatch, load_config
model = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 9}
tree = {"model": model, "data": {"sequence": 4}, "batch": {"global": 2}}
engine = Engine(load_config(tree), Mesh.create(Layout(world=1), torch.device("cpu")))
tokens = torch.arange(4).view(1, 4)
engine.train_step([Microbatch(tokens, tokens)] * 2)
print(sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (result.stdout, result.stderr) == ("[]\n", "")
