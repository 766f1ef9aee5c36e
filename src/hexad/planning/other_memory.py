"""Peak memory of a rank by other training systems, as PyTorch's allocator counts it. No torch.

What autograd keeps in Megatron-LM with Transformer Engine's layers, or with its own unfused ones: the inputs
of products, of norms and of activation functions, dropout masks, and scores where attention is not fused.
Hexad's own memory is predicted by :mod:`hexad.planning.memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hexad.model.inventory import StageSpec
from hexad.parallel.inventory import Execution, Position, tensor_positions

from .device_memory import least_device_memory
from .published import Published, Uncovered

_WORKSPACE = 32 * 2**20
"""cuBLAS's workspace on a Hopper GPU, or with deterministic kernels (``CUBLAS_WORKSPACE_CONFIG``); that of
Transformer Engine on GPUs since Hopper."""
_DEFAULT_WORKSPACE = 8.5 * 2**20
"""cuBLAS's on others, as PyTorch allocates it."""
_SMALL_WORKSPACE = 4 * 2**20
"""Transformer Engine's on others."""
_OPERANDS = 0.5
"""Part of what is kept that split schedules hold until the weights' gradients are computed."""
_IMBALANCE = 1.5
"""Rows of the fullest rank's experts, relative to an even load, where routing is not forced to be even:
that of the first steps of Megatron-LM's tests."""
_RESERVED = 1.1
"""Memory that PyTorch's allocator keeps, relative to the peak of tensors."""


def usable_bytes(case: Published) -> float:
    """Bytes of a GPU of the row beside its context and communicators."""
    hardware, gigabytes = case.cluster.hardware, case.gigabytes
    sold = gigabytes if gigabytes in hardware.memory_gib else max(hardware.memory_gib, default=0)
    if not sold:
        raise Uncovered(f"memory of {hardware.names[0]} is not known")
    return hardware.memory_gib[sold] * 2**30 - least_device_memory(0, case.job.layout).total


def fits(case: Published) -> bool:
    """Whether the blocks that the allocator keeps for the predicted tensors fit the GPU."""
    return _tensors(case) * _RESERVED <= usable_bytes(case)


def peak_bytes(case: Published) -> float:
    """Predicted peak of the tensors of a rank: the one that the row was measured on, or the fullest.

    Raises:
        Uncovered: what moves this row's memory is not modelled.
    """
    tensors = _tensors(case)
    if case.system.reports == "allocated":
        return tensors
    if case.system.reports == "reserved":
        return tensors * _RESERVED
    return tensors * _RESERVED + least_device_memory(0, case.job.layout).total


def state_bytes(
    elements: float, parameter: float, gradient: float, state: float, zero: int, shards: float
) -> float:
    """Bytes of parameters, gradients and optimizer state, given those of each element, by ZeRO level."""
    others = state / (shards if zero >= 1 else 1.0) + gradient / (shards if zero >= 2 else 1.0)
    return elements * (others + parameter / (shards if zero == 3 else 1.0))


def _tensors(case: Published) -> float:
    """Peak bytes of the tensors of the rank that was measured."""
    if case.notes.offloaded:
        raise Uncovered("activations in the host's memory are not modelled")
    memory, last = RankMemory(case), case.job.schedule.pipeline - 1
    if case.analytic:
        return memory.state(0) + memory.most(0, moments=False)
    ranks = [last] if case.last_rank else range(last + 1)
    return max(memory.peak(rank) for rank in ranks)


@dataclass
class RankMemory:
    """Memory of the ranks of a published row."""

    case: Published

    @property
    def run(self) -> Execution:
        """How a rank computes a microbatch."""
        return self.case.job.run

    def peak(self, rank: int) -> float:
        """Peak of a pipeline rank."""
        return self.state(rank) + self.most(rank) + self.messages + self.workspace

    def most(self, rank: int, moments: bool = True) -> float:
        """The most that is kept of microbatches in flight, with ``moments`` beside what the loss or a layer's
        backward pass needs besides."""
        job, nbytes, most = self.case.job, 0.0, 0.0
        kept: Counter[int] = Counter()
        for action in job.schedule.ranks[rank]:
            stage = job.stages[action.stage]
            bytes_kept = self.kept(stage)
            if action.kind == "F":
                nbytes += bytes_kept
                kept[action.stage] += 1
                most = max(most, nbytes + (self.loss(stage) if moments else 0.0))
            else:
                most = max(most, nbytes + (self.backward(stage) if moments else 0.0))
                if action.kind in ("B", "BW"):
                    nbytes -= bytes_kept * (1.0 if action.kind == "BW" else 1 - _OPERANDS)
                else:
                    nbytes -= bytes_kept * _OPERANDS
        return most

    @property
    def messages(self) -> float:
        """Bytes of what pipeline ranks send and receive."""
        job = self.case.job
        return 2.0 * job.run.stream(job.model.settings.hidden) if job.layout.pipeline > 1 else 0.0

    @property
    def workspace(self) -> float:
        """Bytes of libraries' workspaces: one of cuBLAS for the forward and the backward pass each, and that
        of Transformer Engine."""
        case = self.case
        capability = case.cluster.hardware.capability
        large = case.notes.deterministic or capability == (9, 0)
        total = 2.0 * (_WORKSPACE if large else _DEFAULT_WORKSPACE)
        if case.system.transformer_engine:
            total += _WORKSPACE if capability >= (9, 0) else _SMALL_WORKSPACE
        return total

    # Parameters, gradients, optimizer

    def state(self, rank: int) -> float:
        """Bytes of parameters, gradients and the optimizer's state."""
        job, notes, system, total = self.case.job, self.case.notes, self.case.system, 0.0
        gradient = float(notes.gradient or system.gradient)
        if notes.accumulated:  # besides those that the backward pass makes
            gradient = job.run.byte + 4.0
        for stage in job.schedule.stages_of(rank):
            for grid, elements in job.elements[stage].items():
                shards = max(1.0, job.layout.state_ranks[grid] / max(1, job.replicas) * notes.scope)
                widths = float(system.parameter), gradient, system.state
                total += state_bytes(elements, *widths, job.zero, shards)
        return total + self._unsharded(rank)

    def _unsharded(self, rank: int) -> float:
        """Bytes of the layers that FSDP has gathered: the one that is computed, and the next."""
        job = self.case.job
        if job.zero != 3:
            return 0.0
        stages = [job.stages[stage] for stage in job.schedule.stages_of(rank)]
        positions = tensor_positions(Position(0, job.layout.tensor), job.model.kv_copies)
        positions = {**positions, "expert": Position(0, job.layout.expert)}
        units = [
            sum(parameter.elements(positions) for parameter in part.parameters)
            for stage in stages
            for part in (stage.embedding, stage.head, *dict.fromkeys(stage.blocks))
            if part is not None
        ]
        return 2.0 * job.run.byte * max(units)

    # Activations

    def kept(self, stage: StageSpec) -> float:
        """Bytes of a microbatch that a stage keeps from its forward to its backward pass."""
        run, hidden = self.run, self.case.job.model.settings.hidden
        total = sum(self._layers(stage))
        if stage.first and self.case.dropout:
            total += run.rows * hidden
        if stage.last:
            total += 2 * run.stream(hidden)
        return total

    def _layers(self, stage: StageSpec) -> Iterator[float]:
        run, model = self.run, self.case.job.model.settings
        stream = run.stream(model.hidden)
        for number, (_, parts) in zip(stage.layers, stage.recomputing(self.case.job.recompute)):
            yield stream if "layer" in parts else self.layer(number, parts)

    def layer(self, number: int, parts: frozenset[str] = frozenset()) -> float:
        """Bytes that a layer keeps, all of them."""
        run, model, case = self.run, self.case.job.model.settings, self.case
        if case.job.repeated:
            return self._products_kept()
        stream, rows, tensor = run.stream(model.hidden), run.rows, run.tensor
        norms = 2 * stream * (1 if "norms" in parts else 2)
        masks = 2 * rows * model.hidden * (1 if case.dropout else 0)
        experts = model.moe is not None and model.moe.in_layer(number)
        feed_forward = self._experts(parts) if experts else self._feed_forward(parts)
        return norms + masks + self._attention() / tensor + feed_forward

    def _products_kept(self) -> float:
        """Bytes that a dense layer keeps where the backward pass repeats its pointwise functions and half of
        its products: the layer's input, half of the products' results, and attention's output."""
        run, model = self.run, self.case.job.model.settings
        queries, keys = (int(count) * int(model.head_dim) for count in (model.heads, model.kv_heads))
        gates = 2 if self.case.gated else 1
        results = (queries + 2 * keys + gates * int(model.ffn_hidden)) / run.tensor
        streams = run.stream(model.hidden) * (1 + 2 * (1 - self.case.job.repeated))
        return streams + 2.0 * run.tokens * (results * (1 - self.case.job.repeated) + queries / run.tensor)

    def _attention(self) -> float:
        run, model, case = self.run, self.case.job.model.settings, self.case
        tokens, heads = run.tokens, model.heads
        if model.mla is not None:
            mla = model.mla
            wide = mla.nope_dim + mla.rope_dim
            down = 2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_dim
            features = down * run.tensor + heads * (2 * wide + (mla.nope_dim + mla.value_dim) + wide)
            out = heads * mla.value_dim
        else:
            queries, keys = heads * int(model.head_dim), int(model.kv_heads) * int(model.head_dim)
            features = queries + 2 * keys
            if case.job.model.rotary:
                features += queries + keys
            out = queries
        kept = 2.0 * tokens * (features + out)
        if case.system.unfused and not case.job.attention_again:
            score_bytes = 5.0 if case.attention_dropout else 2.0
            return kept + score_bytes * heads * tokens * run.length / max(1, run.context)
        return kept + 4.0 * heads * tokens

    def _feed_forward(self, parts: frozenset[str]) -> float:
        run, model = self.run, self.case.job.model.settings
        gates = 2 if self.case.gated else 1
        result = 0 if "activations" in parts else 1
        return 2.0 * run.tokens * int(model.ffn_hidden) / run.tensor * (gates + result)

    def _experts(self, parts: frozenset[str]) -> float:
        """Bytes of evenly loaded experts: permuted rows, both products' results, and the shared expert."""
        run, model = self.run, self.case.job.model.settings
        moe = model.moe
        assert moe is not None
        gates = 2 if self.case.gated else 1
        result = 0 if "moe_act" in parts else 1
        width = int(moe.ffn_hidden)
        routed = run.rows * moe.top_k * run.expert_tensor * (1.0 if self.case.balanced else _IMBALANCE)
        row_elements = 2 * model.hidden + (gates + result) * width / run.expert_tensor
        shared = run.tokens * moe.shared_experts * width / run.tensor * (gates + result)
        return 2.0 * (routed * row_elements + shared)

    # Moments

    def loss(self, stage: StageSpec) -> float:
        """Bytes of the logits while the loss is computed, and of its gradient."""
        if not stage.last:
            return 0.0
        run, model = self.run, self.case.job.model.settings
        vocabulary = -(-int(model.vocab) // (128 * run.tensor)) * 128
        system = self.case.system
        logit_bytes = system.fused_logits if self.case.notes.fused_loss else system.logits
        deferred = 2.0 * run.byte * run.tokens * vocabulary if self.case.notes.deferred_embedding else 0.0
        return logit_bytes * run.tokens * vocabulary + deferred

    def backward(self, stage: StageSpec) -> float:
        """Bytes of the backward pass besides what is kept: gradients, and what a layer recomputes."""
        run, model = self.run, self.case.job.model.settings
        gradients = 2.0 * run.stream(model.hidden)
        if self.case.job.recompute.kind == "full" and len(stage.layers):
            gradients += self.layer(stage.layers[-1])
        return gradients
