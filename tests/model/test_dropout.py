"""Dropout: what is dropped, that it depends on nothing but the element, and where GPT-2 drops."""

import hashlib
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from hexad.checkpoint.hugging_face.names import published_tensors
from hexad.model.configuration import build_config
from hexad.model.dropout import DropoutKey, Dropper, Site, row_keys
from hexad.parallel.context.spans import Spans
from hexad.parallel.sharding import declared_parameters
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..layers import dropped_attention, load_global, shard_of, whole_model
from ..pool import Pool

CPU = torch.device("cpu")
LENGTH, LAYERS = 10, 2
MODEL = {"layers": LAYERS, "hidden": 48, "heads": 4, "vocab": 61, "dropout": 0.3, "attention_dropout": 0.25}


def mixed(h: int) -> int:
    """MurmurHash3's finalizer, in Python's own integers."""
    h ^= h >> 16
    h = h * 0x85EBCA6B % 2**32
    h ^= h >> 13
    h = h * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def words(*values: object) -> tuple[int, int]:
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def dropped(draws: DropoutKey, dropper: Dropper, row: int, column: int) -> bool:
    """The definition, element by element."""
    key = []
    lows, highs = words(draws.seed, draws.step, "low"), words(draws.seed, draws.step, "high")
    for low, high, word in zip(lows, highs, words(dropper.layer, int(dropper.site))):
        key.append(mixed(mixed(mixed(row % 2**32 ^ low) ^ row >> 32 ^ high) ^ word))
    h = mixed(mixed(column * 0x9E3779B1 % 2**32) ^ key[0]) ^ key[1]
    return (h ^ 2**31) < int(dropper.rate * 2**32)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_the_mask_is_the_definition(rate: float) -> None:
    draws, dropper = DropoutKey(12, 7, 0), Dropper(rate, 3, Site.FEED_FORWARD)
    rows = torch.tensor([0, 1, 999, 2**31, 2**32 - 1, 2**32 + 5, 3 * 2**40 + 1])
    factors = dropper.factors(dropper.keys(row_keys(draws, rows)), 2, 33, torch.float64)
    wanted = [
        [0.0 if dropped(draws, dropper, row, column) else 1 / (1 - rate) for column in range(2, 35)]
        for row in rows.tolist()
    ]
    torch.testing.assert_close(factors, torch.tensor(wanted, dtype=torch.float64))


def mask(draws: DropoutKey, dropper: Dropper, rows: int = 2000, columns: int = 500) -> torch.Tensor:
    keys = dropper.keys(row_keys(draws, torch.arange(rows)))
    return dropper.factors(keys, 0, columns, torch.float64) == 0


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_as_many_are_dropped_as_should_be(rate: float) -> None:
    """In all, in rows, in columns, and in pairs of neighbours; 5 standard deviations."""
    factors = mask(DropoutKey(1, 2, 0), Dropper(rate, 0, Site.ATTENTION)).double()
    n = factors.numel()
    assert abs(factors.mean() - rate) < 5 * (rate * (1 - rate) / n) ** 0.5
    for dim in (0, 1):
        counts = factors.sum(dim)
        trials = factors.shape[dim]
        spread = counts.var() / (trials * rate * (1 - rate))
        assert abs(spread - 1) < 5 * (2 / len(counts)) ** 0.5
    both = rate**2
    for shift in (1, 2, 64):
        for pairs in (factors[shift:] * factors[:-shift], factors[:, shift:] * factors[:, :-shift]):
            assert abs(pairs.mean() - both) < 5 * (both / pairs.numel()) ** 0.5


def test_other_layers_sites_steps_and_seeds_are_independent() -> None:
    base = mask(DropoutKey(1, 2, 0), Dropper(0.5, 0, Site.ATTENTION)).double() - 0.5
    others = [
        mask(DropoutKey(1, 2, 0), Dropper(0.5, 1, Site.ATTENTION)),
        mask(DropoutKey(1, 2, 0), Dropper(0.5, 0, Site.FEED_FORWARD)),
        mask(DropoutKey(1, 3, 0), Dropper(0.5, 0, Site.ATTENTION)),
        mask(DropoutKey(2, 2, 0), Dropper(0.5, 0, Site.ATTENTION)),
        mask(DropoutKey(1, 2, 0), Dropper(0.5, 0, Site.ATTENTION)).roll(1, 0),
        mask(DropoutKey(1, 2, 0), Dropper(0.5, 0, Site.ATTENTION)).roll(1, 1),
    ]
    for other in others:
        assert abs((base * (other.double() - 0.5)).mean() * 4) < 5 / base.numel() ** 0.5


def test_the_gradient_has_the_same_mask_and_nothing_else_is_kept() -> None:
    dropper = Dropper(0.4, 5, Site.ATTENTION)
    rows = row_keys(DropoutKey(3, 1, 0), torch.arange(70000))  # more than one block
    x = torch.randn(70000, 24, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = dropper(x, rows)
    factors = dropper.factors(dropper.keys(rows), 0, 24, torch.float64)
    torch.testing.assert_close(out, x * factors, rtol=0, atol=0)
    gradient = torch.randn_like(x)
    out.backward(gradient)
    torch.testing.assert_close(x.grad, gradient * factors, rtol=0, atol=0)
    assert [tensor.data_ptr() for tensor in kept] == [rows.data_ptr()]


@pytest.mark.parametrize("bounds", [(0, 10, 20), (0, 4, 5, 10, 17, 20)])
def test_dropped_attention(bounds: tuple[int, ...]) -> None:
    """Against autograd through a softmax over the whole batch with an explicit mask."""
    length, heads, kv_heads, width = 10, 6, 2, 5
    generator = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(20, n, width, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    dropper = Dropper(0.3, 1, Site.PROBABILITIES)
    rows = row_keys(DropoutKey(9, 0, 0), torch.arange(20 * heads).view(20, heads))
    output = dropped_attention(q, k, v, Spans(20, 2, bounds), rows, dropper, width**-0.5)
    upstream = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    gradients = torch.autograd.grad(output, (q, k, v), upstream)

    allowed = torch.zeros(20, 20, dtype=torch.bool)
    for begin, end in pairwise(bounds):
        allowed[begin:end, begin:end] = torch.ones(end - begin, end - begin).tril().bool()
    spread = (t.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for t in (k, v))
    keys, values = spread
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) / width**0.5
    probabilities = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    factors = dropper.factors(dropper.keys(rows.transpose(1, 2)), 0, length, torch.float64).repeat(1, 1, 2)
    wanted = ((probabilities * factors) @ values).transpose(0, 1).flatten(1)
    torch.testing.assert_close(output, wanted)
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted, (q, k, v), upstream)):
        torch.testing.assert_close(mine, theirs)


class Masked(torch.nn.Module):
    """In the place of one of transformers' dropouts."""

    def __init__(self, rate: float, layer: int, site: Site, draws: DropoutKey) -> None:
        super().__init__()
        self.dropper, self.draws = Dropper(rate, layer, site), draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.draws.sequence
        if self.dropper.site == Site.PROBABILITIES:  # [sequences, heads, query, key]
            sequences, heads, queries, columns = x.shape
            rows = torch.arange(first * heads * queries, (first + sequences) * heads * queries)
            rows = rows.view(sequences, heads, queries)
        else:
            sequences, tokens, columns = x.shape
            rows = torch.arange(first * tokens, (first + sequences) * tokens).view(sequences, tokens)
        keys = self.dropper.keys(row_keys(self.draws, rows))
        return x * self.dropper.factors(keys, 0, columns, x.dtype)


def test_gpt2_drops_where_transformers_does() -> None:
    model = build_config({"model": {**MODEL, "family": "gpt2", "max_positions": LENGTH}}).model
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=LENGTH, n_embd=48, n_layer=LAYERS, n_head=4, attn_pdrop=0.25,
        bos_token_id=0, eos_token_id=0, layer_norm_epsilon=model.norm_eps, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(3)
    theirs: Any = transformers.AutoModelForCausalLM.from_config(config).double().train()
    draws = DropoutKey(11, 4, 6)
    theirs.transformer.drop = Masked(0.3, -1, Site.EMBEDDING, draws)
    for index, block in enumerate(theirs.transformer.h):
        block.attn.resid_dropout = Masked(0.3, index, Site.ATTENTION, draws)
        block.mlp.dropout = Masked(0.3, index, Site.FEED_FORWARD, draws)
    ours = whole_model(model, shard_of())
    state = theirs.state_dict()
    load_global(ours, {name: place.read(state) for name, place in published_tensors(model).items()})
    tokens = torch.randint(61, (3, LENGTH))
    # Attention's own dropout is a function there, called once per layer.
    layers = iter([Masked(0.25, index, Site.PROBABILITIES, draws) for index in range(LAYERS)])

    def drop(probabilities: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        assert training and p == 0.25
        return next(layers)(probabilities)

    with torch.no_grad():
        with mock.patch.object(torch.nn.functional, "dropout", drop):
            wanted = theirs(tokens).logits
        assert next(layers, None) is None
        logits = ours.logits(ours(tokens, key=draws))[:, :61].view_as(wanted)
        plain = ours.logits(ours(tokens))[:, :61].view_as(wanted)
    torch.testing.assert_close(logits, wanted, rtol=1e-10, atol=1e-10)
    assert (plain - wanted).abs().max() > 0.01


def _loss_and_gradients(family: str, sequence: bool, split: bool) -> tuple[float, dict[str, torch.Tensor]]:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    axis = Mesh.create(Layout(world=world, tensor=world), CPU).tensor
    positions = {"max_positions": LENGTH} if family == "gpt2" else {}
    kv_heads = 4 if family == "gpt2" else 2
    model = build_config({"model": {**MODEL, "family": family, "kv_heads": kv_heads, **positions}}).model
    ours = whole_model(model, shard_of(axis, sequence))
    generator = torch.Generator().manual_seed(5)
    whole = {
        piece.name: 0.2 * torch.randn(piece.shape, dtype=torch.float64, generator=generator)
        for declared in declared_parameters(ours)
        for _, piece, _ in declared.pieces
    }
    load_global(ours, whole)
    tokens = torch.arange(4 * LENGTH).view(4, LENGTH) * 7 % 61
    documents = (0, 4, 10, 20, 27, 30, 40) if family != "gpt2" and not split else None
    total = 0.0
    parts = tokens.split(2) if split else [tokens]
    for index, part in enumerate(parts):
        draws = DropoutKey(1, 2, 8 + 2 * index)
        spans = None if documents is None else Spans(part.numel(), len(part), documents)
        loss = ours.loss_sum(part, part.roll(1, 1), spans, key=draws)
        loss.backward()
        total += float(loss.detach())
    gradients = {}
    for declared in declared_parameters(ours):
        gradient = declared.parameter.grad
        assert gradient is not None
        if declared.declaration.weights[0].partial:
            torch.distributed.all_reduce(gradient)
        for start, piece, _ in declared.pieces:
            gradients[f"{piece.name} {piece.offset}"] = gradient.narrow(0, start, piece.sizes[0])
    return total, gradients


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("sequence", [True, False])
def test_tensor_ranks_drop_what_one_rank_drops(family: str, sequence: bool, pool: Pool) -> None:
    ((wanted, gradients),) = pool.run(1, _loss_and_gradients, family, False, False)
    for total, of_rank in pool.run(2, _loss_and_gradients, family, sequence, False):
        assert total == pytest.approx(wanted, rel=1e-12)
        whole = of_rank.keys() & gradients.keys()
        assert any("norm" in name for name in whole)
        for name in whole:  # pieces that every rank has whole, or that begin where the global tensor does
            rows = gradients[name][tuple(slice(0, n) for n in of_rank[name].shape)]
            torch.testing.assert_close(of_rank[name], rows, rtol=1e-10, atol=1e-12, msg=name)


def test_dropout_does_not_depend_on_the_microbatches(pool: Pool) -> None:
    ((wanted, gradients),) = pool.run(1, _loss_and_gradients, "gpt2", False, False)
    ((total, of_parts),) = pool.run(1, _loss_and_gradients, "gpt2", False, True)
    assert total == pytest.approx(wanted, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(of_parts[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
