"""NeMo 2's recipes of models, read from ``recipes.txt``: what is pretrained or fine-tuned, with which sizes
and in which layout. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

_COLUMNS = "name kind model config hub sequence layout adapters all fast_adapters fast_all".split()
_DEGREES = {"tp": "tensor", "pp": "pipeline", "vp": "virtual", "cp": "context", "n": "nodes"}


@dataclass(frozen=True)
class RecipeLayout:
    """The degrees of a recipe.

    Attributes:
        tensor, pipeline, virtual, context: degrees; None for one stage per pipeline rank.
        sequence: sequence parallel.
        ends: embedding and loss count as layers of a pipeline.
        nodes: hosts.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    sequence: bool = False
    ends: bool = False
    nodes: int = 1


@dataclass(frozen=True)
class RecipeKind:
    """What several recipes have in common.

    Attributes:
        batch, micro: sequences of a step and of a microbatch.
        steps, warmup, validate: steps of a run, of its warm-up, and between validations.
        test_batches: at most.
        min_lr: None: a tenth of the largest rate.
        rank, alpha: of adapters.
    """

    batch: int = 512
    micro: int = 1
    steps: int = 1_168_251
    warmup: int = 2000
    validate: int = 2000
    test_batches: int = 50
    min_lr: float | None = None
    rank: int | None = None
    alpha: int | None = None


KINDS = {
    "gpt": RecipeKind(batch=2048, micro=2),
    "llama": RecipeKind(rank=8, alpha=16),
    "large": RecipeKind(rank=16, alpha=32),
    "other": RecipeKind(),
    "qwen": RecipeKind(
        batch=32, micro=2, steps=300_000, warmup=500, validate=500, test_batches=32, min_lr=3e-5
    ),
}
"""By the name in ``recipes.txt``."""


@dataclass(frozen=True)
class RecipeRow:
    """A line of ``recipes.txt``, whose head describes it.

    Attributes:
        name: of NeMo's module.
        kind: what it has in common with others.
        model, config: classes.
        hub: the model that fine-tuning begins with; None: it is not fine-tuned.
        sequence: tokens of a sample.
        layout: of pretraining.
        tuned: layouts of fine-tuning by (adapters only, ``performance_mode``).
        fast: ``performance_mode`` changes something.
        options: further ones.
    """

    name: str
    kind: RecipeKind
    model: str
    config: str
    hub: str | None
    sequence: int
    layout: RecipeLayout
    tuned: dict[tuple[bool, bool], RecipeLayout]
    fast: bool
    options: dict[str, str] = field(default_factory=dict)


def _layout(text: str) -> RecipeLayout:
    degrees: dict[str, Any] = {}
    for word in text.split("+") if text != "-" else ():
        number = re.fullmatch("([a-z]+)([0-9]+)", word)
        if number:
            degrees[_DEGREES[number[1]]] = int(number[2])
        else:
            degrees[{"sp": "sequence", "ends": "ends"}[word]] = True
    return RecipeLayout(**degrees)


def _row(line: str) -> RecipeRow:
    words = line.split()
    cells = dict(zip(_COLUMNS, words))
    slow = {True: cells["adapters"], False: cells["all"]}
    fast = {True: cells["fast_adapters"], False: cells["fast_all"]}
    tuned = {(adapters, False): _layout(text) for adapters, text in slow.items()}
    for adapters, text in fast.items():
        tuned[adapters, True] = _layout(slow[adapters] if text == "=" else text)
    options = (word.partition("=") for word in words[len(_COLUMNS) :])
    return RecipeRow(
        cells["name"],
        KINDS[cells["kind"]],
        cells["model"],
        cells["config"],
        None if cells["hub"] == "-" else cells["hub"],
        int(cells["sequence"]),
        _layout(cells["layout"]),
        tuned,
        cells["fast_all"] != "=",
        {name: value for name, _, value in options},
    )


def _rows() -> dict[str, RecipeRow]:
    text = files(__package__).joinpath("recipes.txt").read_text(encoding="utf-8")
    rows = (_row(line) for line in text.splitlines() if not line.startswith("#"))
    return {row.name: row for row in rows}


ROWS = _rows()
"""By name."""
