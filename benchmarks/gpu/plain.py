"""A llama in plain PyTorch, as one would write it for one GPU: the peer of the step ``models``.

Blocks and the loss are compiled by ``torch.compile``; attention is ``scaled_dot_product_attention``; AdamW is
PyTorch's fused one. As in Hexad's bf16, products are in bf16, and weights, gradients and moments of the
optimizer in fp32: by autocast, which converts the weights anew in every microbatch, where Hexad keeps a bf16
copy of them. Gradients are clipped likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexad import Microbatch
from hexad.config.model import ModelSettings


class Block(nn.Module):
    """Attention and SwiGLU with their norms."""

    def __init__(self, model: ModelSettings) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = model.heads, int(model.kv_heads), int(model.head_dim)
        self.norms = nn.ModuleList(nn.RMSNorm(model.hidden, eps=1e-5) for _ in range(2))
        columns = (self.heads + 2 * self.kv_heads) * self.width
        self.qkv = nn.Linear(model.hidden, columns, bias=False)
        self.out = nn.Linear(self.heads * self.width, model.hidden, bias=False)
        self.inner = nn.Linear(model.hidden, 2 * int(model.ffn_hidden), bias=False)
        self.down = nn.Linear(int(model.ffn_hidden), model.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[sequences, tokens, hidden]``."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.width)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = (self._rotated(tensor, cos, sin) for tensor in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.inner(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Llama(nn.Module):
    """Embedding, blocks, head and loss."""

    def __init__(self, model: ModelSettings, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(int(model.vocab), model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden, eps=1e-5)
        self.head = nn.Linear(model.hidden, int(model.vocab), bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embedding.weight
        width = int(model.head_dim)
        periods = 5e5 ** (torch.arange(0, width, 2) / width)
        angles = torch.arange(tokens)[:, None] / periods
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def reset(self) -> None:
        """Draw the weights where they are."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(x, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Of the last block's output."""
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_step(
    settings: ModelSettings, batch: Sequence[Microbatch], device: torch.device, compiled: bool
) -> Callable[[], float]:
    """A training step of the model on these microbatches, which returns its loss."""
    with torch.device(device):
        model = Llama(settings, batch[0].tokens.shape[1])
    model.reset()
    if compiled:
        for block in model.blocks:
            block.compile()
        model.loss = torch.compile(model.loss)  # type: ignore[method-assign]
    decayed: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in model.parameters():
        decayed[parameter.dim() == 2].append(parameter)
    groups = [{"params": decayed[True], "weight_decay": 0.1}, {"params": decayed[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-5, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        total = torch.zeros((), device=device)
        for microbatch in batch:
            tokens, labels = (
                tensor.to(device, non_blocking=True) for tensor in (microbatch.tokens, microbatch.labels)
            )
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens, labels) / len(batch)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step
