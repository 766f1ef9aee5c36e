"""``parallel_state`` against megatron-core's own arithmetic, expert ranks included."""

import random
from typing import Any

import pytest
import torch.distributed as dist

from hexad.compat.megatron import parallel_state
from hexad.config import HexadError

from ...pool import Pool

theirs = pytest.importorskip("megatron.core.parallel_state")


def test_groups_are_those_of_megatron_core() -> None:
    draw = random.Random(3)
    for _ in range(40):
        degrees = {name: draw.choice((1, 2, 3)) for name in ("tp", "dp", "pp", "cp", "ep")}
        if draw.random() < 0.5:
            degrees["cp"] = 1  # a generator has expert or context ranks
        else:
            degrees["ep"] = 1
        order = "-".join(draw.sample(list(degrees), 5))
        one = theirs.RankGenerator(**degrees, order=order, rank_offset=2)
        two = parallel_state.RankGenerator(**degrees, order=order, rank_offset=2)
        for token in ("tp", "dp", "pp-tp", "dp-cp", "ep-tp-pp", "tp-dp-cp"):
            assert two.get_ranks(token) == one.get_ranks(token), (degrees, order, token)


def expert_facts(degrees: dict[str, int]) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(order="tp-cp-ep-dp-pp", **degrees)
    kinds = ("expert_model_parallel", "expert_tensor_parallel", "expert_data_parallel")
    facts = {
        name: dist.get_process_group_ranks(getattr(parallel_state, f"get_{name}_group")())
        for name in (*kinds, "expert_tensor_and_model_parallel", "expert_tensor_model_pipeline_parallel")
    }
    facts["ranks"] = [getattr(parallel_state, f"get_{name}_rank")() for name in kinds]
    facts["sizes"] = [getattr(parallel_state, f"get_{name}_world_size")() for name in kinds]
    facts["dense"] = dist.get_process_group_ranks(parallel_state.get_data_parallel_group(True))
    both = parallel_state.get_tensor_and_data_parallel_group
    for name, group in (("tp-dp", both(True)), ("tp-dp-cp", both(False, True))):  # check_initialized is first
        facts[name] = dist.get_process_group_ranks(group)
    parallel_state.set_expert_model_parallel_rank(5)
    assert parallel_state.get_expert_model_parallel_rank() == 5
    parallel_state.set_expert_model_parallel_rank(None)
    assert parallel_state.get_expert_model_parallel_rank() == facts["ranks"][0]
    parallel_state.destroy_model_parallel()
    assert parallel_state.is_unitialized()
    return facts


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "ep", "etp"),
    [
        (2, 2, 1, 2, 1),
        (1, 2, 1, 1, None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1, 2, 2, 2), (4, 2, 1, 1, None))),
    ],
)
def test_expert_groups(pool: Pool, tp: int, pp: int, cp: int, ep: int, etp: int | None) -> None:
    degrees = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    inside = tp if etp is None else etp
    expert = theirs.RankGenerator(
        tp=inside, ep=ep, dp=8 // (inside * ep * pp), pp=pp, cp=1, order="tp-cp-ep-dp-pp"
    )
    dense = theirs.RankGenerator(tp=tp, ep=1, dp=8 // (tp * pp * cp), pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    tokens = {
        "expert_model_parallel": "ep",
        "expert_tensor_parallel": "tp",
        "expert_data_parallel": "dp",
        "expert_tensor_and_model_parallel": "tp-ep",
        "expert_tensor_model_pipeline_parallel": "tp-ep-pp",
    }
    for rank, facts in enumerate(pool.run(8, expert_facts, degrees)):
        for name, token in tokens.items():
            assert facts[name] == next(g for g in expert.get_ranks(token) if rank in g), (rank, name)
        assert facts["dense"] == next(g for g in dense.get_ranks("dp-cp") if rank in g)
        for token in ("tp-dp", "tp-dp-cp"):
            assert facts[token] == next(g for g in dense.get_ranks(token) if rank in g)
        assert facts["ranks"] == [facts[name].index(rank) for name in list(tokens)[:3]]
        assert facts["sizes"] == [len(facts[name]) for name in list(tokens)[:3]]


def test_every_accessor_exists() -> None:
    """Those of megatron-core; what would need machinery of its own is refused when it is called."""
    names = [name for name in vars(theirs) if name.startswith(("get_", "set_", "is_", "create_"))]
    names = [name for name in names if getattr(getattr(theirs, name), "__module__", "") == theirs.__name__]
    missing = [name for name in names if not hasattr(parallel_state, name)]
    assert len(names) > 70 and not missing
    with pytest.raises(HexadError, match=r"parallel_state.create_group: not supported: groups and buffers"):
        parallel_state.create_group([0])
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group before"):
        parallel_state.initialize_model_parallel()
