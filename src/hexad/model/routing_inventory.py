"""The inventory of routing and dispatch: parameters, products, kept tensors, temporary memory and messages.
No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hexad.config.model import DispatcherName, MoeSettings
from hexad.parallel.expert.kinds import BufferBound
from hexad.parallel.inventory import (
    Collective,
    Execution,
    Operation,
    Operations,
    Parameter,
    Pass,
    Product,
    Weight,
)

from .block_inventory import LayerTraits

BESIDE_LOADS = 3
"""Statistics of a layer that are counted beside the loads of its experts: entropy, dropped, missed."""
_INDEX = 8
"""Bytes of an index."""
_ROUTING = 7
"""Kernels of each of: scores and choice, indexes of rows, gradients of scores."""


@dataclass(frozen=True)
class RouterSpec:
    """The router, which chooses experts: a matrix, whole on every rank, and a bias for each expert.

    Attributes:
        layer: what it has in common with the layer's branches.
        settings: of the experts.
    """

    layer: LayerTraits
    settings: MoeSettings

    @property
    def name(self) -> str:
        """The module's name, from the stage's root."""
        return f"{self.layer.prefix}ffn.router"

    @property
    def trains(self) -> bool:
        """Whether its matrix is trained."""
        return f"{self.name}.weight" not in self.layer.frozen

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The matrix, of whose gradient every tensor rank computes the part of its own tokens; the bias,
        which is changed after each step, by loads."""
        layer, name, shape = self.layer, f"{self.name}.weight", (self.settings.experts, self.layer.hidden)
        frozen = name in layer.frozen
        weight = Weight(
            name,
            shape,
            partial=frozenset({"tensor"}),
            decay=True,
            std=layer.std,
            unit=layer.unit,
            frozen=frozen,
        )
        parameters = (Parameter(name, (weight,)),)
        if not self.settings.biased:
            return parameters
        name = f"{self.name}.bias"
        bias = Weight(name, (self.settings.experts,), unit=layer.unit, frozen=True, wide=True)
        return (*parameters, Parameter(name, (bias,)))


@dataclass(frozen=True)
class RoutingSpec:
    """The choice of experts, and the way of tokens' rows to them and back. Sizes are those of an even load.

    Attributes:
        layer: what it has in common with the layer's branches.
        settings: of the experts.
    """

    layer: LayerTraits
    settings: MoeSettings

    @cached_property
    def router(self) -> RouterSpec:
        """Operations of the router, which chooses the experts."""
        return RouterSpec(self.layer, self.settings)

    def dispatcher(self, ranks: int, slices: int, exact: bool) -> DispatcherName:
        """How rows reach their experts: what sends less, unless it is set. In exact arithmetic each of a
        token's experts sends its result."""
        if exact:
            return "alltoall"
        if self.settings.dispatcher != "auto":
            return self.settings.dispatcher
        return "all_gather" if ranks < self.settings.top_k * slices else "alltoall"

    def tokens(self, run: Execution) -> int:
        """Tokens whose experts a rank chooses."""
        return -(-run.tokens // run.tensor)

    def rows(self, run: Execution) -> int:
        """Rows of a rank's experts: as many as ``run.load`` says, up to all that could choose them."""
        ranks, local = run.expert * run.expert_tensor, self.settings.experts // run.expert
        load = min(run.load, float(ranks * local))  # more than there can be
        bound = BufferBound(load, self.tokens(run), self.settings.top_k, ranks, run.expert_tensor, local)
        static = ranks > 1 and not run.cpu  # buffers have a static size
        slots = static and self.dispatcher(ranks, run.expert_tensor, run.exact) == "alltoall"
        return ranks * bound.slots if slots else bound.rows

    @property
    def routers_agree(self) -> bool:
        """Whether routers look at all tokens of a microbatch."""
        settings = self.settings
        balanced = settings.aux_loss and settings.balance != "step"
        return bool(balanced or settings.capacity_factor is not None)

    def operations(self, run: Execution, reached: bool) -> Operations:
        """Scores, the choice of experts, and the weights of the chosen ones."""
        tokens, settings = self.tokens(run), self.settings
        scores, pairs = tokens * settings.experts * run.wide, tokens * settings.top_k * _INDEX
        frozen = self.router.parameters[0].frozen
        forward: list[Operation] = [
            *self._shared_routing(run),
            Pass("F", "routing", 12 * scores, _ROUTING),
            Pass("F", "routing", 16 * pairs, _ROUTING + (3 * settings.top_k if settings.normalise else 0)),
        ]
        backward: list[Operation] = [Pass("B", "routing", 6 * scores, _ROUTING)]
        whole = self.divided(run) * run.tensor
        gather: list[Operation] = (
            [Collective("B", "tensor", "all_gather", whole)] if whole and reached else []
        )
        routed = narrow_product(run, tokens, self.layer.hidden, settings.experts, frozen)
        return Operations([], gather).then(routed).then(Operations(forward, backward))

    def _shared_routing(self, run: Execution) -> list[Operation]:
        """The collectives among routers: of tokens' experts, where an expert's capacity decides over all of a
        microbatch's tokens, and of loads that are balanced over these."""
        settings, operations = self.settings, list[Operation]()
        chosen = self.tokens(run) * (settings.top_k + 1) * _INDEX
        groups = run.sequences if settings.balance == "sequence" else 1
        loads = groups * settings.experts * run.wide
        for axis, ranks in (("tensor", run.tensor), ("context", run.context)):
            chosen *= ranks
            if ranks > 1 and settings.capacity_factor is not None and not run.imposed:
                operations.append(Collective("F", axis, "all_gather", chosen))
        for axis, ranks in (("tensor", run.tensor), ("context", run.context)):
            if ranks > 1 and settings.aux_loss and settings.balance != "step":
                operations.append(Collective("F", axis, "all_reduce", loads))
        return operations

    def moves(self, run: Execution, reached: bool) -> tuple[Operations, Operations]:
        """Operations that move rows to their experts, with their pairs' weights, and back; each is the
        other's backward pass. Gradients of rows, and of weights, are sent back where they are needed."""
        ranks, slices, hidden = run.expert * run.expert_tensor, run.expert_tensor, self.layer.hidden
        rows, tokens, top_k = self.rows(run), self.tokens(run), self.settings.top_k
        row, pair = rows * hidden * run.byte, rows * run.wide
        moved = Pass("F", "permutation", 2 * row)
        ids: list[Operation] = [Pass("F", "routing", 8 * tokens * top_k * _INDEX, _ROUTING)]
        scatter: list[Operation] = [moved]
        collect: list[Operation] = [Pass("F", "permutation", (rows + tokens) * hidden * run.byte)]
        values: list[Operation] = [Pass("F", "permutation", 2 * pair)]
        home = values
        if ranks > 1 and self.dispatcher(ranks, slices, run.exact) == "all_gather":
            every = ranks * tokens
            gather, scattered = (
                Collective("F", "expert", operation, every * hidden * run.byte)
                for operation in ("all_gather", "reduce_scatter")
            )
            pairs = gather._replace(nbytes=every * top_k * run.wide)
            ids.insert(0, gather._replace(nbytes=every * top_k * _INDEX))
            scatter = [gather, moved]
            collect = [Pass("F", "permutation", (rows + every) * hidden * run.byte), scattered]
            values, home = [pairs, *values], [*values, pairs._replace(operation="reduce_scatter")]
        elif ranks > 1:
            out, back = self._exchanges(run, hidden * run.byte)
            counts = self.settings.experts * slices * 4
            ids.append(Collective("F", "expert", "all_to_all", counts))
            scatter, collect = [moved, out, moved], [moved, back, *collect]
            out, back = self._exchanges(run, run.wide)
            values, home = [*values, out], [*values, back]
        rows_back = collect if reached else []
        home = home if reached or self.router.trains else []
        whole = self.divided(run) * run.tensor
        joined: list[Operation] = [Collective("F", "tensor", "all_gather", whole)] if whole else []
        return (
            Operations([*ids, *scatter, *values], _backward([*rows_back, *home])),
            Operations([*collect, *joined], _backward(scatter)),
        )

    def _exchanges(self, run: Execution, width: int) -> tuple[Collective, Collective]:
        """Rows of so many bytes, sent to their experts and back."""
        if run.routed is None:
            even = Collective("F", "expert", "all_to_all", self.rows(run) * width)
            return even, even
        out, back = (Collective("F", "expert", "exchange", rows * width) for rows in run.routed)
        return out, back

    def divided(self, run: Execution) -> int:
        """Bytes of this rank's part of the input, where activations are whole on every tensor rank."""
        divides = run.tensor > 1 and not run.sequence
        return self.tokens(run) * self.layer.hidden * run.byte if divides else 0

    def kept(self, run: Execution) -> int:
        """Bytes of scores, weights and indexes that are kept."""
        settings, tokens = self.settings, self.tokens(run)
        summed = settings.score == "topk_softmax" or (settings.normalise and settings.top_k > 1)
        # Scores, or the logits of which some are chosen; both where a loss needs the other one, too.
        other = settings.aux_loss if settings.score == "topk_softmax" else settings.z_loss
        matrices = 1 + (other > 0)
        scores = tokens * settings.experts * matrices * run.wide
        pairs = tokens * settings.top_k * (_INDEX + (run.wide if summed else 0))
        return scores + pairs + self._route(run) + self.rows(run) * run.wide

    def _route(self, run: Execution) -> int:
        """Bytes of the indexes by which rows are sent and sorted: places of pairs, whether they have one, and
        pairs of rows."""
        slices, ranks, rows = run.expert_tensor, run.expert * run.expert_tensor, self.rows(run)
        pairs = self.tokens(run) * self.settings.top_k
        if ranks == 1:
            return pairs * 2 * _INDEX
        if self.dispatcher(ranks, slices, run.exact) == "all_gather":
            return ranks * pairs * (_INDEX + 1) + rows * _INDEX
        return slices * pairs * (2 * _INDEX + 1) + rows * 2 * _INDEX

    def scattering(self, run: Execution) -> int:
        """Bytes while rows are brought to their experts: as they are sent, as they arrive, and sorted; or the
        tokens of all ranks, and rows."""
        row, ranks = self.layer.hidden * run.byte, run.expert * run.expert_tensor
        rows, tokens = self.rows(run) * row, self.tokens(run) * row
        if ranks == 1:
            return rows
        if self.dispatcher(ranks, run.expert_tensor, run.exact) == "all_gather":
            return ranks * tokens + rows
        return 3 * rows

    def collecting(self, run: Execution) -> int:
        """Bytes while rows are brought back and added up, beside these: as they are sent and as they arrive,
        or the sums of the tokens of all ranks; and the result."""
        row, ranks = self.layer.hidden * run.byte, run.expert * run.expert_tensor
        rows, tokens = self.rows(run) * row, self.tokens(run) * row
        if ranks == 1:
            return tokens
        if self.dispatcher(ranks, run.expert_tensor, run.exact) == "all_gather":
            received = ranks * tokens if run.cpu else 0
            return ranks * tokens + received + tokens
        return max(2 * rows, rows + tokens)


def narrow_product(run: Execution, tokens: int, hidden: int, features: int, frozen: bool) -> Operations:
    """A product of a few outputs, of values that are widened for the backward pass."""
    widened = Pass("B", "copy", tokens * hidden * (run.byte + run.wide))
    backward: list[Operation] = [Product("B", tokens, hidden, features, wide=True), widened]
    if not frozen:
        backward += [widened, Product("W", features, hidden, tokens, wide=True)]
    return Operations([Product("F", tokens, features, hidden)], backward)


def _backward(operations: list[Operation]) -> list[Operation]:
    """Operations of the forward pass that the backward pass has, too."""
    return [operation._replace(action="B") for operation in operations]
