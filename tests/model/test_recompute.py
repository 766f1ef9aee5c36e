"""Recomputation changes what is held, never a gradient."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hexad.model.configuration import build_config
from hexad.model.dropout import DropoutKey
from hexad.model.recompute import recomputing
from hexad.model.recompute_inventory import Recompute
from hexad.model.transformer import Transformer
from hexad.parallel.context.spans import Spans
from hexad.parallel.sharding import declared_parameters, initialise
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh

from ..layers import CPU, Sums, shard_of, whole_model
from ..pool import Pool

LENGTH, LAYERS = 12, 3
MODEL = {"layers": LAYERS, "hidden": 32, "heads": 4, "ffn_hidden": 48, "vocab": 61}
FULL, SELECTIVE, FIRST = Recompute("full"), Recompute("selective"), Recompute("full", 1)


def model_of(
    family: str, recompute: Recompute, axis: Axis, sequence: bool, dtype: torch.dtype, dropout: float
) -> Transformer:
    tree = {**MODEL, "family": family, "dropout": dropout, "attention_dropout": dropout}
    if family == "gpt2":
        tree["max_positions"] = LENGTH
    else:
        tree["kv_heads"] = 2
    model = build_config({"model": tree}).model
    built = whole_model(model, shard_of(axis, sequence, dtype), recompute)
    initialise(declared_parameters(built), 3)
    return built


def gradients(
    family: str,
    recompute: Recompute,
    documents: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    sequence: bool = False,
    split: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """(gradients, bytes sent over the tensor axis); ``split``: weight gradients are deferred."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    axis = Mesh.create(Layout(world=world, tensor=world), CPU).tensor
    model = model_of(family, recompute, axis, sequence, dtype, dropout)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 61
    if split:
        sums = Sums({p: torch.full_like(p, torch.nan) for p in model.parameters()})
    spans = None if documents is None else Spans(tokens.numel(), len(tokens), documents)
    loss = model.loss_sum(tokens, tokens.roll(1, 1), spans, key=DropoutKey(1, 2, 3))
    if split:
        with sums.defer():
            loss.backward()
        totals = {name: sums.totals[parameter] for name, parameter in model.named_parameters()}
    else:
        loss.backward()
        totals = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient.detach() for name, gradient in totals.items()}, dict(axis.sent)


def assert_same(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert gradients.keys() == wanted.keys() and len(gradients) > LAYERS
    for name, gradient in wanted.items():
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("documents", "dropout"),
    [
        (None, 0.0),
        (None, 0.2),
        ((0, 5, 12, 14, 24), 0.0),
        pytest.param((0, 5, 12, 14, 24), 0.2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_gradients_are_the_same_to_the_last_bit(family: str, documents: Any, dropout: float) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        wanted, _ = gradients(family, Recompute(), documents, dtype, dropout)
        for recompute in (FULL, SELECTIVE, FIRST):
            assert_same(gradients(family, recompute, documents, dtype, dropout)[0], wanted)
            assert_same(gradients(family, recompute, documents, dtype, dropout, split=True)[0], wanted)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_on_tensor_ranks(family: str, sequence: bool, pool: Pool) -> None:
    """``full`` repeats a layer's forward collectives but the last one, ``selective`` none."""
    for split in (False, True):
        arguments = (None, torch.float64, 0.2, sequence, split)
        plain = pool.run(2, gradients, family, Recompute(), *arguments)
        for recompute, layers in ((FULL, LAYERS), (SELECTIVE, 0), (FIRST, 1)):
            for (totals, sent), (wanted, before) in zip(
                pool.run(2, gradients, family, recompute, *arguments), plain
            ):
                assert_same(totals, wanted)
                passes = 3 if sequence else 2  # an all-reduce counts twice
                extra = layers * passes * 2 * LENGTH * 32 * 8 // 2
                assert sum(sent.values()) - sum(before.values()) == extra


def _flops(recompute: Recompute) -> int:
    model = model_of("llama", recompute, Axis("tensor"), False, torch.float32, 0.0)
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    with FlopCounterMode(display=False) as counter:
        model.loss_sum(tokens, tokens).backward()
    return int(counter.get_total_flops())


def test_selective_repeats_no_product_and_full_all_but_the_last() -> None:
    plain = _flops(Recompute())
    assert _flops(SELECTIVE) == plain
    weights = 32 * (4 + 2 * 2) * 8 + 32 * 32 + 2 * 32 * 48  # queries, keys, values, output, gate and up
    assert _flops(FIRST) - plain == 2 * 2 * LENGTH * weights  # the counter leaves out attention on a CPU
    assert _flops(FULL) - plain == LAYERS * (_flops(FIRST) - plain)


def test_nothing_is_recomputed_without_gradients() -> None:
    """Nor does generation, or evaluation, go another way."""
    tokens = torch.arange(LENGTH)[None]
    with torch.no_grad():
        outputs = [
            model_of("llama", recompute, Axis("tensor"), False, torch.float64, 0.0)(tokens)
            for recompute in (Recompute(), FULL, SELECTIVE)
        ]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_results_without_a_backward_pass_are_released() -> None:
    """A function whose result nothing needs holds it for its own backward pass, which never comes."""
    made: list[weakref.ref[Any]] = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made.append(weakref.ref(x.softmax(-1).untyped_storage()))
            return 2 * x

    layer: Any = recomputing(Layer(), SELECTIVE.of(0), Layer())  # type: ignore[arg-type]
    y = layer(torch.randn(3, 4, requires_grad=True))
    assert y.requires_grad and made[0]() is None
