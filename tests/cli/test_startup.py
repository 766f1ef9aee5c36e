"""Commands that need no tensors import no torch, so that they answer at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hexad.cli.main import run

from ..forks import PATIENCE

_SCRIPT = """
import json, os, sys
from hexad.cli.main import run
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork():  # each command in a process of its own that has imported nothing else
        os.wait()
        continue
    try:
        status = run(arguments)
    except SystemExit as ending:
        status = ending.code
    heavy = [name for name in ("torch", "matplotlib", "pyarrow", "transformers") if name in sys.modules]
    with open(f"{number}.json", "w") as file:
        json.dump([status or 0, heavy], file)
    os._exit(0)
"""

GOOD = (
    ["--help"],
    ["train", "--help"],
    ["generate", "--help"],
    ["show", "layout", "--world", "16", "--tensor", "2"],
    ["show", "layout", "--world", "16", "--tensor", "2", "--json"],
    ["config", "show", "run.yaml"],
    ["config", "check", "run.yaml", "parallel.tensor=2", "--elsewhere"],
)
BAD = (
    ["train", "run.yaml", "model.layer=2"],
    ["train", "run.yaml", "parallel.tensor=3", "--dry-run"],
    ["train", "run.yaml", "--dry-run", "data.train=no/such"],
    ["config", "check", "run.yaml", "data.train=no/such"],
    ["train", "run.yaml"],  # data.train is null
    ["generate", "nowhere", "--prompt", "a"],
    ["no-such-command"],
)


def modules_of(commands: list[list[str]], directory: Path) -> list[tuple[int, list[str]]]:
    """(exit status, heavy modules imported) of commands in a directory."""
    command = [sys.executable, "-c", _SCRIPT, json.dumps(commands)]
    subprocess.run(command, check=True, capture_output=True, cwd=directory, timeout=PATIENCE)
    results = [json.loads((directory / f"{number}.json").read_text()) for number in range(len(commands))]
    return [(status, heavy) for status, heavy in results]


def test_no_torch_and_errors_come_before_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {hidden: 64}\n")
    results = modules_of([*GOOD, *BAD], tmp_path)
    for arguments, result in zip([*GOOD, *BAD], results):
        assert result == (0 if arguments in GOOD else 2, []), arguments


def test_a_full_disk_is_said_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [Path(sys.executable).with_name("hexad"), "config", "presets"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "the output cannot be written: No space left on device" in ended.stderr


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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (result.stdout, result.stderr) == ("[]\n", "")
