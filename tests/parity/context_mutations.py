"""Ways to break context parallel."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from hexad.model import attention as model_attention
from hexad.model import transformer
from hexad.parallel.context import attention, exchange
from hexad.parallel.context.attention import Merged
from hexad.parallel.context.rounds import rounds
from hexad.parallel.context.spans import Spans
from hexad.parallel.data import gradients
from hexad.topology.mesh import Mesh

from .context_cases import long
from .harness import DROPPED, VARIANTS, Case, fewer
from .mutation import Mutation, Patches, same_async


def _skip_a_block(mesh: Mesh) -> Patches:
    def skipping(*arguments: Any) -> Any:
        *others, last = rounds(*arguments)
        return (*others, replace(last, tiles=last.tiles[:-1]))

    return [mock.patch.object(model_attention, "rounds", skipping)]


def _merge_without_rescaling(mesh: Mesh) -> Patches:
    def add(self: Merged, rows: Any, part: Any) -> None:
        whole, before = self.out[slice(*rows)][part.rows], self.lse[slice(*rows)][part.rows]
        whole += part.out
        before.copy_(torch.logaddexp(before, part.lse))

    return [mock.patch.object(Merged, "add", add)]


def _positions_from_the_first(mesh: Mesh) -> Patches:
    original = Spans.positions

    def positions(spans: Spans, device: torch.device) -> torch.Tensor:
        places = original(spans, device)
        return places if spans.numbers is None else torch.arange(len(places), device=device)

    return [mock.patch.object(Spans, "positions", positions)]


def _keys_of_dropout_from_the_first(mesh: Mesh) -> Patches:
    original = transformer.Transformer._keys

    def keys(self: Any, spans: Spans, ring: Any, key: Any) -> Any:
        if spans.numbers is not None:
            numbers = torch.arange(len(spans.numbers))
            spans = Spans(spans.tokens, spans.sequences, spans.bounds, spans.slice, numbers)
        return original(self, spans, ring, key)

    return [mock.patch.object(transformer.Transformer, "_keys", keys)]


def _keep_gradients_of_keys(mesh: Mesh) -> Patches:
    return [mock.patch.object(attention._Returns, "send", lambda *_: None)]


def _keep_gathered_gradients(mesh: Mesh) -> Patches:
    def scatter(tensor: torch.Tensor, axis: Any) -> Any:
        return same_async(tensor.chunk(axis.size)[axis.rank], axis)

    return [mock.patch.object(attention, "reduce_scatter_async", scatter)]


def _keep_gradients_apart(mesh: Mesh) -> Patches:
    return [mock.patch.object(gradients, "all_reduce_async", same_async)]


def _first_copy_of_heads(mesh: Mesh) -> Patches:
    original = exchange._together

    def together(x: torch.Tensor, count: int) -> torch.Tensor:
        if count < x.shape[0]:
            return x.squeeze(2)[:: x.shape[0] // count].transpose(0, 1)
        return original(x, count)

    return [mock.patch.object(exchange, "_together", together)]


def _other_heads(mesh: Mesh) -> Patches:
    original = exchange._by_rank

    def by_rank(x: torch.Tensor, size: int) -> torch.Tensor:
        return original(x.flip(1) if x.shape[1] >= size else x, size)

    return [mock.patch.object(exchange, "_by_rank", by_rank)]


_GQA, _PACKED, _DROPPED = long(VARIANTS[0]), long(VARIANTS[1]), long(DROPPED[2])
CONTEXT_MUTATIONS = {
    "skip a block of another rank's keys": Mutation(_skip_a_block, Case(_GQA, context=2)),
    "skip a block of another rank's keys, of documents": Mutation(
        _skip_a_block, Case(_PACKED, context=2, balance="zigzag")
    ),
    "add up blocks of keys without rescaling": Mutation(_merge_without_rescaling, Case(_GQA, context=2)),
    "number a context rank's tokens from its first on": Mutation(
        _positions_from_the_first, Case(_GQA, context=2)
    ),
    "drop the same of every context rank": Mutation(
        _keys_of_dropout_from_the_first, Case(_DROPPED, context=2, method="all_gather")
    ),
    "send no gradients of keys back": Mutation(_keep_gradients_of_keys, Case(_GQA, context=2)),
    "keep gradients of gathered keys": Mutation(
        _keep_gathered_gradients, Case(_GQA, context=2, method="all_gather")
    ),
    "leave gradients of context ranks apart": Mutation(
        _keep_gradients_apart, Case(_GQA, context=2, method="ulysses")
    ),
    "take the gradient of one copy of exchanged KV heads": Mutation(
        _first_copy_of_heads,
        Case(
            long(fewer(VARIANTS[0], 1)),
            context=2,
            method="ulysses",
        ),
    ),
    "exchange heads in another order": Mutation(_other_heads, Case(_GQA, context=2, method="ulysses")),
}
