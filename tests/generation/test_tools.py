"""Calls of functions: read from answers and forced by grammars, in the format of each family's template."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from hexad.dataset.text.chat import ChatTemplate
from hexad.generation.server.protocol import ChatRequest, CompletionRequest, read
from hexad.generation.server.tools import FunctionCall, ToolFormat, ToolReader

from .tool_models import ENDS, SPECIALS, TEMPLATES, XML

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "weather", "parameters": SCHEMA, "strict": True},
    {"name": "now"},
]
CALLS = [
    FunctionCall("weather", '{"city": "Rome", "days": 3}'),
    FunctionCall("now", '{"a": ["}", {"b": null}]}'),
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "t", {"bos_token": "<s>", "eos_token": "</s>"}, ENDS)


def written(source: str, calls: list[FunctionCall], content: str = "") -> str:
    """An answer as the template writes it."""
    made = [
        {
            "id": f"abcdefgh{n}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for n, call in enumerate(calls)
    ]
    question = [{"role": "user", "content": "-"}]
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    rendered = [
        template(source).render([*question, {"role": "assistant", **answer}], tools=tools)
        for answer in ({"content": "?"}, {"content": content, "tool_calls": made})
    ]
    begin = rendered[0].rpartition("?")[0].rstrip(" ")
    text = rendered[1].removeprefix(begin).rstrip()
    for end in ENDS:
        text = text.removesuffix(end)
    return text


def form_of(source: str) -> ToolFormat:
    form = ToolFormat.of(template(source))
    assert form is not None
    return form


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_a_template_writes_is_read(family: str) -> None:
    source = TEMPLATES[family]
    form = form_of(source)
    assert form.several == (family != "llama")
    for calls in (CALLS[:1], CALLS[1:], CALLS)[: 3 if form.several else 2]:
        text = written(source, calls)
        assert form.calls(text) == ("", calls)
        if form.marker:
            assert form.calls(f"Let me see.\n\n{text}") == ("Let me see.", calls)
            assert form.calls(f"See:\n{text}\nDone.") == ("See:\nDone.", calls)
        else:
            assert form.calls(f"{text} Done.") == (f"{text} Done.", [])
    for text in ("", "Hello {", "<tool", "[TOOL", '{"name": 3}', f"{form.begin}{{", f"{form.begin}x"):
        assert form.calls(text) == (text, [])


def test_forms_without_json_are_not_read() -> None:
    assert ToolFormat.of(template(XML)) is None
    assert ToolFormat.of(template("{{ messages[0].content }}")) is None


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("seed", range(5))
def test_streams_have_the_same_parts(family: str, seed: int) -> None:
    """Cut anywhere: the text that is shown early is never part of a call."""
    form, draw = form_of(TEMPLATES[family]), random.Random(f"{family} {seed}")
    content = "" if not form.marker else draw.choice(["", "Well, <tool", "a\n\n", "[TOOL_ "])
    text = content + written(TEMPLATES[family], CALLS[: 1 + form.several * seed % 2])
    text = draw.choice([text, text[: draw.randrange(1, len(text))]])
    reader, shown, place = ToolReader(form), "", 0
    while place < len(text):
        step = draw.randrange(1, 9)
        shown += reader.add(text[place : place + step])
        place += step
    rest, calls = reader.end()
    assert (calls or [shown + rest]) == (form.calls(text)[1] or [text])
    assert (shown + rest).strip() == form.calls(text)[0].strip()


@pytest.mark.parametrize("family", TEMPLATES)
def test_grammars_accept_what_a_template_writes(family: str) -> None:
    """And forced ones nothing else; those of answers that may be texts, all but calls against a schema."""
    guide = pytest.importorskip("llguidance")
    form = form_of(TEMPLATES[family])
    # Bytes, and special tokens that no bytes spell.
    names = [*SPECIALS, "<tool_call>", "</tool_call>"]
    ids = {name: 256 + number for number, name in enumerate(names)}
    tokens = [*(bytes([value]) for value in range(256)), *(b"\xff" + name.encode() for name in names)]
    wrapped = _Tokens(tokens, ids["</s>"], list(ids.values()))
    tokenizer = guide.LLTokenizer(guide.TokenizerWrapper(wrapped), n_vocab=len(tokens))

    def accepts(text: str, **options: Any) -> bool:
        options = {"forced": False, "several": True, **options}
        matcher = guide.LLMatcher(tokenizer, form.grammar(FUNCTIONS, ids, **options), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        while text:
            name = next((name for name in ids if text.startswith(name)), text[0])
            known = [ids[name]] if name in ids else list(name.encode())
            if not all(matcher.consume_token(token) for token in known):
                return False
            text = text[len(name) :]
        return bool(matcher.is_accepting())

    one = form.begin + form.before + "weather" + form.middle
    end = form.after + form.end
    right, wrong = '{"city": "Oslo", "days": 12}', '{"city": "Bern", "days": 12}'
    assert accepts(one + right + end, forced=True) and accepts(one + right + end)
    assert not accepts(one + wrong + end, forced=True) and not accepts(one + wrong + end)
    other = form.begin + form.before + "other" + form.middle
    assert not accepts(other + "{}" + end, forced=True)
    assert accepts("Hello.") and not accepts("Hello.", forced=True)
    if form.several:
        now = form.before + "now" + form.middle + "{}" + form.after
        both = one + right + form.after + form.between + now + form.end
        assert accepts(both, forced=True) and not accepts(both, forced=True, several=False)
    answer = {"type": "integer"}
    assert accepts("17", answer=answer) and accepts(one + right + end, answer=answer)
    assert not accepts("Hello.", answer=answer)


class _Tokens:
    """Tokens as ``llguidance`` wants them."""

    def __init__(self, tokens: list[bytes], end: int, special: list[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, special
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def bodies() -> list[dict[str, Any]]:
    path = Path(__file__).with_name("client_bodies.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("row", bodies(), ids=lambda row: row["client"])
def test_what_clients_send_is_known(row: dict[str, Any]) -> None:
    """Recorded from OpenAI's client, LangChain, instructor and lm_eval; of vLLM's benchmark by its source."""
    body = read(CompletionRequest if row["path"] == "/v1/completions" else ChatRequest, row["body"])
    assert body.check() == []
    body.grammar()
    assert body.prompts() and body.sampling(100).tokens >= 1
