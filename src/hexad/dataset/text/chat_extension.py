"""``{% generation %} ... {% endgeneration %}`` in chat templates: what the assistant writes."""

from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context

MARKS = "__generation_marks__"
"""The variable of a rendering that has its :class:`Marks`."""


@dataclass
class Marks:
    """Places of the blocks of one rendering in its text.

    Attributes:
        length: characters of the text so far, counted by the caller that renders it.
        blocks: (start, end) of each block.
    """

    length: int = 0
    blocks: list[tuple[int, int]] = field(default_factory=list)


class Generation(Extension):
    """Renders the blocks as if they were not marked, and records where they are in the text. A compiled
    template is shared by threads, so what is recorded belongs to the rendering, not to the extension."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        record = self.call_method("_record", [nodes.ContextReference()])
        return nodes.CallBlock(record, [], [], body).set_lineno(line)

    def _record(self, context: Context, caller: Any) -> str:
        text = str(caller())
        marks = context.parent[MARKS]  # a template's own variable of this name does not matter
        marks.blocks.append((marks.length, marks.length + len(text)))
        return text
