"""Collectives and point-to-point messages over axes: all of training's go through here."""

from .agreement import (
    agreed,
    among_neighbours,
    first_difference,
    from_first,
    gathered,
    identical,
    merged,
    merging,
    scattered,
)
from .collectives import (
    CommError,
    Pending,
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    all_to_all,
    all_to_all_async,
    broadcast,
    exchange_async,
    gather_objects,
    receive_async,
    reduce_scatter,
    reduce_scatter_async,
    send_async,
    sent_bytes,
    wait_for,
)
from .trace import Trace
