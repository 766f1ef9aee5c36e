"""``hexad tokenizer``: a tokenizer that transformers loads, and what is in it."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hexad.dataset.text.tokenizer import load_tokenizer

from ..dataset.chats import CHATML, CONVERSATIONS, TEXT, write_lines
from ..training.command import Result, call
from .test_startup import modules_of


def train(directory: Path, *options: object) -> Result:
    given = ["--output", str(directory / "tok"), "--vocab", "320", *map(str, options)]
    return call("tokenizer", "train", *given)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.txt").write_text("\n".join(TEXT))
    (root / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "zebra " * 30}).encode()))
    write_lines(root / "c.jsonl", [{"messages": CONVERSATIONS[1]}, {"prompt": "one", "completion": " two"}])
    (root / "binary").write_bytes(b"\0\1")
    return root


def test_trained_tokenizers_are_hugging_faces(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML)
    marks = ("--special-token", "<|im_start|>", "<|im_end|>")
    result = train(tmp_path, "--input", corpus, *marks, "--chat-template", tmp_path / "t.jinja", "--json")
    assert (result.status, result.err) == (0, "")
    facts = json.loads(result.out)
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert facts["documents"] == 4 and facts["special_tokens"] == special and facts["notes"] == []
    ours, theirs = load_tokenizer(str(tmp_path / "tok")), AutoTokenizer.from_pretrained(tmp_path / "tok")
    assert facts["vocab"] == ours.vocab_size == len(theirs) == 320
    for text in (*TEXT[:1], "<|im_start|>zebra größer 🙂", " a  b\n"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert theirs.decode(theirs.encode(text)) == text
    assert (theirs.eos_token_id, ours.eod, theirs.chat_template) == (0, 0, CHATML)
    assert theirs.all_special_ids == [0, 1, 2]
    assert len(ours.encode("zebra")) < 5  # it has learned from the compressed lines


def test_the_same_text_gives_the_same_tokenizer(tmp_path: Path, corpus: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert train(tmp_path / name, "--input", corpus / "a.txt").status == 0
    files = sorted(path.name for path in (tmp_path / "one" / "tok").iterdir())
    assert files == ["tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "one/tok" / name).read_bytes() == (tmp_path / "two/tok" / name).read_bytes()


def test_what_is_left_short_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abab " * 9)
    (tmp_path / "t.jinja").write_text("<|user|>{{ messages }}")
    result = train(tmp_path, "--input", tmp_path / "a.txt", "--chat-template", tmp_path / "t.jinja")
    assert "note: 260 instead of 320 ids" in result.out
    assert (
        "note: the chat template writes <|user|>, " in result.out
        and "--special-token '<|user|>'" in result.out
    )


def _mistakes() -> dict[str, tuple[list[str], str]]:
    return {
        "exists": (["--input", "a.txt", "--output", "."], "--output: .* exists and is not empty"),
        "too small": (["--input", "a.txt", "--vocab", "256"], "vocabulary size 256: expected at least 257"),
        "no input": (["--input", "nowhere"], "nowhere: no such file or directory"),
        "empty": (["--input", "empty.txt"], "no text to learn from"),
        "bad line": (["--input", "bad.jsonl"], r"bad\.jsonl:1: 'text' is a number \(5\), expected text"),
        "not text": (["--input", "binary"], "binary:1: byte 0xff is not UTF-8"),
        "template": (["--input", "a.txt", "--chat-template", "bad.jinja"], "jinja:1: not a chat template"),
        "number": (["--input", "a.txt", "--vocab", "many"], "'many' is not a valid integer"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _mistakes())
def test_mistakes_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    content: dict[str, Any] = {
        "a.txt": b"abc",
        "empty.txt": b"",
        "bad.jsonl": b'{"text": 5}',
        "binary": b"\xff",
    }
    for file, raw in {**content, "bad.jinja": b"{% if"}.items():
        (tmp_path / file).write_bytes(raw)
    before = sorted(path.name for path in tmp_path.iterdir())
    options, message = _mistakes()[name]
    result = call("tokenizer", "train", "--vocab", "300", "--output", "tok", *options)
    assert result.status == 2
    assert re.search(message, result.error), result.error
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_show(tmp_path: Path, corpus: Path) -> None:
    assert train(tmp_path, "--input", corpus, "--special-token", "<|im_end|>").status == 0
    spec = str(tmp_path / "tok")
    facts = json.loads(call("tokenizer", "show", spec, "--text", "größe<|im_end|>", "--json").out)
    tokens = facts.pop("tokens")
    assert facts == {
        "tokenizer": spec, "kind": "Hugging Face", "vocab": 320, "eod": 0, "bos": [],
        "special_tokens": {"<|endoftext|>": 0, "<|im_end|>": 1}, "chat_template": None,
    }  # fmt: skip
    assert [token["id"] for token in tokens] == load_tokenizer(spec).encode("größe<|im_end|>")
    assert tokens[-1] == {"id": 1, "text": "<|im_end|>"}
    shown = call("tokenizer", "show", "byte", "--text", "ü").out
    assert "vocab           257" in shown and "tokens          2 of 2 bytes" in shown and "195  'ü'" in shown
    assert "no such file or directory" in call("tokenizer", "show", "nowhere").error


def test_no_torch(tmp_path: Path, corpus: Path) -> None:
    arguments = ["--input", str(corpus / "a.txt"), "--vocab", "300", "--output", str(tmp_path / "tok")]
    assert modules_of([["tokenizer", "train", *arguments]], tmp_path) == [(0, [])]
