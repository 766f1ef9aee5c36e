"""Bytes that attention sends over the context axis equal closed formulas, byte for byte."""

from typing import Any

import pytest
import torch

from hexad.config import Config
from hexad.dataset.load.microbatch import Microbatch
from hexad.parallel.context.balance import received
from hexad.parallel.context.rounds import rounds
from hexad.parallel.context.slice import Slicing
from hexad.planning import resolve
from hexad.planning.traffic import StepValues, predicted_traffic
from hexad.topology.layout import Layout

from ..pool import Pool
from ..small import Tree, config_of, engine_of

_SEQUENCE, _MICRO, _STEPS, _LAYERS, _WIDTH = 48, 2, 2, 2, 8
_PACKED = (0, 5, 6, 31, 48, 70, 96)


DEFAULTS: Tree = {
    "run": {"steps": 10},
    "model": {"layers": _LAYERS, "hidden": 32, "heads": 4, "head_dim": _WIDTH, "ffn_hidden": 64, "vocab": 64},
    "data": {"sequence": _SEQUENCE, "documents": "isolate"},
}


def _config(dtype: str = "fp32", kv_heads: int = 2, recompute: str = "none", **parallel: Any) -> Config:
    return config_of(
        DEFAULTS,
        model={"kv_heads": kv_heads},
        batch={"micro": _MICRO, "global": 2 * _MICRO * parallel.get("data", 1)},
        parallel=parallel,
        precision={"dtype": dtype},
        memory={"recompute": recompute},
    )


def _measure(config: Config, documents: tuple[int, ...] | None) -> dict[str, int]:
    engine = engine_of(config)
    mesh = engine.mesh
    tokens = torch.arange(_MICRO * _SEQUENCE).view(_MICRO, _SEQUENCE) % 64
    before = mesh.sent_bytes()
    for _ in range(_STEPS):
        engine.train_step([Microbatch(tokens, tokens, documents)] * 2)
    return {axis: sent - before[axis] for axis, sent in mesh.sent_bytes().items()}


def _sent(config: Config, world: int, documents: tuple[int, ...] | None, pool: Pool) -> list[int]:
    """Bytes of each rank over the context axis, of one layer, microbatch and step."""
    of_ranks = [of_ranks["context"] for of_ranks in pool.run(world, _measure, config, documents)]
    assert all(sent % (_STEPS * 2 * _LAYERS) == 0 for sent in of_ranks)
    return [sent // (_STEPS * 2 * _LAYERS) for sent in of_ranks]


@pytest.mark.parametrize(
    ("context", "kv_heads", "dtype"), [(2, 2, "fp32"), (4, 1, "bf16"), (4, 4, "fp32"), (3, 2, "fp32")]
)
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_every_key_of_one_document(method: str, context: int, kv_heads: int, dtype: str, pool: Pool) -> None:
    """Keys and values of ``s (c - 1) / c`` tokens: forward; backward again, and their gradients. In a ring
    with ``zigzag`` no rank needs the last blocks of the ranks before it, which nothing of its own sees."""
    config = _config(dtype, kv_heads, context=context, context_method=method, context_balance="zigzag")
    tokens = _MICRO * _SEQUENCE
    row = 2 * kv_heads * _WIDTH * (2 if dtype == "bf16" else 4)
    complete = tokens * (context - 1) // context * row
    nbytes = _sent(config, context, None, pool)
    if method == "all_gather":
        assert nbytes == [3 * complete] * context
        return
    share = tokens // context
    for rank, sent in enumerate(nbytes):
        to_others = rank * share + (context - 1 - rank) * share // 2
        of_others = (context - 1 - rank) * share + rank * share // 2
        assert sent == (2 * to_others + of_others) * row
    if context == _MICRO:  # in their order, each rank has one sequence
        config = _config(dtype, kv_heads, context=context, context_balance="none")
        assert _sent(config, context, None, pool) == [0] * context


@pytest.mark.parametrize("balance", ["work", "zigzag", "none"])
@pytest.mark.parametrize(("context", "recompute"), [(2, "full"), (4, "none")])
def test_documents_send_what_their_slice_says(balance: str, context: int, recompute: str, pool: Pool) -> None:
    """Each rank receives the keys before its queries in their documents, and returns as many gradients; ranks
    together send what they receive."""
    config = _config(context=context, context_balance=balance, recompute=recompute)
    divided = Slicing(context, balance).divided(_MICRO, _SEQUENCE, _PACKED)  # type: ignore[arg-type]
    row = 2 * 2 * _WIDTH * 4
    needed = [received(_PACKED, runs) for runs in divided.runs]
    nbytes = _sent(config, context, _PACKED, pool)
    passes = 4 if recompute == "full" else 3  # forward, again, once more for the gradients; these
    assert sum(nbytes) == passes * sum(needed) * row
    for rank, sent in enumerate(nbytes):
        out = sum(round_.sent for round_ in rounds(divided, rank))
        assert sent == ((passes - 1) * out + needed[rank]) * row
    if balance == "work":  # fewer bytes than of an all-gather
        assert sum(nbytes) < passes * (context - 1) * _MICRO * _SEQUENCE * row


@pytest.mark.parametrize(("context", "kv_heads", "copies"), [(2, 2, 1), (4, 2, 2), (4, 1, 4)])
def test_ulysses_exchanges_heads(context: int, kv_heads: int, copies: int, pool: Pool) -> None:
    """Queries, keys, values and the output, each way; of fewer key/value heads than ranks, copies."""
    config = _config(kv_heads=kv_heads, context=context, context_method="ulysses")
    elements = (4 + 2 * copies * kv_heads + 4) * _WIDTH * _MICRO * _SEQUENCE // context
    wanted = 2 * elements * 4 * (context - 1) // context
    assert _sent(config, context, _PACKED, pool) == [wanted] * context


def test_heads_of_latent_attention_are_exchanged_again(pool: Pool) -> None:
    """``mla_up`` recomputes what was received; queries, keys and values are of the wider of both widths."""
    mla = {"q_rank": None, "kv_rank": 12, "nope_dim": 6, "rope_dim": 4, "value_dim": 7}
    config = _config(kv_heads=4, context=2, context_method="ulysses")
    for parts, times in ((), 2), (("mla_up",), 3):
        changed = config_of(
            config.model_dump(by_alias=True),
            model={"family": "deepseek_v2", "mla": mla, "head_dim": "auto"},
            memory={"recompute_parts": list(parts)},
        )
        heads, out = ((numbers * 4 * 10 * _MICRO * _SEQUENCE // 2 * 4) // 2 for numbers in (3, 1))
        assert _sent(changed, 2, _PACKED, pool) == [times * heads + 2 * out] * 2


@pytest.mark.parametrize(
    ("parallel", "documents"),
    [
        ({"context": 2}, None),
        ({"context": 4, "context_balance": "work"}, _PACKED),
        ({"context": 2, "tensor": 2, "context_method": "all_gather"}, _PACKED),
        ({"context": 4, "context_method": "ulysses_ring", "context_ulysses": 2}, None),
        ({"context": 2, "tensor": 2, "context_method": "ulysses"}, _PACKED),
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_attention_sends(
    parallel: dict[str, Any], documents: tuple[int, ...] | None, recompute: Any, pool: Pool
) -> None:
    config = _config(recompute=recompute, **parallel)
    tensor, context = parallel.get("tensor", 1), parallel["context"]
    world = tensor * context
    resolved = resolve(config, Layout.from_settings(config.parallel, world))
    values = StepValues([documents] * 2)
    for rank, sent in enumerate(_sent(config, world, documents, pool)):
        assert sent * 2 * _LAYERS == predicted_traffic(resolved, rank, values)["context"]


def test_gradients_count_as_of_the_data_axis(pool: Pool) -> None:
    """Also where there is one data rank: what the context axis sends is attention's."""
    config = _config(context=2, context_balance="none")  # each rank has one of the two sequences
    for sent in pool.run(2, _measure, config, None):
        assert sent["data"] > 0 and sent["context"] == 0
