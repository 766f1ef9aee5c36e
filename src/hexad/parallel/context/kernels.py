"""Attention of some queries over some of their keys, with what is needed to put blocks of keys together: each
query's log-sum-exp of scores.

Backward is that of FlashAttention (Dao et al., arXiv 2205.14135): given the output and the log-sum-exp of
*all* keys, the gradients of one block of keys need nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from .rounds import Tile

Drop = Callable[[Tile, int, int, torch.dtype], torch.Tensor]
"""Factors of dropped probabilities, ``[key/value heads, group, queries, keys]``: of a tile with one block of
keys, of its queries from one number up to another, in a format."""

_SCORES = 1 << 26
"""Scores computed at a time where no kernel computes them in parts."""


class Kernel(Protocol):
    """Computes one tile, given its queries, ``[rows, heads, width]``, and its keys and values, ``[columns,
    key/value heads, width]``."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, as ``q``, and the log-sum-exp, ``[rows, heads]`` in at least float32."""
        ...

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of ``q``, ``k`` and ``v``, given output and log-sum-exp of all keys."""
        ...


def choose(device: torch.device, dtype: torch.dtype, scale: float, drop: Drop | None) -> Kernel:
    """The kernel for a device and a format; plain products where probabilities are dropped, and on GPUs in
    formats of more than 16 bits."""
    if drop is not None:
        return Plain(scale, drop)
    if device.type == "cpu":
        return CpuFlash(scale)
    return CudaFlash(scale) if dtype.itemsize == 2 else Plain(scale, None)


class _Block(NamedTuple):
    """Where one block of a tile lies, in the tile's rows and columns."""

    rows: slice
    columns: slice


def _blocks(tile: Tile) -> Iterator[_Block]:
    first_row, first_column = tile.queries[0], tile.keys[0]
    for (q0, q1), (k0, k1) in zip(pairwise(tile.queries), pairwise(tile.keys)):
        yield _Block(slice(q0 - first_row, q1 - first_row), slice(k0 - first_column, k1 - first_column))


def _batch(x: torch.Tensor) -> torch.Tensor:
    """``[tokens, heads, ...]`` -> ``[1, heads, tokens, ...]``."""
    return x.transpose(0, 1).unsqueeze(0)


class CpuFlash:
    """PyTorch's flash attention for CPUs, a call for each block.

    It returns 0 for the log-sum-exp of a query that sees no key; a tile has none.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for rows, columns in _blocks(tile):
            mask = _mask(tile, q[rows], k[columns])
            operands = (_batch(q[rows]), _batch(k[columns]), _batch(v[columns]))
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *operands, 0.0, tile.causal and mask is None, attn_mask=mask, scale=self.scale
            )
            parts.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = []
        for rows, columns in _blocks(tile):
            mask = _mask(tile, q[rows], k[columns])
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _batch(gradient[rows]),
                _batch(q[rows]),
                _batch(k[columns]),
                _batch(v[columns]),
                _batch(out[rows]),
                _batch(lse[rows]),
                0.0,
                tile.causal and mask is None,
                attn_mask=mask,
                scale=self.scale,
            )
            parts.append([each[0].transpose(0, 1) for each in found])
        dq, dk, dv = (each[0] if len(each) == 1 else torch.cat(each) for each in zip(*parts))
        return dq, dk, dv


def _seen(tile: Tile, rows: int, columns: int, device: torch.device, first: int = 0) -> torch.Tensor:
    """bool ``[rows, columns]``: the keys that a block's queries from number ``first`` on see."""
    row = torch.arange(first, first + rows, device=device)[:, None]
    column = torch.arange(columns, device=device)
    seen = column <= row if tile.causal else torch.ones(rows, columns, dtype=torch.bool, device=device)
    return seen if tile.low is None else seen & (column >= row + tile.low)


def _mask(tile: Tile, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """What a block's queries see, as numbers to add; None where the kernel needs no mask."""
    if tile.low is None:
        return None
    seen = _seen(tile, len(q), len(k), q.device)
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)


class CudaFlash:
    """PyTorch's flash attention for GPUs in 16-bit formats, one call for all blocks of a tile."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_places(tile, q.device), 0.0, tile.causal, False, scale=self.scale, **_window(tile)
        )
        return out, lse.transpose(0, 1)

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the generator: nothing is drawn
        nothing = torch.empty(0, device=q.device)
        lse = lse.transpose(0, 1).contiguous()
        places, window = _places(tile, q.device), _window(tile)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, out, lse, *places, 0.0, tile.causal, state, nothing, scale=self.scale, **window
        )
        return dq, dk, dv


def _places(tile: Tile, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Where the blocks of queries and of keys begin, on the device, and the largest of each."""
    both = []
    for bounds in (tile.queries, tile.keys):
        host = torch.tensor([each - bounds[0] for each in bounds], dtype=torch.int32)
        both.append(host.pin_memory() if device.type == "cuda" else host)
    q, k = (each.to(device, non_blocking=True) for each in both)
    longest = (max(b - a for a, b in pairwise(bounds)) for bounds in (tile.queries, tile.keys))
    return q, k, *longest  # type: ignore[return-value]


def _window(tile: Tile) -> dict[str, Any]:
    """The kernel counts a query's keys from the one that stands as far from the end as it does."""
    if tile.low is None:
        return {}
    (q0, q1), (k0, k1) = tile.queries, tile.keys
    left = (k1 - k0) - (q1 - q0) - tile.low
    return {"window_size_left": left, "window_size_right": 0 if tile.causal else -1}


class Plain:
    """Products and softmax written out, for some queries at a time: at most :data:`_SCORES` scores exist."""

    def __init__(self, scale: float, drop: Drop | None) -> None:
        self.scale, self.drop = scale, drop

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=_wide(q).dtype, device=q.device)
        for rows, columns, first in self._steps(tile, q.shape[1]):
            scores = self._scores(q[rows], k[columns], tile, first)
            found = torch.logsumexp(scores, -1, keepdim=True)
            p = torch.exp(scores.sub_(found))
            lse[rows] = found.squeeze(-1).flatten(0, 1).transpose(0, 1)
            if self.drop is not None:
                p = p * self.drop(tile, rows.start, rows.stop, p.dtype)
            values = p.to(v.dtype) @ v[columns].transpose(0, 1).unsqueeze(1)
            out[rows] = values.permute(2, 0, 1, 3).flatten(1, 2)
        return out, lse

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(_wide(each)) for each in (k, v))
        for rows, columns, first in self._steps(tile, q.shape[1]):
            groups = k.shape[1]
            keys, values = (each[columns].transpose(0, 1).unsqueeze(1) for each in (k, v))
            g = _grouped(gradient[rows], groups)
            delta = (_wide(g) * _wide(_grouped(out[rows], groups))).sum(-1, keepdim=True)
            p = torch.exp(
                self._scores(q[rows], k[columns], tile, first).sub_(_grouped(lse[rows].unsqueeze(-1), groups))
            )
            grad_p = _wide(g @ values.transpose(2, 3))
            weighted = p
            if self.drop is not None:
                factors = self.drop(tile, rows.start, rows.stop, p.dtype)
                weighted, grad_p = p * factors, grad_p * factors
            dv[columns] += (weighted.to(v.dtype).transpose(2, 3) @ g).sum(1).transpose(0, 1)
            scores = (p * (grad_p - delta)).mul_(self.scale).to(v.dtype)
            dq[rows] = (scores @ keys).permute(2, 0, 1, 3).flatten(1, 2)
            dk[columns] += (scores.transpose(2, 3) @ _grouped(q[rows], groups)).sum(1).transpose(0, 1)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _steps(self, tile: Tile, heads: int) -> Iterator[tuple[slice, slice, int]]:
        """Some rows of the tile, the columns of their block, and the first row's number in the block."""
        for rows, columns in _blocks(tile):
            at_once = max(1, _SCORES // (heads * (columns.stop - columns.start)))
            for begin in range(rows.start, rows.stop, at_once):
                yield slice(begin, min(begin + at_once, rows.stop)), columns, begin - rows.start

    def _scores(self, q: torch.Tensor, k: torch.Tensor, tile: Tile, first: int) -> torch.Tensor:
        """``[kv heads, group, rows, columns]``, -inf where a key is not seen."""
        wide = _wide(_grouped(q, k.shape[1])) @ _wide(k).transpose(0, 1).unsqueeze(1).transpose(2, 3)
        wide.mul_(self.scale)
        if tile.causal or tile.low is not None:
            wide.masked_fill_(~_seen(tile, len(q), len(k), q.device, first), -torch.inf)
        return wide


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """``[rows, heads, width]`` -> ``[groups, heads of a group, rows, width]``."""
    return x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In at least float32."""
    return x.float() if x.dtype.itemsize == 2 else x
