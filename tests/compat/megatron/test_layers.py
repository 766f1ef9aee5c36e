"""Layers, mappings, cross-entropy and groups against megatron-core on the same ranks."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hexad
from hexad.compat import megatron
from hexad.compat.megatron import mappings, parallel_state
from hexad.config import HexadError

from ...pool import Pool

S, B, H, OUT, VOCAB = 6, 3, 8, 12, 16


@contextmanager
def both(**degrees: int) -> Iterator[Any]:
    """megatron-core's and our mesh over the same world; yields ``megatron.core.tensor_parallel``."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state as theirs
        from megatron.core import tensor_parallel
    cpu = torch.device("cpu")
    patches = (
        mock.patch.object(torch.cuda, "current_device", lambda: cpu),
        mock.patch.object(torch.cuda, "is_available", lambda: False),
    )
    with patches[0], patches[1]:
        parallel_state.initialize_model_parallel(**degrees)
        theirs.initialize_model_parallel(create_gloo_process_groups=False, **degrees)
        try:
            yield tensor_parallel
        finally:
            theirs.destroy_model_parallel()
            theirs._EMBEDDING_GLOBAL_RANKS = theirs._POSITION_EMBEDDING_GLOBAL_RANKS = None  # it leaves them
            parallel_state.destroy_model_parallel()
            if alone:
                dist.destroy_process_group()


def megatron_config(sequence: bool, dtype: torch.dtype = torch.float64) -> Any:
    """megatron-core's class, which our layers take too."""
    from megatron.core import ModelParallelConfig

    return ModelParallelConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence,
        params_dtype=dtype,
        use_cpu_initialization=True,
    )


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fill(tensor: torch.Tensor) -> None:
    tensor.copy_(seeded(*tensor.shape, seed=9))


def run(layer: nn.Module, x: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    """Output, returned bias, gradients of the input and of the parameters."""
    x = x.clone().requires_grad_(x.is_floating_point())
    output = layer(x, *arguments)
    outputs = [
        tensor for tensor in (output if isinstance(output, tuple) else (output,)) if tensor is not None
    ]
    sum((tensor * seeded(*tensor.shape, seed=5).to(tensor)).sum() for tensor in outputs).backward()
    gradients = [x.grad, *(tensor.grad for tensor in layer.parameters())]
    return [tensor.detach().clone() for tensor in (*outputs, *gradients) if tensor is not None]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-12) -> int:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return len(ours)


def _layers(world: int) -> list[int]:
    """The number of tensors that were compared, per case."""
    counts = []
    with both(tensor_model_parallel_size=world) as core:
        rank = parallel_state.get_tensor_model_parallel_rank()
        for sequence in (False, True):
            config = megatron_config(sequence and world > 1)
            mine = lambda x, on=sequence: x.chunk(world)[rank].contiguous() if on else x  # noqa: E731
            for options in (
                {},
                {"bias": False},
                {"skip_bias_add": True},
                {"gather_output": True},
            ):
                pair = [
                    kind.ColumnParallelLinear(H, OUT, config=config, init_method=fill, **options)
                    for kind in (megatron, core)
                ]
                assert torch.equal(pair[0].weight, pair[1].weight)  # initial values
                counts.append(same(*(run(layer, mine(seeded(S, B, H))) for layer in pair)))
            for options in ({}, {"bias": False}, {"skip_bias_add": True}, {"input_is_parallel": False}):
                parallel = options.get("input_is_parallel", True)
                if sequence and not parallel:
                    continue
                pair = [
                    kind.RowParallelLinear(
                        OUT,
                        H,
                        config=config,
                        init_method=fill,
                        **{"input_is_parallel": True, "bias": True, "skip_bias_add": False, **options},
                    )
                    for kind in (megatron, core)
                ]
                assert torch.equal(pair[0].weight, pair[1].weight)
                x = seeded(S, B, OUT)
                x = x.chunk(world, -1)[rank].contiguous() if parallel else x
                counts.append(same(*(run(layer, x) for layer in pair)))
            pair = [
                kind.VocabParallelEmbedding(
                    VOCAB, H, init_method=fill, reduce_scatter_embeddings=sequence, config=config
                )
                for kind in (megatron, core)
            ]
            tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(1))
            counts.append(same(*(run(layer, tokens) for layer in pair)))
        weight = seeded(OUT // world, H, seed=2)
        pair = [
            kind.ColumnParallelLinear(
                H, OUT, config=megatron_config(False), init_method=fill, skip_weight_param_allocation=True
            )
            for kind in (megatron, core)
        ]
        assert pair[0].weight is None
        counts.append(same(*(run(layer, seeded(S, B, H), weight.clone().requires_grad_()) for layer in pair)))
    return counts


@pytest.mark.parametrize("world", [1, 2])
def test_layers(pool: Pool, world: int) -> None:
    pytest.importorskip("megatron.core")
    for counts in pool.run(world, _layers, world):
        assert len(counts) == 18 and min(counts) >= 2


MAPPINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(mappings, name)
    for name in (
        "copy_to_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region",
        "scatter_to_tensor_model_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "scatter_to_sequence_parallel_region",
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "all_gather_last_dim_from_tensor_parallel_region",
        "reduce_scatter_last_dim_to_tensor_parallel_region",
    )
}


def _mappings(world: int) -> int:
    compared = 0
    with both(tensor_model_parallel_size=world) as core:
        rank = dist.get_rank()
        for name, ours in MAPPINGS.items():
            calls = [ours, getattr(core.mappings, name)]
            if name == "gather_from_sequence_parallel_region":
                calls += [lambda x, f=call: f(x, tensor_parallel_output_grad=False) for call in calls]
            for pair in zip(calls[::2], calls[1::2]):
                results = []
                for function in pair:
                    x = seeded(2 * world, 3, 4 * world, seed=rank).requires_grad_()
                    y = function(x)
                    assert y.is_contiguous()
                    (y * seeded(*y.shape, seed=7 + rank)).sum().backward()
                    assert x.grad is not None
                    results.append([y.detach(), x.grad])
                compared += same(*results)
        sizes = [rank + 1] * world, [other + 1 for other in range(world)]
        for split in ((None, None), (sizes[1], sizes[0])):
            group = parallel_state.get_tensor_model_parallel_group()
            results = []
            rows = sum(sizes[0]) if split[0] else 2 * world
            for function, its in ((mappings.all_to_all, group), (core.mappings.all_to_all, None)):
                from megatron.core import parallel_state as theirs

                x = seeded(rows, 3, seed=rank).requires_grad_()
                y = function(its or theirs.get_tensor_model_parallel_group(), x, *split)
                (y * seeded(*y.shape, seed=7 + rank)).sum().backward()
                assert x.grad is not None
                results.append([y.detach(), x.grad])
            compared += same(*results)
    return compared


@pytest.mark.parametrize("world", [1, 2])
def test_mappings(pool: Pool, world: int) -> None:
    pytest.importorskip("megatron.core")
    assert pool.run(world, _mappings, world) == [2 * (len(MAPPINGS) + 1 + 2)] * world


def _losses(world: int, dtype: torch.dtype) -> float:
    with both(tensor_model_parallel_size=world) as core:
        rank, results = dist.get_rank(), []
        for function in (megatron.vocab_parallel_cross_entropy, core.vocab_parallel_cross_entropy):
            whole = (4 * seeded(S, B, VOCAB)).to(dtype)
            logits = whole.chunk(world, -1)[rank].contiguous().requires_grad_()
            target = torch.randint(0, VOCAB, (S, B), generator=torch.Generator().manual_seed(3))
            kept = logits.detach().clone()
            losses = function(logits, target)
            (losses * seeded(S, B, seed=4).to(losses)).sum().backward()
            assert logits.grad is not None
            if not results:
                assert torch.equal(logits, kept)  # megatron-core overwrites them
            results.append([losses.detach().float(), logits.grad.float()])
        same(*results, 1e-2 if dtype == torch.bfloat16 else 1e-6)
        ignored = target.clone()
        ignored[0] = -100
        assert not megatron.vocab_parallel_cross_entropy(logits.detach(), ignored)[0].any()
        return float(results[0][0].sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_cross_entropy(pool: Pool, world: int, dtype: torch.dtype) -> None:
    pytest.importorskip("megatron.core")
    assert len(set(pool.run(world, _losses, world, dtype))) == 1


GROUPS = (
    "get_tensor_model_parallel_group",
    "get_pipeline_model_parallel_group",
    "get_context_parallel_group",
    "get_data_parallel_group",
    "get_model_parallel_group",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_data_parallel_group",
    "get_expert_model_parallel_group",
)
NUMBERS = (
    "get_tensor_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_pipeline_model_parallel_rank",
    "get_context_parallel_world_size",
    "get_context_parallel_rank",
    "get_data_parallel_world_size",
    "get_data_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_context_parallel_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_model_parallel_src_rank",
    "get_data_parallel_src_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "get_virtual_pipeline_model_parallel_world_size",
    "get_virtual_pipeline_model_parallel_rank",
    "is_initialized",
    "model_parallel_is_initialized",
)


def _state(degrees: dict[str, Any]) -> None:
    with both(**degrees):
        from megatron.core import parallel_state as theirs

        def ranks(group: Any) -> list[int]:
            return sorted(dist.get_process_group_ranks(group))

        for name in GROUPS:
            ours = getattr(parallel_state, name)()
            assert ranks(ours) == ranks(getattr(theirs, name)()), name
            total = torch.ones(1)
            dist.all_reduce(total, group=ours)
            assert total.item() == len(ranks(ours)), name
            parallel_state.axis_of(ours)
        for option in ({}, {"with_context_parallel": True}):
            for name in ("get_data_parallel_group", "get_tensor_and_data_parallel_group"):
                one, other = (getattr(module, name)(**option) for module in (parallel_state, theirs))
                assert ranks(one) == ranks(other), name
            for name in ("get_data_parallel_rank", "get_data_parallel_world_size"):
                assert getattr(parallel_state, name)(**option) == getattr(theirs, name)(**option), name
        for name in NUMBERS:
            assert getattr(parallel_state, name)() == getattr(theirs, name)(), name
        assert parallel_state.get_model_parallel_world_size() == len(ranks(theirs.get_model_parallel_group()))
        if theirs.is_rank_in_embedding_group():
            assert ranks(parallel_state.get_embedding_group()) == ranks(theirs.get_embedding_group())
        else:
            with pytest.raises(HexadError, match="neither"):
                parallel_state.get_embedding_group()
        if theirs.is_rank_in_position_embedding_group():
            mine, other = parallel_state.get_position_embedding_group(), theirs.get_position_embedding_group()
            assert ranks(mine) == ranks(other)
        if degrees.get("virtual_pipeline_model_parallel_size"):
            for stage in range(2):
                parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
                theirs.set_virtual_pipeline_model_parallel_rank(stage)
                for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
                    options = {"ignore_virtual": False, "vp_stage": stage}
                    assert getattr(parallel_state, name)(**options) == getattr(theirs, name)(**options)
                    assert getattr(parallel_state, name)(ignore_virtual=False) == getattr(
                        parallel_state, name
                    )(**options)
        with pytest.raises(HexadError, match="a mesh exists"):
            parallel_state.initialize_model_parallel()


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (1, {}),
        (2, {"tensor_model_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
        (4, {"pipeline_model_parallel_size": 2, "order": "tp-cp-ep-pp-dp"}),
        (4, {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}),
    ],
    ids=str,
)
def test_parallel_state(pool: Pool, world: int, degrees: dict[str, Any]) -> None:
    pytest.importorskip("megatron.core")
    pool.run(world, _state, degrees)


class Mlp(nn.Module):
    """A module of Megatron-LM's layers, as a script writes it."""

    def __init__(self, sequence: bool) -> None:
        super().__init__()
        config = megatron.ModelParallelConfig(torch.float64, sequence, init_method_std=0.3)
        self.embedding = megatron.VocabParallelEmbedding(
            VOCAB, H, init_method=nn.init.normal_, reduce_scatter_embeddings=sequence, config=config
        )
        self.sequence = sequence
        self.up = megatron.ColumnParallelLinear(H, OUT, config=config)
        self.down = megatron.RowParallelLinear(OUT, H, config=config)
        self.head = megatron.ColumnParallelLinear(H, VOCAB, config=config, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x if self.sequence else x.transpose(0, 1)
        x = x + self.down(torch.tanh(self.up(x)[0]))[0]
        return megatron.vocab_parallel_cross_entropy(self.head(x)[0], tokens.t().contiguous()).sum()


def _trained(tensor: int, sequence: bool, zero: int) -> list[float]:
    """Losses of a module that an engine trains; the same data in every layout."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    try:
        mesh = megatron.get_mesh()
        settings = {
            "run": {"dir": "runs/none", "device": "cpu"},
            "precision": {"dtype": "fp64"},
            "parallel": {"tensor": tensor, "zero": zero},
        }
        config = hexad.load_config(settings)
        engine = hexad.Engine(Mlp(sequence), mesh, config, compute=lambda module, batch, *_: module(batch))
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, VOCAB, (4, S), generator=generator)
            engine.begin(1)
            total = engine.accumulate([tokens.chunk(mesh.data.size)[mesh.data.rank]], 1 / tokens.numel())
            engine.reduce()
            norm = engine.update(lr=0.05)
            assert total is not None
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            losses += [float(total), norm]
        return losses
    finally:
        parallel_state.destroy_model_parallel()
        if alone:
            dist.destroy_process_group()


def test_engine_trains_them_in_every_layout(pool: Pool) -> None:
    """Losses and gradient norms of tensor 2 with sequence parallel and of ZeRO 3 are those of one rank."""
    (wanted,) = pool.run(1, _trained, 1, False, 0)
    assert wanted[-2] < 0.9 * wanted[0]
    for arguments in ((2, True, 0), (2, False, 1), (1, False, 3)):
        for losses in pool.run(2, _trained, *arguments):
            assert losses == pytest.approx(wanted, rel=1e-10)


def _groups_before() -> str:
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    try:
        parallel_state.initialize_model_parallel()
    except HexadError as error:
        return str(error)
    return ""


def test_groups_of_ones_own_before(pool: Pool) -> None:
    """An error instead of a hang."""
    assert all("created 2 and 1 process groups" in text for text in pool.run(2, _groups_before))


def _refused() -> list[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config, messages = megatron.ModelParallelConfig(), []
    for attempt in (
        lambda: megatron.ColumnParallelLinear(4, 4, config=config, is_expert=True),
        lambda: megatron.RowParallelLinear(4, 4, config=config, stride=2),
        lambda: megatron.vocab_parallel_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3), 0.1),
        lambda: megatron.vocab_parallel_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(3, 2)),
        lambda: mappings.copy_to_tensor_model_parallel_region(torch.zeros(1), dist.group.WORLD),
        lambda: parallel_state.initialize_model_parallel(tensor_model_parallel_size=2),
        megatron.get_args,
        megatron.get_tokenizer,
    ):
        if len(messages) == 5:
            parallel_state.destroy_model_parallel()
        try:
            attempt()
        except HexadError as error:
            messages.append(str(error))
    return messages


def test_refused(pool: Pool) -> None:
    words = (
        "is_expert",
        "stride",
        "label_smoothing",
        "target",
        "group:",
        "tensor 2",
        "no arguments",
        "no arg",
    )
    (messages,) = pool.run(1, _refused)
    assert len(messages) == len(words) and all(word in text for word, text in zip(words, messages)), messages
