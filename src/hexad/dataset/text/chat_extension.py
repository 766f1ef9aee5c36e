"""``{% generation %} ... {% endgeneration %}`` in chat templates: what the assistant writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class Generation(Extension):
    """Renders the blocks as if they were not marked, and records where they stand in the text.

    ``environment.recording(parts, blocks)``: while a template's ``parts`` are collected, (start, end) of each
    block is appended to ``blocks``.
    """

    tags = {"generation"}

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.extend(recording=self._recording)
        self._parts: list[str] | None = None
        self._blocks: list[tuple[int, int]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        text = str(caller())
        if self._parts is not None:
            start = len("".join(self._parts))
            self._blocks.append((start, start + len(text)))
        return text

    @contextmanager
    def _recording(self, parts: list[str], blocks: list[tuple[int, int]]) -> Iterator[None]:
        self._parts, self._blocks = parts, blocks
        try:
            yield
        finally:
            self._parts, self._blocks = None, []
