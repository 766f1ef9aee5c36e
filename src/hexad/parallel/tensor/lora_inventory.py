"""What low-rank adapters of linear layers hold, multiply and keep (LoRA: Hu et al., arXiv 2106.09685). No
torch.

An adapter adds ``scale * dropout(x) A^T B^T`` to one output of a linear layer. ``A`` and ``B`` are sharded as
their matrix is: in a column-parallel layer every tensor rank holds all of ``A`` and the rows of ``B`` for its
outputs, in a row-parallel one the columns of ``A`` for its inputs and all of ``B``. The sum over tensor ranks
that the layer makes anyway covers the adapter, which communicates nothing of its own but, once per step, the
gradient of what every rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..inventory import Execution, Parameter, Product, Weight


@dataclass(frozen=True)
class LoraSpec:
    """The kind of adapters that a model has.

    Attributes:
        rank: of the products ``B A``.
        scale: what they are multiplied by: alpha / rank.
        dropout: probability with which elements of their input are dropped in training.
    """

    rank: int
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True)
class AdaptersSpec:
    """The adapters of one linear layer.

    Attributes:
        name: of the layer, from the stage's root.
        kind: rank, scale and dropout.
        inputs: global input features.
        outputs: module's name of each adapted weight -> its global output features.
        matrices: of the same, the declaration that its rows (or columns) are sharded like.
        row: the layer is row-parallel.
    """

    name: str
    kind: LoraSpec
    inputs: int
    outputs: Mapping[str, int]
    matrices: Mapping[str, Weight]
    row: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All ``A``, fused along their rows; then each ``B``. ``B`` begins with zeros, so that the adapted
        model begins as the base; ``A`` with normal values of the variance that PEFT's uniform ones have."""
        rank, std = self.kind.rank, (3 * self.inputs) ** -0.5
        first = []
        for name, matrix in self.matrices.items():
            divided = {"tensor": 1} if self.row else {}
            partial = frozenset() if self.row else frozenset({"tensor"})
            shape = (rank, self.inputs)
            first.append(_weight(f"{name}.lora_a", shape, matrix, divided, partial, std))
        found = [Parameter(f"{self.name}.lora_a", tuple(first))]
        for name, matrix in self.matrices.items():
            partial = frozenset({"tensor"}) if self.row else matrix.partial
            divided = {} if self.row else dict(matrix.divided)
            weight = _weight(f"{name}.lora_b", (self.outputs[name], rank), matrix, divided, partial, 0.0)
            found.append(Parameter(f"{self.name}.{b_name(name)}", (weight,)))
        return tuple(found)

    @property
    def width(self) -> int:
        """Features between all ``A`` and ``B``."""
        return self.kind.rank * len(self.outputs)

    def products(self, run: Execution, local: int, widths: Mapping[str, int]) -> list[Product]:
        """Of both halves in each action, for ``local`` input features and output features ``widths`` on a
        rank."""
        tokens, rank, every = run.tokens, self.kind.rank, self.width
        found = [
            Product("F", tokens, every, local),
            Product("B", tokens, local, every),
            Product("W", every, local, tokens),
        ]
        for name in self.outputs:
            found += [
                Product("F", tokens, widths[name], rank),
                Product("B", tokens, rank, widths[name]),
                Product("W", widths[name], rank, tokens),
            ]
        return found

    def kept(self, run: Execution) -> int:
        """Bytes from forward to backward: what lies between ``A`` and ``B``."""
        return run.whole(self.width)

    def operands(self, run: Execution, local: int) -> int:
        """Bytes held from ``B`` to ``W`` beside the layer's: the same scaled, its gradient, and the input
        with elements dropped."""
        return 2 * run.whole(self.width) + (run.whole(local) if self.kind.dropout else 0)


def b_name(name: str) -> str:
    """The attribute that holds ``B`` of a weight's module."""
    return f"lora_b_{name.rpartition('.')[2]}"


def _weight(
    name: str,
    shape: tuple[int, int],
    matrix: Weight,
    divided: Mapping[str, int],
    partial: frozenset[str],
    std: float,
) -> Weight:
    """One half of the adapter of a matrix."""
    return Weight(
        name,
        shape,
        divided,
        partial,
        matrix.grid,
        decay=True,
        std=std,
        unit=matrix.unit,
        adapter=True,
    )
