"""What users do: the tests marked ``gpu``, and the commands: training, a kill, resuming, generation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from .record import Record

ROOT = Path(__file__).resolve().parents[2]


TESTS = 0.5
"""Of the time: for the tests, at most."""


def run(record: Record) -> None:
    """The tests, and then the commands."""
    with tempfile.TemporaryDirectory(prefix="hexad-gpu-") as name:
        _tests(record, Path(name) / "outcomes")
        with record.attempt("commands"):
            _commands(record, Path(name))


def _tests(record: Record, file: Path) -> None:
    """The outcome of every test, as far as they come."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-p", "gpu.outcomes"]
    command += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"HEXAD_OUTCOMES": str(file)})
    until = record.left() * (1 - TESTS)
    while process.poll() is None:
        time.sleep(0.5)
        _count(record, file)
        if record.left() < until:
            process.kill()
            record.failed("tests", "the time was up; those that are listed had ended")
            break
    process.wait()
    _count(record, file)
    if process.returncode > 0:
        record.failed("tests", f"pytest's exit status is {process.returncode}")


def _count(record: Record, file: Path) -> None:
    if not file.exists():
        return
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    outcomes = {line["test"]: line for line in lines}.values()
    record.put("tests", dict(Counter(line["outcome"] for line in outcomes)))
    record.put("tests_failed", [line for line in outcomes if line["outcome"] == "failed"])
    record.put(
        "tests_skipped", dict(Counter(line["why"] for line in outcomes if line["outcome"] == "skipped"))
    )


class Run:
    """A configuration, and commands on it.

    Args:
        directory: of everything.
        record: for a GPU, or a CPU.
    """

    def __init__(self, directory: Path, record: Record) -> None:
        self.directory, self.pretend, self._record = directory, record.pretend, record
        text = directory / "text.txt"
        text.write_text("\n".join(f"line {n}: the square of {n} is {n * n}" for n in range(3000)))
        self.hexad("data", "build", "--input", str(text), "--output", self._data, "--tokenizer", "byte")
        size = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 64}
        large = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn_hidden": 1536}
        self._tree: dict[str, Any] = {
            "run": {"steps": 12, "device": "cpu" if self.pretend else "cuda"},
            "model": size if self.pretend else large,
            "data": {"train": self._data, "sequence": 32 if self.pretend else 512},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": "fp32" if self.pretend else "bf16"},
            "lr_schedule": {"warmup": 2, "kind": "constant"},
            "checkpoint": {"every": 4, "keep": 10},
        }

    @property
    def _data(self) -> str:
        return str(self.directory / "data")

    def hexad(self, *arguments: str) -> str:
        """What the command prints.

        Raises:
            RuntimeError: it fails.
        """
        command = [sys.executable, "-m", "hexad.cli.main", *arguments]
        limit = max(1.0, self._record.left() - 2)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        if done.returncode:
            said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise RuntimeError(f"hexad {arguments[0]}: {said}")
        return done.stdout

    def train(self, name: str, *overrides: str) -> list[float]:
        """The losses of a run."""
        self.hexad(*self._arguments(name, overrides))
        return self.losses(name)

    def killed(self, name: str, after: int, *overrides: str) -> tuple[int, int]:
        """Kill a run, which is one process, after a step; returns the last step and that of its newest
        checkpoint.

        Raises:
            RuntimeError: it ended before.
        """
        command = [sys.executable, "-m", "hexad.cli.main", *self._arguments(name, overrides)]
        process = subprocess.Popen(command)
        end = time.monotonic() + 120
        while len(self.losses(name)) < after and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        if process.poll() is not None:
            raise RuntimeError(f"the run ended by itself, with exit status {process.returncode}")
        process.kill()
        process.wait()
        saved = [int(path.name[5:]) for path in (self.directory / name).glob("checkpoints/step-*")]
        return len(self.losses(name)), max(saved, default=0)

    def losses(self, name: str) -> list[float]:
        """One loss per step so far."""
        file = self.directory / name / "metrics.jsonl"
        if not file.exists():
            return []
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]  # the last one may be incomplete
        return [json.loads(line)["loss"] for line in lines]

    def _arguments(self, name: str, overrides: tuple[str, ...]) -> list[str]:
        path = self.directory / f"{name}.yaml"
        tree = self._tree | {"run": {**self._tree["run"], "dir": str(self.directory / name)}}
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return ["train", str(path), *overrides]


def _commands(record: Record, directory: Path) -> None:
    """Each is tried, whatever the others have done."""
    run = Run(directory, record)

    def resumed() -> dict[str, Any]:
        # More steps than it makes, so that the kill finds it at work.
        many = ("run.deterministic=true", "run.steps=100000")
        last, saved = run.killed("killed", 6, *many)
        losses, whole = (
            run.train(name, "run.deterministic=true", f"run.steps={max(last, saved) + 4}")
            for name in ("killed", "alone")
        )
        if losses != whole:
            raise RuntimeError(f"losses with a kill {losses}, without {whole}")
        return {
            "killed_after_step": last,
            "newest_checkpoint": saved,
            "steps_in_the_end": len(losses),
            "losses_equal_an_uninterrupted_runs": True,
        }

    def twice() -> dict[str, Any]:
        losses = [run.train(name, "run.deterministic=true", "run.steps=6") for name in ("first", "second")]
        if losses[0] != losses[1]:
            raise RuntimeError(f"losses {losses[0]}, again {losses[1]}")
        return {"losses": losses[0], "bit_equal": True}

    def eight_bits() -> dict[str, Any] | None:
        import torch

        from hexad.topology.cluster import has_fp8

        if record.pretend or not has_fp8(torch.device("cuda", 0)):
            record.absent("fp8", "the device has no fp8 units")
            return None
        return {"losses": run.train("eight", "precision.dtype=fp8", "run.steps=6")}

    def generated() -> dict[str, Any]:
        text = run.hexad("generate", str(directory / "alone"), "--prompt", "line 7: the", "--tokens", "24")
        return {"text": text.strip()[:200]}

    for name, action in (("kill_and_resume", resumed), ("deterministic", twice), ("fp8", eight_bits),
                         ("generation", generated)):  # fmt: skip
        begin = time.monotonic()
        with record.attempt(name):
            figures = action()
            if figures is not None:
                record.put(name, figures | {"seconds": time.monotonic() - begin})
