"""Context parallel: what auto means, and which sizes fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hexad.config import Config, ConfigError
from hexad.config.model import ModelSettings
from hexad.parallel.context.slice import divides_heads, largest_group


def heads_of_rank(model: ModelSettings, tensor: int) -> tuple[int, int]:
    """Query heads of a tensor rank, and its key/value heads."""
    return model.heads // tensor, max(1, int(model.kv_heads) // tensor)


def resolved_context(config: Config) -> dict[str, Any]:
    """Numbers and names for ``auto``; settings of a method or a degree that is not used stay as they are."""
    settings = config.parallel
    found: dict[str, Any] = {}
    if settings.context == 1:
        return found
    if settings.context_method == "ulysses_ring" and settings.context_ulysses == "auto":
        heads = heads_of_rank(config.model, settings.tensor)
        found["context_ulysses"] = largest_group(settings.context, *heads)
    if settings.context_balance == "auto":
        if settings.context_method == "ulysses":
            found["context_balance"] = "none"
        else:
            found["context_balance"] = "work" if config.data.documents == "isolate" else "zigzag"
    return found


def context_problems(config: Config) -> Iterator[ConfigError]:
    """What does not fit."""
    settings, sequence = config.parallel, config.data.sequence
    context, method = settings.context, settings.context_method
    if method != "ulysses_ring" and settings.context_ulysses != "auto":
        yield ConfigError(
            "parallel.context_ulysses",
            f"found {settings.context_ulysses} with parallel.context_method {method}; only ulysses_ring uses "
            "it: remove it",
        )
    if method == "ulysses" and settings.context_balance not in ("auto", "none"):
        yield ConfigError(
            "parallel.context_balance",
            f"found {settings.context_balance} with parallel.context_method ulysses, where every rank has "
            "some heads of all tokens, as much to compute as the others: remove it",
        )
    if context == 1:
        return
    if sequence % context:
        low = sequence // context * context
        near = f"{low} or {low + context}" if low else str(context)
        yield ConfigError(
            "data.sequence",
            f"found {sequence}, which does not divide by parallel.context {context}; use {near}",
        )
    yield from _heads(config)
    if config.run.compile == "full":
        yield ConfigError(
            "run.compile",
            f"found full with parallel.context {context}; it needs parallel.context 1, or use pointwise",
        )


def _heads(config: Config) -> Iterator[ConfigError]:
    """What ``ulysses`` asks of the heads."""
    settings, model = config.parallel, config.model
    heads, kv_heads = heads_of_rank(model, settings.tensor)
    share = f" / parallel.tensor {settings.tensor}" if settings.tensor > 1 else ""
    found = f"model.heads {model.heads}{share} and model.kv_heads {model.kv_heads}{share}"
    context, group = settings.context, settings.context_ulysses
    if settings.context_method == "ulysses" and not divides_heads(context, heads, kv_heads):
        near = _near(context, heads, kv_heads)
        yield ConfigError(
            "parallel.context",
            f"found {context} with parallel.context_method ulysses, but so many ranks cannot share {found} "
            f"(the first must divide by it, the second divide by it or divide it); use {near}, or "
            "ulysses_ring or ring",
        )
    if settings.context_method == "ulysses_ring" and group != "auto":
        if context % group:
            choices = [n for n in range(1, context + 1) if context % n == 0]
            near = str(min(choices, key=lambda n: abs(n - group)))
            yield ConfigError(
                "parallel.context_ulysses",
                f"found {group}, which does not divide parallel.context {context}; use {near}, or auto",
            )
        if not divides_heads(group, heads, kv_heads):
            yield ConfigError(
                "parallel.context_ulysses",
                f"found {group}, but so many ranks cannot share {found} (the first must divide by it, the "
                f"second divide by it or divide it); use {largest_group(context, heads, kv_heads)}, or auto",
            )


def _near(ranks: int, heads: int, kv_heads: int) -> str:
    """The nearest numbers of ranks that can share the heads, one below and one above."""
    fitting = [n for n in range(1, heads + 1) if divides_heads(n, heads, kv_heads)]
    below, above = [n for n in fitting if n < ranks][-1:], [n for n in fitting if n > ranks][:1]
    return " or ".join(map(str, (*below, *above)))
