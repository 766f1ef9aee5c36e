"""Several hosts for real: network namespaces, one torchrun in each, one host cut off in the middle."""

import time
from pathlib import Path

import numpy as np
import pytest

from .command import LONGEST, RunFile
from .conftest import MakeRun
from .hosts import Hosts, why_not

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts_or_skip() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("hosts_or_skip")
@pytest.mark.parametrize("count", [2, 3])
def test_several_hosts(make_run: MakeRun, alone: RunFile, tmp_path: Path, count: int) -> None:
    run, single = make_run(batch={"global": 12}), make_run(batch={"global": 12})
    with Hosts(count) as hosts:
        started = [
            hosts.torchrun(h, run.arguments(), tmp_path / f"host{h}", str(count)) for h in range(count)
        ]
        try:
            results = [process.wait() for process in started]
        finally:
            for process in started:
                process.end()
    assert [result.status for result in results] == [0] * count, results[0].err
    assert single.train().status == 0
    np.testing.assert_allclose(run.losses, single.losses, rtol=1e-9)
    assert run.state()["world"] == count


@pytest.mark.usefixtures("hosts_or_skip")
def test_a_host_is_cut_off_and_the_others_go_on(make_run: MakeRun, tmp_path: Path) -> None:
    settings = {"run": {"timeout": 5, "steps": 10**6}, "batch": {"global": 12}}
    run, single = make_run(**settings), make_run(**settings)
    with Hosts(3) as hosts:
        started = [hosts.torchrun(h, run.arguments(), tmp_path / f"host{h}", "1:3", 3) for h in range(3)]
        try:
            started[0].wait_for_step(run, 10)
            hosts.cut(2)
            began, log = time.monotonic(), run.directory / "log-rank0.txt"
            while "restart 1 of 3: resuming after step" not in log.read_text():
                assert time.monotonic() - began < LONGEST
                time.sleep(0.05)
            inode_steps = len(run.metrics)
            while len(run.metrics) <= inode_steps:
                assert time.monotonic() - began < LONGEST
                time.sleep(0.05)
            print(f"cut off to training again: {time.monotonic() - began:.1f} s")
            time.sleep(1.0)
            started[0].popen.terminate()
            started[1].popen.terminate()
            for process in started[:2]:
                process.wait()
        finally:
            for process in started:
                process.end()
    assert run.state()["world"] == 2
    steps = min(60, len(run.metrics))
    assert single.train(f"run.steps={steps}").status == 0
    np.testing.assert_allclose(run.losses[:steps], single.losses, rtol=1e-9)
