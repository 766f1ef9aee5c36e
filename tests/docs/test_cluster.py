"""The scripts of docs/cluster.md, with stand-ins for SLURM's commands."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from ..forks import PATIENCE

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
SCRIPT, TORCHRUN = re.findall(r"<!-- sbatch -->\n```bash\n(.*?)\n```", PAGE, re.DOTALL)
REPLACED = re.compile(r"^ending=.*?status=\$\?$", re.MULTILINE | re.DOTALL)

STOPPED = '{"finished": false, "stopped_by": "SIGUSR1"}'
FINISHED = '{"finished": true, "stopped_by": null}'


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
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    ended = subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.returncode == expected, ended.stderr
    asked = tmp_path / "scontrol"
    assert (asked.read_text() if asked.exists() else None) == ("requeue 12345\n" if requeued else None)
    started = (tmp_path / "srun").read_text()
    assert "hexad train run.yaml --json parallel.tensor=8" in started
    assert ("--rdzv-endpoint node1:22345" in started) == ("torchrun" in script)
