"""An engine: how a job becomes a file, and the file a job of the cluster."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from hexad.config import ConfigError, HexadError, alternatives

from .job import Job

ENGINES = ("slurm", "ray", "kubernetes", "jobset", "skypilot")
"""Names of engines; each has a module, or shares one, with an attribute of its name in capitals."""
_MODULES = {"jobset": "kubernetes"}
OPTIONAL = {
    "setup": "--setup",
    "sweep": "--sweep",
    "cpus": "--cpus",
    "image": "--image",
    "volumes": "--volume",
    "gpu": "--gpu",
}
"""Attributes of a job that not every engine uses, with their options."""


@dataclass(frozen=True)
class Submitted:
    """A job of the cluster.

    Attributes:
        identifier: the engine's name of the job.
        log: where its output is, in words or as a path.
        cancel: the command that cancels it.
        follow: prints the log until the job has ended, and returns the exit status; None: not offered.
    """

    identifier: str
    log: str
    cancel: str
    follow: Callable[[], int] | None


@dataclass(frozen=True)
class Engine:
    """What runs jobs on a cluster.

    Attributes:
        name: as of ``--engine``.
        file: the name of the file that describes a job.
        text: the file's content for a job.
        submit: submits the file at a path.
        uses: attributes of ``OPTIONAL`` that it knows; ``least_nodes``: a range of nodes.
        requires: raises an error where the job lacks something else.
    """

    name: str
    file: str
    text: Callable[[Job], str]
    submit: Callable[[Job, Path], Submitted]
    uses: frozenset[str]
    requires: Callable[[Job], None] | None = None

    def check(self, job: Job) -> None:
        """Refuse options that the engine does not use.

        Raises:
            ConfigError: names the option, and the engines that do.
        """
        if job.least_nodes < job.nodes and "least_nodes" not in self.uses:
            users = [name for name in ENGINES if "least_nodes" in engine(name).uses]
            problem = f"found a range with --engine {self.name}; use a number, or {alternatives(users)}"
            raise ConfigError("--nodes", problem)
        for attribute, option in OPTIONAL.items():
            if getattr(job, attribute) and attribute not in self.uses:
                users = [name for name in ENGINES if attribute in engine(name).uses]
                problem = f"is not used by --engine {self.name}, but by {', '.join(users)}; leave it out"
                raise ConfigError(option, problem)
        if self.requires is not None:
            self.requires(job)


def engine(name: str) -> Engine:
    """An engine by its name."""
    module = import_module(f"hexad.submit.{_MODULES.get(name, name)}")
    chosen: Engine = getattr(module, name.upper())
    return chosen


def run_command(*command: str) -> str:
    """Standard output of an engine's command.

    Raises:
        HexadError: it is not installed, or fails; with its message.
    """
    if shutil.which(command[0]) is None:
        raise HexadError(
            f"not found: {command[0]}; run this where the engine's commands are installed, or with --print"
        )
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        text = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise HexadError(f"{command[0]}: {text}")
    return done.stdout


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such; no references between equal parts."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump_yaml(*documents: dict[str, Any]) -> str:
    """One or more documents as a file that people read."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110)
