"""``hexad checkpoint``: what a checkpoint holds."""

from __future__ import annotations

import click

from .options import json_option, print_json


@click.group("checkpoint")
def checkpoint() -> None:
    """Look into checkpoints."""


@checkpoint.command("inspect")
@click.argument("directory", metavar="RUN_OR_CHECKPOINT")
@json_option
def inspect(directory: str, as_json: bool) -> None:
    """Show a checkpoint's step, origin and tensors."""
    from hexad.checkpoint.chunks import stored_tensors
    from hexad.checkpoint.directory import find_checkpoint, read_state

    path = find_checkpoint(directory)
    state = read_state(path)
    tensors = stored_tensors(path)
    if as_json:
        print_json({"path": str(path), **state, "tensors": tensors})
        return
    ranks = state.get("world", "an unknown number of")
    click.echo(f"{path}: step {state['step']}, {state['samples']} samples, written by {ranks} rank(s)")
    for name, tensor in sorted(tensors.items()):
        click.echo(f"  {name:44s} {tensor['dtype']:10s} {' x '.join(map(str, tensor['shape']))}")
