"""Generation from a run or checkpoint, over any number of tensor and pipeline ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hexad.checkpoint.chunks import Chunk
from hexad.checkpoint.loading import load
from hexad.comm import all_gather, broadcast, receive_async, send_async
from hexad.config import Config, ConfigError, HexadError
from hexad.model.transformer import DTYPES, Transformer, build_stages, factored_mesh
from hexad.parallel.sharding import Shard, declared_parameters
from hexad.topology.mesh import Axis, Mesh

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


def load_model(config: Config, checkpoint: Path, mesh: Mesh, layers: Sequence[range]) -> Transformer:
    """This rank's stage of a checkpoint's model; each rank reads only its own slices.

    Args:
        config: of the generation; ``model`` is the checkpoint's.
        checkpoint: its directory.
        mesh: tensor and pipeline ranks.
        layers: of every stage, one stage per pipeline rank.

    Raises:
        AgreedError: the checkpoint does not fit the configuration or is damaged.
    """
    dtype = DTYPES[config.precision.dtype]
    stored = torch.float64 if dtype == torch.float64 else torch.float32  # the precision of master weights
    tensor = factored_mesh(config.model, mesh).tensor
    shard = Shard({"tensor": tensor}, False, stored, mesh.device)
    rank = mesh.pipeline.rank
    model = build_stages(config.model, shard, layers, range(len(layers)), rank)[rank]
    chunks = []
    for declared in declared_parameters(model):
        values = declared.parameter.data.zero_()
        for start, rectangle, _ in declared.pieces:
            if rectangle.numel:
                local = values.narrow(0, start, rectangle.sizes[0])
                chunks.append(Chunk(rectangle.named(f"model.{rectangle.name}"), local))

    load(checkpoint, chunks, mesh.world)
    return model.to(dtype).eval()


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    tokens: int,
    sampling: Sampling,
    stop: int | None = None,
    pipeline: Axis | None = None,
) -> Iterator[int]:
    """Yield up to ``tokens`` new token ids after ``prompt``; ends after the id ``stop``.

    Every tensor and pipeline rank iterates together, with its own stage as ``model``, and gets the same ids.

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
    device = model.shard.device
    pipeline = pipeline or Axis("pipeline")
    generator = torch.Generator().manual_seed(sampling.seed)
    caches = [KeyValueCache(total) for _ in model.layers]
    fresh, start = torch.tensor([prompt], device=device), 0
    for _ in range(tokens):
        hidden = model(fresh, stores=caches, start=start, inputs=_from_stage_before(model, fresh, pipeline))
        start += fresh.shape[1]
        fresh = torch.zeros((1, 1), dtype=torch.int64, device=device)
        if model.inventory.last:
            fresh.fill_(choose(_last_logits(model, hidden[-1:]), sampling, generator)[0])
        else:
            send_async(hidden, pipeline, pipeline.rank + 1).wait()
        token = int(broadcast(fresh, pipeline, source=pipeline.size - 1))
        yield token
        if token == stop:
            return


def _from_stage_before(model: Transformer, fresh: torch.Tensor, pipeline: Axis) -> torch.Tensor | None:
    """``[tokens, hidden]`` of the new tokens; None on the first stage."""
    if model.inventory.first:
        return None
    buffer = torch.empty(fresh.numel(), model.hidden, dtype=model.dtype, device=fresh.device)
    return receive_async(buffer, pipeline, pipeline.rank - 1).wait()


def _last_logits(model: Transformer, hidden: torch.Tensor) -> torch.Tensor:
    """``[1, vocab]`` logits on the CPU, gathered from the tensor ranks and without padding."""
    parts = all_gather(model.logits(hidden).contiguous(), model.shard.tensor)
    return parts.reshape(1, -1)[:, : model.vocab].float().cpu()
