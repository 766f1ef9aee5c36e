"""The choice of what computes attention: one decision, :func:`choose_attention`, for training, context ranks,
generation and the memory plan. No torch.

The first row that applies decides:

| facts | method |
|---|---|
| exact arithmetic, no probability dropped | ``EXACT`` |
| cached latent vectors, one new token a sequence | ``ABSORBED`` |
| cached latent vectors, several | ``SDPA`` over the keys and values that are made of them |
| cached keys on a CPU, several new tokens in a window | ``SDPA`` under a mask, a call for each sequence |
| other cached keys on a CPU | ``CPU_FLASH``, a call for each run of neighbouring keys |
| cached keys on a GPU that has varlen | ``VARLEN`` |
| other cached keys | ``SDPA`` under a mask, a call for each sequence |
| probabilities dropped | ``SCORES``, in tiles |
| keys of other context ranks, on a CPU | ``CPU_FLASH``, in tiles |
| the same on a GPU with varlen: 16 bits, width a multiple of 8 up to 256 | ``GPU_FLASH``, in tiles |
| other keys of other context ranks | ``SCORES``, in tiles |
| documents or a window, on a device that has varlen | ``VARLEN`` |
| all others | ``SDPA``, a call for each document, and for blocks of a window |
"""

from enum import Enum
from typing import Literal, NamedTuple

_WIDEST = 256
"""Width of a head that PyTorch's flash attention for GPUs computes at most; multiples of 8."""


class AttentionMethod(Enum):
    """A way to compute attention.

    Attributes:
        EXACT: products and functions of exact arithmetic.
        VARLEN: ``torch.nn.attention.varlen``, one call for spans of any lengths.
        SDPA: ``torch.nn.functional.scaled_dot_product_attention``, which chooses among its own kernels.
        CPU_FLASH: PyTorch's flash attention for CPUs, with the log-sum-exp by which outputs are merged.
        GPU_FLASH: the same for GPUs.
        SCORES: products and softmax written out, with scores in memory for some queries at a time.
        ABSORBED: products with latent vectors in place of keys and values.
    """

    EXACT = "exact"
    VARLEN = "varlen"
    SDPA = "sdpa"
    CPU_FLASH = "cpu_flash"
    GPU_FLASH = "gpu_flash"
    SCORES = "scores"
    ABSORBED = "absorbed"


TILED = frozenset({AttentionMethod.CPU_FLASH, AttentionMethod.GPU_FLASH, AttentionMethod.SCORES})
"""Without a cache: attention in tiles, whose outputs are merged."""


class AttentionFacts(NamedTuple):
    """The facts on which the choice depends.

    Attributes:
        cpu: on a CPU.
        byte: bytes of an element of queries.
        width: of a head.
        varlen: the device has a kernel for spans of any lengths.
        exact: in exact arithmetic.
        ring: context ranks among which keys and values are exchanged.
        dropped: probabilities are dropped.
        documents: spans are documents, of any lengths.
        windowed: some query does not see all tokens before it in its span.
        cache: what is kept of the tokens of earlier passes; None: nothing.
        single: with a cache, every sequence has one new token.
    """

    cpu: bool
    byte: int
    width: int
    varlen: bool
    exact: bool = False
    ring: int = 1
    dropped: bool = False
    documents: bool = False
    windowed: bool = False
    cache: Literal["keys", "latents"] | None = None
    single: bool = False


def choose_attention(facts: AttentionFacts) -> AttentionMethod:
    """The method for some facts, by the table of the module."""
    if facts.exact and not facts.dropped:
        return AttentionMethod.EXACT
    if facts.cache is not None:
        return _cached(facts)
    if facts.ring > 1 or facts.dropped:
        return _tiled(facts)
    if facts.varlen and (facts.documents or facts.windowed):
        return AttentionMethod.VARLEN
    return AttentionMethod.SDPA


def _cached(facts: AttentionFacts) -> AttentionMethod:
    """Over what is kept of earlier tokens, and the new ones."""
    if facts.cache == "latents":
        return AttentionMethod.ABSORBED if facts.single else AttentionMethod.SDPA
    if facts.cpu:
        masked = facts.windowed and not facts.single
        return AttentionMethod.SDPA if masked else AttentionMethod.CPU_FLASH
    return AttentionMethod.VARLEN if facts.varlen else AttentionMethod.SDPA


def _tiled(facts: AttentionFacts) -> AttentionMethod:
    """The method of attention in tiles: over keys of several ranks, and where probabilities are dropped, for
    which PyTorch's fused kernels would draw random numbers of their own."""
    if facts.dropped:
        return AttentionMethod.SCORES
    if facts.cpu:
        return AttentionMethod.CPU_FLASH
    flash = facts.varlen and facts.byte == 2 and facts.width % 8 == 0 and facts.width <= _WIDEST
    return AttentionMethod.GPU_FLASH if flash else AttentionMethod.SCORES
