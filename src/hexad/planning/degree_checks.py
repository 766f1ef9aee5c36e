"""Degrees that do not fit each other, the model or the ranks. No torch."""

from collections.abc import Iterator

from hexad.config import Config, ConfigError, alternatives, divisors
from hexad.config.model import ModelSettings
from hexad.parallel.context.slice import divides_heads, largest_group
from hexad.topology.layout import Layout, nearest_multiples


def heads_of_rank(model: ModelSettings, tensor: int) -> tuple[int, int]:
    """Query heads of a tensor rank, and its key/value heads."""
    return model.heads // tensor, max(1, int(model.kv_heads) // tensor)


def context_problems(config: Config) -> Iterator[ConfigError]:
    """The settings of context parallelism that contradict each other or the model."""
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
        near = nearest_multiples(context, sequence)
        yield ConfigError(
            "data.sequence",
            f"found {sequence}, which does not divide by parallel.context {context}; use {near}",
        )
    yield from _heads(config)


def _heads(config: Config) -> Iterator[ConfigError]:
    """The requirements of ``ulysses`` on the heads that are not met."""
    settings, model = config.parallel, config.model
    heads, kv_heads = heads_of_rank(model, settings.tensor)
    share = f" / parallel.tensor {settings.tensor}" if settings.tensor > 1 else ""
    counts = f"model.heads {model.heads}{share} and model.kv_heads {model.kv_heads}{share}"
    context, group = settings.context, settings.context_ulysses
    if settings.context_method == "ulysses" and not divides_heads(context, heads, kv_heads):
        near = _near(context, heads, kv_heads)
        yield ConfigError(
            "parallel.context",
            f"found {context} with parallel.context_method ulysses, but so many ranks cannot share {counts} "
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
                f"found {group}, but so many ranks cannot share {counts} (the first must divide by it, the "
                f"second divide by it or divide it); use {largest_group(context, heads, kv_heads)}, or auto",
            )


def _near(ranks: int, heads: int, kv_heads: int) -> str:
    """The nearest numbers of ranks that can share the heads, one below and one above."""
    fitting = [n for n in range(1, heads + 1) if divides_heads(n, heads, kv_heads)]
    below, above = [n for n in fitting if n < ranks][-1:], [n for n in fitting if n > ranks][:1]
    return " or ".join(map(str, (*below, *above)))


def tensor_problems(config: Config, tensor: int) -> Iterator[ConfigError]:
    """The sizes that tensor ranks cannot divide."""
    model = config.model
    kv_heads = int(model.kv_heads)
    fitting = _tensor_degrees(model.heads, kv_heads, int(model.ffn_hidden))
    for name, why in (("heads", "each rank takes whole heads"),
                      ("ffn_hidden", "each rank takes an equal shard")):  # fmt: skip
        size = int(getattr(model, name))
        if size % tensor:
            yield ConfigError(
                "parallel.tensor",
                f"found {tensor}, which does not divide model.{name} {size} ({why}); use {fitting}",
            )
    if kv_heads % tensor and tensor % kv_heads:
        yield ConfigError(
            "parallel.tensor",
            f"found {tensor}, expected a divisor or a multiple of model.kv_heads {kv_heads} (each rank takes "
            f"whole heads, or several ranks the same one); use {fitting}",
        )
    context = config.parallel.context
    tokens, share = config.batch.micro * config.data.sequence // context, " / parallel.context"
    if config.parallel.sequence and tokens % tensor:
        yield ConfigError(
            "parallel.sequence",
            f"batch.micro * data.sequence{share if context > 1 else ''} = {tokens} tokens do not divide by "
            f"parallel.tensor {tensor}; change one, or set parallel.sequence: false",
        )


def _tensor_degrees(heads: int, kv_heads: int, ffn: int) -> str:
    """The tensor degrees up to 64 that divide the heads and the feed-forward width, and divide the key/value
    heads or are a multiple."""
    divisors = [n for n in range(1, min(heads, 64) + 1) if heads % n == ffn % n == 0]
    return alternatives([n for n in divisors if kv_heads % n == 0 or n % kv_heads == 0])


def sharding_problems(config: Config, layout: Layout) -> Iterator[ConfigError]:
    """The settings of sharded state that do not fit the ranks or each other."""
    zero, replicas = config.parallel.zero, config.parallel.replicas
    if replicas > 1 and zero == 0:
        yield ConfigError(
            "parallel.replicas",
            f"found {replicas} with parallel.zero 0, where every data rank holds the whole state; "
            "set parallel.zero to 1, 2 or 3, or leave replicas out",
        )
    dense = "data degree" if layout.context == 1 else "data x context degree"
    for data, name in (
        (layout.gradient_ranks, dense),
        (layout.degree("expert_data"), "data degree of expert layers"),
    ):
        if data % replicas:
            yield ConfigError(
                "parallel.replicas",
                f"found {replicas}, which does not divide the {name} {data}; use {divisors(data)}",
            )
    if config.run.compile == "full" and zero == 3:
        yield ConfigError(
            "run.compile",
            "found full with parallel.zero 3, where weights come and go; use zero 0, 1 or 2, or pointwise",
        )
