"""``hexad plan --calibrate``: a hardware file of this host's CPU."""

from __future__ import annotations

import json
import os
import platform
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from hexad.config import HexadError

from .options import start_local

DEFAULT = Path("calibrated.yaml")
_MOST = 8
"""Ranks at most."""


def calibrate(output: Path | None, as_json: bool) -> int:
    """Measure this host with a rank for each of its processors, and write the hardware file; returns the exit
    status."""
    from hexad.calibration.figures import Figures
    from hexad.calibration.fit import errors, fitted
    from hexad.topology.hardware import write_hardware

    path = output or DEFAULT
    if path.exists() or path.suffix not in (".yaml", ".yml"):
        why = "exists" if path.exists() else "is no name of a hardware file (*.yaml)"
        raise HexadError(f"--output: found {path}, which {why}; give another path")
    ranks = min(_MOST, len(os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="hexad-calibrate-") as directory:
        status = start_local("calibrate", {"directory": directory, "ranks": ranks}, ranks)
        if status:
            return status
        trees = [json.loads(file.read_text()) for file in Path(directory).glob("*.json")]
    figures = Figures.joined([Figures.from_tree(tree) for tree in trees])
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    hardware = fitted(figures, _processor(), memory, ranks)
    write_hardware(path, hardware)
    fits = errors(hardware, figures)
    if as_json:
        from .options import print_json

        print_json({"path": str(path), "ranks": ranks, "errors": fits, "figures": figures.as_tree()})
    else:
        words = ", ".join(f"{name} {error:.0%}" for name, error in fits.items())
        click.echo(f"{path}: {ranks} ranks of one thread; median errors: {words}")
        click.echo(f"next: hexad plan RUN.YAML --cluster {path}:{ranks}")
    return 0


def calibrate_here(request: dict[str, Any]) -> None:
    """What one rank measures, in a file of its own."""
    from hexad.calibration.figures import MODELS, calibration_config
    from hexad.calibration.measure import measure
    from hexad.launching.launch import launch

    ranks = request["ranks"]
    config = calibration_config(MODELS[0], ranks)
    with launch(config) as run:
        figures = measure(run.mesh.world if ranks > 1 else None)
        path = Path(request["directory"]) / f"{run.mesh.rank}.json"
        path.write_text(json.dumps(figures.as_tree()), encoding="utf-8")


def _processor() -> str:
    """The name of this host's processor."""
    with suppress(OSError):
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if names:
            return str(names[0])
    return platform.machine()
