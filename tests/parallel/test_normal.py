"""Initial values: normal, the same in every layout and on every device, drawn only where they are kept."""

from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hexad.config import Config
from hexad.model.inventory import ModelInventory
from hexad.parallel import normal
from hexad.parallel.data import buckets
from hexad.parallel.normal import fill_normal
from hexad.parallel.rectangle import Rectangle

from ..pool import Pool
from ..small import config_of, engine_of


def drawn(
    name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None = None, seed: int = 1
) -> torch.Tensor:
    whole = Rectangle.whole(name, shape)
    if part is not None:
        offset = tuple(rows.start for rows in part)
        whole = Rectangle(name, shape, offset, tuple(rows.stop - rows.start for rows in part))
    values = torch.full(whole.sizes, torch.nan)
    fill_normal(values, whole, 1.0, seed)
    return values


def test_values_are_normal() -> None:
    """Kolmogorov-Smirnov's statistic of all values, their moments, and no correlation of neighbours."""
    values = drawn("w", (1001, 1000)).double()
    flat = values.flatten().sort().values
    count = len(flat)
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    cumulative = torch.special.ndtr(flat)
    distance = max((steps - cumulative).max(), (cumulative - steps + 1 / count).max())
    assert distance * sqrt(count) < 1.95  # exceeded once in a thousand seeds
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((flat**power).mean() - moment) < 4 * sqrt(spread / count)
    assert int((flat.abs() > 4).sum()) == pytest.approx(count * 6.334e-5, abs=4 * sqrt(count * 6.334e-5))
    others = (drawn("v", (1001, 1000)), drawn("w", (1001, 1000), seed=2))
    neighbours = ((values[1:], values[:-1]), (values[2:], values[:-2]), (values[:, 1:], values[:, :-1]))
    for one, other in (*neighbours, *((values, other.double()) for other in others)):
        assert abs((one * other).mean()) < 4 / sqrt(one.numel())
        assert abs((one**2 * other**2).mean() - 1) < 4 * sqrt(8 / one.numel())


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@settings(max_examples=60)
@given(shape=shapes, data=st.data(), at_once=st.integers(1, 40))
def test_values_depend_on_their_place_alone(
    shape: tuple[int, ...], data: st.DataObject, at_once: int
) -> None:
    whole = drawn("w", shape)
    assert whole.isfinite().all() and len(whole.unique()) == whole.numel()
    bounds = [sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    part = tuple(slice(*bound) for bound in bounds)
    before = normal._PAIRS_PER_THREAD
    try:
        normal._PAIRS_PER_THREAD = at_once
        assert torch.equal(drawn("w", shape, part), whole[part])
    finally:
        normal._PAIRS_PER_THREAD = before


def test_values_of_a_seed_never_change() -> None:
    """To the last bit: whoever repeats a run with another version must get the same model."""
    assert [value.hex() for value in drawn("w", (4, 2)).flatten().tolist()] == GOLDEN


GOLDEN = [
    "0x1.0dbed00000000p-1",
    "0x1.5b432e0000000p-1",
    "0x1.d72db60000000p-5",
    "0x1.816c540000000p-2",
    "0x1.3b21120000000p-3",
    "0x1.0698240000000p-2",
    "0x1.7b1c620000000p-2",
    "0x1.bc9e740000000p+0",
]


class Operators(TorchDispatchMode):
    """Collects (operator, format) of all that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.called.add((function.overloadpacket.__name__, result.dtype))
        return result


def test_only_operations_that_every_processor_rounds_alike() -> None:
    """Square roots of float32 are not among them, nor what computes more than one operation at a time."""
    with Operators() as operators:
        drawn("w", (6, 5))
    moves = {
        "empty",
        "full",
        "fill_",
        "arange",
        "slice",
        "view",
        "select",
        "unsqueeze",
        "copy_",
        "unbind",
        "alias",
        "detach",
    }
    integers = {"add", "add_", "mul_", "sub_", "__rshift__", "__lshift__"} | {
        f"bitwise_{name}" for name in ("right_shift", "right_shift_", "left_shift_", "and_", "or_", "xor_")
    }
    exact = {
        torch.int64: integers,
        torch.int32: integers,
        torch.float32: {"add", "add_", "sub_", "mul", "mul_", "div_"},
        torch.float64: {"sqrt_"},
    }
    assert {call for call in operators.called if call[0] not in moves | exact[call[1]]} == set()


def config_in(zero: int, data: int, tensor: int) -> Config:
    """A model in a layout."""
    return config_of(
        {},
        model={"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn_hidden": 40, "vocab": 31},
        batch={"global": 4},
        precision={"dtype": "bf16"},
        parallel={"zero": zero, "data": data, "tensor": tensor, "bucket_mb": 0.005},
    )


def values_and_draws(config: Config) -> tuple[dict[Any, torch.Tensor], int]:
    """(this rank's initial master values, how many were drawn)."""
    count = 0
    fill = buckets.fill_initial

    def counting(values: torch.Tensor, rectangle: Any, weight: Any, seed: int) -> None:
        nonlocal count
        count += values.numel() if weight.std else 0
        fill(values, rectangle, weight, seed)

    buckets.fill_initial = counting  # type: ignore[assignment]
    try:
        engine = engine_of(config)
    finally:
        buckets.fill_initial = fill
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a rank that leaves closes connections that others are still making
    pieces = [piece for bucket in engine.buckets for piece in bucket.pieces(bucket.master)]
    return {rectangle: values.clone() for rectangle, values in pieces}, count


@pytest.mark.parametrize(("zero", "data", "tensor"), [(0, 1, 2), (1, 2, 1), (3, 2, 2)])
def test_every_layout_begins_alike_and_draws_what_it_keeps(
    pool: Pool, zero: int, data: int, tensor: int
) -> None:
    alone, total = values_and_draws(config_in(0, 1, 1))
    whole = {rectangle.name: values for rectangle, values in alone.items()}
    ranks = pool.run(data * tensor, values_and_draws, config_in(zero, data, tensor))
    for pieces, _ in ranks:
        for rectangle, values in pieces.items():
            assert torch.equal(values, whole[rectangle.name][rectangle.slices])
    model = ModelInventory(config_in(0, 1, 1).model)
    assert total == sum(values.numel() for name, values in whole.items() if model.weights()[name].std)
    assert sum(draws for _, draws in ranks) == total * (data if zero < 3 else 1)


def test_nothing_is_drawn_where_a_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from hexad.dataset.indexed import IndexedWriter

    from ..training.command import write_run

    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document(np.arange(900) % 250)
    first = write_run(tmp_path / "a", str(tmp_path / "data"), run={"steps": 1})
    second = write_run(
        tmp_path / "b", str(tmp_path / "data"), run={"steps": 1}, model={"load": str(first.directory)}
    )
    drawing: list[str] = []
    fill = buckets.fill_initial
    monkeypatch.setattr(
        buckets,
        "fill_initial",
        lambda values, rectangle, *rest: (drawing.append(rectangle.name), fill(values, rectangle, *rest)),
    )
    assert first.train().status == 0
    assert drawing
    drawing.clear()
    assert first.train("run.steps=2").status == 0  # resumed
    assert second.train().status == 0  # another run's weights
    assert (
        second.train(
            "run.dir=" + str(tmp_path / "c"), "model.load=null", f"checkpoint.load={first.newest}"
        ).status
        == 0
    )
    assert not drawing
