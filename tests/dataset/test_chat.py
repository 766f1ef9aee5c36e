"""Conversations: the ids and masks of transformers, every mistake named with its line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hexad.config import HexadError
from hexad.dataset.build.builder import build
from hexad.dataset.indexed import IndexedDataset
from hexad.dataset.text.chat import load_chat_template
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.dataset.text.tokenizer_training import train_bpe

from .chats import CHATML, CONVERSATIONS, GENERATION, TEXT, chat_tokenizer, write_lines

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": "<1>"}}}]


def built(directory: Path, records: list[dict[str, Any]], tokenizer: str, **options: Any) -> IndexedDataset:
    write_lines(directory / "in.jsonl", records)
    build([directory / "in.jsonl"], directory / "d", tokenizer, workers=1, **options)
    return IndexedDataset(directory / "d")


def trained(data: IndexedDataset, document: int) -> list[bool]:
    start, stop = data.starts(np.array([document, document + 1]))
    return [True] * int(stop - start) if data.mask is None else data.mask.at(np.arange(start, stop)).tolist()


@pytest.mark.parametrize("inside", [False, True], ids=["jinja file", "tokenizer_config"])
def test_ids_and_masks_equal_those_of_transformers(tmp_path: Path, inside: bool) -> None:
    spec = chat_tokenizer(tmp_path / "tok", GENERATION, inside=inside)
    oracle = AutoTokenizer.from_pretrained(spec)
    records = [{"messages": messages, "tools": TOOLS} for messages in CONVERSATIONS]
    data = built(tmp_path, [*records, {"messages": CONVERSATIONS[0]}], spec)
    for document, record in enumerate([*records, {"messages": CONVERSATIONS[0]}]):
        expected = oracle.apply_chat_template(
            record["messages"], tools=record.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        assert data[document].tolist() == expected["input_ids"]
        assert trained(data, document) == [bool(mask) for mask in expected["assistant_masks"]]
        assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])
    assert data.mask is not None and data.mask.trained == sum(sum(trained(data, i)) for i in range(4))


def test_renderings_of_one_template_share_nothing(tmp_path: Path) -> None:
    """A conversation is rendered in the middle of another one, as by a thread that interrupts."""
    spec = chat_tokenizer(tmp_path / "tok", GENERATION)
    template = load_chat_template(spec)
    assert template is not None
    alone = [template.conversation(messages) for messages in CONVERSATIONS[:2]]
    nested = []

    class Interrupted(str):
        def __add__(self, other: str) -> str:
            nested.append(template.conversation(CONVERSATIONS[1]))
            return str(self) + other

    messages = [{**message, "content": Interrupted(message["content"])} for message in CONVERSATIONS[0]]
    assert template.conversation(messages) == alone[0]
    assert nested and all(rendering == alone[1] for rendering in nested)


def test_answers_of_templates_without_generation_blocks(tmp_path: Path) -> None:
    """Ids as of transformers; trained is what the assistant writes up to the token that ends its turn."""
    spec = chat_tokenizer(tmp_path / "tok", CHATML)
    oracle, ours = AutoTokenizer.from_pretrained(spec), load_tokenizer(spec)
    conversations = CONVERSATIONS[:2]
    data = built(tmp_path, [{"messages": messages} for messages in conversations], spec)
    end = oracle.convert_tokens_to_ids("<|im_end|>")
    for document, messages in enumerate(conversations):
        ids = data[document].tolist()
        assert ids == oracle.apply_chat_template(messages, return_dict=False)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        marked = [token for token, yes in zip(ids, trained(data, document)) if yes]
        expected = [i for answer in answers for i in [*ours.encode(answer), end]]
        assert marked == expected


def test_a_call_without_words_has_no_content(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{{ m.content if m.content is defined else 'c' }}{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    spec = chat_tokenizer(tmp_path / "tok", source)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, ANSWER]
    data = built(tmp_path, [{"messages": messages}], spec)
    expected = AutoTokenizer.from_pretrained(spec).apply_chat_template(messages, return_dict=False)
    assert data[0].tolist() == expected


@pytest.mark.parametrize("form", ["files", "list"])
def test_named_templates(tmp_path: Path, form: str) -> None:
    """As in transformers, ``tool_use`` is that of conversations with tools."""
    spec = chat_tokenizer(tmp_path / "tok", None)
    named = {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML}
    if form == "list":
        path = tmp_path / "tok" / "tokenizer_config.json"
        listed = [{"name": name, "template": template} for name, template in named.items()]
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": listed}))
    else:
        (tmp_path / "tok" / "additional_chat_templates").mkdir()
        (tmp_path / "tok" / "chat_template.jinja").write_text(CHATML)
        (tmp_path / "tok" / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
    oracle = AutoTokenizer.from_pretrained(spec)
    records = [{"messages": CONVERSATIONS[0]}, {"messages": CONVERSATIONS[0], "tools": TOOLS}]
    data = built(tmp_path, records, spec)
    for document, record in enumerate(records):
        expected = oracle.apply_chat_template(
            record["messages"], tools=record.get("tools"), return_dict=False
        )
        assert data[document].tolist() == expected
    assert len(data[1]) > len(data[0]) and sum(trained(data, 0)) == sum(trained(data, 1))


def test_a_template_may_be_given(tmp_path: Path) -> None:
    train_bpe(TEXT, 300, tmp_path / "tok")
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}"
                        "{% if add_generation_prompt %}a{% endif %}")  # fmt: skip
    records = [{"chat": CONVERSATIONS[0]}]
    data = built(tmp_path, records, str(tmp_path / "tok"), chat_template=str(template), json_key="chat")
    ours = load_tokenizer(str(tmp_path / "tok"))
    text = "uWhy is the sky blue?<|endoftext|>a Rayleigh. 🙂<|endoftext|>"
    assert data[0].tolist() == ours.encode(text)
    marked = [int(token) for token, yes in zip(data[0], trained(data, 0)) if yes]
    assert marked == [*ours.encode(" Rayleigh. 🙂"), ours.eod]


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece", "tiktoken"])
def test_completions_are_trained_and_end_with_the_end_of_document(tmp_path: Path, kind: str) -> None:
    """With every tokenizer; a token that the completion shares with its prompt belongs to the completion."""
    spec = "byte" if kind == "byte" else str(tmp_path / "tok")
    if kind == "bpe":
        train_bpe(TEXT, 400, spec)
    elif kind != "byte":
        spec = _other(tmp_path, kind)
    ours = load_tokenizer(spec)
    pairs = [("Why is the sky", " blue? 🙂"), ("", "one two"), ("größ", "er")]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    data = built(tmp_path, records, spec)
    for document, (prompt, completion) in enumerate(pairs):
        ids = data[document].tolist()
        assert ids == [*ours.encode(prompt + completion), ours.eod]
        mask = trained(data, document)
        first = mask.index(True)
        assert all(mask[first:]), "all from the completion on"
        before, after = ours.decode(ids[:first]), ours.decode(ids[first:])
        assert prompt.strip().startswith(before.strip()) and completion.strip() in after
        if kind == "byte":
            assert (before, after) == (prompt, completion)


def test_spaces_that_a_tokenizer_leaves_out_of_offsets_are_trained_too(tmp_path: Path) -> None:
    """As those of GPT-2 and Llama 3 do (``trim_offsets``)."""
    train_bpe(TEXT, 300, tmp_path / "tok")
    path = tmp_path / "tok" / "tokenizer.json"
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": trimming}))
    data = built(tmp_path, [{"prompt": "one:", "completion": "   \n two  "}], str(tmp_path / "tok"))
    marked = [int(token) for token, yes in zip(data[0], trained(data, 0)) if yes]
    assert load_tokenizer(str(tmp_path / "tok")).decode(marked) == "   \n two  "


def _other(directory: Path, kind: str) -> str:
    import base64
    import io

    pytest.importorskip(kind)
    if kind == "tiktoken":
        tokens = [bytes([i]) for i in range(256)] + [b"in", " größ".encode()[1:4], b" s"]
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
        (directory / "t.tiktoken").write_bytes(b"".join(lines))
        return str(directory / "t.tiktoken")
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, vocab_size=36, minloglevel=2
    )
    (directory / "t.model").write_bytes(model.getvalue())
    return str(directory / "t.model")


def test_kinds_may_be_mixed_and_text_is_trained_completely(tmp_path: Path) -> None:
    spec = chat_tokenizer(tmp_path / "tok")
    records = [{"text": "plain"}, {"messages": CONVERSATIONS[0]}, {"text": "more"}]
    data = built(tmp_path, records, spec)
    assert all(trained(data, 0)) and all(trained(data, 2)) and not all(trained(data, 1))
    only_text = built(tmp_path, records[:1], spec)
    assert only_text.mask is None and not (tmp_path / "d.mask").exists()


def test_lines_are_counted_for_messages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them for every conversation took time that grew with the square of their number."""

    def counted(*_: object) -> int:
        raise AssertionError("the lines of a good file were counted")

    monkeypatch.setattr("hexad.dataset.build.sources._line_number", counted)
    records = [
        *({"messages": conversation} for conversation in CONVERSATIONS[:2]),
        {"prompt": "a", "completion": "ü"},
    ]
    built(tmp_path, [*records, {"text": "ü"}], chat_tokenizer(tmp_path / "tok"))


def test_parquet_holds_conversations_too(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    spec = chat_tokenizer(tmp_path / "tok")
    table = pyarrow.table({"messages": CONVERSATIONS[:2], "id": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    build([tmp_path / "a.parquet"], tmp_path / "p", spec, workers=1)
    lines = built(tmp_path, [{"messages": conversation} for conversation in CONVERSATIONS[:2]], spec)
    assert (tmp_path / "p.bin").read_bytes() == (tmp_path / "d.bin").read_bytes()
    assert (tmp_path / "p.mask").read_bytes() == (tmp_path / "d.mask").read_bytes() and lines.mask


def test_records_of_other_forms_equal_their_messages(tmp_path: Path) -> None:
    """ShareGPT's, Alpaca's and TRL's; of a list of messages as prompt no answer is trained."""
    spec = chat_tokenizer(tmp_path / "tok", CHATML)
    turns = [("one", "two"), ("three\nfour", "user")]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "system"}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    speakers = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [{"from": speakers[m["role"]], "value": m["content"]} for m in messages]
    forms: list[dict[str, Any]] = [
        {"conversations": shared},
        {"conversations": shared[1:], "system": "system"},
        {"conversations": messages},
        {
            "instruction": "three",
            "input": "four",
            "output": "user",
            "system": "system",
            "history": [["one", "two"]],
        },
        {"prompt": messages[:4], "completion": messages[4:]},
    ]
    data = built(tmp_path, [{"messages": messages}, *forms], spec)
    everything = trained(data, 0)
    for document in range(1, len(forms) + 1):
        assert data[document].tolist() == data[0].tolist()
        if document < len(forms):
            assert trained(data, document) == everything
    last = trained(data, len(forms))
    first = everything.index(True)
    second = everything.index(True, everything.index(False, first))
    assert last == [position >= second and yes for position, yes in enumerate(everything)]


def test_of_a_template_that_marks_answers_those_of_the_prompt_are_not_trained(tmp_path: Path) -> None:
    spec = chat_tokenizer(tmp_path / "tok", GENERATION)
    messages = CONVERSATIONS[1]
    data = built(
        tmp_path, [{"messages": messages}, {"prompt": messages[:4], "completion": messages[4:]}], spec
    )
    assert data[0].tolist() == data[1].tolist()
    ours = load_tokenizer(spec)
    ids = [int(token) for token, yes in zip(data[1], trained(data, 1)) if yes]
    assert ours.decode(ids) == "größer" and sum(trained(data, 0)) > len(ids)


def test_tools_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    spec = chat_tokenizer(tmp_path / "tok", CHATML)
    with pytest.raises(HexadError, match=r"in\.jsonl:1: has 'tools', which the chat template of .* does not"):
        built(tmp_path, [{"messages": CONVERSATIONS[0], "tools": TOOLS}], spec)


def _chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"text": 5}, r"'text' is a number \(5\), expected text"),
    "null": ({"text": None}, "'text' is null, expected text"),
    "no key": ({"body": "x"}, "none of 'text', 'messages', .*; keys found: 'body'"),
    "two kinds": ({"text": "a", "messages": []}, "has 'messages' and 'text'; choose 'messages' or "
                  "'text' with json_key, or remove one"),
    "no single key": ({"prompt": "a", "completion": "b", "instruction": "b", "output": "c"},
                      "has 'completion' and 'instruction'; remove one"),
    "no completion": ({"prompt": "a"}, "a 'prompt' without 'completion'"),
    "no prompt": ({"completion": "a"}, "a 'completion' without 'prompt'"),
    "empty completion": ({"prompt": "a", "completion": ""}, "'completion' is empty"),
    "prompt of messages": ({"prompt": [USER], "completion": "b"}, "'prompt' is a list, expected text"),
    "empty answer": (_chat(USER, {"role": "assistant", "content": ""}), r"\[1\]: the answer is empty"),
    "history": ({"instruction": "a", "output": "b", "history": ["c"]}, "'history' is not a list of"),
    "speaker": ({"conversations": [{"from": "bot", "value": "a"}]}, r"conversations\[0\]: role 'bot' is unk"),
    "two forms": ({"instruction": "a", "output": "b", "text": "c"}, "has 'text' and 'instruction'; choose "
                  "'text' with"),
    "empty": (_chat(), "'messages' is empty"),
    "no list": ({"messages": "hi"}, "'messages' is text, expected a list"),
    "no object": (_chat("hi"), r"messages\[0\] is text, expected \{'role': "),
    "no role": (_chat({"speaker": "human", "text": "a"}), r"\[0\] has no 'role', .*'speaker', 'text'"),
    "role": (_chat({"role": "asistant", "content": "a"}), r"role 'asistant' is unknown .*mean 'assistant'"),
    "content": (_chat({"role": "user", "content": 3}), r"messages\[0\]: its content is a number \(3\)"),
    "no content": (_chat({"role": "user"}), r"messages\[0\] has no 'content'"),
    "null content": (_chat({"role": "user", "content": None}), r"messages\[0\]: its content is null, exp"),
    "silent call": (_chat(USER, {**ANSWER, "content": None, "tool_calls": [1]}), r"\[1\] has no content"),
    "image": (_chat({"role": "user", "content": [{"type": "image"}]}), "a part of type 'image', expected"),
    "no answer": (_chat(USER), "'messages' has no message with role 'assistant'"),
    "surrogate": ({"text": "a\ud800"}, r"\\ud800 is a lone surrogate"),
    "refused": (_chat(USER, USER, ANSWER), "the chat template of .*: roles must alternate"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_the_line(tmp_path: Path, name: str) -> None:
    spec = tmp_path / "tok"
    if not spec.exists():
        strict = (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must\n alternate') }}{% endif %}{{ m.content + '' }}{% endfor %}"
        )
        chat_tokenizer(spec, strict)
    record, message = MISTAKES[name]
    with pytest.raises(HexadError, match=rf"in\.jsonl:2: .*{message}") as error:
        built(tmp_path, [{"text": "fine"}, record], str(spec))
    assert "\n" not in str(error.value)


def test_what_has_no_template_says_how_to_give_one(tmp_path: Path) -> None:
    train_bpe(TEXT, 300, tmp_path / "tok")
    for spec in ("byte", str(tmp_path / "tok")):
        with pytest.raises(HexadError, match=r"in\.jsonl:1: conversations need a chat template, .*FILE"):
            built(tmp_path, [{"messages": CONVERSATIONS[0]}], spec)
    with pytest.raises(HexadError, match=r"nowhere: cannot be read: No such file"):
        built(tmp_path, [{"text": "a"}], "byte", chat_template="nowhere")
    (tmp_path / "bad.jinja").write_text("ok\n{% if %}")
    with pytest.raises(HexadError, match=r"bad\.jinja:2: not a chat template: Expected an expression"):
        built(tmp_path, [{"text": "a"}], "byte", chat_template=str(tmp_path / "bad.jinja"))


def test_templates_that_change_earlier_turns_are_refused(tmp_path: Path) -> None:
    """As those that drop the reasoning of all answers but the last: a loss would be on the wrong tokens."""
    forgetful = "{% for m in messages %}{{ m.role + m.content + ('!' if loop.last else '') }}{% endfor %}"
    spec = chat_tokenizer(tmp_path / "tok", forgetful)
    records = [{"messages": [USER, ANSWER, USER, ANSWER]}]
    with pytest.raises(HexadError, match=r"in\.jsonl:1: messages\[1\]: .*does not render .*generation"):
        built(tmp_path, records, spec)


def test_data_without_a_trained_token_are_refused(tmp_path: Path) -> None:
    spec = chat_tokenizer(tmp_path / "tok", "hello")
    with pytest.raises(HexadError, match=r"none of the tokens would be trained: .* chat_template FILE"):
        built(tmp_path, [{"messages": [USER, ANSWER]}], spec)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    spec = chat_tokenizer(tmp_path / "tok", "{{ messages.__class__.__mro__ }}")
    with pytest.raises(HexadError, match=r"access to attribute '__class__' .* is unsafe"):
        built(tmp_path, [{"messages": [USER, ANSWER]}], spec)


def test_workers_do_not_change_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexad.dataset.build.builder._TASK_BYTES", 1500)
    monkeypatch.setattr("hexad.dataset.build.sources._JSONL_PIECE", 700)
    spec = chat_tokenizer(tmp_path / "tok")
    records = [{"text": "plain"}] * 13 + [{"messages": CONVERSATIONS[i % 2]} for i in range(30)]
    write_lines(tmp_path / "in.jsonl", records)
    for workers in (1, 2):
        build([tmp_path / "in.jsonl"], tmp_path / str(workers), spec, workers=workers)
    for ending in ("bin", "idx", "mask"):
        assert (tmp_path / f"1.{ending}").read_bytes() == (tmp_path / f"2.{ending}").read_bytes()
    assert json.loads((tmp_path / "1.hexad.json").read_text())["mask"]
