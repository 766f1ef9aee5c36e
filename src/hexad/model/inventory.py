"""What a model, a pipeline stage of it and a layer hold, multiply, keep, need and send. No torch.

A family picks the modules and their options (:mod:`hexad.model.families`); each kind of module has its own
inventory; this file puts them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hexad.config.schema import ModelSettings
from hexad.parallel.inventory import Collective, Execution, Kept, Moment, Parameter, Product, Weight
from hexad.parallel.tensor.embedding_inventory import Embedding, Head
from hexad.parallel.tensor.linear_inventory import Linear

from .attention_inventory import Attention
from .families import family
from .feedforward_inventory import FeedForward
from .norms_inventory import Norm
from .positions_inventory import LearnedPositions

Recomputed = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Block:
    """One layer: attention and feed-forward, each normalised before and added to the residual stream."""

    attention_norm: Norm
    attention: Attention
    ffn_norm: Norm
    ffn: FeedForward

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
            norm=sum(norm.statistics(run, run.rows) for norm in norms) + (0 if selective else 2 * stream),
            attention=self.attention.kept(run, selective),
            feed_forward=self.ffn.kept(run, selective),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
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
        parts: list[tuple[FeedForward | Attention, Norm]]
        parts, live = [(self.ffn, self.ffn_norm), (self.attention, self.attention_norm)], again
        for part, norm in parts:
            moments += [moment.above(live) for moment in part.backward(run, selective, split)]
            live += (part.operands(run) if split else 0) - part.kept(run, selective)
            moments.append(Moment(live + norm.backward(run), live))
            # The norm's input is given up, and what the norm returned.
            live -= stream + norm.statistics(run, run.rows) + (0 if selective else stream)
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


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage holds: some of the layers, on the first stage the embedding, on the last one
    the final norm and the head.

    Attributes:
        tied: see :class:`Head`; ``here`` on the embedding's rank too.
    """

    model: ModelInventory
    layers: range
    first: bool
    last: bool
    tied: str = "own"

    @cached_property
    def embedding(self) -> Embedding | None:
        """The token embedding."""
        model = self.model.settings
        if not self.first:
            return None
        tied = self.tied == "copy"
        return Embedding(int(model.vocab), model.hidden, self.model.sequence, model.init_std, tied)

    @cached_property
    def positions(self) -> LearnedPositions | None:
        """The table of learned positions."""
        model = self.model.settings
        if not self.first or self.rotary:
            return None
        rows = int(model.max_positions)
        return LearnedPositions(rows, model.hidden, self.model.sequence, model.init_std)

    @property
    def rotary(self) -> bool:
        """Whether its layers rotate queries and keys."""
        return self.model.rotary

    @cached_property
    def norm(self) -> Norm | None:
        """The final norm."""
        return self.model.residual_norm("norm", "norm") if self.last else None

    @cached_property
    def head(self) -> Head | None:
        """The output head."""
        model = self.model.settings
        if not self.last:
            return None
        return Head(int(model.vocab), model.hidden, self.model.sequence, model.init_std, self.tied)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Its layers, with names from each layer on: layers of the same sizes are equal."""
        return tuple(self.model.layer(number) for number in self.layers)

    def recomputing(self, recompute: Recomputed, count: int) -> list[tuple[Block, Recomputed]]:
        """Its layers, and what each recomputes: the first ``count`` do."""
        return [(block, recompute if index < count else "none") for index, block in enumerate(self.blocks)]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """In the order of the model."""
        return tuple(self._parameters())

    def _parameters(self) -> Iterator[Parameter]:
        blocks = [self.model.block(number) for number in self.layers]
        for part in (self.embedding, self.positions, *blocks, self.norm, self.head):
            yield from part.parameters if part is not None else ()

    def kept(self, run: Execution, recompute: Recomputed, count: int) -> Kept:
        """All bytes from ``F`` to ``B``; the first ``count`` layers recompute."""
        model = self.model.settings
        stream, total = run.stream(model.hidden), Counter[str]()
        for (block, kind), number in Counter(self.recomputing(recompute, count)).items():
            for name, size in block.kept(run, kind).items():
                total[name] += number * size
        total["residual" if self.first else "boundary"] += stream
        if self.embedding is not None:
            total["positions"] += self.embedding.positions(run)
        if self.positions is not None:
            total["positions"] += self.positions.kept(run)
        if self.rotary:
            total["positions"] += run.whole(model.rotary_width)  # cosines and sines
        if self.norm is not None:
            total["norm"] += self.norm.statistics(run, run.rows)
            total["loss"] += stream  # the head's gradient of its input
        elif self.layers:
            total["residual"] -= stream  # the output belongs to the next stage
        return total

    def rounded(self, run: Execution) -> int:
        """Bytes of the weights that are kept in 8 bits: the head's are not."""
        return sum(linear.rounded(run) for block in self.blocks for linear in block.linears)

    def operands(self, run: Execution) -> Kept:
        """Bytes held from ``B`` to ``W``."""
        total = Counter[str]()
        for block, number in Counter(self.blocks).items():
            for name, size in block.operands(run).items():
                total[name] += number * size
        return total

    def sent(self, run: Execution, recompute: Recomputed, count: int, split: bool) -> list[Collective]:
        """What moves over the tensor axis for one microbatch; the first ``count`` layers recompute."""
        layers = self.recomputing(recompute, count)
        found = [each for block, kind in layers for each in block.sent(run, kind, split)]
        found += [] if self.embedding is None else self.embedding.sent(run)
        return found + ([] if self.head is None else self.head.sent(run))

    def products(self, run: Execution) -> list[Product]:
        """All matrix products."""
        found = [product for block in self.blocks for product in block.products(run)]
        return found if self.head is None else found + self.head.products(run)


@dataclass(frozen=True)
class ModelInventory:
    """A whole model.

    Attributes:
        settings: resolved; ``vocab`` and ``max_positions`` are numbers.
        sequence: sequence parallel is in force.
        tensor: tensor degree.
    """

    settings: ModelSettings
    sequence: bool = False
    tensor: int = 1

    @property
    def rotary(self) -> bool:
        """Whether layers rotate queries and keys."""
        return family(self.settings.family).rotary

    @property
    def kv_copies(self) -> int:
        """How many tensor ranks hold the same key/value heads."""
        return max(1, self.tensor // int(self.settings.kv_heads))

    def block(self, number: int) -> Block:
        """Layer ``number``, with complete names."""
        return self._block(f"layers.{number}", f"layers.{number}.")

    def layer(self, number: int) -> Block:
        """Layer ``number``, with names from the layer on; all layers have the same sizes."""
        return self._layer

    @cached_property
    def _layer(self) -> Block:
        return self._block("", "")

    def _block(self, unit: str, prefix: str) -> Block:
        model, kind = self.settings, family(self.settings.family)
        out_std = model.init_std / (2 * model.layers) ** 0.5
        attention = Attention(
            name=f"{prefix}attention",
            unit=unit,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=int(model.kv_heads),
            width=int(model.head_dim),
            rotary_width=model.rotary_width if kind.rotary else 0,
            scale=float(model.attention_multiplier),
            qkv_bias=bool(model.qkv_bias),
            out_bias=kind.bias,
            norm_eps=model.norm_eps if model.qk_norm else None,
            window=model.sliding_window,
            dropout=model.attention_dropout,
            sequence=self.sequence,
            std=model.init_std,
            out_std=out_std,
            copies=self.kv_copies,
        )
        ffn = FeedForward(
            name=f"{prefix}ffn",
            unit=unit,
            hidden=model.hidden,
            width=int(model.ffn_hidden),
            gated=kind.gated,
            bias=kind.bias,
            sequence=self.sequence,
            std=model.init_std,
            out_std=out_std,
        )
        norms = (self.residual_norm(prefix + name, unit) for name in ("attention_norm", "ffn_norm"))
        return Block(next(norms), attention, next(norms), ffn)

    def residual_norm(self, name: str, unit: str) -> Norm:
        """A norm over the residual stream."""
        model, kind = self.settings, family(self.settings.family)
        return Norm(name, kind.norm, model.hidden, model.norm_eps, self.sequence, unit)

    def stage(self, layers: range, first: bool = True, last: bool = True, tied: str | None = None) -> Stage:
        """Some of the layers; ``tied`` as for :class:`Head`, by default as for a stage that has it all."""
        if tied is None:
            tied = "here" if self.settings.tied_embeddings else "own"
        return Stage(self, layers, first, last, tied)

    def stages(self, layers: Sequence[range], placement: Sequence[int], rank: int) -> dict[int, Stage]:
        """The stages of one pipeline rank, by number, ascending.

        Args:
            layers: for every stage its layers.
            placement: for every stage its pipeline rank.
            rank: whose stages.
        """
        final = len(placement) - 1
        tied = "own"
        if self.settings.tied_embeddings:
            tied = "here" if placement[0] == placement[final] else "copy"
        return {
            number: self.stage(layers[number], number == 0, number == final, tied)
            for number, owner in enumerate(placement)
            if owner == rank
        }

    def weights(self) -> dict[str, Weight]:
        """All global tensors by name."""
        whole = self.stage(range(self.settings.layers))
        return {weight.name: weight for each in whole.parameters for weight in each.weights}
