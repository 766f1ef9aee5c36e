"""Ways to break mixtures of experts: failures that users of other systems have met, and others."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from hexad.engine import experts as engine_experts
from hexad.engine import language
from hexad.model import router
from hexad.model.auxiliary import Auxiliary
from hexad.model.replay import Replay
from hexad.parallel.data.buckets import StateSharding
from hexad.parallel.expert import dispatch, grouped
from hexad.parallel.inventory import Parameter, Traits
from hexad.topology.mesh import Mesh

from .expert_cases import CAPACITY, DEEPSEEK, IMPOSED, MIXTRAL
from .harness import Case
from .mutation import Mutation, Patches, same


def _local_auxiliary(mesh: Mesh) -> Patches:
    original = language.LanguageModel._auxiliary

    def auxiliary(self: Any, targets: int, microbatches: int) -> Any:
        return original(self, targets * self.mesh.data.size, microbatches)

    return [mock.patch.object(language.LanguageModel, "_auxiliary", auxiliary)]


def _blind_to_accumulation(mesh: Mesh) -> Patches:
    original = language.LanguageModel._auxiliary

    def auxiliary(self: Any, targets: int, microbatches: int) -> Any:
        return original(self, targets, 1)

    return [mock.patch.object(language.LanguageModel, "_auxiliary", auxiliary)]


def _unscaled_auxiliary(mesh: Mesh) -> Patches:
    return [mock.patch.object(Auxiliary, "scaled", lambda self, factor: self)]


def _never_attached(mesh: Mesh) -> Patches:
    original = Auxiliary.attach

    def attach(self: Any, x: torch.Tensor, losses: Any, *rest: Any) -> torch.Tensor:
        return original(self, x, {name: loss.detach() for name, loss in losses.items()}, *rest)

    return [mock.patch.object(Auxiliary, "attach", attach)]


def _tensor_rank_auxiliary(mesh: Mesh) -> Patches:
    return [mock.patch.object(language, "all_reduce", same)]


def _loads_of_a_rank(mesh: Mesh) -> Patches:
    return [mock.patch.object(router, "all_reduce", same)]


def _shifted_rows(mesh: Mesh) -> Patches:
    original = grouped.add_gradients

    def add(total: Any, gradient: Any, inputs: Any, fresh: bool, offsets: torch.Tensor) -> None:
        rows = offsets.diff(prepend=offsets.new_zeros(1)).roll(1)
        original(total, gradient, inputs, fresh, rows.cumsum(0).int())

    return [mock.patch.object(grouped, "add_gradients", add)]


def _dense_grid_only(mesh: Mesh) -> Patches:
    original = StateSharding.create

    def create(zero: int, replicas: int, mesh: Mesh, grid: str) -> StateSharding:
        return original(zero, replicas, mesh, "dense")

    return [mock.patch.object(StateSharding, "create", create)]


def _router_apart(mesh: Mesh) -> Patches:
    original = Parameter.traits

    def traits(self: Parameter, positions: Any) -> Traits:
        made = original(self, positions)
        return replace(made, partial=frozenset()) if self.name.endswith("router.weight") else made

    return [mock.patch.object(Parameter, "traits", traits)]


def _detached_router(mesh: Mesh) -> Patches:
    original = dispatch.dispatch

    def detached(x: torch.Tensor, weights: torch.Tensor, route: Any) -> Any:
        return original(x, weights.detach(), route)

    return [mock.patch("hexad.model.experts.dispatch", detached)]


def _bias_changed_twice(mesh: Mesh) -> Patches:
    original = engine_experts.ExpertLoads.adopt

    def adopt(self: Any, counts: torch.Tensor, stages: Any) -> None:
        for _ in range(2):
            original(self, counts, stages)

    return [mock.patch.object(engine_experts.ExpertLoads, "adopt", adopt)]


def _loads_of_this_data_rank(mesh: Mesh) -> Patches:
    original = engine_experts.ExpertLoads.adopt

    def adopt(self: Any, counts: torch.Tensor, stages: Any) -> None:
        first = mesh.data.rank == 0
        original(self, counts if first else counts.flip(1).roll(3, 1), stages)

    return [mock.patch.object(engine_experts.ExpertLoads, "adopt", adopt)]


def _rows_beyond_the_last_offset(mesh: Mesh) -> Patches:
    """As a device's grouped product leaves them, and read."""
    total, product = dispatch.gathered_sum, grouped.product

    def read(rows: torch.Tensor, places: torch.Tensor, present: Any, exactly: bool = False) -> Any:
        return total(rows, places, None, exactly)

    def unwritten(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *rest: Any) -> torch.Tensor:
        y = product(x, weight, offsets, *rest)
        y[offsets[-1] :] = 1.0
        return y

    return [
        mock.patch.object(dispatch, "gathered_sum", read),
        mock.patch("hexad.parallel.expert.permutation.gathered_sum", read),
        mock.patch.object(grouped, "product", unwritten),
    ]


def _imposed_on_other_tokens(mesh: Mesh) -> Patches:
    original = Replay.imposed

    def imposed(self: Any, layer: int, first: int, *rest: Any) -> Any:
        return original(self, layer, 0, *rest)

    return [mock.patch.object(Replay, "imposed", imposed)]


def _capacity_of_a_rank(mesh: Mesh) -> Patches:
    return [mock.patch.object(router, "all_gather", same)]


_case = partial(Case, samples=8)
EXPERT_MUTATIONS = {
    "average auxiliary losses over this rank's microbatches": Mutation(_local_auxiliary, _case(MIXTRAL, 2)),
    "ignore that losses of experts are means over microbatches": Mutation(
        _blind_to_accumulation, _case(MIXTRAL, 2)
    ),
    "leave the gradients of auxiliary losses unscaled": Mutation(
        _unscaled_auxiliary, _case(MIXTRAL, 2, expert=2, pipeline=2, recompute="full")
    ),
    "never begin the backward pass of a loss of experts": Mutation(_never_attached, _case(MIXTRAL, 2)),
    "report the auxiliary losses of this tensor rank": Mutation(
        _tensor_rank_auxiliary, _case(MIXTRAL, tensor=2, expert=2)
    ),
    "balance by the loads of this rank": Mutation(_loads_of_a_rank, _case(MIXTRAL, tensor=2)),
    "balance by the loads of this context rank": Mutation(_loads_of_a_rank, _case(DEEPSEEK, context=2)),
    "multiply an expert's rows with the next one's": Mutation(_shifted_rows, _case(MIXTRAL, 2, expert=2)),
    "sum expert gradients over the dense grid's data ranks": Mutation(
        _dense_grid_only, _case(MIXTRAL, 2, expert=2, zero=1)
    ),
    "leave the router's gradients of tensor ranks apart": Mutation(_router_apart, _case(MIXTRAL, tensor=2)),
    "detach the router": Mutation(_detached_router, _case(MIXTRAL, 2, expert=2)),
    "change the bias twice in a step": Mutation(_bias_changed_twice, _case(DEEPSEEK, 2), 2),
    "change the bias by the loads of other experts": Mutation(
        _loads_of_this_data_rank, _case(DEEPSEEK, 2), 2
    ),
    "add rows that nothing has written": Mutation(_rows_beyond_the_last_offset, _case(CAPACITY, 2)),
    "impose on a tensor rank the experts of another": Mutation(
        _imposed_on_other_tokens, _case(IMPOSED[0], tensor=2)
    ),
    "drop by the capacity of a rank": Mutation(_capacity_of_a_rank, _case(CAPACITY, tensor=2)),
}
