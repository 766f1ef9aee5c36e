"""A job: what every engine is asked to run, on how many nodes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hexad.config import Config, ConfigError, did_you_mean, setting_names
from hexad.model.configuration import load_config
from hexad.planning import check_config, smallest_world, working_layout

GPUS_OF_A_NODE = 8
"""Ranks of a node where the user does not say."""
_SEPARATORS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class Job:
    """A run of ``hexad train`` on one or more nodes.

    Attributes:
        name: lower-case letters, digits and hyphens, as Kubernetes requires.
        config: path of the run's configuration.
        overrides: settings in place of the file's, ``KEY=VALUE``.
        run_dir: the run's directory, which all nodes share.
        directory: working directory of the ranks: relative paths of the settings begin here.
        nodes, ranks: nodes, and ranks of each.
        least_nodes: nodes with which the run continues where others are lost; fewer than ``nodes`` for a
            range of nodes.
        gpus: whether every rank has a GPU.
        cpus: cores of a rank; None: as the engine decides.
        setup: shell lines before the training, such as those that activate an environment.
        image: container image.
        volumes: mount path by name of a volume that all nodes share.
        gpu: kind of GPU, in the engine's words.
        options: the engine's own settings by name; an empty value is a flag.
        sweep: settings of each element of an array of jobs; empty: one job.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    run_dir: Path
    directory: Path
    nodes: int = 1
    ranks: int = 1
    least_nodes: int = 1
    gpus: bool = False
    cpus: int | None = None
    setup: tuple[str, ...] = ()
    image: str | None = None
    volumes: Mapping[str, str] = field(default_factory=dict)
    gpu: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    sweep: tuple[tuple[str, ...], ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The command of a rank."""
        return ("hexad", "train", self.config, *self.overrides)


def make_job(
    path: str,
    overrides: Sequence[str],
    nodes: tuple[int, int] | None,
    ranks: int | None,
    sweep: Sequence[str] = (),
    name: str | None = None,
) -> Job:
    """A job for a configuration, checked as ``hexad train`` would check it on that many ranks.

    Args:
        path, overrides: as of ``hexad train``.
        nodes: the fewest and the most nodes; None: as few as the degrees allow.
        ranks: ranks of a node; None: 8 GPUs.
        sweep: ``KEY=VALUE,VALUE,...``; several are combined, each value with each.
        name: the job's; None: that of ``run.dir``.

    Raises:
        HexadError: the ranks do not fit the layout, or a setting is refused.
    """
    elements = sweep_elements(sweep)
    config = load_config(path, overrides)
    least, most, ranks = _numbers(config, nodes, ranks)
    for element, count in itertools.product(elements or ((),), {least, most}):
        varied = load_config(path, (*overrides, *element))
        check_config(varied, working_layout(varied, count * ranks))
    run_dir = Path(config.run.dir)
    elements = tuple((*element, f"run.dir={run_dir / _label(element)}") for element in elements)
    return Job(
        name=_SEPARATORS.sub("-", (name or run_dir.name).lower()).strip("-") or "hexad",
        config=path,
        overrides=tuple(overrides),
        run_dir=run_dir.absolute(),
        directory=Path.cwd(),
        nodes=most,
        least_nodes=least,
        ranks=ranks,
        gpus=config.run.device != "cpu",
        sweep=elements,
    )


def _numbers(config: Config, nodes: tuple[int, int] | None, ranks: int | None) -> tuple[int, int, int]:
    """The fewest and the most nodes, and ranks of each."""
    world = smallest_world(config)
    on_cpu = config.run.device == "cpu"
    if nodes is not None:
        return *nodes, ranks or (max(1, world // nodes[0]) if on_cpu else GPUS_OF_A_NODE)
    ranks = ranks or (world if on_cpu else min(world, GPUS_OF_A_NODE))
    if world % ranks:
        problem = f"found {ranks}, which does not divide the {world} ranks of the layout; set --nodes"
        raise ConfigError("--per-node", problem)
    return world // ranks, world // ranks, ranks


def sweep_elements(sweep: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The settings of every element, ``KEY=VALUE`` each.

    Raises:
        ConfigError: one is no setting, or has no values.
    """
    choices = []
    for text in sweep:
        key, equals, values = text.partition("=")
        if not equals or not values or key not in setting_names():
            hint = did_you_mean(key, setting_names()) if equals else ""
            problem = (
                f"found {text!r}, expected a setting and its values, such as optimizer.lr=1e-3,3e-4{hint}"
            )
            raise ConfigError("--sweep", problem)
        if key == "run.dir":
            raise ConfigError("--sweep", "found run.dir, which each job gets of its own; leave it out")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return tuple(itertools.product(*choices)) if choices else ()


def _label(element: Sequence[str]) -> str:
    """A directory's name for an element of a sweep."""
    pairs = (text.partition("=") for text in element)
    return ",".join(f"{key.rpartition('.')[2]}={value.replace('/', '-')}" for key, _, value in pairs)


def option_pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """``KEY=VALUE`` or ``KEY`` as a mapping.

    Raises:
        ConfigError: a key is empty.
    """
    pairs = {}
    for text in texts:
        key, _, value = text.partition("=")
        if not key:
            raise ConfigError(option, f"found {text!r}, expected KEY=VALUE")
        pairs[key] = value
    return pairs
