"""Dropout that depends on what is dropped, never on who computes it.

Whether an element is dropped is a hash of (seed, step, layer, site, global row, column), in the manner of the
counter-based generators of Salmon et al. (SC 2011): every layout, and a recomputed forward pass, drops the
same elements, and no generator's state or mask is kept. A row of the residual stream is a token of the global
batch; a row of attention probabilities is a head's query.

Hashes are 32-bit finalizers of MurmurHash3 in wrapping int32 arithmetic, the same on CPUs and GPUs. Each row
has 64 bits of key, so that rows share a pattern with probability 2^-64 rather than 2^-32.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from hexad.parallel.inventory import DRAWN
from hexad.parallel.pointwise import maybe_compiled
from hexad.parallel.sharding import Shard
from hexad.parallel.tensor.linear_inventory import LoraSpec

_HALF = 1 << 31


@dataclass(frozen=True)
class DropoutKey:
    """The key from which a microbatch's random numbers are drawn.

    Attributes:
        seed: of the run.
        step: of the engine, counted from 0.
        sequence: number of the microbatch's first sequence in the step's global batch.
    """

    seed: int
    step: int
    sequence: int


class Site(IntEnum):
    """A place in a layer where elements are dropped."""

    EMBEDDING = 0
    ATTENTION = 1
    FEED_FORWARD = 2
    PROBABILITIES = 3
    ADAPTED_QKV = 4
    ADAPTED_OUT = 5
    ADAPTED_INNER = 6
    ADAPTED_DOWN = 7
    ADAPTED_Q = 8
    ADAPTED_KV = 9


def _words(*values: object) -> tuple[int, int]:
    """Two signed 32-bit words that ``values`` are hashed to."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    first, second = struct.unpack("<2i", digest)
    return first, second


def _mix_(h: Tensor) -> Tensor:
    """MurmurHash3's finalizer of int32 values, in place; the shifts are made logical by a mask."""
    h ^= (h >> 16) & 0xFFFF
    h *= 0x85EBCA6B - (1 << 32)
    h ^= (h >> 13) & 0x7FFFF
    h *= 0xC2B2AE35 - (1 << 32)
    h ^= (h >> 16) & 0xFFFF
    return h


def _low(values: Tensor) -> Tensor:
    """The low 32 bits of int64 values, as int32."""
    return (((values + _HALF) & 0xFFFFFFFF) - _HALF).to(torch.int32)


def row_keys(key: DropoutKey, rows: Tensor) -> Tensor:
    """int32 ``[2, ...]``: keys of the rows of a microbatch, for all layers.

    Args:
        key: of the microbatch.
        rows: int64 ``[...]``, global numbers from 0 on.
    """
    low, high = _low(rows), _low(rows >> 32)
    words = zip(_words(key.seed, key.step, "low"), _words(key.seed, key.step, "high"))
    return torch.stack([_mix_(_mix_(low ^ first) ^ high ^ second) for first, second in words])


@dataclass(frozen=True, eq=False)
class Dropper:
    """Dropout at one site of one layer.

    Attributes:
        rate: probability of an element to be dropped; the others are divided by ``1 - rate``.
        layer: global number.
        site: in the layer.
        device: of what is dropped.
        compiled: see :mod:`hexad.parallel.pointwise`.
        first: number of this rank's first column.
        words: int32 ``[2]``, what keys are mixed with here. A tensor, so that one kernel serves all sites.
    """

    rate: float
    layer: int
    site: Site
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    compiled: bool = False
    first: int = 0
    words: Tensor = field(init=False)

    def __post_init__(self) -> None:
        words = torch.tensor(_words(self.layer, int(self.site)), dtype=torch.int32, device=self.device)
        object.__setattr__(self, "words", words)

    def keys(self, rows: Tensor) -> Tensor:
        """This site's keys, of what :func:`row_keys` has for all."""
        return _site_keys(rows, self.words)

    def factors(self, keys: Tensor, first: int, columns: int, dtype: torch.dtype) -> Tensor:
        """``[..., columns]``: 0 where an element is dropped, else ``1 / (1 - rate)``.

        Args:
            keys: int32 ``[2, ...]`` of the rows.
            first: number of the first column.
            columns: their number.
            dtype: of the result.
        """
        return maybe_compiled(_factors, self.compiled)(keys, first, columns, dtype, self.rate)

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """``x [rows, width]`` with elements dropped; ``rows`` from :func:`row_keys`."""
        if torch.compiler.is_compiling():
            return dropped(x, rows, self.words, self.rate)
        return _Dropout.apply(x, rows, self)

    def at(self, rows: Tensor | None) -> Callable[[Tensor], Tensor] | None:
        """The function that drops, given ``row_keys`` of all tokens; None where there are none."""
        if rows is None:
            return None
        drop = maybe_compiled(dropped, self.compiled)
        return lambda x: drop(x, rows, self.words, self.rate, self.first)


def _site_keys(rows: Tensor, words: Tensor) -> Tensor:
    """Row keys ``[2, rows, ...]`` of all layers and a site's ``words [2]`` -> the site's keys."""
    return _mix_(rows ^ words.view(2, *[1] * (rows.dim() - 1)))


def _factors(keys: Tensor, first: int, columns: int, dtype: torch.dtype, rate: float) -> Tensor:
    numbers = torch.arange(first, first + columns, dtype=torch.int32, device=keys.device)
    # Multiplying by the odd 0x9E3779B1 spreads neighbouring columns before they meet the key. In halves:
    # torch's compiler makes an arange's factor its step, and a large one overflows in C++ (a crash with
    # AVX-512 and gcc 12).
    spread = ((numbers * 0x9E37) << 16) + numbers * 0x79B1
    hashes = _mix_(_mix_(spread) ^ keys[0].unsqueeze(-1))
    hashes ^= keys[1].unsqueeze(-1)
    kept = hashes >= int(rate * (1 << 32)) - _HALF
    return kept.to(dtype).mul_(1.0 / (1.0 - rate))


def dropped(x: Tensor, rows: Tensor, words: Tensor, rate: float, first: int = 0) -> Tensor:
    """``x [rows, width]``, of which ``first`` is the number of the first column, with elements dropped at a
    site, given ``rows [2, rows]``, the keys of all layers; compiled, one kernel."""
    if torch.compiler.is_compiling():
        return x * _factors(_site_keys(rows, words), first, x.shape[-1], x.dtype, rate)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    step = max(1, DRAWN // x.shape[1])
    keys = _site_keys(rows, words)
    for block, part, key in zip(out.split(step), x.split(step), keys.split(step, dim=1)):
        torch.mul(part, _factors(key, first, x.shape[1], x.dtype, rate), out=block)
    return out


def adapter_dropper(lora: LoraSpec | None, layer: int, site: Site, shard: Shard, divided: int = 0) -> Dropper:
    """Dropout of the input of a linear layer's adapters, which has ``divided`` global features over the
    tensor ranks, or is complete on each."""
    rate = 0.0 if lora is None else lora.dropout
    first = shard.tensor.rank * (divided // shard.tensor.size)
    return Dropper(rate, layer, site, shard.device, shard.compiled, first)


class _Dropout(torch.autograd.Function):
    """Keeps the rows' keys, which all layers share, and computes the mask again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, dropper: Dropper) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.dropper = dropper
        return maybe_compiled(dropped, dropper.compiled)(x, rows, dropper.words, dropper.rate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        dropper = ctx.dropper
        backward = maybe_compiled(dropped, dropper.compiled)
        return backward(gradient, rows, dropper.words, dropper.rate), None, None
