"""The communicators that the planner counts against the groups that a dry run makes and uses."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from hexad.comm import collectives
from hexad.config import Config
from hexad.engine.dry.run import dry_run
from hexad.planning import Resolved, resolve
from hexad.planning.communicators import communicators
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh

from ..small import Tree, config_of

DEFAULTS: Tree = {
    "run": {"device": "cuda"},
    "model": {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn_hidden": 128, "vocab": 256},
    "data": {"sequence": 32},
    "precision": {"dtype": "bf16"},
}
_MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 32}


class _Group:
    """Stands for a process group."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members


def _used(resolved: Resolved, rank: int) -> dict[_Group, set[str]]:
    """The groups over which a rank sends or receives in a step, with the operations."""
    used: dict[_Group, set[str]] = {}
    start = collectives._start

    def make(self: Mesh, axis: str, members: tuple[int, ...], parent: Any, description: str) -> _Group:
        return _Group(members)

    def started(operation: str, axis: Axis, *arguments: Any, **options: Any) -> Any:
        peer = options.get("peer")
        group: Any = axis.group
        if peer is not None:
            ends = (axis.rank, peer) if operation == "send" else (peer, axis.rank)
            group = axis.carrier(*ends)
        if axis.size > 1:
            used.setdefault(group, set()).add(operation)
        return start(operation, axis, *arguments, **options)

    with mock.patch.object(Mesh, "_group", make), mock.patch.object(collectives, "_start", started):
        dry_run(resolved, rank)
    return used


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (4, {}),
    "zero 1": (4, {"zero": 1}),
    "replicas": (8, {"zero": 2, "replicas": 2}),
    "replicas without shards": (4, {"zero": 1, "replicas": 4}),
    "tensor": (4, {"tensor": 2}),
    "ring": (4, {"context": 4}),
    "ulysses": (8, {"context": 4, "context_method": "ulysses", "zero": 3}),
    "rings of groups": (8, {"context": 4, "context_method": "ulysses_ring", "context_ulysses": 2}),
    "gathered keys": (8, {"context": 2, "context_method": "all_gather", "tensor": 2}),
    "pipeline of 2": (2, {"pipeline": 2, "tied": True}),
    "pipeline of 4": (8, {"pipeline": 4, "zero": 1, "tied": True}),
    "in a V": (3, {"pipeline": 3, "schedule": "zb_v", "virtual_stages": 2, "tied": True}),
    "interleaved": (4, {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}),
    "interleaved, 4": (4, {"pipeline": 4, "schedule": "interleaved", "virtual_stages": 1}),
    "last stage trained": (4, {"pipeline": 4, "train": ["layers.3", "norm"]}),
    "copies of heads": (4, {"tensor": 4, "kv_heads": 2}),
    "one head": (4, {"tensor": 4, "kv_heads": 1}),
    "copies of frozen heads": (4, {"tensor": 4, "kv_heads": 2, "train": ["layers.*.ffn.*"]}),
    "experts": (8, {"expert": 4, "moe": _MOE}),
    "experts, zero 1": (8, {"expert": 4, "zero": 1, "moe": _MOE}),
    "experts on one rank": (4, {"tensor": 2, "moe": _MOE}),
    "experts in parts": (8, {"expert": 2, "expert_tensor": 2, "tensor": 2, "zero": 2, "moe": _MOE}),
    "parts of experts": (4, {"expert_tensor": 2, "tensor": 2, "moe": _MOE}),
    "gathered rows": (8, {"expert": 4, "moe": {**_MOE, "dispatcher": "all_gather"}}),
    "frozen experts": (4, {"expert": 2, "moe": _MOE, "train": ["layers.*.attention.*"]}),
    "routers that agree": (
        4,
        {
            "context": 4,
            "context_method": "ulysses_ring",
            "context_ulysses": 2,
            "moe": {**_MOE, "aux_loss": 0.1},
        },
    ),
    "all": (
        64,
        {
            "tensor": 2,
            "context": 4,
            "context_method": "ulysses_ring",
            "context_ulysses": 2,
            "pipeline": 4,
            "expert": 4,
            "expert_tensor": 2,
            "zero": 1,
            "moe": {**_MOE, "capacity_factor": 1.5},
        },
    ),
}


def _config(world: int, settings: dict[str, Any]) -> Config:
    parallel = {k: v for k, v in settings.items() if k not in ("tied", "kv_heads", "train", "moe")}
    degrees = (parallel.get(axis, 1) for axis in ("tensor", "context", "pipeline"))
    model = {k: settings[k] for k in ("kv_heads", "train", "moe") if k in settings}
    data = world
    for degree in degrees:
        data //= degree
    return config_of(
        DEFAULTS,
        model={"tied_embeddings": settings.get("tied", False), **model},
        parallel=parallel,
        batch={"micro": 1, "global": 2 * data},
    )


_QUICK = ("replicas", "rings of groups", "pipeline of 4", "copies of heads", "experts in parts", "all")


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_communicators_are_those_that_a_dry_run_uses(name: str) -> None:
    world, settings = CASES[name]
    config = _config(world, settings)
    resolved = resolve(config, Layout.from_settings(config.parallel, world))
    planned = communicators(resolved)
    expected = Counter((one.ranks, one.exchanges) for one in planned)
    found: Counter[tuple[int, bool]] = Counter()
    for rank in next(resolved.layout.iter_groups("pipeline")):
        used = _used(resolved, rank)
        of_rank = Counter((len(group.members), "all_to_all" in kinds) for group, kinds in used.items())
        assert of_rank <= expected, f"rank {rank}"
        found |= of_rank
    assert found == expected, [one.name for one in planned]
