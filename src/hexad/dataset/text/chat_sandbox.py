"""Jinja2's sandbox with bounds: how much a chat template may compute and how large a text it may make.

Jinja2's sandbox keeps a template from files and from Python's internals, not from ``'x' * 10**12``, from
loops in loops or from macros that call each other. Here each rendering has a :class:`Budget`, in proportion
to its conversation. Whatever can make a large value is charged before it does: operators, filters and methods
of texts; and every pass of a loop, every call and every output.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from functools import cached_property
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

OPERATIONS = 4_000_000
"""Passes of loops, calls and outputs, beside one for each character of the conversation: some seconds."""
CHARACTERS = 64 << 20
"""Characters of all texts made, and items of lists, beside :data:`PER_CHARACTER` of the conversation's."""
PER_CHARACTER = 64
SECONDS = 20.0
"""Processor time of one rendering: for few operations on large texts, which the other bounds allow."""
_LARGEST_INTEGER = 1 << 16
"""Bits of an integer, which grow with each multiplication."""
_STATIC = 64
"""Characters of a template's own text that cost an operation each time a loop writes them."""


class TemplateLimit(Exception):
    """A template asks for more than :class:`Budget` allows."""


class Budget:
    """The work that one rendering may still do.

    Args:
        size: of the conversation, in characters and values.
    """

    def __init__(self, size: int) -> None:
        self._most = OPERATIONS + size, CHARACTERS + PER_CHARACTER * size
        self._operations, self._characters = self._most
        self._deadline, self._check = time.thread_time() + SECONDS, 64

    def spend(self, operations: int = 1) -> None:
        """Charge operations.

        Raises:
            TemplateLimit: there have been too many, or they have taken too long.
        """
        self._operations -= operations
        if self._operations < 0:
            raise TemplateLimit(f"more than {self._most[0]:,} passes of loops and calls")
        self._check -= 1
        if not self._check:
            self._check = 64
            if time.thread_time() > self._deadline:
                raise TemplateLimit(f"more than {SECONDS:.0f} s of processor time")

    def make(self, characters: int) -> None:
        """Charge the characters of a text, or the items of a list, that is about to be made.

        Raises:
            TemplateLimit: there would be too many.
        """
        self._characters -= characters
        if self._characters < 0:
            raise TemplateLimit(f"texts and lists of more than {self._most[1]:,} characters in all")

    def weight(self, value: Any) -> int:
        """An upper bound of the length of a value's text, but for escapes. What a list holds several times
        counts each time: lists of lists may be small and their text enormous.

        Raises:
            TemplateLimit: it is larger than any text may be.
        """
        return len(value) if isinstance(value, str) else _weight(value, self, {})


def _weight(value: Any, budget: Budget, known: dict[int, int]) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 8 + value.bit_length() // 3
    if not isinstance(value, Collection):
        return 32
    if id(value) not in known:
        budget.spend(1 + len(value))
        items: Iterable[Any] = value
        if isinstance(value, Mapping):
            items = (item for pair in value.items() for item in pair)
        known[id(value)] = 8 + sum(_weight(item, budget, known) + 4 for item in items)
    if known[id(value)] > budget._most[1]:
        raise TemplateLimit(f"a list with a text of more than {budget._most[1]:,} characters")
    return known[id(value)]


class _BoundedContext(Context):
    """The variables of a rendering, and its budget."""

    @cached_property
    def budget(self) -> Budget:
        """The budget, charged in proportion to the number of variables."""
        return Budget(sum(map(_measured, self.parent.values())))

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        assert isinstance(context, _BoundedContext)
        context.budget = self.budget
        return context


def _measured(value: Any) -> int:
    """Characters and values of a conversation, which is a tree."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(1 + len(str(name)) + _measured(item) for name, item in value.items())
    return sum(1 + _measured(item) for item in value) if isinstance(value, list | tuple) else 0


class _Passes:
    """The items of a loop, each charged to the budget.

    Args:
        cost: operations of a pass.
    """

    def __init__(self, items: Any, budget: Budget, cost: int = 1) -> None:
        self._items, self._budget, self._cost = items, budget, cost

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.spend(self._cost)
            yield item

    def __len__(self) -> int:
        return len(self._items)  # of a generator: TypeError, which Jinja2 expects


class _Charging(NodeTransformer):
    """Charges for passes of loops, for ``~`` and for lists in a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        static = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _called("passes", node.iter, nodes.Const(1 + static // _STATIC))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [
            item if isinstance(item, nodes.Const) else _called("charged", item) for item in node.nodes
        ]
        return node

    def _visit_items(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        constant = all(isinstance(item, nodes.Const) for item in node.iter_child_nodes())
        return node if constant or getattr(node, "ctx", "load") != "load" else _called("charged", node)

    visit_List = visit_Tuple = visit_Dict = _visit_items


def _called(name: str, *arguments: Any) -> nodes.Expr:
    """A call of one of :class:`BoundedSandbox`'s functions in a template."""
    return nodes.Call(
        nodes.EnvironmentAttribute(name), list(arguments), [], None, None, lineno=arguments[0].lineno
    )


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates are bounded by a :class:`Budget` each time they are rendered.

    Args:
        filters: beside Jinja2's, or in place of them.
    """

    context_class = _BoundedContext
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options, finalize=_charged)
        self.passes, self.charged = _passes, _charged
        del self.globals["lipsum"]  # of random text
        plain = ImmutableSandboxedEnvironment()
        plain.filters.update(filters)
        self.filters = {name: _bounded(plain, name) for name in plain.filters}

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> str:
        tree = _Charging().visit(source)
        tree.set_environment(self)
        return super()._generate(tree, *arguments, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        budget.spend()
        if isinstance(left, str | bytes) and operator == "%":
            budget.make(_formatted(budget, left, "%", right))
        elif isinstance(left, int | float) and isinstance(right, int | float):
            bits = [value.bit_length() if isinstance(value, int) else 0 for value in (left, right)]
            times = isinstance(left, int) and isinstance(right, int) and operator == "**"
            # The second of '**' is the number of multiplications.
            if (bits[0] * max(int(right), 0) if times else sum(bits)) > _LARGEST_INTEGER:
                raise TemplateLimit(f"an integer of more than {_LARGEST_INTEGER} bits")
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            value, count = (right, left) if isinstance(left, int) else (left, right)
            budget.make(budget.weight(value) * max(count, 0))
        elif operator == "+":
            budget.make(budget.weight(left) + budget.weight(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj is _charged or __obj is _passes:
            return __obj(__context, *args)  # kwargs: variables of loops, which they do not need
        budget = _budget(__context)
        budget.spend()
        method = getattr(__obj, "__wrapped__", __obj)  # str.format is wrapped by Jinja2's sandbox
        value = getattr(method, "__self__", None)
        if isinstance(value, str | bytes | int) and callable(method):
            args = tuple(list(_Passes(arg, budget)) if isinstance(arg, Iterator) else arg for arg in args)
            size = _expanded(budget, method.__name__, value, (*args, *kwargs.values()))
            budget.make(size or 0)
            result = super().call(__context, __obj, *args, **kwargs)
            if size is None:
                budget.make(len(result) if isinstance(result, str | bytes | list | tuple) else 0)
            return result
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):  # of a macro, of which each part has been charged
            budget.make(len(result))
        elif isinstance(result, Mapping) and __obj is dict:
            budget.make(budget.weight(result))
        return result


def _budget(context: Context) -> Budget:
    assert isinstance(context, _BoundedContext)
    return context.budget


def _passes(context: Context, items: Any, cost: int) -> Any:
    return _Passes(items, _budget(context), cost)


@pass_context
def _charged(context: Context, value: Any) -> Any:
    """A value that is written, joined to a text or put into a list, charged."""
    budget = _budget(context)
    budget.spend()
    budget.make(budget.weight(value))
    return value


_OF_ITEMS = frozenset(
    "batch dictsort groupby items list map max min random reject rejectattr reverse select selectattr slice "
    "sort sum unique".split()
)
"""Filters that run over items, of a text its characters."""
_OF_ANY_SIZE = frozenset("attr count d default first last length".split())
"""Filters that read no more than one item."""
_ESCAPED = 12
"""Characters that stand for one in HTML, URLs and JSON, at most."""


def _bounded(plain: ImmutableSandboxedEnvironment, name: str) -> Callable[..., Any]:
    """A filter that is charged before it is applied."""

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.spend()
        if isinstance(value, Iterator):
            value = list(_Passes(value, budget)) if name in ("join", "sum") else iter(_Passes(value, budget))
        operands = (*args, *kwargs.values())
        if name == "join":
            budget.make(_joined(budget, value, max(map(budget.weight, operands), default=0)))
        elif name in _OF_ITEMS:
            _charge_items(budget, name, value, operands)
        elif name not in _OF_ANY_SIZE:
            size = _expanded(budget, name, value, operands, True)
            budget.make(4 * budget.weight(value) if size is None else size)
            if name in ("striptags", "urlize", "wordwrap", "xmlattr"):  # their time grows with the square
                budget.spend(budget.weight(value) ** 2 >> 16)
        return plain.call_filter(name, value, args, kwargs, context=context, eval_ctx=context.eval_ctx)

    return bounded


def _charge_items(budget: Budget, name: str, value: Any, operands: tuple[Any, ...]) -> None:
    """Charge a filter that runs over items."""
    count = len(value) if isinstance(value, Sized) else 0
    budget.spend(count)
    numbers = [number for number in operands if isinstance(number, int)]
    if name in ("batch", "slice"):
        budget.spend(max(numbers, default=0))
    plain = not isinstance(value, list | tuple) or all(isinstance(item, int | float) for item in value)
    if name == "sum" and not plain:  # each sum of lists is a new list
        budget.make(count * budget.weight(value))
    if name in ("groupby", "dictsort", "sort", "unique", "max", "min"):  # values are compared
        budget.make(budget.weight(value))


def _expanded(
    budget: Budget, name: str, value: Any, operands: tuple[Any, ...], filtered: bool = False
) -> int | None:
    """The most characters that a filter, or a method of a text, returns; None: no more than four for each
    that it has."""
    size = budget.weight(value)
    text = value if isinstance(value, str) else ""
    texts = [item for item in operands if isinstance(item, str | bytes)]
    number = max((int(item) for item in operands if isinstance(item, int)), default=0)
    longest = max(map(len, texts), default=0)
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes", "truncate"):
        return size + max(number, 80)
    if name == "replace":
        count = text.count(texts[0]) if text and texts and isinstance(texts[0], str) else size + 1
        return size + count * longest
    if name == "join":
        return _joined(budget, operands[0] if operands else (), size)
    if name == "expandtabs":
        return size + text.count("\t") * (number or 8)
    if name == "indent":
        return size + (len(text.splitlines()) + 1) * (max(number, longest) or 4)
    if name == "wordwrap":
        return size * (2 + longest)
    if name in ("format", "format_map"):  # the filter is that of '%'
        mark = "%" if filtered else "{"
        return _formatted(budget, text or str(value), mark, operands)
    if name == "translate":
        return size * (1 + max(map(budget.weight, operands), default=0))
    if name in ("split", "rsplit", "splitlines"):
        separators = text.count(str(texts[0])) if name != "splitlines" and texts and texts[0] else size // 16
        return size + 64 * separators
    if name == "tojson":
        return _ESCAPED * size * (1 + (max(number, longest) * _depth(value, {}) if operands else 0))
    if name in ("e", "escape", "forceescape", "urlencode", "xmlattr"):
        return _ESCAPED * size
    return None


def _joined(budget: Budget, items: Any, separator: int) -> int:
    """The most characters of a text of joined items."""
    return budget.weight(items) + (len(items) if isinstance(items, Sized) else 0) * separator


def _depth(value: Any, known: dict[int, int]) -> int:
    """How deeply lists are nested in a value."""
    if isinstance(value, str) or not isinstance(value, Collection):
        return 0
    if id(value) not in known:
        items = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + max((_depth(item, known) for item in items), default=0)
    return known[id(value)]


_NUMBER = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]*\{")
_STARRED = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*\*")


def _formatted(budget: Budget, form: str | bytes, mark: str, operands: Any) -> int:
    """The most characters of a formatted text with fields that begin with ``%`` or ``{``.

    Raises:
        TemplateLimit: its widths are not all in it.
    """
    text = form if isinstance(form, str) else form.decode("latin-1")
    if _STARRED.search(text) if mark == "%" else _NESTED.search(text.replace("{{", "")):
        raise TemplateLimit("a format with a width that is an argument")
    widest = max((int(digits) if len(digits) < 10 else 10**9 for digits in _NUMBER.findall(text)), default=0)
    return len(text) + text.count(mark) * (widest + 4 * budget.weight(operands))
