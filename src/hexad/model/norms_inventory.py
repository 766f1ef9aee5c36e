"""The inventory of normalisation layers: parameters, kept tensors and temporary memory. No torch."""

from dataclasses import dataclass, replace
from typing import Literal

from hexad.parallel.inventory import Execution, Operation, Operations, Parameter, Pass, Weight, again


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

    @property
    def trains(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(not parameter.frozen for parameter in self.parameters)

    def statistics(self, run: Execution, rows: int) -> int:
        """Bytes kept besides the input: RMSNorm's scale, LayerNorm's mean and reciprocal deviation."""
        return 0 if run.exact else self._statistics(run, rows)

    def _statistics(self, run: Execution, rows: int) -> int:
        return rows * run.wide * (1 if self.kind == "rms" else 2)

    def operations(
        self, run: Execution, nbytes: int, recomputed: bool = False, added: bool = False
    ) -> Operations:
        """Passes over an input of so many bytes. Sums over rows, for the weight's gradient, take a second
        pass.

        Args:
            run: how the rank computes.
            nbytes: of the input.
            recomputed: the output is recomputed in the backward pass.
            added: to the input a branch is added first, in the same function, whose result is kept.
        """
        alone = Pass("F", "norm", 2 * nbytes)
        forward = alone._replace(nbytes=4 * nbytes) if added else alone
        fused = self.kind == "layer" and not added  # one kernel of PyTorch's
        streams, kernels = (3, 1) if fused else (7 if added else 5, 2)
        gradient = Pass("B", "norm", streams * nbytes, kernels)
        weights = [] if len(self.frozen) == len(self.parameters) else [Pass("B", "norm", 0)]
        before: list[Operation] = [again(alone)] if recomputed else []
        return Operations([forward], [*before, gradient, *weights * len(self.parameters)])

    def backward(self, run: Execution) -> int:
        """Bytes that backward needs, its result included, over ``[rows, width]`` of the residual stream."""
        stream = run.stream(self.width)
        again = stream + self._statistics(run, run.rows) if run.exact else 0
        if self.kind == "layer" or run.compiled or not run.cpu:
            return again + stream  # one kernel
        # Pass by pass: input, its product with the gradient, gradient and result, all in the wide format.
        return again + (4 if run.widening > 1 else 2) * run.widening * stream
