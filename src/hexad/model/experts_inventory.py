"""The inventory of a mixture of experts: parameters, products, kept tensors, temporary memory and messages.
No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

from hexad.config.model import MoeSettings
from hexad.parallel.inventory import (
    Execution,
    Moment,
    Operation,
    Operations,
    Parameter,
    Pass,
    Product,
    Weight,
    again,
)
from hexad.parallel.tensor.linear_inventory import LinearSpec

from .block_inventory import BranchSpec, LayerTraits
from .feedforward_inventory import FeedForwardSpec
from .recompute_inventory import NOTHING, RecomputedParts
from .routing_inventory import RoutingSpec, narrow_product

ACTIVATED = 1 << 18
"""Elements of a block of rows, of which a host's processor keeps what functions make of it in its cache."""


@dataclass(frozen=True)
class GateSpec:
    """The gate by which the shared experts' output is weighted: a row, whole on every rank.

    Attributes:
        layer: what it has in common with the layer's branches.
    """

    layer: LayerTraits

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The row."""
        layer, name = self.layer, f"{self.layer.prefix}ffn.shared_gate.weight"
        partial = frozenset({"tensor"} if layer.sequence else ())
        traits: dict[str, Any] = {"decay": True, "std": layer.std, "unit": layer.unit}
        weight = Weight(name, (1, layer.hidden), partial=partial, frozen=name in layer.frozen, **traits)
        return (Parameter(name, (weight,)),)


class RowBytes(NamedTuple):
    """Bytes of what a rank's experts compute with.

    Attributes:
        rows: their input, or their output.
        outputs, inner: outputs of the first product, and inputs of the second.
        tokens: of the rank, from which rows are made, or of their sums.
    """

    rows: int
    outputs: int
    inner: int
    tokens: int


def of_stack(name: str) -> bool:
    """Whether a name is that of a stack of experts' matrices, or of its adapters."""
    return ".ffn.experts." in f".{name}"


@dataclass(frozen=True)
class StackSpec:
    """A stack of the experts' matrices, and its adapters: a product ``B A`` of low rank for each expert.

    Attributes:
        name: of the stack, from the stage's root.
        shape: ``[experts, ..., in]``; the dims between are the outputs.
        inner: the dim of the inner features, divided over ``expert_tensor``; dim 0 is over ``expert``.
        std: standard deviation of the initial values.
        layer: what it has in common with the layer's branches.
    """

    name: str
    shape: tuple[int, ...]
    inner: int
    std: float
    layer: LayerTraits

    @property
    def matrix(self) -> Parameter:
        """The stack itself."""
        frozen, divided = self.name in self.layer.frozen, {"expert": 0, "expert_tensor": self.inner}
        weight = self._weight(self.name, self.shape, self.std, divided=divided, frozen=frozen)
        return Parameter(self.name, (weight,))

    @property
    def rank(self) -> int:
        """The rank of its adapters; 0 without."""
        lora = self.layer.lora
        return lora.rank if lora is not None and self.name in self.layer.adapted else 0

    @property
    def adapters(self) -> tuple[Parameter, ...]:
        """``A`` of every expert and ``B`` of every expert; ``B`` begins with zeros."""
        if not self.rank:
            return ()
        a, b = (self.shape[0], self.rank, self.shape[-1]), (*self.shape[:-1], self.rank)
        # One of both is divided as the matrix, the other whole, with a part of its gradient on each rank.
        divided: dict[str, Any] = {"divided": {"expert": 0, "expert_tensor": self.inner}}
        whole: dict[str, Any] = {"divided": {"expert": 0}, "partial": frozenset({"expert_tensor"})}
        sides = (divided, whole) if self.inner == len(self.shape) - 1 else (whole, divided)
        weights = (
            self._weight(f"{self.name}.lora_a", a, (3 * a[-1]) ** -0.5, adapter=True, **sides[0]),
            self._weight(f"{self.name}.lora_b", b, 0.0, adapter=True, **sides[1]),
        )
        module = self.name.rpartition(".")[0]
        return tuple(Parameter(f"{module}.{name}", (w,)) for name, w in zip(self.adapter_names, weights))

    @property
    def adapter_names(self) -> tuple[str, str]:
        """The attributes that hold ``A`` and ``B``."""
        part = self.name.rpartition(".")[2]
        return f"lora_a_{part}", f"lora_b_{part}"

    @property
    def trained(self) -> bool:
        """Whether its input is kept, for a weight's gradient."""
        return bool(self.rank) or not self.matrix.frozen

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Stack and adapters."""
        return self.matrix, *self.adapters

    def operations(
        self, rows: int, outputs: int, inputs: int, experts: int, eight: bool = False
    ) -> Operations:
        """Products of ``rows`` rows of so many experts, with features on a rank; ``eight``: in 8 bits."""
        product = partial(Product, groups=experts, eight=eight)
        forward: list[Operation] = [product("F", rows, outputs, inputs)]
        backward: list[Operation] = [product("B", rows, inputs, outputs)]
        backward += [] if self.matrix.frozen else [product("W", outputs, inputs, rows)]
        for m, n in ((self.rank, inputs), (outputs, self.rank)) if self.rank else ():
            forward.append(Product("F", rows, m, n, groups=experts))
            backward += [
                Product("B", rows, n, m, groups=experts),
                Product("W", m, n, rows, groups=experts),
            ]
        return Operations(forward, backward, len(forward))

    def _weight(self, name: str, shape: tuple[int, ...], std: float, **traits: Any) -> Weight:
        return Weight(name, shape, grid="expert", decay=True, std=std, unit=self.layer.unit, **traits)


@dataclass(frozen=True)
class ExpertsSpec(BranchSpec):
    """A mixture of experts. Sizes are those of an even load.

    Attributes:
        layer: what it has in common with the layer's other branches.
        settings: of the experts; ``ffn_hidden`` is a number.
        gated: SwiGLU, with a gate beside the inner projection.
    """

    kind: ClassVar[str] = "experts"

    layer: LayerTraits
    settings: MoeSettings
    gated: bool

    @property
    def name(self) -> str:
        """The module's name, from the stage's root."""
        return f"{self.layer.prefix}ffn"

    @property
    def width(self) -> int:
        """Inner features of an expert."""
        return int(self.settings.ffn_hidden)

    @property
    def losses(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the losses that it adds."""
        settings = self.settings
        named = {"balance": settings.aux_loss, "z": settings.z_loss}
        return tuple(name for name, coefficient in named.items() if coefficient)

    @cached_property
    def routing(self) -> RoutingSpec:
        """The choice of experts, and the way of rows to them."""
        return RoutingSpec(self.layer, self.settings)

    @cached_property
    def shared(self) -> FeedForwardSpec | None:
        """The experts that every token passes, as one layer."""
        count = self.settings.shared_experts
        if not count:
            return None
        return FeedForwardSpec(self.layer, count * self.width, self.gated, False, "ffn.shared")

    @property
    def gate(self) -> GateSpec | None:
        """The gate of the shared experts."""
        return GateSpec(self.layer) if self.shared is not None and self.settings.shared_gate else None

    @cached_property
    def stacks(self) -> tuple[StackSpec, StackSpec]:
        """The experts' matrices: gate and up side by side, and down."""
        experts, hidden, parts = self.settings.experts, self.layer.hidden, 2 if self.gated else 1
        name, layer = f"{self.name}.experts", self.layer
        return (
            StackSpec(f"{name}.gate_up", (experts, parts, self.width, hidden), 2, layer.std, layer),
            StackSpec(f"{name}.down", (experts, hidden, self.width), 2, layer.out_std, layer),
        )

    @cached_property
    def matrices(self) -> tuple[Parameter, ...]:
        """The stacks, and their adapters."""
        return tuple(parameter for stack in self.stacks for parameter in stack.parameters)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the module."""
        shared = self.shared.parameters if self.shared is not None else ()
        gate = self.gate.parameters if self.gate is not None else ()
        return (*self.routing.router.parameters, *self.matrices, *shared, *gate)

    @property
    def outputs(self) -> tuple[tuple[str, ...], ...]:
        """Names of the projections that can have adapters; those of one product together."""
        shared = self.shared.outputs if self.shared is not None else ()
        return (*shared, *((stack.name,) for stack in self.stacks))

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The shared experts' linear layers."""
        return self.shared.linears if self.shared is not None else ()

    def keeps_input(self, recomputed: RecomputedParts) -> bool:
        """Whether the backward pass needs its input: the router does."""
        return True

    # Products and memory

    def _widths(self, run: Execution) -> tuple[int, int]:
        """Outputs of the first product of a rank's experts, and inputs of the second."""
        inner = self.width // run.expert_tensor
        return inner * (2 if self.gated else 1), inner

    def weight_products(self, run: Execution) -> list[Product]:
        """The router's, the experts', and those of the shared ones and their gate."""
        return self.products(run)

    def operations(
        self, run: Execution, recomputed: RecomputedParts = NOTHING, split: bool = False, reached: bool = True
    ) -> Operations:
        """The router, the rows' way to their experts, these, and the way back; beside them what every token
        passes."""
        hidden, (outputs, inner), rows = self.layer.hidden, self._widths(run), self.routing.rows(run)
        experts, (first, second) = self.settings.experts // run.expert, self.stacks
        send, back = self.routing.moves(run, reached)
        activated = Pass("F", "activation", rows * (outputs + inner) * run.byte)
        gradient: list[Operation] = [Pass("B", "activation", rows * (2 * outputs + inner) * run.byte)]
        before = self.routing.operations(run, reached).then(send)
        # Products leave out what is empty in buffers of a static size.
        filled = min(rows, self.routing.tokens(run) * self.settings.top_k * run.expert_tensor)
        before = before.then(first.operations(filled, outputs, hidden, experts, run.fp8_experts))
        before = before.then(Operations([activated], gradient))
        after = second.operations(filled, hidden, inner, experts, run.fp8_experts)
        after = Operations(after.forward + back.forward, back.backward + after.backward)
        ends = len(after.forward)
        if "moe_act" in recomputed and second.trained:
            after.backward.append(again(activated))
        if self.shared is not None:
            added = Pass("F", "sum", 3 * run.stream(hidden))
            shared = self.shared.operations(run, recomputed, split, reached)
            if self.gate is not None:
                shared = shared.then(self._gated(run))
            ends += 1 + shared.last
            # What makes the result comes last in the forward pass: it is not repeated.
            products = shared.forward[len(shared.forward) - shared.last :]
            before = Operations(shared.forward[: len(shared.forward) - shared.last], shared.backward).then(
                before
            )
            after = Operations(
                [*products, *after.forward, added], [added._replace(action="B"), *after.backward]
            )
        return before.then(after)._replace(last=ends)

    def _gated(self, run: Execution) -> Operations:
        """The gate of the shared experts, and what it multiplies."""
        assert self.gate is not None
        stream = run.stream(self.layer.hidden)
        scores = narrow_product(run, run.rows, self.layer.hidden, 1, self.gate.parameters[0].frozen)
        backward: list[Operation] = [Pass("B", "activation", 5 * stream, 2)]
        return scores.then(Operations([Pass("F", "activation", 2 * stream)], backward))

    def kept(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes, its input left out."""
        (outputs, inner), rows = self._widths(run), self.routing.rows(run)
        first, second = self.stacks
        features = outputs + (self.layer.hidden if first.trained else 0) + first.rank + second.rank
        features += 0 if "moe_act" in recomputed or not second.trained else inner
        kept = rows * features * run.byte + self.routing.divided(run) + self.routing.kept(run)
        return kept + (self.shared.kept(run, recomputed) if self.shared is not None else 0)

    def operands(self, run: Execution) -> int:
        """Bytes of operands of weight gradients, held from action ``B`` to action ``W``."""
        (outputs, inner), rows, hidden = self._widths(run), self.routing.rows(run), self.layer.hidden
        first, second = self.stacks
        features = (hidden + outputs) * first.trained + (inner + hidden) * second.trained
        features += 2 * (first.rank + second.rank)
        router = self.routing.tokens(run) * (self.settings.experts * run.wide)
        operands = rows * features * run.byte + router + self.routing.divided(run)
        if not self.routing.divided(run):
            operands += run.stream(hidden)  # the router's input
        return operands + (self.shared.operands(run) if self.shared is not None else 0)

    def forward(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in the forward pass, above what is kept: of the experts, then of the shared ones."""
        sizes = self._sizes(run)
        back = sizes.rows + self.routing.collecting(run)
        back = max(back, 3 * sizes.rows) if self.stacks[1].rank else back
        alive = sizes.rows + sizes.outputs + sizes.inner + back
        return self._alone(run, recomputed, alive)

    def repeated(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed where the forward pass is repeated without the last products, above what is kept: the
        results of these have places that nothing fills."""
        sizes = self._sizes(run)
        alive = 2 * sizes.rows + sizes.outputs + sizes.inner + sizes.tokens
        return self._alone(run, recomputed, alive)

    def _alone(self, run: Execution, recomputed: RecomputedParts, alive: int) -> int:
        """Bytes above what is kept, given those of rows that are alive when the last product is sent back."""
        sizes, stream = self._sizes(run), run.stream(self.layer.hidden)
        if self.stacks[0].rank:  # its product, that of its adapters, and the sum
            alive = max(alive, sizes.rows + 3 * sizes.outputs)
        alive = max(alive, self.routing.scattering(run))
        above = alive - self._rows_kept(run, recomputed)
        if self.shared is None:
            return above
        # The experts' result, and what the shared ones add to it; with a gate, its products too.
        added = max(self.shared.forward(run, recomputed), (3 if self.gate is not None else 2) * stream)
        return max(above - self.shared.kept(run, recomputed), stream + added)

    def _sizes(self, run: Execution) -> RowBytes:
        """Bytes of this rank's rows before, between and after the products, and of its tokens."""
        (outputs, inner), row = self._widths(run), self.routing.rows(run) * run.byte
        hidden = self.layer.hidden
        return RowBytes(
            row * hidden, row * outputs, row * inner, self.routing.tokens(run) * hidden * run.byte
        )

    def _rows_kept(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes of rows that are kept."""
        (first, second), sizes = self.stacks, self._sizes(run)
        adapters = self.routing.rows(run) * (first.rank + second.rank) * run.byte
        activated = 0 if "moe_act" in recomputed or not second.trained else sizes.inner
        return sizes.outputs + (sizes.rows if first.trained else 0) + activated + adapters

    def _activating(self, run: Execution) -> int:
        """Bytes that the activation's backward pass needs for a moment; on a CPU for some rows at a time."""
        sizes, (outputs, inner) = self._sizes(run), self._widths(run)
        if run.compiled:
            return 0
        return 2 * min(sizes.inner, ACTIVATED // outputs * inner * run.byte) if run.cpu else sizes.outputs

    def backward(self, run: Execution, recomputed: RecomputedParts, split: bool) -> list[Moment]:
        """Memory of the backward pass; with ``split`` operands of weight gradients stay, for ``W``."""
        moments, live, stream = [], 0, run.stream(self.layer.hidden)
        (first, second), sizes = self.stacks, self._sizes(run)
        if self.shared is not None:
            moments = self.shared.backward(run, recomputed, split)
            live = (self.shared.operands(run) if split else 0) - self.shared.kept(run, recomputed) + stream
        again = sizes.inner if "moe_act" in recomputed and second.trained else 0
        kept = 0 if again or not second.trained else sizes.inner
        # Of adapters: the scaled gradient, and gradients of the same rows by both ways.
        more = sizes.rows + sizes.inner if second.rank else 0
        down = live + sizes.rows + again + sizes.inner
        needed = max(live + self.routing.scattering(run), down + more)
        moments.append(Moment(needed, down, second.parameters))
        live += sizes.inner - kept + (sizes.rows + sizes.inner if split and second.trained else 0)
        activation = live + sizes.outputs + self._activating(run)
        live -= sizes.inner  # the gradient of the outputs takes the place of these
        up = live + sizes.rows + (sizes.outputs + sizes.rows if first.rank else 0)
        if not (split and first.trained):
            live -= sizes.outputs + (sizes.rows if first.trained else 0)
        back = live + sizes.rows + self.routing.collecting(run)
        moments.append(Moment(max(activation, up, back), up, first.parameters))
        live += sizes.tokens
        moments.append(Moment(live + stream, live, (self.routing.router.parameters[0],)))
        return moments

    def weight_moments(self, run: Execution) -> list[Moment]:
        """Memory of ``W``."""
        moments = self.shared.weight_moments(run) if self.shared is not None else []
        first, second = self.stacks
        ours = (*second.parameters, *first.parameters, self.routing.router.parameters[0])
        return [*moments, *(Moment(0, 0, (parameter,)) for parameter in ours)]
