"""``hexad checkpoint``: inspect, verify, import, export and upcycle."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hexad.config import HexadError, counted, one_line

from .options import answer, json_option, overrides_argument, print_json

if TYPE_CHECKING:
    from hexad.checkpoint.manifest import Manifest
    from hexad.compat.facade.imported import ImportResult
    from hexad.config import Config

_SYSTEMS = {"ds": "deepspeed", "megatron": "megatron"}
"""Prefix of ``--from`` -> package in :mod:`hexad.compat`."""
_NO_TOKENIZER = "note: no tokenizer found beside the weights; put one into {}"


@click.group("checkpoint")
def checkpoint() -> None:
    """Inspect and verify checkpoints; import models and others' checkpoints, export and upcycle models."""


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
    click.echo(f"{path}: step {manifest.step}, {counted(manifest.samples, 'sample')}")
    saved_at = datetime.fromtimestamp(origin["saved_at"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    click.echo(f"saved {saved_at} ({origin['reason']}), hexad {origin['hexad']}, torch {origin['torch']}")
    click.echo(
        f"written by {counted(origin['world'], 'rank')}{_layout(origin['layout'])}; any layout can load it"
    )
    size = sum(record.size for record in manifest.files.values())
    click.echo(f"{counted(len(manifest.files), 'file')}, {size / 2**20:,.1f} MiB")
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
    """The part of a layout that is not the default: `` (tensor 2, zero 1)``."""
    plain = {"virtual_stages": 1, "replicas": 1, "zero": 0, "schedule": "1f1b"}
    other = [f"{name} {value}" for name, value in layout.items() if value != plain.get(name, 1)]
    return f" ({', '.join(other)})" if other else ""


@checkpoint.command("verify")
@click.argument("directory", metavar="RUN_OR_CHECKPOINT")
@json_option
def verify(directory: str, as_json: bool) -> int:
    """Read a complete checkpoint and compare every checksum; of a run, all its checkpoints.

    Exit status 2 if anything is damaged.
    """
    from hexad.checkpoint.directory import CheckpointDirectory, find_checkpoint
    from hexad.checkpoint.manifest import MANIFEST_FILE, read_manifest, verify_files

    paths = [path for _, path in CheckpointDirectory(directory).complete()] or [find_checkpoint(directory)]
    problems: dict[str, list[str]] = {}
    for path in paths:
        intact = ""
        try:
            manifest = read_manifest(path)
            problems[str(path)] = verify_files(path, manifest)
            size = sum(record.size for record in manifest.files.values()) / 2**20
            intact = f"{path}: intact: {len(manifest.files)} files and {MANIFEST_FILE}, {size:,.1f} MiB"
        except HexadError as error:
            problems[str(path)] = [str(error)]
        if not as_json:
            click.echo("\n".join(problems[str(path)]) or intact)
    if as_json:
        print_json({"damaged": any(problems.values()), "problems": problems})
    damaged = [path for path, wrong in problems.items() if wrong]
    if damaged:
        raise HexadError(f"checkpoint verify: damaged: {', '.join(damaged)}")
    return 0


@checkpoint.command("import")
@click.option(
    "--from",
    "source",
    metavar="HF_DIR|hf:ORG/NAME|ds:DIR|megatron:DIR",
    required=True,
    help="A Hugging Face model's directory or name, or that of a DeepSpeed or Megatron-Core (torch_dist) "
    "checkpoint.",
)
@click.option("--to", "target", metavar="DIR", required=True, help="The checkpoint to write.")
@click.option(
    "--model",
    metavar="HF_DIR|run.yaml",
    help="What a checkpoint's model is. ds: a Hugging Face directory, or none: names stay the module's. "
    "megatron: either.",
)
@click.option("--weights-only", is_flag=True, help="Leave out a checkpoint's optimizer state and progress.")
@json_option
def import_command(source: str, target: str, model: str | None, weights_only: bool, as_json: bool) -> None:
    """Convert a Hugging Face model (weights only, step 0), or a checkpoint of DeepSpeed or Megatron-Core
    (weights, optimizer state and progress), to a checkpoint."""
    kind, _, directory = source.rpartition(":")
    if kind in _SYSTEMS:
        if not directory:
            raise HexadError(f"--from: found {source} without a directory; write {kind}:DIR")
        _import_checkpoint(kind, Path(directory), Path(target), model, weights_only, as_json)
        return
    for option, value in {"--model": model, "--weights-only": weights_only}.items():
        if value:
            raise HexadError(
                f"{option}: found with --from {source}; it is for --from ds:DIR and --from megatron:DIR"
            )
    if kind not in ("", "hf") and not Path(source).exists():
        raise HexadError(
            f"--from: found the prefix {kind!r} in {source}; use ds:DIR, megatron:DIR, or a Hugging Face "
            "model's directory without a prefix"
        )
    from hexad.checkpoint.hugging_face.importing import import_model
    from hexad.config.hub import PREFIX, local

    imported = import_model(Path(local(source).removeprefix(PREFIX)), Path(target), _resolved)
    config, where = imported.config, Path(target).resolve()
    family, dtype, tokenizer = config.model.family, config.precision.dtype, config.data.tokenizer
    text = f"{where}: {family}, {imported.parameters:,} parameters in {dtype}, tokenizer {tokenizer}"
    document = {"path": str(where), "family": family, "parameters": imported.parameters}
    notes = [] if imported.tokenizer else [_NO_TOKENIZER.format(tokenizer)]
    if imported.left_out:
        tensors = counted(imported.left_out, "tensor")
        notes.append(f"note: {tensors} of layers that predict further tokens left out")
    document |= {"dtype": dtype, "tokenizer": tokenizer, "left_out": imported.left_out}
    answer(as_json, document, text, *notes)


def _import_checkpoint(
    kind: str, source: Path, target: Path, model: str | None, weights_only: bool, as_json: bool
) -> None:
    """Import a checkpoint of another system."""
    system = import_module(f"hexad.compat.{_SYSTEMS[kind]}.import_checkpoint")
    model_path = None if model is None else Path(model)
    try:
        imported: ImportResult = system.import_checkpoint(source, target, _resolved, model_path, weights_only)
    except HexadError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise HexadError(f"{source}: its files do not hold what they should: {problem}") from error
    config, where = imported.config, target.resolve()
    family = "module" if config is None else config.model.family
    facts = {name: getattr(imported, name) for name in ("step", "samples", "parameters", "optimizer")}
    state = "with optimizer state" if imported.optimizer else "weights only"
    text = f"{where}: {family}, {imported.parameters:,} values, {state}, step {imported.step}, "
    missing = config is not None and not imported.tokenizer and config.data.tokenizer != "byte"
    note = (_NO_TOKENIZER.format(config.data.tokenizer),) if config is not None and missing else ()
    document = {"path": str(where), "family": family, **facts}
    answer(as_json, document, f"{text}{imported.samples:,} samples", *note)


def _resolved(config: Config) -> Config:
    """A configuration with a number for every ``auto``; one that this version cannot run is refused."""
    from hexad.planning import resolve
    from hexad.topology.layout import Layout

    return resolve(config, Layout(world=1)).config


@checkpoint.command("export")
@click.option("--from", "source", metavar="RUN_OR_CHECKPOINT", required=True, help="What to export.")
@click.option("--to", "target", metavar="HF_DIR", required=True, help="The directory to write.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "fp64", "fp32", "bf16", "fp16"]),
    default="auto",
    show_default=True,
    help="Format of the weights; auto: precision.dtype, or an imported model's own.",
)
@click.option("--shard-size", default="5GB", show_default=True, help="Largest weights' file.")
@click.option("--adapter", is_flag=True, help="Of a LoRA run: write the adapters alone, in PEFT's format.")
@click.option(
    "--base", metavar="hf:DIR|RUN", help="Of a LoRA run: where the base model is, if it has been moved."
)
@json_option
def export_command(
    source: str, target: str, dtype: str, shard_size: str, adapter: bool, base: str | None, as_json: bool
) -> None:
    """Write a Hugging Face model that transformers can load.

    Adapters (model.lora) are merged with the model that they were trained on, unless --adapter is given.
    """
    from hexad.checkpoint.directory import find_checkpoint
    from hexad.checkpoint.hugging_face.exporting import export_adapters, export_checkpoint
    from hexad.checkpoint.hugging_face.files import parse_size

    if adapter and base is not None:
        raise HexadError("--base: found it with --adapter, which writes the adapters alone; leave out one")
    limit, path, to = parse_size(shard_size, "--shard-size"), find_checkpoint(source), Path(target)
    if adapter:
        exported = export_adapters(path, to, dtype)
    else:
        exported = export_checkpoint(path, to, dtype, limit, base)
    where = Path(target).resolve()
    answer(
        as_json,
        {"path": str(where), "checkpoint": str(path), **asdict(exported)},
        f"{where}: {exported.family}, {exported.parameters:,} parameters in {exported.dtype}, "
        f"{counted(len(exported.files), 'file')} of weights, from {path}",
        *(f"note: {note}" for note in exported.notes),
    )


@checkpoint.command("upcycle")
@click.option("--from", "source", metavar="RUN_OR_CHECKPOINT|hf:DIR", required=True, help="The dense model.")
@click.option("--to", "target", metavar="DIR", required=True, help="The checkpoint to write.")
@overrides_argument
@json_option
def upcycle_command(source: str, target: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Write a checkpoint (weights only, step 0) of a model whose experts begin as copies of a dense model's
    feed-forward layers (arXiv 2212.05055).

    KEY=VALUE are settings of model.moe, such as model.moe.experts=8, and run.seed, from which the routers are
    drawn.
    """
    from hexad.checkpoint.upcycling import upcycle
    from hexad.planning.costs import active_count
    from hexad.planning.saved_model import find_model

    result = upcycle(find_model(source), Path(target), overrides, _resolved)
    model, where = result.config.model, Path(target).resolve()
    assert model.moe is not None
    active = active_count(model)
    sizes = f"{result.parameters:,} parameters, {active:,} per token"
    text = f"{where}: {model.family} with {model.moe.experts} experts, top {model.moe.top_k}, {sizes}"
    note = "note: computes another function: weights of experts do not add up to 1, or tokens skip experts"
    document = {"path": str(where), "family": model.family, "parameters": result.parameters}
    document |= {"active": active, "same_function": result.same}
    answer(as_json, document, text, *([] if result.same else [note]))
