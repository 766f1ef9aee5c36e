"""This process's rank among those started together, from the launcher's variables. No torch."""

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hexad.config import HexadError

HELD_BACK = signal.SIGUSR1
DEFAULT_PORT = "29500"
"""Default of ``MASTER_PORT``, as in torchrun."""


def hold_back_notice() -> None:
    """Block the pre-emption signal, which would end this process, until the run can handle it. Processes
    started from here inherit this."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {HELD_BACK})


def end_with(parent: int, scratch: str | None = None) -> None:
    """End this process when the one that started it has ended, possibly by kill -9; and its process group, if
    this process leads one.

    Args:
        parent: its process id; if this process has another parent already, it ends at once.
        scratch: the parent's directory of temporary files, which it cannot remove then.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # what this process has started
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="hexad-parent").start()


@dataclass(frozen=True)
class Environment:
    """This process's rank among those that were started together.

    Attributes:
        rank, world: among all processes.
        local_rank, local_world: among those of this host.
        launcher: ``torchrun``, ``slurm`` or ``none``.
        restart, restarts: how often torchrun has restarted these processes, and its limit.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    launcher: str = "none"
    restart: int = 0
    restarts: int = 0

    @property
    def alone_on_host(self) -> bool:
        """Whether all processes are on this host."""
        return self.local_world == self.world

    @property
    def joined(self) -> bool:
        """Whether a launcher has started this process as one of several."""
        return self.launcher != "none"


def environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read the launcher's variables.

    Raises:
        HexadError: a variable is missing, not a number, or out of range.
    """

    def number(name: str, default: str | None = None) -> int:
        text = variables.get(name, default)
        try:
            return int(text or "")
        except ValueError:
            raise HexadError(f"{name}: found {text!r}, expected a number set by the launcher") from None

    if "TORCHELASTIC_RUN_ID" in variables or ("RANK" in variables and "WORLD_SIZE" in variables):
        local, local_world = number("LOCAL_RANK", "0"), number("LOCAL_WORLD_SIZE", "1")
        again = number("TORCHELASTIC_RESTART_COUNT", "0"), number("TORCHELASTIC_MAX_RESTARTS", "0")
        here = Environment(number("RANK"), number("WORLD_SIZE"), local, local_world, "torchrun", *again)
    elif "SLURM_PROCID" in variables and not _batch_script(variables) and number("SLURM_NTASKS", "1") > 1:
        per_node = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "1")
        local_world = tasks_of_node(per_node, number("SLURM_NODEID", "0"))
        here = Environment(
            number("SLURM_PROCID"), number("SLURM_NTASKS"), number("SLURM_LOCALID"), local_world, "slurm"
        )
    else:
        return Environment()
    if here.world < 1:
        raise HexadError(f"WORLD_SIZE: found {here.world}, expected 1 or more")
    if not 0 <= here.rank < here.world:
        raise HexadError(f"RANK: found {here.rank}, expected 0 to {here.world - 1} (WORLD_SIZE {here.world})")
    if not 0 < number("MASTER_PORT", DEFAULT_PORT) < 2**16:
        raise HexadError(f"MASTER_PORT: found {variables['MASTER_PORT']}, expected 1 to 65535")
    return here


def _batch_script(variables: Mapping[str, str]) -> bool:
    """sbatch's script itself has the job's variables, but is not part of an ``srun`` step."""
    return "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables


def tasks_of_node(text: str, node: int) -> int:
    """Tasks of the node at index ``node`` in SLURM's ``4(x2),3``: four on two nodes, then three on one.

    Raises:
        HexadError: another form of text.
    """
    first = tasks = 0
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise HexadError(f"SLURM_TASKS_PER_NODE: found {text!r}, expected a form such as 4(x2),3")
        tasks = int(match[1])
        first += int(match[2] or 1)
        if node < first:
            break
    return tasks


def first_host(nodes: str) -> str:
    """The first of SLURM's host list: ``node[003-010,12],login`` -> ``node003``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0] if match else nodes)
