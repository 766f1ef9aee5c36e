"""The model and the cache of a generator: this rank's stage of a saved model, and as many blocks as memory
has room for."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from hexad.checkpoint.base import load_model_weights
from hexad.comm import merged
from hexad.config import Config, ConfigError
from hexad.dataset.text.token_text import TokenText
from hexad.launching.environment import environment
from hexad.model.attention import AttentionCore
from hexad.model.latent_attention import LatentAttention
from hexad.model.transformer import DTYPES, Transformer, build_stages, factored_mesh, make_shard
from hexad.parallel.attention_choice import AttentionFacts, AttentionMethod, choose_attention
from hexad.parallel.sharding import wide_parameters
from hexad.topology.mesh import Mesh

from .blocks import BlockPool
from .latent_memory import ExactLatentMemory, LatentMemory
from .paged_attention import ExactMemory, GpuMemory, HostMemory, KeyValueMemory
from .replica import Replica
from .sampler import Constraint
from .scheduler import Scheduler
from .weights import StageWeights
from .worker import Worker


def build_model(config: Config, mesh: Mesh, layers: Sequence[range], dtype: torch.dtype) -> Transformer:
    """This rank's stage of a model, with weights in a format that hold nothing yet.

    Args:
        config: of the generation.
        mesh: of the ranks.
        layers: of every stage, one stage per pipeline rank.
        dtype: of the weights.
    """
    mesh = factored_mesh(config.model, config.parallel, mesh)
    shard = make_shard(config.parallel, mesh, dtype)
    shard = replace(shard, sequence=False, chunks=1, exact=config.precision.exact)
    rank = mesh.pipeline.rank
    return build_stages(config.model, shard, layers, range(len(layers)), rank)[rank]


def load_model(config: Config, source: Path | str, mesh: Mesh, layers: Sequence[range]) -> Transformer:
    """This rank's stage of a saved model; each rank reads only its own slices.

    Args:
        config: of the generation; ``model`` is the source's.
        source: a checkpoint's directory, or ``hf:DIR``.
        mesh: of the ranks.
        layers: of every stage, one stage per pipeline rank.

    Raises:
        AgreedError: the checkpoint does not fit the configuration or is damaged.
    """
    dtype = DTYPES[config.precision.dtype]
    stored = torch.float64 if dtype == torch.float64 else torch.float32  # the precision of master weights
    model = build_model(config, mesh, layers, stored)
    load_model_weights(source, config, StageWeights(model).chunks(), mesh.world)
    return converted(model, dtype)


def converted(model: Transformer, dtype: torch.dtype) -> Transformer:
    """The model in the number format that it computes in, with the kernels for it."""
    wide = [parameter for module in model.modules() for parameter in wide_parameters(module)]
    values = [parameter.data for parameter in wide]
    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.use_kernel(model.shard.device, dtype)
    model = model.to(dtype).eval()
    for parameter, value in zip(wide, values):
        parameter.data = value
    return model


def make_replica(
    model: Transformer,
    config: Config,
    mesh: Mesh,
    positions: int,
    text: TokenText,
    constrain: Callable[[str], Constraint] | None = None,
) -> Replica:
    """This rank's part of a replica, with an empty cache.

    Args:
        model: this rank's stage.
        config: resolved.
        mesh: of all ranks, which call this together.
        positions: tokens that the model was made for.
        text: of the model's tokenizer.
        constrain: makes the constraint of a JSON schema.

    Raises:
        ConfigError: there is no memory for a cache.
    """
    memory, blocks, block = make_memory(model, config, mesh, positions)
    scaling = model.model.rope_scaling
    # Beyond this length LongRoPE has other frequencies.
    switch = scaling.original_positions if scaling is not None and scaling.type == "longrope" else 0
    scheduler = Scheduler(
        BlockPool(blocks, block, neighbours=mesh.device.type == "cpu"),
        mesh.pipeline.size,
        config.inference.batch_tokens,
        config.inference.sequences,
        model.model.sliding_window,
        switch,
    )
    return Replica(Worker(model, memory, mesh.pipeline, constrain), scheduler, text, mesh)


def make_memory(
    model: Transformer, config: Config, mesh: Mesh, positions: int
) -> tuple[dict[int, KeyValueMemory | LatentMemory], int, int]:
    """The cache of this rank's stage, the number of its blocks, the same on all ranks, and the tokens of
    each; ``positions``: tokens that the model was made for.

    Raises:
        ConfigError: there is no memory for a block.
    """
    settings, device = config.inference, model.shard.device
    block = settings.block if settings.block != "auto" else 256 if device.type == "cuda" else 32
    attentions = [module for module in model.modules() if isinstance(module, AttentionCore)]
    shard = model.shard
    token_bytes = model.inventory.cached_bytes(shard.tensor.size, model.dtype.itemsize, shard.exact)
    if settings.cache_tokens != "auto":
        blocks = -(-settings.cache_tokens // block)
    else:
        room = _free_bytes(mesh, settings.memory_part) // max(1, token_bytes * block)
        # No more than all sequences of the length that the model was made for can fill.
        most = settings.sequences * -(-positions // block)
        blocks = merged(min(room, most), mesh.world, min)
        if blocks < 1:
            problem = f"found {settings.memory_part}, which leaves no memory for a block of the cache; "
            raise ConfigError("inference.memory_part", f"{problem}raise it, or use more ranks")
    where = model.dtype, device

    def memory(attention: AttentionCore) -> KeyValueMemory | LatentMemory:
        latent, varlen = isinstance(attention, LatentAttention), attention.kernel.varlen is not None
        facts = AttentionFacts(device.type != "cuda", model.dtype.itemsize, attention.width, varlen)
        cache: Literal["keys", "latents"] = "latents" if latent else "keys"
        method = choose_attention(facts._replace(exact=shard.exact, cache=cache, single=True))
        if isinstance(attention, LatentAttention):
            kind = ExactLatentMemory if method is AttentionMethod.EXACT else LatentMemory
            return kind(blocks * block, attention.latent, *where)
        place = blocks * block, (attention.kv_heads, attention.width), *where
        if method is AttentionMethod.EXACT:
            return ExactMemory(*place)
        return HostMemory(*place) if method is AttentionMethod.CPU_FLASH else GpuMemory(*place, block)

    return {attention.layer: memory(attention) for attention in attentions}, blocks, block


def _free_bytes(mesh: Mesh, part: float) -> int:
    """Bytes that this rank's cache may take."""
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has used
        return int(torch.cuda.mem_get_info(mesh.device)[0] * part)
    # The host's memory is shared by ranks that measure it at the same time.
    return int(_host_bytes() * part / environment().local_world)


def _host_bytes() -> int:
    """Bytes of the host's memory that programs can take."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
