"""DeepSpeed's JSON, read and checked: nothing is ignored without notice; a ``ConfigError`` names the first
key that is misspelt, malformed or does not fit others. No torch."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hexad.config import ConfigError, HexadError, Wording, key_names, one_line
from hexad.config.files import read_bounded
from hexad.config.load import LARGEST_YAML

from ..facade.foreign_names import Effect, Meaning, notes_without_effect
from .keys import Keys, Section

log = logging.getLogger("hexad")

Checked = TypeVar("Checked", bound=Section)


@dataclass(frozen=True)
class Batch:
    """The batch sizes of a step.

    Attributes:
        micro: samples per backward pass and data rank.
        accumulation: backward passes per step.
        total: samples per step of all data ranks.
    """

    micro: int
    accumulation: int
    total: int


@dataclass(frozen=True)
class CheckedConfig:
    """A checked configuration.

    Attributes:
        keys: all values.
        batch: what they mean for this number of data ranks.
        tree: what was read.
    """

    keys: Keys
    batch: Batch
    tree: Mapping[str, Any]

    @property
    def clip(self) -> float:
        """The largest gradient norm; 0 for none."""
        params = {} if self.keys.optimizer is None else self.keys.optimizer.params
        limit = params.get("max_grad_norm")
        if limit is None:
            return self.keys.gradient_clipping
        if not isinstance(limit, int | float) or not limit >= 0:
            raise ConfigError(
                "optimizer.params.max_grad_norm", f"found {limit!r}, expected a number that is not negative"
            )
        if "gradient_clipping" in self.keys.model_fields_set and self.keys.gradient_clipping != limit:
            raise ConfigError(
                "optimizer.params.max_grad_norm",
                f"found {limit} with gradient_clipping {self.keys.gradient_clipping}; remove it",
            )
        return float(limit)

    @property
    def dtype(self) -> str:
        """The format of parameters, as ``precision.dtype``."""
        return "fp16" if self.keys.fp16.enabled else "bf16" if self.keys.bf16.enabled else "fp32"


def read_json(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file or of a dictionary.

    Raises:
        HexadError: no such file, not JSON, or a key that is given twice.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | os.PathLike):
        kind = type(source).__name__
        raise HexadError(f"config: found a {kind}, expected a path or a dictionary of DeepSpeed's keys")
    path = Path(source)
    try:
        text = read_bounded(path, LARGEST_YAML).decode("utf-8")
    except FileNotFoundError:
        raise HexadError(f"{path}: no such DeepSpeed configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HexadError(f"{path}: cannot be read: {one_line(error)}") from None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, value in pairs:
            if key in tree:
                raise HexadError(f"{path}: key '{key}' is given twice")
            tree[key] = value
        return tree

    try:
        tree = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        tree = _read_hjson(text, once, HexadError(f"{path}, {where}: not valid JSON: {error.msg}"))
    except (ValueError, RecursionError) as error:  # a number that is too long, or nested too deeply
        raise HexadError(f"{path}: not valid JSON: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise HexadError(f"{path}: found a {type(tree).__name__}, expected an object with DeepSpeed's keys")
    return tree


def _read_hjson(text: str, hook: Callable[[Any], Any], problem: HexadError) -> Any:
    """The keys of a file with comments or trailing commas, as DeepSpeed reads it: Hjson."""
    try:
        import hjson
    except ImportError:
        raise HexadError(f"{problem}; comments and trailing commas need pip install 'hexad[hjson]'") from None
    try:
        return hjson.loads(text, object_pairs_hook=hook)
    except (ValueError, RecursionError):  # HjsonDecodeError is one, as is that of a number that is too long
        raise problem from None


_OF_TRAINER: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "optimizer.params.torch_adam": True,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 1,
    "scheduler.params.total_num_steps": 1000,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "bfloat16.enabled": False,
    "zero_optimization.reduce_bucket_size": 1024**2,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * 1024**2),
    "zero_optimization.stage3_param_persistence_threshold": 10 * 1024,
}
"""What transformers' Trainer fills in for ``auto`` by its defaults, for a model of width 1024."""


def with_autos_filled(tree: Mapping[str, Any], data_ranks: int) -> tuple[dict[str, Any], list[str]]:
    """The keys with ``auto`` replaced as transformers' Trainer does by default, and a line for each that was.

    What the Trainer does not fill in stays ``auto``.
    """
    values, filled = _OF_TRAINER | {"train_batch_size": 8 * data_ranks}, list[str]()

    def fill(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: fill(inner, f"{name}.{key}" if name else key) for key, inner in value.items()}
        if value != "auto" or name not in values:
            return value
        filled.append(f"{name}: auto, which the Trainer sets; here {values[name]}")
        return values[name]

    return fill(tree, ""), filled


def set_key(tree: dict[str, Any], assignment: str) -> None:
    """Set ``a.b=value`` in a tree of keys, in place; the value is JSON, or else a text.

    Raises:
        ConfigError: it has another form.
    """
    name, equals, text = assignment.partition("=")
    if not equals or not name:
        raise ConfigError(assignment, "a key is set as name=value, such as zero_optimization.stage=2")
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(name, f"'{section}' is a value, not a section")
    try:
        tree[last] = json.loads(text)
    except json.JSONDecodeError:
        tree[last] = text
    except (ValueError, RecursionError) as error:
        raise ConfigError(name, f"not valid JSON: {one_line(error)}") from None


def read_config(
    source: str | Path | Mapping[str, Any], data_ranks: int, strict: bool = True
) -> CheckedConfig:
    """Read and check a configuration.

    Args:
        data_ranks: over which a step's samples are divided.
        strict: refuse misspelt keys; otherwise they are unknown ones, which have no effect.

    Raises:
        ConfigError: a misspelt, malformed or refused key, or batch sizes that do not fit each other.
        HexadError: a file that cannot be read.
    """
    keys, tree = read_keys(source, strict)
    return CheckedConfig(keys, batch_sizes(keys, data_ranks), tree)


def read_keys(source: str | Path | Mapping[str, Any], strict: bool = True) -> tuple[Keys, Mapping[str, Any]]:
    """Read and check a configuration except its batch sizes; returns the keys, and the tree that was read."""
    tree = read_json(source)
    keys = checked(_without_autos(known(tree, Keys, strict=strict)), Keys)
    for name, meaning, value in _changed(keys, "refused"):
        raise ConfigError(name, meaning.problem("it enabled" if isinstance(value, dict) else repr(value)))
    if keys.fp16.enabled and keys.bf16.enabled:
        raise ConfigError("bf16.enabled", "found true with fp16.enabled: true; enable one of them")
    return keys, tree


def tensor_degree(source: str | Path | Mapping[str, Any]) -> int:
    """``tensor_parallel.autotp_size``, before the other keys are checked; 1 where it is malformed."""
    group = read_json(source).get("tensor_parallel")
    degree = group.get("autotp_size") if isinstance(group, Mapping) else None
    return degree if isinstance(degree, int) and degree > 0 else 1


def batch_sizes(keys: Keys, ranks: int) -> Batch:
    """Batch sizes of which two infer the third; with one of the sizes alone, accumulation is 1."""
    total, micro = keys.train_batch_size, keys.train_micro_batch_size_per_gpu
    steps = keys.gradient_accumulation_steps
    if micro is None:
        if total is None:
            raise ConfigError(
                "train_batch_size",
                "found neither train_batch_size nor train_micro_batch_size_per_gpu; give one of them",
            )
        steps = steps or 1
        micro = total // (ranks * steps)
    if steps is None:
        steps = 1 if total is None else total // (ranks * micro)
    total = micro * steps * ranks if total is None else total
    if total != micro * steps * ranks or not total:
        raise ConfigError(
            "train_batch_size",
            f"found {total}, expected train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{steps} x {ranks} data ranks = {micro * steps * ranks}; change one of them",
        )
    return Batch(micro, steps, total)


class _Wording(Wording):
    """Errors in the terms of DeepSpeed's files."""

    forms: ClassVar = {"betas": ("[beta1, beta2]", "a number")}
    alternatively, dotted_names = " or ", False

    def group(self, field: str, model: type[BaseModel]) -> str:
        return "a section"

    def expectation(self, kind: str, message: str) -> str:
        kinds = {"bool": "true or false", "dict": "a section", "int": "an integer"}
        return kinds.get(kind.partition("_")[0]) or super().expectation(kind, message)

    def written(self, value: Any) -> str:
        return json.dumps(value) if value is None or isinstance(value, bool) else super().written(value)


def nested(info: FieldInfo | None) -> type[Section] | None:
    """The class of a key's section; None if the key is unknown or no section."""
    kinds = (info.annotation, *get_args(info.annotation)) if info is not None else ()
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def spelling(name: str, info: FieldInfo) -> str:
    """The name of a key in the file."""
    return info.alias or name


def field_of(section: type[Section] | None, key: str) -> FieldInfo | None:
    """The declaration of a section's key; None for an unknown one."""
    fields = section.model_fields.items() if section is not None else ()
    return next((info for name, info in fields if key in (name, info.alias)), None)


def given(section: Section, key: str) -> Any:
    """The value of a dotted key in what was read; None if it has none."""
    value: Any = section
    for part in key.split("."):
        if value is None or part not in value.model_fields_set:
            return None
        value = getattr(value, part)
    return value


def checked(
    tree: Mapping[str, Any], section: type[Checked], prefix: str = "", strict: bool = True
) -> Checked:
    """Check a section and return its values.

    Args:
        prefix: of its keys' names in errors, with a dot at the end.
        strict: refuse unknown keys; otherwise they are left out.
    """
    try:
        return section.model_validate(tree if strict else known(tree, section, prefix, strict))
    except ValidationError as error:
        readable = _Wording().readable(error, section)
        raise ConfigError(prefix + readable.field.partition("[")[0], readable.problem) from None


def known(
    tree: Mapping[str, Any], section: type[Section], prefix: str = "", strict: bool = True
) -> dict[str, Any]:
    """The tree without unknown keys, which have no effect, as in DeepSpeed, and without nulls of keys that
    have none either.

    Raises:
        ConfigError: a misspelt key, if ``strict``.
    """
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        info = field_of(section, key)
        if info is None and key not in section.older:
            meant = _misspelt(key, section) if strict else None
            if meant is not None:
                raise ConfigError(prefix + key, f"unknown key (did you mean '{meant}'?)")
            continue
        if value is None and _has_no_effect(info):
            continue
        inner = nested(info)
        is_section = inner is not None and isinstance(value, Mapping)
        kept[key] = known(value, inner, f"{prefix}{key}.", strict) if inner and is_section else value
    return kept


def unknown_keys(tree: Mapping[str, Any], section: type[Section] = Keys, prefix: str = "") -> list[str]:
    """The names of keys that :func:`known` leaves out, each with the nearest key where there is one."""
    names: list[str] = []
    for key, value in tree.items():
        info = field_of(section, key)
        inner = nested(info)
        if info is None and key not in section.older:
            names.append(prefix + key + _hint(key, section))
        elif inner is not None and isinstance(value, Mapping):
            names += unknown_keys(value, inner, f"{prefix}{key}.")
    return names


def _hint(key: str, section: type[Section]) -> str:
    """Where a key belongs that is not the section's, or what it may be a misspelling of; else empty."""
    nearest = _misspelt(key, section)
    if nearest is None:
        paths = [path for path in _paths(Keys) if path != key and path.rpartition(".")[2] == key]
        nearest = paths[0] if len(paths) == 1 else None
    return "" if nearest is None else f" (did you mean '{nearest}'?)"


def _paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys."""
    for name, info in section.model_fields.items():
        path, inner = prefix + spelling(name, info), nested(info)
        yield path
        yield from _paths(inner, path + ".") if inner is not None else ()


def _misspelt(key: str, section: type[Section]) -> str | None:
    """The section's key with nearly the same letters; None for a key that is something else: a comment, one
    that a leading sign turns off (``_fp16``), one with words added (``fp16_old``) or with another word, a
    dotted name."""
    word = key.lower().replace("-", "_")
    if not word[:1].isalnum() or "." in word:
        return None
    keys = {key.replace("-", "_"): key for key in (*key_names(section), *section.older)}
    near = get_close_matches(word, keys, n=1, cutoff=0.88)
    if not near:
        return None
    known, words = near[0].split("_"), word.split("_")
    pairs = zip(known, words) if len(known) == len(words) else ()
    other_word = any(SequenceMatcher(None, *pair).ratio() < 0.6 for pair in pairs)
    return None if other_word or set(known) < set(words) else keys[near[0]]


def effective(section: BaseModel) -> dict[str, Any]:
    """The values of a section that change what is computed, as a tree: all ranks need the same."""
    values: dict[str, Any] = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            values[spelling(name, info)] = effective(value)
        elif not _has_no_effect(info) and name != "steps_per_print":
            values[spelling(name, info)] = value
    return values


def without_effect(keys: Keys) -> tuple[str, ...]:
    """Notes on the keys that are in a file, differ from their default and have no effect here."""
    names = sorted((name, meaning.note) for name, meaning, _ in _changed(keys, "none"))
    return notes_without_effect((name, f": {note}") for name, note in names)


def meaning_of(info: FieldInfo) -> Meaning | None:
    """The meaning of a key; None for a section, whose keys have their own."""
    return next((mark for mark in info.metadata if isinstance(mark, Meaning)), None)


def _changed(section: BaseModel, effect: Effect, prefix: str = "") -> Iterator[tuple[str, Meaning, Any]]:
    """(name, meaning, value) of the keys with an effect that are in a file and differ from the default."""
    for name in section.model_fields_set:
        info, value = type(section).model_fields[name], getattr(section, name)
        full, meaning = prefix + spelling(name, info), meaning_of(info)
        if meaning is not None and meaning.effect == effect:
            off = isinstance(value, dict) and not _enabled(value, effect == "none")
            if value != info.default and not off:
                yield full, meaning, value
        elif isinstance(value, Section):
            yield from _changed(value, effect, full + ".")


def _enabled(section: Mapping[str, Any], default: bool) -> bool:
    """Whether a section is enabled; where it does not say so, whether one in it is (compression_training)."""
    inner = [value for value in section.values() if isinstance(value, Mapping)]
    return bool(section.get("enabled", default or any(_enabled(value, False) for value in inner)))


_AUTO_IS_DEFAULT = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
)


def _without_autos(
    tree: Mapping[str, Any], prefix: str = "", section: type[Section] | None = Keys
) -> dict[str, Any]:
    """The tree without what is ``auto``."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        full, info = prefix + key, field_of(section, key)
        if isinstance(value, Mapping):
            kept[key] = _without_autos(value, full + ".", nested(info))
        elif value != "auto":
            kept[key] = value
        elif full not in _AUTO_IS_DEFAULT and not _has_no_effect(info):
            raise ConfigError(full, "found auto, which transformers' Trainer fills in; give a value")
    return kept


def _has_no_effect(info: FieldInfo | None) -> bool:
    meaning = None if info is None else meaning_of(info)
    return meaning is not None and meaning.effect == "none"
