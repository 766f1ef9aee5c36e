"""``{% generation %} ... {% endgeneration %}`` in chat templates: what the assistant writes."""

from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class Generation(Extension):
    """Renders the blocks as if they were not marked, and records where they stand in the text.

    Attributes:
        parts: the text so far, collected by whoever renders it.
        blocks: (start, end) of each block.
    """

    tags = {"generation"}

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.parts: list[str] = []
        self.blocks: list[tuple[int, int]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        text = str(caller())
        start = sum(map(len, self.parts))
        self.blocks.append((start, start + len(text)))
        return text
