"""Bytes per token add up to the bytes of the text."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from hexad.dataset.text.token_bytes import token_bytes
from hexad.dataset.text.tokenizer import load_tokenizer

TEXTS = ["def f(x):\n    return 'naïve' # 日本語\t🙂", " two  spaces", "Straße № 7"]


def byte_level(directory: Path) -> str:
    from hexad.dataset.text.tokenizer_training import train_bpe

    train_bpe(iter(TEXTS * 4), 300, directory)
    return str(directory)


def metaspace(directory: Path) -> str:
    """As Llama 2's and Mistral's tokenizer.json: spaces as a character, bytes where no piece fits."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("\u2581", "d", "e", "f", "x", "t", "w", "o", "s", "p", "a", "c", "\u2581t"):
        vocab[piece] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, [("\u2581", "t")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return str(directory)


def sentencepiece(directory: Path) -> str:
    import sentencepiece as package

    directory.mkdir(exist_ok=True)
    (directory / "text.txt").write_text("\n".join(TEXTS * 9))
    package.SentencePieceTrainer.train(
        input=str(directory / "text.txt"), model_prefix=str(directory / "tokenizer"), vocab_size=300,
        byte_fallback=True, model_type="bpe", minloglevel=2, hard_vocab_limit=False,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
    )  # fmt: skip
    return str(directory)


def tiktoken(directory: Path) -> str:
    directory.mkdir(exist_ok=True)
    values = [bytes([byte]) for byte in range(256)] + [b"re", b"tu", b" two"]
    lines = (f"{base64.b64encode(value).decode()} {rank}" for rank, value in enumerate(values))
    (directory / "x.tiktoken").write_text("\n".join(lines))
    return str(directory / "x.tiktoken")


@pytest.mark.parametrize("make", [lambda _: "byte", byte_level, metaspace, sentencepiece, tiktoken])
def test_they_add_up(make, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make(tmp_path / "tokenizer"))
    table = token_bytes(tokenizer)
    assert table is not None and len(table) == tokenizer.vocab_size
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert table[np.array(ids)].sum() == len(text.encode()), text
    if tokenizer.eod is not None:
        assert table[tokenizer.eod] == 0


def test_wordpiece_cannot_say(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["decoder"]["type"] == "WordPiece"
    assert token_bytes(load_tokenizer(str(tmp_path))) is None
