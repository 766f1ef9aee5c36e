"""The first minutes on a GPU, in an order in which a kill at any moment loses nothing: ``make test-gpu``.

    python benchmarks/gpu_report.py [--output benchmarks/results/gpu] [--budget 540] [--steps 1 3] [--resume]
                                    [--wheels DIR] [--pretend]

1. ``ceilings``: a training step of a small model; matrix products, copies and attention kernels alone.
2. ``models``: models of the 1B and the 8B class: step time, MFU, kernels, memory, beside the roofline's
   prediction and compiled plain PyTorch.
3. ``nccl``: every kind of collective over NCCL, in a world of one.
4. ``layouts``: the parity grid with ranks that share the GPU, over a backend with NCCL's semantics.
5. ``one_rank``: one rank of a 70B model in a world of many, without its peers.
6. ``commands``: training that is killed and resumes, fp8, generation, and the tests marked ``gpu``.

Asked for by ``--steps`` only:

7. ``bits``: repeats with ``run.deterministic``, of which every gradient, moment and master value is hashed.
8. ``inference``: generation with a model of the 8B class; forward passes in exact arithmetic.
9. ``rates``: products, grouped products and attention by shape, the host's time per call, reserved memory.
10. ``memory``: predictions beside what is allocated, by family, format and what is recomputed.

Each step runs in a process of its own and writes ``DIR/NAME.json`` after every figure; ``report.json`` and
``report.md`` there hold them all. The budget is divided among the steps, and what one leaves over is the next
ones'; a step that fails or does not end in time is reported with the last lines of its stderr, and the next
one runs. ``--resume`` leaves out what is finished. ``--pretend`` runs the same code on a CPU at toy sizes:
figures that only a GPU has are null, with the reason.

Packages: torch and Hexad's other dependencies, of which ``huggingface_hub`` is needed for models of the hub
only, and pytest. Hexad itself need not be installed. Packages that a machine lacks may be given as wheels:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \\
        -d wheels pydantic pydantic_core annotated_types typing_inspection typing_extensions
    python benchmarks/gpu_report.py --wheels wheels

The exit status is 1 if a step has not finished, 2 if a package is missing. Without a GPU nothing is run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from facts import facts
from gpu.record import read_json, tables, write_json, write_text

HERE = Path(__file__).resolve().parent
STEPS = {"ceilings": 60, "models": 150, "nccl": 20, "layouts": 110, "one_rank": 80, "commands": 120}
"""Steps, with the seconds of each out of the default budget."""
FURTHER = {"bits": 120, "inference": 90, "rates": 90, "memory": 90}
"""Steps that are run if they are asked for."""
NEEDED = (
    "pydantic",
    "click",
    "jinja2",
    "numpy",
    "rich",
    "safetensors",
    "tokenizers",
    "xxhash",
    "yaml",
    "pytest",
)
LINES = 30
"""Of the stderr of a step that has not finished."""


class Report:
    """The steps' files and their summary.

    Args:
        directory: where they are.
        pretend: on a CPU.

    Attributes:
        facts: the command, the machine, the versions; each step's file has those of its run.
    """

    def __init__(self, directory: Path, pretend: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        from gpu.device import gpu_facts  # whose imports may have to be installed first

        self.directory, self.pretend = directory, pretend
        self.facts = facts() | gpu_facts() | _commit() | {"pretend": pretend}
        self.facts["command"] = re.sub(r" --(output|wheels) \S+", "", self.facts["command"])
        self._seen: object = None
        self.errors: Path | None = None  # of the step that runs

    def file(self, name: str) -> Path:
        """A step's."""
        return self.directory / f"{name}.json"

    def finished(self, name: str) -> bool:
        """Whether a step has ended well in an earlier run of the same kind."""
        document = read_json(self.file(name))
        return document.get("state") == "finished" and document.get("pretend") == self.pretend

    def write(self) -> None:
        """The summary, if a step's file has changed."""
        times = {
            name: self.file(name).stat().st_mtime_ns for name in STEPS | FURTHER if self.file(name).exists()
        }
        if times == self._seen:
            return
        self._seen = times
        steps = {name: read_json(self.file(name)) for name in times}
        for step in steps.values():
            if step["state"] == "running" and self.errors is not None:
                step["stderr"] = last_lines(self.errors)
        write_json(self.directory / "report.json", self.facts | {"steps": steps})
        write_text(self.directory / "report.md", "\n".join(self._page(steps)) + "\n")

    def _page(self, steps: dict[str, Any]) -> list[str]:
        kind = "on a CPU, at toy sizes: no figure is one of a GPU" if self.pretend else ""
        lines = [f"# GPU report{', ' if kind else ''}{kind}", ""]
        lines += [f"- {key}: {value}" for key, value in self.facts.items()]
        for name, step in steps.items():
            lines += ["", f"## {name}: {step['state']}, {step['seconds']:.0f} s"]
            lines += ["", *tables(step)]
            lines += ["", "```", *step["stderr"], "```"] if step.get("stderr") else []
        return lines


def _commit() -> dict[str, str]:
    """That of this repository, where it is one."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return {}
    return {} if done.returncode else {"commit": done.stdout.strip()}


def last_lines(file: Path) -> list[str]:
    """Of what a step has printed, without where the machine has its packages and this repository."""
    text = file.read_text(encoding="utf-8", errors="replace").replace(f"{HERE.parent}/", "")
    return re.sub(r"/\S*/((?:site|dist)-packages/)", r"\1", text).splitlines()[-LINES:]


def run_step(name: str, report: Report, seconds: float, packages: list[str], errors: Path) -> None:
    """One step in a process of its own, for so many seconds at most; what it prints goes to ``errors``."""
    file, report.errors = report.file(name), errors
    file.unlink(missing_ok=True)
    paths = [*packages, HERE.parent / "src", HERE.parent, HERE, os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path))}
    variables["PYTHONFAULTHANDLER"] = "1"
    command = [sys.executable, "-m", "gpu", name, str(file), f"{seconds:.1f}", str(os.getpid())]
    command += ["pretend"] if report.pretend else []
    end = time.monotonic() + seconds
    print(f"gpu_report: {name}, {seconds:.0f} s at most", flush=True)
    with errors.open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                report.write()
        finally:  # also where this process is asked to end
            late = process.poll() is None
            # All that the step has started: ranks, commands, tests.
            _kill_group(process.pid)
            process.wait()
            state = _conclude(file, "out of time" if late else "failed", last_lines(errors), report)
            print(f"gpu_report: {name}: {state}", flush=True)


def _conclude(file: Path, otherwise: str, printed: list[str], report: Report) -> str:
    """The state that a step has ended in: ``otherwise`` if it has not finished, with what it printed."""
    document = read_json(file) or {"pretend": report.pretend, "seconds": 0.0, "figures": {}}
    if document.get("state") != "finished":
        document |= {"state": otherwise, "stderr": printed}
    write_json(file, document | {"facts": report.facts})
    report.write()
    return str(document["state"])


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def install(wheels: Path, where: str) -> list[str]:
    """Install wheels into a folder that only the steps see; returns the paths to add."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--target", where, *map(str, sorted(wheels.glob("*.whl")))]
    subprocess.run(command, check=True)
    sys.path.insert(0, where)  # for the look-up of what is missing
    return [where]


def main() -> None:
    """Run the steps and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu", help="a directory")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds in total")
    shares = STEPS | FURTHER
    numbers, default = range(1, len(shares) + 1), list(range(1, len(STEPS) + 1))
    parser.add_argument("--steps", type=int, nargs="+", choices=numbers, default=default)
    parser.add_argument("--resume", action="store_true", help="leave out steps that are finished")
    parser.add_argument("--wheels", type=Path, help="a directory of packages that this machine lacks")
    parser.add_argument("--pretend", action="store_true", help="on a CPU, at toy sizes")
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the step that runs is ended too
    if not options.pretend and not torch.cuda.is_available():
        print("gpu_report: no GPU is visible; nothing to run")
        return
    with tempfile.TemporaryDirectory(prefix="hexad-gpu-report-") as where:
        packages = install(options.wheels, f"{where}/packages") if options.wheels else []
        missing = [name for name in NEEDED if find_spec(name) is None]
        if missing:
            print(f"gpu_report: missing packages: {', '.join(missing)}; give them with --wheels DIR")
            raise SystemExit(2)
        report = Report(options.output, options.pretend)
        chosen = [name for number, name in enumerate(shares, 1) if number in options.steps]
        left = [name for name in chosen if not (options.resume and report.finished(name))]
        for place, name in enumerate(left):
            part = shares[name] / sum(shares[later] for later in left[place:])
            run_step(name, report, (end - time.monotonic()) * part, packages, Path(where, f"{name}.log"))
        report.write()
    unfinished = [name for name in chosen if not report.finished(name)]
    print(f"gpu_report: wrote {report.directory / 'report.md'}")
    if unfinished:
        print(f"gpu_report: not finished: {', '.join(unfinished)}")
    raise SystemExit(1 if unfinished else 0)


if __name__ == "__main__":
    main()
