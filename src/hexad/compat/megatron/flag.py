"""What a flag of Megatron-LM is to Hexad. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
        aliases: other names of it.
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
        """Its attribute in ``get_args()``."""
        return self.dest or self.name.removeprefix("--").replace("-", "_")


def alternatives(flags: Sequence[str]) -> str:
    """Flags in words: ``--a, --b or --c``."""
    return " or ".join(filter(None, (", ".join(flags[:-1]), flags[-1])))


def switch(name: str, target: str = "", note: str = "", **rest: Any) -> Flag:
    """A flag without a value that is off by default."""
    return Flag(name, bool, False, target, note, **rest)


def unused(name: str, note: str, kind: type = bool, default: Any = None, **rest: Any) -> Flag:
    """A flag that is accepted without effect."""
    value = False if kind is bool and default is None else default
    return Flag(name, kind, value, "", note, "none", **rest)


def negated(name: str, dest: str, target: str = "", note: str = "", **rest: Any) -> Flag:
    """A switch whose attribute is true by default."""
    return Flag(name, bool, True, target, note, dest=dest, **rest)


def turned_off(name: str, dest: str, note: str) -> Flag:
    """A switch without effect whose attribute is true by default."""
    return negated(name, dest, note=note, effect="none")


def refused(name: str, note: str, kind: type = bool, default: Any = None, **rest: Any) -> Flag:
    """A flag that is refused with any value but the default."""
    value = False if kind is bool and default is None else default
    return Flag(name, kind, value, "", note, "refused", **rest)
