"""What a framework is asked to train, and what it must answer: the adapter's interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

Array = np.ndarray
Tensors = dict[str, Array]


@dataclass(frozen=True)
class Sizes:
    """A Llama with a mixture of experts in every layer.

    Attributes:
        ffn: inner width of an expert; as large as ``hidden``, so that a transposed matrix has the same shape.
        score: ``softmax`` over all experts, of which the largest are chosen, or ``sigmoid`` with a bias; the
            weights of the chosen ones add up to 1.
        aux_loss: coefficient of the load-balancing loss.
        bias_rate: change of an expert's bias in a step.
        capacity: most tokens of an expert in a microbatch, as a multiple of an even load; the first tokens
            have precedence.
    """

    layers: int = 2
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 16
    vocab: int = 32
    experts: int = 4
    top_k: int = 2
    score: str = "softmax"
    aux_loss: float = 0.0
    bias_rate: float = 0.0
    capacity: float | None = None

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, by their canonical names: matrices are ``[out, in]``, those of experts
        ``[experts, out, in]``."""
        hidden, kv = self.hidden, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (self.vocab, hidden),
            "norm": (hidden,),
            "head": (self.vocab, hidden),
        }
        for layer in range(self.layers):
            of_layer = {
                "attention_norm": (hidden,),
                "q": (hidden, hidden),
                "k": (kv, hidden),
                "v": (kv, hidden),
                "out": (hidden, hidden),
                "ffn_norm": (hidden,),
                "router": (self.experts, hidden),
                "experts.gate": (self.experts, self.ffn, hidden),
                "experts.up": (self.experts, self.ffn, hidden),
                "experts.down": (self.experts, hidden, self.ffn),
            }
            if self.score == "sigmoid":
                of_layer["bias"] = (self.experts,)
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
        return shapes


@dataclass(frozen=True)
class Degrees:
    """Of the parallel axes; expert ranks are among those of data and tensor.

    Attributes:
        sequence: tensor ranks divide the tokens outside of attention and experts.
        zero: level of ZeRO.
    """

    data: int = 1
    tensor: int = 1
    sequence: bool = True
    pipeline: int = 1
    expert: int = 1
    zero: int = 0

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.tensor * self.pipeline

    def __str__(self) -> str:
        degrees = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert}
        named = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        named += ["zero 1"] * (self.zero == 1) + ["no sequence parallel"] * (not self.sequence)
        return " x ".join(named) or "one process"


class Sample(NamedTuple):
    """One sequence, which is a microbatch.

    Attributes:
        tokens, labels: int64 ``[length]``.
        documents: offsets of documents, from 0 to the length; attention stays within each.
    """

    tokens: Array
    labels: Array
    documents: tuple[int, ...]


@dataclass(frozen=True)
class Scenario:
    """A model, its layout, its data and its optimizer (AdamW, decoupled decay of matrices and not of norms).

    Attributes:
        microbatches: of the global batch, in a step; number ``i`` is of data rank ``i % data``.
        lengths: of sequences, which take turns.
        documents: sequences consist of several, cut at random.
        skewed: all tokens go to the first ``top_k`` experts.
        poison: memory that is allocated is filled with NaN.
        bias: initial value of the bias of every expert.
        dtype: ``float64`` or ``bfloat16``.
        recompute: the forward pass is repeated in the backward pass.
        clip: largest norm of the gradient; 0: none.
    """

    sizes: Sizes = Sizes()
    degrees: Degrees = Degrees()
    microbatches: int = 8
    lengths: tuple[int, ...] = (8,)
    documents: bool = False
    skewed: bool = False
    poison: bool = False
    bias: float = 0.0
    dtype: str = "float64"
    recompute: bool = False
    steps: int = 1
    lr: float = 0.02
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-3
    clip: float = 0.0
    seed: int = 5

    def __str__(self) -> str:
        more = [f"{self.microbatches // self.degrees.data} microbatches"]
        more += ["recompute"] * self.recompute + [self.dtype] * (self.dtype != "float64")
        return f"{self.degrees}, {', '.join(more)}"

    def weights(self) -> Tensors:
        """The initial values, by name."""
        generator = np.random.default_rng(self.seed)
        values = {name: _initial(name, shape, generator) for name, shape in self.sizes.shapes().items()}
        for name, array in values.items():
            if name.endswith("bias"):
                array[:] = self.bias
        if self.skewed:
            values["embedding"][:, 0] = 8.0
            for layer in range(self.sizes.layers):
                router = values[f"layers.{layer}.router"]
                router[:, 0] = np.where(np.arange(self.sizes.experts) < self.sizes.top_k, 3.0, -3.0)
        return values

    def batch(self, step: int) -> list[Sample]:
        """The global batch of a step."""
        generator = np.random.default_rng((self.seed, step))
        samples = []
        for number in range(self.microbatches):
            length = self.lengths[number % len(self.lengths)]
            tokens = generator.integers(0, self.sizes.vocab, length + 1)
            cuts = generator.choice(np.arange(1, length), number % 4, replace=False) if self.documents else ()
            offsets = (0, *sorted(int(cut) for cut in cuts), length)
            samples.append(Sample(tokens[:-1], tokens[1:], offsets))
        return samples


def _initial(name: str, shape: tuple[int, ...], generator: Any) -> Array:
    if name.endswith("norm"):
        return 1.0 + 0.1 * generator.standard_normal(shape)
    return generator.standard_normal(shape) * (1.0 if name == "embedding" else 1.5 * shape[-1] ** -0.5)


class Piece(NamedTuple):
    """What a rank holds of a tensor: its offset in it, and the values."""

    name: str
    offset: tuple[int, ...]
    values: Array


class Outcome(NamedTuple):
    """What a step reports.

    Attributes:
        loss: mean of the token losses over the targets of the global batch; None where not reported.
        auxiliary: the load-balancing loss, with its coefficient.
        norm: of the gradient before clipping; None where it was not computed.
        loads: by layer, tokens of each expert in the step; None where not reported.
    """

    loss: float | None
    auxiliary: float | None
    norm: float | None
    loads: dict[int, list[float]] | None = None


@dataclass
class Played:
    """What the ranks did; tensors are assembled.

    Attributes:
        outcomes: of each step.
        gradients: of the last step; not compared where they are clipped.
        weights: after it.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)


class NotPossible(Exception):
    """The framework has no such thing; the text says what."""


class Adapter(ABC):
    """One rank's access to a framework. The ranks of a world have joined a gloo process group.

    Attributes:
        name: of the framework.
        package: whose version is recorded.
        tolerance: relative error of a framework that computes in this format.
        itemsize: bytes of an activation's element where ``float64`` is asked for.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    tolerance: ClassVar[float] = 1e-9
    itemsize: ClassVar[int] = 8

    @classmethod
    @abstractmethod
    def refusal(cls, scenario: Scenario) -> str | None:
        """What the framework cannot do of a scenario; None: nothing."""

    @classmethod
    def balance(cls, sizes: Sizes, loads: list[Any], shares: list[Any]) -> Any:
        """The load-balancing loss of a microbatch, without its coefficient, as the framework declares it:
        summed over layers, experts times the sum of load times mean share (arXiv 2101.03961).

        Args:
            sizes: the model's.
            loads: of each layer, tokens of each expert, ``[experts]``.
            shares: of each layer, normalised scores, ``[tokens, experts]``.
        """
        return sum(
            sizes.experts * (load * share.sum(0)).sum() / (sizes.top_k * len(share) ** 2)
            for load, share in zip(loads, shares, strict=True)
        )

    @abstractmethod
    def build(self, scenario: Scenario) -> None:
        """Make the model and its optimizer."""

    @abstractmethod
    def set_weights(self, weights: Tensors) -> None:
        """Set this rank's part of the weights."""

    @abstractmethod
    def step(self, batch: Sequence[Sample]) -> Outcome:
        """Train on the global batch, of which this rank takes its microbatches."""

    @abstractmethod
    def gradients(self) -> list[Piece]:
        """Of the last step, whose scenario does not clip."""

    @abstractmethod
    def weights(self) -> list[Piece]:
        """This rank's part, biases of experts included, as they are kept from step to step."""

    @abstractmethod
    def save(self, directory: str) -> None:
        """Save a checkpoint."""

    @abstractmethod
    def load(self, directory: str) -> None:
        """Load a checkpoint, which another layout may have saved."""

    @abstractmethod
    def mixtures(self) -> list[Any]:
        """The modules that are this rank's mixtures of experts, whose forward pass is measured."""
