"""Vocabulary-parallel cross-entropy and embedding against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hexad.parallel.tensor import cross_entropy_sum, padded_vocab
from hexad.topology.layout import Layout
from hexad.topology.mesh import Axis, Mesh

from ..pool import Pool


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(1, 40), vocab=st.integers(1, 90), padding=st.integers(0, 7), seed=st.integers(0, 99)
)
def test_one_rank_equals_torch(tokens: int, vocab: int, padding: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 30 * torch.randn(tokens, vocab, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    padded = F.pad(logits, (0, padding), value=1e3).requires_grad_()
    found = cross_entropy_sum(padded.clone(), labels, vocab, Axis("tensor"))
    reference = logits.clone().requires_grad_()
    wanted = F.cross_entropy(reference, labels, reduction="sum")
    torch.testing.assert_close(found, wanted)
    found.backward()
    wanted.backward()
    assert padded.grad is not None and reference.grad is not None
    torch.testing.assert_close(padded.grad[:, :vocab], reference.grad)
    assert not padded.grad[:, vocab:].any()


def _share(
    logits: torch.Tensor, labels: torch.Tensor, vocab: int, dtype: torch.dtype
) -> tuple[float, torch.Tensor]:
    world = torch.distributed.get_world_size()
    axis = Mesh.create(Layout(world=world, tensor=world), torch.device("cpu")).tensor
    mine = logits.chunk(world, dim=1)[axis.rank].to(dtype).contiguous().requires_grad_()
    loss = cross_entropy_sum(mine.clone(), labels, vocab, axis)
    loss.backward()
    assert mine.grad is not None and mine.grad.dtype == dtype
    return float(loss.detach()), mine.grad.double()


@pytest.mark.parametrize(("world", "vocab"), [(2, 70), (3, 65), (4, 1), (4, 191)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)])
def test_divided_over_ranks(pool: Pool, world: int, vocab: int, dtype: torch.dtype, tolerance: float) -> None:
    """Some ranks hold padding only."""
    generator = torch.Generator().manual_seed(vocab)
    columns = padded_vocab(vocab, world)
    logits = 5 * torch.randn(9, columns, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocab, (9,), generator=generator)
    labels[2] = -100
    reference = logits[:, :vocab].to(dtype).double().requires_grad_()
    wanted = F.cross_entropy(reference, labels, reduction="sum")
    wanted.backward()
    results = pool.run(world, _share, logits, labels, vocab, dtype)
    for loss, _ in results:
        assert loss == pytest.approx(float(wanted.detach()), rel=max(tolerance**2, 1e-13), abs=1e-12)
    gradient = torch.cat([gradient for _, gradient in results], dim=1)
    torch.testing.assert_close(gradient[:, :vocab], reference.grad, rtol=tolerance, atol=tolerance)
