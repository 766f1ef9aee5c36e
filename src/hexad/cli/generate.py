"""``hexad generate``: continue a prompt with a run's or checkpoint's model."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hexad.config import ConfigError, blaming

from .options import overrides_argument, start_local

if TYPE_CHECKING:
    from hexad.config import Config
    from hexad.dataset.tokenizer import Tokenizer
    from hexad.generate.sampling import Sampling


@click.command("generate")
@click.argument("source", metavar="RUN_OR_CHECKPOINT")
@overrides_argument
@click.option("--prompt", required=True, help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True, help="New tokens at most.")
@click.option(
    "--temperature", type=float, default=0.0, show_default=True, help="0 selects the most likely token."
)
@click.option(
    "--top-k", type=int, default=0, show_default=True, help="Sample the k most likely only; 0: all."
)
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Sample the most likely up to this sum only."
)
@click.option("--seed", type=int, default=1234, show_default=True, help="Seed of sampling.")
@click.option(
    "--nproc",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Ranks: tensor-parallel unless overridden.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def generate(source: str, nproc: int, **options: Any) -> int:
    """Continue a prompt. KEY=VALUE overrides the checkpoint's settings, as in precision.dtype=fp32.

    The model is sharded over --nproc tensor-parallel ranks; with parallel.pipeline=2 over half as many in
    each of two stages.
    """
    from hexad.checkpoint.directory import find_checkpoint
    from hexad.train.environment import environment

    checkpoint = find_checkpoint(source)
    request = {**options, "checkpoint": str(checkpoint), "nproc": nproc}
    _tokenizer(_config(request)), _sampling(request)  # refuse wrong settings before any rank is started
    if nproc > 1 and not environment().joined:
        return start_local("generate", [json.dumps(request)], nproc)
    from .outcome import work

    return work(lambda: generate_here(request))


def _config(request: dict[str, Any]) -> Config:
    from hexad.checkpoint.directory import check_same_model
    from hexad.checkpoint.manifest import read_manifest
    from hexad.config import apply_override
    from hexad.model.configuration import build_config
    from hexad.model.families import family
    from hexad.resolve import resolve
    from hexad.topology.layout import Layout

    path = Path(request["checkpoint"])
    saved = read_manifest(path).config
    tree = deepcopy(saved)
    tree["parallel"] = {"sequence": False}
    tree["batch"] = {"micro": 1, "global": 1}
    if tree.get("precision", {}).get("dtype") == "fp8":
        tree["precision"]["dtype"] = "bf16"  # what the weights are kept in: any device generates
    model = tree.get("model", {})
    model.pop("load", None)  # the weights are the checkpoint's
    if family(model["family"]).rotary:
        model.pop("max_positions", None)  # there is no table of them
    for override in request["overrides"]:
        apply_override(tree, override)
    config = build_config(tree)
    if config.precision.dtype == "fp8":
        raise ConfigError("precision.dtype", "found fp8, which generation does not support; use bf16")
    config = _with_ranks(config, "tensor" in tree["parallel"], request["nproc"])
    check_same_model(path, saved, config)
    return resolve(config, Layout.from_settings(config.parallel, request["nproc"])).config


def _with_ranks(config: Config, tensor_given: bool, nproc: int) -> Config:
    """The configuration with a tensor degree that uses all ranks."""
    parallel = config.parallel
    if not tensor_given and nproc % parallel.pipeline == 0:
        parallel = parallel.model_copy(update={"tensor": nproc // parallel.pipeline})
    if parallel.tensor * parallel.pipeline != nproc:
        raise ConfigError(
            "--nproc",
            f"found {nproc}, expected parallel.tensor {parallel.tensor} x parallel.pipeline "
            f"{parallel.pipeline} = {parallel.tensor * parallel.pipeline}",
        )
    stages = parallel.virtual_stages * parallel.pipeline
    if parallel.schedule != "1f1b" or stages != parallel.pipeline:
        raise ConfigError(
            "parallel.schedule",
            f"found {parallel.schedule}, but generation has one stage per rank; remove it",
        )
    return config.model_copy(update={"parallel": parallel})


def _tokenizer(config: Config) -> Tokenizer:
    """The tokenizer, possibly another than the checkpoint's, but without ids that the model lacks."""
    from hexad.dataset.tokenizer import load_tokenizer

    with blaming("data.tokenizer"):
        tokenizer = load_tokenizer(config.data.tokenizer)
    vocab = int(config.model.vocab)
    if tokenizer.vocab_size > vocab:
        raise ConfigError(
            "data.tokenizer",
            f"found {config.data.tokenizer} with {tokenizer.vocab_size} ids, more than the model's {vocab}; "
            "give the one that the model was trained with",
        )
    return tokenizer


def _sampling(request: dict[str, Any]) -> Sampling:
    from hexad.generate.sampling import Sampling

    return Sampling(request["temperature"], request["top_k"], request["top_p"], request["seed"])


def generate_here(request: dict[str, Any]) -> None:
    """Be one rank of the generation; the first prints the text."""
    from hexad.dataset.tokenizer import bos_ids
    from hexad.generate.generator import generate as generate_tokens
    from hexad.generate.generator import load_model
    from hexad.train.launch import launch

    config = _config(request)
    sampling = _sampling(request)
    with launch(config) as run:
        tokenizer = run.agreed(lambda: _tokenizer(config))
        layers = run.resolved.plan.layers
        model = load_model(config, Path(request["checkpoint"]), run.mesh, layers)
        prompt = [*bos_ids(tokenizer, config.data.bos), *tokenizer.encode(request["prompt"])]
        count, eod = request["tokens"], tokenizer.eod
        new = list(generate_tokens(model, prompt, count, sampling, eod, run.mesh.pipeline))
        if run.mesh.rank == 0:
            text = tokenizer.decode(new)
            if request["as_json"]:
                click.echo(json.dumps({"prompt": request["prompt"], "text": text, "tokens": new}))
            else:
                click.echo(request["prompt"] + text)
