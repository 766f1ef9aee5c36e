"""Real text that exists on every machine: the source of Python's standard library."""

import os
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ..indexed import IndexedDataset
from ..text.tokenizer_training import train_bpe
from .builder import BuildSummary, build

_SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
    | {"idle_test", "ensurepip", "_pyrepl"}
)
"""Directories of other people's packages, tests, and tables written as code."""
_LARGEST = 400_000
"""Bytes; larger files are generated tables."""
_VALIDATION = 20
"""One of this many files is kept for validation."""


def standard_library_files(max_bytes: int | None = None) -> list[Path]:
    """Source files of the standard library, in an order that depends on their names alone.

    Args:
        max_bytes: take files until they hold this many bytes; None: all (about 12 MB).
    """
    root = Path(sysconfig.get_path("stdlib"))
    # Hashed, so that any part of the files is a random sample.
    known = sorted(
        (blake2b(path.relative_to(root).as_posix().encode()).digest(), path) for path in _sources(root)
    )
    files: list[Path] = []
    total = 0
    for _, path in known:
        total += path.stat().st_size
        if max_bytes is not None and files and total > max_bytes:
            break
        files.append(path)
    return files


def _sources(root: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(root):
        directories[:] = [d for d in directories if d not in _SKIPPED and not d.startswith("config-")]
        for path in (Path(parent, name) for name in names if name.endswith(".py")):
            if 0 < path.stat().st_size <= _LARGEST:
                with suppress(OSError, UnicodeDecodeError):
                    path.read_text(encoding="utf-8")
                    yield path


@dataclass(frozen=True)
class DemoData:
    """A small corpus, ready for training.

    Attributes:
        train, validation: prefixes, to be used as ``data.train`` and ``data.validation``.
        tokenizer: directory, to be used as ``data.tokenizer``.
        vocab: size of its vocabulary.
        train_tokens: tokens in the training part.
        unigram_entropy: nats per token of the training part's token frequencies: the loss of the best model
            that ignores context.
    """

    train: str
    validation: str
    tokenizer: str
    vocab: int
    train_tokens: int
    unigram_entropy: float


def build_demo_data(
    directory: str | Path, *, vocab_size: int = 4096, max_bytes: int | None = None, workers: int | None = None
) -> DemoData:
    """Train a tokenizer on the standard library's source and build training and validation data.

    Args:
        directory: for ``train.*``, ``validation.*`` and ``tokenizer/``; made if missing.
        vocab_size: of the tokenizer to train.
        max_bytes: of source text; None: all.
        workers: processes that tokenize; None: one per usable CPU core.

    Raises:
        HexadError: the directory cannot be written, or ``vocab_size`` is below 257.
    """
    directory = Path(directory)
    files = standard_library_files(max_bytes)
    held_out = files[_VALIDATION - 1 :: _VALIDATION] or files[-1:]
    kept = [path for path in files if path not in set(held_out)] or files
    tokenizer = train_bpe(
        (path.read_text(encoding="utf-8") for path in kept), vocab_size, directory / "tokenizer"
    )
    parts: dict[str, BuildSummary] = {
        name: build(paths, directory / name, str(directory / "tokenizer"), workers=workers)
        for name, paths in (("train", kept), ("validation", held_out))
    }
    return DemoData(
        train=str(directory / "train"),
        validation=str(directory / "validation"),
        tokenizer=str(directory / "tokenizer"),
        vocab=tokenizer.vocab_size,
        train_tokens=parts["train"].tokens,
        unigram_entropy=unigram_entropy(directory / "train"),
    )


def unigram_entropy(prefix: str | Path) -> float:
    """Entropy of a dataset's token frequencies, in nats per token."""
    tokens = IndexedDataset(prefix).tokens
    counts = np.zeros(int(tokens.max()) + 1, dtype=np.int64)
    for start in range(0, len(tokens), 1 << 24):
        counts += np.bincount(tokens[start : start + (1 << 24)], minlength=len(counts))
    share = counts[counts > 0] / len(tokens)
    return float(-(share * np.log(share)).sum())
