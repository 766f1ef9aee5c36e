"""Generation from a run or checkpoint, over any number of tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hexad.checkpoint.chunks import Chunk, load_chunks
from hexad.comm import all_gather
from hexad.config import Config, ConfigError, HexadError
from hexad.model.transformer import DTYPES, Transformer
from hexad.parallel.sharding import Placement, declared_parameters
from hexad.topology.mesh import Mesh

from .sampling import Sampling, choose


class KeyValueCache:
    """Keys and values of one layer for up to ``capacity`` tokens per sequence."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[sequences, heads, new, width]``; returns everything so far."""
        if self.length == 0:
            shape = (*keys.shape[:2], self.capacity, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        end = self.length + keys.shape[2]
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


def load_model(config: Config, checkpoint: Path, mesh: Mesh) -> Transformer:
    """The model of a checkpoint on this mesh; each rank reads only its own slices.

    Raises:
        HexadError: the checkpoint does not fit the configuration or is damaged.
    """
    dtype = DTYPES[config.precision.dtype]
    stored = torch.float64 if dtype == torch.float64 else torch.float32  # the precision of master weights
    model = Transformer(config.model, Placement(mesh.tensor, False, stored, mesh.device))
    chunks = []
    for declared in declared_parameters(model):
        declared.parameter.data.zero_()
        for piece in declared.declaration.pieces:
            local = piece.local(declared.parameter.data)
            if local.numel():
                chunks.append(Chunk(f"model.{piece.name}", piece.shape, piece.offset, local))
    load_chunks(checkpoint, chunks, mesh.world.group)
    return model.to(dtype).eval()


@torch.no_grad()
def generate(
    model: Transformer, prompt: list[int], tokens: int, sampling: Sampling, stop: int | None = None
) -> Iterator[int]:
    """Yield up to ``tokens`` new token ids after ``prompt``; ends after the id ``stop``.

    Every tensor rank iterates together and gets the same ids.

    Raises:
        HexadError: an empty prompt, ids outside the vocabulary, or more positions than the model has.
    """
    if not prompt:
        raise HexadError("--prompt: found no tokens, expected at least one")
    if max(prompt) >= model.vocab or min(prompt) < 0:
        raise ConfigError(
            "data.tokenizer", f"gives token id {max(prompt)}, but the model's vocabulary is {model.vocab}"
        )
    total = len(prompt) + tokens
    if model.positions is not None and total > model.positions.weight.shape[0]:
        raise ConfigError(
            "--tokens",
            f"{len(prompt)} prompt tokens and {tokens} new ones exceed the model's "
            f"{model.positions.weight.shape[0]} positions",
        )
    device = model.place.device
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = [KeyValueCache(total) for _ in model.layers]
    fresh = torch.tensor([prompt], device=device)
    for _ in range(tokens):
        start = caches[0].length
        hidden = model(fresh, stores=caches, start=start)
        token = int(choose(_last_logits(model, hidden[-1:]), sampling, generator))
        yield token
        if token == stop:
            return
        fresh = torch.tensor([[token]], device=device)


def _last_logits(model: Transformer, hidden: torch.Tensor) -> torch.Tensor:
    """``[1, vocab]`` logits on the CPU, gathered from the tensor ranks and without padding."""
    parts = all_gather(model.logits(hidden).contiguous(), model.place.axis)
    return parts.reshape(1, -1)[:, : model.vocab].float().cpu()
