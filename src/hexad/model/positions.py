"""Positions of tokens: batch geometry, document boundaries, rotary angles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Protocol

import torch
from torch import Tensor

from hexad.config.model import ModelSettings, RopeScaling
from hexad.parallel import exact
from hexad.parallel.context.slice import Slice
from hexad.parallel.context.spans import Spans

from .attention_kernels import AttentionKernel
from .auxiliary import Auxiliary
from .replay import Replay


class KeyValueCache(Protocol):
    """The keys and values of all layers that are kept between forward passes (generation), as one pass sees
    them."""

    @property
    def positions(self) -> Tensor:
        """int64 ``[tokens]``: the place of each token in its sequence."""
        ...

    def lengths(self) -> Tensor:
        """int64 ``[tokens]``: how many tokens the sequence of each has."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionKernel) -> Tensor:
        """Keep a layer's new keys and values, ``[tokens, key/value heads, width]``, and compute the attention
        of queries ``[tokens, heads, width]`` over all that are kept: ``[tokens, heads * width]``."""
        ...

    def attend_latent(
        self, layer: int, q: Tensor, latents: Tensor, heads: LatentHeads, kernel: AttentionKernel
    ) -> Tensor:
        """Attention of a layer with latent vectors: keep its new latent vectors ``[tokens, kv_rank +
        rope_dim]``, and compute the attention of queries over all that are kept: ``[tokens, heads * value
        width]``."""
        ...


class LatentHeads(Protocol):
    """Keys and values that multi-head latent attention computes from latent vectors, for this rank's heads. A
    latent vector ``[kv_rank + rope_dim]`` ends with the rotated part of the keys, which all heads share."""

    @property
    def kv_rank(self) -> int:
        """Width of what keys and values are made of."""
        ...

    def expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[tokens, heads, padded width]`` of latent vectors ``[tokens, kv_rank +
        rope_dim]``."""
        ...

    def padded(self, q: Tensor) -> Tensor:
        """Queries ``[tokens, heads, width]`` as wide as :meth:`expanded` keys."""
        ...

    def joined(self, attended: Tensor) -> Tensor:
        """``[tokens, heads * value width]`` of attention over :meth:`expanded` values, ``[tokens, heads,
        padded width]``."""
        ...

    def absorbed(self, q: Tensor) -> Tensor:
        """The queries ``[tokens, heads, kv_rank + rope_dim]`` to which latent vectors are the keys, given
        queries ``[tokens, heads, width]``."""
        ...

    def restored(self, weighted: Tensor) -> Tensor:
        """``[tokens, heads * value width]`` of weighted sums of latent vectors, ``[tokens, heads,
        kv_rank]``."""
        ...


@dataclass(frozen=True)
class Geometry:
    """How flattened tokens are arranged in sequences, computed once per microbatch for all layers.

    Attributes:
        spans: the sequences, or documents, inside which attention stays.
        positions: int64 ``[tokens]``, place of each of this rank's tokens in its document.
        cos, sin: ``[tokens, 1, rotary width / 2]`` rotary factors; None with learned positions.
        rows: int32 ``[2, tokens (/ size in sequence parallel)]``, dropout's keys of this rank's rows of the
            residual stream; None where none are dropped.
        queries: int32 ``[2, tokens, this rank's heads]``, the same of attention probabilities; with context
            parallel of the tokens and heads that it computes attention of.
        slice: which rank of the ring holds which tokens; None where every rank has all.
        adapted: int32 ``[2, tokens]``, the same of the inputs of adapters, for all tokens.
        auxiliary: where branches add losses of their own; None outside of training.
        cache: keys and values of the tokens before (generation); None where every pass has all tokens.
        replay: experts that are imposed or kept; None: neither.
    """

    spans: Spans
    positions: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    rows: Tensor | None = None
    queries: Tensor | None = None
    adapted: Tensor | None = None
    slice: Slice | None = None
    auxiliary: Auxiliary | None = None
    cache: KeyValueCache | None = None
    replay: Replay | None = None


class Rotary:
    """The rotary factors of a model's positions.

    Frequencies, angles and factors are float32 in every precision, the convention of published checkpoints,
    and the same on every device: frequencies are computed on the host, sines and cosines in float64, because
    devices differ in the last bits of float32 ones.

    Args:
        model: whose positions.
        device: of the factors.
        exactly: they depend neither on what is computed beside them nor on the machine, not even in the last
            bit.
    """

    def __init__(self, model: ModelSettings, device: torch.device, exactly: bool = False) -> None:
        self._exact = exactly
        width, scaling = model.rotary_width, model.rope_scaling
        places = torch.arange(0, width, 2).float() / width
        periods = (
            _powers(model.rope_theta, places) if exactly else model.rope_theta**places
        )  # tokens per radian
        frequencies, long = 1.0 / periods, None
        self._short = 0
        self._amplitude = 1.0 if scaling is None else _amplitude(scaling)
        self._theta, self._places = model.rope_theta, places.to(device)
        self._dynamic = scaling if scaling is not None and scaling.type == "dynamic" else None
        if scaling is not None and scaling.type == "llama3":
            frequencies = _llama3_scaled(frequencies, scaling)
        elif scaling is not None and scaling.type == "yarn":
            frequencies = _yarn_scaled(periods, scaling, model.rope_theta)
        elif scaling is not None and scaling.type == "linear":
            frequencies = frequencies / scaling.factor
        elif scaling is not None and scaling.type == "longrope":
            frequencies, long = (
                1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
                for factors in (scaling.short_factors, scaling.long_factors)
            )
            self._short = scaling.original_positions
        self._frequencies = frequencies.to(device)
        # Of documents of more than _short tokens.
        self._long = None if long is None else long.to(device)

    def factors(
        self, positions: Tensor, lengths: Callable[[], Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """``cos, sin``, ``[tokens, 1, rotary width / 2]``.

        Args:
            positions: int64 ``[tokens]``, of each token in its document.
            lengths: int64 ``[tokens]``, of that document, if they matter.
            dtype: of the result.
        """
        frequencies = self._frequencies
        if self._long is not None:
            frequencies = torch.where((lengths() > self._short)[:, None, None], self._long, frequencies)
        if self._dynamic is not None:
            frequencies = self._grown(self._dynamic, lengths()[:, None, None], frequencies)
        angles = (positions.float()[:, None, None] * frequencies).double()
        cos, sin = (
            part.float() for part in (exact.cos_sin(angles) if self._exact else (angles.cos(), angles.sin()))
        )
        if self._amplitude != 1.0:
            cos, sin = cos * self._amplitude, sin * self._amplitude
        return cos.to(dtype), sin.to(dtype)

    def _grown(self, scaling: RopeScaling, lengths: Tensor, plain: Tensor) -> Tensor:
        """Frequencies of documents of these lengths: beyond the original one, their base grows with them."""
        width = 2 * len(self._places)
        growth = scaling.factor * lengths / scaling.original_positions - (scaling.factor - 1)
        base = self._theta * growth.clamp(min=1.0) ** (width / (width - 2))
        return torch.where(lengths > scaling.original_positions, 1.0 / base**self._places, plain)


def _powers(base: float, exponents: Tensor) -> Tensor:
    """Powers of a number, rounded to float32 from 40 digits: C libraries differ in the last bit."""
    with localcontext(prec=40):
        powers = [float(Decimal(base) ** Decimal(exponent)) for exponent in exponents.tolist()]
    return torch.tensor(powers, dtype=torch.float64).float()


def _amplitude(scaling: RopeScaling) -> float:
    """The factor of cos and sin."""
    if scaling.type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor != "auto":
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.type == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_positions))


def _yarn_scaled(periods: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend in between (section 3.2 of YaRN)."""
    width = 2 * len(periods)

    def index(turns: float) -> float:
        """Twice the index of the frequency with that many turns in the original length."""
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    indexes = torch.arange(len(periods), dtype=torch.float32)
    kept = 1 - ((indexes - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _llama3_scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow low frequencies down, keep high ones, blend in between (Llama 3.1 model card)."""
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    low = wavelengths > scaling.original_positions / scaling.low_freq_factor
    high = wavelengths < scaling.original_positions / scaling.high_freq_factor
    return torch.where(low, frequencies / scaling.factor, torch.where(high, frequencies, blended))
