"""The output head and the loss in slices against PyTorch's linear layer and cross-entropy."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hexad.parallel.tensor import loss
from hexad.parallel.tensor.embedding_inventory import loss_rows
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..layers import Sums, shard_of
from ..pool import Pool

CPU = torch.device("cpu")
HIDDEN = 6


def problem(tokens: int, vocab: int, padding: int, seed: int) -> tuple[torch.Tensor, ...]:
    """x, a weight whose padding rows would win every softmax, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab, HIDDEN, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    return x, torch.cat([weight, torch.full((padding, HIDDEN), 1e3, dtype=torch.float64)]), labels


def by_torch(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab: int, upstream: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, gradient of x, gradient of the weight's real rows."""
    x, weight = x.clone().requires_grad_(), weight[:vocab].clone().requires_grad_()
    total = F.cross_entropy(x @ weight.t(), labels, reduction="sum")
    (total * upstream).backward()
    assert x.grad is not None and weight.grad is not None
    return total.detach(), x.grad, weight.grad


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 40),
    vocab=st.integers(1, 90),
    padding=st.integers(0, 7),
    rows=st.integers(1, 45),
    seed=st.floats(0.25, 4),
    upstream=st.sampled_from([None, 1.0, -0.3]),
    number=st.integers(0, 99),
)
def test_one_rank_equals_torch(
    tokens: int, vocab: int, padding: int, rows: int, seed: float, upstream: float | None, number: int
) -> None:
    """Also where the gradient that arrives is not the one announced."""
    x, weight, labels = problem(tokens, vocab, padding, number)
    upstream = seed if upstream is None else upstream
    wanted = by_torch(x, weight, labels, vocab, upstream)
    x.requires_grad_(), weight.requires_grad_()
    place = shard_of(dtype=x.dtype)
    with mock.patch.object(loss, "loss_rows", lambda *_: min(rows, tokens)):
        total = loss.head_loss_sum(x, weight, labels, vocab, place, seed)
        with torch.no_grad():
            torch.testing.assert_close(loss.head_loss_sum(x, weight, labels, vocab, place), wanted[0])
    (total * upstream).backward()
    assert x.grad is not None and weight.grad is not None
    torch.testing.assert_close(total.detach(), wanted[0])
    torch.testing.assert_close(x.grad, wanted[1])
    torch.testing.assert_close(weight.grad[:vocab], wanted[2])
    assert not weight.grad[vocab:].any()


def _share(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab: int,
    sequence: bool,
    dtype: Any,
    rows: int,
) -> tuple[float, torch.Tensor, torch.Tensor, int]:
    """Loss, this rank's gradients (the weight's as accumulated), and the number of complete contributions."""
    world = torch.distributed.get_world_size()
    axis = Mesh.create(Layout(world=world, tensor=world), CPU).tensor
    place = shard_of(axis, sequence, dtype)
    mine = (x.chunk(world)[axis.rank] if sequence else x).to(dtype).clone().requires_grad_()
    shard = nn.Parameter(weight.chunk(world)[axis.rank].to(dtype).clone())
    buffer = torch.full(shard.shape, torch.nan, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    sums = Sums({shard: buffer})
    with mock.patch.object(loss, "loss_rows", lambda *_: rows):
        for _ in range(2):
            mine.grad = None
            total = loss.head_loss_sum(mine, shard, labels, vocab, place, 0.5)
            total.backward(torch.full_like(total, 0.5))
    assert mine.grad is not None and mine.grad.dtype == dtype and shard.grad is None
    return float(total.detach()), mine.grad.double(), buffer.double() / 2, sums.complete[shard]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(("world", "vocab", "rows"), [(2, 70, 5), (3, 65, 12), (4, 1, 4), (4, 191, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 3e-2)])
def test_divided_over_ranks(
    pool: Pool, world: int, vocab: int, rows: int, sequence: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Some ranks hold padding only; slices do not divide the tokens; each contribution is complete once."""
    columns = 64 * world * -(-vocab // (64 * world))
    x, weight, labels = problem(12, vocab, columns - vocab, vocab)
    weight[vocab:] = 0
    x, weight = x.to(dtype).double(), weight.to(dtype).double()
    wanted = by_torch(x, weight, labels, vocab, 0.5)
    results = pool.run(world, _share, x, weight, labels, vocab, sequence, dtype, rows)
    for total, _, _, done in results:
        assert total == pytest.approx(float(wanted[0]), rel=max(tolerance / 4, 1e-13), abs=1e-12)
        assert done == 2
    grad_x = [result[1] for result in results]
    if sequence:
        grad_x = [torch.cat(grad_x)]
    scale = {"rtol": tolerance, "atol": tolerance}
    for gradient in grad_x:
        torch.testing.assert_close(gradient, wanted[1], **scale)
    grad_weight = torch.cat([result[2] for result in results])
    torch.testing.assert_close(grad_weight[:vocab], wanted[2], **scale)


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_logits_exist_for_one_slice_at_a_time() -> None:
    tokens, hidden, vocab = 2048, 32, 256
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    place = shard_of(dtype=torch.float32)
    with _Largest() as largest:
        loss.head_loss_sum(x, weight, torch.arange(tokens) % vocab, vocab, place).backward()
    assert largest.elements == tokens * hidden < tokens * vocab


@given(
    tokens=st.integers(1, 10**5),
    hidden=st.integers(1, 10**4),
    columns=st.integers(1, 2 * 10**5),
    width=st.sampled_from((2, 4)),
)
def test_a_slice_of_logits_is_no_larger_than_the_input(
    tokens: int, hidden: int, columns: int, width: int
) -> None:
    rows = loss_rows(tokens, hidden, columns, width)
    least = {2: 1024, 4: 256}[width]
    assert 1 <= rows <= tokens
    gradient = 4 * columns * hidden if width == 2 else 0  # of the weight, in float32
    assert rows <= least or rows * columns * width <= max(tokens * hidden * width, gradient)
    slices = -(-tokens // rows)
    assert (slices - 1) * rows < tokens
    fewer = -(-tokens // (slices - 1)) if slices > 1 else tokens + 1
    assert (fewer > least and fewer * columns > tokens * hidden) or slices == 1
