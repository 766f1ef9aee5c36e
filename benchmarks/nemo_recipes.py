"""NeMo 2's own recipes, from a checkout of its repository, as Hexad's settings: which are accepted?

    python benchmarks/nemo_recipes.py CHECKOUT --output benchmarks/results/nemo_recipes.json

Every file of ``nemo/collections/llm/recipes`` is run as it is, that directory being importable,
:func:`hexad.compat.nemo.install` in place of NeMo, and NeMo-Run itself. What ``pretrain_recipe()`` and
``finetune_recipe()`` return is built, and its settings are resolved for the ranks that it names, or on as
many nodes as its layout needs; they are compared with those of the recipe that Hexad's own table has by the
same name. Tokenizers of the hub are left out. Nothing is trained.
"""

import argparse
import json
import math
import os
import re
import runpy
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from facts import facts

os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "NEMO_HOME": "/nonexistent"}
RECIPES = Path("nemo/collections/llm/recipes")
PACKAGE = "nemo.collections.llm.recipes"
FUNCTIONS = ("pretrain_recipe", "finetune_recipe")


def settings_of(function: Any, directory: Path) -> tuple[dict[str, Any], Any]:
    """The settings of a recipe, and its trainer."""
    import fiddle

    from hexad.compat.nemo.data import FineTuningDataModule, MockDataModule
    from hexad.compat.nemo.recipe import recipe_settings

    recipe = function()
    data = recipe.data
    if getattr(data, "tokenizer", None) is not None:  # one of the hub: numbers of the same vocabulary
        data.tokenizer = None
    if data.__fn_or_cls__ is FineTuningDataModule:  # the lines are the user's: what there is of them
        recipe.data = fiddle.Config(
            MockDataModule, data.seq_length, None, data.micro_batch_size, data.global_batch_size
        )
    recipe.trainer.accelerator, recipe.trainer.callbacks = "cpu", []
    recipe.log = None
    strategy = recipe.trainer.strategy
    axes = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))
    needed = math.prod(getattr(strategy, axis, 1) or 1 for axis in axes)
    recipe.trainer.num_nodes = max(recipe.trainer.num_nodes, -(-needed // recipe.trainer.devices))
    parts = {name: fiddle.build(getattr(recipe, name)) for name in ("model", "data", "trainer", "optim")}
    model, trainer = parts["model"], parts["trainer"]
    parts["optim"].connect(model)
    adapters = getattr(recipe, "peft", None)
    model.model_transform = None if adapters is None else fiddle.build(adapters)
    trainer.strategy.shard_as(model)
    return recipe_settings(trainer, model, parts["data"], str(directory))[1], trainer


def outcome(function: Any, own: Any, directory: Path) -> dict[str, Any]:
    """What became of one recipe, and why; and whether Hexad's own has the same settings.

    Args:
        function: makes NeMo's recipe.
        own: makes that of Hexad's table; None if there is none.
    """
    from hexad.model.configuration import load_config
    from hexad.planning import resolve
    from hexad.topology.layout import Layout

    try:
        tree, trainer = settings_of(function, directory)
        config = load_config(tree)
        resolve(config, Layout.from_settings(config.parallel, trainer.world_size))
    except Exception as error:  # whatever a recipe raises
        return {"outcome": "refused", "why": _line(error)}
    degrees = {name: value for name, value in tree["parallel"].items() if value not in (1, False, 0, "even")}
    row = {"outcome": "accepted", "ranks": trainer.world_size, "parallel": degrees}
    return row | ({} if own is None else {"own": settings_of(own, directory)[0] == tree})


def _line(error: Exception) -> str:
    text = str(error).partition("Fiddle context")[0]
    return re.sub(r" \(/[^)]*\)", "", " ".join(text.split()))[:200].strip()


def recipes(path: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """The recipes of one file."""
    text = path.read_text(encoding="utf-8")
    named = [name for name in FUNCTIONS if re.search(rf"^def {name}\(", text, re.MULTILINE)]
    if not named:
        return {}
    try:
        module = runpy.run_path(str(path))
    except Exception as error:
        return {f"{path.stem}: {name}": {"outcome": "refused", "why": _line(error)} for name in named}
    from hexad.compat.nemo.recipe_table import ROWS

    of_table = vars(sys.modules[f"{PACKAGE}.{path.stem}"]) if path.stem in ROWS else {}
    return {f"{path.stem}: {name}": outcome(module[name], of_table.get(name), directory) for name in named}


def main() -> None:
    """Try all recipes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--commit", help="of the checkout, where it is no repository")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    import hexad.compat.nemo

    hexad.compat.nemo.install()
    rows: dict[str, Any] = {}
    for path in sorted((options.checkout / RECIPES).glob("*.py")):
        for name, result in recipes(path, Path("runs/nemo-recipes")).items():
            rows[name] = result
            detail = result.get("why", "" if result.get("own", True) else "differs from Hexad's own")
            print(f"{name}: {result['outcome']} {detail}", file=sys.stderr)
    git = ["git", "-C", str(options.checkout), "rev-parse", "HEAD"]
    commit = options.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    result = facts() | {"recipes": rows, "dtype": f"NeMo {commit[:12]}, NeMo-Run {version('nemo_run')}"}
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
