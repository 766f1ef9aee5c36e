"""torch's flight recorder: the last collectives of each process group, for a run that hangs.

``torchfrtrace RUN/flight-recorder``, a command of torch, compares what the ranks have written.
"""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import torch

log = logging.getLogger("hexad.watch")

_FOLDER, _PREFIX = "flight-recorder", "rank_"
_ENTRIES = 2000


def enable(run_dir: str | Path) -> None:
    """Let NCCL's process groups record their collectives, and torch's watchdog write them into ``run_dir``.

    To be called before the first group is made. Variables that the user has set are left as they are.
    """
    prefix = str(Path(run_dir).absolute() / _FOLDER / _PREFIX)
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", str(_ENTRIES)),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", str(_ENTRIES)),  # its name before torch 2.9
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", prefix),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", prefix),
    ):
        os.environ.setdefault(name, value)


def prepare(run_dir: str | Path) -> None:
    """Make the directory that the watchdog writes to: it does not."""
    (Path(run_dir) / _FOLDER).mkdir(exist_ok=True)


def write(run_dir: str | Path, rank: int) -> None:
    """Write what is recorded on this rank; nothing where nothing is. A failure is logged."""
    module = torch._C._distributed_c10d
    # NCCL's recorder, or that of gloo, which torch 2.13 has.
    dump = getattr(module, "_dump_nccl_trace", None) or getattr(module, "_dump_fr_trace", None)
    if dump is None:
        return
    path = Path(run_dir) / _FOLDER / f"{_PREFIX}{rank}"
    try:
        content = dump()
        if pickle.loads(content).get("entries"):
            prepare(run_dir)
            path.write_bytes(content)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        log.warning("%s: the flight recorder cannot be written: %s", path, error)
