"""Commands with ``precision.dtype: fp8``: refused where the device cannot, else like bf16."""

import pytest

from hexad.launching import launch

from ..pool import Pool
from .command import RunFile, call
from .conftest import MakeRun

REFUSED = "precision.dtype: found fp8, but this device (cpu) has no fp8 matrix units; use bf16"


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CPU had units for it: PyTorch does the products there too, slowly."""
    monkeypatch.setattr(launch, "has_fp8", lambda device: True)


def test_a_cpu_is_refused(make_run: MakeRun) -> None:
    run = make_run(precision={"dtype": "fp8"})
    result = run.train()
    assert (result.status, result.error) == (2, REFUSED)
    assert not run.metrics
    assert run.train("--dry-run").status == 0
    assert call("config", "check", str(run.path)).error == REFUSED
    assert call("config", "check", str(run.path), "--elsewhere").status == 0


def test_all_ranks_refuse_alike(make_run: MakeRun, pool: Pool) -> None:
    run = make_run(precision={"dtype": "fp8"}, parallel={"data": 2})
    assert run.world(pool, 2) == [(2, REFUSED)] * 2


@pytest.mark.usefixtures("capable")
@pytest.mark.slow
def test_checkpoints_of_fp8_and_bf16_are_exchanged(make_run: MakeRun) -> None:
    def trained(first: str, then: str) -> RunFile:
        run = make_run(precision={"dtype": first}, run={"steps": 8})
        assert run.train().status == 0
        result = run.train("run.steps=12", f"precision.dtype={then}")
        assert result.status == 0, result.err
        return run

    wide = trained("bf16", "bf16").losses
    for first, then in (("bf16", "fp8"), ("fp8", "bf16"), ("fp8", "fp8")):
        losses = trained(first, then).losses
        assert losses == pytest.approx(wide, rel=0.03)
        assert (losses[:8] == wide[:8]) == (first == "bf16")
        assert losses[8:] != wide[8:]


@pytest.mark.usefixtures("capable")
def test_an_fp8_run_generates_in_bf16_anywhere(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(precision={"dtype": "fp8"}, run={"steps": 4})
    assert run.train().status == 0
    monkeypatch.undo()
    arguments = ("generate", str(run.directory), "--prompt", "train line", "--tokens", "5")
    result = call(*arguments)
    assert result.status == 0, result.err
    assert result.out == call(*arguments, "precision.dtype=bf16").out
    refused = call(*arguments, "precision.dtype=fp8")
    assert refused.status == 2
    assert "precision.dtype: found fp8, which generation does not support; use bf16" in refused.error
