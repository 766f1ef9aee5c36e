"""Data and tokenizer of a launch line, and the files they imply: mock data, GPT-2's tokenizer. No torch."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hexad.config import ConfigError

from .tables import flag_of

_DOCUMENTS = 1000
_NUMBERS = 256
"""Ids that any tokenizer has."""
_PATIENCE = 600.0
"""Seconds to wait for another process that writes the same file."""


Files = list[tuple[str, Callable[[], None]]]
"""What must be written before a run starts: its kind, ``data`` or ``tokenizer``, and a function that writes
it, in several processes if need be."""


def write_mock_data(prefix: str, sequence: int, numbers: int = _NUMBERS) -> None:
    """Write a data set of counting numbers, as Megatron-LM's ``--mock-data``, if it is not there.

    Args:
        prefix: of its files.
        sequence: tokens of a sample; documents are up to twice as long.
        numbers: that it counts to.

    Raises:
        HexadError: the files cannot be written.
    """
    import numpy as np

    from hexad.dataset.files import written_once
    from hexad.dataset.indexed import IndexedWriter, dtype_for
    from hexad.dataset.sidecar import idx_path

    def write() -> None:
        lengths = np.random.default_rng(0).integers(1, 2 * sequence, _DOCUMENTS)
        with IndexedWriter(prefix, dtype_for(numbers)) as writer:
            for length in lengths:
                writer.add_document(np.arange(1, length + 1) % numbers)

    path = idx_path(prefix)
    written_once(path, lambda: path.is_file() or None, write, _PATIENCE)


def write_gpt2_tokenizer(directory: str, vocab: str, merges: str) -> None:
    """Write GPT-2's ``vocab.json`` and ``merges.txt`` as one ``tokenizer.json``.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    from tokenizers import ByteLevelBPETokenizer

    for flag, path in (("--vocab-file", vocab), ("--merge-file", merges)):
        if not Path(path).is_file():
            raise ConfigError(flag, f"{path}: no such file")
    try:
        backend = ByteLevelBPETokenizer(vocab, merges)
    except Exception as error:  # the package raises bare Exception
        raise ConfigError("--vocab-file", f"{vocab} and {merges}: {error}") from None
    _write_tokenizer(backend, directory)


def write_null_tokenizer(directory: str, size: int) -> None:
    """Write Megatron-LM's ``NullTokenizer``: words are token ids below ``size``, which ends a document."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    backend = Tokenizer(WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    backend.pre_tokenizer = WhitespaceSplit()
    _write_tokenizer(backend, directory)


def _write_tokenizer(backend: Any, directory: str) -> None:
    """Write a tokenizer as ``tokenizer.json``, with an id for the end of a document."""
    from hexad.dataset.files import temporary_name

    backend.add_special_tokens(["<|endoftext|>"])
    place = Path(directory) / "tokenizer.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(place)
    backend.save(str(temporary))
    temporary.replace(place)


def data_settings(
    arguments: Namespace, directory: str, notes: list[str], files: Files, need_data: bool = True
) -> tuple[dict[str, Any], int | None]:
    """The group ``data``, and ``model.vocab`` where it is not the tokenizer's.

    Args:
        directory: of the run, for what is written.
        notes, files: receive notes for the user, and what must be written before the run starts.
        need_data: the line must name some.

    Raises:
        ConfigError: flags that are missing, exclude each other, or that Hexad cannot honour.
    """
    settings = {"sequence": arguments.seq_length, **_documents(arguments)}
    settings |= _source(arguments, directory, files, need_data)
    tokenizer, vocab = _tokenizer(arguments, directory, files, notes, need_data)
    return settings | tokenizer, vocab


def _source(arguments: Namespace, directory: str, files: Files, need_data: bool) -> dict[str, Any]:
    """The settings of the data set; adds what is to be written to ``files``."""
    sources = ["data_path", "data_args_path", "train_data_path", "mock_data"]
    chosen = [name for name in sources if getattr(arguments, name)]
    if len(chosen) != 1:
        if not chosen and not need_data:
            return {}
        flags = ", ".join(map(flag_of, chosen))
        raise ConfigError(
            "--data-path",
            f"found {flags or 'no data'}; give --data-path, --train-data-path or --mock-data",
        )
    if arguments.dataloader_type not in (None, "single"):
        raise ConfigError("--dataloader-type", f"found {arguments.dataloader_type}; use single")
    if arguments.mock_data:
        prefix = f"{directory}/mock-data"
        null = arguments.tokenizer_type in (None, "NullTokenizer")
        numbers = min(_NUMBERS, arguments.vocab_size or _NUMBERS) if null else _NUMBERS
        files.append(("data", partial(write_mock_data, prefix, arguments.seq_length, numbers)))
        return {"train": prefix, "split": _split(arguments.split)}
    if arguments.train_data_path:
        settings: dict[str, Any] = {"train": _blend("--train-data-path", arguments.train_data_path)}
        if arguments.valid_data_path:
            settings["validation"] = _blend("--valid-data-path", arguments.valid_data_path)
        return settings
    words = arguments.data_path
    if arguments.data_args_path:
        try:
            words = Path(arguments.data_args_path).read_text(encoding="utf-8").split()
        except OSError as error:
            raise ConfigError("--data-args-path", f"{arguments.data_args_path}: {error.strerror}") from None
    return {"train": _blend("--data-path", words), "split": _split(arguments.split)}


def _documents(arguments: Namespace) -> dict[str, Any]:
    """``data.documents``: Megatron-LM's three switches together isolate documents."""
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    missing = [flag_of(name) for name in names if not getattr(arguments, name)]
    if len(missing) == len(names):
        return {"documents": "join"}
    if missing:
        raise ConfigError(
            next(flag_of(name) for name in names if getattr(arguments, name)),
            f"found without {' and '.join(missing)}; documents are isolated by all three, or joined without "
            "any: add or remove them",
        )
    return {"documents": "isolate"}


def _blend(flag: str, words: Sequence[str]) -> str | list[list[Any]]:
    """The data of a flag: a prefix, or weights and prefixes."""
    if len(words) == 1:
        return words[0]
    pairs = list(zip(words[::2], words[1::2]))
    try:
        if len(words) % 2:
            raise ValueError
        return [[float(weight), prefix] for weight, prefix in pairs]
    except ValueError:
        raise ConfigError(
            flag, f"found {' '.join(words)}; expected one prefix, or WEIGHT PREFIX WEIGHT PREFIX ..."
        ) from None


def _split(text: str) -> list[float]:
    """The value of ``--split`` as three proportions."""
    try:
        # NVIDIA's scripts have quotes inside the value.
        numbers = [float(word) for word in text.strip("'\"").replace("/", ",").split(",")]
    except ValueError:
        numbers = []
    if not 0 < len(numbers) <= 3 or min(numbers) < 0 or not sum(numbers):
        raise ConfigError("--split", f"found {text!r}, expected up to three proportions, such as 969,30,1")
    return [*numbers, 0.0, 0.0][:3]


def _tokenizer(
    arguments: Namespace, directory: str, files: Files, notes: list[str], need_data: bool
) -> tuple[dict[str, Any], int | None]:
    """``data.tokenizer``, and ``model.vocab`` where it is not the tokenizer's."""
    kind, model = arguments.tokenizer_type, arguments.tokenizer_model
    if kind is None and arguments.vocab_file:
        kind = "GPT2BPETokenizer"
    if kind is None and arguments.mock_data and arguments.vocab_size:
        kind = "NullTokenizer"
    if kind is None and not need_data:
        return {}, arguments.vocab_size
    if kind is None:
        raise ConfigError("--tokenizer-type", "is missing; give it")
    if kind == "NullTokenizer":
        size = arguments.vocab_size or 0
        if size < 1:
            raise ConfigError(
                "--vocab-size", f"found {arguments.vocab_size} with NullTokenizer; use 1 or more"
            )
        if size >= _NUMBERS:  # any text can be read, as bytes
            notes.append("NullTokenizer: texts, where there are any, are bytes (data.tokenizer byte)")
            return {"tokenizer": "byte"}, size + 1
        path = f"{directory}/tokenizer"
        files.append(("tokenizer", partial(write_null_tokenizer, path, size)))
        return {"tokenizer": path}, size + 1
    if kind == "GPT2BPETokenizer":
        if not (arguments.vocab_file and arguments.merge_file):
            raise ConfigError("--vocab-file", "GPT2BPETokenizer needs --vocab-file and --merge-file")
        path = f"{directory}/tokenizer"
        write = partial(write_gpt2_tokenizer, path, arguments.vocab_file, arguments.merge_file)
        files.append(("tokenizer", write))
    else:
        path = arguments.tokenizer_name_or_path if kind == "PretrainedFromHF" else model
        if not path:
            flag = "--tokenizer-name-or-path" if kind == "PretrainedFromHF" else "--tokenizer-model"
            raise ConfigError(flag, f"is missing; {kind} is loaded from it")
    if arguments.vocab_size:
        notes.append("--vocab-size: no effect: the vocabulary is the tokenizer's")
    return {"tokenizer": path}, None
