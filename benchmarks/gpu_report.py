"""Tests and speed on this machine's GPUs, in one report: what ``make test-gpu`` runs.

    python benchmarks/gpu_report.py [--output benchmarks/results/gpu.json] [--skip-tests] [--skip-speed]

Runs the tests marked ``gpu`` and ``gpu_step.py``, each mode of compilation in a process of its own, and
writes what failed, what was skipped and why, seconds, MFU, and memory beside its prediction. The exit status
is that of the tests. Without a GPU nothing is run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from facts import facts

HERE = Path(__file__).parent


def tests() -> dict[str, Any]:
    """Outcome of every test marked ``gpu``."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={file}"]
        status = subprocess.run(command, cwd=HERE.parent, check=False).returncode
        cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []
    outcome: dict[str, Any] = {"status": status, "passed": 0, "failed": {}, "skipped": {}}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        problem = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        skipped = case.find("skipped")
        if problem is not None:
            outcome["failed"][name] = problem.get("message", "")[:500]
        elif skipped is not None:
            outcome["skipped"][name] = skipped.get("message", "")
        else:
            outcome["passed"] += 1
    return outcome


def speed() -> dict[str, Any]:
    """``gpu_step.py`` by mode of compilation; the error's last line where it failed."""
    figures: dict[str, Any] = {}
    for mode in ("pointwise", "none", "full"):
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "speed.json"
            command = [sys.executable, str(HERE / "gpu_step.py"), "--compile", mode, "--json", str(file)]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            figures[mode] = json.loads(file.read_text(encoding="utf-8"))["models"] if file.exists() else []
        if done.returncode:
            figures[mode].append({"error": (done.stderr.strip() or "no output").splitlines()[-1]})
    return figures


def main() -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu.json")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_report: no GPU is visible; nothing to run")
        return
    count = torch.cuda.device_count()
    report: dict[str, Any] = facts() | {
        "devices": [torch.cuda.get_device_name(number) for number in range(count)],
        "cuda": torch.version.cuda,
        "command": "make test-gpu",
    }
    for name, skip, action in (("tests", options.skip_tests, tests), ("speed", options.skip_speed, speed)):
        if not skip:
            report[name] = action()
            options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"gpu_report: wrote {options.output}")
    raise SystemExit(report.get("tests", {}).get("status", 0))


if __name__ == "__main__":
    main()
