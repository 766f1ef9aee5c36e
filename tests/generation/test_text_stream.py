"""Texts as they come are, put together, the text of all ids."""

import random
from pathlib import Path

import pytest

from hexad.dataset.text.token_text import TokenText
from hexad.dataset.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from hexad.dataset.text.tokenizer_training import train_bpe
from hexad.generation.text_stream import TextStream

from ..dataset.tokenizers import made

TEXT = "Größe: 3 µm ☃ \U0001d518\U0001d52b \u2013 \n\n  naïve e\u0301 漢字かな 👩‍👩‍👧 end. "


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe([TEXT] * 9, 300, directory)
    return [ByteTokenizer(), load_tokenizer(str(directory))]


def stream_of(tokenizer: Tokenizer, stop: tuple[str, ...] = (), before: tuple[int, ...] = ()) -> TextStream:
    text = TokenText(tokenizer)
    return TextStream(text.decoder(before), text.specials, stop)


def pieces(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = stream_of(tokenizer, stop)
    texts = []
    for token in ids:
        texts.append(stream.add(token))
        if stream.stopped:
            return texts, True
    return [*texts, stream.end()], stream.stopped


def test_parts_make_the_whole(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode(TEXT * 3)
        texts, _ = pieces(tokenizer, ids)
        assert "".join(texts) == tokenizer.decode(ids) == TEXT * 3
        assert not any("\ufffd" in text for text in texts)
        assert len([text for text in texts if text]) > len(ids) / 4  # most of it at once


def test_bytes_that_are_no_text(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        for seed in range(40):
            chance = random.Random(seed)
            ids = [chance.randrange(255) for _ in range(100)]
            assert "".join(pieces(tokenizer, ids)[0]) == tokenizer.decode(ids)
        held = stream_of(tokenizer)
        assert sum(len(held.add(255)) for _ in range(100)) > 50  # they are not held back indefinitely


@pytest.mark.parametrize("stop", [("xyz",), ("ab", "abc"), ("漢字",), ("aaab",), ("c", "bc")])
def test_a_text_ends_before_the_first_that_stops_it(
    tokenizers: list[Tokenizer], stop: tuple[str, ...]
) -> None:
    for tokenizer in tokenizers:
        for seed in range(60):
            chance = random.Random(seed)
            text = "".join(chance.choice("abcxyz漢字a") for _ in range(30))
            texts, stopped = pieces(tokenizer, tokenizer.encode(text), stop)
            ends = [text.find(one) + len(one) for one in stop if one in text]
            assert stopped == bool(ends)
            shown = "".join(texts)
            assert text.startswith(shown) and not any(one in shown for one in stop)
            if ends:
                assert len(shown) <= min(ends) and any(text[len(shown) :].startswith(one) for one in stop)
            else:
                assert shown == text


STOPS = {  # texts to stop at, of "hello", " ", "world", "<|im_end|>", "\n", "hello", and the text before them
    ("<|im_end|>",): "hello world",
    ("<|im_end|>\n",): "hello world",
    ("d<|im_end|>\nhe",): "hello worl",
    (" world",): "hello",
    (" world<|im_end|>x", "<|im_end|>\nhell"): "hello world",
    ("<|im_end|>hello", "worlds"): None,
    ("<", "|", "im", "end|>\nh", "d<|"): None,  # of parts of a special token none stops
    ("<|im_end", "never"): None,
    ("|", "\n"): "hello world",
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma", "byte-level"])
@pytest.mark.parametrize("stop", STOPS)
def test_texts_with_special_tokens_stop(kind: str, stop: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(made(kind, tmp_path))
    number = tokenizer.specials["<|im_end|>"]
    before = tuple(tokenizer.encode("a"))
    ids = [
        *tokenizer.encode("ahello world")[len(before) :],
        number,
        *tokenizer.encode("a\nhello")[len(before) :],
    ]
    if tokenizer.decode([*before, *ids]) != "ahello world\nhello":
        pytest.fail("ids that do not show anything")
    stream = stream_of(tokenizer, stop, before)
    texts = []
    for token in ids:
        texts.append(stream.add(token))
        if stream.stopped:
            break
    shown = "".join(texts) + stream.end()
    expected = STOPS[stop]
    assert stream.stopped == (expected is not None)
    assert shown == ("hello world\nhello" if expected is None else expected)


def test_special_tokens_that_are_shown_are_part_of_the_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(made("byte-level", tmp_path))
    text = TokenText(tokenizer)
    start, end = tokenizer.specials["<|im_start|>"], tokenizer.specials["<|im_end|>"]
    ids = [start, *tokenizer.encode("fox"), end, *tokenizer.encode(" dog")]
    for shown, expected in (((), "fox dog"), ({start}, "<|im_start|>fox dog"), ({end}, "fox<|im_end|> dog")):
        for stop in ((), ("cat",)):
            stream = TextStream(text.decoder(), text.specials, stop, shown)
            assert "".join([*map(stream.add, ids), stream.end()]) == expected
    stream = TextStream(text.decoder(), text.specials, ("x<|im",), {end})
    assert "".join(map(stream.add, ids)) == "fo" and stream.stopped


def test_a_text_does_not_stop_where_it_may_not(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode("ab ab ab")
        stream = stream_of(tokenizer, ("b a",))
        parts = [stream.add(token, place >= 3) for place, token in enumerate(ids)]
        assert stream.stopped and "".join(parts) == "ab a"
