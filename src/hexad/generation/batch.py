"""The tokens that the ranks of a replica compute in one forward pass. No torch."""

from typing import NamedTuple

from .blocks import SlotRun
from .sequence import Sequence


class TokenSpan(NamedTuple):
    """Consecutive tokens of one sequence in a batch.

    Attributes:
        number: of the sequence.
        tokens: their ids.
        begin: position of the first.
        length: tokens of the sequence, by which LongRoPE chooses its frequencies.
        runs: where the keys from position ``origin`` on are, up to these tokens' own.
        origin: position of the first token whose keys are kept.
        last: whether the sequence's next token is chosen after the last one.
        targets: with log-probabilities of the prompt, the token that follows each of these; else none.
        routing: whether the experts of the tokens are returned.
    """

    number: int
    tokens: tuple[int, ...]
    begin: int
    length: int
    runs: tuple[SlotRun, ...]
    origin: int = 0
    last: bool = False
    targets: tuple[int, ...] = ()
    routing: bool = False


class TokenBatch(NamedTuple):
    """The tokens of one forward pass, the same on all ranks of a replica.

    Attributes:
        spans: the tokens, by sequence.
        lane: of the sequences, see :mod:`hexad.generation.scheduler`.
        begun: the sequences that are new since the batch before.
        ended: numbers of sequences that have ended since then.
    """

    spans: tuple[TokenSpan, ...]
    lane: int = 0
    begun: tuple[Sequence, ...] = ()
    ended: tuple[int, ...] = ()
