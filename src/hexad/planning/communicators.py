"""NCCL's communicators that a rank uses in a training step: those of the process groups that mesh and engine
make, as far as anything is sent over them. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from hexad.config import Config
from hexad.model.experts_inventory import ExpertsSpec
from hexad.model.inventory import ModelInventory
from hexad.parallel.data.bucket_plan import state_shards
from hexad.parallel.inventory import Weight
from hexad.topology.layout import Layout, goes_to_next

from . import Resolved


class Communicator(NamedTuple):
    """A communicator of NCCL.

    Attributes:
        name: what its ranks have in common.
        ranks: how many these are.
        exchanges: each rank sends other values to every other one (all-to-all).
    """

    name: str
    ranks: int
    exchanges: bool = False


def communicators(resolved: Resolved) -> tuple[Communicator, ...]:
    """The communicators that any pipeline rank uses.

    Groups over which nothing is sent in a step are left out: that of all ranks, and those of the data and the
    context axis where combined axes, or parts, are used instead.
    """
    config, layout = resolved.config, resolved.layout
    inventory = ModelInventory(config.model, config.parallel.sequence_parallel, layout.tensor)
    dense = any(weight.grid == "dense" for weight in _trained(inventory))
    every = (
        *_tensor(inventory, layout),
        *_context(config, inventory, layout),
        *_state(config, layout.gradient_ranks, "gradients", True, dense),
        *_experts(config, inventory, layout),
        *_pipeline(resolved, inventory),
    )
    return tuple(communicator for communicator in every if communicator.ranks > 1)


def _tensor(inventory: ModelInventory, layout: Layout) -> Iterator[Communicator]:
    """The tensor axis, and the ranks that hold the same key/value heads, where these are some of it."""
    yield Communicator("tensor", layout.tensor)
    copies = inventory.kv_copies
    if copies < layout.tensor and any("kv_copies" in weight.partial for weight in _trained(inventory)):
        yield Communicator("copies of key/value heads", copies)


def _trained(inventory: ModelInventory) -> Iterator[Weight]:
    """One weight of each trained parameter of each kind of layer."""
    seen = set()
    for number in range(inventory.settings.layers):
        layer = inventory.layer(number)
        if layer not in seen:
            seen.add(layer)
            yield from (p.weights[0] for p in layer.parameters if not p.frozen)


def _context(config: Config, inventory: ModelInventory, layout: Layout) -> Iterator[Communicator]:
    """Rings, and groups that exchange heads; the whole axis where it is one of both, or routers use it."""
    context, ulysses = layout.context, config.parallel.ulysses
    if 1 < ulysses < context:
        yield Communicator("ring", context // ulysses)
        yield Communicator("ulysses", ulysses, exchanges=True)
        experts = _experts_spec(inventory)
        if experts is None or not experts.routing.routers_agree:
            return
    yield Communicator("context", context, exchanges=ulysses == context)


def _experts_spec(inventory: ModelInventory) -> ExpertsSpec | None:
    """The mixture of experts of a layer that has one."""
    layers = inventory.settings.expert_layers
    parts = inventory.layer(layers[0]).parts if layers else ()
    return next((part for part in parts if isinstance(part, ExpertsSpec)), None)


def _state(config: Config, ranks: int, name: str, agree: bool, trains: bool) -> Iterator[Communicator]:
    """The ranks over which gradients of a grid are summed, those among which state is sharded, and those that
    hold the same shard; ``agree``: the first ones also agree on losses and norm."""
    shards = state_shards(ranks, config.parallel.zero, config.parallel.replicas)
    if agree or (shards == 1 and trains):
        yield Communicator(name, ranks)
    if shards > 1:
        yield Communicator(f"{name}, shards", shards)
        if trains:
            yield Communicator(f"{name}, replicas", ranks // shards)


def _experts(config: Config, inventory: ModelInventory, layout: Layout) -> Iterator[Communicator]:
    """Communicators of the expert grid: gradients, the norm over both of its axes, and the rows' way."""
    experts, degrees = _experts_spec(inventory), layout.degrees
    if experts is None:
        return
    trains = any(weight.grid == "expert" for weight in _trained(inventory))
    yield from _state(config, degrees["expert_data"], "gradients of experts", False, trains)
    expert, slices = layout.expert, layout.expert_tensor
    kind = experts.routing.dispatcher(expert * slices, slices, config.precision.exact)
    exchanges = kind != "all_gather"
    yield Communicator("expert", expert, exchanges and slices == 1)
    yield Communicator("expert_tensor", slices)
    if slices > 1:
        yield Communicator("expert_tensor x expert", expert * slices, exchanges)


def _pipeline(resolved: Resolved, inventory: ModelInventory) -> Iterator[Communicator]:
    """The pipeline axis, over which the norm and losses are summed; messages in either direction; both ends,
    where these use one embedding."""
    ranks, schedule = resolved.layout.pipeline, resolved.plan.schedule
    placement = schedule.placement
    yield Communicator("pipeline", ranks)
    if ranks == 1:
        return
    sent = {(a, b) for a, b in pairwise(placement)}
    sent |= {(b, a) for a, b in pairwise(placement[schedule.trained_from :])}
    ways = {"next" if goes_to_next(a, b, ranks) else "previous" for a, b in sent if a != b}
    yield from (Communicator(f"pipeline, to the {way} rank", ranks) for way in sorted(ways))
    embedding = inventory.stage(range(0)).embedding
    assert embedding is not None
    tied = inventory.settings.tied_embeddings and not embedding.frozen
    if tied and ranks > 2 and placement[0] != placement[-1]:
        yield Communicator("embedding and head", 2)
