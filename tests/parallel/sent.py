"""What the layers of a stage send for one microbatch, by closed formulas of their sizes."""

from typing import NamedTuple

from hexad.comm import sent_bytes
from hexad.model.attention_inventory import AttentionCoreSpec
from hexad.model.block_inventory import BlockSpec, BranchSpec
from hexad.model.inventory import StageSpec
from hexad.model.latent_attention_inventory import LatentAttentionSpec
from hexad.model.recompute_inventory import Parts, Recompute
from hexad.parallel.inventory import Execution
from hexad.parallel.tensor.embedding_inventory import EmbeddingSpec, HeadSpec
from hexad.parallel.tensor.linear_inventory import LinearSpec


class Collective(NamedTuple):
    """A collective, as :func:`hexad.comm.collectives.sent_bytes` counts it.

    Attributes:
        action: ``F``, ``B`` or ``W``: in which it runs.
        axis: over which it runs.
        operation: ``all_reduce``, ``all_gather``, ...
        nbytes: of the whole tensor.
    """

    action: str
    axis: str
    operation: str
    nbytes: int


Keys = tuple[int, int]
"""Tokens whose keys and values a rank sends in the rounds of a ring, and receives."""


def bytes_sent(collectives: list[Collective], sizes: dict[str, int]) -> int:
    """Bytes that a rank sends over the axes of ``sizes``, which have so many ranks."""
    return sum(
        sent_bytes(operation, sizes[axis], nbytes)
        for _, axis, operation, nbytes in collectives
        if axis in sizes
    )


def of_stage(
    stage: StageSpec, run: Execution, recompute: Recompute, split: bool, keys: Keys | None = None
) -> list[Collective]:
    """All collectives; with ``split`` weight gradients are actions of their own. Without ``keys`` those of
    all tokens are sent to every rank of the ring."""
    collectives = [
        collective
        for number, (block, parts) in enumerate(stage.recomputing(recompute))
        for collective in _of_block(block, run, parts, split, keys)
        if collective.action == "F" or number >= stage.unreached
    ]
    collectives += [] if stage.embedding is None else _of_embedding(stage.embedding, run)
    return collectives + ([] if stage.head is None else _of_head(stage.head, run))


def _of_block(
    block: BlockSpec, run: Execution, recomputed: Parts, split: bool, keys: Keys | None
) -> list[Collective]:
    """Full recompute repeats the forward pass but for the last sum; ``mla_up`` gathers latent vectors again,
    and exchanges heads again."""
    collectives = [part for branch in block.parts for part in _of_branch(branch, run, split, keys)]
    if "mla_up" in recomputed:
        latent = (branch for branch in block.parts if isinstance(branch, LatentAttentionSpec))
        collectives += [part for branch in latent for part in _of_heads(branch, run)]
    if "layer" in recomputed:
        forward = [collective for collective in collectives if collective.action == "F"]
        collectives += [collective._replace(action="B") for collective in forward[:-1]]
    return collectives


def _of_branch(branch: BranchSpec, run: Execution, split: bool, keys: Keys | None) -> list[Collective]:
    first, *others = (_of_linear(linear, run, split) for linear in branch.linears)
    between = _over_context(branch, run, keys) if isinstance(branch, AttentionCoreSpec) else []
    if isinstance(branch, LatentAttentionSpec):
        between += _of_shared_key(run.whole(branch.mla.rope_dim), run.sequence)
    return [*first, *between, *(part for parts in others for part in parts)]


def _of_heads(attention: LatentAttentionSpec, run: Execution) -> list[Collective]:
    """What makes queries, keys and values of latent vectors that are there."""
    linears = (attention.queries, attention.kv_up) if run.sequence else ()
    collectives = [Collective("B", "tensor", "all_gather", run.whole(linear.inputs)) for linear in linears]
    if run.ulysses > 1:
        collectives.append(Collective("B", "ulysses", "all_to_all", attention.exchanged_bytes(run)[0]))
    return collectives


def _of_shared_key(whole: int, sequence: bool) -> list[Collective]:
    """The part of the keys that the heads of all tensor ranks have in common."""
    if not sequence:
        return [Collective("B", "tensor", "all_reduce", whole)]
    return [
        Collective("F", "tensor", "all_gather", whole),
        Collective("B", "tensor", "reduce_scatter", whole),
    ]


def _of_linear(linear: LinearSpec, run: Execution, split: bool) -> list[Collective]:
    if linear.replicated:
        return []
    whole = run.whole(linear.features if linear.row else linear.inputs)
    if not run.sequence:
        return [Collective("F" if linear.row else "B", "tensor", "all_reduce", whole)]
    scatter, gather = ("F", "B") if linear.row else ("B", "F")
    collectives = [
        Collective(scatter, "tensor", "reduce_scatter", whole),
        Collective(gather, "tensor", "all_gather", whole),
    ]
    if not linear.row and linear.trained:  # the input is not kept: it is gathered again
        collectives.append(Collective("W" if split else "B", "tensor", "all_gather", whole))
    return collectives


def _over_context(attention: AttentionCoreSpec, run: Execution, keys: Keys | None) -> list[Collective]:
    """Heads for tokens and back, of the rank's own tokens; keys and values, and in the backward pass once
    more, with their gradients."""
    collectives, pair = [], attention.pair_bytes(run)
    if run.ulysses > 1:
        exchanged = attention.exchanged_bytes(run)
        collectives += [
            Collective(action, "ulysses", "all_to_all", size) for action in "FB" for size in exchanged
        ]
    if run.ring > 1 and run.gathers:
        whole = pair * run.tokens * run.context
        collectives += [Collective(action, "ring", "all_gather", whole) for action in "FB"]
        collectives.append(Collective("B", "ring", "reduce_scatter", whole))
    elif run.ring > 1:
        sent, received = keys or ((run.ring - 1) * run.ulysses * run.tokens,) * 2
        collectives += [Collective(action, "ring", "exchange", pair * sent) for action in "FB"]
        collectives.append(Collective("B", "ring", "exchange", pair * received))
    return collectives


def _of_embedding(embedding: EmbeddingSpec, run: Execution) -> list[Collective]:
    whole = run.whole(embedding.hidden)
    if not run.sequence:
        return [Collective("F", "tensor", "all_reduce", whole)]
    return [
        Collective("F", "tensor", "reduce_scatter", whole),
        Collective("B", "tensor", "all_gather", whole),
    ]


def _of_head(head: HeadSpec, run: Execution) -> list[Collective]:
    """Maxima, then sums and targets, per token; hidden states and their gradient, both in ``F``."""
    tokens, whole = run.tokens, run.whole(head.hidden)
    collectives = [
        Collective("F", "tensor", "all_reduce", tokens * run.wide),
        Collective("F", "tensor", "all_reduce", 2 * tokens * run.wide),
    ]
    if run.sequence:
        collectives.append(Collective("F", "tensor", "all_gather", whole))
    gradient = "reduce_scatter" if run.sequence else "all_reduce"
    return [*collectives, Collective("F", "tensor", gradient, whole)]
