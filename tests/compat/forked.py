"""Ranks of other systems, in forked processes that have imported everything once."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from ..forks import PATIENCE, Program


def written_by(module: str, *arguments: str, timeout: float = PATIENCE) -> tempfile.TemporaryDirectory[str]:
    """A directory that ``python -m module DIRECTORY ARGUMENTS`` has written to."""
    directory = tempfile.TemporaryDirectory(prefix="hexad-compat-")
    process = Program(
        [sys.executable, "-m", module, directory.name, *arguments],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": f"{directory.name}/extensions"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # its forks too
        raise
    assert process.returncode == 0, printed[-4000:]
    return directory


def quiet_deepspeed() -> None:
    """Let the ``deepspeed`` package of this process log errors only, not compile its sums, and accept fp16.

    The package refuses fp16 where the processor has no fp16 units for oneDNN's kernels; PyTorch computes it
    on every CPU.
    """
    import deepspeed.utils
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Not by its path: the package has put torch itself in that name's place.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def run_forked(ranks: int, directory: Path, function: Callable[[int], None]) -> None:
    """Call ``function`` with every rank of a gloo world, each a fork of this process; exits if one fails."""
    import torch

    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=ranks
            )
            function(rank)
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    failed = False
    for _ in children:
        _, status = os.wait()
        if status and not failed:
            failed = True
            for child in children:  # the others wait for the one that failed
                try:
                    os.kill(child, 9)
                except ProcessLookupError:
                    continue
    if failed:
        sys.exit(1)
    (directory / "store").unlink(missing_ok=True)  # the next world begins a new one
