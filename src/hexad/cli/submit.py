"""``hexad submit``: a training run as a job of SLURM, Ray, Kubernetes or SkyPilot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hexad.submit import ENGINES, Job, Submitted, engine, make_job, option_pairs

from .options import json_option, overrides_argument, print_json


class NodeRange(click.ParamType):
    """``N`` or ``MIN:MAX``, as of torchrun's ``--nnodes``."""

    name = "N|MIN:MAX"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        least, _, most = str(value).partition(":")
        if (
            not least.isdecimal()
            or not (most or least).isdecimal()
            or not 0 < int(least) <= int(most or least)
        ):
            self.fail(f"found {value!r}, expected a number such as 4, or a range such as 2:4", param, ctx)
        return int(least), int(most or least)


@click.command("submit")
@click.argument("path", metavar="run.yaml")
@overrides_argument
@click.option(
    "--engine", "name", required=True, type=click.Choice(ENGINES), help="What runs the cluster's jobs."
)
@click.option("--print", "only_print", is_flag=True, help="Print the job's file; submit nothing.")
@click.option("--detach", is_flag=True, help="Do not follow the log.")
@click.option(
    "--nodes",
    type=NodeRange(),
    help="Nodes, or MIN:MAX where the engine may take fewer. [default: as few as the degrees allow]",
)
@click.option("--per-node", type=click.IntRange(1), help="Ranks of a node: its GPUs. [default: 8 GPUs]")
@click.option("--cpus", type=click.IntRange(1), help="Cores of a rank. [default: as the engine decides]")
@click.option("--name", "job_name", help="The job's name. [default: that of run.dir]")
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help="A shell line before the training, such as 'source .venv/bin/activate'. May be repeated.",
)
@click.option("--image", help="Container image with Hexad.")
@click.option(
    "--volume",
    multiple=True,
    metavar="NAME=PATH",
    help="A volume that all nodes share, and where it is mounted. May be repeated.",
)
@click.option("--gpu", metavar="NAME", help="Kind of GPU, in the engine's words, such as H100.")
@click.option(
    "--sweep",
    multiple=True,
    metavar="KEY=VALUE,VALUE",
    help="One job for each value of a setting, in directories of their own. May be repeated.",
)
@click.option(
    "--option",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the engine itself, such as partition=gpu of sbatch. May be repeated.",
)
@json_option
def submit(
    path: str,
    overrides: tuple[str, ...],
    name: str,
    only_print: bool,
    detach: bool,
    nodes: tuple[int, int] | None,
    per_node: int | None,
    cpus: int | None,
    job_name: str | None,
    setup: tuple[str, ...],
    image: str | None,
    volume: tuple[str, ...],
    gpu: str | None,
    sweep: tuple[str, ...],
    option: tuple[str, ...],
    as_json: bool,
) -> int:
    """Submit a training run as a job of a cluster, and follow its log.

    The settings are checked first, as hexad train checks them on as many ranks. --print shows the job's file:
    an sbatch script, a Python program for Ray, a manifest for Kubernetes or a task of SkyPilot.
    """
    job = make_job(path, overrides, nodes, per_node, sweep, job_name)
    job = replace(
        job,
        cpus=cpus,
        setup=setup,
        image=image,
        gpu=gpu,
        volumes=option_pairs(volume, "--volume"),
        options=option_pairs(option, "--option"),
    )
    chosen = engine(name)
    chosen.check(job)
    text = chosen.text(job)
    if only_print:
        _print(job, name, text, as_json)
        return 0
    file = _write(job, chosen.file, text)
    submitted = chosen.submit(job, file)
    if as_json:
        print_json({"engine": name, "job": submitted.identifier, "file": str(file), "log": submitted.log})
        return 0
    click.echo(f"submitted job {submitted.identifier}; log {submitted.log}", err=True)
    return 0 if detach or submitted.follow is None else _follow(submitted)


def _print(job: Job, name: str, text: str, as_json: bool) -> None:
    if as_json:
        print_json({"engine": name, "nodes": job.nodes, "ranks_per_node": job.ranks, "text": text})
    else:
        click.echo(text, nl=False)


def _write(job: Job, name: str, text: str) -> Path:
    """The job's file, kept beside what the run writes."""
    path = job.run_dir / "submit" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _follow(submitted: Submitted) -> int:
    """The job's exit status. Ctrl-C stops following, not the job."""
    assert submitted.follow is not None
    click.echo(f"Ctrl-C stops following, not the job; '{submitted.cancel}' cancels it", err=True)
    try:
        return submitted.follow()
    except KeyboardInterrupt:
        click.echo(f"job {submitted.identifier} continues", err=True)
        return 0
