"""Attention of some tokens of several sequences over paged keys, those of the tokens before them included,
by the methods that :mod:`hexad.parallel.attention_choice` chooses:

- ``CPU_FLASH``: once for each run of keys that are neighbours, and once for a sequence's own new tokens;
  outputs are merged by their log-sum-exp. The query heads that share a key head are computed as so many
  queries of one head, so that each key is read once.
- ``VARLEN``: one call for all sequences, which reads the blocks by their table where it can; else keys are
  gathered first.
- ``SDPA``: a call for each sequence, under a mask.
- ``EXACT``: :mod:`hexad.model.exact_attention`; sequences with one new token together.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hexad.comm import streams
from hexad.model.attention_kernels import AttentionKernel
from hexad.model.exact_attention import RoundedKeys, TokenRange, Visible, Wide, attend, attend_run, on_grid
from hexad.parallel.attention_choice import AttentionMethod, choose_attention
from hexad.parallel.context.attention import merge_

from .blocks import SlotRun

log = logging.getLogger(__name__)


class Queries(NamedTuple):
    """Consecutive tokens of one sequence whose attention this rank computes.

    Attributes:
        rows: theirs among the queries, first and end.
        place: the row of the first among the new keys.
        position: of the first in the sequence.
        runs: where the keys from position ``origin`` on are, up to those of the last one at least.
        origin: position of the first key.
    """

    rows: tuple[int, int]
    place: int
    position: int
    runs: tuple[SlotRun, ...]
    origin: int

    @property
    def tokens(self) -> int:
        """How many these are."""
        return self.rows[1] - self.rows[0]

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.position + self.tokens

    def keys(self, begin: int, end: int) -> list[SlotRun]:
        """Slots of the keys of positions from ``begin`` to ``end``."""
        runs, at = [], self.origin
        for slot, tokens in self.runs:
            low, high = max(begin, at), min(end, at + tokens)
            if low < high:
                runs.append(SlotRun(slot + low - at, high - low))
            at += tokens
        return runs


@dataclass(eq=False)
class Arrangement:
    """The slots of a batch's tokens and of the keys that they attend to, the same for all layers.

    Attributes:
        slots: int64 ``[tokens of the batch]``: where the keys of each go.
        queries: the tokens whose attention this rank computes, in the order of their rows.
        rows: of the queries; those after the last ones are padding.
    """

    slots: Tensor
    queries: Sequence[Queries]
    rows: int
    _before: dict[int | None, list[tuple[Queries, list[SlotRun]]]] = field(default_factory=dict)
    _table: Tensor | None = None

    def before(self, window: int | None) -> list[tuple[Queries, list[SlotRun]]]:
        """Queries, and where the keys are that they see in the cache: up to their own if it is one, else up
        to that of the first. Computed for the first layer with a window."""
        if window not in self._before:
            self._before[window] = [(queries, _before(queries, window)) for queries in self.queries]
        return self._before[window]

    @cached_property
    def end(self) -> int:
        """The end of the sequence that reaches furthest, in positions."""
        return max((queries.end for queries in self.queries), default=0)

    @cached_property
    def single(self) -> bool:
        """Whether every sequence has one new token."""
        return all(queries.tokens == 1 for queries in self.queries)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64 ``[2, sequences]``: the queries and the keys of each."""
        pairs = [(queries.tokens, queries.end - queries.origin) for queries in self.queries]
        return np.array(pairs, dtype=np.int64).T

    @cached_property
    def tokens(self) -> int:
        """Queries of all sequences."""
        return int(self.counts[0].sum())

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Queries, and keys, of a sequence at most."""
        queries, keys = self.counts.max(1)
        return int(queries), int(keys)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """int32 ``[sequences + 1]`` on the device: the first query, and the first key, of each sequence, and
        the number of all."""
        query_bounds, key_bounds = (
            self._moved(np.concatenate(([0], np.cumsum(counts)))) for counts in self.counts
        )
        return query_bounds, key_bounds

    @cached_property
    def used(self) -> Tensor:
        """int32 ``[sequences]`` on the device: keys of each."""
        return self._moved(self.counts[1])

    @cached_property
    def key_slots(self) -> Tensor:
        """int64 ``[keys]`` on the device: where they are."""
        spans = [np.arange(slot, slot + tokens) for runs in self._runs for slot, tokens in runs]
        return self._moved(np.concatenate(spans), np.int64)

    def table(self, size: int) -> Tensor:
        """int32 ``[sequences, blocks]`` on the device: the blocks of each, of ``size`` tokens."""
        if self._table is None:
            rows = [
                [np.arange(slot, slot + tokens, size) // size for slot, tokens in runs] for runs in self._runs
            ]
            table = np.zeros((len(rows), max(sum(map(len, row)) for row in rows)), dtype=np.int32)
            for line, row in zip(table, rows):
                blocks = np.concatenate(row)
                line[: len(blocks)] = blocks
            self._table = self._moved(table)
        return self._table

    @cached_property
    def _runs(self) -> list[list[SlotRun]]:
        return [queries.keys(queries.origin, queries.end) for queries in self.queries]

    def _moved(self, numbers: NDArray[Any], dtype: Any = np.int32) -> Tensor:
        device = self.slots.device
        return streams.of(device).moved(torch.from_numpy(numbers.astype(dtype)), device)


def _before(queries: Queries, window: int | None) -> list[SlotRun]:
    end = queries.end if queries.tokens == 1 else queries.position
    return queries.keys(queries.origin if window is None else max(queries.origin, queries.end - window), end)


class KeyValueMemory(ABC):
    """The keys and values of one layer.

    Attributes:
        keys, values: ``[slots, key/value heads, width]``.
    """

    def __init__(self, slots: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys, self.values = (torch.empty((slots, *shape), dtype=dtype, device=device) for _ in range(2))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, arrangement: Arrangement, kernel: AttentionKernel
    ) -> Tensor:
        """Keep new keys and values, and compute attention over all that are kept.

        Args:
            q: ``[rows, heads, width]``.
            k, v: ``[tokens of the batch, key/value heads, width]``.
            arrangement: where they are.
            kernel: the layer's.

        Returns:
            ``[rows, heads, width]``; zeros for padding.
        """
        self.keys.index_copy_(0, arrangement.slots, k)
        self.values.index_copy_(0, arrangement.slots, v)
        parts = self._computed(q, k, v, arrangement, kernel)
        missing = arrangement.rows - (arrangement.queries[-1].rows[1] if arrangement.queries else 0)
        if missing:
            parts.append(q.new_zeros((missing, *q.shape[1:])))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, arrangement: Arrangement, kernel: AttentionKernel
    ) -> list[Tensor]:
        """The attention of runs of rows, in their order."""

    def _gathered(self, queries: Queries, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions from ``begin`` to ``end``, ``[positions, key/value heads, width]``."""
        runs = queries.keys(begin, end)
        k, v = (
            torch.cat([kept.narrow(0, *run) for run in runs]) if len(runs) > 1 else kept.narrow(0, *runs[0])
            for kept in (self.keys, self.values)
        )
        return k, v

    def _masked(self, q: Tensor, queries: Queries, kernel: AttentionKernel) -> Tensor:
        """``[tokens, heads, width]`` of some queries, by plain attention under a mask."""
        limit = queries.end if kernel.window is None else kernel.window
        begin = max(queries.origin, queries.position + 1 - limit)
        k, v = self._gathered(queries, begin, queries.end)
        seen = None
        if queries.tokens > 1:
            position = torch.arange(queries.position, queries.end, device=q.device)[:, None]
            key = torch.arange(begin, queries.end, device=q.device)
            seen = (key <= position) & (key > position - limit)
        out = kernel.dense(_batch(q), _batch(k), _batch(v), causal=False, mask=seen)
        return out[0].transpose(0, 1)


class HostMemory(KeyValueMemory):
    """Keys and values of a layer on a CPU."""

    def __init__(self, slots: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(slots, shape, dtype, device)
        self._keys, self._values = _batch(self.keys), _batch(self.values)

    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, arrangement: Arrangement, kernel: AttentionKernel
    ) -> list[Tensor]:
        heads, groups, width = q.shape[1], k.shape[1], q.shape[2]
        parts: list[Tensor] = []
        scale = kernel.scale
        for alone, pairs in groupby(arrangement.before(kernel.window), key=lambda pair: pair[0].tokens == 1):
            if not alone:
                parts += [self._chunk(q, k, v, queries, runs, kernel) for queries, runs in pairs]
                continue
            sequences = list(pairs)
            rows = q.narrow(0, sequences[0][0].rows[0], len(sequences))
            # Each [1, key/value heads, heads of a group, width].
            grouped = rows.view(-1, 1, groups, heads // groups, width).unbind(0)
            outputs = [self._over(queries, runs, scale) for queries, (_, runs) in zip(grouped, sequences)]
            parts.append(torch.cat(outputs).view(-1, heads, width))
        return parts

    def _over(self, q: Tensor, runs: Sequence[SlotRun], scale: float) -> Tensor:
        """The attention of queries ``[1, heads, queries, width]`` over all keys of some runs."""
        if len(runs) == 1:
            (run,) = runs
            return _flash(q, self._keys.narrow(2, *run), self._values.narrow(2, *run), scale)[0]
        return _together(self._by_run(q, runs, scale))

    def _by_run(self, q: Tensor, runs: Sequence[SlotRun], scale: float) -> list[tuple[Tensor, Tensor]]:
        return [_flash(q, self._keys.narrow(2, *run), self._values.narrow(2, *run), scale) for run in runs]

    def _chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Queries,
        runs: Sequence[SlotRun],
        kernel: AttentionKernel,
    ) -> Tensor:
        """The attention of a sequence's new tokens over their own keys and those before."""
        new_q, scale = q.narrow(0, queries.rows[0], queries.tokens), kernel.scale
        if choose_attention(kernel.cached_facts(q, True, "keys", queries.end, False)) is AttentionMethod.SDPA:
            return self._masked(new_q, queries, kernel)
        new_k, new_v = (x.narrow(0, queries.place, queries.tokens) for x in (k, v))
        batch = _batch(new_q)
        parts = [_flash(batch, _batch(new_k), _batch(new_v), scale, True), *self._by_run(batch, runs, scale)]
        return _together(parts)[0].transpose(0, 1).to(q.dtype)


class GpuMemory(KeyValueMemory):
    """Keys and values of a layer on a GPU.

    Attributes:
        block: tokens of a block.
    """

    def __init__(
        self, slots: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, block: int
    ) -> None:
        super().__init__(slots, shape, dtype, device)
        self.block = block

    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, arrangement: Arrangement, kernel: AttentionKernel
    ) -> list[Tensor]:
        if not arrangement.queries:
            return []
        facts = kernel.cached_facts(q, False, "keys", arrangement.end, arrangement.single)
        if choose_attention(facts) is not AttentionMethod.VARLEN:
            return [
                self._masked(q.narrow(0, queries.rows[0], queries.tokens), queries, kernel)
                for queries in arrangement.queries
            ]
        varlen = kernel.varlen
        assert varlen is not None
        window = (kernel.window - 1 if kernel.window is not None else -1, 0)
        query_bounds, key_bounds = arrangement.bounds
        rows = q.narrow(0, 0, arrangement.tokens)
        options: dict[str, Any] = {"scale": kernel.scale, "window_size": window}
        sizes = self.block, q.shape[1], k.shape[1], q.shape[2]
        if reads_blocks(varlen, self.keys.device, self.keys.dtype, *sizes):
            keys, values = (kept.unflatten(0, (-1, self.block)) for kept in (self.keys, self.values))
            options |= {"seqused_k": arrangement.used, "block_table": arrangement.table(self.block)}
            bounds: Tensor | None = None
        else:
            keys, values = (kept.index_select(0, arrangement.key_slots) for kept in (self.keys, self.values))
            bounds = key_bounds
        return [varlen(rows, keys, values, query_bounds, bounds, *arrangement.longest, **options)]


class ExactMemory(KeyValueMemory):
    """The memory of exact arithmetic, on any device: keys and values are kept as
    :func:`hexad.model.exact_attention.on_grid` rounds them.

    Attributes:
        tops: ``[slots, key/value heads]``, see :class:`~hexad.model.exact_attention.RoundedKeys`.
    """

    def __init__(self, slots: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(slots, shape, dtype, device)
        self.tops = torch.empty((slots, shape[0]), device=device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, arrangement: Arrangement, kernel: AttentionKernel
    ) -> Tensor:
        """Keep new keys and values, rounded, and compute attention over all that are kept."""
        kept = on_grid(k, v)
        self.tops.index_copy_(0, arrangement.slots, kept.tops)
        return super().attend(q, kept.keys, kept.values, arrangement, kernel)

    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, arrangement: Arrangement, kernel: AttentionKernel
    ) -> list[Tensor]:
        parts: list[Tensor] = []
        for alone, group in groupby(arrangement.queries, key=lambda queries: queries.tokens == 1):
            sequences = list(group)
            if alone:
                elements = k.shape[1] * k.shape[2]
                parts += [self._together(q, batch, kernel) for batch in alike(sequences, elements)]
                continue
            for queries in sequences:
                run = TokenRange(queries.position, queries.origin, kernel.window)
                rows = q.narrow(0, queries.rows[0], queries.tokens)
                parts.append(
                    attend_run(
                        rows, self._kept(slots_of(queries, queries.origin), q.device), run, kernel.scale
                    )
                )
        return parts

    def _kept(self, slots: NDArray[np.int64], device: torch.device) -> RoundedKeys:
        """The keys and values at some slots, in their shape."""
        where = streams.of(device).moved(torch.from_numpy(slots.ravel()), device)
        kept = self.keys, self.values, self.tops
        return RoundedKeys(*(tensor.index_select(0, where).unflatten(0, slots.shape) for tensor in kept))

    def _together(self, q: Tensor, sequences: Sequence[Queries], kernel: AttentionKernel) -> Tensor:
        """The attention of neighbouring sequences' single queries ``[sequences, heads, width]``."""
        window, device = kernel.window, q.device
        seen = [queries.end if window is None else min(queries.end, window) for queries in sequences]
        slots = np.empty((len(sequences), max(seen)), dtype=np.int64)
        for line, queries, count in zip(slots, sequences, seen):
            places = slots_of(queries, queries.end - count)
            line[:count], line[count:] = places, places[-1]  # of padding any that are numbers
        end = streams.of(device).moved(torch.tensor(seen), device)[:, None]
        visible = Visible(torch.zeros_like(end), end, end, min(seen) == max(seen))
        rows = q.narrow(0, sequences[0].rows[0], len(sequences))[:, None]
        return attend(rows.contiguous(), Wide.of(self._kept(slots, device)), visible, kernel.scale)[:, 0]


def slots_of(queries: Queries, begin: int) -> NDArray[np.int64]:
    """Slots of the keys of positions from ``begin`` on."""
    runs = queries.keys(begin, queries.end)
    return np.concatenate([np.arange(slot, slot + tokens, dtype=np.int64) for slot, tokens in runs])


_KEYS = 1 << 20
"""Elements of keys that are gathered at a time, about."""


def alike(sequences: Sequence[Queries], elements: int) -> list[Sequence[Queries]]:
    """Neighbouring queries in groups that are computed together, whose keys, padded to the longest, have
    about :data:`_KEYS` elements."""
    groups: list[list[Queries]] = [[]]
    longest = 0
    for queries in sequences:
        longest = max(longest, queries.end)
        if groups[-1] and longest * (len(groups[-1]) + 1) * elements > _KEYS:
            groups.append([])
            longest = queries.end
        groups[-1].append(queries)
    return list(groups)


@cache
def reads_blocks(
    varlen: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    heads: int,
    groups: int,
    width: int,
) -> bool:
    """Whether PyTorch's kernel reads keys by a table of blocks on this device: tried on two sequences, whose
    values say which keys were seen."""
    if "block_table" not in signature(varlen).parameters:
        return False
    q = torch.zeros((2, heads, width), dtype=dtype, device=device)  # all keys weigh the same
    keys = torch.zeros((3, size, groups, width), dtype=dtype, device=device)
    values = torch.arange(3.0, device=device).to(dtype)[:, None, None, None].expand(keys.shape).contiguous()
    bounds, used, table = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([0, 1, 2], [size // 2, 2 * size], [[2, 0], [0, 1]])
    )
    try:
        out = varlen(
            q, keys, values, bounds, None, 1, 2 * size, scale=1.0, window_size=(-1, 0),
            seqused_k=used, block_table=table,
        )  # fmt: skip
    except Exception as error:  # of any kind, as its sizes, build and GPU allow
        log.info(
            "attention: keys are gathered: %s", next(iter(str(error).splitlines()), type(error).__name__)
        )
        return False
    return bool(torch.allclose(out[:, 0, 0].float().cpu(), torch.tensor([2.0, 0.5]), atol=0.02))


def _batch(x: Tensor) -> Tensor:
    """``[tokens, heads, width]`` -> ``[1, heads, tokens, width]``."""
    return x.transpose(0, 1).unsqueeze(0)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output ``[1, heads, queries, width]`` and log-sum-exp ``[1, heads, queries]``; ``k`` and ``v`` may have
    fewer heads."""
    out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, scale=scale
    )
    return out


def _together(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The output over all keys of outputs over some."""
    out, lse = parts[0]
    if len(parts) == 1:
        return out
    wide = torch.promote_types(out.dtype, torch.float32)
    total, lse = out.to(wide), lse.to(wide).clone()
    for other, other_lse in parts[1:]:
        merge_(total, lse, other, other_lse)
    return total.to(out.dtype)
