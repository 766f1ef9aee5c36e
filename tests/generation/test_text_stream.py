"""Texts as they come are, put together, the text of all ids."""

import random

import pytest

from hexad.dataset.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from hexad.dataset.text.tokenizer_training import train_bpe
from hexad.generation.text_stream import TextStream

TEXT = "Größe: 3 µm ☃ \U0001d518\U0001d52b \u2013 \n\n  naïve e\u0301 漢字かな 👩‍👩‍👧 end. "


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe([TEXT] * 9, 300, directory)
    return [ByteTokenizer(), load_tokenizer(str(directory))]


def pieces(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer, stop)
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
        held = TextStream(tokenizer)
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
