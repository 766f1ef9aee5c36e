"""Weights in the layout that oneDNN's products read, for generation on CPUs: the layout is chosen once, not
in every product, and the products of few tokens, which read all weights, are up to twice as fast."""

import torch
from torch import Tensor

_TOKENS = 32
"""Tokens of the products for which the layout is chosen."""


def packable(dtype: torch.dtype) -> bool:
    """Whether this processor has products of packed weights."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def packed(weight: Tensor) -> Tensor:
    """A copy of a weight ``[out, in]`` in oneDNN's layout, which only :func:`product` reads."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS)
    return copy


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [tokens, in]``, packed ``weight [out, in]`` -> ``x W^T + b``."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
