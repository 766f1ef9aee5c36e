"""``hexad checkpoint``: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from hexad.config import HexadError

from .options import json_option, print_json

if TYPE_CHECKING:
    from hexad.checkpoint.manifest import Manifest


@click.group("checkpoint")
def checkpoint() -> None:
    """Look into checkpoints, check them, bring them from and to Hugging Face's form."""


@checkpoint.command("inspect")
@click.argument("directory", metavar="RUN_OR_CHECKPOINT")
@json_option
def inspect(directory: str, as_json: bool) -> None:
    """Show a checkpoint's step, origin, layout, configuration and tensors."""
    import yaml

    from hexad.checkpoint.directory import find_checkpoint
    from hexad.checkpoint.manifest import read_manifest

    path = find_checkpoint(directory)
    manifest = read_manifest(path)
    if as_json:
        print_json({"path": str(path), **_document(manifest)})
        return
    origin = manifest.origin
    click.echo(f"{path}: step {manifest.step}, {manifest.samples} samples")
    saved_at = datetime.fromtimestamp(origin["saved_at"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    click.echo(f"saved {saved_at} ({origin['reason']}), hexad {origin['hexad']}, torch {origin['torch']}")
    click.echo(f"written by {origin['world']} rank(s){_layout(origin['layout'])}; any layout can load it")
    size = sum(record.size for record in manifest.files.values())
    click.echo(f"{len(manifest.files)} files, {size / 2**20:,.1f} MiB")
    for name, tensor in sorted(manifest.tensors.items()):
        click.echo(f"  {name:44s} {tensor.dtype:10s} {' x '.join(map(str, tensor.shape))}")
    click.echo(yaml.safe_dump(manifest.config, sort_keys=False, width=110), nl=False)


def _document(manifest: Manifest) -> dict[str, Any]:
    return {
        **manifest.progress,
        **manifest.origin,
        "weights_only": manifest.weights_only,
        "config": manifest.config,
        "files": {name: record.size for name, record in manifest.files.items()},
        "tensors": {
            name: {"shape": list(tensor.shape), "dtype": tensor.dtype}
            for name, tensor in manifest.tensors.items()
        },
    }


def _layout(layout: dict[str, Any]) -> str:
    """What of a layout is not the default: `` (tensor 2, zero 1)``."""
    plain = {"virtual_stages": 1, "replicas": 1, "zero": 0, "schedule": "1f1b"}
    told = [f"{name} {value}" for name, value in layout.items() if value != plain.get(name, 1)]
    return f" ({', '.join(told)})" if told else ""


@checkpoint.command("verify")
@click.argument("directory", metavar="RUN_OR_CHECKPOINT")
@json_option
def verify(directory: str, as_json: bool) -> int:
    """Read a whole checkpoint and compare every checksum; of a run, all its checkpoints.

    Exit status 2 if anything is damaged.
    """
    from hexad.checkpoint.directory import CheckpointDirectory, find_checkpoint
    from hexad.checkpoint.manifest import MANIFEST_FILE, DamagedCheckpoint, read_manifest, verify_files

    found = [path for _, path in CheckpointDirectory(directory).complete()] or [find_checkpoint(directory)]
    problems: dict[str, list[str]] = {}
    for path in found:
        try:
            manifest = read_manifest(path)
        except DamagedCheckpoint as error:
            problems[str(path)] = [str(error)]
            if not as_json:
                click.echo(f"{path}: {error}")
            continue
        wrong = [problem for _, problem in verify_files(path, manifest) if problem is not None]
        problems[str(path)] = wrong
        if not as_json:
            size = sum(record.size for record in manifest.files.values()) / 2**20
            good = f"whole: {len(manifest.files)} files and {MANIFEST_FILE}, {size:,.1f} MiB"
            click.echo(f"{path}: {'; '.join(wrong) or good}")
    if as_json:
        print_json({"damaged": any(problems.values()), "problems": problems})
    damaged = [path for path, wrong in problems.items() if wrong]
    if damaged:
        raise HexadError(f"checkpoint verify: damaged: {', '.join(damaged)}")
    return 0
