"""The feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from hexad.config.schema import ModelSettings
from hexad.parallel.sharding import Placement
from hexad.parallel.tensor import ColumnParallelLinear, RowParallelLinear

from .ops import swiglu
from .recompute import made_again


class FeedForward(nn.Module):
    """SwiGLU (llama families) or GELU (gpt2)."""

    def __init__(self, model: ModelSettings, place: Placement) -> None:
        super().__init__()
        self.gated = model.family != "gpt2"
        inner, bias = int(model.ffn_hidden), not self.gated
        outputs = {"gate": inner, "up": inner} if self.gated else {"up": inner}
        self.inner = ColumnParallelLinear(model.hidden, outputs, place, bias=bias, std=model.init_std)
        residual_std = model.init_std / (2 * model.layers) ** 0.5
        self.down = RowParallelLinear(inner, model.hidden, place, bias=bias, std=residual_std)

    def forward(
        self, x: torch.Tensor, again: Callable[[], torch.Tensor] | None = None, unused: bool = False
    ) -> torch.Tensor:
        """``[tokens, hidden]`` -> the same (tokens / size in sequence parallel).

        Args:
            x: normalised hidden states.
            again: makes ``x`` again; given where the layer recomputes selectively.
            unused: nobody looks at the result (see :class:`RowParallelLinear`).
        """
        if again is None:
            return self.down(self._activated(self.inner(x)), unused)
        with made_again(x, again):
            inner = self.inner(x)
        activated = self._activated(inner)
        source = inner.detach()
        with made_again(activated, lambda: self._activated(source)):
            return self.down(activated, unused)

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        return swiglu(inner) if self.gated else F.gelu(inner, approximate="tanh")
