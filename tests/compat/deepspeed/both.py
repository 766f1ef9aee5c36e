"""Runs the training script with the ``deepspeed`` package and with its face, each on ranks of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .program import Case, arguments

Results = dict[str, dict[str, Any]]
"""By the case's name, on the first rank."""


def results_of(package: str, cases: Mapping[str, Case], directory: Path, world: int = 2) -> Results:
    """What the script computes with one package."""
    directory.mkdir()
    common = ["-m", "tests.compat.deepspeed.program", package]
    processes = []
    for rank in range(world):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
        }
        rest = [str(rank), str(world), str(directory / "store"), arguments(list(cases.values()))]
        with (directory / f"log.{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *common, *rest, str(directory / "out")],
                    env=variables,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        # Not the exit status: the package may abort after its last word.
        for process in processes:
            process.wait(timeout=240)
    finally:
        for process in processes:
            process.kill()
    output = directory / "out.0"
    assert output.exists(), (directory / "log.0").read_text()[-3000:]
    return dict(zip(cases, json.loads(output.read_text())))
