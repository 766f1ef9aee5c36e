"""``run.deterministic``: no operator that adds in any order, and the same numbers as without it on a CPU."""

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hexad.config import ConfigError
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.engine import Engine
from hexad.launching.launch import deterministic
from hexad.parallel.pointwise import compiler_options

from ..small import config_of, engine_of
from .conftest import MakeRun

CPU = torch.device("cpu")
ATOMIC = ("index_add", "scatter_add", "scatter_reduce", "put_", "bincount", "histc", "cumsum", "index_reduce")
"""Operators that add by atomic operations on a GPU, or have no deterministic implementation there."""


class Operators(TorchDispatchMode):
    """Collects the names of all operators that are called, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def stepped(family: str, dropout: float, wanted: bool) -> tuple[set[str], list[torch.Tensor]]:
    """(operators of a step, the weights after two)."""
    engine = engine_of(config_of(model={"family": family, "heads": 4, "dropout": dropout}))
    tokens = torch.randint(0, 9, (2, 2, 8), generator=torch.Generator().manual_seed(1))  # many of them equal
    batch = [Microbatch(token, token.roll(-1), (0, 3, 8, 16)) for token in tokens]
    with deterministic(wanted, CPU):
        engine.train_step(batch)
        with Operators() as operators:
            engine.train_step(batch)
    return operators.called, [bucket.master.clone() for bucket in engine.buckets]


@pytest.mark.parametrize(("family", "dropout"), [("llama", 0.0), ("gpt2", 0.1)])
def test_no_operator_adds_in_any_order(family: str, dropout: float) -> None:
    usual, expected = stepped(family, dropout, False)
    called, gradients = stepped(family, dropout, True)
    assert "index_add_" in usual and "index_put_" in called
    assert not [name for name in called if name.startswith(ATOMIC)]
    for one, other in zip(gradients, expected):
        assert torch.equal(one, other)


def test_a_run_computes_the_same_on_a_cpu(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []
    step = Engine.train_step

    def watched(self: Engine, *arguments: Any) -> Any:
        modes.append(torch.are_deterministic_algorithms_enabled())
        return step(self, *arguments)

    monkeypatch.setattr(Engine, "train_step", watched)
    run, usual = make_run(run={"steps": 3}), make_run(run={"steps": 3})
    assert run.train("run.deterministic=true").status == usual.train().status == 0
    assert run.losses == usual.losses
    assert modes == [True] * 3 + [False] * 3
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operator_that_cannot_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
        )

    monkeypatch.setattr(Engine, "train_step", fails)
    result = make_run().train("run.deterministic=true")
    assert result.status == 2
    assert result.error.startswith("run.deterministic: found true, but cumsum_cuda_kernel has no determin")


def test_a_gpu_is_set_up_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    name, gpu = "CUBLAS_WORKSPACE_CONFIG", torch.device("cuda")
    monkeypatch.setenv(name, ":16:8")  # restored afterwards
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    with deterministic(True, gpu):
        assert os.environ[name] == ":16:8"
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
        assert compiler_options() and os.environ["NCCL_ALGO"] == "Ring"
    assert compiler_options() is None and "NCCL_ALGO" not in os.environ
    monkeypatch.setenv("NCCL_ALGO", "Tree")  # the user's own is kept
    with deterministic(True, gpu):
        assert os.environ["NCCL_ALGO"] == "Tree"
    assert os.environ["NCCL_ALGO"] == "Tree"
    assert torch.backends.cuda.mem_efficient_sdp_enabled() and torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setenv(name, ":0:0")
    with (
        pytest.raises(ConfigError, match=f"run.deterministic: found true with {name}=:0:0"),
        deterministic(True, gpu),
    ):
        pass
    monkeypatch.delenv(name)
    with deterministic(False, gpu):
        assert name not in os.environ
    with deterministic(True, gpu):
        assert os.environ[name] == ":4096:8"
    monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with (
        pytest.raises(ConfigError, match="found true after CUDA has started without"),
        deterministic(True, gpu),
    ):
        pass
