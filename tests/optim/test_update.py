"""The update: how many bytes it reads and writes, and its compiled form against PyTorch's fused kernel."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hexad.comm import Pending
from hexad.config import Config
from hexad.engine.engine import Engine
from hexad.optim.optimizer import AdamW
from hexad.optim.schedule import LearningRates, update_bytes
from hexad.parallel import pointwise
from hexad.parallel.data.buckets import Bucket

from ..small import config_of, engine_of, microbatches

NARROW = {"dtype": "bf16", "reduce": "bf16", "accumulate": "bf16"}
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        schema = function._schema
        if any(item.alias_info is not None and not item.alias_info.is_write for item in schema.returns):
            return result  # a view
        values = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
        for argument, value in zip(schema.arguments, values):
            nbytes = sum(tensor.nbytes for tensor in tree_iter(value) if isinstance(tensor, Tensor))
            written = argument.alias_info is not None and argument.alias_info.is_write
            # A copy only writes; AdamW's kernel writes gradients only where it scales them.
            read = not (written and schema.name in ("aten::copy_", "aten::fill_", "aten::zero_"))
            written &= argument.name != "grads" or kwargs.get("grad_scale") is not None
            self.nbytes[schema.name] += nbytes * (read + written)
        if all(item.alias_info is None for item in schema.returns):
            made = (tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor))
            self.nbytes[schema.name] += sum(tensor.nbytes for tensor in made)
        return result


def _config(precision: dict[str, Any], zero: int = 0, clip: float = 1e9) -> Config:
    model = {"family": "llama", "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "vocab": 128}
    return config_of(
        {},
        model=model,
        data={"sequence": 16},
        batch={"micro": 1, "global": 1},
        precision=precision,
        parallel={"zero": zero},
        optimizer={"clip": clip},
        run={"compile": "none"},
    )


@pytest.mark.parametrize("clip", [1e9, 1e-3])
@pytest.mark.parametrize(
    ("precision", "zero", "copied"),
    [
        ({"dtype": "fp32"}, 0, False),
        ({"dtype": "fp32"}, 3, False),
        ({"dtype": "bf16"}, 0, True),
        ({"dtype": "bf16"}, 2, True),
        ({"dtype": "bf16"}, 3, False),
        (NARROW, 1, True),
        (NARROW, 3, False),
    ],
)
def test_an_update_is_so_many_bytes_per_parameter(
    precision: dict[str, Any], zero: int, copied: bool, clip: float
) -> None:
    engine = engine_of(_config(precision, zero, clip))
    batch = microbatches(engine.config, samples=1)
    engine.train_step(batch)
    traffic, step = Traffic(), engine.optimizer.step

    def counted(*args: Any) -> Any:
        with traffic:
            return step(*args)

    engine.optimizer.step = counted  # type: ignore[method-assign]
    engine.train_step(batch)
    elements = sum(bucket.high - bucket.low for bucket in engine.trained)
    formats = BYTES[precision["dtype"]], BYTES[precision.get("accumulate", "fp32")], 4
    wanted = update_bytes(*formats, copied=copied, compiled=False, scaled=clip < 1)
    assert traffic.nbytes.total() / elements == pytest.approx(wanted, abs=0.05)


def test_what_compilation_saves() -> None:
    """Of the published figure, in bf16: reading master values again, and writing clipped gradients."""
    wide, narrow = (2, 4, 4), (2, 2, 4)
    assert [update_bytes(*wide, True, compiled) for compiled in (False, True)] == [38, 34]
    assert [update_bytes(*wide, True, compiled, scaled=True) for compiled in (False, True)] == [42, 34]
    assert [update_bytes(*narrow, True, compiled) for compiled in (False, True)] == [42, 30]
    assert [update_bytes(4, 4, 4, False, compiled) for compiled in (False, True)] == [32, 32]


def _stepped(engine: Engine, gradient: float, veto: int) -> tuple[float, bool]:
    """The norm, and whether an update was made with gradients of one value."""
    for bucket in engine.trained:
        bucket.gradient.fill_(gradient)
    forbidden = Pending(torch.tensor([veto]))
    norm, made, _ = engine.optimizer.step(
        LearningRates(0.1, 0.1), 2.0, lambda bucket: bucket.publish(), forbidden
    )
    return norm, made


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("gradient", "veto"), [(math.nan, 0), (math.inf, 0), (0.5, 1), (math.nan, 1)])
def test_a_forbidden_update_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, gradient: float, veto: int
) -> None:
    """Neither values nor what comes after it: the number of updates is in their bias correction."""
    monkeypatch.setattr("hexad.optim.optimizer.maybe_compiled", lambda function, _: function)
    states = []
    for forbidden in (False, True):
        engine = engine_of(_config({"dtype": "bf16"}, clip=0.7))
        rule = AdamW(engine.trained, engine.config.optimizer, torch.device("cpu"), compiled)
        engine.optimizer.rule = rule
        assert _stepped(engine, 0.3, 0)[1]
        if forbidden:
            norm, made = _stepped(engine, gradient, veto)
            assert not made and math.isfinite(norm) == math.isfinite(gradient)
        assert _stepped(engine, -0.2, 0)[1]
        states.append(
            [
                values.clone()
                for bucket in engine.trained
                for values in (bucket.master, bucket.source, *(state for _, state in rule.state(bucket)))
            ]
        )
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


def test_the_clip_factor_has_the_bits_of_the_hosts_arithmetic() -> None:
    chance, optimizer = random.Random(4), engine_of(_config({"dtype": "fp32"})).optimizer
    for _ in range(500):
        norm, optimizer.clip = (
            10 ** chance.uniform(-6, 6),
            chance.choice([0.0, 1.0, 10 ** chance.uniform(-3, 3)]),
        )
        optimizer.clip_epsilon, scale = chance.choice([0.0, 1e-6]), chance.choice([1.0, 2.0**16, 3.7])
        bound = norm + optimizer.clip_epsilon
        wanted = (optimizer.clip / bound if optimizer.clip and bound > optimizer.clip else 1.0) / scale
        given = torch.tensor(norm, dtype=torch.float64)
        assert optimizer._factor(given, torch.tensor([0]), scale).item() == wanted
        assert optimizer._factor(given, torch.tensor([1]), scale).isnan()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: eager)
    torch._dynamo.reset()
    pointwise._compiled.cache_clear()
    yield
    torch._dynamo.reset()
    pointwise._compiled.cache_clear()


def _updated(engine: Engine, compiled: bool, decoupled: float) -> Iterator[list[Tensor]]:
    """All values and moments after each of some updates."""
    settings = engine.config.optimizer.model_copy(
        update={"weight_decay": 0.1, "decoupled_lr": 0.5 if decoupled else None}
    )
    rule = AdamW(engine.trained, settings, torch.device("cpu"), compiled)
    assert rule.widens == compiled
    generator = torch.Generator().manual_seed(1)
    wide = engine.trained[0].master.dtype

    def publish(bucket: Bucket) -> None:
        current = torch.equal(bucket.source, bucket.master.to(bucket.source.dtype))
        assert current == (compiled or bucket.source.dtype == wide)
        bucket.publish()
        assert torch.equal(bucket.source, bucket.master.to(bucket.source.dtype))

    for step in range(4):
        gradients = []
        for bucket in engine.trained:
            drawn = torch.randn(bucket.gradient.shape, generator=generator).to(bucket.gradient.dtype)
            gradients.append(drawn if compiled else drawn.to(wide))
        rates = LearningRates(0.01 * (step + 1), decoupled or 0.01)
        factor = (1.0, 0.25)[step % 2]
        given = torch.tensor(factor, dtype=torch.float64) if compiled else factor
        rule.update(iter(gradients), rates, given, publish)
        rule.made()
        yield [
            values.clone()
            for bucket in engine.trained
            for values in (bucket.master, *(state for _, state in rule.state(bucket)))
        ]


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("decoupled", [0.0, 0.003])
@pytest.mark.parametrize(
    ("precision", "zero", "tolerance"),
    [({"dtype": "fp64"}, 0, 1e-13), ({"dtype": "fp32"}, 0, 2e-6), (NARROW, 1, 2e-6), (NARROW, 3, 2e-6)],
)
def test_compiled_it_updates_as_the_fused_kernel(
    precision: dict[str, Any], zero: int, tolerance: float, decoupled: float
) -> None:
    fused, compiled = (engine_of(_config(precision, zero)) for _ in range(2))
    for wanted, found in zip(_updated(fused, False, decoupled), _updated(compiled, True, decoupled)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 10)
