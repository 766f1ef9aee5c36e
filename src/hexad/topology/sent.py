"""Bytes that one rank sends in a collective with bandwidth-optimal (ring) algorithms. No torch.

Chan et al., "Collective communication: theory, practice, and experience" (2007).
"""


def sent_bytes(operation: str, size: int, nbytes: int) -> int:
    """Bytes sent by one of ``size`` ranks.

    Args:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` (even), ``broadcast`` or
            ``exchange``.
        size: ranks taking part.
        nbytes: bytes of the *whole* tensor: what all_reduce and broadcast hold, what all_gather returns,
            what reduce_scatter and all_to_all are given; of an exchange, those that this rank sends.
    """
    if size == 1:
        return 0
    if operation == "exchange":
        return nbytes
    if operation == "all_reduce":
        return 2 * (size - 1) * nbytes // size
    if operation in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        return (size - 1) * nbytes // size
    raise ValueError(f"unknown operation {operation!r}")
