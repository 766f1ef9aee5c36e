"""The tables of flags in ``docs/megatron.md``."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hexad.compat.facade.foreign_names import ForeignName
from hexad.compat.megatron.tables import FORKS, GROUPS
from hexad.config import alternatives

MEGATRON = Path(__file__).parent / "megatron.md"
_BEGIN, _END = "<!-- flags:", "<!-- end of flags -->"


def megatron_page() -> str:
    """The page, with its table written again."""
    text = MEGATRON.read_text(encoding="utf-8")
    begin = text.index("\n", text.index(_BEGIN))
    return f"{text[:begin]}\n{''.join(_tables())}{text[text.index(_END) :]}"


def _tables() -> Iterator[str]:
    for title, flags in GROUPS.items():
        if title == next(iter(FORKS)):
            yield "\n## Flags of forks\n\nThat Megatron-LM does not have, or names otherwise.\n"
        yield f"\n### {title}\n\n"
        rows = [flag for flag in flags if flag.effect == "becomes" or flag.target]
        if rows:
            yield "| Flag | Default | Hexad | |\n|---|---|---|---|\n"
        for flag in rows:
            names = ", ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
            cells = (names, _default(flag), _target(flag), _note(flag))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
        others = [flag for flag in flags if flag not in rows]
        if others:
            yield from ("\n" if rows else "", *_reasons(others))
    yield "\n"


def _reasons(flags: Sequence[ForeignName]) -> Iterator[str]:
    """The table of flags that set nothing, by the reason."""
    yield "These set nothing: they have no effect, or are refused with another value than their default.\n\n"
    yield "| | Flags |\n|---|---|\n"
    reasons: dict[str, list[str]] = {}
    for flag in flags:
        reasons.setdefault(flag.summary, []).append(f"`{flag.name}`")
    yield from (f"| {summary} | {', '.join(names)} |\n" for summary, names in reasons.items())


def _note(flag: ForeignName) -> str:
    needed = f"with {alternatives(flag.needs)}" if flag.needs else ""
    return "; ".join(filter(None, (needed, flag.note)))


def _default(flag: ForeignName) -> str:
    """A switch has none: it is given or not."""
    if flag.kind is bool or flag.default in (None, ""):
        return ""
    value: Any = flag.default
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _target(flag: ForeignName) -> str:
    if flag.effect == "none":
        return "no effect"
    target = f"`{flag.target}`" if flag.target else ""
    if flag.effect == "refused":
        return f"refused (will be {target})" if target else "refused"
    return target
