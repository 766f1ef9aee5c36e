"""Tokenizers: every kind gives text back, and agrees with the library that defines it."""

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexad.config import HexadError
from hexad.dataset.text.tokenizer import ByteTokenizer, bos_ids, load_tokenizer
from hexad.dataset.text.tokenizer_training import train_bpe

from .tokenizers import made

TEXTS = ["def f(x):\n    return x + 1\n", "Grüße, 世界! 🙂", "", "   spaces\t\n\n", "1234567"] * 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe")
    train_bpe(TEXTS * 4, 300, path)
    return path


@given(text=st.text())
def test_bytes_round_trip(text: str) -> None:
    byte = ByteTokenizer()
    ids = byte.encode(text)
    assert ids == list(text.encode())
    assert byte.decode([*ids, byte.eod]) == text
    assert byte.encode_batch([text])[0].tolist() == ids


@pytest.mark.parametrize("spec", ["", "tokenizer.json"])
def test_bpe_round_trips(directory: Path, spec: str) -> None:
    tokenizer = load_tokenizer(str(directory / spec))
    assert tokenizer.vocab_size == 300 and tokenizer.eod == 0
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS)):
        assert tokenizer.encode(text) == ids.tolist() and ids.dtype == np.int32
        assert tokenizer.decode([*ids.tolist(), tokenizer.eod]) == text
    assert load_tokenizer(tokenizer.name).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_bpe_training_is_repeatable(directory: Path, tmp_path: Path) -> None:
    train_bpe(iter(TEXTS * 4), 300, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_bpe_needs_room_for_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(HexadError, match="vocabulary size 256: expected at least 257"):
        train_bpe(TEXTS, 256, tmp_path)


def edited(directory: Path, target: Path, **changes: object) -> Path:
    tree = json.loads((directory / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps({**tree, **changes}))
    return target


def special(content: str, number: int) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **flags}


@pytest.mark.parametrize(
    ("files", "eod"),
    [
        ({}, 0),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, 300),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|done|>"}}}, 310),
        ({"special_tokens_map.json": {"eos_token": "<|done|>"}}, 310),
        ({"tokenizer_config.json": {"eos_token": "nowhere"}}, 311),
    ],
)
def test_end_of_document_is_the_one_the_files_name(directory: Path, tmp_path: Path, files, eod) -> None:
    added = [special("<|endoftext|>", 0), special("</s>", 300), special("<|done|>", 310)]
    edited(directory, tmp_path, added_tokens=added)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    # tokenizers renumbers added tokens without gaps.
    names = {300: "</s>", 310: "<|done|>", 311: "nowhere"}  # the last one is new
    backend = tokenizer.backend  # type: ignore[attr-defined]
    assert tokenizer.eod == (backend.token_to_id(names[eod]) if eod in names else eod)
    assert tokenizer.vocab_size == max(backend.get_vocab().values()) + 1


def with_beginning(directory: Path, target: Path, template: str, **config: object) -> Path:
    """The tokenizer with ``<s>`` (300) and ``</s>`` (301), and a post-processor that puts them there."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(["<s>", "</s>"])
    specials = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    whole = processors.TemplateProcessing(single=template, pair=f"{template} $B", special_tokens=specials)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), whole])
    backend.save(str(target / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (target / "tokenizer_config.json").write_text(json.dumps({**names, **config}))
    return target


@pytest.mark.parametrize("text", ["def f(x):", "", "<s> x"])
@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "$A"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_beginnings_are_those_of_transformers(
    directory: Path, tmp_path: Path, template: str, config: dict[str, bool], text: str
) -> None:
    transformers = pytest.importorskip("transformers")
    where = str(with_beginning(directory, tmp_path, template, **config))
    expected = transformers.AutoTokenizer.from_pretrained(where)(text).input_ids
    ours = load_tokenizer(where)
    end = [301] if template.endswith("</s>") else []  # every document gets one anyway: no part of the text
    assert [*bos_ids(ours, "auto"), *ours.encode(text), *end] == expected
    assert bos_ids(ours, "no") == []


def test_stored_limits_do_not_cut_documents(directory: Path, tmp_path: Path) -> None:
    limits = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    edited(directory, tmp_path, truncation=limits)
    assert len(load_tokenizer(str(tmp_path)).encode("x y z " * 20)) > 4


def test_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog", "hello world again"] * 50),
        model_writer=model,
        vocab_size=30,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for spec in (tmp_path, tmp_path / "tokenizer.model"):
        tokenizer = load_tokenizer(str(spec))
        assert (tokenizer.vocab_size, tokenizer.eod) == (30, oracle.eos_id())
        ids = tokenizer.encode("the lazy fox")
        assert ids == oracle.encode("the lazy fox") == tokenizer.encode_batch(["the lazy fox"])[0].tolist()
        assert tokenizer.decode(ids) == "the lazy fox"
        assert tokenizer.bos == ()
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert load_tokenizer(str(tmp_path)).bos == (oracle.bos_id(),)


@pytest.mark.parametrize("name", ["llama.tiktoken", "tokenizer.model"])
def test_tiktoken_numbers_specials_as_llama3_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("tiktoken")
    tokens = [bytes([i]) for i in range(256)] + [b"in", b"ing", b" s"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (tmp_path / name).write_bytes(b"".join(lines))
    tokenizer = load_tokenizer(str(tmp_path / name))
    # Llama 3: 128000 ranks, <|end_of_text|> 128001, <|eot_id|> 128009, vocabulary 128256.
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(tokens) + 256, len(tokens) + 1)
    backend = tokenizer.backend  # type: ignore[attr-defined]
    assert backend.encode_single_token("<|eot_id|>") == len(tokens) + 9
    assert tokenizer.encode("ing s") == [257, 258]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.encode_batch([text])[0].tolist() == ids
        assert tokenizer.decode([*ids, len(tokens) + 1]) == text
    # Text that spells a special token is text.
    assert max(tokenizer.encode("<|end_of_text|>")) < len(tokens)


@pytest.mark.parametrize(
    ("unit", "length"),
    [(" ", 1_000_000), *((unit, length) for unit in " a\né🙂" for length in (24_999, 25_001, 75_003))],
)
def test_tiktoken_takes_runs_of_any_length(tmp_path: Path, unit: str, length: int) -> None:
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(made("tiktoken", tmp_path))
    text = f"hello{unit * length} world"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    (places,) = tokenizer.encode_offsets([text])
    assert places.ids.tolist() == ids and places.end[-1] == len(text)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "no such file or directory; expected 'byte'"),
        ("a.json", b"{}", "not a Hugging Face tokenizer.json"),
        ("a.model", b"\x00\x01", "not a SentencePiece model"),
        ("a.tiktoken", b"hello", "not a tiktoken file"),
        ("b.tiktoken", b"YQ== 0\nYg==\n", r"b.tiktoken:2: expected a base64 token and its rank"),
        ("a.txt", b"hello", "unknown kind of file 'a.txt'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(HexadError, match=message) as error:
        load_tokenizer(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(HexadError, match=r"the directory has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("package", "name", "content"),
    [("sentencepiece", "t.model", b"\0"), ("tiktoken", "t.tiktoken", b"YQ== 0\n")],
)
def test_missing_packages_say_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HexadError, match=rf"pip install 'hexad\[{package}\]'"):
        load_tokenizer(str(tmp_path / name))


def test_no_torch() -> None:
    script = (
        "import sys, hexad.dataset.build.builder, hexad.cli.data, hexad.dataset.load.samples\n"
        "import hexad.dataset.load.order, hexad.dataset.build.corpus\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
