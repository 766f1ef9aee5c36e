"""How often the host waits for the device in a step, and how many kernels an update is."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hexad import Engine, Microbatch
from hexad.engine.counting import Counting
from hexad.optim.optimizer import AdamW

from ..small import config_of, engine_of, microbatch_of, random_tokens


class _Calls(TorchDispatchMode):
    """Counts operators, and apart those that make or change more than a number."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.large: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.counts[str(function)] += 1
        self.large[str(function)] += isinstance(result, torch.Tensor) and result.numel() > 1
        return result


def _engine(**groups: Any) -> Engine:
    config = config_of(
        {},
        model={"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 90, "dropout": 0.1},
        data={"sequence": 16, "documents": "isolate"},
        batch={"micro": 2, "global": 6},
        lr_schedule={"warmup": 1},
        faults={"spike": 100.0, "spike_window": 1},
        **groups,
    )
    return engine_of(config)


def _step(engine: Engine) -> tuple[Counter[str], int]:
    """Operators of a step, and how often a list is read from a tensor; microbatches are checked on the host,
    before they are moved to the device."""
    microbatch = microbatch_of(random_tokens(90, 2, 16, seed=3), (0, 5, 16, 32))
    read = torch.Tensor.tolist
    lists = 0

    def tolist(tensor: torch.Tensor) -> Any:
        nonlocal lists
        lists += 1
        return read(tensor)

    with (
        mock.patch.object(Counting, "_problem", lambda self, part: None),
        mock.patch.object(Microbatch, "targets", lambda self: self.tokens.numel()),
        mock.patch.object(torch.Tensor, "tolist", tolist),
        _Calls() as calls,
    ):
        engine.train_step([microbatch] * 3)
    return calls.counts, lists


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_host_waits_once(dtype: str) -> None:
    """For the norm, the loss and the verdict on it together; everything else it knows, or needs not know."""
    engine = _engine(precision={"dtype": dtype})
    for _ in range(3):
        counts, lists = _step(engine)
        waits = [name for name in counts if "_local_scalar_dense" in name or "nonzero" in name]
        assert waits == [] and lists == 1
    assert engine.guard.limit is not None


@pytest.mark.parametrize("clip", [1e-4, 1e4])
def test_an_update_is_a_kernel_per_bucket_and_one_to_publish_it(clip: float) -> None:
    """Gradients that are clipped are divided in that kernel, which writes them; others are only read."""
    engine = _engine(precision={"dtype": "bf16"}, optimizer={"clip": clip})
    _step(engine)
    divisors: list[Any] = []
    kernel = torch._fused_adamw_

    def update(*arguments: Any, **options: Any) -> None:
        divisors.append(options["grad_scale"])
        kernel(*arguments, **options)

    with (
        mock.patch.object(type(engine.optimizer), "gradient_norm", lambda self: torch.tensor(3.0)),
        mock.patch.object(torch, "_fused_adamw_", update),
    ):
        engine.begin(None)
        engine.reduce()
        with _Calls() as calls:
            engine.update(0.1)
    assert [divisor is not None for divisor in divisors] == [clip < 3] * len(engine.buckets)
    buckets = len(engine.buckets)
    assert calls.counts["aten._fused_adamw_.default"] == calls.counts["aten.copy_.default"] == buckets
    arithmetic = {
        name for name in calls.large if name.split(".")[1] in ("mul_", "mul", "div_", "div", "add_")
    }
    assert sum(calls.large[name] for name in arithmetic) == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_update_is_asked_for_before_the_host_waits(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """The clip factor stays on the device; PyTorch's fused kernel is given the host's."""
    monkeypatch.setattr("hexad.optim.optimizer.maybe_compiled", lambda function, _: function)
    engine, events = _engine(optimizer={"clip": 1e-4}), []
    rule = AdamW(engine.trained, engine.config.optimizer, torch.device("cpu"), compiled)
    update, read = rule.update, torch.Tensor.tolist
    engine.optimizer.rule = rule

    def updated(*arguments: Any) -> None:
        update(*arguments)
        events.append("update")

    def tolist(tensor: torch.Tensor) -> Any:
        events.append("read")
        return read(tensor)

    engine.begin(None)
    engine.reduce()
    monkeypatch.setattr(rule, "update", updated)
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    engine.update(0.1)
    assert events == (["update", "read"] if compiled else ["read", "update"])
