"""Agreements about a script's arguments over torch's default process group, before there is a mesh."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from hashlib import sha256
from typing import Any, TypeVar

import torch.distributed as dist

from hexad.comm import gather_objects
from hexad.config import AgreedError, HexadError
from hexad.topology.mesh import Axis

from .arguments import shown
from .flag import Flag
from .flags import GROUPS

T = TypeVar("T")


def values_of_flags(arguments: Namespace) -> dict[str, Any]:
    """The values that all ranks need alike, by flag: those of Megatron-LM's flags that have an effect, which
    ``--local-rank`` and a script's own flags do not."""
    flags = (flag for group in GROUPS.values() for flag in group if flag.effect != "none")
    return {flag.name: getattr(arguments, flag.attribute) for flag in flags}


def failing_alike(action: Callable[[], T]) -> T:
    """Do something on every rank; where some ranks fail, the others do not wait for them in vain.

    Raises:
        AgreedError: the error of the first rank that met one, on every rank alike.
        HexadError: this rank's own, where all ranks met one.
    """
    error, result = None, None
    try:
        result = action()
    except HexadError as caught:
        error = caught
    problems = gather_objects(None if error is None else str(error), _everyone())
    rank = next((rank for rank, text in enumerate(problems) if text is not None), None)
    if error is not None and None not in problems:
        raise error
    if rank is not None:
        raise AgreedError(f"rank {rank}: {problems[rank]}")
    return result  # type: ignore[return-value]


def check_identical(values: dict[str, Any]) -> None:
    """See that all ranks of torch's default process group have the same values; all call this together.

    Raises:
        AgreedError: they do not; names the first that differs, a rank and both values, on every rank alike.
    """
    world = _everyone()
    digests = gather_objects(sha256(repr(values).encode()).digest(), world)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is None:
        return
    found = gather_objects(values if world.rank in (0, other) else None, world)
    name = next((name for name in found[0] if found[0][name] != found[other][name]), None)
    if name is not None:
        raise AgreedError(f"{name}: {_difference(name, found[0][name], found[other][name], other)}")


def _everyone() -> Axis:
    return Axis("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def _difference(name: str, first: Any, value: Any, rank: int) -> str:
    """What two ranks have, in words."""
    if isinstance(value, bool):
        flags: dict[str, Flag] = {flag.name: flag for group in GROUPS.values() for flag in group}
        given, absent = (rank, 0) if value != flags[name].default else (0, rank)
        return f"found on rank {given}, not on rank {absent}; give all ranks the same"
    found, wanted = ("none" if each in (None, (), []) else shown(each) for each in (value, first))
    return f"found {found} on rank {rank}, {wanted} on rank 0; give all ranks the same"
