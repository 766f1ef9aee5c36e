"""The counters of a server, in Prometheus' format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..requests import RequestUpdate

if TYPE_CHECKING:
    from ..front import Front
    from ..generator import Generator

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=_SECONDS, registry=registry)

        self.requests = Counter(
            "hexad_requests", "Requests, by path and status", ["path", "status"], registry=registry
        )
        self._prompt = Counter("hexad_prompt_tokens", "Tokens of prompts", registry=registry)
        self._cached = Counter(
            "hexad_cached_prompt_tokens", "Tokens of prompts whose keys were at hand", registry=registry
        )
        self._new = Counter("hexad_generated_tokens", "New tokens", registry=registry)
        self._first = histogram("hexad_time_to_first_token_seconds", "From a request to its first token")
        self._between = histogram("hexad_time_between_tokens_seconds", "Between tokens of a request")
        self._running = Gauge(
            "hexad_requests_unfinished", "Requests that are not complete", registry=registry
        )
        self._blocks = Gauge(
            "hexad_cache_used_ratio", "Part of the first replica's cache in use", registry=registry
        )
        self._preempted = Gauge(
            "hexad_preemptions", "Sequences of the first replica that were computed again", registry=registry
        )

    def prompt(self, tokens: int) -> None:
        """Count a prompt."""
        self._prompt.inc(tokens)

    def update(self, update: RequestUpdate, seconds: float, first: bool) -> None:
        """Count an update of a stream, so many seconds after the one before or after its beginning."""
        self._new.inc(len(update.tokens))
        (self._first if first else self._between).observe(seconds)
        if first:
            self._cached.inc(update.cached)

    def state(self, front: Front, generator: Generator) -> None:
        """Note the state of the generator."""
        pool = generator.scheduler.pool
        self._running.set(front.unfinished)
        self._blocks.set(1 - pool.available / pool.blocks)
        self._preempted.set(generator.scheduler.preemptions)

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)
