"""Saving and resuming a run: when, where, in the background or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from hexad.comm import CommError, gather_objects
from hexad.config import AgreedError, Config, HexadError, blaming, dump_config
from hexad.topology.mesh import Axis, Mesh

from .chunks import Chunk, load_chunks, save_chunks
from .directory import (
    CheckpointDirectory,
    check_same_model,
    find_checkpoint,
    read_state,
    write_durably,
)

_LONGEST_SAVE = 1800.0
"""Seconds that ranks wait for each other's files, where run.timeout is less: a save moves the whole state."""


class Checkpointer:
    """Writes a run's checkpoints, at most one at a time, and finds the one to go on from.

    Args:
        config: resolved configuration, stored with every checkpoint.
        mesh: all its ranks take part in every call.

    Background saves use a process group of their own, so that they cannot mix with the step's collectives.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.directory = CheckpointDirectory(config.run.dir)
        self._axis = Axis("checkpoint", mesh.world.ranks, mesh.rank)
        if mesh.layout.world > 1:
            timeout = timedelta(seconds=max(config.run.timeout, _LONGEST_SAVE))
            self._axis.group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoint")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hexad-checkpoint")
        self._saving: Future[None] | None = None

    def save(self, chunks: Sequence[Chunk], progress: Mapping[str, Any], reason: str = "schedule") -> None:
        """Save the state. Returns once the values are copied (or, synchronously, on disk).

        Args:
            chunks: this rank's share of it.
            progress: what else is needed to go on, in JSON's types; ``step`` names the checkpoint.
            reason: why it is saved.

        Raises:
            AgreedError: this save failed, or the previous one that ran in the background.
            CommError: so did a peer.
        """
        self.wait()
        if self.config.checkpoint.asynchronous:
            copies = [
                Chunk(c.name, c.shape, c.offset, c.tensor.detach().to("cpu", copy=True)) for c in chunks
            ]
            self._saving = self._writer.submit(self._write, copies, progress, reason)
        else:
            self._write(chunks, progress, reason)

    def wait(self) -> None:
        """Wait for a save under way and raise its error, if any."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def failed(self) -> bool:
        """Whether the save in the background has failed on this rank, as far as it knows; does not wait."""
        saving = self._saving
        return saving is not None and saving.done() and saving.exception() is not None

    def close(self) -> None:
        """Finish the save under way."""
        self.wait()
        self._writer.shutdown()

    def inspect(self, path: Path) -> dict[str, Any]:
        """The ``state.json`` of a checkpoint of this configuration's model.

        Raises:
            HexadError: damaged, or of another model.
        """
        state = read_state(path)
        check_same_model(path, state, self.config)
        return state

    def load(self, path: Path, chunks: Sequence[Chunk]) -> None:
        """Fill ``chunks`` from a checkpoint, all ranks together.

        Raises:
            HexadError: a tensor is missing or does not fit, or the files are damaged.
        """
        load_chunks(path, chunks, self._axis.group)

    def find(self) -> Path | None:
        """The checkpoint to start from according to ``checkpoint.resume`` and ``checkpoint.load``, or None.

        Raises:
            HexadError: ``must`` without a checkpoint, or ``never`` with one.
        """
        resume, load = self.config.checkpoint.resume, self.config.checkpoint.load
        newest = self.directory.newest()
        where = self.directory.path
        if resume == "never" and newest is not None:
            raise HexadError(
                f"checkpoint.resume: found never, but {where} holds {newest.name}; "
                "choose another run.dir, remove it, or set checkpoint.resume=auto"
            )
        if newest is not None:
            return newest
        if resume == "must" and load is None:
            raise HexadError(f"checkpoint.resume: found must, but {where} holds no complete checkpoint")
        if load is None:
            return None
        with blaming("checkpoint.load"):
            return find_checkpoint(load)

    def _write(self, chunks: Sequence[Chunk], progress: Mapping[str, Any], reason: str) -> None:
        step = progress["step"]
        try:
            self._write_all(chunks, progress, reason)
        except (OSError, dcp.CheckpointException) as error:
            causes = getattr(error, "failures", {}).values()
            why = next((failure[0] for failure in causes), error)
            raise AgreedError(
                f"checkpoint of step {step}: cannot be written to {self.directory.path}: {why}; "
                "earlier checkpoints are whole"
            ) from error
        except RuntimeError as error:  # a collective's: what fails on one rank comes as the exceptions above
            raise CommError(f"checkpoint of step {step}: {error}") from error

    def _write_all(self, chunks: Sequence[Chunk], progress: Mapping[str, Any], reason: str) -> None:
        step = progress["step"]
        partial = self._on_first(lambda: self.directory.begin(step))
        save_chunks(partial, chunks, self._axis.group)

        def commit() -> None:
            write_durably(partial / "config.yaml", dump_config(self.config))
            state = {
                "format": 1,
                **progress,
                "reason": reason,
                "saved_at": time.time(),
                "world": self.mesh.layout.world,
                "torch": str(torch.__version__),
                "config": self.config.model_dump(mode="json", by_alias=True),
            }
            self.directory.commit(partial, step, state)
            self.directory.retain(self.config.checkpoint.keep)

        self._on_first(commit)

    def _on_first(self, action: Callable[[], Any]) -> Any:
        """Do something on rank 0 only; every rank gets its result, or fails with it."""
        outcome: tuple[bool, Any] = (True, None)
        if self.mesh.rank == 0:
            try:
                outcome = (True, action())
            except OSError as error:
                outcome = (False, error)
        good, value = gather_objects(outcome, self._axis)[0]
        if not good:
            raise value
        return value
