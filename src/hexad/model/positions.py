"""Where each token stands: batch geometry, document boundaries, rotary angles."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.config.model import ModelSettings, RopeScaling
from hexad.parallel.context.slice import Slice
from hexad.parallel.context.spans import Spans

from .auxiliary import Auxiliary


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


def rotary_frequencies(model: ModelSettings, device: torch.device) -> Tensor:
    """float32 ``[rotary width / 2]`` angular frequencies, in radians per token."""
    width = model.rotary_width
    exponents = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    frequencies = 1.0 / (model.rope_theta**exponents)
    return frequencies if model.rope_scaling is None else _llama3_scaled(frequencies, model.rope_scaling)


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


def rotary_factors(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``cos, sin`` of shape ``[tokens, 1, rotary width / 2]``. Angles are float32 in every precision, the
    convention of published checkpoints."""
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
