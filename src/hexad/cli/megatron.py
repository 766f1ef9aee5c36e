"""``hexad megatron``: run, or print as a configuration, a launch line of Megatron-LM."""

from pathlib import Path
from typing import Any

import click

from hexad.config import ConfigError
from hexad.launching.environment import environment

from .options import answer, json_option, ranks_option

CONFIGURATION = "megatron.yaml"
"""In the run's directory: the translation that runs."""


@click.command("megatron", context_settings={"ignore_unknown_options": True})
@click.option("--print-config", is_flag=True, help="Print the run.yaml and start nothing.")
@click.option(
    "--ignore",
    multiple=True,
    metavar="--FLAG,...",
    help="Flags to ignore with their values, separated by commas; each is reported.",
)
@ranks_option("--nproc", "Local ranks to start")
@json_option
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="-- FLAGS")
def megatron(
    print_config: bool, ignore: tuple[str, ...], nproc: int | None, as_json: bool, flags: tuple[str, ...]
) -> int:
    """Train by the flags of Megatron-LM's pretrain_gpt.py.

    Under torchrun or SLURM this process joins their world; otherwise it starts --nproc local ranks. What has
    no effect is reported on stderr; what Hexad cannot honour is refused.
    """
    from hexad.compat.megatron.arguments import naming_flags
    from hexad.compat.megatron.translate import refuse_forgotten, translate

    here = environment()
    if here.joined and nproc is not None:
        raise ConfigError("--nproc", "cannot be given under torchrun or SLURM, which start the ranks")
    world = here.world if here.joined else nproc
    names = [name for parameter in megatron.params for name in parameter.opts if name.startswith("--")]
    translation = translate(flags, world, ["--help", *names], ignore)
    _check(translation.tree, world)
    if print_config:
        document = {"config": translation.tree, "notes": translation.notes}
        answer(as_json, document, translation.yaml().rstrip("\n"))
        return 0
    if here.rank == 0:
        for note in translation.notes:
            click.echo(f"hexad megatron: {note}", err=True)
    if not here.restart:  # which resumes
        refuse_forgotten(translation.tree["run"]["dir"], translation.tree["checkpoint"]["resume"])
    translation.write_files()
    path = _written(translation.yaml(), Path(translation.tree["run"]["dir"]))

    from .train import train

    assert train.callback is not None
    with naming_flags():
        status: int = train.callback(
            path=str(path), overrides=(), nproc=nproc, dry_run=False, as_json=as_json
        )
    return status


def _check(tree: dict[str, Any], world: int | None) -> None:
    """Refuse what ``hexad train`` would refuse before it opens the data, naming the flags."""
    from hexad.compat.megatron.arguments import naming_flags
    from hexad.model.configuration import load_config
    from hexad.planning import check_config, smallest_world, working_layout

    with naming_flags():
        config = load_config(tree)
        check_config(config, working_layout(config, world or smallest_world(config)))


def _written(text: str, directory: Path) -> Path:
    """The configuration as a file; every rank that a launcher has started writes the same."""
    from hexad.dataset.files import appearing_whole

    path = directory / CONFIGURATION
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with appearing_whole(path) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise ConfigError("--save", f"{path} cannot be written: {error.strerror}") from None
    return path
