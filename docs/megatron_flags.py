"""The table of Megatron-LM's flags in ``docs/megatron.md``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hexad.compat.megatron.flags import GROUPS, OTHERS, Flag, alternatives

MEGATRON = Path(__file__).parent / "megatron.md"
_BEGIN, _END = "<!-- flags:", "<!-- end of flags -->"


def megatron_page() -> str:
    """The page, with its table written again."""
    text = MEGATRON.read_text(encoding="utf-8")
    begin = text.index("\n", text.index(_BEGIN))
    return f"{text[:begin]}\n{''.join(_tables())}{text[text.index(_END) :]}"


def _tables() -> Iterator[str]:
    for title, flags in GROUPS.items():
        if title == OTHERS:
            continue
        yield f"\n### {title}\n\n| Flag | Default | Hexad | |\n|---|---|---|---|\n"
        for flag in flags:
            names = ", ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
            cells = (names, _default(flag), _target(flag), _note(flag))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    yield f"\n### {OTHERS}\n\nThese set nothing: they have no effect, or are refused with another value than "
    yield "their default.\n\n| | Flags |\n|---|---|\n"
    reasons: dict[tuple[str, str], list[str]] = {}
    for flag in GROUPS[OTHERS]:
        reasons.setdefault((flag.effect, flag.note), []).append(f"`{flag.name}`")
    for (effect, note), names in reasons.items():
        word = "refused" if effect == "refused" else "no effect"
        yield f"| {word}: {note} | {', '.join(names)} |\n"
    yield "\n"


def _note(flag: Flag) -> str:
    needed = f"with {alternatives(flag.needs)}" if flag.needs else ""
    return "; ".join(filter(None, (needed, flag.note)))


def _default(flag: Flag) -> str:
    """A switch has none: it is given or not."""
    if flag.kind is bool or flag.default in (None, ""):
        return ""
    value: Any = flag.default
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _target(flag: Flag) -> str:
    if flag.effect == "none":
        return "no effect"
    target = f"`{flag.target}`" if flag.target else ""
    if flag.effect == "refused":
        return f"refused (will be {target})" if target else "refused"
    return target
