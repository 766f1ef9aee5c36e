"""Figures measured on a host, as plain numbers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hexad.config import Config
from hexad.model.configuration import load_config
from hexad.topology.hardware.constants import Format

MODELS = (
    (256, 4, 4, 704, 2048, 256, 1, 2),
    (256, 8, 2, 1024, 4096, 512, 2, 2),
    (384, 6, 3, 1024, 2048, 256, 4, 2),
    (512, 8, 8, 1408, 4096, 512, 1, 2),
    (512, 4, 4, 1536, 8192, 1024, 1, 1),
    (768, 12, 4, 2048, 2048, 512, 2, 1),
    (1024, 16, 4, 2816, 4096, 256, 2, 1),
)
"""Hidden width, heads, key/value heads, inner width, vocabulary, tokens of a sequence, sequences of a
microbatch, layers."""


def calibration_config(model: tuple[int, ...], microbatches: int, dtype: str = "fp32") -> Config:
    """The configuration of one of :data:`MODELS`, trained on CPUs."""
    hidden, heads, kv_heads, inner, vocab, sequence, micro, layers = model
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    return load_config(
        {
            "run": {"device": "cpu"},
            "model": {**sizes, "ffn_hidden": inner, "vocab": vocab},
            "data": {"sequence": sequence},
            "batch": {"micro": micro, "global": micro * microbatches},
            "precision": {"dtype": dtype},
        }
    )


@dataclass(frozen=True)
class ProductFigure:
    """A matrix product [m, k] x [k, n] in a format, and its seconds."""

    dtype: Format
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class AttentionFigure:
    """A call of the attention kernel in a format: heads of all sequences, queries of each, width of a head,
    and its seconds."""

    dtype: Format
    forward: bool
    heads: int
    length: int
    width: int
    seconds: float


@dataclass(frozen=True)
class StepFigure:
    """Steps of a model on one rank.

    Attributes:
        dtype: in which format.
        model: its sizes, as :data:`MODELS` has them.
        microbatch: seconds that a microbatch adds to a step.
        besides: seconds of a step besides its microbatches.
        products, attention: seconds of a microbatch in matrix products and in attention.
    """

    dtype: Format
    model: tuple[int, ...]
    microbatch: float
    besides: float
    products: float
    attention: float


@dataclass(frozen=True)
class CollectiveFigure:
    """A collective of a tensor of so many bytes, as :meth:`hexad.planning.links.Cluster.seconds` counts them,
    and its seconds."""

    operation: str
    ranks: int
    nbytes: int
    seconds: float


@dataclass
class Figures:
    """All that a rank has measured.

    Attributes:
        copies: bytes per second that a copy reads and writes.
        products, attention, steps, collectives: see there.
    """

    copies: float = 0.0
    products: list[ProductFigure] = field(default_factory=list)
    attention: list[AttentionFigure] = field(default_factory=list)
    steps: list[StepFigure] = field(default_factory=list)
    collectives: list[CollectiveFigure] = field(default_factory=list)

    def as_tree(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Figures:
        """Figures from what :meth:`as_tree` returned."""
        return cls(
            tree["copies"],
            [ProductFigure(**values) for values in tree["products"]],
            [AttentionFigure(**values) for values in tree["attention"]],
            [StepFigure(**{**values, "model": tuple(values["model"])}) for values in tree["steps"]],
            [CollectiveFigure(**values) for values in tree["collectives"]],
        )

    @classmethod
    def joined(cls, ranks: Sequence[Figures]) -> Figures:
        """The figures of all ranks together, with the mean of their rates of copies."""
        joined = cls(sum(rank.copies for rank in ranks) / len(ranks))
        for rank in ranks:
            joined.products += rank.products
            joined.attention += rank.attention
            joined.steps += rank.steps
            joined.collectives += rank.collectives
        return joined
