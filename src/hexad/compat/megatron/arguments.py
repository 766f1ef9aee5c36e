"""The flags of a Megatron-LM launch line as the namespace that ``get_args()`` returns, with what Megatron-LM
computes from them before anything else reads them. No torch."""

import argparse
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, NoReturn

from hexad.config import ConfigError, HexadError, alternatives, did_you_mean
from hexad.config.schema import BatchSettings

from ..facade.absent import MissingAttribute
from ..facade.foreign_names import ForeignName, notes_without_effect
from .forks import as_megatron
from .tables import FLAGS, GROUPS

ExtraArguments = Callable[[argparse.ArgumentParser], object]
"""Adds flags to the parser that it is called with, and may return another one."""


@dataclass(frozen=True)
class Line:
    """A parsed launch line.

    Attributes:
        arguments: every known flag's value, and those of the script's own flags.
        changed: the flags that have another value than their default.
        written: attributes of the flags on the line.
        notes: what has no effect, for the user.
    """

    arguments: Namespace
    changed: tuple[ForeignName, ...]
    written: frozenset[str]
    notes: tuple[str, ...]


class Arguments(Namespace):
    """What ``get_args()`` returns."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingAttribute(f"get_args(): found no argument {name!r}; {_ADD}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Files have argparse's class."""
        return Namespace, (), dict(vars(self))


_ADD = "no flag that Hexad knows sets it: remove it from the script, or let extra_args_provider add its flag"


class _Parser(argparse.ArgumentParser):
    """A parser that raises errors instead of exiting."""

    def error(self, message: str) -> NoReturn:
        flag, _, problem = message.removeprefix("argument ").partition(": ")
        if flag.startswith("--"):
            raise ConfigError(flag.split("/")[0], problem)
        raise HexadError(message)


def parse(
    words: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    extra: ExtraArguments | None = None,
    ignore_unknown: bool = False,
    others: Sequence[str] = (),
    ignore: Iterable[str] = (),
) -> Line:
    """Read a launch line.

    Args:
        words: without the program's name.
        defaults: values of attributes for which Megatron-LM has no default and that the line does not set.
        extra: adds a script's own flags to the parser, as Megatron-LM's ``extra_args_provider``.
        ignore_unknown: ignore unknown flags.
        others: options of the command, which an unknown flag may mean.
        ignore: flags to ignore with their values, known or not; a text may name several, separated by commas.

    Raises:
        ConfigError: flags that are not known, all of them, with the nearest known ones; a flag that is
            malformed or that Hexad cannot honour.
    """
    parser, flags = _declared() if extra is None else _parser(extra)
    known = {option for action in parser._actions for option in action.option_strings}
    names = {
        f"--{name.strip().removeprefix('--')}" for text in ignore for name in text.split(",") if name.strip()
    }
    line, ignored = _without(words, names)
    line, unknown = _without([_spelled(word, known) for word in line], known, keep=True)
    if unknown and not ignore_unknown:
        raise _unknown(list(unknown), known, others)
    parsed, strays = parser.parse_known_args(line)
    arguments = Arguments(**vars(parsed))
    if strays and not ignore_unknown:
        raise ConfigError("hexad megatron", f"found the word {strays[0]!r} where a flag is expected")
    attributes, written = vars(arguments), frozenset(vars(arguments))
    for flag in FLAGS.values():
        value = list(flag.default) if isinstance(flag.default, tuple) else flag.default
        attributes.setdefault(flag.attribute, value)
    for name, value in (defaults or {}).items():
        if attributes.get(name) is None:
            attributes[name] = value
    if attributes["deepspeed"] and attributes["num_experts"] == [1]:  # Megatron-DeepSpeed's default: dense
        attributes["num_experts"] = None
    changed = tuple(flag for flag in flags if _differs(flag, attributes[flag.attribute]))
    for flag in changed:
        if flag.effect == "refused":
            value = "" if flag.kind is bool else shown(attributes[flag.attribute])
            raise ConfigError(flag.name, flag.problem(value))
    notes = _notes(arguments, [flag for flag in changed if flag.attribute in written])
    return Line(arguments, changed, written, (*_ignored({**ignored, **unknown}, names), *notes))


def defaults() -> Arguments:
    """The attributes of all flags, with Megatron-LM's defaults."""
    return Arguments(**vars(parse([]).arguments))


@cache
def _declared() -> tuple[argparse.ArgumentParser, list[ForeignName]]:
    """The parser of all flags: declaring a thousand takes as long as reading many lines."""
    return _parser(None)


def _parser(extra: ExtraArguments | None) -> tuple[argparse.ArgumentParser, list[ForeignName]]:
    """The parser, and the flags of which a script has none of its own with the same name."""
    parser: argparse.ArgumentParser = _Parser(
        prog="hexad megatron --", allow_abbrev=False, add_help=False, conflict_handler="resolve"
    )
    actions: list[argparse.Action] = []
    for title, group in GROUPS.items():
        section = parser.add_argument_group(title)
        actions += [_declare(section, flag) for flag in group]
    if extra is not None:
        extended = extra(parser)
        parser = extended if isinstance(extended, argparse.ArgumentParser) else parser
    ours = set(map(id, actions))
    script_flags = {
        name for action in parser._actions if id(action) not in ours for name in action.option_strings
    }
    return parser, [flag for flag in dict.fromkeys(FLAGS.values()) if flag.name not in script_flags]


def _declare(section: argparse._ArgumentGroup, flag: ForeignName) -> argparse.Action:
    names = (flag.name, *flag.aliases)
    rest: dict[str, Any] = {"dest": flag.attribute, "default": argparse.SUPPRESS}
    if f"--no-{flag.name.removeprefix('--')}" in flag.aliases:
        return section.add_argument(flag.name, action=argparse.BooleanOptionalAction, **rest)
    if flag.kind is bool:
        return section.add_argument(*names, action="store_false" if flag.default else "store_true", **rest)
    rest |= {"nargs": "+"} if flag.several else {}
    kind = partial(_choice, flag.choices) if flag.choices else flag.kind
    return section.add_argument(*names, type=kind, choices=list(flag.choices) or None, **rest)


def _choice(choices: Sequence[str], word: str) -> str:
    """The choice that a word means: forks spell some in other cases, or with other signs between words."""

    def plain(text: str) -> str:
        return re.sub("[-_ ]", "", text).lower()

    return next((choice for choice in choices if plain(choice) == plain(word)), word)


def _differs(flag: ForeignName, value: Any) -> bool:
    """Whether a flag has another value than its default."""
    return bool((tuple(value) if isinstance(value, list) else value) != flag.default)


def _is_flag(word: str) -> bool:
    """Whether argparse takes a word for a flag."""
    return word.startswith("-") and " " not in word and not re.fullmatch(r"-|--|-\d+|-\d*\.\d+", word)


def _spelled(word: str, known: Container[str]) -> str:
    """A word as it is, or a flag with hyphens in place of underscores, which some forks write."""
    name, *value = word.split("=", 1)
    hyphens = name.replace("_", "-")
    spelled = hyphens if _is_flag(word) and name not in known and hyphens in known else name
    return "=".join((spelled, *value))


def _without(
    words: Sequence[str], flags: Container[str], keep: bool = False
) -> tuple[list[str], dict[str, list[str]]]:
    """The words without these flags, or with ``keep`` of these only; and what is left out, by flag."""
    kept: list[str] = []
    removed: dict[str, list[str]] = {}
    values = kept
    for word in words:
        name, _, value = word.partition("=")
        if not _is_flag(word):
            values.append(word)
        elif (name in flags) == keep:
            values = kept
            kept.append(word)
        else:
            values = removed.setdefault(name, [])
            values += [value] if value else []
    return kept, removed


def _ignored(flags: Mapping[str, Sequence[str]], named: Collection[str]) -> tuple[str, ...]:
    """The notes on flags that are ignored, with their values, and on those that are not on the line."""
    written = [" ".join((name, *values)) for name, values in flags.items()]
    absent = sorted(name for name in named if name not in flags)
    notes = ((written, "ignored"), (absent, "to be ignored, but not on the line"))
    return tuple(f"{', '.join(names)}: {note}" for names, note in notes if names)


def _unknown(names: Sequence[str], known: Collection[str], others: Sequence[str]) -> ConfigError:
    """The error for flags that are not known."""
    option = next((name for name in names if name in others), None)
    if option is not None:
        return ConfigError(option, "an option of hexad megatron; give it before --")
    options = {*others, *known}
    if len(names) == 1:
        problem = f"not a flag of Megatron-LM that Hexad knows{did_you_mean(names[0], options)}"
        return ConfigError(names[0], f"{problem}; correct it, or ignore it with --ignore {names[0]}")
    near = [match for name in names for match in get_close_matches(name, options, n=1, cutoff=_CLOSE)]
    meant = f" (did you mean {', '.join(map(repr, dict.fromkeys(near)))}?)" if near else ""
    fix = f"correct them, or ignore them with --ignore {','.join(names)}"
    return ConfigError(", ".join(names), f"not flags of Megatron-LM that Hexad knows{meant}; {fix}")


_CLOSE = 0.8
"""Similarity of a flag that one of several unknown ones may mean."""


@contextmanager
def naming_flags() -> Iterator[None]:
    """Add to errors that name a setting the flags that determine it.

    Raises:
        ConfigError: in place of one without flags.
    """
    try:
        yield
    except ConfigError as error:
        setting = error.field.partition("[")[0]
        flags = list(dict.fromkeys(flag.name for flag in FLAGS.values() if flag.target == setting))
        if not flags or error.field == "checkpoint.resume":
            raise
        raise ConfigError(error.field, f"{error.problem} ({' or '.join(flags[:3])})") from None


def values_of_flags(arguments: Namespace) -> dict[str, Any]:
    """The values that all ranks need alike, by flag: those of Megatron-LM's flags that have an effect, which
    ``--local-rank`` and a script's own flags do not."""
    return {name: getattr(arguments, flag.attribute) for name, flag in FLAGS.items() if flag.effect != "none"}


def shown(value: Any) -> str:
    """A value as it is written on the line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _notes(arguments: Namespace, flags: Sequence[ForeignName]) -> tuple[str, ...]:
    """The flags without effect, those with the same reason in one line."""
    reasons: list[tuple[str, str]] = []
    for flag in flags:
        if flag.effect == "none":
            reasons.append((flag.name, f": {flag.note}"))
        elif flag.needs and not any(_holds(arguments, condition) for condition in flag.needs):
            reasons.append((flag.name, f" without {alternatives(flag.needs)}"))
    return notes_without_effect(reasons)


def _holds(arguments: Namespace, condition: str) -> bool:
    """Whether one of :attr:`ForeignName.needs` is met."""
    name, _, value = condition.partition(" ")
    set_value = getattr(arguments, FLAGS[name].attribute)
    return set_value == value if value else _differs(FLAGS[name], set_value)


_POSITIVE = (
    "--global-batch-size",
    "--train-iters",
    "--exit-interval",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--ddp-bucket-size",
)
"""Flags without which a line is complete, and whose numbers are at least 1."""


def derive(arguments: Namespace, world: int | None = None) -> None:
    """Complete the namespace of :func:`parse` in place, as Megatron-LM's ``validate_args``.

    Args:
        world: number of ranks; None: as few as the degrees allow.

    Raises:
        ConfigError: a required flag is missing, a size is not positive, or flags exclude each other.
    """
    required = [name for name, flag in FLAGS.items() if flag.note.startswith("required")]
    for name in (*required, *_POSITIVE):
        value = getattr(arguments, FLAGS[name].attribute)
        if value is None and name in required:
            raise ConfigError(name, "is missing; give it")
        if value is not None and value < 1 and FLAGS[name].kind is int:
            raise ConfigError(name, f"found {value}, expected at least 1")
    derive_model(arguments, world)
    _exclude(arguments, "--fp16", "--bf16")
    _tokens(arguments)
    _iterations(arguments)


def derive_model(arguments: Namespace, world: int | None = None) -> None:
    """The part of :func:`derive` that concerns the model and the layout.

    Raises:
        ConfigError: as there.
    """
    as_megatron(arguments)
    _layout(arguments, world)
    _model(arguments)


def _layout(arguments: Namespace, world: int | None) -> None:
    """Compute world size, data ranks and global batch size."""
    if arguments.ds_sequence_parallel_size > 1:
        if arguments.context_parallel_size > 1:
            problem = f"found beside --context-parallel-size {arguments.context_parallel_size}; give one"
            raise ConfigError("--ds-sequence-parallel-size", problem)
        arguments.context_parallel_size = arguments.ds_sequence_parallel_size
        arguments.cp_comm_type = ["a2a"]
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    model = tensor * pipeline * arguments.context_parallel_size
    arguments.world_size = model if world is None else world
    if arguments.world_size % model:
        raise ConfigError(
            "--tensor-model-parallel-size",
            f"found {tensor} x pipeline {pipeline} x context {arguments.context_parallel_size}, which do not "
            f"divide the {arguments.world_size} ranks; change one of them",
        )
    arguments.virtual_pipeline_model_parallel_size = None
    arguments.data_parallel_size = arguments.world_size // model
    if arguments.global_batch_size is None:
        arguments.global_batch_size = arguments.micro_batch_size * arguments.data_parallel_size
    if tensor == 1:
        arguments.sequence_parallel = False


def _model(arguments: Namespace) -> None:
    """Compute the sizes that follow from others."""
    hidden, heads = arguments.hidden_size, arguments.num_attention_heads
    if arguments.ffn_hidden_size is None:
        arguments.ffn_hidden_size = 8 * hidden // (3 * 64) * 64 if arguments.swiglu else 4 * hidden
    if arguments.kv_channels is None:
        if hidden % heads:
            raise ConfigError(
                "--hidden-size",
                f"found {hidden}, which {heads} heads do not divide; change one, or give --kv-channels",
            )
        arguments.kv_channels = hidden // heads
    if arguments.num_key_value_heads is not None:
        arguments.group_query_attention, arguments.num_query_groups = True, arguments.num_key_value_heads
    if not arguments.group_query_attention:
        arguments.num_query_groups = heads
    if arguments.use_rotary_position_embeddings or arguments.position_embedding_type == "rotary":
        arguments.position_embedding_type = "rope"


def _exclude(arguments: Namespace, *flags: str) -> None:
    """Refuse two of some flags together."""
    chosen = [flag for flag in flags if getattr(arguments, FLAGS[flag].attribute)]
    if len(chosen) > 1:
        raise ConfigError(chosen[1], f"found beside {chosen[0]}; give one of them")


def _tokens(arguments: Namespace) -> None:
    """Replace numbers of tokens (Megatron-DeepSpeed's) by numbers of samples, or of iterations."""
    if arguments.train_tokens is not None:
        samples = arguments.train_tokens // arguments.seq_length
        arguments.train_samples = min(samples, arguments.train_samples or samples)
    in_samples = arguments.train_samples is not None
    unit, size = ("samples", 1) if in_samples else ("iters", arguments.global_batch_size)
    for name in ("lr_decay", "lr_warmup"):
        tokens = getattr(arguments, f"{name}_tokens")
        if tokens is not None:
            _exclude(arguments, f"--{name.replace('_', '-')}-{unit}", f"--{name.replace('_', '-')}-tokens")
            setattr(arguments, f"{name}_{unit}", tokens // (arguments.seq_length * size))


def batch_settings(arguments: Namespace) -> BatchSettings:
    """The group ``batch`` of flags that have been read."""
    ramp = arguments.rampup_batch_size
    return BatchSettings.model_construct(
        micro=arguments.micro_batch_size,
        global_=arguments.global_batch_size,
        ramp=None if ramp is None else tuple(ramp),
    )


def _iterations(arguments: Namespace) -> None:
    """Compute ``train_iters``; flags that count samples and flags that count iterations do not mix."""
    _exclude(arguments, "--train-iters", "--train-samples")
    _exclude(arguments, "--lr-warmup-fraction", "--lr-warmup-iters")
    _exclude(arguments, "--lr-warmup-fraction", "--lr-warmup-samples")
    samples = arguments.train_samples is not None
    unit, other = ("iters", "--train-samples") if samples else ("samples", "--train-iters")
    for flag in (f"--lr-decay-{unit}", f"--lr-warmup-{unit}", f"--lr-wsd-decay-{unit}"):
        value = getattr(arguments, FLAGS[flag].attribute)
        if value:
            wanted = flag.replace(unit, "samples" if samples else "iters")
            raise ConfigError(flag, f"found {value} with {other}; use {wanted}")
    ramp = arguments.rampup_batch_size
    if ramp is not None and (len(ramp) != 3 or min(ramp) < 1 or not samples):
        problem = "expected START INCREMENT SAMPLES" if samples else "with --train-iters; use --train-samples"
        raise ConfigError("--rampup-batch-size", f"found {' '.join(map(str, ramp))}, {problem}")
    if samples:
        arguments.train_iters = batch_settings(arguments).steps(arguments.train_samples)
    if not arguments.train_iters:
        problem = f"found {arguments.train_samples} samples, less than one batch" if samples else "is missing"
        raise ConfigError("--train-samples" if samples else "--train-iters", f"{problem}; give it")
