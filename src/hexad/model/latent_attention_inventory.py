"""The inventory of multi-head latent attention: parameters, products, kept tensors, temporary memory and
messages. No torch."""

from dataclasses import dataclass, replace
from functools import cached_property

from hexad.config.model import MlaSettings
from hexad.parallel.inventory import (
    Collective,
    Execution,
    Moment,
    Operation,
    Operations,
    Parameter,
    Pass,
    again,
)
from hexad.parallel.tensor.linear_inventory import LinearSpec

from .attention_inventory import AttentionCoreSpec
from .block_inventory import LayerTraits
from .norms_inventory import NormSpec
from .recompute_inventory import NOTHING, RecomputedParts

NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors, as published; ``model.norm_eps`` is that of the others."""


@dataclass(frozen=True)
class LatentAttentionSpec(AttentionCoreSpec):
    """Multi-head latent attention (DeepSeek-V2: arXiv 2405.04434, section 2.1).

    What makes latent vectors is whole on every tensor rank, which multiplies its rows of the residual stream;
    what makes heads of them is divided over the tensor axis.

    Attributes:
        layer: what it has in common with the layer's other branches.
        heads: of queries, and as many of keys and values.
        mla: the widths of latent vectors and heads.
        scale: what scores are multiplied by.
        window: keys that a query sees, its own included; None for all before it.
        dropout: probability with which attention probabilities are dropped.
    """

    layer: LayerTraits
    heads: int
    mla: MlaSettings
    scale: float
    window: int | None
    dropout: float

    @property
    def name(self) -> str:
        """The module's name, from the stage's root."""
        return f"{self.layer.prefix}attention"

    @property
    def head_width(self) -> int:
        """The width in which attention computes a head, whose kernels take one: the larger of that of queries
        and keys and that of values."""
        return max(self.mla.head_dim, self.mla.value_dim)

    @property
    def kv_heads_held(self) -> int:
        """Key/value heads of all tensor ranks."""
        return self.heads

    @property
    def latent(self) -> int:
        """Elements of the vector that is kept of a token in generation: the latent one, and the rotated part
        of its keys."""
        return self.mla.kv_rank + self.mla.rope_dim

    @cached_property
    def down(self) -> LinearSpec:
        """The fused projections to latent vectors."""
        outputs = {} if self.mla.q_rank is None else {f"{self.name}.q_down": self.mla.q_rank}
        outputs[f"{self.name}.kv_down"] = self.latent
        linear = self.layer.projection(f"{self.name}.down", outputs, False)
        return replace(linear, replicated=True)

    @cached_property
    def queries(self) -> LinearSpec:
        """The projection to query heads: of the latent vector, or of the residual stream."""
        features, rank = self.heads * self.mla.head_dim, self.mla.q_rank
        name = f"{self.name}.{'q' if rank is None else 'q_up'}"
        linear = self.layer.projection(name, {name: features}, False)
        return linear if rank is None else replace(linear, inputs=rank)

    @cached_property
    def kv_up(self) -> LinearSpec:
        """The projection of the latent vector to heads: of each its key, without the rotated part, and its
        value."""
        name, features = f"{self.name}.kv_up", self.heads * (self.mla.nope_dim + self.mla.value_dim)
        return replace(self.layer.projection(name, {name: features}, False), inputs=self.mla.kv_rank)

    @cached_property
    def out(self) -> LinearSpec:
        """The projection back into the residual stream."""
        return self.layer.projection_back(f"{self.name}.out", self.heads * self.mla.value_dim, False)

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linear layers in the order of the forward pass."""
        return self.down, self.queries, self.kv_up, self.out

    @cached_property
    def norms(self) -> tuple[NormSpec, ...]:
        """The norms of the latent vectors: of queries, if these have one, and of keys and values."""
        widths = {"kv_down": self.mla.kv_rank}
        if self.mla.q_rank is not None:
            widths = {"q_down": self.mla.q_rank, **widths}
        shared = self.layer.sequence, self.layer.unit, self.layer.frozen
        return tuple(
            NormSpec(f"{self.name}.{name}_norm", "rms", width, NORM_EPS, *shared)
            for name, width in widths.items()
        )

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the module."""
        norms = (parameter for norm in self.norms for parameter in norm.parameters)
        return (*super().parameters, *norms)

    def keeps_input(self, recomputed: RecomputedParts) -> bool:
        """Whether the backward pass needs its input."""
        direct = self.mla.q_rank is None and (self.queries.trained or "mla_up" in recomputed)
        return self.down.trained or direct

    def operations(
        self, run: Execution, recomputed: RecomputedParts = NOTHING, split: bool = False, reached: bool = True
    ) -> Operations:
        """The projections, the norms of latent vectors, and the attention itself, whose products leave out
        what fills up heads."""
        before, norms = self.down.operations(run, split, reached), Operations([], [])
        latent = reached or self.down.trains
        for norm in self.norms:
            normed = norm.operations(run, run.stream(norm.width))
            norms = norms.then(normed.reached(latent or norm.trains))
        # The gradients of the first product's parts, side by side.
        latents = run.stream(sum(self.down.outputs.values()))
        parts = Operations([], [Pass("B", "copy", 2 * latents)])
        before = before.then(parts.reached(latent)).then(norms)
        before = before.then(self._shared_key(run).reached(latent))
        of_queries = reached if self.mla.q_rank is None else latent or self.norms[0].trains
        of_pairs = latent or self.norms[-1].trains
        heads = self._heads_made(run, split, of_queries, of_pairs)
        reached = of_queries or of_pairs or self.queries.trains or self.kv_up.trains
        core = self._core(run, self.mla.head_dim, self.mla.value_dim).then(self._joined(run))
        total = before.then(heads).then(core.reached(reached)).then(self.out.operations(run, split, reached))
        if not reached:
            return total
        repeated: list[Operation] = []
        if "latent_norms" in recomputed:
            repeated += norms.forward
        if "mla_up" in recomputed:
            repeated += heads.forward
            repeated += self._exchanged("F", run, self.exchanged_bytes(run)[0]) if run.ulysses > 1 else []
        elif "pairs" in recomputed:
            repeated.append(self._assembled(run))
        total.backward[:0] = [again(op) for op in repeated]
        return total

    def _shared_key(self, run: Execution) -> Operations:
        """The part of the keys that the heads of all tensor ranks have in common."""
        whole = run.whole(self.mla.rope_dim)
        if run.tensor == 1:
            return Operations([], [])
        if not run.sequence:
            return Operations([], [Collective("B", "tensor", "all_reduce", whole)])
        gather = Collective("F", "tensor", "all_gather", whole)
        return Operations([gather], [Collective("B", "tensor", "reduce_scatter", whole)])

    def _heads_made(
        self, run: Execution, split: bool, queries_reached: bool, pairs_reached: bool
    ) -> Operations:
        """Queries, keys and values of normalised latent vectors: projected, rotated, assembled. What queries,
        and what keys and values are made of needs a gradient if it is ``reached``."""
        q, k, _ = self._sizes(run)
        queries = self._heads(run, self.mla.head_dim)
        pairs = self._heads(run, self.mla.nope_dim + self.mla.value_dim)
        key = run.whole(self.mla.rope_dim)
        turned = [Pass("F", "rotation", 2 * size) for size in (queries, key)]
        back: list[Operation] = [Pass("B", "rotation", 2 * queries)]
        of_queries = self.queries.operations(run, split, queries_reached).then(
            Operations([*turned[:1]], back)
        )
        if queries < q:  # padded to the width of attention's kernels
            padded = Pass("F", "copy", queries + q)
            of_queries = of_queries.then(Operations([padded], [padded._replace(action="B")]))
        back = [Pass("B", "copy", 2 * k + pairs), Pass("B", "sum", k + key), Pass("B", "rotation", 2 * key)]
        joined: list[Operation] = [Pass("B", "copy", 4 * k)]
        of_pairs = self.kv_up.operations(run, split, pairs_reached)
        return of_queries.then(of_pairs).then(Operations([turned[1], self._assembled(run)], [*joined, *back]))

    def _assembled(self, run: Execution) -> Pass:
        """Keys and values put together from projected heads."""
        pairs = self._heads(run, self.mla.nope_dim + self.mla.value_dim)
        return Pass("F", "copy", pairs + 2 * self._sizes(run)[1], 4)

    def _joined(self, run: Execution) -> Operations:
        """The output cut to the width of values."""
        if not self._cut:
            return Operations([], [])
        q, values = self._sizes(run)[0], self._heads(run, self.mla.value_dim)
        return Operations([Pass("F", "copy", 2 * values)], [Pass("B", "copy", values + q)])

    def cached(self, tensor: int) -> int:
        """The latent vector and the rotated part of the keys, on every tensor rank."""
        return self.latent

    def cached_flops(self, length: int, tensor: int) -> int:
        """Scores and weighted values, of the keys in the window: of latent vectors themselves."""
        seen = length if self.window is None else min(length, self.window)
        return 2 * (self.heads // tensor) * (self.latent + self.mla.kv_rank) * seen

    def kept(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes, its input left out: latent vectors before and after their norms, rotated queries, keys and
        values, the output, and each head's log-sum-exp; in exact arithmetic nothing of which the usual
        attention makes its backward pass."""
        latents = run.replicated.whole(sum(self.down.outputs.values()))
        kept = latents + sum(norm.statistics(run, run.rows) for norm in self.norms)
        kept += sum(linear.kept(run) for linear in self.linears)
        if "latent_norms" not in recomputed:
            kept += sum(self._normed(run, recomputed))
        return kept + self._attention_kept(run, recomputed)

    def _normed(self, run: Execution, recomputed: RecomputedParts) -> tuple[int, int]:
        """Bytes of the normalised latent vectors that the backward pass needs, of queries and of keys and
        values."""
        again, queries = "mla_up" in recomputed, self.mla.q_rank or 0
        return (
            run.stream(queries) if self.queries.trained or again else 0,
            run.stream(self.mla.kv_rank) if self.kv_up.trained or again else 0,
        )

    def _attention_kept(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes that attention keeps, its output in both widths included."""
        q = self._sizes(run)[0]
        kept = self._heads_kept(run, recomputed) + self._values_kept(run)
        if self._exactly(run):
            return kept
        kept += self._core_kept(run)
        return kept + (q if self._cut or run.ulysses > 1 else 0)  # its own output, of all tokens

    def _heads_kept(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes kept of queries, keys and values, or of what they are recomputed from."""
        q, k, _ = self._sizes(run)
        if "mla_up" in recomputed:  # beside latent vectors the keys' part without heads, if it is gathered
            return run.gathered(self.mla.rope_dim)
        if "pairs" in recomputed and run.ulysses == 1:
            return q + self._heads(run, self.mla.nope_dim + self.mla.value_dim) + run.whole(self.mla.rope_dim)
        return q + 2 * k

    def _values_kept(self, run: Execution) -> int:
        """Bytes of the output that is kept for the projection after it, or by attention."""
        if not self._cut:
            return self._output_kept(run)
        return self._heads(run, self.mla.value_dim) if self.out.trained else 0

    @property
    def _cut(self) -> bool:
        """The output is wider than values are, and cut."""
        return self.head_width > self.mla.value_dim

    def _heads(self, run: Execution, width: int) -> int:
        """Bytes of this rank's heads of so many elements."""
        return run.whole(self.heads // run.tensor * width)

    def forward(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in the forward pass, above what is kept; 0 where a later branch needs more."""
        if run.exact:
            return max(self.repeated(run, recomputed), self.out.products_forward(run))
        return self._heads_alive(run, recomputed)

    def _heads_alive(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes of queries, keys and values that exist while attention runs, but are not kept."""
        q, k, _ = self._sizes(run)
        if "mla_up" in recomputed:
            return (q + 2 * k) * (2 if run.ulysses > 1 else 1)  # and as received
        return 2 * k if "pairs" in recomputed and run.ulysses == 1 else 0

    def repeated(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed where the forward pass is repeated without the last product, above what is kept; the
        output is not there yet."""
        q, k, _ = self._sizes(run)
        uncut = q if self._cut else 0
        core = self._core_forward(run) + self._heads_alive(run, recomputed) + uncut
        core -= self._values_kept(run) if self._cut else 0
        later = self._values_kept(run) + (0 if {"pairs", "mla_up"} & recomputed else 2 * k)
        heads = self._heads(run, self.mla.nope_dim + self.mla.value_dim)
        projected = 0 if "mla_up" in recomputed else q
        products = (
            self.down.products_forward(run) - projected,
            self.queries.products_forward(run) + q - projected,
            self.kv_up.products_forward(run) + heads + q - projected,
        )
        return max(core, *(product - later for product in products))

    def backward(self, run: Execution, recomputed: RecomputedParts, split: bool) -> list[Moment]:
        """Memory of the backward pass; with ``split`` operands of weight gradients stay, for ``W``."""
        q, k, _ = self._sizes(run)
        gathered, values = run.gathered(self.layer.hidden), self._heads(run, self.mla.value_dim)
        deferred = split and not self.out.set_aside(run, split)
        product = max(0 if deferred else self.out.weight_product(run), self.out.dropping(run))
        out = gathered + max(self.out.input_gradient(run), values + product)
        moments = [Moment(out, gathered + values, self.out.matrices, self.out.aside(run, split))]
        operands = deferred and self.out.trained
        live = gathered if operands else 0
        uncut = live + values + (q if self._cut else 0)
        given_up = 0 if operands else self._values_kept(run)  # by the projection after it
        live -= given_up if self._cut else 0
        again, sources = self._again(run, recomputed)
        live += sources
        core = live + q + again + self._gradients(run)
        if self._exactly(run):  # computed again, when the projection after it has given up the output
            core += self._core_kept(run) + q
        if self.out.aside(run, split):  # its operands are there already: attention's output, the gradient
            core -= (0 if self._cut else given_up) + (0 if run.sequence else run.stream(self.layer.hidden))
        live -= self._attention_kept(run, recomputed) - self._values_kept(run)
        live -= 0 if self._cut else given_up
        heads, queries = (
            self._heads(run, n) for n in (self.mla.nope_dim + self.mla.value_dim, self.mla.head_dim)
        )
        joined = live + q + 2 * k + max(2 * k, heads)
        if run.ulysses > 1:  # gradients as they are sent, as they arrive, and by head
            sent = live + 3 * (q + 2 * k) + (2 * k + (queries if queries < q else 0) if recomputed else 0)
            joined = max(joined, sent)
        moments[0] = moments[0]._replace(needed=max(out, uncut))
        live += heads + queries + run.whole(self.mla.rope_dim)
        first = True
        for linear, output, kept, norm in self._before(run, recomputed, heads, queries):
            made_by = "norms" if norm is None else "latent_norms"
            missing = made_by in recomputed and "mla_up" not in recomputed
            projection = linear.backward(run, missing, split).above(live)
            if first:
                projection = projection._replace(needed=max(core, joined, projection.needed))
            first = False
            moments.append(projection)
            deferred = split and linear.trained
            live += run.stream(linear.inputs) - (0 if deferred else output + kept)
            if norm is not None:
                moments.append(Moment(live + norm.backward(run), live))
        latents = run.replicated.whole(sum(self.down.outputs.values()))
        missing = "norms" in recomputed and not self._input_held(recomputed)
        moments.append(self.down.backward(run, missing, split).above(live + latents))
        return moments

    def _again(self, run: Execution, recomputed: RecomputedParts) -> tuple[int, int]:
        """Bytes of queries, keys and values that attention's backward pass recomputes, and of what these are
        recomputed from that is not kept either, and held for the backward pass of their projections."""
        q, k, _ = self._sizes(run)
        if "mla_up" not in recomputed:
            return 2 * k if "pairs" in recomputed and run.ulysses == 1 else 0, 0
        normed = sum(self._normed(run, recomputed)) if "latent_norms" in recomputed else 0
        return q + 2 * k, normed + (run.stream(self.layer.hidden) if self._input_held(recomputed) else 0)

    def _input_held(self, recomputed: RecomputedParts) -> bool:
        """Whether its input is recomputed with the queries."""
        return {"mla_up", "norms"} <= recomputed and self.mla.q_rank is None

    def _before(
        self, run: Execution, recomputed: RecomputedParts, heads: int, queries: int
    ) -> list[tuple[LinearSpec, int, int, NormSpec | None]]:
        """The layers that make heads, in the order of the backward pass: each with the bytes of its output's
        gradient and of its input that is kept, and the norm before it."""
        of_queries, of_pairs = self._normed(run, recomputed)
        if "latent_norms" in recomputed and "mla_up" not in recomputed:
            of_queries = of_pairs = 0  # not there before
        norm = self.norms[0] if self.mla.q_rank is not None else None
        return [
            (self.kv_up, heads, of_pairs, self.norms[-1]),
            (self.queries, queries, of_queries, norm),
        ]

    def _gradients(self, run: Execution) -> int:
        """Bytes that the backward pass of attention needs, its results included."""
        q, k, _ = self._sizes(run)
        return self._core_backward(run) if run.ring > 1 or self.dropout else q + 2 * k
