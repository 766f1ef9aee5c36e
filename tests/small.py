"""Small runs: their configurations, engines and random microbatches."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hexad.config import Config
from hexad.dataset.load.microbatch import Microbatch
from hexad.engine.engine import Engine
from hexad.model.configuration import build_config
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

Tree = Mapping[str, Mapping[str, Any]]

DEFAULTS: Tree = {
    "model": {"layers": 2, "hidden": 16, "heads": 2, "ffn_hidden": 24, "vocab": 40},
    "data": {"sequence": 8},
    "batch": {"micro": 2, "global": 4},
}


def merged(defaults: Tree, groups: Tree) -> dict[str, dict[str, Any]]:
    """The defaults with the settings of ``groups`` in place of theirs; neither is changed."""
    names = [*defaults, *(name for name in groups if name not in defaults)]
    return {name: {**defaults.get(name, {}), **groups.get(name, {})} for name in names}


def config_of(defaults: Tree = DEFAULTS, /, **groups: Mapping[str, Any]) -> Config:
    """The configuration of a small model; ``groups`` replace single settings of the defaults."""
    return build_config(merged(defaults, groups))


def engine_of(config: Config) -> Engine:
    """This rank's engine on the CPU, in a world of all ranks that have joined a process group."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Engine(config, Mesh.create(Layout.from_settings(config.parallel, world), torch.device("cpu")))


def microbatch_of(tokens: torch.Tensor, documents: tuple[int, ...] | None = None) -> Microbatch:
    """The microbatch of rows with a token more than its inputs: labels are the next tokens."""
    return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents)


def random_tokens(vocab: int, samples: int, length: int, seed: int) -> torch.Tensor:
    """Rows of random tokens, one more in each than a sample has inputs."""
    return torch.randint(vocab, (samples, length + 1), generator=torch.Generator().manual_seed(seed))


def microbatches(
    config: Config, data_rank: int = 0, data_ranks: int = 1, seed: int = 0, samples: int | None = None
) -> list[Microbatch]:
    """A data rank's microbatches of random tokens; ``samples``: of all ranks, by default a global batch."""
    samples = config.batch.global_ if samples is None else samples
    tokens = random_tokens(int(config.model.vocab), samples, config.data.sequence, seed)
    return [microbatch_of(rows) for rows in tokens.split(config.batch.micro)[data_rank::data_ranks]]
