"""Small tokenizers of every kind that models are published with, for tests of what tokens and texts are."""

import base64
import io
from collections.abc import Callable
from pathlib import Path

WORDS = "the quick brown fox jumps over the lazy dog hello world a  b café naïve 12 don't\n"
TEXTS = [
    "hello world",
    " hello  world ",
    "def f(x):\n    return 'naïve' # 日本語\t🙂",
    "Straße № 7\n\n\ttabs",
    "the lazy dog, the fox",
    "👩‍👩‍👧 e\u0301",
]


def byte_level(directory: Path, prefix: bool = False) -> None:
    """GPT-2's kind; ``prefix``: with a space before each text (RoBERTa's older files)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=sorted(alphabet), show_progress=False)
    backend.train_from_iterator([WORDS] * 9, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("日本", normalized=False)])
    backend.save(str(directory / "tokenizer.json"))


def _metaspace_model(unigram: bool = False):
    from tokenizers import models

    letters = "abcdefghijklmnopqrstuvwxyz.,'()0123456789\u2581"
    pieces = ["\u2581hello", "hello", "\u2581world", "world", "\u2581the", "\u2581\u2581", "\u2581fox", "lo"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *pieces]
    if unigram:
        names = [name for name in names if not name.startswith("<0x")]
        scores = [(name, -10.0 if len(name) == 1 else -float(len(name))) for name in names]
        return models.Unigram(scores, unk_id=0, byte_fallback=False)
    vocab = {name: number for number, name in enumerate(names)}
    merges = []

    def merge(*parts: str) -> None:
        word = parts[0]
        for part in parts[1:]:
            vocab.setdefault(word + part, len(vocab))
            if (word, part) not in merges:
                merges.append((word, part))
            word += part

    merge(*"\u2581hello"), merge(*"\u2581world"), merge(*"hello"), merge(*"world")
    merge(*"\u2581the"), merge("\u2581", "\u2581")
    return models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def metaspace(directory: Path, kind: str) -> None:
    """SentencePiece's kind as ``tokenizer.json``: ``llama`` (Llama 2, Phi-3, Mistral's first: a normalizer
    puts the space), ``mistral`` (newer: before the text only), ``always`` (T5's: also after special tokens),
    ``gemma`` (no space)."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    backend = Tokenizer(_metaspace_model(unigram=kind == "always"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind != "gemma":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    if kind == "llama":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    elif kind == "mistral":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "always":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))


def sentencepiece(directory: Path, **options: object) -> None:
    """A SentencePiece ``.model``."""
    import sentencepiece as package

    model = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter([*WORDS.split("\n"), "two   spaces", "hello world"] * 9), model_writer=model,
        vocab_size=340 if options.get("byte_fallback") else 60, minloglevel=2, hard_vocab_limit=False,
        **options
    )  # fmt: skip
    (directory / "tokenizer.model").write_bytes(model.getvalue())


def tiktoken(directory: Path) -> None:
    """A tiktoken rank file."""
    values = [bytes([byte]) for byte in range(256)] + [
        b"he",
        b"ll",
        b"hell",
        b"hello",
        b" w",
        b"or",
        b"\xe6\x97",
    ]
    lines = (f"{base64.b64encode(value).decode()} {rank}" for rank, value in enumerate(values))
    (directory / "x.tiktoken").write_text("\n".join(lines))


def word_piece(directory: Path) -> None:
    """BERT's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    names = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "the", "fox", ",", ".", "'", "don", "t"]
    names += [
        *"abcdefghijklmnopqrstuvwxyz0123456789",
        *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"),
    ]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    backend.save(str(directory / "tokenizer.json"))


def end_of_word(directory: Path) -> None:
    """CLIP's kind: a suffix ends each word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = [
        "<unk>",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz"),
    ]
    vocab = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder("</w>")
    backend.save(str(directory / "tokenizer.json"))


def words(directory: Path) -> None:
    """Words without a decoder: a space between two tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2, "the": 3, "fox": 4}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(directory / "tokenizer.json"))


_EXACT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
PIECEWISE: dict[str, Callable[[Path], object]] = {
    "byte-level": byte_level,
    "byte-level-prefix": lambda directory: byte_level(directory, prefix=True),
    "llama": lambda directory: metaspace(directory, "llama"),
    "mistral": lambda directory: metaspace(directory, "mistral"),
    "always": lambda directory: metaspace(directory, "always"),
    "gemma": lambda directory: metaspace(directory, "gemma"),
    "sentencepiece": sentencepiece,
    "sentencepiece-llama": lambda directory: sentencepiece(directory, **_EXACT, model_type="bpe"),
    "sentencepiece-no-prefix": lambda directory: sentencepiece(directory, **_EXACT, add_dummy_prefix=False),
    "tiktoken": tiktoken,
}
OTHERS: dict[str, Callable[[Path], object]] = {
    "word-piece": word_piece,
    "end-of-word": end_of_word,
    "words": words,
}


def made(kind: str, directory: Path) -> str:
    """What ``load_tokenizer`` takes for a kind of :data:`PIECEWISE` or :data:`OTHERS`, or ``byte``."""
    if kind == "byte":
        return "byte"
    directory.mkdir(parents=True, exist_ok=True)
    (PIECEWISE | OTHERS)[kind](directory)
    return str(directory / "x.tiktoken" if kind == "tiktoken" else directory)
