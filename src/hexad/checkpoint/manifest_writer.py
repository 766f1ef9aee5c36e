"""Writing a checkpoint's manifest; a large one in a process of its own. No torch.

To check, compress and encode millions of rectangles takes a minute of Python, in which a background thread
would hold up the training of its rank, and with it that of all others.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hexad.config import Config, dump_config

from .directory import write_durably
from .index import Index
from .manifest import MANIFEST_FILE, FileRecord, Manifest

_COMMAND = "from hexad.checkpoint.manifest_writer import main; main()"


def separately(action: Callable[[], None]) -> None:
    """Do something picklable in another process, and wait for it without holding this one's interpreter.

    Raises:
        Exception: what the action raised.
        OSError: the process ended in another way.
    """
    command = [sys.executable, "-c", _COMMAND]
    ended = subprocess.run(command, input=pickle.dumps(action), stdout=subprocess.PIPE, check=False)
    if ended.returncode == 0:
        return
    try:
        error = pickle.loads(ended.stdout)
    except (EOFError, pickle.UnpicklingError):
        error = OSError(0, f"the process that writes the manifest ended with status {ended.returncode}")
    raise error


def main() -> None:
    """The process: an action on stdin; its error, if there is one, on stdout."""
    try:
        pickle.load(sys.stdin.buffer)()
    except Exception as error:
        pickle.dump(error, sys.stdout.buffer)
        sys.exit(1)


_LARGE = 20_000
"""Rectangles from which a process of its own is worth its start, some tenths of a second."""


def is_large(index: Index) -> bool:
    """Whether work on the manifest of these rectangles belongs in another process."""
    return len(index.rows) >= _LARGE


@dataclass(frozen=True)
class ManifestJob:
    """What is written beside the tensor files of a checkpoint.

    Attributes:
        directory: of the checkpoint.
        index: its tensor files and what is in them.
        expected: name and shape of every tensor that they must cover.
        text: the content of ``config.yaml``.
        config: resolved, as a tree.
        progress, origin: see :class:`~hexad.checkpoint.manifest.Manifest`.
        others: further files that exist already, by name.
    """

    directory: Path
    index: Index
    expected: Mapping[str, tuple[int, ...]]
    text: bytes
    config: dict[str, Any]
    progress: dict[str, Any]
    origin: dict[str, Any]
    others: dict[str, FileRecord]

    def run(self) -> None:
        """Write ``config.yaml`` and ``manifest.json``.

        Raises:
            OSError: they cannot be written.
            ValueError: the files do not cover every tensor exactly once.
        """
        write_durably(self.directory / "config.yaml", self.text)
        record = FileRecord(((len(self.text), xxhash.xxh3_128_hexdigest(self.text)),))
        index = Index.empty({"config.yaml": record, **self.others}).merge(self.index)
        manifest = Manifest(self.progress, self.config, index.stored(), index.files, self.origin)
        manifest.check_coverage(self.expected)
        write_durably(self.directory / MANIFEST_FILE, manifest.encode())


def write_manifest(
    directory: Path,
    index: Index,
    expected: Mapping[str, tuple[int, ...]],
    config: Config,
    progress: Mapping[str, Any],
    origin: Mapping[str, Any],
    others: Mapping[str, FileRecord] | None = None,
) -> None:
    """Write ``config.yaml`` and ``manifest.json`` beside the tensor files of a checkpoint; for the arguments
    and errors see :class:`ManifestJob`."""
    text, tree = dump_config(config).encode(), config.model_dump(mode="json", by_alias=True)
    job = ManifestJob(
        directory, index, dict(expected), text, tree, dict(progress), dict(origin), dict(others or {})
    )
    if is_large(index):
        separately(job.run)
    else:
        job.run()
