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
from hexad.model.exact_attention import Keys, Visible, Wide, attend, attend_run, on_grid
from hexad.model.exact_attention import Run as KeyRun
from hexad.parallel.attention_choice import AttentionMethod, choose_attention
from hexad.parallel.context.attention import merge_

from .blocks import Run

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
    runs: tuple[Run, ...]
    origin: int

    @property
    def tokens(self) -> int:
        """How many these are."""
        return self.rows[1] - self.rows[0]

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.position + self.tokens

    def keys(self, begin: int, end: int) -> list[Run]:
        """Where the keys of positions from ``begin`` to ``end`` are."""
        runs, at = [], self.origin
        for slot, tokens in self.runs:
            low, high = max(begin, at), min(end, at + tokens)
            if low < high:
                runs.append(Run(slot + low - at, high - low))
            at += tokens
        return runs


@dataclass(eq=False)
class Arrangement:
    """Where the tokens of a step are, the same for all layers.

    Attributes:
        slots: int64 ``[tokens of the step]``: where the keys of each go.
        queries: the tokens whose attention this rank computes, in the order of their rows.
        rows: of the queries; those after the last ones are padding.
    """

    slots: Tensor
    queries: Sequence[Queries]
    rows: int
    _seen: dict[int | None, list[tuple[Queries, list[Run]]]] = field(default_factory=dict)

    def before(self, window: int | None) -> list[tuple[Queries, list[Run]]]:
        """Queries, and where the keys are that they see in the cache: up to their own if it is one, else up
        to that of the first. Computed for the first layer with a window."""
        if window not in self._seen:
            self._seen[window] = [(one, _before(one, window)) for one in self.queries]
        return self._seen[window]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, the new ones included."""
        return max((one.end for one in self.queries), default=0)

    @cached_property
    def single(self) -> bool:
        """Whether every sequence has one new token."""
        return all(one.tokens == 1 for one in self.queries)

    @cached_property
    def places(self) -> Places:
        """Where everything is, on the device."""
        return Places(self.queries, self.slots.device)


class Places:
    """Where queries and their keys are, on the device.

    Attributes:
        queries: their number.
        query_bounds, key_bounds: int32 ``[sequences + 1]``: first query, and first key, of each sequence, and
            all of them.
        used: int32 ``[sequences]``: keys of each.
        longest: queries, and keys, of a sequence at most.
    """

    def __init__(self, queries: Sequence[Queries], device: torch.device) -> None:
        self._runs, self._device = [one.keys(one.origin, one.end) for one in queries], device
        counts = np.array([one.tokens for one in queries])
        keys = np.array([one.end - one.origin for one in queries])
        self.queries, self.longest = int(counts.sum()), (int(counts.max()), int(keys.max()))
        self.query_bounds, self.key_bounds = (
            self._moved(np.concatenate(([0], np.cumsum(numbers)))) for numbers in (counts, keys)
        )
        self.used = self._moved(keys)

    @cached_property
    def slots(self) -> Tensor:
        """int64 ``[keys]``: where they are."""
        parts = [np.arange(slot, slot + tokens) for runs in self._runs for slot, tokens in runs]
        return self._moved(np.concatenate(parts), np.int64)

    def table(self, size: int) -> Tensor:
        """int32 ``[sequences, blocks]``: the blocks of each, of ``size`` tokens."""
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

    _table: Tensor | None = None

    def _moved(self, numbers: NDArray[Any], dtype: Any = np.int32) -> Tensor:
        return streams.of(self._device).moved(torch.from_numpy(numbers.astype(dtype)), self._device)


def _before(one: Queries, window: int | None) -> list[Run]:
    end = one.end if one.tokens == 1 else one.position
    return one.keys(one.origin if window is None else max(one.origin, one.end - window), end)


class Memory(ABC):
    """The keys and values of one layer.

    Attributes:
        keys, values: ``[slots, key/value heads, width]``.
    """

    def __init__(self, slots: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys, self.values = (torch.empty((slots, *shape), dtype=dtype, device=device) for _ in range(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Arrangement, kernel: AttentionKernel) -> Tensor:
        """Keep new keys and values, and compute attention over all that are kept.

        Args:
            q: ``[rows, heads, width]``.
            k, v: ``[tokens of the step, key/value heads, width]``.
            step: where they are.
            kernel: the layer's.

        Returns:
            ``[rows, heads, width]``; zeros for padding.
        """
        self.keys.index_copy_(0, step.slots, k)
        self.values.index_copy_(0, step.slots, v)
        parts = self._computed(q, k, v, step, kernel)
        missing = step.rows - (step.queries[-1].rows[1] if step.queries else 0)
        if missing:
            parts.append(q.new_zeros((missing, *q.shape[1:])))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @abstractmethod
    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, step: Arrangement, kernel: AttentionKernel
    ) -> list[Tensor]:
        """The attention of runs of rows, in their order."""

    def _gathered(self, one: Queries, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions from ``begin`` to ``end``, ``[positions, key/value heads, width]``."""
        runs = one.keys(begin, end)
        k, v = (
            torch.cat([kept.narrow(0, *run) for run in runs]) if len(runs) > 1 else kept.narrow(0, *runs[0])
            for kept in (self.keys, self.values)
        )
        return k, v

    def _masked(self, q: Tensor, one: Queries, kernel: AttentionKernel) -> Tensor:
        """``[tokens, heads, width]`` of some queries, by plain attention under a mask."""
        limit = one.end if kernel.window is None else kernel.window
        begin = max(one.origin, one.position + 1 - limit)
        k, v = self._gathered(one, begin, one.end)
        seen = None
        if one.tokens > 1:
            position = torch.arange(one.position, one.end, device=q.device)[:, None]
            key = torch.arange(begin, one.end, device=q.device)
            seen = (key <= position) & (key > position - limit)
        out = kernel.dense(_batch(q), _batch(k), _batch(v), causal=False, mask=seen)
        return out[0].transpose(0, 1)


class HostMemory(Memory):
    """On a CPU."""

    def __init__(self, slots: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(slots, shape, dtype, device)
        self._keys, self._values = _batch(self.keys), _batch(self.values)

    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, step: Arrangement, kernel: AttentionKernel
    ) -> list[Tensor]:
        heads, groups, width = q.shape[1], k.shape[1], q.shape[2]
        parts: list[Tensor] = []
        scale = kernel.scale
        for alone, pairs in groupby(step.before(kernel.window), key=lambda pair: pair[0].tokens == 1):
            if not alone:
                parts += [self._chunk(q, k, v, one, runs, kernel) for one, runs in pairs]
                continue
            ones = list(pairs)
            rows = q.narrow(0, ones[0][0].rows[0], len(ones))
            # Each [1, key/value heads, heads of a group, width].
            grouped = rows.view(-1, 1, groups, heads // groups, width).unbind(0)
            outputs = [self._over(one, runs, scale) for one, (_, runs) in zip(grouped, ones)]
            parts.append(torch.cat(outputs).view(-1, heads, width))
        return parts

    def _over(self, q: Tensor, runs: Sequence[Run], scale: float) -> Tensor:
        """Attention of queries ``[1, heads, queries, width]`` that see all keys of some runs."""
        if len(runs) == 1:
            (run,) = runs
            return _flash(q, self._keys.narrow(2, *run), self._values.narrow(2, *run), scale)[0]
        return _together(self._each(q, runs, scale))

    def _each(self, q: Tensor, runs: Sequence[Run], scale: float) -> list[tuple[Tensor, Tensor]]:
        return [_flash(q, self._keys.narrow(2, *run), self._values.narrow(2, *run), scale) for run in runs]

    def _chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        one: Queries,
        runs: Sequence[Run],
        kernel: AttentionKernel,
    ) -> Tensor:
        """Attention of a sequence's new tokens over their own keys and those before."""
        rows, scale = q.narrow(0, one.rows[0], one.tokens), kernel.scale
        if choose_attention(kernel.cached_facts(q, True, "keys", one.end, False)) is AttentionMethod.SDPA:
            return self._masked(rows, one, kernel)
        batch = _batch(rows)
        new_keys, new_values = (_batch(new.narrow(0, one.place, one.tokens)) for new in (k, v))
        parts = [_flash(batch, new_keys, new_values, scale, True), *self._each(batch, runs, scale)]
        return _together(parts)[0].transpose(0, 1).to(q.dtype)


class DeviceMemory(Memory):
    """On a GPU.

    Attributes:
        block: tokens of a block.
    """

    def __init__(
        self, slots: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, block: int
    ) -> None:
        super().__init__(slots, shape, dtype, device)
        self.block = block

    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, step: Arrangement, kernel: AttentionKernel
    ) -> list[Tensor]:
        if not step.queries:
            return []
        facts = kernel.cached_facts(q, False, "keys", step.longest, step.single)
        if choose_attention(facts) is not AttentionMethod.VARLEN:
            return [self._masked(q.narrow(0, one.rows[0], one.tokens), one, kernel) for one in step.queries]
        places, varlen = step.places, kernel.varlen
        assert varlen is not None
        window = (kernel.window - 1 if kernel.window is not None else -1, 0)
        rows = q.narrow(0, 0, places.queries)
        options: dict[str, Any] = {"scale": kernel.scale, "window_size": window}
        sizes = self.block, q.shape[1], k.shape[1], q.shape[2]
        if reads_blocks(varlen, self.keys.device, self.keys.dtype, *sizes):
            keys, values = (kept.unflatten(0, (-1, self.block)) for kept in (self.keys, self.values))
            options |= {"seqused_k": places.used, "block_table": places.table(self.block)}
            bounds: Tensor | None = None
        else:
            keys, values = (kept.index_select(0, places.slots) for kept in (self.keys, self.values))
            bounds = places.key_bounds
        longest = places.longest
        return [varlen(rows, keys, values, places.query_bounds, bounds, *longest, **options)]


class ExactMemory(Memory):
    """In exact arithmetic, on any device: what is kept are keys and values as
    :func:`hexad.model.exact_attention.on_grid` rounds them.

    Attributes:
        tops: ``[slots, key/value heads]``, see :class:`~hexad.model.exact_attention.Keys`.
    """

    def __init__(self, slots: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(slots, shape, dtype, device)
        self.tops = torch.empty((slots, shape[0]), device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Arrangement, kernel: AttentionKernel) -> Tensor:
        """As of any memory."""
        kept = on_grid(k, v)
        self.tops.index_copy_(0, step.slots, kept.tops)
        return super().attend(q, kept.keys, kept.values, step, kernel)

    def _computed(
        self, q: Tensor, k: Tensor, v: Tensor, step: Arrangement, kernel: AttentionKernel
    ) -> list[Tensor]:
        parts: list[Tensor] = []
        for alone, group in groupby(step.queries, key=lambda one: one.tokens == 1):
            ones = list(group)
            if alone:
                elements = k.shape[1] * k.shape[2]
                parts += [self._together(q, some, kernel) for some in alike(ones, elements)]
                continue
            for one in ones:
                run = KeyRun(one.position, one.origin, kernel.window)
                rows = q.narrow(0, one.rows[0], one.tokens)
                parts.append(
                    attend_run(rows, self._kept(slots_of(one, one.origin), q.device), run, kernel.scale)
                )
        return parts

    def _kept(self, slots: NDArray[np.int64], device: torch.device) -> Keys:
        """The keys and values at some slots, in the shape of these."""
        where = streams.of(device).moved(torch.from_numpy(slots.ravel()), device)
        kept = self.keys, self.values, self.tops
        return Keys(*(tensor.index_select(0, where).unflatten(0, slots.shape) for tensor in kept))

    def _together(self, q: Tensor, ones: Sequence[Queries], kernel: AttentionKernel) -> Tensor:
        """Attention of neighbouring sequences' single queries ``[sequences, heads, width]``."""
        window, device = kernel.window, q.device
        seen = [one.end if window is None else min(one.end, window) for one in ones]
        slots = np.empty((len(ones), max(seen)), dtype=np.int64)
        for line, one, count in zip(slots, ones, seen):
            places = slots_of(one, one.end - count)
            line[:count], line[count:] = places, places[-1]  # of padding any that are numbers
        end = streams.of(device).moved(torch.tensor(seen), device)[:, None]
        visible = Visible(torch.zeros_like(end), end, end, min(seen) == max(seen))
        rows = q.narrow(0, ones[0].rows[0], len(ones))[:, None]
        return attend(rows.contiguous(), Wide.of(self._kept(slots, device)), visible, kernel.scale)[:, 0]


def slots_of(one: Queries, begin: int) -> NDArray[np.int64]:
    """Where the keys of positions from ``begin`` on are."""
    runs = one.keys(begin, one.end)
    return np.concatenate([np.arange(slot, slot + tokens, dtype=np.int64) for slot, tokens in runs])


_KEYS = 1 << 20
"""Elements of keys that are gathered at a time, about."""


def alike(ones: Sequence[Queries], elements: int) -> list[Sequence[Queries]]:
    """Neighbouring queries in groups that are computed together, whose keys, padded to the longest, have
    about :data:`_KEYS` elements."""
    groups: list[list[Queries]] = [[]]
    longest = 0
    for one in ones:
        longest = max(longest, one.end)
        if groups[-1] and longest * (len(groups[-1]) + 1) * elements > _KEYS:
            groups.append([])
            longest = one.end
        groups[-1].append(one)
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
