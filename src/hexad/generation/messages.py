"""Messages between the first rank and the leaders of replicas, and from a leader to the ranks that follow it.
No torch."""

from dataclasses import dataclass

from .requests import Request, RequestUpdate


@dataclass(frozen=True)
class Add:
    """A request for a replica; ``number`` is above those before."""

    number: int
    request: Request


@dataclass(frozen=True)
class Cancel:
    """A request that is not to be computed any further."""

    number: int


@dataclass(frozen=True)
class Stop:
    """The last message to a replica, or from its leader to the other ranks."""


@dataclass(frozen=True)
class RequestUpdates:
    """The results of a replica since its last message."""

    updates: tuple[RequestUpdate, ...]


@dataclass(frozen=True)
class Stopped:
    """The last message from a replica."""
