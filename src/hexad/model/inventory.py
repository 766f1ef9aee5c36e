"""The inventory of a model and of its pipeline stages. No torch.

A family picks the modules and their options (:mod:`hexad.model.families`); each kind of module has its own
inventory; this file puts them together. A layer is in :mod:`hexad.model.block_inventory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from hexad.config.model import ModelSettings
from hexad.parallel.inventory import (
    Execution,
    Grid,
    Kept,
    Operation,
    Operations,
    Parameter,
    Pass,
    Product,
    Weight,
)
from hexad.parallel.tensor.embedding_inventory import ROWS_MULTIPLE, EmbeddingSpec, HeadSpec

from .attention_inventory import AttentionCoreSpec, AttentionSpec
from .block_inventory import BlockSpec, BranchSpec, LayerTraits
from .experts_inventory import ExpertsSpec
from .families import family
from .feedforward_inventory import FeedForwardSpec
from .latent_attention_inventory import LatentAttentionSpec
from .norms_inventory import NormSpec
from .recompute_inventory import Recompute, RecomputedParts
from .routing_inventory import BESIDE_LOADS
from .trained import Trained


@dataclass(frozen=True)
class PositionsSpec:
    """A table of position embeddings, whole on every tensor rank.

    Attributes:
        rows, hidden: of the table.
        sequence: each tensor rank adds it to its own tokens only.
        std: standard deviation of the initial values.
        frozen: it is not trained.
    """

    rows: int
    hidden: int
    sequence: bool
    std: float
    frozen: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The table of positions as a parameter."""
        name, shape = "positions.weight", (self.rows, self.hidden)
        partial = frozenset({"tensor"} if self.sequence else ())
        weight = Weight(
            name, shape, partial=partial, decay=True, std=self.std, unit="positions", outside_layers=True
        )
        return (Parameter(name, (replace(weight, frozen=self.frozen),)),)

    def kept(self, run: Execution) -> int:
        """Bytes from forward to backward: the positions of the tokens."""
        return 8 * run.tokens

    def operations(self, run: Execution) -> Operations:
        """Rows looked up and added; their gradients added up in the table's."""
        stream = run.stream(self.hidden)
        forward: list[Operation] = [Pass("F", "embedding", 2 * stream), Pass("F", "sum", 3 * stream)]
        gradient = Pass("B", "embedding", stream + 3 * stream * run.gradient // run.byte, 2)
        return Operations(forward, [] if self.frozen else [gradient])


@dataclass(frozen=True)
class StageSpec:
    """The inventory of one pipeline stage: some of the layers, on the first stage the embedding, on the last
    one the final norm and the head.

    Attributes:
        tied: see :class:`HeadSpec`; ``here`` on the embedding's rank too.
        after_trained: whether anything is trained in the stages before, which then need a gradient.
    """

    model: ModelInventory
    layers: range
    first: bool
    last: bool
    tied: str = "own"
    after_trained: bool = False

    @cached_property
    def embedding(self) -> EmbeddingSpec | None:
        """The token embedding."""
        if not self.first:
            return None
        frozen = self.model.trained.frozen("embedding.weight")
        tied, multiple = self.tied == "copy", self.model.vocab_multiple
        return EmbeddingSpec(*self._table, tied=tied, frozen=frozen, multiple=multiple)

    @property
    def _table(self) -> tuple[int, int, bool, float]:
        """Vocabulary, width, whether activations are divided over tokens, and initial standard deviation."""
        model = self.model.settings
        return int(model.vocab), model.hidden, self.model.sequence, model.init_std

    @cached_property
    def positions(self) -> PositionsSpec | None:
        """The table of learned positions."""
        model = self.model.settings
        if not self.first or self.rotary:
            return None
        rows, frozen = int(model.max_positions), self.model.trained.frozen("positions.weight")
        return PositionsSpec(rows, model.hidden, self.model.sequence, model.init_std, frozen)

    @property
    def rotary(self) -> bool:
        """Whether its layers rotate queries and keys."""
        return self.model.rotary

    @cached_property
    def norm(self) -> NormSpec | None:
        """The final norm."""
        if not self.last:
            return None
        names = ("norm.weight", "norm.bias")
        frozen = frozenset(name for name in names if self.model.trained.frozen(name))
        return self.model.residual_norm("norm", "norm", frozen)

    @cached_property
    def head(self) -> HeadSpec | None:
        """The output head."""
        if not self.last:
            return None
        frozen = self.model.trained.frozen("head.weight" if self.tied == "own" else "embedding.weight")
        return HeadSpec(*self._table, tied=self.tied, frozen=frozen, multiple=self.model.vocab_multiple)

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Its layers, with names from each layer on: layers of the same sizes are equal."""
        return tuple(self.model.layer(number) for number in self.layers)

    @cached_property
    def runs(self) -> tuple[tuple[BlockSpec, int], ...]:
        """Its layers as runs of equal ones, and how many each has."""
        return tuple((block, len(list(run))) for block, run in groupby(self.blocks))

    @cached_property
    def input_reached(self) -> bool:
        """Whether the input of its first layer needs a gradient: something before is trained."""
        before = (self.embedding, self.positions)
        return self.after_trained or any(
            not parameter.frozen for part in before if part for parameter in part.parameters
        )

    @cached_property
    def unreached(self) -> int:
        """Leading layers that no gradient reaches: nothing is trained in them or before."""
        if self.input_reached:
            return 0
        trained = (any(not parameter.frozen for parameter in block.parameters) for block in self.blocks)
        return next((number for number, any_trained in enumerate(trained) if any_trained), len(self.blocks))

    @cached_property
    def trains(self) -> bool:
        """Whether any of its parameters is trained."""
        parts = (self.embedding, self.positions, self.norm, self.head, *dict.fromkeys(self.blocks))
        return any(not parameter.frozen for part in parts if part for parameter in part.parameters)

    def reaches(self, place: int) -> bool:
        """Whether the input of the layer at a place needs a gradient."""
        return self.input_reached or place > self.unreached

    def recomputing(self, recompute: Recompute) -> list[tuple[BlockSpec, RecomputedParts]]:
        """Its layers, and what each recomputes."""
        return [(block, recompute.of(position)) for position, block in enumerate(self.blocks)]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the model."""
        return tuple(self._parameters())

    def _parameters(self) -> Iterator[Parameter]:
        blocks = [self.model.block(number) for number in self.layers]
        for part in (self.embedding, self.positions, *blocks, self.norm, self.head):
            yield from part.parameters if part is not None else ()

    def kept(self, run: Execution, recompute: Recompute) -> Kept:
        """All bytes from ``F`` to ``B``."""
        model = self.model.settings
        stream, total = run.stream(model.hidden), Counter[str]()
        if not (self.trains or self.after_trained):
            return total
        reached = self.recomputing(recompute)[self.unreached :]
        for (block, parts), number in Counter(reached).items():
            for name, size in block.kept(run, parts).items():
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
        return sum(block.rounded(run) for block in self.blocks)

    def operands(self, run: Execution) -> Kept:
        """Bytes of operands of weight gradients by layer, held from action ``B`` to action ``W``."""
        total = Counter[str]()
        for block, number in Counter(self.blocks[self.unreached :]).items():
            for name, size in block.operands(run).items():
                total[name] += number * size
        return total

    def cached(self, tensor: int) -> int:
        """Elements of a token that a rank's key/value cache keeps."""
        return sum(block.cached(tensor) for block in self.blocks)

    def cached_bytes(self, tensor: int, byte: int, exact: bool = False) -> int:
        """Bytes of a token in a rank's key/value cache, of elements of so many bytes; ``exact``: in
        ``precision.exact``."""
        besides = sum(block.cached_heads(tensor) for block in self.blocks) if exact else 0
        return self.cached(tensor) * byte + besides * 4

    def cached_flops(self, length: int, tensor: int) -> int:
        """FLOPs of a token's attention over ``length`` cached ones on a rank."""
        return sum(block.cached_flops(length, tensor) for block in self.blocks)

    def before_layers(self, run: Execution) -> Operations:
        """Operations of a rank for a microbatch before the layers: look-ups, and cosines and sines."""
        operations = Operations([], [])
        for part in (self.embedding, self.positions):
            operations = operations if part is None else operations.then(part.operations(run))
        if self.rotary:
            width = self.model.settings.rotary_width
            operations.forward.append(Pass("F", "rotation", 4 * run.whole(width), 8))
        return operations

    def after_layers(self, run: Execution) -> Operations:
        """Operations of a rank for a microbatch after the layers: the final norm, and the head with the loss
        and its gradients."""
        if self.norm is None or self.head is None:
            return Operations([], [])
        norm = self.norm.operations(run, run.stream(self.model.settings.hidden))
        return norm.then(self.head.operations(run))

    def layer_operations(self, run: Execution, recompute: Recompute, split: bool) -> list[Operations]:
        """Operations of a rank for a microbatch in every layer; with ``split`` weight gradients are actions
        of their own. Leading layers that no gradient reaches have no backward pass."""
        layers = []
        operations: dict[tuple[BlockSpec, RecomputedParts, bool], Operations] = {}
        for number, (block, parts) in enumerate(self.recomputing(recompute)):
            key = block, parts, self.reaches(number)
            if key not in operations:
                operations[key] = block.operations(run, parts, split, key[-1])
            whole = operations[key]
            layers.append(whole if number >= self.unreached else whole._replace(backward=[]))
        return layers

    def products(self, run: Execution) -> list[Product]:
        """All matrix products of a microbatch."""
        products = [
            product
            for number, block in enumerate(self.blocks)
            for product in block.products(run)
            if product.action == "F" or number >= self.unreached
        ]
        return products if self.head is None else products + self.head.products(run)


@dataclass(frozen=True)
class ModelInventory:
    """A whole model.

    Attributes:
        settings: resolved; ``vocab`` and ``max_positions`` are numbers.
        sequence: sequence parallel is in force.
        tensor: tensor degree.
        vocab_multiple: a rank's rows of the vocabulary are padded to a multiple of this.
    """

    settings: ModelSettings
    sequence: bool = False
    tensor: int = 1
    vocab_multiple: int = ROWS_MULTIPLE

    @property
    def rotary(self) -> bool:
        """Whether layers rotate queries and keys."""
        return family(self.settings.family).rotary

    @property
    def kv_copies(self) -> int:
        """How many tensor ranks hold the same key/value heads."""
        return max(1, self.tensor // int(self.settings.kv_heads))

    @cached_property
    def trained(self) -> Trained:
        """The weights that are trained, and the layers that have adapters."""
        return Trained.of(self.settings)

    def block(self, number: int) -> BlockSpec:
        """Layer ``number``, with complete names."""
        unit = f"layers.{number}"
        return self._block(unit, f"{unit}.", self._has_experts(number), *self._selected(number))

    def layer(self, number: int) -> BlockSpec:
        """Layer ``number``, with names from the layer on: layers of one kind of which the same is trained are
        equal."""
        key = self._has_experts(number), *self._selected(number)
        if key not in self._layers:
            self._layers[key] = self._block("", "", *key)
        return self._layers[key]

    @cached_property
    def losses(self) -> tuple[str, ...]:
        """Names of the auxiliary losses of all layers."""
        kinds = {self._has_experts(number) for number in range(self.settings.layers)}
        return tuple(
            sorted({name for kind in kinds for branch in self._plain[kind].parts for name in branch.losses})
        )

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids that weights are divided over."""
        return ("dense", "expert") if self.settings.expert_layers else ("dense",)

    @property
    def statistics(self) -> int:
        """Numbers that a step counts of the experts of all layers, summed over ranks."""
        moe = self.settings.moe
        if moe is None or not self.settings.expert_layers:
            return 0
        return self.settings.layers * (moe.experts + BESIDE_LOADS)

    def _has_experts(self, number: int) -> bool:
        moe = self.settings.moe
        return moe is not None and moe.in_layer(number)

    @cached_property
    def _layers(self) -> dict[tuple[bool, frozenset[str], frozenset[str]], BlockSpec]:
        return {}

    @cached_property
    def _plain(self) -> tuple[BlockSpec, BlockSpec]:
        """A dense layer of which everything is trained, and one with experts, or again a dense one."""
        nothing: frozenset[str] = frozenset()
        dense = self._block("", "", False, nothing, nothing)
        return dense, dense if self.settings.moe is None else self._block("", "", True, nothing, nothing)

    def _selected(self, number: int) -> tuple[frozenset[str], frozenset[str]]:
        """Names, from the layer on, of a layer's frozen weights and of its adapted outputs."""
        if self.trained.everything:
            return frozenset(), frozenset()
        plain = self._plain[self._has_experts(number)]
        names = [weight.name for parameter in plain.parameters for weight in parameter.weights]
        outputs = [name for group in plain.outputs for name in group]
        whole = f"layers.{number}."
        return (
            frozenset(name for name in names if self.trained.frozen(whole + name)),
            frozenset(name for name in outputs if self.trained.adapted(whole + name)),
        )

    def _block(
        self, unit: str, prefix: str, experts: bool, frozen: frozenset[str], adapted: frozenset[str]
    ) -> BlockSpec:
        """A layer, with experts or dense; ``frozen`` and ``adapted`` are names from the layer on."""
        frozen, adapted = (frozenset(prefix + name for name in names) for names in (frozen, adapted))
        layer = self._traits(unit, prefix, frozen, adapted)
        return BlockSpec(
            (
                (self.residual_norm(f"{prefix}attention_norm", unit, frozen), self._attention(layer)),
                (self.residual_norm(f"{prefix}ffn_norm", unit, frozen), self._feed_forward(layer, experts)),
            )
        )

    def _traits(self, unit: str, prefix: str, frozen: frozenset[str], adapted: frozenset[str]) -> LayerTraits:
        model, lora = self.settings, self.trained.lora if adapted else None
        # Weights that end a branch begin smaller in deeper models, as in GPT-2.
        out_std = model.init_std / (2 * model.layers) ** 0.5
        return LayerTraits(
            prefix, unit, model.hidden, self.sequence, model.init_std, out_std, lora, frozen, adapted
        )

    @property
    def attention(self) -> AttentionCoreSpec:
        """The attention of a layer of which everything is trained."""
        return self._attention(self._traits("", "", frozenset(), frozenset()))

    def _attention(self, layer: LayerTraits) -> AttentionCoreSpec:
        model, kind = self.settings, family(self.settings.family)
        if model.mla is not None:
            return LatentAttentionSpec(
                layer,
                heads=model.heads,
                mla=model.mla,
                scale=float(model.attention_multiplier),
                window=model.sliding_window,
                dropout=model.attention_dropout,
            )
        return AttentionSpec(
            layer,
            heads=model.heads,
            kv_heads=int(model.kv_heads),
            width=int(model.head_dim),
            rotary_width=model.rotary_width if kind.rotary else 0,
            scale=float(model.attention_multiplier),
            qkv_bias=bool(model.qkv_bias),
            out_bias=bool(model.out_bias),
            norm_eps=model.norm_eps if model.qk_norm else None,
            window=model.sliding_window,
            dropout=model.attention_dropout,
            copies=self.kv_copies,
        )

    def _feed_forward(self, layer: LayerTraits, experts: bool) -> BranchSpec:
        model, kind = self.settings, family(self.settings.family)
        if experts:
            assert model.moe is not None
            return ExpertsSpec(layer, model.moe, kind.gated)
        return FeedForwardSpec(layer, int(model.ffn_hidden), kind.gated, bool(model.mlp_bias))

    def residual_norm(self, name: str, unit: str, frozen: frozenset[str] = frozenset()) -> NormSpec:
        """A norm over the residual stream."""
        model, kind = self.settings, family(self.settings.family)
        return NormSpec(name, kind.norm, model.hidden, model.norm_eps, self.sequence, unit, frozen)

    def stage(
        self, layers: range, first: bool = True, last: bool = True, tied: str | None = None
    ) -> StageSpec:
        """A stage of some of the layers; ``tied`` as for :class:`HeadSpec`, by default that of a stage with
        all layers."""
        if tied is None:
            tied = "here" if self.settings.tied_embeddings else "own"
        return StageSpec(self, layers, first, last, tied)

    def stages(self, layers: Sequence[range], placement: Sequence[int], rank: int) -> dict[int, StageSpec]:
        """The stages of one pipeline rank, by number, ascending; ``layers`` and ``placement`` are those of
        all stages."""
        trained_from = self.trained_from(layers)
        return {
            number: replace(stage, after_trained=number > trained_from)
            for number, stage in self._stages(layers, placement)
            if placement[number] == rank
        }

    def trained_from(self, layers: Sequence[range]) -> int:
        """The first of the stages with these layers in which anything is trained.

        A head that is tied to the embedding is trained where that is, on the first stage.
        """
        placement = range(len(layers))
        return next((number for number, stage in self._stages(layers, placement) if stage.trains), 0)

    def _stages(self, layers: Sequence[range], placement: Sequence[int]) -> Iterator[tuple[int, StageSpec]]:
        """All stages with their numbers; see :meth:`stages`."""
        final = len(placement) - 1
        tied = "own"
        if self.settings.tied_embeddings:
            tied = "here" if placement[0] == placement[final] else "copy"
        for number in range(len(placement)):
            yield number, self.stage(layers[number], number == 0, number == final, tied)

    def weights(self) -> dict[str, Weight]:
        """All global tensors by name, without adapters."""
        return {name: weight for name, weight in self._tensors().items() if not weight.adapter}

    def adapters(self) -> dict[str, Weight]:
        """All tensors of adapters by name."""
        return {name: weight for name, weight in self._tensors().items() if weight.adapter}

    def _tensors(self) -> dict[str, Weight]:
        whole = self.stage(range(self.settings.layers))
        return {weight.name: weight for parameter in whole.parameters for weight in parameter.weights}
