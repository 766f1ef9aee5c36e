"""What GPUs' libraries for experts do, on a CPU over gloo: PyTorch's operators on symmetric memory, and
DeepEP's ``Buffer``, with the signatures, layouts and refusals of their sources."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

TILES, WARP = 16, 32
"""Limits of the operators: of experts (ranks) in the outer dim, and of the other."""


def _gathered(value: Any, group: Any) -> list[Any]:
    everything: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everything, value, group=group)
    return everything


def _exchange(
    rows: Tensor, out: Tensor, splits: Tensor, begins: Tensor, arrived: Tensor, name: str, dispatch: bool,
    align: int,
) -> None:  # fmt: skip
    """Send runs of rows, run ``i`` to rank ``i // experts`` (``dispatch``) or ``i % ranks``. ``arrived``
    becomes the lengths and places of the runs that were received."""
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    experts = len(splits) // size
    if not (rows.dtype == out.dtype and rows.shape[1:] == out.shape[1:]):
        raise RuntimeError("input and out must have the same dtype and same stride at dim 0")
    if not all(tensor.is_contiguous() for tensor in (rows, out, splits, arrived)):
        raise RuntimeError("input, out, in_splits and out_splits_offsets must be contiguous")
    outer, inner = (experts, size) if dispatch else (size, experts)
    assert outer <= TILES and inner <= WARP and splits.dtype == arrived.dtype == torch.int64
    lengths, starts = splits.tolist(), begins.tolist()
    assert all(length >= 0 for length in lengths)
    everything = _gathered((rows.clone(), lengths, starts), group)
    place, results = 0, []
    for major in range(outer):
        first = place
        for minor in range(inner):
            source, expert = (minor, major) if dispatch else (major, minor)
            run = rank * experts + expert if dispatch else expert * size + rank
            theirs, counts, offsets = everything[source]
            assert place + counts[run] <= len(out), "memory is overwritten"
            out[place : place + counts[run]] = theirs[offsets[run] : offsets[run] + counts[run]]
            results.append((counts[run], place))
            place += counts[run]
        if align:
            place = first + max(align, -(-(place - first) // align) * align)
    arrived.copy_(torch.tensor(results).t())


def _vdev_2d(
    rows: Tensor, out: Tensor, splits: Tensor, arrived: Tensor, name: str, major_align: int | None = None
) -> None:
    assert int(splits.sum()) <= len(rows)
    _exchange(rows, out, splits, splits.cumsum(0) - splits, arrived, name, True, major_align or 1)


def _vdev_2d_offset(rows: Tensor, out: Tensor, splits: Tensor, arrived: Tensor, name: str) -> None:
    _exchange(rows, out, splits[0], splits[1], arrived, name, False, 0)


@cache
def symmetric_operators() -> torch.library.Library:
    """Let PyTorch's operators work on CPUs, in this process from now on."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("all_to_all_vdev_2d", _vdev_2d, "CPU")
    library.impl("all_to_all_vdev_2d_offset", _vdev_2d_offset, "CPU")
    return library


class Config:
    """``deep_ep.Config``."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """``deep_ep.Buffer`` of version 1.2, and of 2.1's legacy interface.

    Attributes:
        hosts: more than one: there is no static size.
        waits: of the host, for the number of tokens.
    """

    hosts = 1
    waits = 0

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.bytes = group, num_nvl_bytes
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        ranks = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.size), -1)
        present = (ranks[:, :, None] == torch.arange(self.size)).any(1)
        per_expert = (topk_idx[:, :, None] == torch.arange(num_experts)).sum((0, 1)).int()
        per_host = present.sum(0).int()[: self.hosts] if self.hosts > 1 else None
        return present.sum(0).int(), per_host, per_expert, present, None

    def dispatch(
        self, x: Tensor, handle: Any = None, num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Any = None, num_tokens_per_expert: Any = None,
        topk_idx: Any = None, topk_weights: Any = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Any = None, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert x.dim() == 2 and x.is_contiguous() and x.nbytes // max(len(x), 1) * self.size <= self.bytes
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            present, origins, total = handle
            assert len(present) == len(x)
            everything = _gathered(x, self.group)
            rows = [everything[rank][token] for rank, token in origins]
            return self._filled(rows, x, total), None, None, None, None, None
        assert num_worst_tokens == 0 or self.hosts == 1, "Internode dispatch does not support it"
        assert len(topk_idx) == len(topk_weights) == len(x) and topk_weights.is_contiguous()
        everything = _gathered((x, topk_idx, topk_weights, is_token_in_rank), self.group)
        local = len(num_tokens_per_expert) // self.size
        origins = [
            (rank, int(token)) for rank, (*_, present) in enumerate(everything)
            for token in present[:, self.rank].nonzero()
        ]  # fmt: skip
        total = num_worst_tokens or len(origins)
        assert len(origins) <= total, "memory is overwritten"
        rows, numbers, weights = (
            [everything[rank][part][token] for rank, token in origins] for part in range(3)
        )
        numbers = self._filled(numbers, topk_idx, total, -1) - self.rank * local
        mine = (numbers >= 0) & (numbers < local)
        numbers = torch.where(mine, numbers, -1)
        values = self._filled(weights, topk_weights, total)
        values[: len(origins)] *= mine[: len(origins)]
        counts = []
        if not num_worst_tokens:
            Buffer.waits += 1
            counts = (numbers[:, :, None] == torch.arange(local)).sum((0, 1)).tolist()
        handle = (is_token_in_rank, origins, total)
        return self._filled(rows, x, total), numbers, values, counts, handle, None

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Any = None, bias: Any = None, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        present, origins, total = handle
        assert len(x) == total and x.is_contiguous()
        everything = _gathered((x, topk_weights, origins), self.group)
        summed = x.new_zeros((len(present), x.shape[1]))
        weights = None
        if topk_weights is not None:
            assert topk_weights.is_contiguous() and len(topk_weights) == total
            weights = topk_weights.new_zeros((len(present), topk_weights.shape[1]))
        for rows, values, sources in everything:
            for place, (rank, token) in enumerate(sources):
                if rank == self.rank:
                    summed[token] += rows[place]
                    if weights is not None:
                        weights[token] += values[place]
        return summed, weights, None

    def _filled(self, rows: list[Tensor], like: Tensor, total: int, value: int = 0) -> Tensor:
        """Rows, and further ones without a meaning."""
        filled = like.new_full((total, like.shape[1]), torch.nan if like.is_floating_point() else value)
        if rows:
            filled[: len(rows)] = torch.stack(rows)
        return filled


@contextmanager
def deep_ep(hosts: int = 1) -> Iterator[type[Buffer]]:
    """Let ``import deep_ep`` find it."""
    module: Any = ModuleType("deep_ep")
    module.Buffer, Buffer.hosts, Buffer.waits = Buffer, hosts, 0
    module.topk_idx_t = torch.int64
    sys.modules["deep_ep"] = module
    try:
        yield Buffer
    finally:
        del sys.modules["deep_ep"]
