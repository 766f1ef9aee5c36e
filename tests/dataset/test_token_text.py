"""What tokens add to a text: tokenizers of every kind against their own decoding of all ids, and by hand."""

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hexad.dataset.text.token_text import TokenLabels, TokenText
from hexad.dataset.text.tokenizer import load_tokenizer

from .tokenizers import OTHERS, PIECEWISE, TEXTS, made, sentencepiece

KINDS = ["byte", *PIECEWISE, *OTHERS]
# Their files lose a space before a text, or text that no piece covers.
LOSSY = {"byte-level-prefix", "mistral", "always", "sentencepiece"}
KEPT = ["hello world", "the lazy dog the fox", "a b"]
"""Texts that all piecewise tokenizers give back."""


@pytest.fixture(scope="module")
def text_of(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def text(kind: str) -> TokenText:
        return TokenText(load_tokenizer(made(kind, tmp_path_factory.mktemp(kind))))

    return text


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_is_what_all_ids_have_beyond_the_prompt(text_of, kind: str) -> None:
    text = text_of(kind)
    for sample in TEXTS:
        ids = text.tokenizer.encode(sample)
        for cut in range(len(ids) + 1):
            before = text.tokenizer.decode(ids[:cut])
            if "\ufffd" in before:  # inside a character
                continue
            decoder = text.decoder(ids[:cut])
            after = "".join(decoder.add(token).text for token in ids[cut:]) + decoder.end()
            assert before + after == text.tokenizer.decode(ids)
            assert decoder.characters == len(after)


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_decode_as_the_library_decodes_them(text_of, kind: str) -> None:
    text, compared = text_of(kind), 0
    for seed in range(150):
        chance = random.Random(seed)
        ids = [chance.randrange(text.tokenizer.vocab_size) for _ in range(chance.randrange(1, 12))]
        expected = text.tokenizer.decode(ids)
        if "\ufffd" in expected and kind in ("llama", "mistral", "gemma"):
            continue  # there a byte that is not UTF-8 spoils the characters before it, which are certain here
        decoder = text.decoder()
        added = [decoder.add(token) for token in ids]
        assert "".join(one.text for one in added) + decoder.end() == expected
        if text.pieces is not None and "\ufffd" not in expected:
            assert b"".join(one.value for one in added) == expected.encode()
        compared += 1
    assert compared > 15


@pytest.mark.parametrize("kind", ["byte", *PIECEWISE])
def test_a_character_in_several_tokens_comes_with_the_last(text_of, kind: str) -> None:
    text = text_of(kind)
    ids = text.tokenizer.encode("日")
    if text.tokenizer.decode(ids).strip() != "日":
        assert kind in ("always", "sentencepiece")  # which have no bytes
        return
    decoder = text.decoder(text.tokenizer.encode("a"))
    added = [decoder.add(token) for token in ids]
    assert b"".join(one.value for one in added).lstrip() == "日".encode()
    assert "".join(one.text for one in added[:-1]).strip() == "" and added[-1].text.endswith("日")


@pytest.mark.parametrize("kind", ["byte", *PIECEWISE])
def test_bytes_of_documents_are_those_of_their_texts(text_of, kind: str) -> None:
    """As evaluation counts them: of tokens that are predicted, each with the one before."""
    text = text_of(kind)
    samples = KEPT if kind in LOSSY else TEXTS
    counts, tokenizer = text.byte_counts, text.tokenizer
    assert counts is not None and len(counts.inside) == tokenizer.vocab_size
    stream = [tokenizer.eod]
    for sample in samples:
        stream += [*tokenizer.bos, *tokenizer.encode(sample), tokenizer.eod]
    total = counts.total(np.array(stream[:-1]), np.array([*stream[1:-1], tokenizer.vocab_size + 7]))
    assert total == sum(len(sample.encode()) for sample in samples)
    assert counts.inside[tokenizer.eod] == 0


@pytest.mark.parametrize("kind", OTHERS)
def test_kinds_that_lose_bytes_have_no_count(text_of, kind: str) -> None:
    assert text_of(kind).byte_counts is None


@pytest.mark.parametrize("kind", ["byte", *PIECEWISE])
def test_a_prompt_is_shown_as_it_was_written(text_of, kind: str) -> None:
    text = text_of(kind)
    samples = list(KEPT if kind in LOSSY else TEXTS)
    if kind in ("byte-level", "byte-level-prefix", "llama", "mistral", "always", "gemma"):
        samples += ["<|im_end|>hello", "the<|im_end|>world<|im_end|>"]
    for sample in samples:
        ids = [*text.tokenizer.bos, *text.tokenizer.encode(sample)]
        decoder = text.prompt_decoder()
        assert "".join(decoder.add(token).text for token in ids) + decoder.end() == sample


@pytest.mark.parametrize("kind", ["byte", *PIECEWISE])
def test_a_token_has_the_place_of_its_bytes(text_of, kind: str) -> None:
    """A token that has a byte of a range of characters is within it, and no other (loss masks)."""
    text = text_of(kind)
    for sample in [*TEXTS, "é", "日本", "aé日x"]:
        (places,) = text.tokenizer.encode_offsets([sample])
        decoder = text.prompt_decoder()
        values = [decoder.add(int(token)).value for token in places.ids]
        if b"".join(values) != sample.encode():
            assert kind in LOSSY
            continue
        characters = [place for place, character in enumerate(sample) for _ in character.encode()]
        for start in range(len(sample)):
            span, end = (start, min(start + 2, len(sample))), 0
            for value, within in zip(values, places.within([span])):
                begin, end = end, end + len(value)
                if value:  # a space that the tokenizer puts has no place
                    assert within == any(span[0] <= place < span[1] for place in characters[begin:end])


def test_names_are_unique_in_their_place(text_of) -> None:
    """Names of a place by hand: pieces and bytes of one text, parts of characters, special tokens."""
    text = text_of("mistral")
    number = text.tokenizer.backend.token_to_id
    piece, byte, part, end = number("h"), number("<0x68>"), number("<0xC3>"), number("</s>")
    labels = TokenLabels(text, text.decoder(text.tokenizer.encode("hello")))
    names = labels.add(byte, [piece, part, end, byte, number("\u2581world"), number("world")])
    assert {token: label.name for token, label in names.items()} == {
        byte: "h",
        piece: f"token_id:{piece}",
        part: f"token_id:{part}",
        end: "</s>",
        number("\u2581world"): " world",
        number("world"): "world",
    }
    assert [names[token].value for token in (byte, piece, part, end)] == [b"h", b"h", b"\xc3", b""]
    first = TokenLabels(text, text.decoder()).add(number("\u2581world"), [number("world")])
    assert [label.name for label in first.values()] == ["world", f"token_id:{number('world')}"]


@pytest.mark.parametrize("kind", KINDS)
def test_names_do_not_repeat(text_of, kind: str) -> None:
    text = text_of(kind)
    everything = range(text.tokenizer.vocab_size)
    for before in ([], text.tokenizer.encode("hello")):
        names = TokenLabels(text, text.decoder(before)).add(0, everything)
        assert len({label.name for label in names.values()}) == len(everything)


def test_newer_decoders_are_not_guessed(tmp_path: Path) -> None:
    """Steps in another order than those that are known are decoded, not joined."""
    from tokenizers import Tokenizer, decoders

    made("llama", tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.Strip(" ", 0, 1), decoders.Replace("\u2581", " ")])
    backend.save(str(tmp_path / "tokenizer.json"))
    text = TokenText(load_tokenizer(str(tmp_path)))
    assert text.pieces is None and text.byte_counts is None
    decoder = text.decoder()
    ids = text.tokenizer.encode("hello world")
    assert "".join(decoder.add(token).text for token in ids) == text.tokenizer.decode(ids)


ADDED = ["<tool_call>", "</tool_call>", "a", "foo bar", " lead"]
"""Tokens that are not special: marks, a letter, texts with spaces."""


@pytest.mark.parametrize("kind", ["byte-level", "byte-level-prefix", "llama", "mistral", "always", "gemma"])
def test_added_tokens_that_are_not_special(kind: str, tmp_path: Path) -> None:
    """Counts by hand, and the library's decoding."""
    from tokenizers import AddedToken, Tokenizer

    made(kind, tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    backend.save(str(tmp_path / "tokenizer.json"))
    text = TokenText(load_tokenizer(str(tmp_path)))
    tokenizer, counts = text.tokenizer, text.byte_counts
    assert counts is not None and text.encoded == (kind not in ("byte-level", "gemma"))
    for sample in ("hello", "hello<tool_call>hello</tool_call>world", "helloathe", "the<tool_call>x"):
        ids = tokenizer.encode(sample)
        assert counts.total(np.array([tokenizer.eod, *ids[:-1]]), np.array(ids)) == len(sample), sample
        decoder = text.prompt_decoder()
        assert "".join(decoder.add(token).text for token in ids) == sample
    for first in ADDED:
        ids = [backend.token_to_id(first), *tokenizer.encode("hello")]
        decoder = text.decoder()
        assert "".join(decoder.add(token).text for token in ids) == tokenizer.decode(ids)


def test_a_space_behind_a_text_has_no_count(tmp_path: Path) -> None:
    sentencepiece(tmp_path, treat_whitespace_as_suffix=True)
    assert TokenText(load_tokenizer(str(tmp_path))).byte_counts is None
