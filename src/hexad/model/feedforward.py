"""The feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from hexad.config.schema import ModelSettings
from hexad.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from hexad.topology.mesh import Axis

from .ops import swiglu


class FeedForward(nn.Module):
    """SwiGLU (llama families) or GELU (gpt2)."""

    def __init__(
        self, model: ModelSettings, axis: Axis, *, sequence: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.gated = model.family != "gpt2"
        inner = int(model.ffn_hidden)
        outputs = {"gate": inner, "up": inner} if self.gated else {"up": inner}
        common = {"bias": not self.gated, "sequence": sequence, "dtype": dtype, "device": device}
        self.inner = ColumnParallelLinear(model.hidden, outputs, axis, std=model.init_std, **common)
        self.down = RowParallelLinear(
            inner, model.hidden, axis, std=model.init_std / (2 * model.layers) ** 0.5, **common
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` -> the same (tokens / size in sequence parallel)."""
        inner = self.inner(x)
        return self.down(swiglu(inner) if self.gated else F.gelu(inner, approximate="tanh"))
