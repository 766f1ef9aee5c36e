"""Collectives and point-to-point messages over axes: all of training's go through here."""

from .agreement import agreed, collected, first_difference, from_first, handed_out, merged, merging
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
    gather_objects,
    receive_async,
    reduce_scatter,
    reduce_scatter_async,
    send_async,
    wait_for,
)
from .trace import Trace
from .volume import all_to_all_bytes, sent_bytes

__all__ = [
    "CommError",
    "Pending",
    "Trace",
    "agreed",
    "all_to_all_bytes",
    "all_gather",
    "all_gather_async",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "all_to_all_async",
    "broadcast",
    "collected",
    "first_difference",
    "from_first",
    "gather_objects",
    "handed_out",
    "merged",
    "merging",
    "receive_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "send_async",
    "sent_bytes",
    "wait_for",
]
