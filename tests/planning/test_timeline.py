"""Operations in time, beside hand-computed cases."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from hexad.parallel.inventory import Collective, Operation, Pass, Product
from hexad.planning.timeline import action_time, layer_time


@dataclass
class Rates:
    """A product takes ``m`` seconds, a pass and a collective as many as they have bytes."""

    taken: float = 0.0
    operator_seconds: float = 0.0
    collective_seconds: float = 0.0
    aside: bool = True
    beside: bool = True

    def product(self, product: Product) -> float:
        return float(product.m)

    def attention(self, products: Sequence[Product]) -> float:
        return float(sum(product.m for product in products))

    def passes(self, function: Pass) -> float:
        return float(function.nbytes)

    def collective(self, collective: Collective) -> tuple[float, str]:
        return float(collective.nbytes), "domain" if collective.axis == "tensor" else "network"


def _product(seconds: int, **traits: object) -> Product:
    return Product("B", seconds, 1, 1)._replace(**traits)


def _send(seconds: int, beside: int = 0, axis: str = "tensor", meanwhile: bool = False) -> Collective:
    return Collective("B", axis, "all_gather", seconds, beside, meanwhile)


@pytest.mark.parametrize(
    ("operations", "seconds", "exposed"),
    [
        ([_product(3), Pass("B", "norm", 2)], 5, 0),
        ([_send(4), _product(3)], 7, 4),
        ([_send(4, 1), _product(3), _product(2)], 6, 1),
        ([_send(4, 2), _product(3), _product(2)], 5, 0),
        ([_send(4, 1), _product(6)], 6, 0),
        # The second follows the first on the link, and is waited for after both products.
        ([_send(4, 2), _send(4, 2), _product(3), _product(2)], 8, 3),
        # Another link is free.
        ([_send(4, 2), _send(4, 2, "data"), _product(3), _product(2)], 5, 0),
        # What is set aside is computed beside the next collective that allows it.
        ([_product(5, aside=True), _send(4, meanwhile=True), _product(1)], 6, 0),
        ([_product(2, aside=True), _send(4, meanwhile=True), _product(1)], 5, 2),
        # Or at the end.
        ([_product(5, aside=True), _send(4), _product(1)], 10, 4),
    ],
)
def test_what_is_waited_for(operations: list[Operation], seconds: float, exposed: float) -> None:
    time = action_time(operations, Rates())
    assert (time.device, sum(time.exposed.values())) == (seconds, exposed)


def test_without_overlap_everything_is_waited_for() -> None:
    operations: list[Operation] = [
        _send(4, 2),
        _product(3),
        _product(2, aside=True),
        _send(1, meanwhile=True),
    ]
    assert action_time(operations, Rates(beside=False, aside=False)).device == 10


def test_a_collective_takes_processors() -> None:
    """At half the rate for the four seconds in which it runs."""
    assert action_time([_send(4, 1), _product(6)], Rates(taken=0.5)).device == 8
    assert action_time([_send(4, 1), _product(1)], Rates(taken=0.5)).device == 4


def test_between_layers_products_are_passed_on() -> None:
    """The layer before leaves one to be computed beside this layer's collective."""
    operations: list[Operation] = [_send(4, meanwhile=True), _product(1), _product(3, aside=True)]
    assert action_time(operations, Rates()).device == 8
    assert layer_time(operations, Rates()).device == 5


def test_the_host_may_be_slower() -> None:
    operations: list[Operation] = [_product(1), Pass("B", "norm", 1, kernels=3), _send(1)]
    time = action_time(operations, Rates(operator_seconds=1.0, collective_seconds=2.0))
    assert (time.device, time.host, time.seconds) == (3, 6, 6)
    assert time.times(3).seconds == 18
    assert (time + time).computed == {"product": 2, "norm": 2}


def test_products_of_attention_are_one_kernel() -> None:
    """Which a collective runs beside."""
    core = [_product(2, kernel="attention"), _product(3, kernel="attention")]
    time = action_time([_send(4, 2), *core, _product(1)], Rates())
    assert time.device == 6 and time.computed == {"attention": 5, "product": 1}
