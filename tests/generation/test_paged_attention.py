"""Attention over paged keys, on a CPU and as on a GPU, with PyTorch's kernel for that replaced by a plain
one."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hexad.generation.blocks import BlockPool, BlockTable
from hexad.generation.paged_attention import (
    Arrangement,
    GpuMemory,
    HostMemory,
    KeyValueMemory,
    Queries,
    reads_blocks,
)
from hexad.model.attention_kernels import AttentionKernel

CPU = torch.device("cpu")
HEADS, GROUPS, WIDTH, SCALE, BLOCK = 6, 2, 4, 0.3, 4


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of the last tokens ``[queries, heads, width]`` of a sequence over its keys."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhw,khw->hqk", q, k) * SCALE
    place = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))
    seen = (key <= place) & (key > place - (window or len(k)))
    return torch.einsum("hqk,khw->qhw", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def by_bounds(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor | None, most_q: int, most_k: int,
    *, scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """The arguments of torch 2.11's ``varlen_attn``."""
    assert scale == SCALE and window_size[1] == 0 and bounds_k is not None
    assert int(bounds_q.diff().max()) == most_q and int(bounds_k.diff().max()) == most_k
    window = None if window_size[0] < 0 else window_size[0] + 1
    parts = zip(
        *(x.split(bounds.diff().tolist()) for x, bounds in ((q, bounds_q), (k, bounds_k), (v, bounds_k)))
    )
    return torch.cat([plain(*part, window) for part in parts])


def by_table(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor | None, most_q: int, most_k: int,
    *, scale: float, window_size: tuple[int, int], seqused_k: Tensor | None = None, block_table: Tensor |
None = None, ) -> Tensor:  # fmt: skip
    """Those of torch 2.13's."""
    assert seqused_k is not None and block_table is not None and bounds_k is None
    assert k.dim() == 4 and int(seqused_k.max()) == most_k and bounds_q.dtype == torch.int32
    window = None if window_size[0] < 0 else window_size[0] + 1
    outputs = []
    for one, used, blocks in zip(q.split(bounds_q.diff().tolist()), seqused_k.tolist(), block_table.tolist()):
        blocks = blocks[: -(-used // k.shape[1])]
        keys, values = (x[blocks].flatten(0, 1)[:used] for x in (k, v))
        key_scale = 1.0 if scale == 1.0 else SCALE
        assert scale in (1.0, SCALE)
        outputs.append(plain(one * (key_scale / SCALE), keys, values, window))
    return torch.cat(outputs)


def refusing(*_: Any, seqused_k: Any = None, block_table: Any = None, **__: Any) -> Tensor:
    """A kernel that its build lacks."""
    raise RuntimeError("Expected FlashAttention 3")


class Sequences:
    """Sequences in a cache, that grow by turns."""

    def __init__(self, seed: int, window: int | None, memory: KeyValueMemory, neighbours: bool) -> None:
        self.chance, self.window, self.memory = random.Random(seed), window, memory
        self.pool = BlockPool(len(memory.keys) // BLOCK, BLOCK, neighbours)
        self.generator = torch.Generator().manual_seed(seed)
        self.tables: list[BlockTable] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for number in range(5):
            self.tables.append(self.pool.start([number], 40))
            self.keys.append(torch.zeros(0, GROUPS, WIDTH, dtype=torch.float64))
            self.values.append(self.keys[-1])

    def random(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, WIDTH, dtype=torch.float64, generator=self.generator)

    def step(self, kernel: AttentionKernel) -> tuple[Tensor, Tensor]:
        """The output for some sequences' new tokens, and the expected one; two rows are padding."""
        numbers = self.chance.sample(range(5), self.chance.randint(1, 5))
        queries, slots, expected, new = [], [], [], []
        row = 0
        for number in numbers:
            table, begin = self.tables[number], len(self.keys[number])
            count = self.chance.choice([1, 1, 2, 7])
            assert self.pool.extend(table, begin + count)
            runs = self.pool.runs(table, begin + count)
            origin = table.dropped * BLOCK
            one = Queries((row, row + count), row, begin, runs, origin)
            queries.append(one)
            slots += [run.slot + n for run in one.keys(begin, begin + count) for n in range(run.tokens)]
            q, k, v = self.random(count, HEADS), self.random(count, GROUPS), self.random(count, GROUPS)
            self.keys[number] = torch.cat((self.keys[number], k))
            self.values[number] = torch.cat((self.values[number], v))
            expected.append(plain(q, self.keys[number], self.values[number], self.window))
            new.append((q, k, v))
            row += count
        q, k, v = (torch.cat(parts) for parts in zip(*new))
        padding = torch.zeros(2, HEADS, WIDTH, dtype=torch.float64)
        arrangement = Arrangement(torch.tensor(slots), queries, row + 2)
        out = self.memory.attend(torch.cat((q, padding)), k, v, arrangement, kernel)
        if self.window is not None:
            for number in numbers:
                self.pool.drop(self.tables[number], len(self.keys[number]) + 1 - self.window)
        return out, torch.cat((*expected, padding))


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("kind", ["host", "host, neighbours", "bounds", "table", "refused", "each by itself"])
def test_outputs_are_those_of_plain_attention(kind: str, window: int | None) -> None:
    place: Any = (80 * BLOCK, (GROUPS, WIDTH), torch.float64, CPU)
    varlen: Any = {"bounds": by_bounds, "table": by_table, "refused": None}.get(kind)
    if kind == "refused":

        def varlen(*arguments: Any, seqused_k: Any = None, block_table: Any = None, **options: Any) -> Tensor:
            if block_table is not None:
                return refusing()
            return by_bounds(*arguments, **options)

    for seed in range(4):
        memory = HostMemory(*place) if kind.startswith("host") else GpuMemory(*place, BLOCK)
        sequences = Sequences(seed, window, memory, "neighbours" in kind)
        for _ in range(12):
            out, expected = sequences.step(AttentionKernel(SCALE, window, varlen))
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("varlen", [None, by_bounds])
def test_a_context_rank_may_have_only_padding(varlen: Any) -> None:
    keys = torch.randn(1, GROUPS, WIDTH, dtype=torch.float64)
    for memory in (
        HostMemory(8, (GROUPS, WIDTH), torch.float64, CPU),
        GpuMemory(8, (GROUPS, WIDTH), torch.float64, CPU, BLOCK),
    ):
        step = Arrangement(torch.tensor([3]), [], 1)
        q = torch.randn(1, HEADS, WIDTH, dtype=torch.float64)
        out = memory.attend(q, keys, keys, step, AttentionKernel(SCALE, None, varlen))
        assert out.shape == q.shape and not out.any()
        assert torch.equal(memory.keys[3], keys[0])


def test_a_kernel_that_sees_other_keys_is_not_used() -> None:
    sizes = CPU, torch.float32, 16, 4, 2, 8
    assert reads_blocks(by_table, *sizes)
    assert not reads_blocks(by_bounds, *sizes)
    assert not reads_blocks(refusing, *sizes)

    def wrong(*arguments: Any, seqused_k: Any = None, block_table: Any = None, **options: Any) -> Tensor:
        return by_table(*arguments, seqused_k=seqused_k, block_table=block_table.flip(1), **options)

    assert not reads_blocks(wrong, *sizes)
