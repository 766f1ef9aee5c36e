"""What normalisation layers hold, keep and need. No torch."""

from dataclasses import dataclass, replace
from typing import Literal

from hexad.parallel.inventory import Execution, Parameter, Weight


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm or LayerNorm; every tensor rank holds its weights.

    Attributes:
        name: of the module, from the stage's root.
        kind: ``rms`` or ``layer``.
        width: normalised features.
        eps: added to the variance.
        partial: each tensor rank normalises only part of the activations, so that weight gradients are parts.
        unit: see :class:`~hexad.parallel.inventory.Weight`.
        frozen: names of the weights that are not trained.
    """

    name: str
    kind: Literal["rms", "layer"]
    width: int
    eps: float
    partial: bool
    unit: str
    frozen: frozenset[str] = frozenset()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of the norm: a weight, and a bias in LayerNorm."""
        partial = frozenset({"tensor"} if self.partial else ())

        def vector(kind: str, fill: float) -> Parameter:
            name = f"{self.name}.{kind}"
            weight = Weight(name, (self.width,), partial=partial, fill=fill, unit=self.unit)
            return Parameter(name, (replace(weight, frozen=name in self.frozen),))

        weight = vector("weight", 1.0)
        return (weight,) if self.kind == "rms" else (weight, vector("bias", 0.0))

    def statistics(self, run: Execution, rows: int) -> int:
        """Bytes kept besides the input: RMSNorm's scale, LayerNorm's mean and reciprocal deviation."""
        return 0 if run.exact else self._statistics(run, rows)

    def _statistics(self, run: Execution, rows: int) -> int:
        return rows * run.wide * (1 if self.kind == "rms" else 2)

    def backward(self, run: Execution) -> int:
        """Bytes that backward needs, its result included, over ``[rows, width]`` of the residual stream."""
        stream = run.stream(self.width)
        again = stream + self._statistics(run, run.rows) if run.exact else 0
        if self.kind == "layer" or run.compiled or not run.cpu:
            return again + stream  # one kernel
        # Pass by pass: input, its product with the gradient, gradient and result, all in the wide format.
        return again + (4 if run.widening > 1 else 2) * run.widening * stream
