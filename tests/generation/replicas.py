"""Replicas of small models with random weights, driven directly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hexad.config import Config
from hexad.dataset.text.token_text import TokenText
from hexad.dataset.text.tokenizer import ByteTokenizer
from hexad.generation.loading import converted, make_replica
from hexad.generation.replica import Replica
from hexad.generation.requests import Logprob, Request, RequestUpdate, RoutedExperts
from hexad.model.transformer import DTYPES, Transformer, build_stages, factored_mesh, make_shard
from hexad.parallel.sharding import declared_parameters, initialise
from hexad.planning.layouts import planned_layout
from hexad.planning.resolve import resolve
from hexad.topology.mesh import Mesh

from ..small import config_of

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "kv_heads": 1},
    "gpt2": {"family": "gpt2", "max_positions": 128},
    "mistral": {"family": "mistral", "kv_heads": 2, "sliding_window": 5},
    "phi3": {"family": "phi3", "sliding_window": 3},
    "qwen3": {"family": "qwen3", "kv_heads": 2},
    "experts": {
        "family": "llama",
        "kv_heads": 2,
        "moe": {"experts": 6, "top_k": 2, "ffn_hidden": 20, "score": "sigmoid", "shared_experts": 1},
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "mla": {"q_rank": 12, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5},
    },
    "deepseek_v2": {
        "family": "deepseek_v2",
        "mla": {"q_rank": None, "kv_rank": 6, "nope_dim": 4, "rope_dim": 2, "value_dim": 9},
        "sliding_window": 5,
    },
    "longrope": {
        "family": "llama",
        "head_dim": 8,
        "rope_scaling": {
            "type": "longrope",
            "original_positions": 11,
            "short_factors": [1, 1.2, 1.4, 2],
            "long_factors": [1.5, 2, 4, 8],
        },
    },
}


@dataclass(frozen=True)
class Degrees:
    """A layout of one replica."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """Its ranks."""
        return self.context * self.tensor * self.pipeline


@dataclass(frozen=True)
class Room:
    """A cache and how much is computed at once."""

    tokens: int = 4096
    block: int = 4
    batch_tokens: int = 64
    sequences: int = 64


@dataclass
class Result:
    """What a request has brought."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    scores: tuple[Logprob, ...] | None = None
    text: str = ""
    ended: str | None = None
    cached: int = 0
    values: list[float] = field(default_factory=list)  # of the prompt, where that is all that is known
    routing: RoutedExperts | None = None

    def add(self, update: RequestUpdate) -> None:
        """Add an update."""
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.text += update.text
        self.ended, self.cached = update.ended, max(self.cached, update.cached)
        self.routing = update.routing
        self.scores = update.prompt_logprobs if self.scores is None else self.scores


def settings(name: str | Mapping[str, Any], layout: Degrees, room: Room, **precision: Any) -> Config:
    """The configuration of a small model, or of one with the given settings, in a layout."""
    model = MODELS[name] if isinstance(name, str) else name
    names = ("tensor", "context", "pipeline", "expert")
    degrees = {name: getattr(layout, name) for name in names}
    inference = {"cache_tokens": room.tokens, "block": room.block}
    return config_of(
        model={"heads": 4, "vocab": 50, "init_std": 0.5, **model},
        parallel={**degrees, "sequence": False},
        data={"sequence": 12},
        batch={"micro": 1, "global": 1},
        precision={"dtype": "fp64", **precision},
        inference=inference,
    )


def stage_of(config: Config, mesh: Mesh) -> Transformer:
    """This rank's stage, with weights that are the same in every layout."""
    resolved = resolve(config, mesh.layout)
    config = resolved.config
    mesh = factored_mesh(config.model, config.parallel, mesh)
    stored = torch.float64 if config.precision.dtype == "fp64" else torch.float32
    shard = replace(make_shard(config.parallel, mesh, stored), exact=config.precision.exact)
    rank, layers = mesh.pipeline.rank, resolved.plan.layers
    stage = build_stages(config.model, shard, layers, range(len(layers)), rank)[rank].eval()
    initialise(declared_parameters(stage), 7)
    return converted(stage, DTYPES[config.precision.dtype])


def replica_of(stage: Transformer, config: Config, mesh: Mesh, room: Room) -> Replica:
    """A replica over all ranks, given this rank's stage."""
    room_of = {"sequences": room.sequences, "batch_tokens": room.batch_tokens}
    inference = config.inference.model_copy(update=room_of)
    config = config.model_copy(update={"inference": inference})
    return make_replica(stage, config, mesh, 128, TokenText(ByteTokenizer()))


def written(
    name: str | Mapping[str, Any],
    layout: Degrees,
    room: Room,
    requests: Sequence[Request],
    arrivals: Mapping[int, Sequence[int]],
    device: torch.device = CPU,
    **precision: Any,
) -> tuple[dict[int, Result], int] | None:
    """What requests bring on the leader of a replica, and how often a sequence was preempted.

    Args:
        arrivals: which requests come, by number from 1, before each call of ``advance``.
        device: of the ranks.
        precision: settings of this group in place of float64.
    """
    config = settings(name, layout, room, **precision)
    mesh = Mesh.create(planned_layout(config, layout.world), device)
    replica = replica_of(stage_of(config, mesh), config, mesh, room)
    if not replica.leads:
        replica.follow()
        return None
    return results_of(replica, requests, arrivals), replica.scheduler.preemptions


def results_of(
    replica: Replica, requests: Sequence[Request], arrivals: Mapping[int, Sequence[int]]
) -> dict[int, Result]:
    """What requests bring, on the leader; see :func:`written`."""
    results: dict[int, Result] = {number: Result() for number in range(1, len(requests) + 1)}
    last, turn = max(arrivals), 0
    while turn <= last or not replica.idle:
        for number in arrivals.get(turn, ()):
            replica.add(number, requests[number - 1])
        for update in replica.advance():
            results[update.number].add(update)
        turn += 1
    pool = replica.scheduler.pool
    assert pool.available == pool.blocks
    replica.stop()
    return results
