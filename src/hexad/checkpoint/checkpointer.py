"""Saving and resuming a run, in the background or synchronously."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from hexad.comm import Trace, among_neighbours, from_first, gathered, streams
from hexad.config import AgreedError, Config, one_line
from hexad.topology.cluster import host_identity
from hexad.topology.mesh import Mesh

from .directory import CheckpointDirectory, check_same_model, origin_of, write_manifest
from .index import Index
from .kept_tokenizer import check_same_tokenizer, copy_into, saved_form
from .manifest import Manifest, check_size
from .reader import chosen, load
from .tensor_file import Chunk, FilePart, TensorFile, to_write, write_shard

log = logging.getLogger("hexad")
T = TypeVar("T")

_ALIGNMENT = 64
"""Bytes: every copy is aligned for any format."""

_LONGEST_SAVE = 1800.0
"""Seconds that ranks wait for each other's files, where run.timeout is less: a save moves the whole state."""


class Checkpointer:
    """Writes a run's checkpoints, at most one at a time, and finds the one to resume from.

    Args:
        config: resolved configuration, stored with every checkpoint.
        mesh: all its ranks take part in every call.
        directory: where checkpoints are; by default the run's.

    Background saves agree over a channel of their own, so that they cannot mix with what training agrees on.
    """

    def __init__(self, config: Config, mesh: Mesh, directory: CheckpointDirectory | None = None) -> None:
        self.config = config
        self.mesh = mesh
        self.directory = directory or CheckpointDirectory(config.run.dir)
        # The watch reports what training waits for; background saves must not appear there.
        trace = Trace() if config.checkpoint.asynchronous else mesh.trace
        timeout = timedelta(seconds=max(config.run.timeout, _LONGEST_SAVE))
        self._axis = mesh.background("checkpoint", timeout, trace)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hexad-checkpoint")
        self._saving: Future[None] | None = None
        self._last = False
        self._copies = _Copies(mesh.device)
        self._parts: list[FilePart] | None = None  # of this rank in the last checkpoint
        self._together: TensorFile | None = None  # to which they belong

    def save(
        self,
        chunks: Sequence[Chunk],
        progress: Mapping[str, Any],
        reason: str = "schedule",
        last: bool = False,
    ) -> None:
        """Save the state. Returns once the values are copied, or from a GPU being copied (or, synchronously,
        on disk).

        Args:
            chunks: this rank's part of it.
            progress: what else is needed to resume, in JSON's types; ``step`` names the checkpoint.
            reason: why it is saved.
            last: the run ends with it: it must succeed, independent of ``checkpoint.on_failure``.

        Raises:
            AgreedError: this save failed, or the previous one that ran in the background.
            CommError: so did a peer.
        """
        self.wait()
        self._last = last
        shapes = {chunk.name: chunk.rectangle.shape for chunk in chunks}
        mine = list(to_write(chunks))
        if self.config.checkpoint.asynchronous:
            copies, copied = self._copies.of(mine)
            self._saving = self._writer.submit(self._write, copies, shapes, dict(progress), reason, copied)
        else:
            self._settle(lambda: self._write(mine, shapes, progress, reason))

    def wait(self) -> None:
        """Wait for a save in progress. If it failed: raise its error, or report it and continue, according to
        ``checkpoint.on_failure``."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self._settle(saving.result)

    def _settle(self, save: Callable[[], None]) -> None:
        try:
            save()
        except AgreedError as error:
            if self._last or self.config.checkpoint.on_failure == "stop":
                raise
            log.warning("%s; continuing (checkpoint.on_failure)", error)

    def failed(self) -> bool:
        """Whether the background save is known to have failed on this rank; does not wait."""
        saving = self._saving
        return saving is not None and saving.done() and saving.exception() is not None

    def close(self) -> None:
        """Finish the save in progress."""
        self.wait()
        self._writer.shutdown()

    def load(
        self,
        path: Path,
        chunks: Sequence[Chunk],
        further: Callable[[Manifest], None] = lambda manifest: None,
    ) -> Manifest:
        """Fill ``chunks`` from a checkpoint of this configuration's model, as
        :func:`hexad.checkpoint.reader.load` does; ``further`` refuses a manifest too, on the first rank.

        Raises:
            AgreedError: it is damaged (``kind`` is :class:`DamagedCheckpoint`), of another model, of another
                tokenizer, or of another format.
        """

        def check(manifest: Manifest) -> None:
            check_same_model(path, manifest.config, self.config, resuming=True)
            check_same_tokenizer(path, manifest.config, self.config.data.tokenizer)
            further(manifest)

        return load(path, chunks, self._axis, self.config.checkpoint.verify, check)

    def set_aside(self, path: Path, damage: AgreedError) -> None:
        """Rename a damaged checkpoint of this run, so that the previous one is the newest; all ranks
        together.

        Raises:
            AgreedError: ``damage``, if ``checkpoint.damaged`` does not allow it, or there is no previous one;
                or it cannot be renamed.
        """

        def move() -> Path:
            earlier = [other for _, other in self.directory.complete() if other != path]
            if path.parent != self.directory.path or not earlier:
                raise damage
            if self.config.checkpoint.damaged == "stop":
                raise AgreedError(
                    f"{damage}; move it away to resume from the previous one, or set "
                    "checkpoint.damaged=previous"
                )
            return self.directory.set_aside(path)

        aside = self._on_first(move)
        log.warning("%s; renamed to %s, resuming from the previous one", damage, aside.name)

    def find(self) -> Path | None:
        """The checkpoint to start from according to ``checkpoint.resume`` and ``checkpoint.load``, or None;
        all ranks together.

        Raises:
            HexadError: ``must`` without a checkpoint, ``never`` with one, or as for :meth:`newest`.
        """
        return chosen(lambda: self.directory.start(self.config.checkpoint), self._axis, self.directory.path)

    def newest(self) -> Path | None:
        """The newest complete checkpoint of this run, or None; all ranks together.

        Raises:
            HexadError: the directory cannot be read, or some rank does not see the checkpoint.
        """
        return chosen(self.directory.newest, self._axis, self.directory.path)

    def _write(
        self,
        chunks: Sequence[Chunk],
        shapes: Mapping[str, tuple[int, ...]],
        progress: Mapping[str, Any],
        reason: str,
        copied: Callable[[], object] | None = None,
    ) -> None:
        """Write and commit, all ranks together; fails on all ranks if it does on one.

        ``shapes``: the shape of every tensor of which this rank has a part, written here or elsewhere;
        ``copied`` waits until the values are there.
        """
        if copied is not None:
            copied()
        step = progress["step"]
        directory = self._on_first(lambda: self.directory.begin(step), step)
        file = self._file([FilePart(chunk.rectangle, chunk.tensor.dtype) for chunk in chunks])
        mine = _Written(Index.empty({}), dict(shapes))
        try:
            mine = mine._replace(files=write_shard(directory, file, (chunk.tensor for chunk in chunks)))
        except OSError as error:
            mine = mine._replace(error=OSError(error.errno, f"rank {self.mesh.rank}: {error.strerror}"))
        except Exception as error:  # any error must reach every rank
            mine = mine._replace(error=error)
        written = gathered(mine, self._axis, _Written.merge)

        def commit() -> None:
            assert written is not None
            try:
                if written.error is not None:
                    raise written.error
                origin, config = self._origin(reason), saved_form(self.config)
                others = copy_into(directory, config.run.dir)
                write_manifest(directory, written.files, written.held, config, progress, origin, others)
                for name, record in written.files.files.items():
                    check_size(directory, name, record)
                self.directory.commit(directory, step)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)  # it must not fill the disk
                raise
            try:
                best = progress.get("validation", {}).get("best", [])
                keep = self.config.checkpoint.keep
                self.directory.tidy(keep, [at for _, at in best[: self.config.checkpoint.keep_best]])
            except OSError as error:
                log.warning("checkpoint of step %d: saved, but older ones cannot be removed: %s", step, error)

        self._on_first(commit, step)

    def _file(self, parts: list[FilePart]) -> TensorFile:
        """The tensor file that the ranks of this host write together. Hosts have a file each: clients of a
        network file system may undo each other's changes to one file."""
        same = among_neighbours(parts == self._parts, self._axis)
        if self._together is None or not all(same.values()):
            rank, here = self.mesh.rank, (host_identity(), _device_of(self.directory.path))
            near = among_neighbours((here, parts), self._axis)
            self._parts = parts
            self._together = TensorFile.of_host(
                rank, {other: theirs for other, (where, theirs) in near.items() if where == here}
            )
        return self._together

    def _origin(self, reason: str) -> dict[str, Any]:
        layout, parallel = self.mesh.layout, self.config.parallel
        degrees = {name: size for name, size in layout.degrees.items() if name != "expert_data"}
        names = "zero", "replicas", "schedule", "virtual_stages"
        settings = {name: getattr(parallel, name) for name in names}
        return origin_of(reason, str(torch.__version__), layout.world, degrees | settings)

    def _on_first(self, action: Callable[[], T], step: int | None = None) -> T:
        """Run an action on rank 0 only; every rank gets its result, or the same error."""
        try:
            return from_first(action, self._axis)
        except OSError as error:
            what = f"checkpoint of step {step}" if step is not None else "checkpoint"
            raise AgreedError(
                f"{what}: cannot be written to {self.directory.path}: {one_line(error)}; "
                + self.directory.condition()
            ) from error


def _device_of(path: Path) -> int | None:
    """The number of the file system's device: containers of a host may have mounts of their own."""
    try:
        return path.stat().st_dev
    except OSError:
        return None


class _Written(NamedTuple):
    """Files that ranks have written, the shapes of the tensors that they hold, the first error."""

    files: Index
    held: dict[str, tuple[int, ...]]
    error: Exception | None = None

    def merge(self, other: _Written) -> _Written:
        """Merge what two groups of ranks have written."""
        return _Written(self.files.merge(other.files), self.held | other.held, self.error or other.error)


class _Copies:
    """Host memory for copies of a rank's values, kept from one save to the next: copying into memory
    that is already allocated is several times faster, above all if it is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self._streams = streams.of(device)

    def of(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], Callable[[], object]]:
        """Copy the values of chunks; returns the copies, valid until the next call, and how to wait for them.

        From a GPU they are copied to pinned memory, beside the next step where they are steady.
        """
        ends = list(accumulate(-(-chunk.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for chunk in chunks))
        if ends and self._room.numel() < ends[-1]:
            self._room = torch.empty(0, dtype=torch.uint8)  # before there is another one
            self._room = self._streams.pinned(torch.empty(ends[-1], dtype=torch.uint8))
        copies = []
        for chunk, begin in zip(chunks, (0, *ends)):
            values = chunk.tensor.detach()
            copy = self._room[begin : begin + values.nbytes].view(values.dtype).view(values.shape)
            copies.append(replace(chunk, tensor=copy))
        for chunk, into in zip(chunks, copies):
            if not chunk.steady:
                into.tensor.copy_(chunk.tensor.detach(), non_blocking=True)
        with self._streams.beside(streams.SAVING):  # after those
            for chunk, into in zip(chunks, copies):
                if chunk.steady:
                    into.tensor.copy_(chunk.tensor.detach(), non_blocking=True)
            return copies, self._streams.mark()
