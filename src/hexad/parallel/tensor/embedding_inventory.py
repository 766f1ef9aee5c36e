"""The inventory of the vocabulary-parallel embedding and output head. No torch."""

from dataclasses import dataclass, replace

from ..exact_inventory import NORMALISER, function_bytes, product_bytes
from ..inventory import Collective, Execution, Operation, Operations, Parameter, Pass, Product, Weight

ROWS_MULTIPLE = 64  # matrix units want a rank's rows of the vocabulary in multiples of this
_FEWEST_ROWS = {2: 1024, 4: 256, 8: 256}  # of a slice of the loss: fewer make its products inefficient

TIE = "embedding"
"""The name of the tie between a tied head and the embedding."""


def loss_rows(tokens: int, hidden: int, columns: int, width: int) -> int:
    """Tokens in one slice of the loss, so that its logits take no more memory than the hidden states.

    At least 256, in 16-bit formats 1,024 (or all), in slices as even as they can be: the same number in all
    but the last. In 16-bit formats every slice also reads and writes the float32 gradient of the weight, so
    that its logits may take as much memory as that gradient: the time for it is then at most 200 / hidden of
    that of the slice's products (989 TFLOP/s, 3.35 TB/s).

    Args:
        tokens: of a microbatch.
        hidden: width of the hidden states.
        columns: logits of a token on one rank, ``padded vocabulary / tensor degree``.
        width: bytes of a number of the model's format.
    """
    most = max(_FEWEST_ROWS[width], tokens * hidden // columns, 2 * hidden if width == 2 else 0)
    slices = -(-tokens // most)
    return -(-tokens // slices)


@dataclass(frozen=True)
class EmbeddingSpec:
    """The token embedding, its vocabulary divided over the tensor axis.

    Attributes:
        vocab, hidden: of the table.
        sequence: the output is divided over tokens.
        std: standard deviation of the initial values.
        tied: another pipeline rank's head holds a copy of the weight.
        frozen: it is not trained.
        multiple: a rank's rows are padded to a multiple of this.
    """

    vocab: int
    hidden: int
    sequence: bool
    std: float
    tied: bool = False
    frozen: bool = False
    multiple: int = ROWS_MULTIPLE

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The embedding table as a parameter."""
        weight = _table("embedding.weight", self, "embedding")
        return (Parameter("embedding.weight", (weight,), tied=TIE if self.tied else ""),)

    def operations(self, run: Execution) -> Operations:
        """Rows looked up, summed over the ranks; their gradients added up in the table's."""
        whole = run.whole(self.hidden)
        forward: list[Operation] = [Pass("F", "embedding", 2 * whole)]
        # Widened, and added to rows of the gradient.
        backward: list[Operation] = [Pass("B", "embedding", whole + 4 * whole * run.gradient // run.byte, 2)]
        if run.tensor == 1:
            return Operations(forward, [] if self.frozen else backward)
        # Rows of other ranks are 0, and so are their gradients.
        forward.append(Pass("F", "embedding", 2 * whole))
        backward.insert(0, Pass("B", "embedding", 2 * whole))
        if not run.sequence:
            forward.append(Collective("F", "tensor", "all_reduce", whole))
            return Operations(forward, [] if self.frozen else backward)
        forward.append(Collective("F", "tensor", "reduce_scatter", whole))
        gather = Collective("B", "tensor", "all_gather", whole)
        return Operations(forward, [] if self.frozen else [gather, *backward])

    def positions(self, run: Execution) -> int:
        """Bytes kept: row numbers, and whether a token's row is on this rank; with one rank nothing new."""
        return 9 * run.tokens if run.tensor > 1 else 0


@dataclass(frozen=True)
class HeadSpec:
    """The output head and the loss, computed in slices of tokens, forward and backward at once.

    Attributes:
        vocab, hidden: of the table.
        sequence: the input is divided over tokens.
        std: standard deviation of the initial values.
        tied: ``own``: a weight of its own; ``here``: the embedding's, on this rank; ``copy``: a copy of the
            embedding's, which another pipeline rank holds.
        frozen: it is not trained.
        multiple: see :class:`EmbeddingSpec`.
    """

    vocab: int
    hidden: int
    sequence: bool
    std: float
    tied: str = "own"
    frozen: bool = False
    multiple: int = ROWS_MULTIPLE

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The table, unless it is the embedding's."""
        if self.tied == "here":
            return ()
        copy = self.tied == "copy"
        name = "embedding.weight" if copy else "head.weight"
        weight = _table(name, self, "head")
        return (Parameter("head.weight", (weight,), tied=TIE if copy else "", copy=copy),)

    def logits(self, run: Execution) -> Product:
        """The logits, without padding."""
        return Product("F", run.tokens, self.vocab, self.hidden, 1 / run.tensor)

    def products(self, run: Execution) -> list[Product]:
        """The logits and both gradients, all in ``F``; without padding."""
        vocab, hidden, tokens, share = self.vocab, self.hidden, run.tokens, 1 / run.tensor
        products = [self.logits(run), Product("F", tokens, hidden, vocab, share)]
        return products if self.frozen else [*products, Product("F", vocab, hidden, tokens, share)]

    def operations(self, run: Execution) -> Operations:
        """The operations of the head: in ``F`` of every slice the logits, the loss and both gradients; the
        next slice is gathered and the gradient of the one before is summed while a slice is computed. In
        ``B`` the gradient is scaled."""
        columns, hidden, ranks = self.columns(run), self.hidden, run.tensor if run.sequence else 1
        rows = -(-loss_rows(run.tokens, hidden, columns, run.byte) // ranks) * ranks
        slices = [min(rows, run.tokens - first) for first in range(0, run.tokens, rows)]
        over, operations = run.tensor > 1, list[Operation]()
        if over and run.sequence:
            operations.append(self._states(run, "all_gather", slices[0]))
        for number, size in enumerate(slices):
            logits = size * columns * run.byte
            if over and run.sequence and number + 1 < len(slices):
                beside = 7 - 2 * self.frozen
                operations.append(self._states(run, "all_gather", slices[number + 1], beside))
            operations += [Product("F", size, columns, hidden), Pass("F", "loss", 2 * logits, 2)]
            if over:
                sums = [size * run.wide, 2 * size * run.wide]
                if run.exact:  # the highest logits, the sums of exponentials in float64, targets
                    sums = [size * run.wide, size * 8, size * run.wide]
                operations += [Collective("F", "tensor", "all_reduce", nbytes) for nbytes in sums]
            operations += [Pass("F", "loss", 2 * logits), Product("F", size, hidden, columns)]
            if over:
                last = number + 1 == len(slices)
                beside = (0 if self.frozen else 1) if last else 3
                operation = "reduce_scatter" if run.sequence else "all_reduce"
                operations.append(self._states(run, operation, size, beside))
            if not self.frozen:
                operations.append(Product("F", columns, hidden, size))
        scaled: list[Operation] = [Pass("B", "loss", 2 * run.stream(hidden))]
        return Operations(operations, scaled)

    def _states(self, run: Execution, operation: str, rows: int, beside: int = 0) -> Collective:
        """A collective of some tokens' hidden states."""
        return Collective("F", "tensor", operation, rows * self.hidden * run.byte, beside)

    def columns(self, run: Execution) -> int:
        """Logits of a token on one rank, padding included."""
        size = -(-self.vocab // run.tensor)
        return -(-size // self.multiple) * self.multiple

    def loss(self, run: Execution) -> tuple[int, int]:
        """Bytes needed while the loss is computed, above what is kept: at the most, and when the weight's
        gradient is complete."""
        columns, hidden, byte = self.columns(run), self.hidden, run.byte
        rows = loss_rows(run.tokens, hidden, columns, byte)
        slices = -(-run.tokens // rows)
        logits = rows * columns * byte
        # A gathered slice, and the gradient of one with the parts of other ranks that are added to it.
        states = rows * hidden * byte if run.sequence else 0
        # In 16 bits logits exist in both formats, unless the loss is compiled.
        wide = logits * (1 + run.widening) if run.widening > 1 and not run.compiled else logits
        product = 0 if self.frozen else run.weight_product(columns * hidden)
        ahead = 2 * states if slices > 1 else states  # the next slice arrives
        behind = 2 * states if slices > 1 else 0
        most = max(wide + ahead + behind, logits + product + ahead + 2 * states)
        if run.exact:
            logits_made = logits + product_bytes(rows, hidden, columns, byte, run.cpu)
            normaliser = logits * run.widening + function_bytes(rows * columns, run.cpu, NORMALISER)
            most = max(most, max(normaliser, logits_made) + ahead + behind)
        return run.stream(hidden) + most, run.stream(hidden) + logits + 3 * states


def _table(name: str, spec: EmbeddingSpec | HeadSpec, unit: str) -> Weight:
    """Rows divided over the tensor axis, padded."""
    table = Weight(name, (spec.vocab, spec.hidden), {"tensor": 0}, decay=True, std=spec.std, unit=unit)
    table = replace(table, outside_layers=True, vocabulary=True, frozen=spec.frozen)
    return replace(table, multiple=spec.multiple)
