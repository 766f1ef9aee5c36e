"""The page of recipes, from the recipes' files, and what the planner predicts for each of them."""

import re
from pathlib import Path
from typing import Any

from hexad.config import read_tree
from hexad.config.recipes import cluster_of
from hexad.planning.plan import OWN_LAYOUT, Plan, explained, plan
from hexad.planning.search import Candidate

RECIPES_PAGE = Path(__file__).parent / "recipes.md"
FILES = sorted((Path(__file__).parents[1] / "src/hexad/recipes").glob("*.yaml"))
PREDICTED = re.compile(r"^# [Pp]redicted.*$", re.MULTILINE)
_FIGURES = re.compile(
    r"([\d,.]+) s a step, ([\d,]+) tokens/s per GPU, MFU ([\d.]+), ([\d.]+) of ([\d.]+) GiB"
)

_HEAD = """\
<!-- Written by 'make docs' from src/hexad/recipes. Do not edit. -->

# Recipes

Run files of published models on stated clusters. They are part of the package:

```bash
hexad config recipes                                   # lists them
hexad config init run.yaml --recipe llama3.1-8b --data data/train --tokenizer path/to/tokenizer
hexad config check run.yaml --world 64 --elsewhere     # without the data and the GPUs
hexad plan run.yaml --cluster h100:64 --explain file   # where its time and memory go
hexad submit --engine slurm run.yaml --nodes 8         # on a cluster
```

In a checkout the files are in `recipes/`, and may be used in place:

```bash
hexad train recipes/llama3.1-8b.yaml data.train=data/train data.tokenizer=path/to/tokenizer
```

The head of each file says which of its settings are published, which are a choice, and what the planner
predicts. Runs on these clusters have not been possible yet. Tests check that each recipe is accepted, that it
is predicted to fit, that the prediction is current, and that it trains on at most four CPU ranks when its
model is made small and each degree of its layout at most 2 (`tests/recipes/reduced.py`).

Layouts are among the best of `hexad plan` with these settings (`hexad plan recipes/llama3.1-8b.yaml
--cluster h100:64`), at most 3 % slower than the best one, with a preference for few degrees and for free
memory. On another cluster, search again:

```bash
hexad plan run.yaml --cluster h200:128 --output h200.yaml
```

*Step*, *tokens/s* (per GPU), *MFU* and *memory* are predicted. MFU counts the products of the model with
causal attention halved, over the peak for bf16 ([planner](planner.md)); memory is all that the fullest GPU
holds, in GiB, of what programs can use.

| Recipe | Cluster | Sequence | Tokens a step | Layout | Step, s | Tokens/s | MFU | Memory |
|---|---|---|---|---|---|---|---|---|
"""
_TAIL = """
See [clusters](cluster.md) for jobs on several hosts, [presets](presets.md) for the models' shapes,
[Hugging Face models](hugging-face.md) for their weights, and [data](data.md) for data and tokenizers.
"""


def planned(path: Path) -> tuple[Plan, Candidate]:
    """What the planner predicts for a recipe's own layout."""
    result = plan(path, cluster_of(path.read_text(encoding="utf-8")), top=0)
    return result, explained(result, OWN_LAYOUT)


def prediction(result: Plan, candidate: Candidate) -> str:
    """The line of a recipe's head that says so."""
    seconds, gib = candidate.step.total, 2**30
    return (
        f"# Predicted: {seconds:#.3g} s a step, {result.rate(candidate):,.0f} tokens/s per GPU, "
        f"MFU {result.mfu(candidate):.3f}, {candidate.device.total / gib:.1f} of "
        f"{result.cluster.capacity / gib:.1f} GiB on the fullest GPU"
    )


def recipe(path: Path) -> str:
    """A recipe's text with the current prediction."""
    return PREDICTED.sub(prediction(*planned(path)), path.read_text(encoding="utf-8"), count=1)


def recipes_page() -> str:
    """The whole page, with the predictions that the files have."""
    return _HEAD + "".join(map(_row, FILES)) + _TAIL


def _row(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    figures, tree = _FIGURES.search(text), read_tree(path)
    assert figures is not None, f"{path.name} has no prediction"
    sequence, samples = tree["data"]["sequence"], tree["batch"]["global"]
    seconds, rate, mfu, used, available = figures.groups()
    link = f"[`{path.stem}`](../src/hexad/recipes/{path.name})"
    kind, _, count = cluster_of(text).partition(":")
    cells = [
        *(link, f"{int(count):,} x {kind}", f"{sequence:,}", f"{sequence * samples:,}", _layout(tree)),
        *(seconds, rate, mfu, f"{used} of {available}"),
    ]
    return f"| {' | '.join(cells)} |\n"


def _layout(tree: dict[str, Any]) -> str:
    settings = {**tree.get("parallel", {}), "micro": tree["batch"]["micro"], **tree.get("memory", {})}
    shown = (f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if name != "order")
    return ", ".join(shown)
