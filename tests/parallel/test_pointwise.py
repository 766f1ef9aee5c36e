"""Compiled functions: calls like an earlier one use its code without guards, all others are guarded."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hexad.parallel import pointwise


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Graphs are run operator by operator instead of being compiled to kernels; the compiler's options."""
    eager = torch._dynamo.lookup_backend("aot_eager")
    options: list[Any] = []

    def generated(graph: Any, examples: Any, config_patches: Any) -> Any:
        options.append(config_patches)
        return eager(graph, examples)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: generated)
    torch._dynamo.reset()
    yield options
    torch._dynamo.reset()


class _Guarded:
    """Counts the calls of a compiled function that guards decide about."""

    def __init__(self, compiled: Any) -> None:
        self.calls = 0
        self._inner = compiled._guarded
        compiled._guarded = self

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._inner(*arguments)


def _made(function: Callable[..., Any]) -> tuple[Any, _Guarded]:
    compiled = pointwise._Compiled(function)
    return compiled, _Guarded(compiled)


def _affine(x: Tensor, rest: tuple[Any, ...], vectors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Depends on everything that may differ between calls."""
    factor, shift, dtype = rest
    base = x * factor + (1 if shift is None else shift) + x.shape[0] + 10 * x.stride(0)
    return base.to(dtype or x.dtype), sum(vectors, 3 * x.dim() + torch.zeros_like(vectors[0]))


def _calls() -> dict[str, tuple[Any, ...]]:
    x, v = torch.arange(24, dtype=torch.float32).view(4, 6), torch.arange(6.0)
    none = (2.0, None, None)
    calls: dict[str, tuple[Any, ...]] = {
        "first": (x, none, [v]),
        "two vectors": (x, none, [v, v + 1]),
        "tuple": (x, none, (v,)),
        "strided": (x.view(6, 4).t(), none, [v]),
        "float64": (x.double(), none, [v]),
        "bf16": (x.bfloat16(), none, [v]),
        "other vector": (x, none, [v.double()]),
        "result": (x, (2.0, None, torch.float64), [v]),
        "factor": (x, (0.5, None, None), [v]),
        "integer": (x, (2, None, None), [v]),
        "zero": (x, (0.0, None, None), [v]),
        "negative zero": (x, (-0.0, None, None), [v]),
        "shift": (x, (2.0, 1.5, None), [v]),
        "true": (x, (2.0, True, None), [v]),
        "one": (x, (2.0, 1, None), [v]),
        "three dims": (x.view(2, 3, 4), none, [v]),
        "gradient": (x.clone().requires_grad_(), none, [v]),
        "parameter": (torch.nn.Parameter(x.clone()), none, [v]),
    }
    for rows in range(5, 25):  # more than are compiled anew
        calls[f"{rows} rows"] = (torch.ones(rows, 6), none, [v])
    return calls


def _same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


@pytest.mark.parametrize("seed", range(2))
def test_many_arguments_never_meet_code_of_others(seed: int) -> None:
    compiled, _ = _made(_affine)
    calls = _calls()
    names = list(calls) * 3
    random.Random(seed).shuffle(names)
    with torch.no_grad():
        for name in names:
            _same(compiled(*calls[name]), _affine(*calls[name]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("first", "strided"),
        ("first", "bf16"),
        ("first", "other vector"),
        ("first", "integer"),
        ("first", "two vectors"),
        ("first", "result"),
        ("zero", "negative zero"),
        ("true", "one"),
    ],
)
def test_arguments_that_almost_equal_others_have_their_own_code(one: str, other: str) -> None:
    compiled, guarded = _made(_affine)
    calls = _calls()
    with torch.no_grad():
        for name in (one, one, other, other, one, other):
            _same(compiled(*calls[name]), _affine(*calls[name]))
    assert guarded.calls == 2


def _nested(first: list[Tensor], second: list[Tensor]) -> Tensor:
    return sum(first[1:], 2 * first[0]) - sum(second)


def test_lists_of_other_lengths_have_their_own_code() -> None:
    compiled, _ = _made(_nested)
    x, y, z = (torch.full((3,), value) for value in (1.0, 10.0, 100.0))
    with torch.no_grad():
        for _ in range(2):
            assert compiled([x], [y, z]).tolist() == [-108.0] * 3
            assert compiled([x, y], [z]).tolist() == [-88.0] * 3


def test_a_call_like_an_earlier_one_has_no_guards() -> None:
    compiled, guarded = _made(_affine)
    calls = _calls()
    with torch.no_grad():
        for expected, name in enumerate(("first", "factor", "5 rows", "6 rows", "bf16"), 1):
            for _ in range(3):
                x, *rest = calls[name]
                _same(compiled(x + 1, *rest), _affine(x + 1, *rest))
            assert guarded.calls == expected, name
        for name in ("first", "factor", "5 rows", "6 rows", "bf16"):
            _same(compiled(*calls[name]), _affine(*calls[name]))
    assert guarded.calls == 5


def test_global_state_is_guarded() -> None:
    compiled, guarded = _made(_affine)
    arguments = _calls()["first"]

    def counted() -> int:
        before = guarded.calls
        _same(compiled(*arguments), _affine(*arguments))
        return guarded.calls - before

    with torch.no_grad():
        assert [counted() for _ in range(3)] == [1, 0, 0]
        torch.use_deterministic_algorithms(True)
        try:
            assert [counted() for _ in range(3)] == [1, 0, 0]
        finally:
            torch.use_deterministic_algorithms(False)
        assert [counted() for _ in range(3)] == [1, 0, 0]
        with torch.autocast("cpu", torch.bfloat16):
            assert counted() == 1
    with torch.inference_mode():
        counted()
        made = compiled(*arguments)
        assert all(tensor.is_inference() for tensor in made)


def test_calls_under_inference_mode_have_no_guards() -> None:
    """Of tensors made there and of others, each like an earlier one."""
    compiled, guarded = _made(_affine)
    outside = _calls()["first"]
    with torch.inference_mode():
        inside = _calls()["first"]
        for arguments in (inside, outside):
            before = guarded.calls
            for _ in range(3):
                _same(compiled(*arguments), _affine(*arguments))
            assert guarded.calls == before + 1
        writing, guarded = _made(_overwriting)
        for shared, calls in ((True, 3), (False, 1)):
            guarded.calls = 0
            for _ in range(3):
                x = torch.arange(12.0)
                y = x[6:] if shared else x[6:].clone()
                expected = x.clone()
                _overwriting(expected[:6], expected[6:])
                writing(x[:6], y)
                assert torch.equal(x, expected)
            assert guarded.calls == calls  # memory that is shared is looked at each time


class _Doubled(torch.autograd.Function):
    """Its backward pass is another compiled function, in a thread of autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Any) -> Tensor:
        ctx.backward_half = backward
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.backward_half(gradient), None


def _twice(x: Tensor) -> Tensor:
    return 2 * x


def test_kernels_are_chosen_by_rule_in_every_thread(without_compiler: list[Any]) -> None:
    """The settings of Inductor are passed with each compilation: they hold in one thread only."""
    compiled = pointwise._Compiled(_twice)

    def compiling(size: int) -> None:
        _Doubled.apply(torch.ones(size, requires_grad=True), compiled).sum().backward()

    for wanted in (False, True):
        without_compiler.clear()
        torch.use_deterministic_algorithms(wanted)
        try:
            for target, size in (
                (compiling, 3),
                (compiling, 4),
                (lambda size: compiled(torch.ones(size, 2)), 5),
            ):
                thread = threading.Thread(target=target, args=(size,))
                thread.start()
                thread.join()
        finally:
            torch.use_deterministic_algorithms(False)
        by_rule = {"deterministic": True, "triton.autotune_pointwise": False}
        assert len(without_compiler) > 1
        assert without_compiler == [by_rule if wanted else None] * len(without_compiler)


def test_inductor_knows_these_settings() -> None:
    from torch._inductor import config

    with torch._inductor.config.patch(pointwise._BY_RULE):
        assert config.deterministic and not config.triton.autotune_pointwise
    assert config.triton.autotune_pointwise


def test_gradients_are_guarded() -> None:
    compiled, guarded = _made(_affine)
    x, *rest = _calls()["first"]
    with torch.no_grad():
        compiled(x, *rest)
        compiled(x, *rest)
    x = x.clone().requires_grad_()
    compiled(x, *rest)[0].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert guarded.calls == 2


def _overwriting(x: Tensor, y: Tensor) -> None:
    x.mul_(2).add_(y)


def test_functions_that_write_to_arguments_that_share_memory_are_guarded() -> None:
    """What such a function is compiled to depends on which of its arguments overlap."""
    compiled, guarded = _made(_overwriting)
    with torch.no_grad():
        for expected in (1, 1, 1):
            x = torch.arange(4.0)
            compiled(x, torch.ones(4))
            assert x.tolist() == [1.0, 3.0, 5.0, 7.0]
            assert guarded.calls == expected
        for expected in (2, 3):
            memory, wanted = torch.arange(8.0), torch.arange(8.0)
            compiled(memory[:4], memory[4:])
            _overwriting(wanted[:4], wanted[4:])
            assert torch.equal(memory, wanted)
            assert guarded.calls == expected
        other, guarded = _made(_overwriting)
        memory, x = torch.arange(8.0), torch.arange(4.0)
        other(memory[:4], memory[4:])
        other(x, torch.ones(4))
        assert x.tolist() == [1.0, 3.0, 5.0, 7.0]
        assert guarded.calls == 2


def test_the_same_tensor_twice_is_guarded() -> None:
    compiled, guarded = _made(lambda x, y: x - 2 * y)
    x, y = torch.ones(4), torch.full((4,), 3.0)
    with torch.no_grad():
        for _ in range(2):
            assert compiled(x, x).tolist() == [-1.0] * 4
            assert compiled(x, y).tolist() == [-5.0] * 4
    assert guarded.calls == 3


def test_modes_see_operators() -> None:
    """Detectors and counters of operators are not bypassed."""
    compiled, guarded = _made(_affine)
    arguments = _calls()["first"]
    with torch.no_grad():
        compiled(*arguments)
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            compiled(*arguments)
        assert guarded.calls == 2
        with torch.device("cpu"):  # a mode of functions
            compiled(*arguments)
        assert guarded.calls == 3


def test_few_calls_are_kept() -> None:
    compiled, _ = _made(_affine)
    vector = [torch.arange(6.0)]
    with torch.no_grad():
        for rows in range(1, pointwise._CALLS + 40):
            compiled(torch.ones(rows, 6), (2.0, None, None), vector)
    assert 0 < len(compiled._calls) <= pointwise._CALLS
