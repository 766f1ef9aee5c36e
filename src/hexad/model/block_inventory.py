"""The inventory of one layer: parameters, products, kept tensors, temporary memory and messages. No torch."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hexad.parallel.inventory import Execution, Kept, Moment, Operations, Parameter, Pass, Product
from hexad.parallel.tensor.linear_inventory import LinearSpec, LoraSpec

from .norms_inventory import NormSpec
from .recompute_inventory import NOTHING, RecomputedParts


@dataclass(frozen=True)
class LayerTraits:
    """Properties that the branches of a layer share.

    Attributes:
        prefix: of their names.
        unit: of their weights, see :class:`~hexad.parallel.inventory.Weight`.
        hidden: width of the residual stream.
        sequence: activations outside are divided over tokens.
        std: standard deviation of the initial weights.
        out_std: the same of those that make a branch's result.
        lora: the kind of adapters.
        frozen: names of the weights that are not trained.
        adapted: names of the projections that have an adapter.
    """

    prefix: str
    unit: str
    hidden: int
    sequence: bool
    std: float
    out_std: float
    lora: LoraSpec | None = None
    frozen: frozenset[str] = frozenset()
    adapted: frozenset[str] = frozenset()

    def projection(self, name: str, outputs: Mapping[str, int], bias: bool) -> LinearSpec:
        """The product of a branch's input with the fused weights of ``outputs``."""
        return LinearSpec(name, self.hidden, outputs, False, bias=bias, std=self.std, **self._shared)

    def projection_back(self, name: str, inputs: int, bias: bool) -> LinearSpec:
        """The product that makes a branch's result."""
        outputs = {name: self.hidden}
        return LinearSpec(name, inputs, outputs, True, bias=bias, std=self.out_std, **self._shared)

    @property
    def _shared(self) -> dict[str, Any]:
        names = ("sequence", "unit", "frozen", "lora", "adapted")
        return {name: getattr(self, name) for name in names}


class BranchSpec(ABC):
    """The inventory of a layer's branch: a module from the normalised residual stream to what is added to it.

    By default all is that of its linear layers, the first of which multiplies the input, the last of which
    makes the result. A branch that is made of something else declares its own.

    Attributes:
        layer: what it has in common with the layer's other branches.
        kind: of the bytes it keeps, see :data:`~hexad.parallel.inventory.Kept`.
        losses: names of the auxiliary losses it adds, see :mod:`hexad.model.auxiliary`.
    """

    layer: LayerTraits
    kind: ClassVar[str]
    losses: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def name(self) -> str:
        """The module's name, from the stage's root."""

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Its linear layers, in the order of the forward pass."""
        return ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, in the order of the module."""
        return tuple(parameter for linear in self.linears for parameter in linear.parameters)

    @property
    def outputs(self) -> tuple[tuple[str, ...], ...]:
        """Names of the projections that can have adapters; those of one product together."""
        return tuple(tuple(linear.outputs) for linear in self.linears)

    def keeps_input(self, recomputed: RecomputedParts) -> bool:
        """Whether the backward pass needs its input."""
        return self.linears[0].trained

    @property
    def trains(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(not parameter.frozen for parameter in self.parameters)

    def operations(
        self, run: Execution, recomputed: RecomputedParts = NOTHING, split: bool = False, reached: bool = True
    ) -> Operations:
        """The operations of a rank for a microbatch; with ``split`` weight gradients are actions of their
        own; ``reached``: its input needs a gradient."""
        operations = Operations([], [])
        for linear in self.linears:
            operations = operations.then(linear.operations(run, split, reached))
            reached = reached or linear.trains
        return operations

    def products(self, run: Execution) -> list[Product]:
        """All matrix products of a microbatch."""
        return self.operations(run).products

    def weight_products(self, run: Execution) -> list[Product]:
        """The products with weights: without those of attention."""
        return [product for linear in self.linears for product in linear.products(run)]

    def cached(self, tensor: int) -> int:
        """Elements of a token that one of so many tensor ranks keeps between forward passes (generation)."""
        return 0

    def cached_heads(self, tensor: int) -> int:
        """Numbers of a token besides, where its values are kept relative to one (``precision.exact``)."""
        return 0

    def cached_flops(self, length: int, tensor: int) -> int:
        """FLOPs on one of so many tensor ranks of a token's attention over ``length`` cached ones."""
        return 0

    @abstractmethod
    def kept(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes from forward to backward, its input left out; ``recomputed``: parts that are not kept."""

    def operands(self, run: Execution) -> int:
        """Bytes of operands of weight gradients, held from action ``B`` to action ``W``."""
        return sum(linear.deferred(run) for linear in self.linears)

    def forward(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in the forward pass, above what is kept; 0 where a later branch needs more."""
        return max((linear.products_forward(run) for linear in self.linears), default=0)

    def repeated(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in a forward pass without the last product, whose result is not used."""
        return max((linear.products_forward(run) for linear in self.linears[:-1]), default=0)

    @abstractmethod
    def backward(self, run: Execution, recomputed: RecomputedParts, split: bool) -> list[Moment]:
        """Memory of the backward pass; with ``split`` operands of weight gradients stay, for ``W``."""

    def weight_moments(self, run: Execution) -> list[Moment]:
        """Memory of ``W``: the gathered input and the next one's, and the gradient before it is added in
        another format, while operands are given up one after the other."""
        moments, released = [], 0
        for linear in reversed([linear for linear in self.linears if not linear.set_aside(run, True)]):
            gathered = run.gathered(linear.features if linear.row else linear.inputs)
            product = linear.weight_product(run)
            moments.append(Moment(gathered + product - released, gathered - released, linear.matrices))
            released += linear.deferred(run)
        return moments

    def rounded(self, run: Execution) -> int:
        """Bytes of the weights that are kept in 8 bits."""
        return sum(linear.rounded(run) for linear in self.linears)


@dataclass(frozen=True)
class BlockSpec:
    """One layer.

    Attributes:
        branches: each with the norm before it, in the order in which they are added to the residual stream.
    """

    branches: tuple[tuple[NormSpec, BranchSpec], ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.branches)

    def __hash__(self) -> int:
        """The FLOPs of the branches, computed once: layers are counted by kind."""
        return self._hash

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.branches[0][0].width

    @cached_property
    def parts(self) -> tuple[BranchSpec, ...]:
        """The branches without their norms."""
        return tuple(branch for _, branch in self.branches)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the module."""
        pairs = ((*norm.parameters, *branch.parameters) for norm, branch in self.branches)
        return tuple(parameter for pair in pairs for parameter in pair)

    @property
    def outputs(self) -> tuple[tuple[str, ...], ...]:
        """Names of the projections that can have adapters; those of one product together."""
        return tuple(names for branch in self.parts for names in branch.outputs)

    def kind_of(self, parameter: Parameter) -> str:
        """The kind of the branch that has the parameter."""
        return next(branch.kind for branch in self.parts if parameter in branch.parameters)

    def products(self, run: Execution) -> list[Product]:
        """All matrix products of a microbatch."""
        return self.operations(run).products

    def operations(
        self, run: Execution, recomputed: RecomputedParts = NOTHING, split: bool = False, reached: bool = True
    ) -> Operations:
        """The operations of a rank for a microbatch; with ``split`` weight gradients are actions of their
        own; ``reached``: its input needs a gradient. The sum with a branch and the next norm are one function
        where pointwise functions are compiled."""
        stream, total = run.stream(self.hidden), Operations([], [])
        for number, (norm, branch) in enumerate(self.branches):
            reached = reached or norm.trains
            normed = norm.operations(run, stream, "norms" in recomputed, added=number > 0)
            total = total.then(normed.reached(reached))
            computed = branch.operations(run, recomputed, split, reached)
            reached = reached or branch.trains
            total = total.then(computed.reached(reached))
        # The sum with the last branch; in the backward pass, that of the first norm's gradient and the
        # stream's.
        sum_ = Pass("F", "sum", 3 * stream)
        forward, last = [*total.forward, sum_], total.last + 1
        backward = [*total.backward, sum_._replace(action="B")]
        if "layer" in recomputed:
            return Operations(forward, Operations(forward, [], last).repeated() + backward, last)
        return Operations(forward, backward, last)

    def cached(self, tensor: int) -> int:
        """Elements of a token that a rank keeps between forward passes (generation)."""
        return sum(branch.cached(tensor) for branch in self.parts)

    def cached_heads(self, tensor: int) -> int:
        """Numbers of a token besides, in ``precision.exact``."""
        return sum(branch.cached_heads(tensor) for branch in self.parts)

    def cached_flops(self, length: int, tensor: int) -> int:
        """FLOPs of a token's attention over ``length`` cached ones on a rank."""
        return sum(branch.cached_flops(length, tensor) for branch in self.parts)

    def kept(self, run: Execution, recomputed: RecomputedParts) -> Kept:
        """Bytes from forward to backward, the layer's input left out and its output counted."""
        stream = run.stream(self.hidden)
        if "layer" in recomputed:
            return Counter(residual=stream)
        kept = Counter(residual=len(self.branches) * stream, norm=0)
        for norm, branch in self.branches:
            kept["norm"] += norm.statistics(run, run.rows) + self._normed(run, branch, recomputed)
            kept[branch.kind] += branch.kept(run, recomputed)
        return kept

    def forward(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in the forward pass, above what is kept. In full recompute the backward pass, which
        repeats it, needs more."""
        return self._most(run, recomputed, [branch.forward(run, recomputed) for branch in self.parts])

    def _most(self, run: Execution, recomputed: RecomputedParts, needed: list[int]) -> int:
        """Bytes above what the layer keeps, given those of each branch above what it keeps itself."""
        stream, later, most = run.stream(self.hidden), 0, []
        for (_, branch), branch_bytes in zip(reversed(self.branches), reversed(needed)):
            normed = self._normed(run, branch, recomputed)
            unkept = stream - normed if run.exact else 0  # the branch's input
            most.append(branch_bytes - later + unkept)
            later += branch.kept(run, recomputed) + normed + stream
        return max(most)

    def forward_alone(self, run: Execution) -> int:
        """Bytes needed in a forward pass from which nothing is kept, beside the output: a branch's values and
        its input, as it is and normalised; from the second branch on also the sums before."""
        stream = run.stream(self.hidden)
        return max(
            2 * (number + 1) * stream + branch.kept(run, NOTHING) + branch.forward(run, NOTHING)
            for number, branch in enumerate(self.parts)
        )

    def _normed(self, run: Execution, branch: BranchSpec, recomputed: RecomputedParts) -> int:
        """Bytes kept of a norm's output, the input of ``branch``."""
        return run.stream(self.hidden) if branch.keeps_input(recomputed) and "norms" not in recomputed else 0

    def operands(self, run: Execution) -> Kept:
        """Bytes held from ``B`` to ``W``: inputs and output gradients of products with trained weights."""
        total = Counter[str]()
        for branch in self.parts:
            total[branch.kind] += branch.operands(run)
        return total

    def backward(self, run: Execution, recomputed: RecomputedParts, split: bool) -> list[Moment]:
        """Memory of the backward pass, beside the gradient of the layer's output; with ``split`` operands of
        weight gradients stay, for ``W``."""
        stream, again = run.stream(self.hidden), 0
        if "layer" in recomputed:
            again = self.kept(run, NOTHING).total() - stream
        # After recomputation: the last product's place, and its sum with the stream.
        moments = [Moment(again + 2 * stream, again)] if again else []
        if again and run.exact:
            branches = [branch.forward(run, NOTHING) for branch in self.parts]
            branches[-1] = self.parts[-1].repeated(run, NOTHING)
            moments.append(Moment(again + self._most(run, NOTHING, branches), again))
        live = again
        for norm, branch in reversed(self.branches):
            moments += [moment.above(live) for moment in branch.backward(run, recomputed, split)]
            live += (branch.operands(run) if split else 0) - branch.kept(run, recomputed)
            moments.append(Moment(live + norm.backward(run), live))
            # The norm's input is given up, and what the norm returned.
            live -= stream + norm.statistics(run, run.rows) + self._normed(run, branch, recomputed)
        return moments

    def weight_moments(self, run: Execution) -> list[Moment]:
        """Memory of ``W``, while the operands of one branch after the other are given up."""
        moments, released = [], 0
        for branch in reversed(self.parts):
            moments += [moment.above(-released) for moment in branch.weight_moments(run)]
            released += branch.operands(run)
        return moments

    def rounded(self, run: Execution) -> int:
        """Bytes of the weights that are kept in 8 bits."""
        return sum(branch.rounded(run) for branch in self.parts)
