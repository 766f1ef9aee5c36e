"""What names of other systems mean here: flags, settings, keys, arguments and options. Their tables are
data files of one format. No torch.

A row of a file is ``NAMES  TARGET  NOTE, one of CHOICES``: names that are alike, separated by one blank;
after two or more what they become here (``-``: no single setting; ``later:TARGET``: refused until then; or
``none`` or ``refused``), and a note. Lines indented by six blanks continue a row. ``with NAMES:`` precedes
indented rows that have an effect only with one of these. A line ``none: REASON`` or ``refused: REASON``
precedes indented names that have no effect, or are refused with another value than the default. ``[TITLE]``
begins a group.

A name is ``NAME/ALIAS:TYPE=DEFAULT@ATTRIBUTE``, where all but the name may be missing: an alias; the type of
its value (``TYPE*`` takes several), without which it is a switch; the default, else None; the name of its
attribute, where it is another one. ``!NAME`` is a switch that is on by default and turns off; ``!no-NAME``
has the alias ``disable-NAME`` too, unless its attribute is stated. ``?NAME`` is a switch that ``no-NAME``
turns off. ``NAME=DEFAULT`` takes any value, and its default is JSON.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from hexad.config import HexadError, did_you_mean

from .absent import UnknownArgument

Effect = Literal["becomes", "none", "refused"]
"""``becomes``: it determines something here; ``none``: accepted without effect; ``refused``: an error with
another value than the default."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What Hexad does with a name of another system.

    Attributes:
        effect: whether it becomes something here.
        target: what it becomes: settings, or another name.
        note: what is particular; of names without effect and of refused ones the reason.
        fix: what to do instead of using a refused one.
    """

    effect: Effect = "becomes"
    target: str = ""
    note: str = ""
    fix: str = "leave it out"

    @property
    def summary(self) -> str:
        """The meaning in a phrase, for tables."""
        if self.effect == "becomes":
            return self.target or self.note
        return f"no effect: {self.note}" if self.effect == "none" else f"refused: {self.note or self.fix}"

    def problem(self, value: str) -> str:
        """What is wrong with a refused name, for an error that names it; ``value`` is empty for a switch."""
        if not self.note:
            return f"found {value}; it is not supported: {self.fix}"
        return f"{f'found {value}, but ' if value else ''}{self.note}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class ForeignName(Meaning):
    """A name of another system.

    Attributes:
        name: as it is written, ``--num-layers``.
        kind: of its value; ``bool`` for a switch, which has none; ``object`` for any.
        default: of the other system. A switch whose default is true is turned off (``--no-...``).
        several: it takes a list of values.
        choices: values that the other system accepts; empty for any.
        dest: its attribute; by default its name.
        aliases: other names of it; ``--no-NAME`` of a switch turns it off.
        needs: names of which one must have another value than its default, or the value that follows its
            name; without any of them this name has no effect.
    """

    name: str
    kind: type = str
    default: Any = None
    several: bool = False
    choices: Sequence[str] = ()
    dest: str = ""
    aliases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """The name of its attribute."""
        return self.dest or self.name.removeprefix("--").replace("-", "_")


Groups = dict[str, tuple[ForeignName, ...]]
"""Names by title."""


def read_foreign_names(package: str, name: str, prefix: str = "") -> Groups:
    """Read a table; names before the first title are under an empty one.

    Args:
        package: the full name of the one that has the file.
        name: of the file.
        prefix: of all names; ``-`` is enough for a single letter where it is ``--``.
    """
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    groups: dict[str, list[ForeignName]] = {"": []}
    title, needs = "", tuple[str, ...]()
    reason: re.Match[str] | None = None
    for line in text.replace("\n      ", " ").splitlines():
        if not line or line.startswith("#"):
            continue
        indented = line.startswith(" ")
        if line.startswith("["):
            title = line.strip("[]")
            groups[title] = []
        elif indented and reason is not None:
            groups[title] += [_name(word, prefix, reason[1], reason[2]) for word in line.split()]
        elif reason := re.fullmatch("(none|refused): ?(.*)", line):
            pass
        elif line.startswith("with "):
            needs = tuple(line.removeprefix("with ").removesuffix(":").split(", "))
        else:
            words, rest = re.split(" {2,}", line.strip(), maxsplit=1)
            target, _, note = rest.partition(" ")
            # A default may have blanks: "969, 30, 1".
            for word in re.split(" (?=[a-z_!?])", words):
                groups[title].append(_name(word, prefix, target, note, needs if indented else ()))
    return {title: tuple(names) for title, names in groups.items() if title or names}


_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "": bool}


def _name(word: str, prefix: str, target: str, note: str, needs: tuple[str, ...] = ()) -> ForeignName:
    """A name in the format that the head of this module describes."""
    note, _, choices = note.partition("one of ")
    later = target.startswith("later:")
    effect: Effect = "none" if target == "none" else "refused" if later or target == "refused" else "becomes"
    meaning: dict[str, Any] = {
        "effect": effect,
        "target": "" if target in ("-", "none", "refused") else target.removeprefix("later:"),
        "note": note.strip(),
        "choices": tuple(choices.split(", ")) if choices else (),
        "needs": needs,
    }
    if any_value := re.fullmatch(r"(\w+)=(.*)", word):
        name, default = any_value.groups()
        return ForeignName(name=prefix + name, kind=object, default=json.loads(default), **meaning)
    word, _, dest = word.partition("@")
    word, _, form = word.partition(":")
    form, has_default, text = form.partition("=")
    kind, several = _KINDS[form.rstrip("*")], form.endswith("*")
    value: Any = kind(text) if has_default else None
    if kind is bool:
        value = word.startswith("!")
    short = prefix.removesuffix("-")
    name, *aliases = (f"{prefix if len(part) > 1 else short}{part}" for part in word.lstrip("!?").split("/"))
    if word.startswith("?"):
        aliases.append(name.replace("--", "--no-"))
    if value is True and not dest:
        dest = name.removeprefix("--no-").replace("-", "_")
        aliases.append(name.replace("--no-", "--disable-"))
    default = (value,) if several and has_default else value
    rest: dict[str, Any] = {"several": several, "dest": dest, "aliases": tuple(aliases)}
    return ForeignName(name=name, kind=kind, default=default, **rest, **meaning)


def check_arguments(function: str, arguments: Mapping[str, Any], known: Sequence[ForeignName]) -> None:
    """Refuse arguments that a function does not have, and values that Hexad has no equivalent for.

    Args:
        function: for messages.
        arguments: its keyword arguments beside those of its signature.
        known: those that it has; None is accepted for all of them.

    Raises:
        UnknownArgument: an unknown argument.
        HexadError: another value than the default of a refused one.
    """
    names = {name.name: name for name in known}
    for name, value in arguments.items():
        if name not in names:
            problem = f"unexpected argument {name!r}{did_you_mean(name, names)}"
            fix = "neither Megatron-LM nor Hexad has it; leave it out"
            raise UnknownArgument(f"{function}: {problem}: {fix}")
        meaning = names[name]
        if meaning.effect == "refused" and value is not None and value != meaning.default:
            raise HexadError(f"{function}: {meaning.problem(f'{name} {shown_value(value)}')}")


def shown_value(value: object) -> str:
    """A value as Python writes it, or the name of its class where that is long."""
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__


def notes_without_effect(reasons: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Notes that names have no effect, those with the same reason in one: ``a, b: no effect: REASON``.

    Args:
        reasons: (name, what follows ``no effect``).
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return tuple(f"{', '.join(group)}: no effect{reason}" for reason, group in names.items())
