"""What positions hold and keep. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hexad.parallel.inventory import Execution, Parameter, Weight


@dataclass(frozen=True)
class LearnedPositions:
    """A table of position embeddings, whole on every tensor rank.

    Attributes:
        rows, hidden: of the table.
        sequence: each tensor rank adds it to its own tokens only.
        std: standard deviation of the initial values.
        frozen: it is not trained.
    """

    rows: int
    hidden: int
    sequence: bool
    std: float
    frozen: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The table."""
        name, shape = "positions.weight", (self.rows, self.hidden)
        partial = frozenset({"tensor"} if self.sequence else ())
        weight = Weight(name, shape, partial=partial, decay=True, std=self.std, unit="positions", apart=True)
        return (Parameter(name, (replace(weight, frozen=self.frozen),)),)

    def kept(self, run: Execution) -> int:
        """Bytes: the tokens' positions."""
        return 8 * run.tokens
