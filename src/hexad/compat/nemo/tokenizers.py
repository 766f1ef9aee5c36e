"""NeMo 2's tokenizers, as the flags of Megatron-LM that name them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from hexad.config import HexadError, one_line
from hexad.dataset.text.tokenizer import Tokenizer, load_tokenizer

from ..facade.foreign_names import check_arguments
from ..megatron.data import write_gpt2_tokenizer
from .tables import ARGUMENTS


class TokenizerSpec:
    """A tokenizer, which is loaded where it is used.

    Args:
        flags: attributes of Megatron-LM's flags that name it.

    Attributes:
        chat_template: in place of its own.
    """

    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags
        self.chat_template: str | None = None

    @cached_property
    def backend(self) -> Tokenizer:
        """Hexad's."""
        if "vocab_file" not in self.flags:
            return load_tokenizer(self.flags["tokenizer_model"])
        with tempfile.TemporaryDirectory() as directory:
            write_gpt2_tokenizer(directory, self.flags["vocab_file"], self.flags["merge_file"])
            return load_tokenizer(directory)

    @property
    def vocab_size(self) -> int:
        """Ids."""
        return self.backend.vocab_size

    @property
    def eos_id(self) -> int | None:
        """The id of the end of a document; None if there is none."""
        return self.backend.eod

    eod = eos_id

    def text_to_ids(self, text: str) -> list[int]:
        """The ids of a text, without special ones."""
        return self.backend.encode(text)

    def ids_to_text(self, ids: Iterable[int]) -> str:
        """The text of some ids."""
        return self.backend.decode(ids)


class AutoTokenizer(TokenizerSpec):
    """One in Hugging Face's format.

    Args:
        pretrained_model_name: a directory, or a model's name on the hub.
        chat_template: of ``ChatDataModule``, in place of its own.
        others: ``use_fast`` and ``trust_remote_code``, without effect; special tokens are those of its files.

    Raises:
        HexadError: another argument.
    """

    def __init__(
        self, pretrained_model_name: str, *, chat_template: str | None = None, **others: Any
    ) -> None:
        check_arguments("AutoTokenizer", others, ARGUMENTS["AutoTokenizer"])
        name = str(pretrained_model_name)
        known = Path(name).exists() or name == "byte" or name.startswith("hf:")
        super().__init__(
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": name if known else f"hf:{name}"}
        )
        self.chat_template = chat_template

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of ``transformers``, for scripts that use it.

        Raises:
            HexadError: ``transformers`` is not installed, or has none.
        """
        name = self.flags["tokenizer_model"].removeprefix("hf:")
        try:
            from transformers import AutoTokenizer as Published

            tokenizer = Published.from_pretrained(name)
        except (ImportError, OSError, ValueError) as error:
            raise HexadError(f"AutoTokenizer.tokenizer: {name}: {one_line(error)}") from None
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        return tokenizer


class SentencePieceTokenizer(TokenizerSpec):
    """A SentencePiece model.

    Args:
        model_path: of its file.
        others: of the text around special tokens, without effect; these tokens are those of the file.

    Raises:
        HexadError: another argument.
    """

    def __init__(self, model_path: str, **others: Any) -> None:
        check_arguments("SentencePieceTokenizer", others, ARGUMENTS["SentencePieceTokenizer"])
        super().__init__({"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": str(model_path)})


class NullTokenizer(TokenizerSpec):
    """Numbers in place of a tokenizer's ids; the last one ends a document.

    Args:
        vocab_size: without that one.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__({"tokenizer_type": "NullTokenizer", "vocab_size": int(vocab_size)})

    @property
    def vocab_size(self) -> int:
        """Ids."""
        return int(self.flags["vocab_size"]) + 1

    @property
    def eos_id(self) -> int:
        """The id of the end of a document."""
        return int(self.flags["vocab_size"])

    eod = eos_id

    def text_to_ids(self, text: str) -> list[int]:
        """The numbers in a text."""
        return [int(word) for word in text.split()]

    def ids_to_text(self, ids: Iterable[int]) -> str:
        """The numbers as a text."""
        return " ".join(map(str, ids))


def get_nmt_tokenizer(
    library: str = "sentencepiece",
    model_name: str | None = None,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merges_file: str | None = None,
    vocab_size: int | None = None,
    chat_template: str | None = None,
    **others: Any,
) -> TokenizerSpec:
    """A tokenizer by its library: ``sentencepiece``, ``huggingface``, ``megatron`` for GPT-2's, or ``null``.

    Args:
        library: as above.
        model_name: with ``huggingface``; ``GPT2BPETokenizer`` with ``megatron``.
        tokenizer_model: file of ``sentencepiece``.
        vocab_file, merges_file: of GPT-2's.
        vocab_size: with ``null``, see :class:`NullTokenizer`.
        chat_template: with ``huggingface``, see :class:`AutoTokenizer`.
        others: ``use_fast``, ``legacy`` and ``trust_remote_code``, without effect.

    Raises:
        HexadError: another library or argument, or no file.
    """
    check_arguments("get_nmt_tokenizer", others, ARGUMENTS["get_nmt_tokenizer"])
    if library == "huggingface" and model_name:
        return AutoTokenizer(model_name, chat_template=chat_template)
    if chat_template is not None:
        raise HexadError(
            f"get_nmt_tokenizer: found chat_template with library={library!r}; it is for huggingface"
        )
    if library == "null" and vocab_size is not None:
        return NullTokenizer(vocab_size)
    if library == "sentencepiece" and tokenizer_model:
        return SentencePieceTokenizer(tokenizer_model)
    if library == "megatron" and model_name == "GPT2BPETokenizer" and vocab_file and merges_file:
        flags = {"tokenizer_type": model_name, "vocab_file": vocab_file, "merge_file": merges_file}
        return TokenizerSpec(flags)
    raise HexadError(
        f"get_nmt_tokenizer: found library={library!r}, model_name={model_name!r} and no files; use "
        "sentencepiece with tokenizer_model, huggingface with model_name, or megatron with GPT2BPETokenizer, "
        "vocab_file and merges_file"
    )


def get_tokenizer(
    tokenizer_name: str, tokenizer_model: str | None = None, chat_template: str | None = None, **others: Any
) -> TokenizerSpec:
    """A tokenizer by the name of a model or directory; ``sentencepiece`` with ``tokenizer_model``.

    Raises:
        HexadError: an argument that is not supported, or no file.
    """
    if tokenizer_name == "sentencepiece":
        library, name = "sentencepiece", None
    elif tokenizer_name.startswith("megatron"):
        library, name = "megatron", "GPT2BPETokenizer"
    else:
        library, name = "huggingface", tokenizer_name
    return get_nmt_tokenizer(library, name, tokenizer_model, chat_template=chat_template, **others)
