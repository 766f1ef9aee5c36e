"""``hexad config``: a first configuration, presets, the complete one, and whether it would be accepted."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

import click
import yaml
from pydantic import BaseModel

from hexad.config import Config, ConfigError, HexadError, apply_overrides, counted, dump_config, parse_tree
from hexad.config.recipes import cluster_of, recipe_names, recipe_text
from hexad.model.configuration import build_config, load_config
from hexad.model.families import family, preset
from hexad.planning import check_config, planned_layout

from .options import answer, json_option, overrides_argument, print_json, ranks_option

_WIDTH = 100


def commented(tree: Mapping[str, Mapping[str, Any]], head: str) -> str:
    """YAML of some settings (group -> setting -> value), each after its docstring, below a comment."""
    lines = list(_comment(head, ""))
    groups = {field.alias or name: field for name, field in Config.model_fields.items()}
    for name, values in tree.items():
        group = groups[name].annotation
        assert isinstance(group, type) and issubclass(group, BaseModel)
        described = {field.alias or key: field.description for key, field in group.model_fields.items()}
        lines += ["", f"{name}:"]
        for key, value in values.items():
            lines += _comment(described[key] or "", "  ")
            lines.append(f"  {key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in wrap(" ".join(text.replace("``", "").split()), _WIDTH - len(indent) - 2):
        yield f"{indent}# {line}"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").strip()


_HEAD = (
    "Written by 'hexad config init'. A first choice of settings with what they mean; all others have "
    "defaults ('hexad config show FILE')."
)
_SHOWN = {
    "run": ("dir", "steps", "seed", "device"),
    "model": ("layers", "hidden", "heads", "kv_heads", "vocab"),
    "data": ("train", "validation", "tokenizer", "sequence"),
    "batch": ("micro", "global"),
    "parallel": ("tensor", "pipeline", "data", "zero"),
    "precision": ("dtype",),
    "memory": ("recompute",),
    "optimizer": ("lr", "weight_decay", "clip"),
    "lr_schedule": ("kind", "warmup", "min_lr"),
    "checkpoint": ("every", "keep"),
    "log": ("every",),
    "validate": ("every", "batches"),
}
"""What is written, besides settings that were given: what a first run is likely to change."""
_LONGEST = 2048
"""Tokens per sample with a preset that was published for more."""


def first_run(
    name: str | None,
    data: str | None,
    validation: str | None,
    tokenizer: str | None,
    ranks: int | None,
    overrides: tuple[str, ...],
) -> tuple[str, Config]:
    """The text of a commented run.yaml, and its configuration, for the options of ``hexad config init``.

    Raises:
        HexadError: settings that do not fit each other or the ranks.
    """
    settings = _option_settings(name, data, validation, tokenizer)
    apply_overrides(settings, overrides)
    config = build_config(settings)
    layout = planned_layout(config, ranks)
    batch = settings.setdefault("batch", {})
    if "global" not in batch:  # the default, or the next number that the ranks can divide
        per_pass = config.batch.micro * int(layout.data)
        batch["global"] = -(-config.batch.global_ // per_pass) * per_pass
    config = build_config(settings)
    check_config(config, layout)
    return commented(_tree(settings, config), _HEAD), config


def from_recipe(
    name: str,
    path: str,
    data: str | None,
    validation: str | None,
    tokenizer: str | None,
    ranks: int | None,
    overrides: tuple[str, ...],
) -> tuple[str, Config]:
    """The text of a recipe with some settings changed, to be written to ``path``, and its configuration.

    Args:
        ranks: for which it is checked.

    Raises:
        HexadError: an unknown recipe, or settings that do not fit each other or the ranks.
    """
    text = recipe_text(name).replace(f"recipes/{name}.yaml", quote(path))
    head, _, body = text.partition("\n\n")
    tree = parse_tree(body, f"recipe {name}")
    before = {group: dict(values) for group, values in tree.items()}
    given = _option_settings(None, data, validation, tokenizer)
    for group, values in given.items():
        tree.setdefault(group, {}).update(values)
    apply_overrides(tree, overrides)
    config = build_config(tree)
    check_config(config, planned_layout(config, ranks))
    if overrides:
        head += f"\n# Changed: {' '.join(map(quote, overrides))}"
    lines = {line.partition(":")[0]: line for line in body.splitlines()}
    changed = {group: values for group, values in tree.items() if values != before.get(group)}
    lines |= {group: f"{group}: {_flow(values)}" for group, values in changed.items()}
    return f"{head}\n\n" + "".join(f"{line}\n" for line in lines.values()), config


def _option_settings(
    name: str | None, data: str | None, validation: str | None, tokenizer: str | None
) -> dict[str, Any]:
    """The settings that the options stand for, as a raw tree."""
    tree: dict[str, Any] = {"data": {}}
    if name is not None:
        kind = family(preset(name)["family"])  # refuses an unknown name
        tree["model"] = {"preset": name}
        tree["run"] = {"dir": f"runs/{name}"}
        tree["data"]["sequence"] = min(kind.context(name) or _LONGEST, _LONGEST)
    for key, value in (("train", data), ("validation", validation), ("tokenizer", tokenizer)):
        if value is not None:
            tree["data"][key] = value
    if validation is not None:
        tree["validate"] = {"every": 100}
    return tree


def _tree(settings: dict[str, Any], config: Config) -> dict[str, dict[str, Any]]:
    """The settings to write: those that are always shown, and those of the options."""
    shown = _SHOWN if config.model.preset is None else {**_SHOWN, "model": ()}
    tree: dict[str, dict[str, Any]] = {}
    # "auto" stays where the user leaves it open: the model's was completed while loading.
    for group, defaults in Config().model_dump(mode="json", by_alias=True).items():
        values = {**defaults, **settings.get(group, {})}
        keys = {*settings.get(group, {}), *shown.get(group, ())}
        tree[group] = {key: value for key, value in values.items() if key in keys}
    return {group: values for group, values in tree.items() if values}


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet.

    Raises:
        HexadError: it exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise HexadError(f"config init: {path} exists; give another name, or remove it first") from None
    except OSError as error:
        raise ConfigError("config init", f"{path} cannot be written: {error.strerror}") from None


NO_DATA = "note: data.train is null; name the prefix that 'hexad data build' wrote"
_BYTES = "note: data.tokenizer is byte, of 257 ids; model.preset was published with a tokenizer of its own"


@click.group("config")
def config() -> None:
    """Write, show and check configurations; list the models that have a name."""


@config.command("show")
@click.argument("path", metavar="run.yaml")
@overrides_argument
@json_option
def show(path: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the configuration with preset, family and defaults filled in, but not resolved for a world."""
    settings = load_config(path, overrides)
    answer(as_json, settings.model_dump(mode="json", by_alias=True), dump_config(settings).rstrip("\n"))


@config.command("check")
@click.argument("path", metavar="run.yaml")
@overrides_argument
@ranks_option("--world", "Ranks to check for")
@click.option("--all", "complete", is_flag=True, help="Print the resolved configuration too.")
@click.option(
    "--elsewhere",
    is_flag=True,
    help="For another machine: data, packages of log.* and a GPU are not needed here.",
)
@json_option
def check(
    path: str, overrides: tuple[str, ...], world: int | None, complete: bool, elsewhere: bool, as_json: bool
) -> None:
    """Check a configuration and its data as 'hexad train' would before starting, and print its size, tokens
    and memory."""
    from hexad.planning import resolve
    from hexad.planning.advice import advice
    from hexad.planning.machine import check_dispatcher, check_machine, check_without_data
    from hexad.planning.memory import per_pipeline_rank
    from hexad.show.summary import degrees_text, summary, summary_lines
    from hexad.topology.devices import gpu_visible

    settings = load_config(path, overrides)
    layout = planned_layout(settings, world)
    check_config(settings, layout)
    if settings.run.device == "cuda" and not elsewhere and not gpu_visible():
        raise ConfigError(
            "run.device",
            "found cuda, but no GPU is visible; use auto or cpu, or --elsewhere to check for another machine",
        )
    if settings.precision.dtype == "fp8" and not elsewhere:
        from hexad.launching.environment import environment
        from hexad.launching.launch import check_device, pick_device

        check_device(settings, pick_device(settings.run.device, environment()))
    if not elsewhere:
        check_dispatcher(settings)
    sizing = settings.data.train is None
    checked = check_without_data if sizing else check_machine
    vocab = None if elsewhere else checked(settings)
    resolved = resolve(settings, layout, vocab)
    planned, planned_here = settings, resolved
    if settings.run.device == "auto" and not elsewhere and not gpu_visible():  # where it would be trained
        planned = settings.model_copy(update={"run": settings.run.model_copy(update={"device": "cpu"})})
        planned_here = resolve(planned, layout, vocab)
    ranks = per_pipeline_rank(planned_here)
    facts = summary(planned_here, ranks)
    sizes = facts["degrees"]
    tree = {"config": resolved.config.model_dump(mode="json", by_alias=True)} if complete else {}
    notes = [str(change) for change in [advice(planned_here)] if change is not None]
    answer(
        as_json,
        {"ok": True, "world": layout.world, "degrees": sizes, "summary": facts, "notes": notes} | tree,
        f"{path}: valid for {counted(layout.world, 'rank')}{degrees_text(sizes)}",
        *summary_lines(planned, planned_here, ranks),
        *([NO_DATA] if sizing else []),
        *_of_bytes(settings),
        *([] if planned is settings else [_NO_GPU]),
        *_warmup(settings),
        *(f"note: {note}" for note in notes),
        *(["", dump_config(resolved.config).rstrip("\n")] if complete else []),
    )


_NO_GPU = "note: no GPU is visible here: memory and format are those of this CPU (--elsewhere: of a GPU)"


def _warmup(config: Config) -> list[str]:
    """A note where the learning rate never reaches ``optimizer.lr``."""
    warmup, steps = config.lr_schedule.warmup, config.run.steps
    if warmup < steps:
        return []
    return [
        f"note: lr_schedule.warmup {warmup} is not below run.steps {steps}: the rate never reaches its peak"
    ]


def _of_bytes(config: Config) -> list[str]:
    """A note where a published model would be trained on bytes."""
    return [_BYTES] if config.model.preset is not None and config.data.tokenizer == "byte" else []


@config.command("presets")
@json_option
def presets_command(as_json: bool) -> None:
    """List the published models that model.preset names."""
    from rich.console import Console
    from rich.table import Table

    from hexad.planning.costs import preset_table
    from hexad.show.summary import rounded

    rows = preset_table()
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    keys = ("layers", "hidden", "heads", "kv_heads", "experts", "top_k", "vocab", "context")
    sizes = ("layers", "hidden", "heads", "kv heads", "experts", "top k", "vocabulary", "context")
    for name in ("parameters", "active", *sizes):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row[key]:,}" if row[key] is not None else "" for key in keys]
        counts = (rounded(row[key]) for key in ("parameters", "active"))
        table.add_row(row["name"], *counts, *cells)
    Console(highlight=False, width=max(110, get_terminal_size().columns)).print(table)


@config.command("recipes")
@json_option
def recipes_command(as_json: bool) -> None:
    """List the recipes that 'hexad config init --recipe' writes."""
    titles = {name: recipe_text(name).partition("\n")[0].removeprefix("# ") for name in recipe_names()}
    width = max(map(len, titles))
    answer(as_json, titles, *(f"{name:{width}}  {title}" for name, title in titles.items()))


@config.command("from-deepspeed")
@click.argument("path", metavar="ds_config.json")
@overrides_argument
@click.option("--world", type=click.IntRange(1), default=1, show_default=True, help="Data ranks.")
@click.option("--lenient", is_flag=True, help="List misspelt keys as unknown ones instead of refusing them.")
@json_option
def from_deepspeed(path: str, overrides: tuple[str, ...], world: int, lenient: bool, as_json: bool) -> None:
    """Print the run.yaml that is equivalent to a DeepSpeed configuration.

    KEY=VALUE sets keys of DeepSpeed. "auto" is replaced by the default of transformers' Trainer. What is
    different in Hexad, and keys without effect, are listed in comments.
    """
    from hexad.compat.deepspeed.config import read_config, read_json, set_key, with_autos_filled
    from hexad.compat.deepspeed.translate import run_settings

    tree = read_json(path)
    for override in overrides:
        set_key(tree, override)
    tree, filled = with_autos_filled(tree, world)
    settings, differences = run_settings(read_config(tree, world, strict=not lenient), strict=not lenient)
    load_config(settings)
    notes = [*filled, *differences]
    answer(
        as_json,
        {"config": settings, "notes": notes},
        f"# From {path}, for {counted(world, 'data rank')}. Add model, data and run.steps.",
        *(f"# {note}" for note in notes),
        yaml.safe_dump(settings, sort_keys=False, width=110).rstrip("\n"),
    )


@config.command("init")
@click.argument("path", metavar="[run.yaml]", default="run.yaml")
@overrides_argument
@click.option("--preset", metavar="NAME", help="A published model; see 'hexad config presets'.")
@click.option("--recipe", metavar="NAME", help="A run of one on a cluster; see 'hexad config recipes'.")
@click.option("--data", metavar="PREFIX", help="Training data, as 'hexad data build' wrote it.")
@click.option("--validation", metavar="PREFIX", help="Validation data; turns evaluation on.")
@click.option("--tokenizer", metavar="byte|PATH", help="The tokenizer that built the data. [default: byte]")
@ranks_option("--nproc", "Ranks")
@json_option
def init(
    path: str,
    overrides: tuple[str, ...],
    preset: str | None,
    recipe: str | None,
    data: str | None,
    validation: str | None,
    tokenizer: str | None,
    nproc: int | None,
    as_json: bool,
) -> None:
    """Write a first configuration, commented; further settings as in parallel.tensor=2.

    An existing file is never overwritten.
    """
    if "=" in path:
        path, overrides = "run.yaml", (path, *overrides)
    if preset is not None and recipe is not None:
        raise HexadError(f"--recipe: found {recipe} beside --preset {preset}; give one of them")
    if recipe is None:
        text, config = first_run(preset, data, validation, tokenizer, nproc, overrides)
    else:
        nproc = nproc or int(cluster_of(recipe_text(recipe)).rpartition(":")[2])
        text, config = from_recipe(recipe, path, data, validation, tokenizer, nproc, overrides)
    write_new(Path(path), text)
    name = quote(path)
    check, start = f"hexad config check {name}", f"hexad train {name}"
    if nproc:
        check += f" --world {nproc}"
        # More than any host has: one per GPU, on each of several hosts.
        start = (
            f"{start} --nproc {nproc}"
            if nproc <= 16
            else f"{start}, started on {nproc:,} ranks by torchrun or srun"
        )
    answer(
        as_json,
        {"path": path, "config": config.model_dump(mode="json", by_alias=True)},
        f"wrote {path}; next: {check}, then {start}",
        *([NO_DATA] if config.data.train is None else []),
        *_of_bytes(config),
    )
