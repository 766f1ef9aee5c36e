"""Every flag of Megatron-LM and its forks that ``hexad megatron`` knows, read from ``flags.txt`` and
``forks.txt``: for the parser, the translation's refusals and the tables in ``docs/megatron.md``. No torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

Effect = Literal["sets", "none", "refused"]
"""``sets``: it determines settings; ``none``: accepted without effect; ``refused``: with any value but the
default."""


@dataclass(frozen=True)
class Flag:
    """One flag of a launch line.

    Attributes:
        name: as it is written, ``--num-layers``.
        kind: of its value; ``bool`` for a switch, which has none.
        default: Megatron-LM's. A switch whose default is true is turned off (``--no-...``).
        target: the settings that it determines, for the documentation.
        note: what is particular; of flags without effect and of refused ones the reason.
        effect: what Hexad does with it.
        several: it takes a list of values.
        choices: values that Megatron-LM accepts; empty for any.
        dest: its attribute in ``get_args()``; by default its name.
        aliases: other names of it; ``--no-NAME`` of a switch turns it off.
        needs: flags of which one must have another value than its default, or the value that follows its
            name; without any of them this flag has no effect.
    """

    name: str
    kind: type = str
    default: Any = None
    target: str = ""
    note: str = ""
    effect: Effect = "sets"
    several: bool = False
    choices: Sequence[str] = ()
    dest: str = ""
    aliases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """The name of its attribute in ``get_args()``."""
        return self.dest or self.name.removeprefix("--").replace("-", "_")


def flag_of(attribute: str) -> str:
    """The flag of an attribute that has its name."""
    return f"--{attribute.replace('_', '-')}"


def alternatives(flags: Sequence[str]) -> str:
    """Flags in words: ``--a, --b or --c``."""
    return " or ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))


def _groups(text: str) -> dict[str, tuple[Flag, ...]]:
    """The flags of a file, in the format that the head of ``flags.txt`` describes."""
    groups: dict[str, list[Flag]] = {}
    needs: tuple[str, ...] = ()
    title = ""
    reason: re.Match[str] | None = None
    for line in text.replace("\n      ", " ").splitlines():
        if not line or line.startswith("#"):
            continue
        indented = line.startswith(" ")
        if line.startswith("["):
            title = line.strip("[]")
            groups[title] = []
        elif indented and reason is not None:
            groups[title] += [_flag(word, reason[1], reason[2]) for word in line.split()]
        elif reason := re.fullmatch("(none|refused): (.+)", line):
            pass
        elif line.startswith("with "):
            needs = tuple(line.removeprefix("with ").removesuffix(":").split(", "))
        else:
            words, rest = re.split(" {2,}", line.strip(), maxsplit=1)
            effect, _, note = rest.partition(" ")
            # A default may have blanks: "969, 30, 1".
            flags = re.split(" (?=[a-z!?])", words)
            groups[title] += [_flag(word, effect, note, needs if indented else ()) for word in flags]
    return {title: tuple(flags) for title, flags in groups.items()}


_KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "": bool}


def _flag(word: str, effect: str, note: str, needs: tuple[str, ...] = ()) -> Flag:
    spelled, _, dest = word.partition("@")
    spelled, _, form = spelled.partition(":")
    form, given, text = form.partition("=")
    kind, several = _KINDS[form.rstrip("*")], form.endswith("*")
    default: Any = kind(text) if given else None
    if kind is bool:
        default = spelled.startswith("!")
    name, *aliases = (f"--{part}" for part in spelled.lstrip("!?").split("/"))
    if spelled.startswith("?"):
        aliases.append(name.replace("--", "--no-"))
    if default is True and not dest:
        dest = name.removeprefix("--no-").replace("-", "_")
        aliases.append(name.replace("--no-", "--disable-"))
    note, _, choices = note.partition("one of ")
    return Flag(
        name,
        kind,
        (default,) if several and given else default,
        "" if effect in ("-", "none", "refused") else effect.removeprefix("later:"),
        note.strip(),
        "refused" if effect.startswith(("refused", "later:")) else "none" if effect == "none" else "sets",
        several,
        tuple(choices.split(", ")) if choices else (),
        dest,
        tuple(aliases),
        needs,
    )


def _read(name: str) -> dict[str, tuple[Flag, ...]]:
    return _groups(files(__package__).joinpath(name).read_text(encoding="utf-8"))


FORKS = _read("forks.txt")
"""Flags of forks only, by the fork."""
GROUPS = _read("flags.txt") | FORKS
"""By title."""

FLAGS: dict[str, Flag] = {
    name: flag for group in GROUPS.values() for flag in group for name in (flag.name, *flag.aliases)
}
"""By name, aliases included."""
