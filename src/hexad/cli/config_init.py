"""``hexad config init``: a first run.yaml, commented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hexad.config import Config, ConfigError, HexadError, apply_override, setting_names
from hexad.config.template import commented
from hexad.model.configuration import build_config
from hexad.model.families import family, preset
from hexad.planning import check_config, planned_layout

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
    """(text of a commented run.yaml, its configuration).

    Args:
        name: of a preset.
        data: prefix of the training data.
        validation: prefix of the validation data; turns evaluation on.
        tokenizer: as for ``data.tokenizer``.
        ranks: to plan for; by default as few as the degrees need.
        overrides: further settings, ``parallel.tensor=2``.

    Raises:
        HexadError: settings that do not fit each other or the ranks.
    """
    given = _given(name, data, validation, tokenizer)
    for override in overrides:
        apply_override(given, override)
    config = build_config(given)
    layout = planned_layout(config, ranks)
    batch = given.setdefault("batch", {})
    if "global" not in batch:  # the default, or the next number that the ranks can divide
        per_pass = config.batch.micro * int(layout.data)
        batch["global"] = -(-config.batch.global_ // per_pass) * per_pass
    config = build_config(given)
    check_config(config, layout)
    shown = _tree(given, config)
    text = commented(shown, _HEAD)
    return text, config


def _given(
    name: str | None, data: str | None, validation: str | None, tokenizer: str | None
) -> dict[str, Any]:
    """What the options stand for, as a raw tree."""
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


def _tree(given: dict[str, Any], config: Config) -> dict[str, dict[str, Any]]:
    """The settings to write: those shown to everybody, and those given."""
    known = set(setting_names())
    dumped = config.model_dump(mode="json", by_alias=True)
    named = config.model.preset is not None
    tree: dict[str, dict[str, Any]] = {}
    for group, values in dumped.items():
        wanted = () if group == "model" and named else _SHOWN.get(group, ())
        mine = given.get(group, {})
        assert all(f"{group}.{key}" in known for key in (*wanted, *mine))
        keys = [key for key in values if key in mine or key in wanted]
        # "auto" stays where the user leaves it open: the model's was completed while loading.
        tree[group] = {key: mine.get(key, _default(group, key)) for key in keys}
    return {group: values for group, values in tree.items() if values}


def _default(group: str, key: str) -> Any:
    return Config().model_dump(mode="json", by_alias=True)[group][key]


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
