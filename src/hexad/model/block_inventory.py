"""What one layer holds, multiplies, keeps, needs and sends. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from hexad.parallel.inventory import Collective, Execution, Kept, Moment, Parameter, Product
from hexad.parallel.tensor.linear_inventory import LinearSpec

from .attention_inventory import AttentionSpec
from .feedforward_inventory import FeedForwardSpec
from .norms_inventory import NormSpec

Recomputed = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class BlockSpec:
    """One layer: attention and feed-forward, each normalised before and added to the residual stream."""

    attention_norm: NormSpec
    attention: AttentionSpec
    ffn_norm: NormSpec
    ffn: FeedForwardSpec

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In the order of the module."""
        parts = (self.attention_norm, self.attention, self.ffn_norm, self.ffn)
        return tuple(parameter for part in parts for parameter in part.parameters)

    def products(self, run: Execution) -> list[Product]:
        """All matrix products."""
        return [*self.attention.products(run), *self.ffn.products(run)]

    def sent(self, run: Execution, recompute: Recomputed, split: bool) -> list[Collective]:
        """What moves over the tensor axis. Full recompute repeats the forward pass but for the last sum."""
        found = [*self.attention.sent(run, split), *self.ffn.sent(run, split)]
        if recompute == "full":
            forward = [each for each in found if each.action == "F"]
            found += [each._replace(action="B") for each in forward[:-1]]
        return found

    def kept(self, run: Execution, recompute: Recomputed) -> Kept:
        """Bytes from forward to backward, the layer's input left out and its output counted."""
        stream = run.stream(self.attention.hidden)
        if recompute == "full":
            return Counter(residual=stream)
        selective = recompute == "selective"
        norms = (self.attention_norm, self.ffn_norm)
        return Counter(
            residual=2 * stream,
            norm=sum(norm.statistics(run, run.rows) for norm in norms)
            + sum(self._normed(run, part, selective) for part in (self.attention.qkv, self.ffn.inner)),
            attention=self.attention.kept(run, selective),
            feed_forward=self.ffn.kept(run, selective),
        )

    def forward(self, run: Execution) -> int:
        """Bytes needed in the forward pass, above what is kept."""
        return self.ffn.forward(run)

    def forward_alone(self, run: Execution) -> int:
        """Bytes needed in a forward pass from which nothing is kept, beside the output: the input, normalised
        too, and the attention's values; or with the sum of both, normalised too, the feed-forward's."""
        stream = run.stream(self.attention.hidden)
        attention = 2 * stream + self.attention.kept(run, False)
        return max(attention, 4 * stream + self.ffn.kept(run, False) + self.ffn.forward(run))

    def _normed(self, run: Execution, linear: LinearSpec, selective: bool) -> int:
        """Bytes kept of a norm's output, the input of ``linear``."""
        return 0 if selective or not linear.trained else run.stream(self.attention.hidden)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """In the order of the forward pass."""
        return (*self.attention.linears, *self.ffn.linears)

    def operands(self, run: Execution) -> Kept:
        """Bytes held from ``B`` to ``W``: inputs and output gradients of the four products."""
        return Counter(attention=self.attention.operands(run), feed_forward=self.ffn.operands(run))

    def backward(self, run: Execution, recompute: Recomputed, split: bool) -> list[Moment]:
        """Memory of the backward pass, beside the gradient of the layer's output; with ``split`` operands of
        weight gradients stay, for ``W``."""
        selective = recompute == "selective"
        stream, again = run.stream(self.attention.hidden), 0
        if recompute == "full":
            again = self.kept(run, "none").total() - stream
        # After recomputation: the last product's place, and its sum with the stream.
        moments = [Moment(again + 2 * stream, again)] if again else []
        parts: list[tuple[FeedForwardSpec | AttentionSpec, NormSpec]]
        parts, live = [(self.ffn, self.ffn_norm), (self.attention, self.attention_norm)], again
        for part, norm in parts:
            moments += [moment.above(live) for moment in part.backward(run, selective, split)]
            live += (part.operands(run) if split else 0) - part.kept(run, selective)
            moments.append(Moment(live + norm.backward(run), live))
            # The norm's input is given up, and what the norm returned.
            first = part.linears[0]
            live -= stream + norm.statistics(run, run.rows) + self._normed(run, first, selective)
        return moments

    def weight_moments(self, run: Execution) -> list[Moment]:
        """Memory of ``W``: the gathered input and the next one's, and the gradient before it is added in
        another format, while operands are given up one after the other."""
        moments, released = [], 0
        for linear in reversed(self.linears):
            gathered = run.gathered(self.attention.hidden)
            product = linear.weight_product(run)
            moments.append(Moment(gathered + product - released, gathered - released, linear.matrices))
            released += linear.operands(run)
        return moments
