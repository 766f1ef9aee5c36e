"""What the feed-forward layer holds, multiplies, keeps, needs and sends. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hexad.parallel.inventory import Collective, Execution, Moment, Parameter, Product
from hexad.parallel.tensor.linear_inventory import LinearSpec, LoraSpec


@dataclass(frozen=True)
class FeedForwardSpec:
    """SwiGLU, or GELU without a gate.

    Attributes:
        name: of the module, from the stage's root.
        unit: see :class:`~hexad.parallel.inventory.Weight`.
        hidden: width of the residual stream.
        width: inner features.
        gated: SwiGLU, with a gate beside the inner projection.
        bias: biases of both projections.
        sequence: activations outside are divided over tokens.
        std, out_std: standard deviations of the initial weights.
        lora: the kind of both projections' adapters.
        frozen: names of the weights that are not trained.
        adapted: names of the projections that have an adapter.
    """

    name: str
    unit: str
    hidden: int
    width: int
    gated: bool
    bias: bool
    sequence: bool
    std: float
    out_std: float
    lora: LoraSpec | None = None
    frozen: frozenset[str] = frozenset()
    adapted: frozenset[str] = frozenset()

    @property
    def inner(self) -> LinearSpec:
        """The projection to the inner width, fused with the gate's."""
        parts = ("gate", "up") if self.gated else ("up",)
        outputs = {f"{self.name}.{part}": self.width for part in parts}
        name = f"{self.name}.inner"
        linear = LinearSpec(name, self.hidden, outputs, False, self.sequence, self.bias, self.std, self.unit)
        return replace(linear, frozen=self.frozen, lora=self.lora, adapted=self.adapted)

    @property
    def down(self) -> LinearSpec:
        """The projection back into the residual stream."""
        name = f"{self.name}.down"
        outputs = {name: self.hidden}
        linear = LinearSpec(
            name, self.width, outputs, True, self.sequence, self.bias, self.out_std, self.unit
        )
        return replace(linear, frozen=self.frozen, lora=self.lora, adapted=self.adapted)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """In the order of the forward pass."""
        return self.inner, self.down

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In the order of the module."""
        return tuple(each for linear in self.linears for each in linear.parameters)

    def products(self, run: Execution) -> list[Product]:
        """Of both projections."""
        return [each for linear in self.linears for each in linear.products(run)]

    def sent(self, run: Execution, split: bool) -> list[Collective]:
        """What moves over the tensor axis."""
        return [each for linear in self.linears for each in linear.sent(run, split)]

    def kept(self, run: Execution, selective: bool) -> int:
        """Bytes, its input left out: the inner projection's output; the activated one unless recomputed."""
        activated = run.whole(self.width // run.tensor)
        kept = activated * ((2 if self.gated else 1) + (0 if selective or not self.down.trained else 1))
        return kept + sum(linear.kept(run) for linear in self.linears)

    def operands(self, run: Execution) -> int:
        """Bytes held from ``B`` to ``W``."""
        return sum(linear.operands(run) for linear in self.linears)

    def forward(self, run: Execution) -> int:
        """Bytes needed in the forward pass, above what is kept. In 8 bits the last product has copies of its
        operand and of its weight, which has passed through a scaled copy in 16."""
        activated = run.whole(self.width // run.tensor)
        weight = self.hidden * self.width // run.tensor
        copies = activated // 2 + (2 if run.rounded_once else 3) * weight if run.fp8 else 0
        return run.gathered(self.hidden) + max(activated, copies) + self.down.dropping(run)

    def backward(self, run: Execution, selective: bool, split: bool) -> list[Moment]:
        """Memory of the backward pass; with ``split`` operands of weight gradients stay, for ``W``."""
        activated, gathered = run.whole(self.width // run.tensor), run.gathered(self.hidden)
        recomputed = activated if selective and self.down.trained else 0
        product = 0 if split else self.down.weight_product(run)
        product = max(product, self.down.dropping(run))
        down = gathered + recomputed + max(self.down.eight_bits(run), activated + product)
        # The gradient of the activated values takes the place of the values, if these were kept.
        live = activated if selective or not self.down.trained else 0
        live += activated + gathered if split and self.down.trained else 0
        activation = live + activated * (3 if self.gated else 1)
        inner = self.inner.backward(run, selective, split).above(live - activated)
        return [
            Moment(down, gathered + recomputed + activated, self.down.matrices),
            inner._replace(needed=max(activation, inner.needed)),
        ]
