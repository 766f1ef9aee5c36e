"""Constants fitted on figures that closed formulas make, and a plan for the CPU that they describe."""

import json
from pathlib import Path

import pytest

import hexad
from hexad.calibration.figures import (
    MODELS,
    AttentionFigure,
    CollectiveFigure,
    Figures,
    ProductFigure,
    StepFigure,
)
from hexad.calibration.fit import declared, errors, fitted, job_of
from hexad.config import HexadError
from hexad.planning.kernels import Kernels
from hexad.planning.plan import explained
from hexad.topology.hardware import Hardware, load_hardware, write_hardware

from ..training.command import call

COPIES = 40e9


def _figures(flops: float, depth: float, per_byte: float, per_operator: float, latency: float) -> Figures:
    """What a CPU would measure whose times are these formulas."""
    figures = Figures(COPIES)
    for hidden, _, _, inner, vocab, sequence, micro, _ in MODELS:
        for m, n, k in ((sequence * micro, inner, hidden), (hidden, vocab, sequence * micro)):
            seconds = 2.0 * m * n * k / flops * (1 + depth / k)
            figures.products.append(ProductFigure("fp32", m, n, k, seconds))
    for heads, length, width in ((8, 256, 64), (4, 512, 64), (16, 1024, 64), (8, 512, 128)):
        pairs, rate = heads * (length**2 / 2 + 64 * length), 2e8 * 64 / width
        for forward, times in ((True, 1.0), (False, 2.5)):
            figures.attention.append(
                AttentionFigure("fp32", forward, heads, length, width, pairs / rate * times)
            )
    for model in MODELS:
        step = StepFigure("fp32", model, 0.0, 0.0, 0.1, 0.05)
        job = job_of(step)
        passes, operators = declared(job)
        rest = per_byte * sum(function.nbytes for function in passes) + per_operator * operators
        update = job.update * sum(sum(grids.values()) for grids in job.elements.values()) / 20e9
        figures.steps.append(StepFigure("fp32", model, 0.15 + rest, update, 0.1, 0.05))
    for nbytes in (2**12, 2**18, 2**20, 2**22, 2**24):
        for operation, times in (
            ("all_reduce", 1.0),
            ("all_gather", 0.5),
            ("reduce_scatter", 0.5),
            ("all_to_all", 0.5),
        ):
            seconds = latency + times * nbytes / 1.5e9
            figures.collectives.append(CollectiveFigure(operation, 2, nbytes, seconds))
    return figures


CPUS = [(1e11, 16.0, 2e-10, 1e-5, 1e-3), (2.5e11, 0.0, 5e-10, 0.0, 2e-4), (4e10, 64.0, 1e-10, 4e-5, 3e-3)]


@pytest.mark.parametrize("cpu", CPUS)
def test_a_fit_finds_the_formulas_that_made_its_figures(cpu: tuple[float, ...]) -> None:
    figures = _figures(*cpu)
    hardware = fitted(figures, "a CPU", 32 * 2**30, 2)
    kernels, constants = Kernels(hardware), hardware.constants
    for one in figures.products:
        assert kernels.product(one.m, one.n, one.k, "fp32") == pytest.approx(one.seconds, rel=0.06)
    assert constants.memory.bandwidth == pytest.approx(min(1.0, 1 / cpu[2] / COPIES), rel=0.02)
    assert constants.memory.launch_us == pytest.approx(cpu[3] * 1e6, abs=0.3)
    assert constants.memory.update == pytest.approx(0.5)
    assert constants.attention["fp32"].padding == 64
    assert constants.attention["fp32"].backward == pytest.approx(2.5, rel=0.02)
    rates = constants.attention["fp32"].tpairs
    assert rates == pytest.approx({64: 2e-4, 128: 1e-4}, rel=0.02)
    assert errors(hardware, figures).keys() == {"products", "attention", "collectives", "steps"}
    assert errors(hardware, figures)["collectives"] < 0.15


@pytest.fixture
def cpu_file(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.yaml"
    write_hardware(path, fitted(_figures(*CPUS[0]), "a CPU", 32 * 2**30, 2))
    return path


def test_a_fitted_file_serves_for_plans(cpu_file: Path) -> None:
    assert isinstance(load_hardware(cpu_file), Hardware)
    model = ["model.layers=4", "model.hidden=64", "model.heads=4", "model.vocab=256"]
    job = cpu_file.with_name("run.yaml")
    job.write_text("model: {}\n")
    plan = hexad.plan(job, f"{cpu_file}:2", sequence=64, global_batch=8, overrides=model)
    best = plan.layouts[0]
    config = best.resolved.config
    assert config.run.device == "cpu" and config.precision.dtype == "fp32"
    assert best.device.total == best.memory.total  # neither a context nor an allocator that keeps blocks
    assert 0 < plan.mfu(best) < 1
    assert "device: cpu" in plan.run_yaml(best)
    # What gloo sends, the ranks' own processors move: nothing hides it.
    divided = explained(plan, "tensor=2")
    assert plan.breakdown(divided).seconds["waiting: tensor"] > 0.01 * divided.step.total


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "h100:8"], "--calibrate: found beside --cluster"),
        (["run.yaml"], "--calibrate: found beside run.yaml"),
        (["--dry-run"], "--calibrate: found beside --dry-run"),
        (["--output", "machine.txt"], "--output: found machine.txt, which is no name of a hardware file"),
        (["--output", "{}"], "which exists"),
    ],
)
def test_wrong_calls_are_refused(cpu_file: Path, arguments: list[str], words: str) -> None:
    refused = call("plan", "--calibrate", *(argument.format(cpu_file) for argument in arguments))
    assert refused.status == 2 and words in refused.error


def test_a_format_that_was_not_measured_is_refused(cpu_file: Path) -> None:
    with pytest.raises(HexadError, match="found format bf16, of which no peak is known; known: fp32"):
        hexad.plan("llama3.2-1b", f"{cpu_file}:2", sequence=64, global_batch=8, precision="bf16")


@pytest.mark.slow
def test_this_host_is_measured(tmp_path: Path) -> None:
    """The whole command: ranks on all processors, the file, the errors of the fit, a plan for the file."""
    path = tmp_path / "here.yaml"
    tree = json.loads(call("plan", "--calibrate", "--output", str(path), "--json").out)
    assert tree["path"] == str(path) and set(tree["errors"]) <= {
        "products",
        "attention",
        "collectives",
        "steps",
    }
    figures = Figures.from_tree(tree["figures"])
    assert {step.model for step in figures.steps} == set(MODELS)
    hardware = load_hardware(path)
    assert hardware.vendor == "cpu" and hardware.domain == tree["ranks"]
    job = tmp_path / "run.yaml"
    job.write_text("model: {layers: 4, hidden: 256, heads: 4, vocab: 512}\n")
    assert hexad.plan(job, f"{path}:1", sequence=256, global_batch=4).layouts
