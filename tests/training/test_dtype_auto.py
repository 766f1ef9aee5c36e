"""``precision.dtype: auto``: what devices compute in hardware, the same on all ranks."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from hexad.checkpoint.manifest import read_manifest
from hexad.config import ConfigError
from hexad.engine import modules
from hexad.launching.launch import launch
from hexad.model.configuration import build_config
from hexad.planning import resolve
from hexad.topology.cluster import has_bf16
from hexad.topology.devices import cpu_has_bf16
from hexad.topology.layout import Layout

from ..pool import Pool
from .command import call, free_port, rank_variables
from .conftest import MakeRun

AUTO = {"dtype": "auto"}


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor : 0\nflags\t\t: fpu sse2 avx512f avx512_bf16 amx_tile\n", True),
        ("flags : fpu amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags : fpu avx2 avx512f avx512_vnni\nflags : fpu avx2\n", False),
        ("model name : bf16\n", False),
    ],
)
def test_a_cpus_features_say_whether_it_computes_bf16(text: str, has: bool, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert cpu_has_bf16(path) is has
    assert cpu_has_bf16(tmp_path / "missing") is False


@pytest.mark.parametrize("here", [True, False])
def test_what_only_calculates_assumes_a_gpu_unless_told_cpu(
    here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[resolve.__module__], "cpu_has_bf16", lambda: here)
    dtypes = {
        device: resolve(build_config({"run": {"device": device}}), Layout(world=1)).config.precision.dtype
        for device in ("auto", "cuda", "cpu")
    }
    assert dtypes == {"auto": "bf16", "cuda": "bf16", "cpu": "bf16" if here else "fp32"}


def test_reducing_in_bf16_needs_a_dtype_that_is_the_same_everywhere() -> None:
    config = build_config({"precision": {"reduce": "bf16"}})
    with pytest.raises(ConfigError, match=r"found bf16 with precision\.dtype auto, which is fp32 on some"):
        resolve(config, Layout(world=1))


def test_a_run_says_saves_and_resumes_with_what_auto_became(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "has_bf16", lambda device: False)
    run = make_run(precision=AUTO, run={"steps": 4})
    first = run.train()
    assert first.status == 0, first.err
    assert "precision.dtype auto: fp32, because cpu does not compute bf16 in hardware" in first.err
    assert yaml.safe_load((run.directory / "config.yaml").read_text())["precision"]["dtype"] == "fp32"
    assert read_manifest(run.newest).config["precision"]["dtype"] == "fp32"
    monkeypatch.setattr(modules, "has_bf16", lambda device: True)  # as if resumed elsewhere
    second = run.train("run.steps=8")
    assert second.status == 0, second.err
    assert "precision.dtype auto: bf16, which cpu computes in hardware" in second.err
    assert "changed since: precision.dtype: fp32 -> bf16" in second.err
    # Generation computes in the checkpoint's format, or in the device's on demand.
    arguments = ("generate", str(run.directory), "--prompt", "train", "--tokens", "3")
    kept, widened = call(*arguments), call(*arguments, "precision.dtype=auto")
    assert kept.status == widened.status == 0, kept.err + widened.err


def test_bf16_on_a_cpu_that_lacks_it_is_said(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "has_bf16", lambda device: False)
    result = make_run(precision={"dtype": "bf16"}, run={"steps": 1}).train()
    assert "precision.dtype bf16: cpu does not compute it in hardware" in result.err
    quiet = make_run(precision={"dtype": "fp32"}, run={"steps": 1}).train()
    assert "precision.dtype" not in quiet.err


def _format_of(rank: int, world: int, port: int, path: str) -> tuple[str, str]:
    """(format of the run, format of an engine of the unresolved configuration), bf16 on rank 0 alone."""
    from hexad.engine.engine import Engine
    from hexad.model.configuration import load_config

    modules.has_bf16 = lambda device: rank == 0  # type: ignore[assignment]
    config = load_config(path)
    try:
        with rank_variables(rank, world, port), launch(config) as run:
            engine = Engine(config.model_copy(update={"model": run.resolved.config.model}), run.mesh)
            assert dist.get_world_size() == world
            return run.resolved.config.precision.dtype, engine.config.precision.dtype
    finally:
        modules.has_bf16 = has_bf16


def test_ranks_with_different_devices_agree(make_run: MakeRun, pool: Pool) -> None:
    run = make_run(precision=AUTO, parallel={"data": 2})
    assert pool.apart(2, _format_of, free_port(), str(run.path)) == [("fp32", "fp32")] * 2
