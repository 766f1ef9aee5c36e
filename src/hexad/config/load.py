"""Load a checked :class:`Config` from YAML and ``a.b=value`` overrides."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from .errors import ConfigError, HexadError, did_you_mean, one_line
from .files import read_bounded
from .schema import Config

LARGEST_YAML = 4 << 20
"""Bytes of a file of settings; one with ten thousand data sets has one million."""
_NODES = 200_000
"""Values of a file of settings, those behind aliases counted each time: few lines may be billions."""
_LONGEST_NUMBER = 20_000
"""Characters; Python converts at most 4300 digits, but reads any number of others."""


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice instead of keeping the last, and a colon without a blank
    after it. It reads numbers as YAML 1.2 does: 010 is no octal, 1:30 is no number of base 60, 2024-01-31 is
    a name and no date; digits may be grouped, as in 1_000."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            joined, colon, rest = name.partition(":")
            empty = isinstance(value, yaml.ScalarNode) and not value.value and value.style is None
            if colon and getattr(key, "style", "") is None and (empty or rest[:1] in ("{", "[")):
                written = f"'{name}' has no blank after its colon; write '{joined}: {rest}'"
                raise yaml.constructor.ConstructorError(None, None, written, key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"  # no key is a number, or a truth value as 'on' would be
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{name}' is given twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _expanded(node, {}) > _NODES:
            raise yaml.YAMLError(f"its aliases stand for more than {_NODES:,} values")
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _LONGEST_NUMBER:
            raise ValueError(f"Exceeds the limit of {_LONGEST_NUMBER:,} characters of a number")
        value = super().construct_yaml_int(node)
        str(value)  # fails for a number too long to be shown in an error
        return value


def _expanded(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """The number of values in a node, with each alias replaced by what it stands for."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node not in known:
        known[node] = 1  # of a node in itself, which is not constructed again
        inner = (
            node.value if isinstance(node, yaml.SequenceNode) else (n for pair in node.value for n in pair)
        )
        known[node] = 1 + sum(_expanded(item, known) for item in inner)
    return known[node]


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] not in ("int", "timestamp")]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise HexadError(f"{source}{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise HexadError(f"{source}: not valid YAML: {one_line(error)}") from None
    except ValueError as error:  # a value that is not what its tag says
        raise HexadError(f"{source}: not valid YAML: {one_line(error)}") from None
    except RecursionError:
        raise HexadError(f"{source}: not valid YAML: nested too deeply") from None


def read_tree(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """The raw settings of a configuration file with ``a.b=value`` overrides applied.

    Args:
        path: a YAML file, an already parsed mapping, or None for all defaults.
        overrides: ``parallel.tensor=2`` style strings; values are YAML.

    Raises:
        HexadError: a missing file or text that is not YAML.
    """
    if path is None:
        tree: dict[str, Any] = {}
    elif isinstance(path, Mapping):
        tree = deepcopy(dict(path))  # overrides are set in place, at any depth
    elif isinstance(path, str | os.PathLike):
        tree = _read(Path(path))
    else:
        raise HexadError(f"config: found {path!r}, expected a file's path, or a mapping of settings")
    apply_overrides(tree, overrides)
    return tree


def read_yaml(path: Path) -> Any:
    """The content of a file of settings.

    Raises:
        HexadError: it is not YAML.
        OSError: it cannot be read, or is too large.
        UnicodeDecodeError: it is not UTF-8.
    """
    return _parse_yaml(read_bounded(path, LARGEST_YAML).decode("utf-8"), str(path))


def parse_tree(text: str, source: str) -> dict[str, Any]:
    """The raw settings of a configuration's text.

    Raises:
        HexadError: it is not YAML, or no mapping.
    """
    tree = _parse_yaml(text, source) or {}
    if not isinstance(tree, dict):
        raise HexadError(f"{source}: found a {type(tree).__name__}, expected a mapping of settings")
    return tree


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(path) or {}
    except FileNotFoundError:
        raise HexadError(f"{path}: no such configuration file") from None
    except (OSError, ValueError) as error:  # not UTF-8, or a name with NUL
        raise HexadError(f"{path}: cannot be read: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise HexadError(f"{path}: found a {type(tree).__name__}, expected a mapping of settings")
    return _in_its_place(tree, path)


def _in_its_place(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """The settings of a run's ``config.yaml`` with the directory that it is in as ``run.dir``, and in all
    paths below that: the run may have been moved, or copied, since it was written. Other files are unchanged.
    """
    run = tree.get("run")
    written = run.get("dir") if isinstance(run, dict) else None
    directory = _run_directory(path.absolute())
    if directory is None or not isinstance(written, str) or not os.path.isabs(written):
        return tree
    if os.path.realpath(directory) == os.path.realpath(written):
        return tree

    places = written.rstrip("/"), os.path.realpath(written)

    def moved(value: Any) -> Any:
        if isinstance(value, str):
            prefix = "hf:" if value.startswith("hf:") else ""
            inside = value.removeprefix(prefix)
            for place in places:
                if inside == place or inside.startswith(f"{place}/"):
                    return prefix + str(directory) + inside.removeprefix(place)
        if isinstance(value, dict):
            return {name: moved(inner) for name, inner in value.items()}
        return [moved(inner) for inner in value] if isinstance(value, list) else value

    return {name: moved(value) for name, value in tree.items()}


def _run_directory(path: Path) -> Path | None:
    """The run directory that a ``config.yaml`` belongs to, as its own or a checkpoint's; None for others."""
    directory = path.parent
    if directory.parent.name == "checkpoints" and directory.name.startswith("step-"):
        directory = directory.parent.parent
    marks = directory / "metrics.jsonl", directory / "checkpoints" / "latest"
    return directory if path.name == "config.yaml" and any(map(os.path.isfile, marks)) else None


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    """Set each ``a.b.c=value`` in a raw tree of settings, in place; the values are YAML.

    Raises:
        HexadError: something of another form.
    """
    for override in listed_overrides(overrides):
        _apply(tree, override)


def listed_overrides(overrides: Iterable[str]) -> tuple[str, ...]:
    """Overrides of settings, which a function was called with.

    Raises:
        HexadError: they are no list.
    """
    if isinstance(overrides, str):
        raise HexadError(f"overrides: found the text '{overrides}', expected a list: ['{overrides}']")
    if not isinstance(overrides, Iterable):
        raise HexadError(f"overrides: found {overrides!r}, expected a list such as ['parallel.tensor=2']")
    return tuple(overrides)


def _apply(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=") if isinstance(override, str) else (override, "", "")
    if not equals or "" in name.split("."):
        raise HexadError(f"found '{override}', expected a setting name=value, such as parallel.tensor=2")
    *parents, last = name.split(".")
    here = tree
    for part in parents:
        if here.get(part) is None:
            here[part] = {}
        here = here[part]
        if not isinstance(here, dict):
            raise ConfigError(name, f"'{part}' is a value, not a group of settings")
    here[last] = _parse_yaml(text, f"override {name}")


def parse_config(tree: Mapping[str, Any]) -> Config:
    """A checked :class:`Config` from a raw tree.

    Raises:
        ConfigError: an unknown or malformed setting, naming it and the nearest known one.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise Wording().readable(error, Config) from None


_WRONG_FORM = {"string_type", "list_type", "tuple_type", "literal_error", "missing", "too_short", "too_long"}
_WRONG_GROUP = {"model_type", "model_attributes_type"}


class Wording:
    """Converts pydantic's errors: the first problem as field, value found, and fix.

    Subclasses word them for other files than a ``run.yaml``.
    """

    forms: ClassVar[Mapping[str, tuple[str, str]]] = {
        "data.train": ("a prefix or [[weight, prefix], ...]", "[weight, prefix]"),
        "data.validation": ("a prefix, [[weight, prefix], ...] or {name: prefix, ...}", "[weight, prefix]"),
        "parallel.split": ("'cost', 'even' or [layers, ...]", "an integer"),
        "data.split": ("[training, validation, testing] or null", "a number"),
        "model.train": ("'all' or [pattern, ...]", "a string"),
        "model.lora.targets": ("'all' or [pattern, ...]", "a string"),
        "optimizer.betas": ("[beta1, beta2]", "a number"),
        "memory.recompute_parts": ("a list such as [norms, moe_act]", "moe_act, norms or mla_up"),
        "batch.ramp": ("[start, increment, samples] or null", "an integer"),
    }
    """Expected forms where several are valid, or an item of a list has one: setting -> (whole, item)."""
    alternatively = "; or expected "
    """Text between what the forms of a union expect."""
    dotted_names = True
    """Whether users write dotted names; the key that an unknown one may mean is then named with its group."""

    def readable(self, error: ValidationError, root: type[BaseModel]) -> ConfigError:
        """The first problem of an error of ``root.model_validate``."""
        problems = error.errors(include_url=False)
        first = _field_of(problems[0]["loc"], root)[0]
        # Of the forms that a union allows, the one meant was followed furthest into the value.
        same = [p for p in problems if _field_of(p["loc"], root)[0] == first]
        problem = max(same, key=lambda p: len(_indices(p["loc"])))
        # Locations name the tried branches of a union too ("constrained-int"): keep settings.
        field, model = _field_of(problem["loc"], root)
        kind, value, indices = problem["type"], problem["input"], _indices(problem["loc"])
        if kind in ("extra_forbidden", "invalid_key"):
            return ConfigError(field, self._unknown(field, str(problem["loc"][-1]), model, root))
        if kind == "missing" and not indices:
            return ConfigError(field, "is missing; give it")
        if kind in _WRONG_GROUP:
            hint = "; write a blank after the colon" if isinstance(value, str) and ":" in value else ""
            expected = f"expected {self.group(field, model)}{hint}"
            return ConfigError(field, f"found {self.written(value)}, {expected}")
        if kind == "missing":  # of an item: what was found is the list that lacks it
            indices = indices[:-1]
        alike = [p for p in same if len(_indices(p["loc"])) == len(_indices(problem["loc"]))]
        # What our own checks refuse has the right form; that other forms were tried is no help then.
        alike = [p for p in alike if p["msg"].startswith("Value error, a name")] or alike
        problem = alike[0] if problem not in alike else problem
        if field in self.forms and len(indices) < 2 and problem["type"] in _WRONG_FORM:
            whole, item = self.forms[field]
            expected = f"{item} ({field} is {whole})" if indices else whole
        else:
            expectations = (self.expectation(p["type"], p["msg"]) for p in alike)
            expected = self.alternatively.join(dict.fromkeys(expectations))
        choices = _choices(model, field)
        misspelt = isinstance(value, str) and not indices and value not in choices
        hint = did_you_mean(value, choices) if misspelt else ""
        name = field + "".join(f"[{index}]" for index in indices)
        return ConfigError(name, f"found {self.written(value)}, expected {expected}{hint}")

    def group(self, field: str, model: type[BaseModel]) -> str:
        """Text for an error where a group of settings is expected."""
        group = _group(_annotation(model, field))
        examples = f" such as {', '.join(key_names(group)[:3])}" if group else ""
        return f"settings{examples}; to keep the defaults, leave out the line"

    def expectation(self, kind: str, message: str) -> str:
        """Text for what pydantic expects, by the type of its error and its message."""
        message = message.removeprefix("Input should be ").removeprefix("Value error, ")
        if "exceeded maximum size" in message:
            return "a smaller number"
        message = message.partition(", unable to parse string")[0]
        return message.replace("a valid integer", "an integer").replace("a valid", "a")

    def written(self, value: Any) -> str:
        """A value as it is shown."""
        return repr(dict(value) if isinstance(value, Mapping) else value)

    def _unknown(self, field: str, key: str, model: type[BaseModel], root: type[BaseModel]) -> str:
        """The message for a key that the settings do not have: it suggests the same word elsewhere in the
        tree, else the most similar sibling, else lists the siblings."""
        *groups, last = key.split(".")
        if groups and self.dotted_names:
            nested = f"{''.join(f'{group}: {{' for group in groups)}{last}: ...{'}' * len(groups)}"
            problem = "unknown key; names with dots are for the command line, in a file they are nested"
            return f"{problem}: {nested}"
        elsewhere = next((name for name in setting_names(root) if name.rpartition(".")[2] == key), None)
        if elsewhere is not None:
            return f"unknown key (did you mean '{elsewhere}'?)"
        parent = field[: -len(key)] if self.dotted_names else ""
        siblings = key_names(model)
        hint = did_you_mean(key, siblings).replace("'", f"'{parent}", 1)
        return "unknown key" + (hint or f"; known here: {', '.join(siblings)}")


def _indices(loc: Sequence[int | str]) -> list[int]:
    """The list indices in a pydantic location."""
    return [part for part in loc if isinstance(part, int)]


def _field_of(loc: Sequence[int | str], root: type[BaseModel]) -> tuple[str, type[BaseModel]]:
    """Dotted setting name of a pydantic location, and the settings group it stands in."""
    model = root
    names: list[str] = []
    for index, part in enumerate(loc):
        names.append(str(part))
        nested = _group(_annotation(model, str(part)))
        if nested is None or index == len(loc) - 1:
            break
        model = nested
    return ".".join(names), model


def _annotation(model: type[BaseModel], name: str) -> Any:
    """The type of a setting of a group, by the last part of its name; None for an unknown one."""
    last = name.rpartition(".")[2]
    return next((f.annotation for n, f in model.model_fields.items() if (f.alias or n) == last), None)


def key_names(model: type[BaseModel]) -> list[str]:
    """The names of a group's settings, as a file has them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _group(annotation: Any) -> type[BaseModel] | None:
    """The group of settings in a type, through any nesting, if there is one."""
    kinds = (part for part in _parts(annotation) if isinstance(part, type))
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _choices(model: type[BaseModel], field: str) -> list[str]:
    """The strings a setting may take."""
    return [part for part in _parts(_annotation(model, field)) if isinstance(part, str)]


def _parts(annotation: Any) -> Iterator[Any]:
    """The types, and the values of Literal, that a type is made of, through any nesting."""
    arguments = get_args(annotation)
    for argument in arguments:
        yield from _parts(argument)
    if not arguments:
        yield annotation


def setting_names(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted names of every setting and group."""
    names = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        names.append(key)
        if (group := _group(field.annotation)) is not None:
            names += setting_names(group, key + ".")
    return names


def anchored(config: Config) -> Config:
    """The configuration with absolute paths: relative ones are relative to the working directory."""

    def absolute(value: Any) -> Any:
        if isinstance(value, str):
            prefix = "hf:" if value.startswith("hf:") else ""  # of model.load
            return prefix + str(Path(value.removeprefix(prefix)).absolute())
        if isinstance(value, Mapping):
            return {name: absolute(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(absolute, value))
        return value

    update = {
        "run": {"dir": absolute(config.run.dir)},
        "model": {"load": absolute(config.model.load)},
        "data": {name: absolute(getattr(config.data, name)) for name in ("train", "validation")},
        "checkpoint": {"load": absolute(config.checkpoint.load)},
    }
    if config.data.tokenizer != "byte":
        update["data"]["tokenizer"] = absolute(config.data.tokenizer)
    if config.parallel.schedule.endswith(".json"):
        update["parallel"] = {"schedule": absolute(config.parallel.schedule)}
    groups = {name: getattr(config, name).model_copy(update=values) for name, values in update.items()}
    return config.model_copy(update=groups)


def dump_config(config: Config) -> str:
    """The configuration as YAML, in the order of the schema."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False, width=110)
