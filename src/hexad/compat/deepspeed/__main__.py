"""``python -m hexad.compat.deepspeed [OPTIONS] SCRIPT [ARGUMENTS]`` runs a script that imports deepspeed,
unchanged: in this rank, where a launcher has started it, or in ranks that torchrun starts."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hexad.config import HexadError

from ..facade.scripts import run_script
from . import install

_UNUSED = (
    "--no_ssh",
    "--no_ssh_check",
    "--force_multi",
    "--bind_cores_to_rank",
    "-q",
    "--quiet",
)
_REFUSED = {
    "-H": "start this command on every host, with --num_nodes, --node_rank and --master_addr, or use SLURM",
    "-e": "use --include",
    "--no_python": "SCRIPT is run by Python",
    "--launcher": "start this command on every host, or use SLURM",
    "--autotuning": "use hexad show memory and the plan of hexad train --dry-run",
    "--elastic_training": "use torchrun --nnodes MIN:MAX",
}
_SPELLED = {"-H": "--hostfile", "-e": "--exclude"}
"""Longer spellings."""


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as errors of one line."""

    def error(self, message: str) -> NoReturn:
        raise HexadError(f"{message}; see python -m hexad.compat.deepspeed --help")


def parser() -> argparse.ArgumentParser:
    """The options, under the names of DeepSpeed's command."""
    options = _Parser(
        "python -m hexad.compat.deepspeed",
        description="Run a script that imports deepspeed with Hexad's engine.",
        allow_abbrev=False,
    )
    options.add_argument("--num_gpus", "--num_accelerators", type=int, help="ranks on this host")
    options.add_argument("--num_nodes", type=int, default=1, help="hosts, each of which runs this command")
    options.add_argument("--node_rank", type=int, default=0, help="number of this host")
    options.add_argument("--master_addr", help="host of the rendezvous, where there are several")
    options.add_argument("--master_port", type=int, help="port of the rendezvous; a free one on one host")
    options.add_argument("-i", "--include", help="GPUs of this host: localhost:0,1")
    options.add_argument("--module", action="store_true", help="SCRIPT is a module's name")
    options.add_argument(
        "--no_local_rank", action="store_true", help="do not pass --local_rank to the script"
    )
    for name in _UNUSED:
        options.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name, fix in _REFUSED.items():
        options.add_argument(name, _SPELLED.get(name, name), action=_Refuse, help=argparse.SUPPRESS, fix=fix)
    options.add_argument("script", help="the script, or module")
    options.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return options


class _Refuse(argparse.Action):
    """An option that is not supported."""

    def __init__(self, option_strings: Sequence[str], dest: str, fix: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs="?", help=help)
        self.fix = fix

    def __call__(self, _: Any, __: Any, ___: Any, name: str | None = None) -> None:
        raise HexadError(f"{name}: not supported; {self.fix}")


def launch_line(options: argparse.Namespace) -> list[str]:
    """The arguments of torchrun that start the ranks.

    Raises:
        HexadError: several hosts without an address, or GPUs that are not of this host.
    """
    local = options.num_gpus or len(_devices(options.include)) or _device_count()
    line = [f"--nproc-per-node={local}"]
    if options.num_nodes > 1:
        if options.master_addr is None:
            raise HexadError(f"--num_nodes: found {options.num_nodes} without --master_addr; add it")
        line += [f"--nnodes={options.num_nodes}", f"--node-rank={options.node_rank}"]
        line += [f"--master-addr={options.master_addr}", f"--master-port={options.master_port or 29500}"]
    elif options.master_port is None:
        line.append("--standalone")
    else:
        line.append(f"--master-port={options.master_port}")
    own = [name for name in ("module", "no_local_rank") if getattr(options, name)]
    return [*line, "-m", "hexad.compat.deepspeed", *(f"--{name}" for name in own), options.script]


def _devices(include: str | None) -> list[str]:
    """The numbers of the GPUs in ``localhost:0,1``; none where all are meant."""
    if include is None:
        return []
    host, colon, numbers = include.partition(":")
    chosen = [number for number in numbers.split(",") if number]
    if host != "localhost" or not all(number.isdigit() for number in chosen) or (colon and not chosen):
        raise HexadError(f"--include: found {include}, expected GPUs of this host, such as localhost:0,1")
    return chosen


def _device_count() -> int:
    import torch

    return max(torch.cuda.device_count(), 1)


def action(arguments: Sequence[str]) -> Callable[[], None]:
    """What runs the script in this rank, or starts ranks that do.

    Raises:
        HexadError: options that are wrong or not supported, or no such script.
    """
    options = parser().parse_args(arguments)
    if not options.module and not Path(options.script).is_file():
        raise HexadError(f"{options.script}: no such script")
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        local = [] if options.no_local_rank else [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"]
        return partial(run_script, install, [options.script, *local, *options.arguments], options.module)
    line = [*launch_line(options), *options.arguments]
    if chosen := _devices(options.include):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return partial(os.execv, sys.executable, [sys.executable, "-m", "torch.distributed.run", *line])


def main(arguments: Sequence[str]) -> None:
    """Entry point: a mistake in the options is one line on stderr and exit status 2."""
    try:
        run = action(arguments)
    except HexadError as error:
        print(f"hexad: error: {error}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main(sys.argv[1:])
