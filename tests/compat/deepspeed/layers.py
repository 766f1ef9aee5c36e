"""Lists of layers for pipelines: a tied embedding, tuples with masks between layers, functions."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

VOCAB, WIDTH = 17, 12


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table(tokens), tokens % 3 == 0


class Block(nn.Module):
    """Attends to nothing: a masked sum over the sequence."""

    def __init__(self, width: int = 20, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = both
        mixed = x + (x * mask.unsqueeze(-1)).mean(1, keepdim=True)
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(mixed))))), mask


def first(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return both[0]


def logits(embedding: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.table.weight.t()


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


def specs(deepspeed: Any, blocks: int = 4) -> list[Any]:
    """Uneven blocks between an embedding and its second use."""
    return [
        deepspeed.TiedLayerSpec("embedding", Embedding, tied_weight_attr="table.weight"),
        *(deepspeed.LayerSpec(Block, 20 + 3 * number) for number in range(blocks)),
        first,
        deepspeed.LayerSpec(nn.LayerNorm, WIDTH),
        deepspeed.TiedLayerSpec("embedding", Embedding, forward_fn=logits, tied_weight_attr="table.weight"),
    ]


def batch_of(number: int, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """A microbatch of two sequences."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (2, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def trained_in_one_process(accumulation: int, steps: int, clip: float, clipped_by: int | None) -> list[float]:
    """The losses of these layers, each seeded by its number, without any interface.

    Args:
        clip: the largest norm of gradients.
        clipped_by: number of the first layers whose gradients have the norm; None: all of them.
    """
    tied: dict[str, nn.Module] = {}

    def tied_spec(key: str, kind: Any, forward_fn: Any = None, **_: Any) -> Callable[[], Any]:
        def build() -> Any:
            module = tied.get(key) or tied.setdefault(key, kind())
            return module, (lambda x: forward_fn(module, x)) if forward_fn else module

        return build

    def spec(kind: Any, *arguments: Any) -> Callable[[], Any]:
        return lambda: (kind(*arguments),) * 2

    layers: list[tuple[Any, Any]] = []
    for number, layer in enumerate(specs(SimpleNamespace(LayerSpec=spec, TiedLayerSpec=tied_spec))):
        torch.manual_seed(1234 + number)
        layers.append((None, layer) if layer is first else layer())

    def parameters(chosen: list[tuple[Any, Any]]) -> list[nn.Parameter]:
        return list(
            dict.fromkeys(p for module, _ in chosen if module is not None for p in module.parameters())
        )

    optimizer = torch.optim.AdamW(parameters(layers), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            x, labels = batch_of(step * accumulation + micro)
            for _, layer in layers:
                x = layer(x)
            loss = loss_of(x, labels) / accumulation
            loss.backward()
            total += loss.item()
        norm = nn.utils.get_total_norm(
            [p.grad for p in parameters(layers[:clipped_by]) if p.grad is not None]
        )
        nn.utils.clip_grads_with_norm_(parameters(layers), clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
