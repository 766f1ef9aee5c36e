"""Sizes that layers and the memory model must agree on: plain arithmetic, without torch."""

from __future__ import annotations

_ROWS_MULTIPLE = 64  # matrix units want the vocabulary's share in multiples of this
# Of a slice of the loss head: fewer make its products inefficient. In 16-bit formats every slice also adds a
# product as large as the weight to the wide gradient, which must be little beside the product's arithmetic.
_FEWEST_ROWS = {2: 1024, 4: 256, 8: 256}


def padded_vocab(vocab: int, size: int) -> int:
    """The vocabulary padded so that each of ``size`` ranks holds the same, well-aligned number of rows."""
    multiple = _ROWS_MULTIPLE * size
    return -(-vocab // multiple) * multiple


def loss_rows(tokens: int, hidden: int, columns: int, width: int) -> int:
    """Tokens in one slice of the loss head, so that its logits take no more memory than the hidden states.

    At least 256, in 16-bit formats 1,024 (or all), in slices as even as they can be: the same number in all
    but the last.

    Args:
        tokens: of a microbatch.
        hidden: width of the hidden states.
        columns: logits of a token on one rank, ``padded vocabulary / tensor degree``.
        width: bytes of a number of the model's format.
    """
    most = max(_FEWEST_ROWS[width], tokens * hidden // columns)
    slices = -(-tokens // most)
    return -(-tokens // slices)
