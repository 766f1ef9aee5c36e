"""What a mixture of experts holds, multiplies, keeps, needs and sends. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Any, ClassVar

from hexad.config.model import MoeSettings
from hexad.parallel.inventory import Execution, Moment, Parameter, Product, Weight
from hexad.parallel.tensor.linear_inventory import LinearSpec

from .block_inventory import BranchSpec, LayerTraits
from .feedforward_inventory import FeedForwardSpec


@dataclass(frozen=True)
class RouterSpec:
    """What chooses experts: a matrix, whole on every rank, and a bias for each expert.

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
class GateSpec:
    """What the shared experts' output is weighted by: a row, whole on every rank.

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

    @property
    def router(self) -> RouterSpec:
        """What chooses the experts."""
        return RouterSpec(self.layer, self.settings)

    @property
    def shared(self) -> FeedForwardSpec | None:
        """The experts that every token passes, as one layer."""
        count = self.settings.shared_experts
        if not count:
            return None
        return FeedForwardSpec(self.layer, count * self.width, self.gated, False, "ffn.shared")

    @property
    def gate(self) -> GateSpec | None:
        """What the shared experts are weighted by."""
        return GateSpec(self.layer) if self.shared is not None and self.settings.shared_gate else None

    @property
    def matrices(self) -> tuple[Parameter, ...]:
        """The stacks of the experts' matrices: gate and up side by side, and down. Dim 0 is divided over the
        ``expert`` axis, inner features over ``expert_tensor``."""
        experts, hidden, parts = self.settings.experts, self.layer.hidden, 2 if self.gated else 1
        return (
            self._stack("gate_up", (experts, parts, self.width, hidden), 2, self.layer.std),
            self._stack("down", (experts, hidden, self.width), 2, self.layer.out_std),
        )

    def _stack(self, part: str, shape: tuple[int, ...], inner: int, std: float) -> Parameter:
        name = f"{self.name}.experts.{part}"
        traits: dict[str, Any] = {"decay": True, "std": std, "unit": self.layer.unit, "grid": "expert"}
        divided = {"expert": 0, "expert_tensor": inner}
        return Parameter(name, (Weight(name, shape, divided, frozen=name in self.layer.frozen, **traits),))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the module."""
        shared = self.shared.parameters if self.shared is not None else ()
        gate = self.gate.parameters if self.gate is not None else ()
        return (*self.router.parameters, *self.matrices, *shared, *gate)

    @property
    def outputs(self) -> tuple[tuple[str, ...], ...]:
        """Names of the projections that can have adapters; those of one product together."""
        return self.shared.outputs if self.shared is not None else ()

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The shared experts' linear layers."""
        return self.shared.linears if self.shared is not None else ()

    @property
    def keeps_input(self) -> bool:
        """Whether the backward pass needs its input: the router does."""
        return True

    def dispatcher(self, ranks: int, slices: int, exact: bool) -> str:
        """How rows reach their experts: what sends less, unless it is set. In exact arithmetic each of a
        token's experts sends its result."""
        if self.settings.dispatcher != "auto" or exact:
            return "alltoall" if exact else self.settings.dispatcher
        return "all_gather" if ranks < self.settings.top_k * slices else "alltoall"

    # Products and memory

    def tokens(self, run: Execution) -> int:
        """Tokens whose experts a rank chooses."""
        return -(-run.tokens // run.tensor)

    def rows(self, run: Execution) -> int:
        """Rows of a rank's experts: as many as ``run.load`` says, up to all that could choose them."""
        tokens, top_k, ranks = self.tokens(run), self.settings.top_k, run.expert * run.expert_tensor
        even = tokens * top_k * run.expert_tensor
        most = ranks * tokens * min(top_k, self.settings.experts // run.expert)
        return min(ceil(even * run.load), most) if run.load < inf else most

    def _widths(self, run: Execution) -> tuple[int, int]:
        """Outputs of the first product of a rank's experts, and inputs of the second."""
        inner = self.width // run.expert_tensor
        return inner * (2 if self.gated else 1), inner

    def _trained(self, part: int) -> bool:
        return not self.matrices[part].frozen

    def weight_products(self, run: Execution) -> list[Product]:
        """The router's, the experts', and those of the shared ones and their gate."""
        hidden, (outputs, inner), rows = self.layer.hidden, self._widths(run), self.rows(run)
        sizes = (
            (self.tokens(run), self.settings.experts, hidden),
            (rows, outputs, hidden),
            (rows, hidden, inner),
        )
        frozen = (self.router.parameters[0].frozen, *(matrix.frozen for matrix in self.matrices))
        products = []
        for (m, n, k), fixed in zip(sizes, frozen):
            products += [Product("F", m, n, k), Product("B", m, k, n)]
            products += [] if fixed else [Product("W", n, k, m)]
        if self.gate is not None:
            tokens = run.rows
            products += [Product("F", tokens, 1, hidden), Product("B", tokens, hidden, 1)]
            products += [] if self.gate.parameters[0].frozen else [Product("W", 1, hidden, tokens)]
        return products + (self.shared.products(run) if self.shared is not None else [])

    def _divided(self, run: Execution) -> int:
        """Bytes of this rank's part of the input, where activations are whole on every tensor rank."""
        divides = run.tensor > 1 and not run.sequence
        return self.tokens(run) * self.layer.hidden * run.byte if divides else 0

    def _routed(self, run: Execution) -> int:
        """Bytes of scores, weights and indexes that are kept."""
        tokens, top_k = self.tokens(run), self.settings.top_k
        pairs = tokens * top_k
        scores = tokens * self.settings.experts * run.wide
        return scores + pairs * (3 * run.wide + 4 * 8) + self.rows(run) * run.wide

    def kept(self, run: Execution, selective: bool) -> int:
        """Bytes, its input left out."""
        (outputs, inner), rows = self._widths(run), self.rows(run)
        features = outputs + (self.layer.hidden if self._trained(0) else 0)
        features += 0 if selective or not self._trained(1) else inner
        kept = rows * features * run.byte + self._divided(run) + self._routed(run)
        return kept + (self.shared.kept(run, selective) if self.shared is not None else 0)

    def operands(self, run: Execution) -> int:
        """Bytes of operands of weight gradients, held from action ``B`` to action ``W``."""
        (outputs, inner), rows, hidden = self._widths(run), self.rows(run), self.layer.hidden
        features = (hidden + outputs) * self._trained(0) + (inner + hidden) * self._trained(1)
        router = self.tokens(run) * (self.settings.experts * run.wide)
        own = rows * features * run.byte + router + self._divided(run)
        if not self._divided(run):
            own += run.stream(hidden)  # the router's input
        return own + (self.shared.operands(run) if self.shared is not None else 0)

    def forward(self, run: Execution, selective: bool) -> int:
        """Bytes needed in the forward pass, above what is kept."""
        rows, hidden = self.rows(run), self.layer.hidden
        shared = self.shared.forward(run, selective) if self.shared is not None else 0
        return max(2 * rows * hidden * run.byte, shared)

    def repeated(self, run: Execution, selective: bool) -> int:
        """As :meth:`forward`, where the last products are left out."""
        return self.forward(run, selective)

    def backward(self, run: Execution, selective: bool, split: bool) -> list[Moment]:
        """Memory of the backward pass; with ``split`` operands of weight gradients stay, for ``W``."""
        (outputs, inner), rows, hidden = self._widths(run), self.rows(run), self.layer.hidden
        moments, live = [], 0
        if self.shared is not None:
            moments = self.shared.backward(run, selective, split)
            live = (self.shared.operands(run) if split else 0) - self.shared.kept(run, selective)
        sent, activated = rows * hidden * run.byte, rows * inner * run.byte
        recomputed = activated if selective and self._trained(1) else 0
        down = live + sent + recomputed + activated
        moments.append(Moment(down + sent, down, (self.matrices[1],)))
        live += activated - (0 if selective else activated) + (sent + activated if split else 0)
        gradient = live + rows * outputs * run.byte * 2
        live += rows * outputs * run.byte - activated
        moments.append(Moment(max(gradient, live + 2 * sent), live + sent, (self.matrices[0],)))
        live += sent
        moments.append(Moment(live + run.stream(hidden), live, (self.router.parameters[0],)))
        return moments

    def weight_moments(self, run: Execution) -> list[Moment]:
        """Memory of ``W``."""
        moments = self.shared.weight_moments(run) if self.shared is not None else []
        ours = (self.matrices[1], self.matrices[0], self.router.parameters[0])
        return [*moments, *(Moment(0, 0, (parameter,)) for parameter in ours)]
