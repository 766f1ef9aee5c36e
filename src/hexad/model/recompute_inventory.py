"""The parts of a layer that are recomputed in the backward pass instead of kept. No torch."""

from dataclasses import dataclass
from typing import Literal

from hexad.config.schema import MemorySettings

RecomputedPart = Literal[
    "layer", "norms", "latent_norms", "rotated", "pairs", "mla_up", "activations", "moe_act"
]  # fmt: skip
"""A part of a layer's forward pass, named after what it makes:

- ``layer``: all of it but the last product; the layer's input is kept.
- ``norms``: outputs of the norms before attention and before the feed-forward layer.
- ``latent_norms``: outputs of the norms of latent vectors.
- ``rotated``: rotated queries and keys, with the norms of heads.
- ``pairs``: keys and values, as latent attention assembles them from projected heads.
- ``mla_up``: queries, keys and values that latent attention projects from latent vectors, rotates and
  assembles; where context ranks exchange heads, also what they receive.
- ``activations``: activated values of feed-forward layers, shared experts included.
- ``moe_act``: activated and weighted values of the experts that are chosen for each token.

As in Megatron-LM, whose names are ``layernorm``, ``mla_up_proj`` and ``moe_act``, ``norms`` does not cover
those of latent vectors, and ``moe_act`` not the shared experts.
"""

RecomputedParts = frozenset[RecomputedPart]
"""Parts that a layer recomputes."""

NOTHING = RecomputedParts()
WHOLE: RecomputedParts = frozenset({"layer"})
SELECTIVE: RecomputedParts = frozenset(
    {"norms", "latent_norms", "rotated", "pairs", "activations", "moe_act"}
)
"""Parts that cost neither a matrix product nor communication (Korthikanti et al., arXiv 2205.05198, section
5)."""

_OF_KIND = {"none": NOTHING, "selective": SELECTIVE, "full": WHOLE}


@dataclass(frozen=True)
class Recompute:
    """The recompute of a stage's layers.

    Attributes:
        kind: ``full``: everything but the layer's input (Chen et al., arXiv 1604.06174). ``selective``:
            :data:`SELECTIVE`.
        layers: how many layers of the stage ``kind`` concerns, from its first on; None for all.
        parts: recomputed by every layer, besides.
    """

    kind: Literal["none", "selective", "full"] = "none"
    layers: int | None = None
    parts: RecomputedParts = NOTHING

    @classmethod
    def from_settings(cls, settings: MemorySettings) -> "Recompute":
        """The recompute of ``memory.recompute``, ``memory.recompute_layers`` and
        ``memory.recompute_parts``."""
        layers = settings.recompute_layers
        return cls(
            settings.recompute, None if layers == "all" else layers, frozenset(settings.recompute_parts)
        )

    def of(self, position: int) -> RecomputedParts:
        """The parts that the stage's layer number ``position`` recomputes."""
        within = self.layers is None or position < self.layers
        parts = _OF_KIND[self.kind] if within else NOTHING
        return WHOLE if parts == WHOLE else parts | self.parts
