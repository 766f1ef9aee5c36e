"""Two ranks on GPUs give one rank's losses; skipped without a GPU.

With two GPUs over NCCL. With one GPU both ranks share it, over :mod:`tests.staged`.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hexad import Engine, Layout, Mesh, load_config, parallelize
from hexad.config import ConfigError
from hexad.config.model import DispatcherName
from hexad.parallel.expert.kinds import KINDS, check_kind
from hexad.topology.mesh import new_group

from .. import staged
from ..conversion.test_parallelize import IN_SEQUENCE, PLAN, InSequence, Model, even, plain_loop
from ..pool import TIMEOUT, Pool
from ..small import microbatches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "tensor": {"tensor": 2, "sequence": False},
    "sequence": {"tensor": 2},
    "zero 1": {"data": 2, "zero": 1},
    "zero 2": {"data": 2, "zero": 2},
    "zero 3": {"data": 2, "zero": 3},
    "context ring": {"context": 2},
    "context all_gather": {"context": 2, "context_method": "all_gather"},
    "context ulysses": {"context": 2, "context_method": "ulysses"},
    "pipeline 1f1b": {"pipeline": 2},
    "pipeline zb_h1": {"pipeline": 2, "schedule": "zb_h1"},
    "pipeline zb_v": {"pipeline": 2, "schedule": "zb_v", "virtual_stages": 2},
}


COMPILED = ("sequence", "zero 3", "pipeline zb_v")
"""Layouts that are tried with compiled functions too."""
CASES = [
    *((layout, dtype, "none") for dtype in ("fp32", "bf16") for layout in LAYOUTS),
    *((layout, "bf16", "pointwise") for layout in COMPILED),
]


def joined(gpus: int, store: str) -> tuple[torch.device, int]:
    """This rank's device, and the size of the world; the pool's own group is replaced."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    if world > 1:
        dist.destroy_process_group()
        dist.init_process_group(
            "nccl" if gpus > 1 else staged.NAME,
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT),
            device_id=device if gpus > 1 else None,
        )
    return device, world


def losses(
    parallel: dict[str, Any], dtype: str, compiled: str, gpus: int, store: str, moe: Any = None
) -> list[float]:
    """Of a few steps on this rank."""
    device, world = joined(gpus, store)
    config = load_config(
        {
            "run": {"compile": compiled},
            "model": {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 4, "vocab": 300, "moe": moe},
            "data": {"sequence": 64},
            "batch": {"micro": 1, "global": 8},
            "parallel": {"bucket_mb": 0.2, **parallel},
            "precision": {"dtype": dtype},
            "lr_schedule": {"warmup": 1},
        }
    )
    engine = Engine(config, Mesh.create(Layout.from_settings(config.parallel, world), device))
    values = []
    for step in range(4):
        batch = microbatches(config, engine.mesh.data.rank, engine.mesh.data.size, seed=step)
        values.append(engine.train_step(batch).loss)
    return values


def test_groups_are_split_off_a_parent_of_ours() -> None:
    """A communicator, and one that is split off that one: NCCL counts what is split off which."""
    device = torch.device("cuda", 0)
    timeout = timedelta(seconds=TIMEOUT)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device
    )
    try:
        data = new_group("data", (0,), dist.group.WORLD, device, timeout, "data")
        run = new_group("data", (0,), data, device, timeout, "part of data")
        for group in (run, data, dist.group.WORLD):
            assert group is not None
            value = torch.ones(3, device=device)
            dist.all_reduce(value, group=group)
            assert value.tolist() == [1.0] * 3
        splits = [group._get_backend(device).comm_split_count() for group in (dist.group.WORLD, data, run)]  # type: ignore[union-attr]
        assert splits == [1, 1, 0]
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_one_rank(pool: Pool) -> Callable[[str, str], list[float]]:
    """Losses of one rank."""
    return cache(lambda *mode: pool.run(1, losses, {}, *mode, 1, "")[0])


@pytest.mark.parametrize(("layout", "dtype", "compiled"), CASES)
def test_two_ranks(
    layout: str,
    dtype: str,
    compiled: str,
    of_one_rank: Callable[[str, str], list[float]],
    pool: Pool,
    tmp_path: Any,
) -> None:
    gpus = min(2, torch.cuda.device_count())
    wanted = of_one_rank(dtype, compiled)
    store = str(tmp_path / "store")
    for of_rank in pool.run(2, losses, LAYOUTS[layout], dtype, compiled, gpus, store):
        assert of_rank == pytest.approx(wanted, rel=1e-4 if dtype == "fp32" else 2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="ranks exchange rows between two GPUs")
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.gpu])
def test_dispatchers(kind: DispatcherName, pool: Pool, tmp_path: Any) -> None:
    """Where the library is there: the losses of ``alltoall``."""
    try:
        check_kind(kind, torch.device("cuda", 0))
    except ConfigError as error:
        pytest.skip(str(error))
    moe = {"experts": 8, "top_k": 3, "ffn_hidden": 64}
    found = []
    for name in ("alltoall", kind):
        experts, store = {**moe, "dispatcher": name}, str(tmp_path / name)
        found.append(pool.run(2, losses, {"expert": 2}, "bf16", "none", 2, store, experts))
    assert found[1] == [pytest.approx(of_rank, rel=2e-2) for of_rank in found[0]]


DIVIDED = {"layers": (Model, PLAN), "in sequence": (InSequence, IN_SEQUENCE)}


def losses_of_divided(kind: str, autocast: bool, gpus: int, store: str) -> list[float]:
    """Of a user's model in a plain loop on this rank."""
    device, world = joined(gpus, store)
    make, plan = DIVIDED[kind]
    model = parallelize(make(), Mesh.create(Layout(world=world, tensor=world), device), plan)
    if autocast:
        model.float()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        return plain_loop(model, lambda batch: [part.to(device) for part in even(batch)])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", DIVIDED)
def test_a_divided_model(kind: str, autocast: bool, pool: Pool, tmp_path: Any) -> None:
    gpus = min(2, torch.cuda.device_count())
    (wanted,) = pool.run(1, losses_of_divided, kind, autocast, 1, "")
    for of_rank in pool.run(2, losses_of_divided, kind, autocast, gpus, str(tmp_path / "store")):
        compared = 3 if autocast else len(wanted)  # updates make bf16's rounding larger from step to step
        assert of_rank[:compared] == pytest.approx(wanted[:compared], rel=2e-2 if autocast else 1e-9)
