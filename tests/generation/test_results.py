"""Results of the server in OpenAI's forms: names, bytes, offsets, against counts by hand."""

import json
from functools import cache
from typing import Any

import pytest

from hexad.dataset.text.token_text import TokenText
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.generation.requests import Logprob, Request, RequestUpdate
from hexad.generation.sampling import Sampling

from ..dataset.tokenizers import made

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def text_of(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda kind: TokenText(load_tokenizer(made(kind, tmp_path_factory.mktemp(kind)))))


def result(text: TokenText, form: str, prompt: Any, new: list[Logprob], **fields: Any) -> dict[str, Any]:
    """The result of a request whose new tokens are these, and those of its prompt unlikely."""
    from hexad.generation.server.forms import ChatForm, CompletionForm, Texts
    from hexad.generation.server.protocol import ChatRequest, CompletionRequest

    ids = (*text.tokenizer.bos, *text.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
    kind: Any
    if form == "chat":
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
        kind = ChatForm(ChatRequest(model="m", **body), None)
    else:
        kind = CompletionForm(CompletionRequest(model="m", prompt=prompt, logprobs=2, **fields), text)
    texts = Texts(kind, [Request(ids, Sampling(tokens=max(1, len(new))))], [ids], text, "m")
    scores = tuple(Logprob(token, -2.0, ((ids[0], -1.0), (token, -2.0))) for token in ids[1:])
    decoder = text.decoder(ids)
    shown = "".join(decoder.add(one.token).text for one in new) + (decoder.end() if new else "")
    tokens = tuple(one.token for one in new)
    texts._texts[0].add(RequestUpdate(0, shown, tokens, tuple(new), scores, "length"))
    return json.loads(texts.content(), parse_constant=pytest.fail)["choices"][0]


def test_echo_of_a_tokenizer_that_puts_a_space(text_of) -> None:
    text = text_of("mistral")
    number = text.tokenizer.backend.token_to_id
    text.tokenizer.bos = (number("<s>"),)
    try:
        new = [Logprob(number("\u2581world"), -3.0, ((number("world"), -0.5), (number("<0x61>"), -0.6)))]
        for prompt in ("hello", [number("<s>"), number("\u2581hello")]):
            choice = result(text, "completion", prompt, new, echo=True)
            assert choice["text"] == "hello world"
            logprobs = choice["logprobs"]
            assert logprobs["tokens"] == ["<s>", "hello", " world"]
            assert logprobs["text_offset"] == [0, 0, 5]
            assert logprobs["token_logprobs"] == [None, -2.0, -3.0]
            # As at OpenAI, the token that was chosen is there too.
            assert logprobs["top_logprobs"][2] == {"world": -0.5, "a": -0.6, " world": -3.0}
        assert result(text, "completion", "hello", new)["logprobs"]["text_offset"] == [0]
    finally:
        text.tokenizer.bos = ()


def test_two_ids_of_one_text_are_both_there(text_of) -> None:
    """The one that was chosen is not taken for the likelier one."""
    text = text_of("llama")
    number = text.tokenizer.backend.token_to_id
    new = [Logprob(number("<0x68>"), -3.0, ((number("h"), -0.1), (number("<0x68>"), -3.0)))]
    logprobs = result(text, "completion", "hello", new)["logprobs"]
    (top,) = logprobs["top_logprobs"]
    assert logprobs["tokens"] == ["h"] and top == {"h": -3.0, f"token_id:{number('h')}": -0.1}
    assert max(top, key=top.get) != logprobs["tokens"][0]


@pytest.mark.parametrize(
    "kind", ["byte-level", "llama", "mistral", "gemma", "tiktoken", "sentencepiece-llama"]
)
def test_bytes_of_an_answer_make_its_text(text_of, kind: str) -> None:
    text = text_of(kind)
    before = text.tokenizer.encode("a")
    ids = text.tokenizer.encode("a日本 é world")[len(before) :]
    new = [Logprob(token, -1.0, ((token, -1.0),)) for token in [*ids, text.tokenizer.eod]]
    choice = result(text, "chat", before, new)
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "日本 é world"
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "日本 é world"
    assert entries[-1]["bytes"] == [] and [entry["top_logprobs"][0] for entry in entries] == [
        {key: entry[key] for key in ("token", "logprob", "bytes")} for entry in entries
    ]
    completed = result(text, "completion", before, new)["logprobs"]
    decoder, offsets = text.decoder(before), [0]
    for token in ids:
        decoder.add(token)
        offsets.append(decoder.characters)
    assert completed["text_offset"] == offsets and offsets[-1] == len("日本 é world")


@pytest.mark.parametrize("kind", ["byte-level", "byte-level-prefix", "llama", "mistral", "word-piece"])
@pytest.mark.parametrize("prompt", ["hello", " hello", "hello<|im_end|>world", "<|im_end|> a", "the fox"])
def test_an_echo_is_the_prompt(text_of, kind: str, prompt: str) -> None:
    """Whatever its tokenizer does with it: special tokens, spaces, and of BERT's the spelling."""
    text = text_of(kind)
    token = text.tokenizer.encode("world")[-1]
    choice = result(text, "completion", prompt, [Logprob(token, -1.0)], echo=True)
    shown = text.decoder(text.tokenizer.encode(prompt)).add(token).text
    assert choice["text"] == prompt + shown
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] in (0, 1) and offsets[-1] == len(prompt)


@pytest.mark.parametrize("kind", ["llama", "byte-level"])
def test_an_echo_that_ends_inside_a_character(text_of, kind: str) -> None:
    text = text_of(kind)
    ids = text.tokenizer.encode("x語")
    new = [Logprob(ids[-1], -1.0, ((ids[-1], -1.0),))]
    choice = result(text, "completion", ids[:-1], new, echo=True)
    assert choice["text"] == "x語" and choice["logprobs"]["text_offset"][-1] == 1
    unfinished = result(text, "completion", ids[:-1], [], echo=True)["text"]
    assert unfinished == text.tokenizer.decode(ids[:-1]) and unfinished[1:].strip("\ufffd") == ""


def test_a_token_that_cannot_follow_is_null_in_json(text_of) -> None:
    """JSON has no -Infinity."""
    from hexad.generation.server.forms import _event

    text = text_of("llama")
    new = [Logprob(text.tokenizer.encode("a")[-1], -float("inf"), ((5, -float("inf")),))]
    choice = result(text, "completion", "hello", new)
    assert choice["logprobs"]["token_logprobs"] == [None]
    line = _event({"choices": [{"value": -float("inf")}]}).decode().removeprefix("data: ")
    assert json.loads(line, parse_constant=pytest.fail)["choices"] == [{"value": None}]
