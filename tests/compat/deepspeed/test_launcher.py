"""``python -m hexad.compat.deepspeed``: an unchanged script in ranks that torchrun starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hexad.compat.deepspeed.__main__ import launch_line, parsed

from ... import forks

SCRIPT = """
import argparse
import deepspeed
import torch
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed()
engine, *_ = deepspeed.initialize(args=args, model=torch.nn.Linear(1, 1), config=args.deepspeed_config)
print(__name__, "rank", args.local_rank, "of", engine.world_size, flush=True)
torch.distributed.destroy_process_group()
"""


def launched(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hexad.compat.deepspeed", *arguments]
    environment = os.environ | variables
    return forks.run(command, capture_output=True, text=True, env=environment)


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text(SCRIPT)
    config.write_text('{"train_batch_size": 2, "optimizer": {"type": "Adam"}}')
    done = launched("--num_gpus", "2", str(script), "--deepspeed_config", str(config))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["__main__ rank 0 of 2", "__main__ rank 1 of 2"]


def test_ranks_under_slurm_pass_their_number_on_the_host(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    slurm = {"PROCID": "3", "NTASKS": "4", "LOCALID": "1", "NODEID": "1", "STEP_TASKS_PER_NODE": "2(x2)"}
    done = launched(str(script), "--lr", "3", **{f"SLURM_{name}": value for name, value in slurm.items()})
    assert done.stdout == "['--local_rank=1', '--lr', '3']\n", done.stderr


def test_options_of_the_launcher_become_those_of_torchrun() -> None:
    given = "--num_nodes 2 --node_rank 1 --master_addr host -i localhost:2,3 --module name --lr 3".split()
    assert " ".join(launch_line(parsed(given))) == (
        "--nproc-per-node=2 --nnodes=2 --node-rank=1 --master-addr=host --master-port=29500 "
        "-m hexad.compat.deepspeed --module name --lr 3"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hostfile hosts train.py", "--hostfile: not supported; start this command on every host"),
        ("--include node1:0 {0}", "argument -i/--include: found node1:0, expected GPUs of this host"),
        ("--num_nodes 2 {0}", "--num_nodes: found 2 without --master_addr"),
        ("--num_gpus 1 -i localhost:0,1 {0}", "--num_gpus: found 1 with --include; give one of them"),
        ("missing.py", "missing.py: no such script"),
        ("--num_gpu 2 {0}", "unrecognized arguments: --num_gpu"),
        ("--autotuning run {0}", "--autotuning: not supported"),
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = launched(*arguments.format(tmp_path / "train.py").split())
    assert done.returncode == 2 and done.stderr.startswith(f"hexad: error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
