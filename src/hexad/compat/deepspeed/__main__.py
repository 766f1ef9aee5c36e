"""``python -m hexad.compat.deepspeed [OPTIONS] SCRIPT [ARGUMENTS]`` runs a script that imports deepspeed,
unchanged: in this rank, where a launcher has started it, or in ranks that torchrun starts."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hexad.launching.environment import environment

from ..facade.foreign_names import read_foreign_names
from ..facade.installed import run_script
from . import install

_ABSENT = read_foreign_names(__package__, "launcher_options.txt", "--")[""]
"""Options that this command does not have."""


class _Parser(argparse.ArgumentParser):
    """Reports mistakes in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"hexad: error: {message}", file=sys.stderr)
        sys.exit(2)


class _Refuse(argparse.Action):
    """An option that is not supported; ``fix`` says what to do instead."""

    def __init__(self, fix: str, **options: Any) -> None:
        super().__init__(**options)
        self.fix = fix

    def __call__(self, parser: argparse.ArgumentParser, _: Any, __: Any, name: str | None = None) -> None:
        parser.error(f"{name}: not supported; {self.fix}")


def _devices(include: str) -> list[str]:
    """The numbers of the GPUs in ``localhost:0,1``; none where all are meant."""
    host, colon, numbers = include.partition(":")
    chosen = [number for number in numbers.split(",") if number]
    if host != "localhost" or not all(number.isdigit() for number in chosen) or (colon and not chosen):
        raise argparse.ArgumentTypeError(f"found {include}, expected GPUs of this host: localhost:0,1")
    return chosen


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, under the names of DeepSpeed's command; mistakes end the process."""
    parser = _Parser(
        "python -m hexad.compat.deepspeed",
        description="Run a script that imports deepspeed with Hexad's engine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on this host; by default all")
    add("--num_nodes", type=int, default=1, help="hosts, each of which runs this command")
    add("--node_rank", type=int, default=0, help="number of this host")
    add("--master_addr", help="host of the rendezvous, where there are several")
    add("--master_port", type=int, help="port of the rendezvous; a free one on one host")
    add("-i", "--include", type=_devices, default=[], help="GPUs of this host: localhost:0,1")
    add("--module", action="store_true", help="SCRIPT is a module's name")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    for option in _ABSENT:
        names = (option.name, *option.aliases)
        if option.effect == "none":
            add(*names, action="store_true", help=argparse.SUPPRESS)
        else:
            add(*names, nargs="?", action=_Refuse, fix=option.note, help=argparse.SUPPRESS)
    add("script", help="the script, or module")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    if options.include and options.num_gpus > 0:
        parser.error(f"--num_gpus: found {options.num_gpus} with --include; give one of them")
    if options.num_nodes > 1 and options.master_addr is None:
        parser.error(f"--num_nodes: found {options.num_nodes} without --master_addr; add it")
    if not options.module and not Path(options.script).is_file():
        parser.error(f"{options.script}: no such script")
    return options


def launch_line(options: argparse.Namespace) -> list[str]:
    """The arguments of torchrun that start the ranks."""
    import torch

    ranks = max(options.num_gpus, 0) or len(options.include) or torch.cuda.device_count() or 1
    line = [f"--nproc-per-node={ranks}"]
    if options.num_nodes > 1:
        line += [f"--nnodes={options.num_nodes}", f"--node-rank={options.node_rank}"]
        line += [f"--master-addr={options.master_addr}", f"--master-port={options.master_port or 29500}"]
    else:
        line += [f"--master-port={options.master_port}" if options.master_port else "--standalone"]
    line += ["-m", "hexad.compat.deepspeed"]
    line += [f"--{name}" for name in ("module", "no_local_rank") if getattr(options, name)]
    return [*line, options.script, *options.arguments]


def main(arguments: Sequence[str]) -> None:
    """Run the script in this rank, or start ranks that do."""
    options, here = parsed(arguments), environment()
    if here.joined:
        local = [] if options.no_local_rank else [f"--local_rank={here.local_rank}"]
        run_script(install, [options.script, *local, *options.arguments], "deepspeed", options.module)
        return
    if options.include:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(options.include)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *launch_line(options)])


if __name__ == "__main__":
    main(sys.argv[1:])
