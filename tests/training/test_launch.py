"""Joining worlds that torchrun or SLURM have started."""

import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from hexad import Layout, Mesh, load_config
from hexad.comm import streams
from hexad.config import AgreedError, HexadError
from hexad.engine import language
from hexad.launching import launch, rendezvous
from hexad.launching.environment import Environment, environment, first_host, tasks_of_node

from ..pool import Pool
from .command import Process, free_port
from .conftest import MakeRun

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x2),3",
}


def test_environment() -> None:
    assert environment({}) == Environment() and not environment({}).joined
    assert environment(TORCHRUN) == Environment(5, 8, 1, 4, "torchrun")
    assert environment({"RANK": "1", "WORLD_SIZE": "2"}) == Environment(1, 2, 0, 1, "torchrun")
    assert environment(SLURM) == Environment(5, 7, 1, 3, "slurm") and environment(SLURM).joined
    # torchrun inside srun: torchrun's word counts.
    assert environment({**SLURM, **TORCHRUN}).launcher == "torchrun"
    # Not in a step: sbatch's script itself, and a step of one task.
    assert not environment({name: v for name, v in SLURM.items() if name != "SLURM_STEP_ID"}).joined
    assert not environment({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).joined


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK"),
        ({**TORCHRUN, "RANK": "8"}, "RANK"),
        ({"TORCHELASTIC_RUN_ID": "1"}, "RANK"),
        ({**SLURM, "SLURM_NTASKS": "many"}, "SLURM_NTASKS"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "x"}, "SLURM_TASKS_PER_NODE"),
    ],
)
def test_environment_errors(variables: dict[str, str], name: str) -> None:
    with pytest.raises(HexadError, match=f"^{name}: found "):
        environment(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node3", "node3"),
        ("a,b", "a"),
        ("node[003-010,12]", "node003"),
        ("node[7,9],login", "node7"),
        ("login,node[1-2]", "login"),
        ("rack[0-1]n[02-3]-ib,x", "rack0n02-ib"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_of_node() -> None:
    assert [tasks_of_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]


def compiled(setting: str, lacking: int | None) -> tuple[str, list[str]]:
    """What ``run.compile`` becomes on GPUs, of whose ranks one lacks Triton; and what is said."""
    mesh = Mesh.create(Layout(data=3, world=3), torch.device("cpu"))
    mesh.device = torch.device("cuda", 0)
    config = load_config({"run": {"compile": setting}})
    missing = "Triton" if mesh.rank == lacking else None
    said: list[str] = []
    with (
        mock.patch.object(launch, "missing_compiler", lambda device: missing),
        mock.patch.object(language, "missing_compiler", lambda device: missing),
        mock.patch.object(launch.log, "warning", lambda text, *values: said.append(text % values)),
    ):
        try:
            return launch.compiled_alike(config, mesh).run.compile, said
        except AgreedError as error:
            return str(error), said


def test_ranks_compile_alike(pool: Pool) -> None:
    said = "run.compile auto: functions are not compiled: rank 2 lacks Triton"
    assert pool.run(3, compiled, "auto", 2) == [("none", [said]), ("none", []), ("none", [])]
    assert pool.run(3, compiled, "auto", None) == [("auto", [])] * 3
    refused = (
        "rank 1: run.compile: found pointwise, which needs Triton on this machine; install it, or use none"
    )
    assert pool.run(3, compiled, "pointwise", 1) == [(refused, [])] * 3


def test_torchrun(make_run: MakeRun, pool: Pool, tmp_path: Path) -> None:
    run, reference = make_run(), make_run()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "hexad.cli.main", *run.arguments("parallel.tensor=2")]
    process = Process(command, tmp_path, interpreter=True)
    result = process.wait()
    assert result.status == 0, result.err
    assert reference.world(pool, 2, "parallel.tensor=2") == [(0, "")] * 2
    assert run.losses == reference.losses
    assert sorted(p.name for p in run.directory.glob("log-rank*")) == ["log-rank0.txt", "log-rank1.txt"]


def test_a_port_in_use(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        result = make_run().train("parallel.tensor=2", "run.timeout=5")
    assert result.status == 2
    assert result.error.startswith(f"port {port} of 127.0.0.1 is in use; set another ")


@pytest.mark.parametrize(
    ("ranks", "soft", "hard", "expected"),
    [
        (8, 1024, 4096, None),
        (100_000, 1024, 2**20, 100_512),
        (100_000, 1024, resource.RLIM_INFINITY, 100_512),
        (100_000, resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (
            100_000,
            1024,
            65_536,
            "rank 0 may open 65536 files, but needs 100512 .* raise the limit",
        ),
    ],
)
def test_rank_0_may_open_a_file_per_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int, soft: int, hard: int, expected: int | str | None
) -> None:
    """Its store has a connection of each."""
    limits = mock.Mock()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", limits)
    if isinstance(expected, str):
        with pytest.raises(HexadError, match=expected):
            rendezvous.allow_connections(ranks)
    else:
        rendezvous.allow_connections(ranks)
    calls = [mock.call(resource.RLIMIT_NOFILE, (expected, hard))] if isinstance(expected, int) else []
    assert limits.call_args_list == calls


def test_peers_that_never_come(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    result = make_run().train("parallel.tensor=2", "run.timeout=1")
    assert result.status == 2 and "rendezvous at 127.0.0.1:" in result.error
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # an agent may start the ranks again
    result = make_run().train("parallel.tensor=2", "run.timeout=1")
    assert result.status == 1 and "CommError: rendezvous at 127.0.0.1:" in result.error


Joined = Callable[[int], None]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_whoever_is_first_says_what_all_know_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, launcher: str, ranks: tuple[int, int]
) -> None:
    run = make_run()
    for overrides, message in (
        (["parallel.tensor=3"], "parallel.tensor: found 3"),
        (["parallel.tensors=2"], "parallel.tensors: unknown key"),
        (["--nproc", "2"], "--nproc: "),
        (["--no-such-option"], "No such option"),
    ):
        for rank in (*ranks, *ranks):  # started twice
            if launcher == "torchrun":
                variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            else:
                variables = {**SLURM, "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            result = run.train(*overrides)
            assert result.status == 2
            if rank == ranks[0]:
                assert result.error.startswith(message)
            else:
                assert not result.err


def test_the_message_outlives_the_rank_that_ends_first(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun ends all ranks as soon as one has ended; the first rank is slow."""
    late = "if os.environ['RANK'] == '0':\n    time.sleep(4)\n"
    code = f"import os, time\nfrom hexad.cli.main import main\n{late}main()\n"
    (tmp_path / "rank.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = make_run().arguments("parallel.tensor=3")
    result = Process([*torchrun, str(tmp_path / "rank.py"), *arguments], tmp_path).wait()
    assert result.err.count("hexad: error: parallel.tensor: found 3") == 1, result.err


def test_a_rank_beyond_its_world_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert make_run().train().error == "RANK: found 5, expected 0 to 0 (WORLD_SIZE 1)"


def test_missing_ranks_are_reported_while_they_are_waited_for(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hexad.launching.rendezvous._EVERY", 0.01)
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    result = make_run().train("parallel.tensor=2", "run.timeout=1")
    waiting = [line for line in result.err.splitlines() if "1 of 4 ranks have joined at 127.0.0.1:" in line]
    assert len(waiting) >= 2 and "WORLD_SIZE=4 is set in the environment; unset it" in waiting[0]
    assert result.status == 2 and "1 of 4 ranks have joined" in result.error


@pytest.mark.parametrize(("address", "problem"), [("nohost.invalid", "not known"), ("127.0.0.1", "refused")])
def test_a_first_rank_that_is_not_there_is_reported_in_one_line(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, address: str, problem: str
) -> None:
    with (
        socket.socket() as silent
    ):  # bound without listening: nobody else takes the port, and it refuses connections
        silent.bind(("127.0.0.1", 0))
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": silent.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", address)
        result = make_run().train("parallel.tensor=2", "run.timeout=1")
    assert result.status == 2 and f"rendezvous at {address}:" in result.error and problem in result.error
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(("asynchronous", "offload"), [(True, "none"), (False, "optimizer"), (False, "none")])
def test_a_run_tries_to_lock_memory_before_it_starts(
    asynchronous: bool, offload: str, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(streams.Streams, "try_pinning", lambda self: tried.append(1))
    run = make_run(run={"steps": 1}, checkpoint={"asynchronous": asynchronous}, memory={"offload": offload})
    assert run.train().status == 0
    assert bool(tried) == (asynchronous or offload != "none")
