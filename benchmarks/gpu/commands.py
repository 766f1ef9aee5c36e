"""What users do: training, a kill, resuming, fp8, generation; and beside them the tests marked ``gpu``.

Nothing here is timed, and most of the time goes into starting processes and compiling: the commands that do
not need each other and some slices of the tests share the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from .record import Record

ROOT = Path(__file__).resolve().parents[2]
SLICES = max(1, min(5, (os.cpu_count() or 1) // 3))
"""Of tests of one rank, each in a process of its own; those of several ranks share one and its workers."""
ENDING = 3.0
"""Seconds that are left for the last figures."""
EVERY, STEPS = 8, 40
"""Steps between checkpoints, and of the run that nothing interrupts."""


def run(record: Record) -> None:
    """The commands, while the tests run."""
    # Each process compiles a few small functions: workers for it would take longer to start.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="hexad-gpu-") as name:
        tests = Tests(record, Path(name) / "outcomes")
        with record.attempt("commands"):
            _commands(record, Path(name), tests)
        tests.finish()


class Tests:
    """The tests marked ``gpu``, in processes that have been started.

    Args:
        record: which their outcomes are written to.
        file: of the outcomes, one line each.
    """

    def __init__(self, record: Record, file: Path) -> None:
        self._record, self._file = record, file
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "gpu.outcomes", "-vvv"]
        command += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
        parts = [["tests/gpu/test_ranks.py"], ["tests/gpu/test_generation.py"]]
        parts += [["tests/gpu/test_engine.py", "--slice", f"{n}/{SLICES}"] for n in range(SLICES)]
        variables = os.environ | {"HEXAD_OUTCOMES": str(file)}
        self._processes = [subprocess.Popen([*command, *part], cwd=ROOT, env=variables) for part in parts]

    def finish(self) -> None:
        """Wait until the tests have ended, or the time is up."""
        while any(process.poll() is None for process in self._processes):
            if self._record.left() < ENDING:
                for process in self._processes:
                    process.kill()
                self._record.failed("tests", "the time was up; those that are listed had ended")
                break
            time.sleep(0.5)
            self.count()
        statuses = {process.wait() for process in self._processes}
        self.count()
        if bad := {status for status in statuses if status > 0}:
            self._record.failed("tests", f"pytest's exit statuses: {', '.join(map(str, bad))}")

    def count(self) -> None:
        """The outcomes so far."""
        if not self._file.exists():
            return
        lines = [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines()]
        tests = {line["test"]: line for line in lines}.values()  # the last line of each
        by_outcome = {
            outcome: [test for test in tests if test["outcome"] == outcome]
            for outcome in ("failed", "skipped", "running")
        }
        slowest = sorted(tests, key=lambda test: -test["seconds"])[:10]
        self._record.put("tests", dict(Counter(test["outcome"] for test in tests)))
        self._record.put("tests_failed", by_outcome["failed"])
        self._record.put("tests_skipped", dict(Counter(test["why"] for test in by_outcome["skipped"])))
        self._record.put("tests_running", [test["test"] for test in by_outcome["running"]])
        self._record.put(
            "slowest_tests", [{key: test[key] for key in ("test", "seconds")} for test in slowest]
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
            "run": {"deterministic": True, "device": "cpu" if self.pretend else "cuda"},
            "model": size if self.pretend else large,
            "data": {"train": self._data, "sequence": 32 if self.pretend else 512},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": "fp32" if self.pretend else "bf16"},
            "lr_schedule": {"warmup": 2, "kind": "constant"},
            "checkpoint": {"every": EVERY, "keep": 10},
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
        limit = max(1.0, self._record.left() - ENDING)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        if done.returncode:
            said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise RuntimeError(f"hexad {arguments[0]}: {said}")
        return done.stdout

    def train(self, name: str, *overrides: str) -> list[float]:
        """The losses of a run."""
        self.hexad(*self._arguments(name, overrides))
        return self.losses(name)

    def killed(self, name: str, *overrides: str) -> tuple[int, int]:
        """Kill a run, which is one process, once it has a checkpoint; returns the last step and that of its
        newest checkpoint.

        Raises:
            RuntimeError: it ended before, or the time is up.
        """
        command = [sys.executable, "-m", "hexad.cli.main", *self._arguments(name, overrides)]
        process = subprocess.Popen(command)
        end = time.monotonic() + self._record.left() - ENDING
        while not self._saved(name) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        if process.poll() is not None:
            raise RuntimeError(f"the run ended by itself, with exit status {process.returncode}")
        process.kill()
        process.wait()
        if not (saved := self._saved(name)):
            raise RuntimeError("the time was up before the first checkpoint was complete")
        return len(self.losses(name)), max(saved)

    def _saved(self, name: str) -> list[int]:
        """Steps of complete checkpoints: directories get their names at the end."""
        return [int(path.name[5:]) for path in (self.directory / name).glob("checkpoints/step-*")]

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


def _commands(record: Record, directory: Path, tests: Tests) -> None:
    """Each is tried, whatever the others have done."""
    run = Run(directory, record)

    def resumed(alone: Future[list[float]]) -> dict[str, Any]:
        # More steps than it makes, so that the kill finds it at work.
        last, saved = run.killed("killed", "run.steps=100000")
        losses = run.train("killed", f"run.steps={max(last, saved) + 4}")
        whole = alone.result()
        common = min(len(losses), len(whole))
        if common <= saved or losses[:common] != whole[:common]:
            raise RuntimeError(f"losses with a kill {losses}, without {whole}; checkpoint {saved}")
        return {
            "killed_after_step": last,
            "newest_checkpoint": saved,
            "steps_in_the_end": len(losses),
            "losses_bit_equal_to_an_uninterrupted_runs": common,
        }

    def eight_bits() -> dict[str, Any] | None:
        import torch

        from hexad.topology.cluster import has_fp8

        if record.pretend or not has_fp8(torch.device("cuda", 0)):
            return None
        return {"losses": run.train("eight", "precision.dtype=fp8", "run.steps=6")}

    def generated(alone: Future[list[float]]) -> dict[str, Any]:
        alone.result()
        text = run.hexad("generate", str(directory / "alone"), "--prompt", "line 7: the", "--tokens", "24")
        return {"text": text.strip()[:200]}

    begin = time.monotonic()
    with ThreadPoolExecutor() as threads:
        alone = threads.submit(run.train, "alone", f"run.steps={STEPS}")
        parts = {
            "kill_and_resume": threads.submit(resumed, alone),
            "fp8": threads.submit(eight_bits),
            "generation": threads.submit(generated, alone),
        }
        while parts:
            ended = [name for name, part in parts.items() if part.done()]
            for name in ended:
                with record.attempt(name):
                    figures = parts.pop(name).result()
                    if figures is None:
                        record.absent(name, "the device has no fp8 units")
                    else:
                        record.put(name, figures | {"seconds": time.monotonic() - begin})
            time.sleep(0.1)
            tests.count()
