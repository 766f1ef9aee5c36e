"""Templates that ask for too much end in one line; others render as in Jinja2's sandbox without bounds."""

import json
import random
import re

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hexad.config import HexadError
from hexad.dataset.text.chat import LARGEST_TEMPLATE, ChatTemplate, _compiled
from hexad.dataset.text.chat_sandbox import PER_CHARACTER, Budget, TemplateLimit

LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
PAIR = "{% set n = namespace(s='xxxx', l=[1, 2], m=[1]) %}" + LOOP
LONG = (
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ [1] * 10**9 }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x'.center(1000000000) | length }}",
    "{{ '1'.zfill(10**10) }}",
    "{{ ('x' | attr('ljust'))(10**9) }}",
    "{{ ['x'] | map('center', 1000000000) | list }}",
    "{{ ('a\n' * 1000000) | indent(100000) }}",
    "{{ ('\t' * 100000).expandtabs(1000000) }}",
    "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%.999999999f' % 1.5 }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ range(100000) | map('string') | join('x' * 1000000) }}",
    "{{ ('x' * 1000000).join(range(100000) | map('string')) }}",
    "{{ range(100000) | list | tojson(indent=1000000) }}",
    "{{ ([range(10000) | list] * 10000) | sum(start=[]) }}",
    "{{ ('a b ' * 10000000).split() | length }}",
    PAIR + "{% set n.s = n.s ~ n.s %}" + END,
    PAIR + "{% set n.s = n.s + n.s %}" + END,
    PAIR + "{% set n.s = [n.s, n.s] | join %}" + END,
    PAIR + "{% set n.s = '%s%s' | format(n.s, n.s) %}" + END,
    PAIR + "{% set n.s = '{}{}'.format(n.s, n.s) %}" + END,
    PAIR + "{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}" + END,
    PAIR + "{% set n.l = [n.l, n.l] %}" + END + "{{ n.l | tojson }}",
    PAIR + "{% set n.l = [n.l] + [n.l] %}{% set n.m = [n.m] + [n.m] %}" + END + "{{ n.l == n.m }}",
    PAIR + "{% set n.l = dict(a=n.l, b=n.l) %}" + END,
)
OTHERS = (
    (LOOP * 3 + END * 3, "passes of loops and calls"),
    (PAIR + "{% set n.l = n.l + n.l %}" + END, "passes of loops and calls"),
    (LOOP + "y" * 100000 + END, "passes of loops and calls"),
    ("{% set t %}" + LOOP + "y" * 100000 + END + "{% endset %}", "passes of loops and calls"),
    ("{{ [1] | batch(10**9, 'x') | list }}", "passes of loops and calls"),
    ("{{ [1] | slice(10**9) | list }}", "passes of loops and calls"),
    ("{{ ('x' * 10000000) | wordwrap(1) }}", "passes of loops and calls"),
    ("{{ ('ab' * 10000000) | list }}", "passes of loops and calls"),
    ("{{ 9**(9**9) }}", "an integer of more than 65536 bits"),
    ("{% set n = namespace(a=9) %}" + LOOP + "{% set n.a = n.a * n.a %}" + END, "an integer of more than"),
    ("{{ '{:{}{}}'.format(1, '99', '999999') }}", "a format with a width that is an argument"),
    ("{{ '%*d' % (10**9, 1) }}", "a format with a width that is an argument"),
    ("{% macro a() %}{{ a() }}{{ a() }}{% endmacro %}{{ a() }}", "maximum recursion depth"),
    ("{% block a %}{{ self.a() }}{% endblock %}", "maximum recursion depth"),
    ("{{ lipsum(n=10**9) }}", "'lipsum' is undefined"),
    (PAIR + "{% set n.l = [n.l] %}" + END + "{{ n.l | tojson }}", "maximum recursion depth"),
)
SOURCES = (
    ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, "maximum recursion depth"),
    ("{% for a in [1] %}" * 30 + END * 30, "too many statically nested blocks"),
    ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "maximum recursion depth"),
    ("{{ a" + " | trim" * 3000 + " }}", "maximum recursion depth"),
    ("{{ " + "9" * 100000 + " }}", "Exceeds the limit"),
    ("{{ 0x" + "f" * 100000 + " }}", "Exceeds the limit"),
    ("{% generation %}" * 500 + "{% endgeneration %}" * 500, "maximum recursion depth"),
    ("x" * (LARGEST_TEMPLATE + 1), "expected at most 262,144"),
)


def rendered(source: str) -> str:
    return ChatTemplate(source, "some.jinja").render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("source", "says"), [*((source, "texts and lists of more than") for source in LONG), *OTHERS]
)
def test_a_rendering_is_bounded(source: str, says: str) -> None:
    with pytest.raises(HexadError, match=r"the chat template of some\.jinja refuses") as refused:
        rendered(source)
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("source", "says"), SOURCES, ids=[says for _, says in SOURCES])
def test_a_source_that_cannot_be_compiled(source: str, says: str) -> None:
    with pytest.raises(HexadError, match=r"some\.jinja: not a chat template") as refused:
        rendered(source)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_processor_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexad.dataset.text.chat_sandbox.SECONDS", -1.0)
    with pytest.raises(TemplateLimit, match="s of processor time"):
        budget = Budget(0)
        for _ in range(64):
            budget.spend()


def test_bounds_grow_with_the_conversation() -> None:
    content = "ab\n" * 1_000_000
    template = ChatTemplate(
        "{% for m in messages %}{% set t = m.content | trim ~ '.' %}{% for p in t.split('\n') %}{% endfor %}"
        "{{ t.replace('b', 'cc') | upper | indent(4) }}{% endfor %}",
        "some.jinja",
    )
    messages = [{"role": "user", "content": content}]
    assert len(template.render(messages)) > 2 * len(content)
    budget = Budget(len(content))
    budget.make(PER_CHARACTER * len(content))


VALUES = """m.content; m['content'] + '!'; m.content ~ loop.index ~ none; '%s-%5d' % (m.content, loop.index)
'{}|{:>8}'.format(m.content, 3); m.content.split('b'); m; messages; 7 ** 3 * 2 % 11; m.content.center(20)
[loop.index, (m.role, 2), {'k': m}]; ', '.join(['a', m.content]); m.content[1:]; range(3); x is defined
m.items(); dict(a=1, b=m.content); [[1], [2, 3]]; m.content * 2; loop.length ~ loop.last ~ loop.previtem
namespace(a=1).a; 'a' in m.content; m.content.startswith('a'); messages[::-1]; 5; x; m.x; 2 ** 0.5; 3 - 1
messages | map(attribute='content') | list; m.content.expandtabs(2); m.content.nothing()"""
FILTERS = """tojson; tojson(indent=2); join(', '); replace('a', 'xyz'); indent(3); length; list; upper; title
groupby('role'); batch(2, '-') | list; sum(start=[]); sum; wordwrap(3); string; escape; truncate(5); wordcount
selectattr('role', 'equalto', 'user') | list; map('upper') | join; map(attribute='role') | join('.'); first
unique | list; sort; reverse | join; last; items | list; default('none'); select | list; reject('none') | list
int; float; dictsort; slice(2) | list; max; min; center(9); safe; e; trim; map('trim') | first; reverse | list
xmlattr; urlize; striptags; format(3); round; abs; capitalize; attr('upper') | length; pprint; count"""


@pytest.mark.parametrize("seed", range(10))
def test_renders_as_the_sandbox_without_bounds(seed: int) -> None:
    """Random bodies of a loop over messages: the same text, or an error of the same kind."""
    rng = random.Random(seed)
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = _tojson
    texts = 0
    for _ in range(80):
        filters = rng.choices(re.split("; |\n", FILTERS), k=rng.choice((0, 1, 1, 2)))
        value = rng.choice(re.split("; |\n", VALUES))
        body = "{{ " + " | ".join([f"({value})", *filters]) + " }}"
        body = f"{{% set t %}}{body}.{{% endset %}}{{{{ t ~ t }}}}" if rng.random() < 0.3 else body
        where = rng.choice(("", " if m.role == 'user'"))
        source = f"{{% for m in messages{where} %}}{body}\n{{% else %}}none{{% endfor %}}"
        messages = [
            {"role": rng.choice(("user", "assistant")), "content": "ab <c>\n" * rng.randrange(4)}
            for _ in range(rng.randrange(1, 4))
        ]
        outcomes = []
        for compiled in (_compiled, plain.from_string):
            try:
                outcomes.append(compiled(source).render(messages=messages))
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        bounded, unbounded = (re.sub("0x[0-9a-f]+", "", outcome) for outcome in outcomes)
        assert bounded == unbounded, source
        texts += "Error" not in unbounded
    assert texts > 20


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
