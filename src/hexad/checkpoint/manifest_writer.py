"""Writing a checkpoint's manifest and configuration. No torch.

All that depends on the number of rectangles, of which a large run has millions, are operations on arrays, so
that a background thread does not hold up the training of its rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from hexad.config import Config, dump_config

from .directory import write_durably
from .index import FileRecord, Index
from .manifest import MANIFEST_FILE, Manifest


def write_manifest(
    directory: Path,
    index: Index,
    expected: Mapping[str, tuple[int, ...]],
    config: Config | None,
    progress: Mapping[str, Any],
    origin: Mapping[str, Any],
    others: Mapping[str, FileRecord] | None = None,
) -> None:
    """Write ``config.yaml`` and ``manifest.json`` beside the tensor files of a checkpoint.

    Args:
        directory: of the checkpoint.
        index: its tensor files and what is in them.
        expected: name and shape of every tensor that they must cover.
        config: resolved; None for the state of a plain module.
        progress, origin: see :class:`~hexad.checkpoint.manifest.Manifest`.
        others: further files that exist already, by name.

    Raises:
        OSError: they cannot be written.
        ValueError: the files do not cover every tensor exactly once.
    """
    text = b"{}\n" if config is None else dump_config(config).encode()
    tree = {} if config is None else config.model_dump(mode="json", by_alias=True)
    write_durably(directory / "config.yaml", text)
    record = FileRecord(((len(text), xxhash.xxh3_128_hexdigest(text)),))
    complete = Index.empty({"config.yaml": record, **(others or {})}).merge(index)
    manifest = Manifest(dict(progress), tree, complete, dict(origin))
    manifest.check_coverage(expected)
    write_durably(directory / MANIFEST_FILE, manifest.encode())
