"""Attention of some queries over some of their keys, with what is needed to put blocks of keys together: each
query's log-sum-exp of scores.

Backward is that of FlashAttention (Dao et al., arXiv 2205.14135): given the output and the log-sum-exp of
*all* keys, the gradients of one block of keys need nothing of the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexad.comm import streams

from ..attention_choice import AttentionMethod
from ..pointwise import widened
from .rounds import SCORES, Tile

ProbabilityFactors = Callable[[Tile, slice, slice, torch.dtype], Tensor]
"""Factors of dropped probabilities, ``[key/value heads, group, queries, keys]``: of a tile with one block of
keys, of some of its rows and columns, in a format."""

_BAND = 256
"""Queries of a band: fewer make many calls, more compute many scores that no query sees."""


class Operands(NamedTuple):
    """The queries, keys and values of a tile.

    Attributes:
        q: its queries, ``[rows, heads, width]``.
        k, v: its keys and values, ``[columns, key/value heads, width]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Results(NamedTuple):
    """Output of some queries over all keys, and its gradient.

    Attributes:
        out, gradient: ``[rows, heads, width]``.
        lse: ``[rows, heads]``, in at least float32.
    """

    out: Tensor
    lse: Tensor
    gradient: Tensor


class Output(NamedTuple):
    """Attention of some queries of a tile: ``out [rows, heads, width]``, ``lse [rows, heads]``."""

    rows: slice
    out: Tensor
    lse: Tensor


class AttentionGradients(NamedTuple):
    """Gradients of some of a tile's queries, and what these add to some keys and values."""

    rows: slice
    columns: slice
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Kernel(ABC):
    """Computes a tile, in parts that it chooses.

    Attributes:
        scale: what scores are multiplied by.
    """

    scale: float

    @abstractmethod
    def forward(self, operands: Operands, tile: Tile) -> Iterator[Output]:
        """Compute the attention of all queries, each of them in one part."""

    @abstractmethod
    def backward(self, operands: Operands, results: Results, tile: Tile) -> Iterator[AttentionGradients]:
        """Compute gradients in parts, the sum of which is the tile's gradients."""


def tile_kernel(method: AttentionMethod, scale: float, factors: ProbabilityFactors | None) -> Kernel:
    """The kernel for a method of :data:`~hexad.parallel.attention_choice.TILED`; ``factors``: of dropped
    probabilities."""
    if method is AttentionMethod.SCORES:
        return Plain(scale, factors)
    return CpuFlash(scale) if method is AttentionMethod.CPU_FLASH else CudaFlash(scale)


class _Block(NamedTuple):
    """Queries and keys of a tile that one call computes.

    Attributes:
        rows, columns: numbered from the tile's first.
        behind: how many keys of the block come before that of its first query.
    """

    rows: slice
    columns: slice
    behind: int = 0


def _blocks(tile: Tile) -> Iterator[_Block]:
    """The tile's blocks. Of a causal one in which queries see a window of keys, a band at a time: of the
    whole block's pairs few may be seen."""
    first_row, first_column = tile.queries[0], tile.keys[0]
    for (q0, q1), (k0, k1) in zip(pairwise(tile.queries), pairwise(tile.keys)):
        row, column = q0 - first_row, k0 - first_column
        if not tile.causal or tile.low is None:
            yield _Block(slice(row, q1 - first_row), slice(column, k1 - first_column))
            continue
        for begin in range(0, q1 - q0, _BAND):
            end, key = min(begin + _BAND, q1 - q0), max(0, begin + tile.low)
            yield _Block(slice(row + begin, row + end), slice(column + key, column + end), begin - key)


def _seen(tile: Tile, block: _Block, device: torch.device) -> Tensor:
    """bool ``[rows, columns]``: the keys that a block's queries see."""
    rows, columns = (part.stop - part.start for part in block[:2])
    row = torch.arange(block.behind, block.behind + rows, device=device)[:, None]
    column = torch.arange(columns, device=device)
    seen = column <= row if tile.causal else torch.ones(rows, columns, dtype=torch.bool, device=device)
    return seen if tile.low is None else seen & (column >= row + tile.low)


class CpuFlash(Kernel):
    """PyTorch's flash attention for CPUs, a call for each block.

    It returns 0 for the log-sum-exp of a query that sees no key; a tile has none.
    """

    def forward(self, operands: Operands, tile: Tile) -> Iterator[Output]:
        for block in _blocks(tile):
            rows, columns, _ = block
            parts = operands.q[rows], operands.k[columns], operands.v[columns]
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *map(_batch, parts), 0.0, **self._options(tile, block, operands.q)
            )
            yield Output(rows, out[0].transpose(0, 1), lse[0].transpose(0, 1))

    def backward(self, operands: Operands, results: Results, tile: Tile) -> Iterator[AttentionGradients]:
        for block in _blocks(tile):
            rows, columns, _ = block
            parts = operands.q[rows], operands.k[columns], operands.v[columns]
            arguments = results.gradient[rows], *parts, results.out[rows], results.lse[rows]
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *map(_batch, arguments), 0.0, **self._options(tile, block, operands.q)
            )
            yield AttentionGradients(rows, columns, *(gradient[0].transpose(0, 1) for gradient in gradients))
            del gradients

    def _options(self, tile: Tile, block: _Block, q: Tensor) -> dict[str, Any]:
        """Arguments that select the keys that queries see: a mask to add, where there is a limit from
        below."""
        if tile.low is None:
            return {"is_causal": tile.causal, "attn_mask": None, "scale": self.scale}
        hidden = ~_seen(tile, block, q.device)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        return {"is_causal": False, "attn_mask": mask, "scale": self.scale}


def _batch(x: Tensor) -> Tensor:
    """``[tokens, heads, ...]`` -> ``[1, heads, tokens, ...]``."""
    return x.transpose(0, 1).unsqueeze(0)


class CudaFlash(Kernel):
    """PyTorch's flash attention for GPUs in 16-bit formats, one call for all blocks of a tile."""

    def forward(self, operands: Operands, tile: Tile) -> Iterator[Output]:
        places, options = _places(tile, operands.q.device), self._options(tile)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *operands, *places, 0.0, tile.causal, False, **options
        )
        yield Output(slice(None), out, lse.transpose(0, 1))

    def backward(self, operands: Operands, results: Results, tile: Tile) -> Iterator[AttentionGradients]:
        device = operands.q.device
        state = torch.zeros(2, dtype=torch.uint64, device=device)  # of the generator: nothing is drawn
        nothing = torch.empty(0, device=device)
        lse = results.lse.transpose(0, 1).contiguous()
        gradients = torch.ops.aten._flash_attention_backward(
            results.gradient,
            *operands,
            results.out,
            lse,
            *_places(tile, device),
            0.0,
            tile.causal,
            state,
            nothing,
            **self._options(tile),
        )
        yield AttentionGradients(slice(None), slice(None), *gradients)

    def _options(self, tile: Tile) -> dict[str, Any]:
        """The kernel counts a query's keys from the one that stands as far from the end as it does."""
        if tile.low is None:
            return {"scale": self.scale}
        (q0, q1), (k0, k1) = tile.queries, tile.keys
        left = (k1 - k0) - (q1 - q0) - tile.low
        right = 0 if tile.causal else -1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": right}


@lru_cache(maxsize=512)  # of a microbatch's tiles, which all layers compute
def _places(tile: Tile, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """First indices of the blocks of queries and of keys, int32 on the device, and the largest of each."""
    offsets: list[Any] = []
    for bounds in (tile.queries, tile.keys):
        host = torch.tensor([bound - bounds[0] for bound in bounds], dtype=torch.int32)
        offsets.append(streams.of(device).moved(host, device))
    offsets += [max(b - a for a, b in pairwise(bounds)) for bounds in (tile.queries, tile.keys)]
    return tuple(offsets)


@dataclass(frozen=True)
class Plain(Kernel):
    """Products and softmax written out, for some queries at a time: :data:`SCORES` exist at most, or those of
    one query."""

    factors: ProbabilityFactors | None

    def forward(self, operands: Operands, tile: Tile) -> Iterator[Output]:
        for block in self._steps(tile, operands.q.shape[1]):
            yield self._output(operands, tile, block)

    def _output(self, operands: Operands, tile: Tile, block: _Block) -> Output:
        rows, columns, _ = block
        v = operands.v[columns]
        p = self._scores(operands, tile, block)
        lse = p.logsumexp(-1, keepdim=True)
        p.sub_(lse).exp_()
        if self.factors is not None:
            p *= self.factors(tile, rows, columns, p.dtype)
        out = (p.to(v.dtype) @ _columns(v)).permute(2, 0, 1, 3).flatten(1, 2)
        return Output(rows, out, lse.permute(2, 0, 1, 3).flatten(1))

    def backward(self, operands: Operands, results: Results, tile: Tile) -> Iterator[AttentionGradients]:
        for block in self._steps(tile, operands.q.shape[1]):
            yield self._gradients(operands, results, tile, block)

    def _gradients(
        self, operands: Operands, results: Results, tile: Tile, block: _Block
    ) -> AttentionGradients:
        rows, columns, _ = block
        k, v, groups = operands.k[columns], operands.v[columns], operands.k.shape[1]
        g, out, q = (_grouped(tensor[rows], groups) for tensor in (results.gradient, results.out, operands.q))
        delta = (widened(g) * widened(out)).sum(-1, keepdim=True)
        lse = _grouped(results.lse[rows].unsqueeze(-1), groups)
        p = self._scores(operands, tile, block).sub_(lse).exp_()
        factors = None if self.factors is None else self.factors(tile, rows, columns, p.dtype)
        grad_p, weighted = widened(g @ _columns(v).transpose(2, 3)), p
        if factors is not None:
            grad_p *= factors
            weighted = factors.mul_(p)
            del factors
        dv = (weighted.to(v.dtype).transpose(2, 3) @ g).sum(1).transpose(0, 1)
        del weighted
        scores = grad_p.sub_(delta).mul_(p).mul_(self.scale).to(v.dtype)
        del grad_p, p
        dq = (scores @ _columns(k)).permute(2, 0, 1, 3).flatten(1, 2)
        dk = (scores.transpose(2, 3) @ q).sum(1).transpose(0, 1)
        return AttentionGradients(rows, columns, dq, dk, dv)

    def _steps(self, tile: Tile, heads: int) -> Iterator[_Block]:
        """The blocks of a tile, cut into as many queries as bounded scores allow."""
        for rows, columns, behind in _blocks(tile):
            at_once = max(1, SCORES // (heads * (columns.stop - columns.start)))
            for begin in range(rows.start, rows.stop, at_once):
                end, first = min(begin + at_once, rows.stop), behind + begin - rows.start
                seen = min(columns.stop, columns.start + first + end - begin) if tile.causal else columns.stop
                yield _Block(slice(begin, end), slice(columns.start, seen), first)

    def _scores(self, operands: Operands, tile: Tile, block: _Block) -> Tensor:
        """``[kv heads, group, rows, columns]``, -inf where a key is not seen."""
        q, k = operands.q[block.rows], operands.k[block.columns]
        wide = widened(_grouped(q, k.shape[1])) @ widened(_columns(k)).transpose(2, 3)
        wide.mul_(self.scale)
        if tile.causal or tile.low is not None:
            wide.masked_fill_(~_seen(tile, block, q.device), -torch.inf)
        return wide


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[rows, heads, width]`` -> ``[groups, heads of a group, rows, width]``."""
    return x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _columns(x: Tensor) -> Tensor:
    """``[columns, groups, width]`` -> ``[groups, 1, columns, width]``."""
    return x.transpose(0, 1).unsqueeze(1)
