"""Ways to break what divides the state, recomputes and drops out."""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from hexad import comm
from hexad.engine import language
from hexad.model.dropout import DropoutKey
from hexad.model.latent_attention import LatentAttention
from hexad.parallel.data import gatherer, gradients
from hexad.topology.mesh import Axis, Mesh

from .harness import DROPPED, VARIANTS, Case
from .latent_cases import LATENT
from .mutation import Mutation, Patches, same_async


def _never_gather(mesh: Mesh) -> Patches:
    def keep(tensor: torch.Tensor, axis: Axis, out: torch.Tensor) -> comm.Pending:
        return comm.Pending(out)

    return [mock.patch.object(gatherer, "all_gather_async", keep)]


def _keep_own_gradient(mesh: Mesh) -> Patches:
    def own(tensor: torch.Tensor, axis: Axis, out: torch.Tensor | None = None) -> comm.Pending:
        share = tensor.chunk(axis.size)[axis.rank]
        return comm.Pending(share if out is None else out.copy_(share))

    return [mock.patch.object(gradients, "reduce_scatter_async", own)]


def _last_microbatch_only(mesh: Mesh) -> Patches:
    original = gradients.Gradients.start

    def start(self: Any, number: int, first: bool, last: bool, absent: Any) -> None:
        original(self, number, True, last, absent)

    return [mock.patch.object(gradients.Gradients, "start", start)]


def _replicas_apart(mesh: Mesh) -> Patches:
    return [mock.patch.object(gradients, "all_reduce_async", same_async)]


def _norm_of_share(mesh: Mesh) -> Patches:
    def reduce(tensor: torch.Tensor, axis: Axis, *rest: Any) -> torch.Tensor:
        return tensor if axis.name == "data" else comm.all_reduce(tensor, axis, *rest)

    return [mock.patch("hexad.optim.optimizer.all_reduce", reduce)]


def _drawn_by(**wrong: Any) -> Any:
    def patches(mesh: Mesh) -> Patches:
        original = language.LanguageModel._key

        def key(self: Any, *arguments: Any) -> DropoutKey:
            return replace(original(self, *arguments), **wrong)

        return [mock.patch.object(language.LanguageModel, "_key", key)]

    return patches


def _another_mask_again(mesh: Mesh) -> Patches:
    """Whoever draws a second time, in a recomputed forward or a backward pass, gets other numbers."""
    from hexad.model import dropout

    original, seen = dropout._mix_, 0

    def mix(h: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return original(h + seen)

    return [mock.patch.object(dropout, "_mix_", mix)]


def _first_weights(mesh: Mesh) -> Patches:
    """Queries are recomputed with the weights of the first forward pass."""
    original, first = LatentAttention._padded_queries, dict[int, torch.Tensor]()

    def queries(self: Any, *arguments: Any) -> torch.Tensor:
        weight = self.q_up.weight
        if torch.is_grad_enabled():
            first.setdefault(id(self), weight.detach().clone())
            return original(self, *arguments)
        gathered, weight.data = weight.data, first[id(self)]
        try:
            return original(self, *arguments)
        finally:
            weight.data = gathered

    return [mock.patch.object(LatentAttention, "_padded_queries", queries)]


def _in(zero: int, variant: Any = VARIANTS[0], **layout: Any) -> Case:
    return Case(variant, **{"data": 2, **layout}, zero=zero)


STATE_MUTATIONS = {
    "never gather updated parameters": Mutation(_never_gather, _in(1), steps=2),
    "gather a layer's stale weights": Mutation(_never_gather, _in(3)),
    "keep this rank's gradient of its shard": Mutation(_keep_own_gradient, _in(1)),
    "keep the last microbatch's gradient only": Mutation(_last_microbatch_only, _in(2)),
    "leave replicas apart": Mutation(_replicas_apart, _in(3, data=4, replicas=2)),
    "clip by the norm of this rank's shard": Mutation(_norm_of_share, _in(2)),
    "key dropout by the local position": Mutation(_drawn_by(sequence=0), _in(0, DROPPED[2])),
    "redraw dropout when recomputing": Mutation(
        _another_mask_again, replace(Case(DROPPED[2]), recompute="full")
    ),
    "recompute queries with the weights of the step before": Mutation(
        _first_weights, replace(_in(3, LATENT[0]), parts=("mla_up",)), steps=2
    ),
}
