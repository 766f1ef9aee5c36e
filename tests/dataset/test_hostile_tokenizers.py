"""A ``tokenizer.json`` of a stranger loads, or is refused in one line; likewise each text that it encodes."""

import base64
import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hexad.config import HexadError
from hexad.dataset.text.tokenizer import load_tokenizer

TEXTS = ("hello world a b c  d 123", "", "é́ 😀あ <s> [MASK] </s>", "a" * 300 + " " * 300, "\0\n\r\t x")
WORDS = "<unk> <s> </s> h e l o he ll hell hello Ġ Ġw w r d a b c aa ▁ ##o".split()
VOCAB = {word: number for number, word in enumerate(WORDS)}
Tree = dict[str, Any]


def added(content: str, number: int) -> Tree:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def tree(kind: str) -> Tree:
    """A small tokenizer of one of the library's models."""
    models: dict[str, Tree] = {
        "BPE": {"vocab": dict(VOCAB), "merges": [["h", "e"], ["l", "l"], ["he", "ll"]], "unk_token": "<unk>"},
        "Unigram": {"unk_id": 0, "vocab": [[word, -float(number)] for word, number in VOCAB.items()]},
        "WordPiece": {
            "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": dict(VOCAB),
        },
        "WordLevel": {"unk_token": "<unk>", "vocab": dict(VOCAB)},
    }  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    begin, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": [added(word, VOCAB[word]) for word in WORDS[:3]],
        "normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": dict(level),
        "model": {"type": kind, **models[kind]},
    }


def outcome(directory: Path, content: str) -> str:
    """Why a file, or the first text that it cannot encode, is refused; empty if nothing is."""
    (directory / "tokenizer.json").write_text(content)
    try:
        tokenizer = load_tokenizer(str(directory))
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text))
            tokenizer.encode_offsets([text])
            tokenizer.encode_batch([text])
        tokenizer.decode([0, 3, 2**31, tokenizer.vocab_size])
    except HexadError as error:
        assert len(str(error)) < 1500 and "\n" not in str(error)
        return str(error)
    return ""


def step(kind: str, **values: Any) -> Tree:
    return {"type": kind, **values}


def regex(pattern: str) -> Tree:
    return step("Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)


def nested(name: str, depth: int) -> str:
    part = "normalizer" if name == "normalizers" else "pre_tokenizer"
    inner = json.dumps(step("NFC") if name == "normalizers" else step("Whitespace"))
    deep = f'{{"type": "Sequence", "{name}": [' * depth + inner + "]}" * depth
    return json.dumps(tree("BPE") | {part: "@"}).replace('"@"', deep)


def replaced(**values: Any) -> str:
    """A tokenizer with some entries replaced, of its model by ``model=``."""
    content = tree("BPE")
    content["model"] |= values.pop("model", {})
    return json.dumps(content | values)


def charsmap(size: int, units: int = 8) -> Tree:
    content = size.to_bytes(4, "little") + bytes([255, 255, 3, 0]) * units
    return step("Precompiled", precompiled_charsmap=base64.b64encode(content).decode())


grow = step("Replace", pattern={"String": "a"}, content="aaaaaaaaaa")
REFUSED = {
    nested("normalizers", 5000): "not a Hugging Face tokenizer.json: recursion limit exceeded",
    nested("pretokenizers", 5000): "not a Hugging Face tokenizer.json: recursion limit exceeded",
    replaced(
        normalizer=charsmap(2**32 - 1)
    ): "its precompiled_charsmap is shorter than the 4,294,967,295 bytes",
    replaced(normalizer=charsmap(32)): "its library failed: index out of bounds",
    replaced(normalizer=step("Sequence", normalizers=[grow] * 12)): "normalizer: its replacements make",
    replaced(decoder=step("Sequence", decoders=[grow] * 12)): "decoder: its replacements make",
    replaced(normalizer=grow | {"content": "a" * 1000}): "normalizer: its replacements make",
    replaced(normalizer=grow | {"pattern": {"Regex": ""}, "content": "b" * 1000}): "its replacements make",
    replaced(pre_tokenizer=regex("(a+)+$")): "the regular expression '(a+)+$': its library failed: Onig",
    replaced(pre_tokenizer=regex("(a|aa)+$")): "the regular expression '(a|aa)+$': its library failed: Onig",
    replaced(normalizer=grow | {"pattern": {"Regex": "(\\w|\\d|b)*c"}}): "its library failed: Onig",
    replaced(pre_tokenizer=step("FixedLength", length=0)): "its library failed: chunk size must be non-zero",
    replaced(
        decoder=step("Strip", content="a", start=1000, stop=1000)
    ): "cannot decode tokens: its library fail",
    replaced(model={"continuing_subword_prefix": "hhhh"}): "its library failed: range end index",
    replaced(
        model={"vocab": VOCAB | {"x": 2**32 - 1}}
    ): "found the id 4294967295 in its vocabulary, expected",
    replaced(
        model={"vocab": VOCAB | {"x": 2**24}}
    ): "found the id 16777216 in its vocabulary, expected at most",
    replaced(
        model={"vocab": VOCAB | {"x" * 5000: 90}}
    ): "found a token of 5,000 characters, expected at most",
    replaced(model={"vocab": {"x": 1}, "merges": []}): "Unk token `<unk>` not found in the vocabulary",
    replaced(
        model={"merges": [["q", "z"]]}
    ): "not a Hugging Face tokenizer.json: Token `q` out of vocabulary",
    replaced(version="a" * 90_000): "not a Hugging Face tokenizer.json: Unknown tokenizer version 'aaa",
    replaced().replace('"hell": 9', f'"hell": {"9" * 200_000}'): "not a Hugging Face tokenizer.json",
    replaced().replace('"hell": 9', '"hell": NaN'): "not a Hugging Face tokenizer.json",
    json.dumps(tree("BPE") | {"post_processor": tree("BPE")["post_processor"] | {"special_tokens": {}}}): (
        "its library failed: no entry found for key"
    ),
    json.dumps(
        tree("WordPiece") | {"model": tree("WordPiece")["model"] | {"max_input_chars_per_word": 2**63}}
    ): ("model.max_input_chars_per_word: found 9223372036854775808, expected at most 1000"),
}


@pytest.mark.parametrize(("content", "says"), REFUSED.items(), ids=list(REFUSED.values()))
def test_refused_in_one_line(
    tmp_path: Path, content: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    message = outcome(tmp_path, content)
    assert says in message and str(tmp_path) in message
    if "cannot decode" not in says:
        assert not capfd.readouterr().err  # the library's own report of a panic


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece", "WordLevel"])
def test_what_published_files_hold_is_accepted(tmp_path: Path, kind: str) -> None:
    content = tree(kind)
    words = {f"t{number}": number + 100 for number in range(1000)} | {"_" * 512: 2000}
    if kind != "Unigram":
        content["model"]["vocab"] |= words
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 10**6}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<unk>",
    }  # fmt: skip
    content["normalizer"] = step(
        "Sequence",
        normalizers=[
            step("NFKC"),
            *(step("Replace", pattern={"String": " "}, content="▁") for _ in range(3)),
            *(
                step("Replace", pattern={"String": t}, content=c)
                for t, c in (("\n", "<br>"), ("\t", "<tab>"))
            ),
            step("Replace", pattern={"Regex": r"(?:\r?\n)+"}, content="\n"),
        ],
    )
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    digits = r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)|\p{N}"
    content["pre_tokenizer"] = step("Sequence", pretokenizers=[regex(llama3), regex(digits)])
    assert outcome(tmp_path, json.dumps(content)) == ""
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(tokenizer.encode("hello " * 9)) in range(3, 100)  # neither truncated nor padded


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ({b"a": 0}, "not a tiktoken file: it has no rank for the byte 0x00"),
        ({bytes([byte]): 7 for byte in range(256)}, "not a tiktoken file: "),
        ({bytes([byte]): byte for byte in range(256)} | {b"ab": 2**40}, "found the id 1099511627776 in its"),
    ],
)
def test_ranks(tmp_path: Path, ranks: dict[bytes, int], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (tmp_path / "a.tiktoken").write_text("".join(lines))
    with pytest.raises(HexadError, match=rf"a\.tiktoken: {says}"):
        load_tokenizer(str(tmp_path / "a.tiktoken"))
    assert not capfd.readouterr().err


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 10**30, 1.5, float("nan"), float("inf"),
    "", "x", "a" * 70_000, [], {}, [[]], ["a", "b"], {"a": 1}, [["a", 1]], {"type": "Sequence"},
    regex("(a+)+b"), grow, charsmap(32), step("FixedLength", length=2**63),
    step("Strip", content="", start=1, stop=1),
)  # fmt: skip


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a tree; of long lists those of the first three."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, item) in enumerate(inner):
        if number < 3 or not isinstance(item, int | list):
            yield from places(item, (*place, key))


def mutated(rng: random.Random) -> str:
    """A tokenizer in which one or two places have other values, or none."""
    content: Any = copy.deepcopy(tree(rng.choice(("BPE", "Unigram", "WordPiece", "WordLevel"))))
    for _ in range(rng.choice((1, 1, 2))):
        *above, last = rng.choice(list(places(content))[1:])
        here = content
        for key in above:
            here = here[key]
        if rng.random() < 0.1:
            del here[last]
        else:
            here[last] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(content)
    return text[: rng.randrange(len(text))] if rng.random() < 0.03 else text


def sweep(directory: Path, seed: int, count: int, make: Callable[[random.Random], str] = mutated) -> None:
    rng = random.Random(seed)
    refused = sum(bool(outcome(directory, make(rng))) for _ in range(count))
    assert count // 3 < refused < count, (seed, refused)


def test_random_mutations(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    sweep(tmp_path, seed, 120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_random_mutations(tmp_path: Path, seed: int) -> None:
    sweep(tmp_path, seed, 1500)
