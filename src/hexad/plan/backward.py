"""What backward needs above what forward kept: allocation by allocation, after the code in
:mod:`hexad.model` and :mod:`hexad.parallel.tensor`."""

from __future__ import annotations

from dataclasses import dataclass

from .activations import Stage


@dataclass(frozen=True)
class Moment:
    """From one weight's gradient to the next.

    Attributes:
        most: bytes, at the most.
        then: bytes when the gradient is complete.
    """

    most: int
    then: int


class Layer:
    """Walks one layer's backward pass; bytes are relative to what the layer has kept.

    Attributes:
        moments: one for every weight whose gradient is computed, in order, and one for the rest.
        left: bytes that remain: operands of gradients that are put off.
    """

    def __init__(self, stage: Stage, recompute: str, split: bool) -> None:
        self.moments: list[Moment] = []
        self._stage, self._split = stage, split
        self._live = self._most = 0
        self._made = 1 if recompute == "selective" else 0
        s = stage.sizes
        if recompute == "full":
            again = stage.block("none")
            self._hold(sum(again.values()) - s.stream)
            self._briefly(2 * s.stream)  # the last product's place, and its sum with the residual stream
        self._feed_forward()
        self._attention()
        self.moments.append(Moment(self._most, self._live))

    def _feed_forward(self) -> None:
        s, stage = self._stage.sizes, self._stage
        inner = s.inner * (1 if stage.gpt2 else 2)
        self._row(s.inner)
        self._hold(inner)
        self._briefly(0 if stage.gpt2 else s.inner)
        self._free(inner, s.inner)
        self._column(inner)
        self._norm()

    def _attention(self) -> None:
        s, rotated = self._stage.sizes, not self._stage.gpt2
        qkv = s.q + 2 * s.k
        self._hold(s.gathered)
        self._briefly(self._stage.eight_bits(s.whole, s.q))
        self._hold(s.q)
        self._weight(s.q, s.whole)
        self._used(s.gathered)
        self._hold(self._made * (s.q + s.k if rotated else 0))
        self._hold(qkv)
        self._used(s.q)
        self._free(s.q, s.heads)
        self._hold(s.q + s.k)
        self._free(s.q + s.k)
        if rotated:
            self._hold(s.q + s.k)
            self._free(s.q + s.k, s.q + s.k)
        self._hold(qkv)
        self._free(s.q + 2 * s.k, qkv)
        self._column(qkv)
        self._norm()

    def _row(self, inputs: int) -> None:
        """The feed-forward layer's row-parallel one: the output's gradient gathered, the input's gradient."""
        s = self._stage.sizes
        self._hold(s.gathered + self._made * inputs)
        self._briefly(self._stage.eight_bits(s.whole, inputs))
        self._hold(inputs)
        self._weight(inputs, s.whole)
        self._used(s.gathered, inputs)

    def _column(self, outputs: int) -> None:
        """A column-parallel layer: its input gathered, the input's gradient and the sum of it."""
        s = self._stage.sizes
        gathered = 0 if self._split else s.gathered  # not before W
        self._hold(self._made * s.stream + gathered)
        self._briefly(self._stage.eight_bits(outputs, s.whole))
        self._hold(s.whole)
        self._hold(s.gathered)  # parts of other ranks
        self._weight(s.whole, outputs)
        if s.gathered:
            self._hold(s.stream)
        self._used(s.stream)
        self._free(gathered, s.gathered * 2)
        self._used(outputs)

    def _norm(self) -> None:
        """A norm, and the sum with the residual branch."""
        s = self._stage.sizes
        self._briefly(self._stage.norm())
        self._hold(s.stream)
        self._free(s.stream, s.stream, s.statistic)

    def _weight(self, inputs: int, outputs: int) -> None:
        """The weight's gradient, unless it is put off."""
        if self._split:
            return
        self._briefly(self._stage.product(inputs, outputs))
        self.moments.append(Moment(self._most, self._live))
        self._most = self._live

    def _hold(self, size: int) -> None:
        """Allocate."""
        self._live += size
        self._most = max(self._most, self._live)

    def _briefly(self, size: int) -> None:
        """Allocate and give up."""
        self._most = max(self._most, self._live + size)

    def _used(self, *sizes: int) -> None:
        """Give up operands of a weight's gradient, unless that is put off."""
        if not self._split:
            self._free(*sizes)

    def _free(self, *sizes: int) -> None:
        """Give up."""
        self._live -= sum(sizes)


def weights(stage: Stage) -> list[Moment]:
    """Walks ``W`` of a stage of layers; bytes are relative to :meth:`Stage.products`."""
    s = stage.sizes
    inner, qkv = s.inner * (1 if stage.gpt2 else 2), s.q + 2 * s.k
    # (operands, inputs, outputs, what is gathered)
    layer = [
        (s.inner + s.whole, s.inner, s.whole, 0),
        (inner + s.stream, s.whole, inner, s.gathered),
        (s.q + s.whole, s.q, s.whole, 0),
        (qkv + s.stream, s.whole, qkv, s.gathered),
    ]
    products = layer * stage.layers
    moments, live = [], 0
    for index, (operands, inputs, outputs, gathered) in enumerate(products):
        ahead = products[index + 1][3] if index + 1 < len(products) else 0
        held = live + gathered + ahead
        moments.append(Moment(held + stage.product(inputs, outputs), held))
        live -= operands
    return moments
