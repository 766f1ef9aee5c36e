"""Every flag of Megatron-LM and its forks that ``hexad megatron`` knows, every setting of Megatron-Core's
``TransformerConfig``, further attributes of ``get_args()``, and arguments of functions: what each means here.
They serve the parser, translations and their errors, and the tables in ``docs/megatron.md``. No torch."""

from argparse import Namespace

from ..facade.foreign_names import ForeignName, Meaning, read_foreign_names

FORKS = read_foreign_names(__package__, "forks.txt", "--")
"""Flags of forks only, by the fork."""
GROUPS = read_foreign_names(__package__, "flags.txt", "--") | FORKS
"""Flags by title."""

FLAGS: dict[str, ForeignName] = {
    name: flag for group in GROUPS.values() for flag in group for name in (flag.name, *flag.aliases)
}
"""Flags by name, aliases included."""

EARLIER = {
    row.name: row.default
    for group in read_foreign_names(__package__, "earlier_arguments.txt").values()
    for row in group
}
"""Attribute that ``get_args()`` has in earlier releases and in Megatron-DeepSpeed -> default."""

SETTINGS = {row.name: row for row in read_foreign_names(__package__, "transformer_settings.txt")[""]}
"""Settings of ``TransformerConfig`` by name. The default of a computed one is None; the target of most is a
flag."""

ARGUMENTS = read_foreign_names(__package__, "call_arguments.txt")
"""Arguments of functions and classes beside those of their signatures, by function."""


def flag_of(attribute: str) -> str:
    """The flag of an attribute that has its name."""
    return f"--{attribute.replace('_', '-')}"


def meaning_of(setting: ForeignName) -> Meaning:
    """The meaning of a setting: that of its flag, if it is determined by one."""
    return FLAGS.get(setting.target, setting)


def add_earlier(arguments: Namespace) -> None:
    """Add the attributes that scripts of earlier releases read, with their defaults."""
    for name, value in EARLIER.items():
        if not hasattr(arguments, name):
            setattr(arguments, name, list(value) if isinstance(value, list) else value)
