"""What process groups in Python have in common: every kind of call is one method's matter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Any, list[Tensor], list[Tensor]], Any]
"""Makes the call of a gloo group, given inputs and outputs like those of the call; returns gloo's work."""


class Forwarding(dist.ProcessGroup):
    """A process group whose calls are all made by :meth:`forward`."""

    name: str
    """It is registered by."""

    def __init__(self, place: int, members: int) -> None:
        super().__init__(place, members)
        self.place, self.members = place, members

    def size(self) -> int:
        """Of the group."""
        return self.members

    def rank(self) -> int:
        """This rank's place in it."""
        return self.place

    def _get_backend(self, device: torch.device) -> Forwarding:
        """Itself, which torch asks from 2.14 on whether it takes messages together; it does not."""
        return self

    def getBackendName(self) -> str:
        """The name it is registered by."""
        return self.name

    @abstractmethod
    def forward(
        self,
        kind: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        exchange: Exchange,
        peer: int | None = None,
    ) -> Any:
        """Start a call; returns what torch's ``Work`` is.

        Args:
            kind: ``all_reduce``, ``broadcast``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``send``,
                ``receive`` or ``barrier``.
            inputs: what is sent.
            outputs: what is received; the same list of calls in place.
            exchange: makes the call on the host.
            peer: place of the other end of a message, or of the source of a broadcast.
        """

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """In place."""
        given = opts if opts is not None else dist.AllreduceOptions()
        return self.forward("all_reduce", tensors, tensors, lambda gloo, _, host: gloo.allreduce(host, given))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """In place."""
        source = opts.rootRank
        return self.forward(
            "broadcast", tensors, tensors, lambda gloo, _, host: gloo.broadcast(host, opts), source
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """A tensor per rank."""
        return self.forward(
            "all_gather", inputs, outputs[0], lambda gloo, own, host: gloo.allgather([host], own)
        )

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        """One tensor for all ranks."""
        return self.forward(
            "all_gather", [given], [output], lambda gloo, own, host: gloo._allgather_base(host[0], own[0])
        )

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        """This rank's part of the sum."""
        options = opts if opts is not None else dist.ReduceScatterOptions()
        return self.forward(
            "reduce_scatter",
            [given],
            [output],
            lambda gloo, own, host: gloo._reduce_scatter_base(host[0], own[0], options),
        )

    def all_to_all_single(
        self, output: Tensor, given: Tensor, receive: Sequence[int], send: Sequence[int], opts: Any = None
    ) -> Any:
        """Rows to and from every rank; none: equal parts."""
        counts = list(receive or ()), list(send or ())
        return self.forward(
            "all_to_all",
            [given],
            [output],
            lambda gloo, own, host: gloo.alltoall_base(host[0], own[0], *counts),
        )

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """To one rank."""
        return self.forward("send", tensors, [], lambda gloo, own, _: gloo.send(own, peer, tag), peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """From one rank."""
        return self.forward("receive", [], tensors, lambda gloo, _, host: gloo.recv(host, peer, tag), peer)

    def barrier(self, opts: Any = None) -> Any:
        """Of the hosts."""
        return self.forward("barrier", [], [], lambda gloo, *_: gloo.barrier())
