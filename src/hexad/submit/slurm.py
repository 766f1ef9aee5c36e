"""SLURM: an sbatch script, ``sbatch``, and the job's log until it has ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from shlex import quote

from hexad.config import HexadError

from .engine import Engine, Submitted, run_command
from .job import Job

_POLL = 1.0
"""Seconds between two looks at the queue and the log."""
_ENDED = {"COMPLETED": 0, "FAILED": 1, "CANCELLED": 1, "TIMEOUT": 1, "NODE_FAIL": 1, "OUT_OF_MEMORY": 1}
_ENDED |= {"PREEMPTED": 1, "DEADLINE": 1, "BOOT_FAIL": 1}
"""Exit status by the last state of a job; those that requeue have passed."""

SCRIPT = """\
#!/bin/bash
{directives}
set -euo pipefail

cd {directory}
{setup}export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # not that of another job on the same host
{array}
ending=$(mktemp)
status=0
srun --kill-on-bad-exit --distribution=block{cpus} \\
    {command} > "$ending" || status=$?
cat "$ending"

# Stopped by a signal, with everything saved: the same job resumes where it stopped.
if grep -q '"finished": false' "$ending"; then
    scontrol requeue "$SLURM_JOB_ID"
    status=0
fi
exit "$status"
"""


def script(job: Job) -> str:
    """The sbatch script of a job.

    The ranks receive SIGUSR1 three minutes before the time limit, or before pre-emption; they save, and the
    script requeues the job. SLURM itself requeues a job whose node has failed.
    """
    element = "%A_%a" if job.sweep else "%j"
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.ranks),
        **({"gpus-per-node": str(job.ranks)} if job.gpus else {}),
        **({"cpus-per-task": str(job.cpus)} if job.cpus else {}),
        **({"array": f"0-{len(job.sweep) - 1}"} if job.sweep else {}),
        "signal": "USR1@180",
        "requeue": "",
        "open-mode": "append",
        "output": str(job.run_dir / f"slurm-{element}.log"),
        **job.options,
    }
    lines = [f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in options.items()]
    words = [quote(word) for word in (*job.command, "--json")]
    array = ""
    if job.sweep:
        elements = "\n".join(f"    {quote(' '.join(map(quote, element)))}" for element in job.sweep)
        array = f'settings=(\n{elements}\n)\neval "element=(${{settings[$SLURM_ARRAY_TASK_ID]}})"\n'
        words.append('"${element[@]}"')
    return SCRIPT.format(
        directives="\n".join(lines),
        directory=quote(str(job.directory)),
        setup="".join(f"{line}\n" for line in job.setup),
        array=array,
        cpus=f" --cpus-per-task={job.cpus}" if job.cpus else "",
        command=" ".join(words),
    )


def submit(job: Job, path: Path) -> Submitted:
    """Queue a script.

    Raises:
        HexadError: sbatch is not there, or refuses it.
    """
    job.run_dir.mkdir(parents=True, exist_ok=True)  # slurmd makes no directory for a log
    number = run_command("sbatch", "--parsable", str(path)).strip().split(";")[0]
    if job.sweep:
        logs = f"{job.run_dir}/slurm-{number}_*.log"
        return Submitted(number, logs, f"scancel {number}", None)
    log = job.run_dir / f"slurm-{number}.log"
    return Submitted(number, str(log), f"scancel {number}", lambda: follow(number, log))


def follow(number: str, log: Path) -> int:
    """Print a job's log as it grows, and its states, until it has ended; returns the exit status.

    A job that is requeued is followed on.
    """
    shown, last = 0, ""
    while True:
        state, reason = _state(number)
        shown = _print_new(log, shown)
        if state in _ENDED:
            print(f"hexad: job {number}: {state}", file=sys.stderr, flush=True)
            return _ENDED[state]
        text = f"{state} ({reason})" if reason not in ("", "None") else state
        if text != last:
            print(f"hexad: job {number}: {text}", file=sys.stderr, flush=True)
            last = text
        time.sleep(_POLL)


def _state(number: str) -> tuple[str, str]:
    """A job's state and the reason for it. The controller forgets jobs minutes after they have ended."""
    command = ["scontrol", "show", "job", number, "--oneliner"]
    done = subprocess.run(command, capture_output=True, text=True)
    fields = dict(word.partition("=")[::2] for word in done.stdout.split())
    if "JobState" not in fields:
        raise HexadError(
            f"job {number}: its state is unknown: {done.stderr.strip() or 'no answer of scontrol'}"
        )
    return fields["JobState"], fields.get("Reason", "")


def _print_new(log: Path, shown: int) -> int:
    """Print a file from a position; returns the new one."""
    if not log.exists():
        return shown
    with log.open("rb") as stream:
        stream.seek(shown)
        new = stream.read()
    sys.stdout.write(new.decode("utf-8", errors="replace"))
    sys.stdout.flush()
    return shown + len(new)


SLURM = Engine("slurm", "job.sh", script, submit, uses=frozenset({"setup", "sweep", "cpus"}))
