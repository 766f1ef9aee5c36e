"""What column- and row-parallel linear layers hold, multiply, keep and send. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ..inventory import Collective, Execution, Moment, Parameter, Product, Weight


@dataclass(frozen=True)
class Linear:
    """Linear layers that share an input, fused into one product, divided over the tensor axis.

    Attributes:
        name: of the module, from the stage's root.
        inputs: global input features.
        outputs: name of each weight's module -> global output features.
        row: the inputs are divided (row-parallel) and the outputs summed; otherwise each output is divided
            by itself (column-parallel).
        sequence: activations outside are divided over tokens.
        bias: whether there is one; a row-parallel layer's is added after the sum.
        std: standard deviation of the initial weights.
        unit: see :class:`Weight`.
    """

    name: str
    inputs: int
    outputs: Mapping[str, int]
    row: bool
    sequence: bool
    bias: bool
    std: float
    unit: str

    @property
    def features(self) -> int:
        """Global output features of all fused layers."""
        return sum(self.outputs.values())

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The fused weight, and the fused bias."""
        divided = {"tensor": 1 if self.row else 0}
        weights = tuple(
            Weight(f"{name}.weight", (size, self.inputs), divided, decay=True, std=self.std, unit=self.unit)
            for name, size in self.outputs.items()
        )
        found = (Parameter(f"{self.name}.weight", weights),)
        if not self.bias:
            return found
        # A row-parallel layer's bias is whole on every rank, which in sequence parallel sees its own tokens.
        whole = Weight("", (0,), partial=frozenset({"tensor"} if self.sequence else ()), unit=self.unit)
        kind = whole if self.row else Weight("", (0,), {"tensor": 0}, unit=self.unit)
        biases = tuple(replace(kind, name=f"{n}.bias", shape=(size,)) for n, size in self.outputs.items())
        return (*found, Parameter(f"{self.name}.bias", biases))

    def local(self, run: Execution) -> tuple[int, int]:
        """(input, output) features on a rank."""
        if self.row:
            return self.inputs // run.tensor, self.features
        return self.inputs, self.features // run.tensor

    def products(self, run: Execution) -> list[Product]:
        """One in each action."""
        inputs, outputs = self.local(run)
        return [
            Product("F", run.tokens, outputs, inputs),
            Product("B", run.tokens, inputs, outputs),
            Product("W", outputs, inputs, run.tokens),
        ]

    def sent(self, run: Execution, split: bool = False) -> list[Collective]:
        """What moves over the tensor axis; with ``split`` weight gradients are actions of their own."""
        whole = run.whole(self.features if self.row else self.inputs)
        if self.row and run.sequence:
            return [Collective("F", "tensor", "reduce_scatter", whole), _gather("B", whole)]
        if self.row:
            return [Collective("F", "tensor", "all_reduce", whole)]
        if not run.sequence:
            return [Collective("B", "tensor", "all_reduce", whole)]
        again = _gather("W" if split else "B", whole)
        return [_gather("F", whole), Collective("B", "tensor", "reduce_scatter", whole), again]

    def operands(self, run: Execution) -> int:
        """Bytes held from ``B`` to ``W``: the input as it was kept, and the output's gradient."""
        inputs, outputs = self.local(run)
        kept = run.whole(inputs) if self.row else run.stream(inputs)
        return kept + run.whole(outputs)

    def weight_product(self, run: Execution) -> int:
        """Bytes of the weight's gradient before it is added in another format."""
        return run.weight_product(prod(self.local(run)))

    def eight_bits(self, run: Execution) -> int:
        """Bytes that the product for the input's gradient needs in 8 bits, its result included: copies of the
        output's gradient and of the weight, first scaled in 16 bits, then transposed."""
        if not run.fp8:
            return 0
        inputs, outputs = self.local(run)
        weight = inputs * outputs
        return run.whole(outputs) // 2 + max(3 * weight, 2 * weight + run.whole(inputs))

    def backward(self, run: Execution, selective: bool, split: bool) -> Moment:
        """Memory of a column-parallel layer's backward: its input, recomputed (selective) or gathered, and
        the input's gradient with the parts of other ranks that are added to it."""
        stream, whole, gathered = run.stream(self.inputs), run.whole(self.inputs), run.gathered(self.inputs)
        before = (stream if selective else 0) + (0 if split else gathered)
        summed = stream if gathered else 0
        product = max(0 if split else self.weight_product(run), summed)
        needed = before + max(self.eight_bits(run), whole + gathered + product)
        return Moment(needed, before + whole + gathered, self.parameters[:1])


def _gather(action: str, nbytes: int) -> Collective:
    return Collective(action, "tensor", "all_gather", nbytes)
