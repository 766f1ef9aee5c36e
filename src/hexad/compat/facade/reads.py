"""Parameters of ZeRO 3 that a script reads where no module of theirs runs."""

from __future__ import annotations

import torch
from torch import Tensor

from hexad.comm import CommError, identical
from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.parallel.data.buckets import Bucket


class GatheredReads:
    """What is read of parameters whose values are sharded: they are gathered, with all of their bucket, and
    stay until :meth:`release`. All ranks read the same ones in the same order.

    Args:
        engine: whose parameters they are.

    Attributes:
        checked: all ranks agree on what is read before it is gathered: outside of passes a script may easily
            read on one rank only, and its message would meet another one of the others.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.checked = engine, False
        self._read: list[Bucket] = []
        self._places: dict[Tensor, tuple[int, str]] = {
            declared.parameter: (number, declared.declaration.name)
            for number, bucket in enumerate(engine.buckets)
            for declared in bucket.members
        }

    def __call__(self, parameter: Tensor) -> Tensor:
        """The parameter, complete.

        Raises:
            HexadError: ``checked``, and other ranks do something else.
        """
        number, name = self._places[parameter]
        bucket = self._engine.buckets[number]
        if not any(bucket is known for known in self._read):
            if self.checked:
                self._agree(name)
            self._read.append(bucket)
            self._engine.gatherer.acquire(bucket)
        return parameter

    def _agree(self, name: str) -> None:
        try:
            identical("parameter that is read with ZeRO 3", name, self._engine.mesh.world)
        except CommError as error:
            raise HexadError(
                f"{name}: found read on this rank with ZeRO 3, but not on others, for which it waited; read "
                f"it on all ranks ({error})"
            ) from error

    @torch.no_grad()
    def release(self, changed: bool = False) -> None:
        """Give up what has been gathered. With ``changed``, values that the script has written to it are the
        parameters' from now on."""
        while self._read:
            bucket = self._read.pop()
            if changed:
                bucket.adopt()
            self._engine.gatherer.release(bucket)
