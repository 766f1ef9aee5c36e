"""The scripts of docs/cluster.md: what ``hexad submit`` writes, with stand-ins for SLURM's commands.
tests/clusters has a real SLURM."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ..forks import PATIENCE
from ..training.command import call

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
SCRIPT, TORCHRUN = re.findall(r"<!-- sbatch -->\n```bash\n(.*?)\n```", PAGE, re.DOTALL)
REPLACED = re.compile(r"^ending=.*?status=\$\?$", re.MULTILINE | re.DOTALL)

SUBMIT = re.search(r"^hexad submit --engine slurm (.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

STOPPED = '{"finished": false, "stopped_by": "SIGUSR1"}'
FINISHED = '{"finished": true, "stopped_by": null}'


def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SUBMIT is not None
    monkeypatch.chdir(tmp_path)
    data = {"train": "data/train", "tokenizer": "byte", "sequence": 2048}
    batch = {"micro": 1, "global": 64}
    tree = {"run": {"dir": "runs/first"}, "model": {"preset": "llama3.2-1b"}, "data": data, "batch": batch}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    words = shlex.split(SUBMIT[1].replace("\\\n", " "))
    printed = call("submit", "--engine", "slurm", "--print", *words).out
    assert printed.replace(str(tmp_path), "/shared/project").strip() == SCRIPT


@pytest.mark.parametrize(
    "script", (SCRIPT, REPLACED.sub(lambda _: TORCHRUN, SCRIPT)), ids=("srun", "torchrun")
)
@pytest.mark.parametrize(
    ("document", "status", "requeued", "expected"),
    [
        (FINISHED, 0, False, 0),
        (STOPPED, 0, True, 0),
        (STOPPED, 1, True, 0),  # torchrun's status after a graceful stop
        ("", 1, False, 1),
        ("", 2, False, 2),
    ],
)
def test_the_job_is_requeued_where_the_run_was_stopped_and_saved(
    script: str, document: str, status: int, requeued: bool, expected: int, tmp_path: Path
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (
        ("srun", f"echo \"$*\" > {tmp_path}/srun; echo '{document}'; exit {status}"),
        ("scontrol", f'[ "$1" = show ] && printf "node1\\nnode2\\n" || echo "$*" > {tmp_path}/scontrol'),
    ):
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    variables = {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "12345",
        "SLURM_CPUS_PER_TASK": "12",
        "SLURM_JOB_NODELIST": "node[1-4]",
        "SLURM_NNODES": "4",
    }
    script = script.replace("/shared/project", str(tmp_path))
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    ended = subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.returncode == expected, ended.stderr
    asked = tmp_path / "scontrol"
    assert (asked.read_text() if asked.exists() else None) == ("requeue 12345\n" if requeued else None)
    started = (tmp_path / "srun").read_text()
    assert "hexad train run.yaml parallel.tensor=8 --json" in started
    assert ("--rdzv-endpoint node1:22345" in started) == ("torchrun" in script)
