"""The page of the Python interface, from signatures and docstrings."""

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, is_typeddict

import hexad

API = Path(__file__).parent / "api.md"

_HEAD = """\
<!-- Written by 'make docs' from the docstrings in src/hexad. Do not edit. -->

# Python reference

[Python](python.md) shows these at work; `help(hexad.Engine)` prints what is here. Properties are in bold.
What is not on this page may change with any version.
"""

CONTENTS: dict[str, tuple[str, ...]] = {
    "Functions": ("load_config", "train", "evaluate", "generate", "score", "launch"),
    "What they take and return": (
        "Callback",
        "training.callbacks.Outcome",
        "engine.evaluation.Score",
        "generation.texts.Continuation",
        "launching.launch.Run",
    ),
    "A custom loop": (
        "Engine",
        "engine.faults.StepResult",
        "Microbatch",
        "dataset.load.loader.DataLoader",
        "dataset.load.loader.loader_from_config",
        "dataset.text.tokenizer.load_tokenizer",
        "training.saves.Saves",
        "engine.evaluation.ValidationSets",
    ),
    "Generation": (
        "Generator",
        "generation.texts.Settings",
        "generation.sampling.Sampling",
        "generation.requests.Request",
        "generation.requests.Logprob",
        "generation.requests.RoutedExperts",
    ),
    "Losses of one's own": ("engine.losses.Outputs",),
    "Any model": (
        "parallelize",
        "clip_grad_norm_",
        "pipeline",
        "conversion.pipeline.PipelinedModel",
    ),
    "Planning": ("plan", "planning.plan.Plan", "planning.plan.explained", "planning.search.Candidate"),
    "Ranks": ("Layout", "Mesh", "Axis"),
    "Errors": ("HexadError", "ConfigError"),
}
"""Sections, and what is in them: names of ``hexad``, or paths below it."""

_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):\n((?:[ ]{4}.*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^([\w*, ]+): ", re.MULTILINE)


def api_page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, names in CONTENTS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _entry(name, _find(name))
    return "\n".join(parts)


def _find(name: str) -> Any:
    module, _, last = f"hexad.{name}".rpartition(".")
    return getattr(hexad if module == "hexad" else import_module(module), last)


def _entry(name: str, found: Any) -> Iterator[str]:
    yield f"### `hexad.{name}`\n"
    is_class = inspect.isclass(found)
    if not (is_class and issubclass(found, Exception)):
        yield f"```python\n{_signature(found.__name__, found)}\n```\n"
    yield from _documented(found)
    if is_class:
        yield from _members(found)


def _members(found: type) -> Iterator[str]:
    """The public methods and properties of a class and its bases in Hexad, in the order of the sources."""
    bases = [base for base in found.__mro__ if base.__module__.startswith("hexad.")]
    for name, member in {
        name: member for base in reversed(bases) for name, member in vars(base).items()
    }.items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            returns = inspect.signature(member.fget or member.__get__).return_annotation
            yield f"**`{name}: {returns}`** {_plain(_first(member))}\n"
        elif inspect.isfunction(member) or isinstance(member, classmethod):
            yield f"#### `{found.__name__}.{name}`\n"
            yield f"```python\n{_signature(name, getattr(found, name))}\n```\n"
            yield from _documented(getattr(found, name))


def _first(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").split("\n\n")[0]


def _signature(name: str, found: Callable[..., Any]) -> str:
    """As in the source; on several lines where it is long. Of a typed dictionary the keys."""
    if is_typeddict(found):
        return "\n".join(f"{key}: {kind.__forward_arg__}" for key, kind in found.__annotations__.items())
    signature = inspect.signature(found)
    parameters: list[str] = []
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parameters.append("*")
        parameters.append(_parameter(parameter))
    returned = signature.return_annotation
    if inspect.isgeneratorfunction(getattr(found, "__wrapped__", None)):  # made by contextlib
        returned = str(returned).replace("Iterator", "AbstractContextManager")
    shown = "" if inspect.isclass(found) or returned is signature.empty else f" -> {returned}"
    line = f"{name}({', '.join(parameters)}){shown}"
    if len(line) <= 100:
        return line
    return f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){shown}"


def _parameter(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{star}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    plain = parameter.default is None or isinstance(parameter.default, (bool, int, float, str, tuple))
    return f"{text} = {repr(parameter.default) if plain else '...'}"


def _documented(found: Any) -> Iterator[str]:
    """The description, then lists of arguments, results and errors."""
    text = inspect.getdoc(found) or ""
    sections = _SECTION.findall(text)
    description = _SECTION.sub("", text).strip()
    for paragraph in re.split(r"\n\n+", description):
        if paragraph:
            yield f"{_plain(paragraph)}\n"
    for title, body in sections:
        yield f"*{title}:*\n"
        lines = inspect.cleandoc(body)
        if title in ("Returns", "Yields"):
            yield f"{_plain(lines)}\n"
            continue
        starts = [match.start() for match in _ENTRY.finditer(lines)] + [len(lines)]
        for start, end in pairwise(starts):
            name, _colon, meaning = lines[start:end].partition(": ")
            yield f"- `{name}`: {_plain(meaning)}"
        yield ""


def _plain(text: str) -> str:
    """reStructuredText's marks as Markdown's, on one line."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1]}`", text)
    return " ".join(text.replace("``", "`").split())
