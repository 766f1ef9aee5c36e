"""``benchmarks/gpu_report.py`` without a GPU: the same code at toy sizes."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.training.command import LONGEST, alive, children

ROOT = Path(__file__).parents[1]
STEPS = ("ceilings", "models", "nccl", "layouts", "one_rank", "commands")
FURTHER = ("bits", "inference", "rates", "memory")
NO_LIMIT = ("--budget", "9000")
"""Steps end by themselves, also on a busy machine."""


def _command(where: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / "gpu_report.py"), "--output", str(where), *arguments]


def _run(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(where, *arguments), capture_output=True, text=True, check=False)


def _steps(where: Path) -> dict[str, Any]:
    return json.loads((where / "report.json").read_text())["steps"]


@pytest.fixture
def gpu_report(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_report")


def _figures(report: Any, name: str) -> dict[str, Any]:
    """What a step measures, in this process."""
    record = importlib.import_module("gpu.record").Record(report.file(name), 60.0, True)
    importlib.import_module(f"gpu.{name}").run(record)
    assert record.end() == "finished", record.document["errors"]
    return record.document["figures"]


def test_a_step_is_measured_and_reported(tmp_path: Path, gpu_report: Any) -> None:
    report = gpu_report.Report(tmp_path, True)
    figures = _figures(report, "ceilings")
    report.write()
    step = _steps(tmp_path)["ceilings"]
    assert report.finished("ceilings") and step["figures"] == figures
    losses = [row["loss"] for row in figures["first_steps"]]
    assert losses == sorted(losses, reverse=True)
    assert {row["tensor"] for row in figures["matrix_products"]} == {1, 2}
    assert figures["host_copies"] is None and step["reasons"]["host_copies"]
    assert "layers.0.attention.qkv.weight" in (tmp_path / "report.md").read_text()


def test_every_call_is_made_over_every_kind_of_group(tmp_path: Path, gpu_report: Any) -> None:
    figures = _figures(gpu_report.Report(tmp_path, True), "nccl")
    calls = {(row["group"], row["call"]) for row in figures["calls"]}
    kinds = {"all_reduce sum", "all_gather in place", "reduce_scatter in place", "all_to_all uneven"}
    for group in ("tensor, high priority", "data, normal", "data, part"):
        assert kinds < {call for kind, call in calls if kind == group}


def test_a_step_that_takes_too_long_is_reported(tmp_path: Path) -> None:
    done = _run(tmp_path, "--pretend", "--steps", "1", "--budget", "0.3")
    assert done.returncode == 1
    assert _steps(tmp_path)["ceilings"]["state"] == "out of time"
    assert "not finished: ceilings" in done.stdout


def test_a_step_that_fails_is_reported(
    tmp_path: Path, gpu_report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = gpu_report.Report(tmp_path, True)
    monkeypatch.setitem(gpu_report.STEPS, "missing", 1)
    gpu_report.run_step("missing", report, 30.0, [], tmp_path / "log")
    step = _steps(tmp_path)["missing"]
    assert step["state"] == "failed" and "gpu.missing" in step["errors"]["missing"]
    assert any("ModuleNotFoundError" in line for line in step["stderr"])
    assert not report.finished("missing")


def test_values_that_a_test_compared_are_reported(tmp_path: Path) -> None:
    text = "import pytest\ndef test_sum(): assert [1.0, 2.5] == pytest.approx([1.0, 2.0])\n"
    (tmp_path / "test_sums.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-vvv", "-p", "gpu.outcomes", "test_sums.py"]
    variables = {"HEXAD_OUTCOMES": str(tmp_path / "outcomes"), "PYTHONPATH": str(ROOT / "benchmarks")}
    subprocess.run(command, cwd=tmp_path, env=os.environ | variables, check=False, capture_output=True)
    began, ended = map(json.loads, (tmp_path / "outcomes").read_text().splitlines())
    assert began["test"] == ended["test"] and (began["outcome"], ended["outcome"]) == ("running", "failed")
    assert "[1.0, 2.5] == approx(" in ended["why"] and "Mismatched elements: 1 / 2" in ended["why"]


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, gpu_report: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", _command(tmp_path / "nothing")[1:])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        gpu_report.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert capsys.readouterr().out == "gpu_report: no GPU is visible; nothing to run\n"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    """Before anything of Hexad that needs them is imported: they may be given as wheels."""
    program = f"""
import runpy, sys
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pydantic" else real(name, *rest)
sys.modules["pydantic"] = None
sys.argv = ["gpu_report.py", "--pretend", "--output", {str(tmp_path)!r}]
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
runpy.run_path({str(ROOT / "benchmarks" / "gpu_report.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == "gpu_report: missing packages: pydantic; give them with --wheels DIR\n"


def test_what_is_asked_to_end_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(_command(tmp_path, "--pretend", "--steps", "6"), stdout=subprocess.PIPE)
    while not (tmp_path / "commands.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if children.exists():
        (child,) = children.read_text().split()
    process.terminate()
    assert process.wait() == 143
    assert _steps(tmp_path)["commands"]["state"] == "out of time"
    assert not children.exists() or not Path(f"/proc/{child}").exists()


@pytest.mark.slow
def test_all_steps(tmp_path: Path) -> None:
    every = map(str, range(1, len(STEPS + FURTHER) + 1))
    done = _run(tmp_path, "--pretend", *NO_LIMIT, "--steps", *every)
    steps = _steps(tmp_path)
    assert {name: step["state"] for name, step in steps.items()} == dict.fromkeys(
        STEPS + FURTHER, "finished"
    ), steps
    assert done.returncode == 0


def _of_group(leader: int) -> list[int]:
    """The processes of a process group."""
    processes = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(path.name)) == leader:
                processes.append(int(path.name))
    return processes


@pytest.mark.slow
def test_a_kill_loses_nothing_and_resume_finishes(tmp_path: Path) -> None:
    chosen = ("--pretend", *NO_LIMIT, "--steps", "1", "6")
    process = subprocess.Popen(_command(tmp_path, *chosen), start_new_session=True)
    commands = tmp_path / "commands.json"
    written: dict[str, Any] = {}
    while not written:
        assert process.poll() is None
        time.sleep(0.1)
        written = json.loads(commands.read_text())["figures"] if commands.exists() else {}
    (step,) = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # The step ends too, and what it starts until then.
    end = time.monotonic() + LONGEST
    while alive(_of_group(step)):
        assert time.monotonic() < end
        time.sleep(0.1)
    left = json.loads(commands.read_text())
    assert left["state"] == "running" and written.keys() <= left["figures"].keys()
    assert _steps(tmp_path)["ceilings"]["state"] == "finished"
    ceilings = (tmp_path / "ceilings.json").read_bytes()
    assert _run(tmp_path, *chosen, "--resume").returncode == 0
    assert (tmp_path / "ceilings.json").read_bytes() == ceilings  # not measured again
    assert {step["state"] for step in _steps(tmp_path).values()} == {"finished"}
