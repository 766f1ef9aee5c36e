"""The inventory of the feed-forward layer: parameters, products, kept tensors, temporary memory and messages.
No torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from hexad.parallel.inventory import Execution, Moment, Operation, Operations, Pass, again
from hexad.parallel.tensor.linear_inventory import LinearSpec

from .block_inventory import BranchSpec, LayerTraits
from .recompute_inventory import NOTHING, RecomputedParts


@dataclass(frozen=True)
class FeedForwardSpec(BranchSpec):
    """SwiGLU, or GELU without a gate.

    Attributes:
        layer: what it has in common with the layer's other branches.
        width: inner features.
        gated: SwiGLU, with a gate beside the inner projection.
        bias: biases of both projections.
        part: its name in the layer.
    """

    kind: ClassVar[str] = "feed_forward"

    layer: LayerTraits
    width: int
    gated: bool
    bias: bool
    part: str = "ffn"

    @property
    def name(self) -> str:
        """The module's name, from the stage's root."""
        return f"{self.layer.prefix}{self.part}"

    @cached_property
    def inner(self) -> LinearSpec:
        """The projection to the inner width, fused with the gate's."""
        parts = ("gate", "up") if self.gated else ("up",)
        outputs = {f"{self.name}.{part}": self.width for part in parts}
        return self.layer.projection(f"{self.name}.inner", outputs, self.bias)

    @cached_property
    def down(self) -> LinearSpec:
        """The projection back into the residual stream."""
        return self.layer.projection_back(f"{self.name}.down", self.width, self.bias)

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linear layers in the order of the forward pass."""
        return self.inner, self.down

    def operations(
        self, run: Execution, recomputed: RecomputedParts = NOTHING, split: bool = False, reached: bool = True
    ) -> Operations:
        """Both projections, and the activation between them: of inner values, gate and gradients."""
        activated = run.whole(self.width // run.tensor)
        inner = 2 if self.gated else 1
        forward = Pass("F", "activation", (inner + 1) * activated)
        backward: list[Operation] = [Pass("B", "activation", (2 * inner + 1) * activated)]
        total = self.inner.operations(run, split, reached)
        reached = reached or self.inner.trains
        total = total.then(Operations([forward], backward).reached(reached))
        total = total.then(self.down.operations(run, split, reached))
        if "activations" in recomputed and self.down.trained:
            total.backward.insert(0, again(forward))
        return total

    def kept(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes, its input left out: the inner projection's output; the activated one unless recomputed."""
        activated = run.whole(self.width // run.tensor)
        kept = activated * (
            (2 if self.gated else 1) + (0 if "activations" in recomputed or not self.down.trained else 1)
        )
        return kept + sum(linear.kept(run) for linear in self.linears)

    def forward(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in the forward pass, above what is kept."""
        activated = run.whole(self.width // run.tensor)
        if run.exact:
            alive = activated if "activations" in recomputed or not self.down.trained else 0
            return max(self.repeated(run, recomputed), alive + self.down.products_forward(run))
        product = max(activated, self.down.forward_copies(run))
        return run.gathered(self.layer.hidden) + product + self.down.dropping(run)

    def activation(self, run: Execution) -> int:
        """Bytes that exact arithmetic needs for the activated values."""
        return run.function(run.tokens * self.width // run.tensor)

    def repeated(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in a forward pass without the last product."""
        activated = run.whole(self.width // run.tensor)
        if "activations" in recomputed or not self.down.trained:
            return max(self.inner.products_forward(run), activated + self.activation(run))
        return max(self.inner.products_forward(run) - activated, self.activation(run))

    def backward(self, run: Execution, recomputed: RecomputedParts, split: bool) -> list[Moment]:
        """Memory of the backward pass; with ``split`` operands of weight gradients stay, for ``W``."""
        activated, gathered = run.whole(self.width // run.tensor), run.gathered(self.layer.hidden)
        again = activated if "activations" in recomputed and self.down.trained else 0
        making = self.activation(run) if again else 0
        deferred = split and not self.down.set_aside(run, split)
        product = max(0 if deferred else self.down.weight_product(run), self.down.dropping(run))
        down = gathered + again + max(self.down.input_gradient(run), activated + product, making)
        # The gradient of the activated values takes the place of the values, if these were kept.
        live = activated if "activations" in recomputed or not self.down.trained else 0
        live += activated + gathered if deferred and self.down.trained else 0
        activation = live + activated * ((3 if self.gated else 1) + (1 if run.exact else 0))
        inner = self.inner.backward(run, "norms" in recomputed, split).above(live - activated)
        return [
            Moment(down, gathered + again + activated, self.down.matrices, self.down.aside(run, split)),
            inner._replace(needed=max(activation, inner.needed)),
        ]
