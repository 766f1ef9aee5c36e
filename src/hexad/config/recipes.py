"""Recipes: run files of published models on stated clusters, which come with the package."""

import re
from pathlib import Path

from .errors import HexadError, did_you_mean

_FILES = Path(__file__).parents[1] / "recipes"
_CLUSTER = re.compile(r"^# hexad plan .* --cluster (\S+:\d+) --explain file$", re.MULTILINE)


def recipe_names() -> list[str]:
    """The recipes that there are: ``gpt2``, ``llama3.1-8b``."""
    return sorted(path.stem for path in _FILES.glob("*.yaml"))


def recipe_text(name: str) -> str:
    """A recipe's file: a comment, then settings, each group on one line.

    Raises:
        HexadError: there is none of that name.
    """
    names = recipe_names()
    if name not in names:
        hint = did_you_mean(name, names) or f"; known: {', '.join(names)}"
        raise HexadError(f"--recipe: found '{name}', which is no known recipe{hint}")
    return (_FILES / f"{name}.yaml").read_text(encoding="utf-8")


def cluster_of(text: str) -> str:
    """The cluster that a recipe's head is for, such as ``h100:64``."""
    match = _CLUSTER.search(text)
    assert match is not None, "a recipe's head has the command that predicts it"
    return match[1]
