"""Reading a checkpoint on all ranks together: the first reads the manifest and sends each rank its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hexad.comm import agreed, from_first, handed_out
from hexad.config import AgreedError, HexadError
from hexad.topology.mesh import Axis

from .chunks import Chunk
from .directory import wait_until_visible
from .index import Index, Need
from .manifest import MANIFEST_FILE, Manifest, damaged, manifest_checksum
from .reader import Checkpoint

_LONGEST_LAG = 90.0
"""Seconds until a rank must see the checkpoint that the first rank has chosen: NFS keeps attributes and
listings of directories for up to 60 by default (acdirmax)."""


def chosen(choose: Callable[[], Path | None], axis: Axis, where: Path) -> Path | None:
    """What the first rank chooses, as soon as every rank sees it: each for itself, ranks of other hosts
    could choose by old listings of a network file system.

    Args:
        choose: finds a checkpoint or None, on the first rank.
        axis: of all ranks.
        where: it looks, for messages.

    Raises:
        AgreedError: what ``choose`` raises, or a rank does not see what was found.
    """

    def first() -> tuple[Path, bytes | None] | None:
        try:
            path = choose()
        except OSError as error:
            raise HexadError(f"{error.filename or where}: cannot be read: {error.strerror}") from None
        return None if path is None else (path, manifest_checksum(path))

    try:
        found = from_first(first, axis)
    except HexadError as error:
        raise AgreedError(str(error), type(error)) from None
    if found is None:
        return None
    agreed(lambda: wait_until_visible(*found, _LONGEST_LAG), axis)
    return found[0]


def load(
    path: Path,
    chunks: Sequence[Chunk],
    axis: Axis,
    verify: bool = True,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> Manifest:
    """Fill ``chunks`` from a checkpoint, all ranks together; optimizer state is unchanged if the checkpoint
    has weights only.

    Args:
        path: of the checkpoint, which all ranks see.
        chunks: of this rank.
        axis: of all ranks of the mesh.
        verify: check the values' checksums while reading.
        check: refuses a manifest, on the first rank.

    Returns:
        Its manifest: all of it on the first rank, which reads it, on others the part for ``chunks``.

    Raises:
        AgreedError: it is damaged (``kind`` is :class:`DamagedCheckpoint`), of another format, refused by
            ``check``, or does not have what ``chunks`` ask for.
    """
    whole: Manifest | None = None
    index: Index | None = None

    def read() -> tuple[Manifest, bool]:
        nonlocal whole, index
        with Checkpoint(path, verify) as checkpoint:
            whole = checkpoint.manifest
        check(whole)
        try:
            index = Index.of_manifest(whole)
        except ValueError as error:
            raise damaged(path, f"{MANIFEST_FILE}: {error}") from None
        return replace(whole, tensors={}, files={}), whole.weights_only

    try:
        head, weights_only = from_first(read, axis)
    except HexadError as error:
        raise AgreedError(str(error), type(error)) from None
    wanted = [chunk for chunk in chunks if not weights_only or chunk.name.startswith("model.")]
    need = Need.of(chunk.rectangle for chunk in wanted)
    part = handed_out(index, axis, need, Need.merge, Index.select)
    manifest = whole or replace(head, tensors=part.stored(), files=part.files)

    def fill() -> None:
        with Checkpoint(path, verify, manifest) as checkpoint:
            checkpoint.fill(wanted)

    agreed(fill, axis)
    return manifest
