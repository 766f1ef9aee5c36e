"""The inventory of self-attention: parameters, products, kept tensors, temporary memory and messages. No
torch."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from hexad.parallel.attention_choice import TILED, AttentionFacts, AttentionMethod, choose_attention
from hexad.parallel.context.rounds import SCORES
from hexad.parallel.context.slice import heads_of
from hexad.parallel.exact_inventory import scores_bytes
from hexad.parallel.inventory import (
    Collective,
    Execution,
    Moment,
    Operation,
    Operations,
    Parameter,
    Pass,
    Product,
    again,
)
from hexad.parallel.tensor.linear_inventory import LinearSpec

from .block_inventory import BranchSpec, LayerTraits
from .norms_inventory import NormSpec
from .recompute_inventory import NOTHING, RecomputedParts

_TIMES = ("F", 2), ("B", 4)
"""Actions, and how many products of attention each has."""


class AttentionCoreSpec(BranchSpec):
    """Causal attention between the projections: what kinds of self-attention have in common.

    Attributes:
        heads: query heads.
        scale: what scores are multiplied by.
        window: keys that a query sees, its own included; None for all before it.
        dropout: probability with which attention probabilities are dropped.
    """

    kind: ClassVar[str] = "attention"

    heads: int
    scale: float
    window: int | None
    dropout: float

    @property
    @abstractmethod
    def head_width(self) -> int:
        """Width of a head as attention computes it, the same of queries, keys and values."""

    @property
    @abstractmethod
    def out(self) -> LinearSpec:
        """The projection back into the residual stream."""

    def _core_products(self, run: Execution, width: int, value: int) -> list[Product]:
        """Products of scores, over ``width`` elements, and of weighted values of ``value`` elements.

        Documents and sliding windows leave a part of them, and a causal mask halves them: two in the forward
        pass, scores and weighted values; five in the backward pass, which computes the scores again
        (FlashAttention-2, arXiv 2307.08691). Windows are counted as in documents of equal lengths.
        """
        length = run.length
        seen, span = run.attended, run.attended * run.length
        if self.window is not None and self.window < span:
            seen *= 1 - (1 - self.window / span) ** 2
        count = seen * run.sequences * self.heads / run.tensor / run.context / 2
        scores = Product("F", length, length, width, count, kernel="attention")
        values = scores._replace(n=value, k=length)
        products = [scores._replace(action="B", again=True)]
        for action, times in _TIMES:
            kinds = [(scores, times)] if width == value else [(scores, times / 2), (values, times / 2)]
            products += [kind._replace(action=action, times=number * count) for kind, number in kinds]
        return products

    def _core(self, run: Execution, width: int, value: int) -> Operations:
        """Attention between the projections, over ``width`` and ``value`` elements of a head, with what
        context ranks send. The products of a ring run beside its messages."""
        products = self._core_products(run, width, value)
        forward: list[Operation] = [product for product in products if product.action == "F"]
        backward: list[Operation] = [product for product in products if product.action == "B"]
        pair, (q, _, _) = self.pair_bytes(run), self._sizes(run)
        if run.ring > 1:
            # Of every other rank's keys an output, added to the sum; backward, three gradients.
            merged = 3 * run.widening * q * (run.ring - 1)
            forward.append(Pass("F", "sum", merged, run.ring - 1))
            backward.append(Pass("B", "sum", 3 * merged, 3 * (run.ring - 1)))
        if run.ring > 1 and run.gathers:
            whole, beside = pair * run.tokens * run.context, len(forward) - 1
            forward.insert(0, Collective("F", "ring", "all_gather", whole, beside))
            backward.insert(0, Collective("B", "ring", "all_gather", whole, len(backward) - 1))
            backward.append(Collective("B", "ring", "reduce_scatter", whole))
        elif run.ring > 1:
            sent, received = run.keys or ((run.ring - 1) * run.ulysses * run.tokens,) * 2
            forward.insert(0, Collective("F", "ring", "exchange", pair * sent, len(forward) - 1))
            for size in (pair * received, pair * sent):
                backward.insert(0, Collective("B", "ring", "exchange", size, len(backward) - 1))
        if run.ring > 1 and self._exactly(run):
            usual = [op for op in forward if isinstance(op, Collective)]
            backward = [*map(again, usual), *backward]
            forward = [*self._exact_gathers(run), *(op for op in forward if op not in usual)]
        if run.ulysses == 1:
            return Operations(forward, backward)
        before, after = (self._exchanged("F", run, size) for size in self.exchanged_bytes(run))
        turned = [self._exchanged("B", run, size) for size in self.exchanged_bytes(run)]
        return Operations([*before, *forward, *after], [*turned[1], *backward, *turned[0]])

    def _exact_gathers(self, run: Execution) -> list[Operation]:
        """Rounded keys and values of all tokens, and the largest element of each value."""
        tokens, heads = run.tokens * run.context, self.kv_heads_held // run.tensor
        tops = 4 * heads_of(heads, run.ulysses) * tokens
        pairs = self.pair_bytes(run) * tokens // 2
        return [Collective("F", "ring", "all_gather", nbytes) for nbytes in (pairs, pairs, tops)]

    @staticmethod
    def _exchanged(action: str, run: Execution, nbytes: int) -> list[Operation]:
        """Heads exchanged for tokens, or back: packed, sent, unpacked."""
        copy = Pass(action, "copy", 2 * nbytes)
        return [copy, Collective(action, "ulysses", "all_to_all", nbytes), copy]

    def pair_bytes(self, run: Execution) -> int:
        """Bytes of a token's keys and values, as a ring sends them."""
        return 2 * self._sizes(run)[1] * self._repeated(run) // (run.tokens * run.ulysses)

    def exchanged_bytes(self, run: Execution) -> tuple[int, int]:
        """Bytes of a rank's queries, keys and values, and of its output, where heads are exchanged for
        tokens."""
        q, k, _ = self._sizes(run)
        return q + 2 * k * self._repeated(run), q

    @property
    @abstractmethod
    def kv_heads_held(self) -> int:
        """Key/value heads of all tensor ranks, those that several ranks hold counted for each."""

    def _repeated(self, run: Execution) -> int:
        """Ranks that get the same keys and values where heads are exchanged for tokens."""
        heads = self.kv_heads_held // run.tensor
        return heads_of(heads, run.ulysses) * run.ulysses // heads

    def _exactly(self, run: Execution) -> bool:
        """Whether attention itself is exact: with dropout it is the usual one."""
        return choose_attention(self._facts(run)) is AttentionMethod.EXACT

    def _facts(self, run: Execution) -> AttentionFacts:
        """The facts of the choice of a kernel; of GPUs, with the kernels that this version knows."""
        return AttentionFacts(
            run.cpu,
            run.byte,
            self.head_width,
            varlen=not run.cpu and run.byte == 2,
            exact=run.exact,
            ring=run.ring,
            dropped=self.dropout > 0,
            documents=run.isolate,
            windowed=self.window is not None and self.window < run.length,
        )

    def _usual(self, run: Execution) -> AttentionMethod:
        """The method in the usual arithmetic, and of the backward pass in any."""
        return choose_attention(self._facts(run)._replace(exact=False))

    def _output_kept(self, run: Execution) -> int:
        """Bytes of the output that is kept: by the usual attention, or by the projection after it."""
        return self._sizes(run)[0] if self.out.trained or not self._exactly(run) else 0

    def _core_kept(self, run: Execution) -> int:
        """Bytes that attention itself keeps besides queries, keys, values and its output."""
        q, k, statistic = self._sizes(run)
        kept = statistic * self.heads + (2 * q if self._expanded(run) else 0)
        if self._usual(run) is AttentionMethod.SDPA:
            if run.isolate:
                kept += q  # every document's output, and all of them joined
            elif self.window is not None and self.window < run.length:
                # The output twice; of all blocks but the first, queries, and keys and values twice.
                middle = run.length // self.window * self.window - self.window
                kept += q + (q + 4 * k) * middle // run.length
        return kept

    def _core_forward(self, run: Execution) -> int:
        """Bytes that exact attention needs beside its operands; the output is not there yet."""
        if not self._exactly(run):
            return 0
        q, k, _ = self._sizes(run)
        pairs, heads = 2 * k * self._repeated(run), self.kv_heads_held // run.tensor
        groups = heads_of(heads, run.ulysses)
        # Keys and values rounded, of all ranks: as they arrive and in order; a sequence's in float64.
        here = pairs * run.ring
        wide = here // run.sequences * 8 // run.byte
        sharing = self.heads // run.tensor // run.ulysses // groups
        scores = scores_bytes(sharing, groups, run.length // run.ring, run.length, run.byte, run.cpu)
        several = run.sequences > 1 or run.isolate or run.ring > 1  # whose outputs are joined
        return max(
            here + wide + scores, here + q if several else 0, pairs + 2 * here - q if run.ring > 1 else 0
        )

    def _core_backward(self, run: Execution) -> int:
        """Bytes that the backward pass of attention over context ranks, or in tiles, needs, its results
        included."""
        q, k, _ = self._sizes(run)
        pairs, wide, ring = 2 * k * self._repeated(run), run.widening, run.ring
        # Gradients of all tokens side by side; or these sent back, when the output has been given up.
        exchanged = 2 * (q + pairs) + max(0, 2 * k - q) if run.ulysses > 1 else 0
        method = self._usual(run)
        if method not in TILED:
            return exchanged
        # The sums of gradients. Results of the rank's own keys, or of another's: half the queries see all of
        # these, or all of them half; the sum of those. Sequences are one by one where each is a call.
        scores = self._scores(run) if method is AttentionMethod.SCORES else 0
        calls = 1 if method is AttentionMethod.GPU_FLASH else run.sequences
        sums, local = wide * (q + pairs), (q + pairs) // calls + scores
        if ring == 1:
            return max(sums + local, exchanged)
        other = max(q + pairs // 2, q // 2 + pairs) // run.sequences + scores
        if run.gathers:
            return max(sums + 2 * ring * pairs + max(local, wide * pairs + other), exchanged)
        # The rank's own keys leave, the next arrive. Others are there; the gradients of those before leave,
        # and some of the rank's own arrive; or those of these, in the format in which they are sent.
        more = other if ring == 2 else other + 3 * pairs
        more = wide * pairs + max(more, 2 * pairs if wide > 1 else pairs)
        return max(sums + pairs + max(local + pairs, more + pairs), exchanged)

    def _scores(self, run: Execution) -> int:
        """Bytes of a tile's scores that exist at a time in its backward pass."""
        tokens = run.length // run.ring  # of a sequence, on a rank; of the last rank by zigzag in one run
        heads = self.heads // run.tensor // run.ulysses
        rows = max(1, min(tokens, SCORES // (heads * tokens)))
        # The last queries see all keys; if these are fewer than the others, the ones before them count.
        columns = tokens // rows * rows if run.ring == 1 else tokens
        scores = heads * rows * columns
        # Probabilities and their gradients; with dropout factors, of 32-bit hashes if not compiled.
        if self.dropout == 0:
            return 2 * run.wide * scores
        return max(3 * run.wide, run.wide + (0 if run.compiled else 12)) * scores

    def _expanded(self, run: Execution) -> bool:
        """Keys and values are repeated for the query heads that share them: GPUs have no kernel with groups
        for this format (:meth:`hexad.model.attention_kernels.AttentionKernel.dense`)."""
        grouped = self.heads != self.kv_heads_held
        return grouped and not run.cpu and run.byte != 2 and self._usual(run) is AttentionMethod.SDPA

    def _sizes(self, run: Execution) -> tuple[int, int, int]:
        """Bytes of this rank's queries, of its keys, and of one statistic per token and global head."""
        q = run.whole(self.heads // run.tensor * self.head_width)
        k = run.whole(self.kv_heads_held // run.tensor * self.head_width)
        return q, k, run.tokens * run.wide // run.tensor


@dataclass(frozen=True)
class AttentionSpec(AttentionCoreSpec):
    """Causal self-attention with grouped key/value heads.

    Attributes:
        layer: what it has in common with the layer's other branches.
        heads, kv_heads: query heads, and key/value heads.
        width: of a head.
        rotary_width: leading elements of a query or key head that are rotated; 0 without rotary positions.
        scale: what scores are multiplied by.
        qkv_bias, out_bias: biases of the projections.
        norm_eps: of the norms of every query and key head; None without such norms.
        window: keys that a query sees, its own included; None for all before it.
        dropout: probability with which attention probabilities are dropped.
        copies: tensor ranks that hold the same key/value heads; each computes the part of their gradient that
            its own query heads make.
    """

    layer: LayerTraits
    heads: int
    kv_heads: int
    width: int
    rotary_width: int
    scale: float
    qkv_bias: bool
    out_bias: bool
    norm_eps: float | None
    window: int | None
    dropout: float
    copies: int = 1

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.width

    @property
    def kv_heads_held(self) -> int:
        """Key/value heads of all tensor ranks."""
        return self.kv_heads * self.copies

    @property
    def name(self) -> str:
        """The module's name, from the stage's root."""
        return f"{self.layer.prefix}attention"

    @cached_property
    def qkv(self) -> LinearSpec:
        """The fused projections of queries, keys and values."""
        queries, keys = self.heads * self.width, self.kv_heads * self.width
        outputs = {f"{self.name}.q": queries, f"{self.name}.k": keys, f"{self.name}.v": keys}
        copied = frozenset([*outputs][1:] if self.copies > 1 else ())
        linear = self.layer.projection(f"{self.name}.qkv", outputs, self.qkv_bias)
        return replace(linear, copied=copied, copies=self.copies)

    @cached_property
    def out(self) -> LinearSpec:
        """The projection back into the residual stream."""
        return self.layer.projection_back(f"{self.name}.out", self.heads * self.width, self.out_bias)

    @cached_property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The linear layers in the order of the forward pass."""
        return self.qkv, self.out

    @cached_property
    def head_norms(self) -> tuple[NormSpec, ...]:
        """The norms of query heads and of key heads; every tensor rank normalises its own heads."""
        if self.norm_eps is None:
            return ()
        names = (f"{self.name}.q_norm", f"{self.name}.k_norm")
        sizes = self.width, self.norm_eps, True, self.layer.unit, self.layer.frozen
        return tuple(NormSpec(name, "rms", *sizes) for name in names)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the module."""
        norms = (parameter for norm in self.head_norms for parameter in norm.parameters)
        return (*self.qkv.parameters, *self.out.parameters, *norms)

    def operations(
        self, run: Execution, recomputed: RecomputedParts = NOTHING, split: bool = False, reached: bool = True
    ) -> Operations:
        """The projections, norms and rotations of queries and keys, and the attention itself."""
        q, k, _ = self._sizes(run)
        computed = Operations([], [])
        if self.norm_eps is not None:
            for norm, size in zip(self.head_norms, (q, k)):
                computed = computed.then(norm.operations(run, size))
            joined = Pass("F", "copy", 2 * (q + k))
            computed = computed.then(Operations([joined], [joined._replace(action="B")]))
        if self.rotary_width:
            turned = Pass("F", "rotation", 2 * (q + k))
            computed = computed.then(Operations([turned], [turned._replace(action="B")]))
        # Gradients of queries and keys, and of these and values, side by side.
        parts: list[Operation] = [Pass("B", "copy", 2 * (q + k)), Pass("B", "copy", 2 * (q + 2 * k))]
        computed = Operations([], parts[1:]).then(computed).then(Operations([], parts[:1]))
        between = computed.then(self._core(run, self.width, self.width))
        total = self.qkv.operations(run, split, reached)
        reached = reached or self.qkv.trains or any(norm.trains for norm in self.head_norms)
        total = total.then(between.reached(reached)).then(self.out.operations(run, split, reached))
        if "rotated" in recomputed and reached:
            total.backward[:0] = [again(op) for op in computed.forward]
        return total

    def cached(self, tensor: int) -> int:
        """A key and a value of each of a rank's key/value heads."""
        return 2 * (self.kv_heads_held // tensor) * self.width

    def cached_heads(self, tensor: int) -> int:
        """A value's."""
        return self.kv_heads_held // tensor

    def cached_flops(self, length: int, tensor: int) -> int:
        """Scores and weighted values, of the keys in the window."""
        seen = length if self.window is None else min(length, self.window)
        return 4 * (self.heads // tensor) * self.width * seen

    def kept(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes, its input left out: the projections' output, rotated queries and keys, the output, and each
        head's log-sum-exp; in exact arithmetic nothing of which the usual attention makes its backward pass,
        which computes that again."""
        q, k, statistic = self._sizes(run)
        kept = q + 2 * k + self._output_kept(run)
        if not self._exactly(run):
            kept += self._core_kept(run)
            if (
                self._expanded(run)
                and self._computed
                and "rotated" not in recomputed
                and self.norm_eps is None
            ):
                kept -= q + 2 * k  # nothing needs the projections' output
        if self.norm_eps is not None and not run.exact:
            kept += statistic * (self.heads + self.kv_heads_held)
        kept += sum(linear.kept(run) for linear in self.linears)
        if run.ulysses > 1:
            # The output of all tokens and of the rank's own; nothing needs the projections' but their norms.
            kept += (0 if self._exactly(run) else q) + 2 * k * (self._repeated(run) - 1)
            return kept + (q + 2 * k if self.norm_eps is not None else 0)
        return kept + (q + k if self._computed and "rotated" not in recomputed else 0)

    def forward(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in the forward pass, above what is kept; 0 where a later branch needs more."""
        return max(self.repeated(run, recomputed), self.out.products_forward(run)) if run.exact else 0

    def repeated(self, run: Execution, recomputed: RecomputedParts) -> int:
        """Bytes needed in a forward pass without the last product; the output does not exist yet."""
        q, k, _ = self._sizes(run)
        core = self._core_forward(run)
        rotated = q + k if self._computed else 0
        rotation = run.function((q + k) // run.byte) - q
        if "rotated" in recomputed:
            return max(self.qkv.products_forward(run) - q, rotated + max(rotation, core))
        return max(self.qkv.products_forward(run) - q - rotated, rotation, core)

    def backward(self, run: Execution, recomputed: RecomputedParts, split: bool) -> list[Moment]:
        """Memory of the backward pass; with ``split`` operands of weight gradients stay, for ``W``."""
        q, k, statistic = self._sizes(run)
        gathered = run.gathered(self.layer.hidden)
        rotated = q + k if self._computed else 0
        deferred = split and not self.out.set_aside(run, split)
        product = max(0 if deferred else self.out.weight_product(run), self.out.dropping(run))
        out = gathered + max(self.out.input_gradient(run), q + product)
        moments = [Moment(out, gathered + q, self.out.matrices, self.out.aside(run, split))]
        # Recomputed queries and keys; the gradients of all three.
        operands = deferred and self.out.trained
        live = q + (gathered if operands else 0) + (rotated if "rotated" in recomputed else 0)
        core = live + (q + 2 * k) + (2 * q if self._expanded(run) else 0)
        if run.context > 1 or self.dropout:
            core = live + self._core_backward(run)
        if self._exactly(run):  # computed again, when the projection after it has given up the output
            core += self._core_kept(run) + (0 if self.out.trained and not operands else q)
        else:
            live -= statistic * self.heads
        live -= q + (0 if operands else self._output_kept(run))
        rotation = live + (q + 2 * k) + (q + k)
        live -= rotated
        joined = live + 2 * (q + 2 * k)
        if run.exact and self.norm_eps is not None:
            joined += q + statistic * self.heads
        projection = self.qkv.backward(run, "norms" in recomputed, split).above(live)
        most = max(core, rotation, joined, projection.needed)
        return [*moments, projection._replace(needed=most)]

    @property
    def _computed(self) -> bool:
        """Queries and keys are computed from the projections' output, not views of it."""
        return self.rotary_width > 0 or self.norm_eps is not None
