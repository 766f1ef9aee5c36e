"""How long a rank takes for the operations of an action, on its device, its links and its host. No torch.

Products and passes follow each other on the device. Collectives of one link follow each other on that link,
beside what is computed before their result is needed; meanwhile they take some of the device's processors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hexad.parallel.inventory import Collective, Operation, Pass, Product


class OperationTimes(Protocol):
    """Seconds of single operations on a rank, while nothing else runs.

    Attributes:
        taken: part of the device that a running collective takes from what is computed beside it.
        operator_seconds, collective_seconds: of the host, for each kernel and each collective.
        aside: products are set aside as they are declared; otherwise computed at once.
        beside: what is declared to run beside collectives does; otherwise they are waited for.
    """

    taken: float
    operator_seconds: float
    collective_seconds: float
    aside: bool
    beside: bool

    def product(self, product: Product) -> float:
        """Seconds of matrix products."""

    def attention(self, products: Sequence[Product]) -> float:
        """Seconds of a fused attention kernel, given all its products."""

    def passes(self, function: Pass) -> float:
        """Seconds of passes over memory."""

    def collective(self, collective: Collective) -> tuple[float, str]:
        """Seconds of a collective, and the link that it occupies."""


Seconds = Mapping[str, float]
"""Seconds by name."""


def _sum(first: Seconds, second: Seconds) -> Seconds:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in {**first, **second}}


class ActionTime(NamedTuple):
    """Seconds of an action of one rank.

    Attributes:
        device: from the first operation to the last, waiting included.
        host: that the host takes to start them.
        computed: on the device, by kind: ``product``, ``attention``, and the kinds of passes.
        again: of these, what is recomputed.
        exposed: waited for, by axis.
        links: that links are busy, by link.
    """

    device: float = 0.0
    host: float = 0.0
    computed: Seconds = {}
    again: float = 0.0
    exposed: Seconds = {}
    links: Seconds = {}

    @property
    def seconds(self) -> float:
        """The longer of device and host."""
        return max(self.device, self.host)

    def __add__(self, other: ActionTime) -> ActionTime:  # type: ignore[override]
        """One after the other."""
        return ActionTime(
            self.device + other.device,
            self.host + other.host,
            _sum(self.computed, other.computed),
            self.again + other.again,
            _sum(self.exposed, other.exposed),
            _sum(self.links, other.links),
        )

    def times(self, count: int) -> ActionTime:
        """Several such actions."""
        computed, exposed, links = (
            {name: count * seconds for name, seconds in part.items()}
            for part in (self.computed, self.exposed, self.links)
        )
        return ActionTime(
            count * self.device, count * self.host, computed, count * self.again, exposed, links
        )


@dataclass
class _Waiting:
    """A collective under way: when it ends, and how many operations are computed before it is waited for."""

    end: float
    beside: int
    axis: str


@dataclass
class _Player:
    """Plays operations in order."""

    rates: OperationTimes
    now: float = 0.0
    host: float = 0.0
    again: float = 0.0
    computed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    links: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    free: dict[str, float] = field(default_factory=dict)
    waiting: list[_Waiting] = field(default_factory=list)
    aside: list[Product] = field(default_factory=list)

    def play(self, operations: Sequence[Operation]) -> None:
        core: list[Product] = []
        for operation in operations:
            attention = isinstance(operation, Product) and operation.kernel == "attention"
            if core and not attention:
                self._attend(core)
                core = []
            if isinstance(operation, Collective):
                self._send(operation)
            elif isinstance(operation, Pass):
                kind, seconds = operation.kind, self.rates.passes(operation)
                self._compute(kind, seconds, operation.kernels, operation.again)
            elif operation.kernel == "attention":
                core.append(operation)
            elif operation.aside and self.rates.aside:
                self.aside.append(operation)
            else:
                self._multiply(operation)
        if core:
            self._attend(core)

    def finish(self) -> None:
        """Compute what is set aside, and wait for what is under way."""
        self._compute_aside()
        while self.waiting:
            self._wait(self.waiting.pop(0))

    def _attend(self, products: list[Product]) -> None:
        forward = products[0].action == "F"
        again = all(product.again for product in products)
        # Attention is several operations of a list, and may be what several collectives run beside.
        self._compute("attention", self.rates.attention(products), 1 if forward else 3, again, len(products))

    def _multiply(self, product: Product) -> None:
        self._compute("product", self.rates.product(product), 1, product.again)

    def _compute(self, kind: str, seconds: float, kernels: int, again: bool, operations: int = 1) -> None:
        busy = max(self.free.values(), default=0.0) - self.now
        if busy > 0 and self.waiting:  # slower as long as links are busy
            slow = 1 / (1 - self.rates.taken)
            seconds = seconds * slow if seconds * slow <= busy else seconds + busy * (1 - 1 / slow)
        self.now += seconds
        self.host += kernels * self.rates.operator_seconds
        self.computed[kind] += seconds
        self.again += seconds if again else 0.0
        for collective in self.waiting:
            collective.beside -= operations
        done = [collective for collective in self.waiting if collective.beside <= 0]
        self.waiting = [collective for collective in self.waiting if collective.beside > 0]
        for collective in done:
            self._wait(collective)

    def _send(self, collective: Collective) -> None:
        seconds, link = self.rates.collective(collective)
        if seconds == 0.0:
            return
        self.host += self.rates.collective_seconds
        end = max(self.now, self.free.get(link, 0.0)) + seconds
        self.free[link], self.links[link] = end, self.links[link] + seconds
        beside = collective.beside if self.rates.beside else 0
        under_way = _Waiting(end, beside + collective.meanwhile * len(self.aside), collective.axis)
        if under_way.beside:
            self.waiting.append(under_way)
        else:
            self._wait(under_way)
        if collective.meanwhile:
            self._compute_aside()

    def _compute_aside(self) -> None:
        while self.aside:
            self._multiply(self.aside.pop(0))

    def _wait(self, collective: _Waiting) -> None:
        waited = collective.end - self.now
        if waited > 0:
            self.exposed[collective.axis] += waited
            self.now = collective.end

    def time(self) -> ActionTime:
        """The time of the operations played so far."""
        computed, exposed, links = dict(self.computed), dict(self.exposed), dict(self.links)
        return ActionTime(self.now, self.host, computed, self.again, exposed, links)


def action_time(operations: Sequence[Operation], rates: OperationTimes) -> ActionTime:
    """The time of operations that begin and end with nothing set aside."""
    player = _Player(rates)
    player.play(operations)
    player.finish()
    return player.time()


def layer_time(operations: Sequence[Operation], rates: OperationTimes) -> ActionTime:
    """The time of a layer's operations between two layers of the same kind, of which the one before leaves
    products set aside for this one, and this one for the next."""
    before = _Player(rates)
    before.play(operations)
    player = _Player(rates, aside=list(before.aside))
    player.play(operations)
    left, player.aside = player.aside, []
    player.finish()
    player.aside = left
    return player.time()
