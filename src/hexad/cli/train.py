"""``hexad train``: start local ranks, or join the world this process was started in."""

from __future__ import annotations

import click

from hexad.config import Config, ConfigError, blaming, dump_config
from hexad.model.configuration import load_config
from hexad.resolve import Resolved, check_config, resolve, smallest_world, working_layout
from hexad.train.environment import environment

from .options import degrees, json_option, overrides_argument, print_json, start_local


@click.command("train")
@click.argument("path", metavar="run.yaml")
@overrides_argument
@click.option(
    "--nproc", type=click.IntRange(1), help="Local ranks to start. [default: as few as the degrees allow]"
)
@click.option(
    "--dry-run", is_flag=True, help="Check, print the resolved configuration and layout, start nothing."
)
@json_option
def train(path: str, overrides: tuple[str, ...], nproc: int | None, dry_run: bool, as_json: bool) -> int:
    """Train from run.yaml; settings can be overridden, as in parallel.tensor=2.

    Under torchrun or SLURM this process joins their world; otherwise it starts --nproc local ranks.
    """
    config = load_config(path, overrides)
    joined = environment().joined
    if joined and nproc is not None:
        raise ConfigError("--nproc", "cannot be given under torchrun or SLURM, which start the ranks")
    if joined and not dry_run:
        from .outcome import work

        return work(lambda: train_here([path, *overrides]))
    ranks = environment().world if joined else nproc or smallest_world(config)
    layout = working_layout(config, ranks)
    check_config(config, layout)
    vocab = _check_data(config)
    if dry_run or ranks > 1:  # a single rank resolves it itself
        resolved = resolve(config, layout, vocab)
    if dry_run:
        _print_plan(resolved, as_json)
        return 0
    return start(ranks, [path, *overrides], config.faults.restarts)


def start(ranks: int, arguments: list[str], restarts: int = 0) -> int:
    """Train on local ranks: one in this process; several, or one that may be restarted, through torchrun.
    Returns the exit status."""
    if ranks == 1 and not restarts:
        from .outcome import work

        return work(lambda: train_here(arguments))
    return start_local("train", arguments, ranks, restarts)


def train_here(arguments: list[str]) -> None:
    """Be one rank of the run: ``[run.yaml, key=value...]``."""
    from hexad.train.loop import train as train_run

    path, *overrides = arguments
    train_run(load_config(path, overrides))


def _check_data(config: Config) -> int:
    """Check the data before any process is started; returns the tokenizer's vocabulary size."""
    from hexad.dataset.indexed import IndexedDataset
    from hexad.dataset.tokenizer import load_tokenizer

    with blaming("data.tokenizer"):
        vocab = load_tokenizer(config.data.tokenizer).vocab_size
    if config.data.train is None:
        raise ConfigError("data.train", "found null, expected a .bin/.idx prefix or [[weight, prefix], ...]")
    wanted = {"data.train": config.data.train}
    if config.validate_.every:
        if config.data.validation is None:
            raise ConfigError("data.validation", "found null, but validate.every turns evaluation on")
        wanted["data.validation"] = config.data.validation
    for field, data in wanted.items():
        for _, prefix in [(1.0, data)] if isinstance(data, str) else data:
            with blaming(field):
                IndexedDataset(prefix)
    return vocab


def _print_plan(resolved: Resolved, as_json: bool) -> None:
    from hexad.show.memory import components

    from .show_memory import plans_of

    config, layout, plan = resolved.config, resolved.layout, resolved.plan
    memory, per_rank = plans_of(resolved)
    sizes = degrees(layout)
    if as_json:
        print_json(
            {
                "config": config.model_dump(mode="json", by_alias=True),
                "world": layout.world,
                "degrees": sizes,
                "memory_bytes_per_rank": memory.as_tree(),
                "pipeline": {
                    "schedule": plan.schedule.name,
                    "layers": [[part.start, part.stop] for part in plan.layers],
                    "placement": plan.schedule.placement,
                    "memory_bytes": [other.total for other in per_rank],
                },
            }
        )
        return
    click.echo(dump_config(config))
    shape = " x ".join(f"{axis} {degree}" for axis, degree in sizes.items())
    click.echo(f"# {layout.world} rank(s){': ' if shape else ''}{shape}")
    for name, count in {**components(memory), "total": memory.total}.items():
        click.echo(f"# {name:26s} {count / 2**20:10.1f} MiB per rank{' at most' * (layout.pipeline > 1)}")
    if layout.pipeline > 1:
        for stage, (part, rank) in enumerate(zip(plan.layers, plan.schedule.placement)):
            held = f"layers {part.start} to {part.stop - 1}" if part else "no layer"
            click.echo(f"# stage {stage} on pipeline rank {rank}: {held}")
