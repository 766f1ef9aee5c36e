"""Tokens that only files beside a vocabulary name: the ids of transformers' AutoTokenizer, or one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hexad.config import HexadError
from hexad.dataset.text.chat import load_chat_template
from hexad.dataset.text.tokenizer import load_tokenizer

from .tokenizers import made

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEXT = "hello <|turn|>  world<|stop|>\n<extra> <|im_end|>a <pad>b<|turn|> <think>x</think>"
FULL = {"lstrip": False, "rstrip": True, "single_word": False, "normalized": False, "special": True}
TYPED = {"__type": "AddedToken", **FULL}


def listed(*tokens: str, first: int, **flags: bool) -> dict[str, Any]:
    return {str(first + place): {"content": token, **FULL, **flags} for place, token in enumerate(tokens)}


# The byte-level tokenizer has 322 ids, so that the first new one is 322; the others' sizes are {size}.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "nothing": {},
    "extra": {CONFIG: {"extra_special_tokens": ["<|turn|>", "<|stop|>"]}},
    "additional": {CONFIG: {"additional_special_tokens": ["<|turn|>", "<|stop|>"], "eos_token": "<|stop|>"}},
    "extra by name": {CONFIG: {"extra_special_tokens": {"turn_token": "<|turn|>", "image_token": "<extra>"}}},
    "other names": {CONFIG: {"image_token": "<extra>", "pad_token": "<pad>", "boi_token": "<|turn|>"}},
    "end only": {CONFIG: {"eos_token": "<|stop|>"}},
    "end in the map": {MAP: {"eos_token": "<|stop|>", "pad_token": {"content": "<pad>", **FULL}}},
    "map over config": {CONFIG: {"eos_token": "<pad>"}, MAP: {"eos_token": "<|stop|>"}},
    "extra in the map": {MAP: {"additional_special_tokens": ["<|turn|>", "<extra>"]}},
    "both lists": {
        CONFIG: {"extra_special_tokens": ["<|turn|>"]},
        MAP: {"extra_special_tokens": ["<extra>"]},
    },
    "listed": {CONFIG: {"added_tokens_decoder": ("<|turn|>", "<|stop|>"), "eos_token": "<|stop|>"}},
    "listed and not special": {CONFIG: {"added_tokens_decoder": ("<think>", "</think>"), "plain": True}},
    "listed, map without effect": {
        CONFIG: {"added_tokens_decoder": ("<|stop|>",), "eos_token": "<|stop|>"},
        MAP: {"additional_special_tokens": ["<extra>"]},
    },
    "listed and extra": {
        CONFIG: {
            "added_tokens_decoder": ("<|stop|>",),
            "extra_special_tokens": ["<|turn|>"],
            "pad_token": "<pad>",
        }
    },
    "added": {ADDED: {"<|turn|>": 0, "<|stop|>": 1}, CONFIG: {"eos_token": "<|stop|>"}},
    "added, special in the map": {
        ADDED: {"<extra>": 0, "<|turn|>": 1},
        MAP: {"additional_special_tokens": ["<|turn|>"]},
    },
    "typed": {CONFIG: {"eos_token": {"content": "<|stop|>", **TYPED}, "pad_token": "<pad>"}},
    "one of the vocabulary": {CONFIG: {"eos_token": "a", "extra_special_tokens": ["hello"]}},
}


def written(kind: str, case: str, directory: Path) -> Path:
    """A tokenizer with the files of a case, whose ids follow those of its vocabulary."""
    made(kind, directory)
    size = load_tokenizer(str(directory)).vocab_size
    for name, content in CASES[case].items():
        tree = dict(content)
        flags = {"special": False, "normalized": True} if tree.pop("plain", False) else {}
        if isinstance(tokens := tree.get("added_tokens_decoder"), tuple):
            tree["added_tokens_decoder"] = listed(*tokens, first=size, **flags)
        if name == ADDED:
            tree = {token: size + number for token, number in tree.items()}
        if name == CONFIG:
            tree["tokenizer_class"] = "PreTrainedTokenizerFast"
        (directory / name).write_text(json.dumps(tree))
    if not (directory / CONFIG).exists():
        (directory / CONFIG).write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


@pytest.mark.parametrize("kind", ["byte-level", "mistral", "llama"])
@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_transformers(kind: str, case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = written(kind, case, tmp_path)
    ours, theirs = load_tokenizer(str(directory)), transformers.AutoTokenizer.from_pretrained(directory)
    assert ours.encode(TEXT) == theirs(TEXT, add_special_tokens=False).input_ids
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.decode(ours.encode(TEXT)) == theirs.decode(theirs(TEXT).input_ids, skip_special_tokens=True)
    if theirs.eos_token_id is not None:
        assert ours.eod == theirs.eos_token_id


def test_ends_of_turns_may_be_such_tokens(tmp_path: Path) -> None:
    directory = written("byte-level", "extra", tmp_path)
    template = (
        "{% for m in messages %}<|turn|>{{ m.content }}<|stop|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    loaded = load_chat_template(str(directory))
    assert loaded is not None and "<|stop|>" in loaded.ends
    text, spans = loaded.conversation(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert [text[slice(*span)] for span in spans] == ["b<|stop|>"]


@pytest.mark.parametrize(
    ("kind", "files", "message"),
    [
        (
            "byte-level",
            {ADDED: {"<|turn|>": 999}},
            "added_tokens.json names the token '<|turn|>' with id 999",
        ),
        (
            "byte-level",
            {CONFIG: {"added_tokens_decoder": {"7": {"content": "<|turn|>"}}}},
            "with id 7, which",
        ),
        ("byte-level", {ADDED: ["<|turn|>"]}, "added_tokens.json: not readable as JSON"),
        ("byte-level", {ADDED: {"<|turn|>": "x"}}, "its files do not describe tokens"),
        ("byte-level", {CONFIG: {"added_tokens_decoder": {"7": "x", "y": {}}}}, "do not describe tokens"),
        ("byte-level", {CONFIG: {"extra_special_tokens": [1]}}, "do not describe tokens"),
        ("byte-level", {CONFIG: {"eos_token": 5}}, "do not describe tokens"),
        (
            "sentencepiece-llama",
            {CONFIG: {"eos_token": "<|stop|>"}},
            "'<|stop|>', which tokenizer.model does",
        ),
        ("sentencepiece-llama", {ADDED: {"<|turn|>": 400}}, "which tokenizer.model does not have; save a"),
        ("sentencepiece-llama", {ADDED: {"</s>": 5}}, "with id 5, which tokenizer.model has with id 2"),
        ("tiktoken", {CONFIG: {"additional_special_tokens": ["<|turn|>"]}}, "which x.tiktoken does not have"),
    ],
)
def test_what_cannot_be_the_same_is_refused(kind: str, files: Any, message: str, tmp_path: Path) -> None:
    spec = made(kind, tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(HexadError, match=re.escape(message)) as error:
        load_tokenizer(spec)
    assert "\n" not in str(error.value)


def test_ends_of_other_kinds_are_those_that_the_files_name(tmp_path: Path) -> None:
    spec = made("sentencepiece-llama", tmp_path / "sentencepiece")
    (tmp_path / "sentencepiece" / CONFIG).write_text('{"eos_token": "<s>", "bos_token": "<s>"}')
    assert load_tokenizer(spec).eod == 1
    spec = made("tiktoken", tmp_path / "tiktoken")
    (tmp_path / "tiktoken" / CONFIG).write_text('{"eos_token": "<|eot_id|>"}')
    loaded = load_tokenizer(spec)
    assert loaded.eod == loaded.specials["<|eot_id|>"]
