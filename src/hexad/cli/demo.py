"""``hexad demo``: real text to a trained model on this machine, with four kinds of parallelism."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click
import yaml

from hexad.config import ConfigError, HexadError, apply_overrides
from hexad.model.configuration import build_config, load_config
from hexad.parallel.pipeline.simulate import TIMELINE

from .options import overrides_argument, start_local

if TYPE_CHECKING:
    from hexad.dataset.build.corpus import DemoData

_RANKS = 8
_LAYOUT = "data 2 x tensor 2 x pipeline 2"
_PROMPT = "def read_lines(path):\n    "


def _settings(directory: Path, data: DemoData) -> dict[str, Any]:
    """Settings of the run, for two CPU cores: less than three minutes of training."""
    return {
        "run": {"dir": str(directory), "steps": 150, "device": "cpu"},
        "model": {
            "layers": 4, "hidden": 192, "heads": 6, "kv_heads": 2, "ffn_hidden": 512, "tied_embeddings": True
        },
        "data": {
            "train": data.train, "validation": data.validation, "tokenizer": data.tokenizer, "sequence": 128
        },
        "batch": {"micro": 2, "global": 16},
        "parallel": {"data": 2, "tensor": 2, "sequence": True, "pipeline": 2, "schedule": "zb_h1"},
        "precision": {"dtype": "fp32"},
        "optimizer": {"lr": 3.0e-3},
        "lr_schedule": {"kind": "cosine", "warmup": 20, "min_lr": 3.0e-4},
        "checkpoint": {"every": 75, "keep": 2},
        "validate": {"every": 50, "batches": 4},
        "log": {"timeline": 10},
    }  # fmt: skip


def _write_run(directory: Path, data: DemoData, overrides: tuple[str, ...]) -> Path:
    """Write ``run.yaml``: the settings, overrides included, and how to continue."""
    path = directory / "run.yaml"
    tree = _settings(directory, data)
    apply_overrides(tree, overrides)
    config = build_config(tree)
    steps, schedule = config.run.steps, config.lr_schedule
    on = f"run.steps={2 * steps}"
    if schedule.kind in ("linear", "cosine") and schedule.decay_steps == "auto" and steps > schedule.warmup:
        # With auto, the end of the decay would move, and the learning rate would rise again.
        on += f" lr_schedule.decay_steps={steps}"
    text = f"# Written by 'hexad demo'. To continue training:\n#   hexad train {quote(str(path))} {on}\n"
    try:
        path.write_text(text + yaml.safe_dump(tree, sort_keys=False, width=110), encoding="utf-8")
    except OSError as error:
        raise HexadError(f"{path}: cannot be written: {error.strerror}") from None
    return path


@click.command("demo")
@overrides_argument
@click.option(
    "--dir", "directory", default="runs/demo", show_default=True, help="Where everything is written."
)
def demo(overrides: tuple[str, ...], directory: str) -> int:
    """Train a small model on Python's standard library, on 8 local ranks (data 2 x tensor 2 x pipeline 2).

    Builds a tokenizer and a dataset, trains, draws the loss curve and the pipeline's timeline, and generates
    a sample. KEY=VALUE overrides settings, as in run.steps=50.
    """
    from hexad.dataset.build.corpus import build_demo_data

    if not directory.strip():
        raise HexadError("--dir: found an empty name, expected a directory such as runs/demo")
    run = load_config(None, overrides).run  # refuse wrong settings first
    if "dir" in run.model_fields_set:
        raise ConfigError("run.dir", f"found {run.dir}, but everything is written to --dir {directory}")
    where = Path(directory)
    click.echo("1. tokenizer and dataset from Python's standard library", err=True)
    data = build_demo_data(where / "data")
    click.echo(
        f"   {data.train_tokens:,} training tokens, vocabulary {data.vocab}, "
        f"unigram entropy {data.unigram_entropy:.3f} nats per token",
        err=True,
    )
    run_file = _write_run(where, data, overrides)
    click.echo(f"2. training on {_RANKS} ranks: {_LAYOUT}, sequence parallel", err=True)
    request = {"path": str(run_file), "overrides": (), "as_json": False}
    return start_local("train", request, _RANKS, run_dir=str(where)) or _report(where, data)


def _report(where: Path, data: DemoData) -> int:
    """Show loss curve, a sample, communication and next commands; returns the sample's exit status."""
    from hexad.show.figure import save_figure
    from hexad.show.run import read_metrics, readable_bytes, run_figure

    from .generate import generate

    metrics = read_metrics(where)
    for ending in ("svg", "png"):
        save_figure(run_figure(metrics, {"unigram entropy": data.unigram_entropy}), where / f"loss.{ending}")
    last, validation = metrics.lines[-1], metrics.series("validation_loss")[1]
    click.echo("3. a sample of generated code", err=True)
    sys.stderr.flush()
    click.echo("-" * 72)
    options = ["--prompt", _PROMPT, "--tokens", "80", "--temperature", "0.7", "--top-p", "0.9"]
    status: int = generate.main([str(where), *options], prog_name="hexad generate", standalone_mode=False)
    if status:
        return status
    click.echo("-" * 72)
    held_out = f", validation {validation[-1]:.3f}" if validation else ""
    entropy = f"unigram entropy {data.unigram_entropy:.3f}"
    click.echo(f"loss {last['loss']:.3f} nats per token{held_out}; {entropy}")
    sent = {axis: count for axis, count in last["comm_bytes"].items() if count}
    click.echo("sent per rank and step: " + ", ".join(f"{a} {readable_bytes(n)}" for a, n in sent.items()))
    click.echo(f"loss curve: {where / 'loss.svg'}")
    _draw_timeline(where)
    # Inside 'make demo' the command is not on the user's path.
    hexad = "hexad" if shutil.which("hexad") else os.path.relpath(Path(sys.executable).with_name("hexad"))
    click.echo(f"next: {hexad} show run {where}")
    click.echo(f'      {hexad} generate {where} --prompt "import os" --temperature 0.8')
    return 0


def _draw_timeline(where: Path) -> None:
    """Draw one step of the pipeline as planned and as measured, unless the run was too short."""
    from hexad.show.figure import save_figure
    from hexad.show.schedule import read_timeline, schedule_figure

    timeline = where / TIMELINE
    if not timeline.exists():
        return
    step, charts = read_timeline(timeline)
    for ending in (".svg", ".png"):
        save_figure(schedule_figure(charts, f", step {step}"), timeline.with_suffix(ending))
    idle = ", ".join(f"{chart.label} {chart.timeline.bubble:.0%}" for chart in charts)
    click.echo(f"pipeline: {timeline.with_suffix('.svg')}, idle: {idle}")
