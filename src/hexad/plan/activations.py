"""Bytes that a pipeline stage keeps from a microbatch's forward pass to its backward pass, and what it needs
meanwhile.

Every tensor that autograd keeps is one term here, after the code in :mod:`hexad.model`. For a llama layer
they add up to the closed form of docs/memory.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hexad.config import Config
from hexad.parallel.shapes import loss_rows, padded_vocab
from hexad.topology.layout import Layout

Kept = Counter[str]
"""Bytes by kind: ``residual``, ``norm``, ``attention``, ``feed_forward``, ``loss``, ``positions``, and
``boundary``: received from another stage."""

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one microbatch on one rank.

    Attributes:
        stream: the residual stream's ``[tokens (/ tensor in sequence parallel), hidden]``.
        whole: ``[tokens, hidden]``.
        gathered: ``whole`` in sequence parallel, else 0: what a gather or an unscattered sum adds.
        statistic: one wide number per row of the stream.
        q, k: ``[tokens, this rank's heads * width]`` of queries, and of keys (or values).
        heads: one wide number per token and head (attention's log-sum-exp); ``kv_heads`` of key heads.
        inner: ``[tokens, this rank's feed-forward width]``.
        widening: how many times larger a tensor in the wide format is: 2 for 16-bit formats.
    """

    stream: int
    whole: int
    gathered: int
    statistic: int
    q: int
    k: int
    heads: int
    kv_heads: int
    inner: int
    widening: int

    @classmethod
    def of(cls, config: Config, layout: Layout) -> Sizes:
        """Of the run's microbatches."""
        model, tensor = config.model, layout.tensor
        byte = WIDTHS[config.precision.dtype]
        wide = max(byte, 4)
        tokens = config.batch.micro * config.data.sequence
        sequence = config.parallel.sequence and tensor > 1
        rows = tokens // tensor if sequence else tokens
        width, kv_heads = int(model.head_dim), int(model.kv_heads)
        whole = tokens * model.hidden * byte
        return cls(
            stream=rows * model.hidden * byte,
            whole=whole,
            gathered=whole if sequence else 0,
            statistic=rows * wide,
            q=tokens * model.heads // tensor * width * byte,
            k=tokens * kv_heads // tensor * width * byte,
            heads=tokens * model.heads // tensor * wide,
            kv_heads=tokens * kv_heads // tensor * wide,
            inner=tokens * int(model.ffn_hidden) // tensor * byte,
            widening=wide // byte,
        )


class Stage:
    """What one stage of a run holds and needs; ``first`` and ``last`` as for a model's part."""

    def __init__(self, config: Config, layout: Layout, layers: int, first: bool, last: bool) -> None:
        self.config = config
        self.sizes = Sizes.of(config, layout)
        self.layers, self.first, self.last = layers, first, last
        self.gpt2 = config.model.family == "gpt2"
        self.eight = config.precision.dtype == "fp8"
        self.tensor = layout.tensor
        recompute, count = config.memory.recompute, config.memory.recompute_layers
        self.kind = recompute
        self.again = 0 if recompute == "none" else layers if count == "all" else min(count, layers)

    def block(self, recompute: str) -> Kept:
        """One layer, its input left out and its output counted."""
        s, model = self.sizes, self.config.model
        if recompute == "full":
            return Counter(residual=s.stream)
        statistics = 4 if self.gpt2 else 2
        kept = Counter(residual=2 * s.stream, norm=statistics * s.statistic)
        kept["attention"] = 2 * s.q + 2 * s.k
        if model.attention_dropout == 0:
            kept["attention"] += s.heads
            if self.config.data.documents == "isolate":
                kept["attention"] += s.q  # every document's output, and all of them joined
        if model.qk_norm:
            kept["attention"] += s.heads + s.kv_heads
        kept["feed_forward"] = s.inner * (1 if self.gpt2 else 2)
        if recompute == "none":
            kept["norm"] += 2 * s.stream
            kept["attention"] += 0 if self.gpt2 else s.q + s.k
            kept["feed_forward"] += s.inner
        return kept

    def kept(self) -> Kept:
        """All that is held from ``F`` to ``B``."""
        s, config = self.sizes, self.config
        total: Kept = Counter()
        for recompute, count in ((self.kind, self.again), ("none", self.layers - self.again)):
            for kind, size in self.block(recompute).items():
                total[kind] += count * size
        tokens = config.batch.micro * config.data.sequence
        total["residual" if self.first else "boundary"] += s.stream
        if self.first:
            total["positions"] += (
                tokens * 9 if self.tensor > 1 else 0
            )  # rows of the embedding, and which are here
            total["positions"] += 8 * tokens if self.gpt2 else 0
        if not self.gpt2:
            total["positions"] += tokens * int(config.model.head_dim) * WIDTHS[config.precision.dtype]
        if self.last:
            total["norm"] += (2 if self.gpt2 else 1) * s.statistic
            total["loss"] += s.stream  # the head's gradient of its input
        elif self.layers:
            total["residual"] -= s.stream  # the output belongs to the next stage
        return total

    def products(self) -> Kept:
        """What is held from ``B`` to ``W``: inputs and output gradients of the layers' four products."""
        s = self.sizes
        inner = s.inner * (1 if self.gpt2 else 2)
        attention = s.q + 2 * s.k + s.q + s.stream + s.whole
        return Counter(
            attention=self.layers * attention,
            feed_forward=self.layers * (inner + s.inner + s.stream + s.whole),
        )

    def forward_peak(self) -> int:
        """Bytes above what is kept, at the most, while the layers' ``F`` runs."""
        s = self.sizes
        # In 8 bits: the last product's operand and weight, which has passed through a scaled copy in 16.
        copies = s.inner // 2 + 3 * self.weight(s.inner, s.whole) if self.eight else 0
        return s.gathered + max(s.inner, copies)

    def norm(self) -> int:
        """What a norm over the residual stream needs in backward, its result included."""
        stream, widening = self.sizes.stream, self.sizes.widening
        if self.gpt2 or self.config.run.device != "cpu":
            return stream  # one kernel
        # By hand: the input, its product with the gradient, the gradient and the result in the wide format.
        return (4 if widening > 1 else 2) * widening * stream

    def product(self, inputs: int, outputs: int) -> int:
        """A weight's gradient, between activations of these bytes, before it is added in another format."""
        precision = self.config.precision
        same = self.sizes.widening == 1 or precision.reduce == "bf16"
        return 0 if same else self.weight(inputs, outputs) * WIDTHS[precision.dtype]

    def weight(self, inputs: int, outputs: int) -> int:
        """Numbers in the weight between activations of these bytes."""
        row = self.config.batch.micro * self.config.data.sequence * WIDTHS[self.config.precision.dtype]
        return inputs // row * (outputs // row)

    def eight_bits(self, gradient: int, inputs: int) -> int:
        """What an input's gradient takes while it is multiplied in 8 bits: copies of the output's gradient
        and of the weight, scaled in 16 bits or turned round, and the result."""
        if not self.eight:
            return 0
        weight = self.weight(inputs, gradient)
        return gradient // 2 + max(3 * weight, 2 * weight + inputs)

    def loss(self) -> tuple[int, int]:
        """Bytes above what is kept for the head's slices of logits, with all that is made of them: at the
        most, and when the weight's gradient is complete."""
        config, s = self.config, self.sizes
        tokens, hidden = config.batch.micro * config.data.sequence, config.model.hidden
        columns = padded_vocab(int(config.model.vocab), self.tensor) // self.tensor
        byte = WIDTHS[config.precision.dtype]
        rows = loss_rows(tokens, hidden, columns, byte)
        slices = -(-tokens // rows)
        logits = rows * columns * byte
        # A gathered slice, and the gradient of one with the parts of other ranks that are added to it.
        states = rows * hidden * byte if s.gathered else 0
        # In 16 bits logits exist in both formats; the weight's gradient is made before it is added in the
        # wide one, and later.
        wide = logits * (1 + s.widening) if s.widening > 1 else logits
        product = 0 if s.widening == 1 or config.precision.reduce == "bf16" else columns * hidden * byte
        most = 0
        for index in range(slices):
            here = states * (2 if index + 1 < slices else 1)  # the next one arrives
            before = 2 * states if index else 0
            most = max(most, wide + here + before, logits + product + here + 2 * states)
        return s.stream + most, s.stream + logits + 3 * states
