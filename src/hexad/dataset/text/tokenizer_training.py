"""Training a tokenizer on the same inputs as ``hexad data build`` reads."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hexad.config.errors import HexadError

from ..build.inputs import find_files, listed
from ..build.records import Reading
from ..build.sources import NotText, check_used, cut, read, streamed
from ..files import reporting
from .chat import ChatTemplate
from .tokenizer import END_NAMES, HuggingFaceTokenizer

log = logging.getLogger("hexad")

_SMALLEST = 257
"""Ids: every byte, and the end-of-document token."""


class _Listing(ChatTemplate):
    """A chat template that renders the messages' texts only, from which a tokenizer learns."""

    def conversation(
        self, messages: Sequence[Any], tools: list[Any] | None = None, first: int = 0
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        contents = (message.get("content") or "" for message in messages)
        texts = (
            "\n".join(part.get("text", "") for part in content) if isinstance(content, list) else content
            for content in contents
        )
        return "\n".join(texts), ()

    def mentions(self, role: str) -> bool:
        return True


def training_texts(
    inputs: Sequence[str | Path],
    *,
    json_key: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> Iterator[str]:
    """The texts that a tokenizer learns from: documents, prompts with their completions, messages. Arguments
    are those of :func:`~hexad.dataset.build.builder.build`.

    Raises:
        HexadError: an input cannot be read or decoded, naming file and line; or there is no text.
    """
    input_files = find_files(inputs, include, exclude)
    if input_files.unread:
        log.warning("not read: %s", listed(input_files.unread))
    pieces = cut(input_files.files)
    check_used({"json_key": json_key}, pieces)
    total, done, empty = sum(piece.size for piece in pieces), 0, True
    reading = Reading(json_key, _Listing("", ""))
    for piece in streamed(pieces):
        try:
            for record in read(piece, reading.columns):
                text = reading.document(record).text
                empty = empty and not text
                yield text
        except NotText:
            pass  # a file of a directory
        done += piece.size
        if progress:
            progress(done, total)
    if empty:
        raise HexadError(f"{', '.join(map(str, inputs))}: no text to learn from in {len(pieces)} files")


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    path: str | Path,
    *,
    special_tokens: Sequence[str] = (),
    min_frequency: int = 0,
    chat_template: str | None = None,
) -> HuggingFaceTokenizer:
    """Train a byte-level BPE tokenizer with ``<|endoftext|>`` and save it in Hugging Face form.

    Args:
        texts: what to learn from, one document each.
        vocab_size: ids to learn, the 256 bytes and the special tokens included; fewer if the texts have too
            few pairs.
        path: directory for ``tokenizer.json`` and ``tokenizer_config.json``; made if missing.
        special_tokens: further ones, which follow ``<|endoftext|>`` (id 0).
        min_frequency: how often a pair must occur to be merged.
        chat_template: in Jinja2's language, stored as ``chat_template.jinja``.

    Returns:
        The tokenizer, as :func:`~hexad.dataset.text.tokenizer.load_tokenizer` returns it.

    Raises:
        HexadError: ``vocab_size`` is too small, a special token or all texts are empty, or the directory
            cannot be written.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    end = END_NAMES[0]
    special = list(dict.fromkeys([end, *special_tokens]))
    if "" in special:
        raise HexadError("``special_token``: found an empty text; leave it out")
    smallest = _SMALLEST + len(special) - 1
    if vocab_size < smallest:
        what = f"every byte and {', '.join(special)}"
        raise HexadError(f"vocabulary size {vocab_size}: expected at least {smallest}, {what}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    directory = Path(path)
    with reporting(directory, "written"):  # before the work, which takes a while
        directory.mkdir(parents=True, exist_ok=True)
    reader = _CountedText(texts)
    backend.train_from_iterator(reader, trainer)
    if reader.error is not None:
        raise reader.error
    if not reader.characters:
        raise HexadError("no text to learn from")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        **({"extra_special_tokens": special[1:]} if special[1:] else {}),
    }
    with reporting(directory, "written"):
        (directory / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
        if chat_template is not None:
            (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return HuggingFaceTokenizer(directory / "tokenizer.json", str(directory.resolve()))


class _CountedText:
    """Counts the texts that the library reads, and keeps an error, which it would replace by its own."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0
        self.error: HexadError | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                self.characters += len(text)
                yield text
        except HexadError as error:
            self.error = error
