"""Compiled functions and blocks: the same numbers, few kernels, one graph each."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.scheduler import NopKernelSchedulerNode

from hexad import load_config
from hexad.config import ConfigError
from hexad.engine import language
from hexad.model import dropout, ops, residual
from hexad.optim import optimizer
from hexad.parallel import pointwise
from hexad.parallel.context import attention
from hexad.parallel.tensor import fp8, loss

from ..small import config_of, engine_of, microbatches

needs_compiler = pytest.mark.skipif(
    pointwise.missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler is installed"
)


def _losses(compiled: str, family: str, dtype: str = "fp32", dropout: float = 0.0) -> list[float]:
    model: dict[str, Any] = {
        "family": family,
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "vocab": 100,
    }
    if family.startswith("deepseek"):
        model["mla"] = {"q_rank": 32, "kv_rank": 32, "nope_dim": 8, "rope_dim": 16, "value_dim": 8}
    config = config_of(
        {},
        run={"compile": compiled},
        model={**model, "dropout": dropout},
        data={"sequence": 32},
        batch={"micro": 2, "global": 4},
        precision={"dtype": dtype},
        lr_schedule={"warmup": 1},
    )
    engine = engine_of(config)
    batches = (microbatches(config, seed=step, samples=2) * 2 for step in range(3))
    return [engine.train_step(batch).loss for batch in batches]


@needs_compiler
@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("compiled", ["pointwise", "full"])
@pytest.mark.parametrize(
    ("dtype", "dropout", "tolerance"),
    [("fp32", 0.0, 1e-5), ("fp32", 0.2, 1e-5), ("bf16", 0.0, 1e-2), ("fp8", 0.0, 1e-2)],
)
def test_compiled_code_gives_the_same_losses_without_graph_breaks(
    family: str, compiled: str, dtype: str, dropout: float, tolerance: float
) -> None:
    counters.clear()
    losses, wanted = (_losses(how, family, dtype, dropout) for how in (compiled, "none"))
    assert losses == pytest.approx(wanted, rel=tolerance)
    assert not counters["graph_break"]


def test_what_triton_needs_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It builds C code with Python's headers at the first kernel: too late for another choice."""
    gpu = torch.device("cuda", 0)
    programs, triton = {"gcc": "/usr/bin/gcc"}, True
    missing = pointwise.missing_compiler.__wrapped__
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: triton)
    monkeypatch.setattr(pointwise.shutil, "which", programs.get)
    monkeypatch.setattr(pointwise.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "Python.h; python3-dev" in str(missing(gpu))
    (tmp_path / "Python.h").touch()
    assert missing(gpu) is None
    programs.clear()
    assert missing(gpu) == "a C compiler (gcc or clang, or what CC names)"
    monkeypatch.setenv("CC", "icx")
    programs["gcc"] = "/usr/bin/gcc"
    assert missing(gpu) is not None  # Triton would ask for icx alone
    programs["icx"] = "/opt/icx"
    assert missing(gpu) is None
    triton = False
    assert missing(gpu) == "Triton"


def test_a_gpu_that_compiles_nothing_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(language, "missing_compiler", lambda device: "Triton of the test")
    run = load_config({}).run
    assert not any(language.compiles(run, torch.device("cuda", 0)) for _ in range(2))
    assert not language.compiles(run, torch.device("cpu"))
    assert [record.getMessage() for record in caplog.records] == [
        "run.compile auto: functions are not compiled: this machine lacks Triton of the test"
    ]


def _arguments(dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Name of a function -> it, and arguments of odd sizes."""
    tokens, width = 37, 65
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, y, weight, scale = random(tokens, width), random(tokens, width), random(width), torch.rand(tokens, 1)
    drop = dropout.Dropper(0.2, 3, dropout.Site.ATTENTION)
    rows = dropout.row_keys(dropout.DropoutKey(1, 2, 3), torch.arange(tokens))
    constants = (drop.words, drop.rate, 0.5)
    inner, gradient = random(tokens, 2 * width), random(tokens, width)
    heads, angles = random(tokens, 3, 12), torch.rand(tokens, 1, 6).to(dtype)
    logits, labels = random(tokens, 257), torch.arange(tokens) * 5
    highest, sums = torch.rand(tokens) + 3, torch.rand(tokens) + 1
    moments = [random(999) for _ in range(3)] + [torch.rand(999)]
    lses = torch.rand(tokens, 3), torch.rand(3, tokens).t()
    lses[0][0], lses[0][1], lses[1][1] = -torch.inf, -torch.inf, -torch.inf
    return {
        "narrowed": (fp8._narrowed, (x, torch.float8_e4m3fn)),
        "transposed": (fp8._transposed, (x, torch.float8_e5m2)),
        "rms_forward": (ops.rms_forward, (x, weight, 1e-5)),
        "swiglu_forward": (ops._swiglu_forward, (inner,)),
        "swiglu_backward": (ops._swiglu_backward, (gradient, inner)),
        "turn": (ops._turn, (heads, angles, angles, 1.0)),
        "turn_pairs": (ops._turn_pairs, (heads, angles[..., :4], angles[..., :4], 1.0)),
        "dropped": (dropout.dropped, (x, rows, drop.words, 0.2)),
        "add": (residual._add, (x, y, rows, *constants)),
        "add_rms": (residual._add_norm, (False, x, y, rows, constants, [weight], 1e-5)),
        "add_layer": (residual._add_norm, (True, x, y, rows, constants, [weight, weight], 1e-5)),
        "rms_backward": (ops.rms_backward, (gradient, x, scale, weight)),
        "statistics": (loss._statistics, (logits, labels, 0, 251)),
        "merge": (attention.merge_, (heads + 1, lses[0], heads, lses[1])),
        "adamw": (optimizer._adamw_, (*moments, moments[0].bfloat16(), torch.rand(4), (0.9, 0.95), 1e-8)),
        "gradient": (loss._gradient_, (logits, labels, 0, 251, highest, sums, torch.tensor(0.3))),
    }


# Sums over tokens are kernels of their own; so are the gathering of targets, in 8 bits a maximum and the
# scale, and what is one number per head; and the copy of what of a head is not rotated.
_KERNELS = {"narrowed": 3, "transposed": 3, "rms_backward": 2, "statistics": 2, "merge": 2, "turn_pairs": 2}


_QUICK = ("add_rms",)


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow)
        for name in _arguments(torch.float32)
    ],
)
def test_a_pointwise_function_is_one_kernel(name: str) -> None:
    """Counted in what is generated for a CPU; eager, the same values."""
    torch._dynamo.reset()
    pointwise._compiled.cache_clear()
    function, arguments = _arguments(torch.float32)[name]
    copies = [argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    wanted = function(*copies)
    kernels: list[Any] = []

    def count(nodes: list[Any]) -> list[Any]:
        kernels.extend(node for node in nodes if not isinstance(node, NopKernelSchedulerNode))
        return nodes

    with torch._inductor.config.patch(force_disable_caches=True, _post_fusion_custom_pass=count):
        result = pointwise.maybe_compiled(function, True)(*arguments)
    assert len(kernels) == _KERNELS.get(name, 1)
    if wanted is None:  # it overwrites arguments
        result, wanted = arguments, copies
    torch.testing.assert_close(result, wanted)


def test_without_a_compiler_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(language, "missing_compiler", pointwise.missing_compiler.__wrapped__)
    with pytest.raises(ConfigError, match=r"run.compile: found pointwise, which needs a C\+\+ compiler"):
        _losses("pointwise", "llama")
    assert len(_losses("auto", "llama")) == 3
