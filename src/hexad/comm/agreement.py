"""Ranks that fail alike: what one rank meets, all of them are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hexad.config import AgreedError, HexadError
from hexad.topology.mesh import Axis

from .collectives import gather_objects

T = TypeVar("T")


def agreed(action: Callable[[], T], axis: Axis) -> T:
    """Do something on every rank of an axis; if any meets a user's error, all raise it. ``action`` itself
    must not communicate.

    Raises:
        AgreedError: the first rank's error, on every rank alike.
    """
    error, result = None, None
    try:
        result = action()
    except HexadError as caught:
        error = type(caught), str(caught)
    errors = gather_objects(error, axis)
    for rank, found in enumerate(errors):
        if found is not None:
            kind, text = found
            raise AgreedError(text if None not in errors else f"rank {rank}: {text}", kind)
    return result  # type: ignore[return-value]
