"""Files that a launch line implies and Hexad needs on disk: mock data, GPT-2's tokenizer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hexad.config import ConfigError

_DOCUMENTS = 1000
_NUMBERS = 256
"""Ids that any tokenizer has."""
_PATIENCE = 600.0
"""Seconds to wait for another process that writes the same file."""


@dataclass(frozen=True)
class MockData:
    """A data set of counting numbers, as Megatron-LM's ``--mock-data``.

    Attributes:
        prefix: of its files.
        sequence: tokens of a sample; documents are up to twice as long.
    """

    prefix: str
    sequence: int
    kind = "data"

    def write(self) -> None:
        """Write it, if it is not there; several processes may.

        Raises:
            HexadError: the files cannot be written.
        """
        import numpy as np

        from hexad.dataset.files import written_once
        from hexad.dataset.indexed import IndexedWriter, dtype_for, idx_path

        def read(path: Path) -> bool | None:
            return path.is_file() or None

        def write() -> None:
            lengths = np.random.default_rng(0).integers(1, 2 * self.sequence, _DOCUMENTS)
            with IndexedWriter(self.prefix, dtype_for(_NUMBERS)) as writer:
                for length in lengths:
                    writer.add_document(np.arange(1, length + 1) % _NUMBERS)

        path = idx_path(self.prefix)
        written_once(path, lambda: read(path), write, _PATIENCE)


@dataclass(frozen=True)
class Gpt2Tokenizer:
    """GPT-2's ``vocab.json`` and ``merges.txt`` as one ``tokenizer.json``.

    Attributes:
        directory: to write to.
        vocab, merges: the two files.
    """

    directory: str
    vocab: str
    merges: str
    kind = "tokenizer"

    def write(self) -> None:
        """Write it; several processes may.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        from tokenizers import ByteLevelBPETokenizer

        from hexad.dataset.files import temporary_name

        for flag, path in (("--vocab-file", self.vocab), ("--merge-file", self.merges)):
            if not Path(path).is_file():
                raise ConfigError(flag, f"{path}: no such file")
        try:
            backend = ByteLevelBPETokenizer(self.vocab, self.merges)
        except Exception as error:  # the package raises bare Exception
            raise ConfigError("--vocab-file", f"{self.vocab} and {self.merges}: {error}") from None
        backend.add_special_tokens(["<|endoftext|>"])
        place = Path(self.directory) / "tokenizer.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(place)
        backend.save(str(temporary))
        temporary.replace(place)
