"""Attention over keys that other ranks hold: their blocks arrive one after the other, and the outputs of
blocks are merged by the log-sum-exp of their scores (Liu et al., Ring Attention, arXiv 2310.01889).

The function keeps its own rank's queries, keys and values, the output and the log-sum-exp. Backward receives
keys and values again, and sends this rank's part of their gradients to the ranks that hold them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hexad.comm import Pending, all_gather_async, exchange_async, reduce_scatter_async
from hexad.topology.mesh import Axis

from ..pointwise import maybe_compiled
from .kernels import Kernel, Operands, Output, Results
from .rounds import Round
from .slice import TokenRun


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """How a rank reaches the keys of the others.

    Attributes:
        rounds: of this rank.
        axis: over which keys and values are sent.
        method: ``ring``: in rounds, to those ranks that need them; ``all_gather``: all at once.
    """

    rounds: tuple[Round, ...]
    axis: Axis
    method: Literal["ring", "all_gather"] = "ring"


def attention_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, exchange: KeyExchange, kernel: Kernel, compiled: bool = False
) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks.

    Args:
        q: ``[this rank's tokens, heads, width]``.
        k, v: ``[this rank's tokens, key/value heads, width]``.
        compiled: see :mod:`hexad.parallel.pointwise`; of the merging of outputs.

    Returns:
        ``[this rank's tokens, heads * width]``.
    """
    return _AttentionOverRanks.apply(q, k, v, exchange, kernel, compiled)


class Merged:
    """Output of queries over the blocks of keys so far.

    Attributes:
        out: ``[tokens, heads, width]``, in at least float32.
        lse: ``[tokens, heads]``, the same; ``-inf`` where a query has seen no key.

    Args:
        q: the queries, ``[tokens, heads, width]``.
        compiled: see :mod:`hexad.parallel.pointwise`.
    """

    def __init__(self, q: Tensor, compiled: bool = False) -> None:
        self._compiled = compiled
        wide = torch.float32 if q.dtype.itemsize == 2 else q.dtype
        self.out = torch.zeros(q.shape, dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)

    def add(self, rows: TokenRun, part: Output) -> None:
        """Add the output of some queries, numbered from the first of ``rows`` on, over one more block."""
        whole, before = self.out[slice(*rows)][part.rows], self.lse[slice(*rows)][part.rows]
        maybe_compiled(merge_, self._compiled)(whole, before, part.out, part.lse)


def merge_(whole: Tensor, before: Tensor, out: Tensor, lse: Tensor) -> None:
    """Overwrite ``whole [rows, heads, width]`` and its ``before [rows, heads]`` with the output over more
    keys, given these keys' ``out`` and ``lse``."""
    after = torch.logaddexp(before, lse)
    unseen = after == -torch.inf  # -inf - -inf would be NaN
    old, new = (part.sub(after).exp_().masked_fill_(unseen, 0.0).unsqueeze(-1) for part in (before, lse))
    whole.mul_(old).addcmul_(out.to(whole.dtype), new)
    before.copy_(after)


class _AttentionOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: KeyExchange, kernel: Kernel, compiled: bool
    ) -> Tensor:
        merged = Merged(q, compiled)
        for round_, keys, values in _arrivals(k, v, exchange):
            for tile in round_.tiles:
                columns = slice(*tile.columns)
                operands = Operands(q[slice(*tile.rows)], keys[columns], values[columns])
                for part in kernel.forward(operands, tile):
                    merged.add(tile.rows, part)
                    del part
                del operands
            del keys, values  # before the next are waited for
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.exchange, ctx.kernel = exchange, kernel
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradient, heads = gradient.contiguous().view(q.shape), k.shape[1]
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        returns = _Returns(k, ctx.exchange, lse.dtype)
        for round_, keys, values in _arrivals(k, v, ctx.exchange):
            gradients = returns.place(round_)
            for tile in round_.tiles:
                rows, columns = slice(*tile.rows), slice(*tile.columns)
                operands = Operands(q[rows], keys[columns], values[columns])
                for part in ctx.kernel.backward(
                    operands, Results(out[rows], lse[rows], gradient[rows]), tile
                ):
                    dq[rows][part.rows] += part.q
                    gradients[columns, :heads][part.columns] += part.k
                    gradients[columns, heads:][part.columns] += part.v
                    del part  # before the next is computed
                del operands
            del keys, values
            returns.send(gradients, round_)
            del gradients
        total = returns.complete().to(k.dtype)
        return dq.to(q.dtype), total[:, :heads], total[:, heads:], None, None, None


ReceivedRound = tuple[Round, Tensor, Tensor]
"""A round, and the keys and values that its tiles are of."""


def _arrivals(k: Tensor, v: Tensor, exchange: KeyExchange) -> Iterator[ReceivedRound]:
    """This rank's own ``k`` and ``v [tokens, key/value heads, width]``, then those of the others; the next
    are under way meanwhile."""
    local, *others = exchange.rounds
    if not others:
        yield local, k, v
        return
    packed, heads = torch.cat((k, v), dim=1), k.shape[1]
    if exchange.method == "all_gather":
        gathering = all_gather_async(packed, exchange.axis)
        del packed
        yield local, k, v
        gathered = gathering.wait().unflatten(0, (exchange.axis.size, -1))
        for other in others:
            yield other, gathered[other.source, :, :heads], gathered[other.source, :, heads:]
        return
    arriving = [_start(packed, other, exchange.axis) for other in others[:1]]
    yield local, k, v
    for other, following in zip(others, (*others[1:], None)):
        received = arriving.pop().wait()
        if following is not None:
            arriving.append(_start(packed, following, exchange.axis))
        yield other, received[:, :heads], received[:, heads:]
        del received


def _start(packed: Tensor, round_: Round, axis: Axis) -> Pending:
    message, out = _cut(packed, round_.send), packed.new_empty((round_.received, *packed.shape[1:]))
    return exchange_async(message, round_.target, out, round_.source, axis, 2 * round_.distance)


def _cut(rows: Tensor, runs: Sequence[TokenRun]) -> Tensor:
    """The runs of rows; one run is not copied."""
    parts = [rows[begin:end] for begin, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else rows[:0]


class _Returns:
    """Gradients of keys and values on their way to the ranks that hold these: those of one round are sent
    while the next one's are computed.

    Args:
        k: this rank's keys, as large as its values.
        exchange: with the others.
        dtype: in which gradients are added up; they are sent in that of the keys.
    """

    def __init__(self, k: Tensor, exchange: KeyExchange, dtype: torch.dtype) -> None:
        self._exchange, self._k = exchange, k
        self._total = torch.zeros((len(k), 2 * k.shape[1], k.shape[2]), dtype=dtype, device=k.device)
        self._leaving: tuple[Round, Pending] | None = None
        self._gathered: Tensor | None = None
        if exchange.method == "all_gather":
            shape = exchange.axis.size, *self._total.shape
            self._gathered = torch.zeros(shape, dtype=k.dtype, device=k.device)

    def place(self, round_: Round) -> Tensor:
        """The tensor to which a round's gradients are added, ``[tokens, heads of keys and of values,
        width]``."""
        if round_.distance == 0:
            return self._total
        return self._total.new_zeros((round_.received, *self._total.shape[1:]))

    def send(self, gradients: Tensor, round_: Round) -> None:
        """Send a round's complete gradients to the rank whose keys and values they belong to."""
        if round_.distance == 0:
            return
        if self._gathered is not None:
            self._gathered[round_.source] = gradients
            return
        self._receive()
        message, out = gradients.to(self._k.dtype), self._k.new_empty((round_.sent, *gradients.shape[1:]))
        axis, tag = self._exchange.axis, 2 * round_.distance + 1
        self._leaving = round_, exchange_async(message, round_.source, out, round_.target, axis, tag)

    def complete(self) -> Tensor:
        """The gradients of this rank's keys and values, ``[tokens, heads of both, width]``."""
        self._receive()
        if self._gathered is not None:
            self._total += reduce_scatter_async(self._gathered.flatten(0, 1), self._exchange.axis).wait()
        return self._total

    def _receive(self) -> None:
        """Add what the round before has brought."""
        if self._leaving is None:
            return
        (round_, pending), before = self._leaving, 0
        received = pending.wait()
        for begin, end in round_.send:
            self._total[begin:end] += received[before : before + end - begin]
            before += end - begin
        self._leaving = None
