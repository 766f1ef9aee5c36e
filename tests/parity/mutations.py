"""Ways to break parallel code, each of which the parity grid must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from hexad import comm
from hexad.model.transformer import Transformer
from hexad.optim.adamw import FlatAdamW
from hexad.parallel import slot
from hexad.parallel.data import reducer
from hexad.parallel.tensor import cross_entropy, embedding, linear
from hexad.topology.mesh import Mesh
from hexad.train import engine

Patches = list[Any]


def _same(tensor: torch.Tensor, axis: Any, *rest: Any) -> torch.Tensor:
    return tensor


def _same_async(tensor: torch.Tensor, axis: Any, *rest: Any) -> comm.Pending:
    return comm.Pending(tensor)


def _drop_data_reduction(mesh: Mesh) -> Patches:
    return [mock.patch.object(reducer, "all_reduce_async", _same_async)]


def _average_over_data(mesh: Mesh) -> Patches:
    def average(tensor: torch.Tensor, axis: Any) -> comm.Pending:
        result = comm.all_reduce(tensor, axis)
        result.div_(axis.size)
        return comm.Pending(result)

    return [mock.patch.object(reducer, "all_reduce_async", average)]


def _reduce_before_complete(mesh: Mesh) -> Patches:
    original = reducer.GradientReducer.begin

    def begin(self: Any, microbatches: int) -> None:
        original(self, max(1, microbatches - 1))

    return [mock.patch.object(reducer.GradientReducer, "begin", begin)]


def _double_count_norm(mesh: Mesh) -> Patches:
    def norm(self: FlatAdamW) -> torch.Tensor:
        squares = sum(torch.linalg.vector_norm(group.gradients).square() for group in self.groups)
        return comm.all_reduce(torch.as_tensor(squares).clone(), self.tensor).sqrt()

    return [mock.patch.object(FlatAdamW, "gradient_norm", norm)]


def _local_norm(mesh: Mesh) -> Patches:
    return [mock.patch("hexad.optim.adamw.all_reduce", _same)]


def _local_mean_loss(mesh: Mesh) -> Patches:
    def targets(self: Any, counts: torch.Tensor) -> int:
        return int(counts[0]) // self.mesh.data.size + 1

    return [mock.patch.object(engine.Engine, "_targets", targets)]


def _keep_partial_gradients(mesh: Mesh) -> Patches:
    return [mock.patch.object(reducer, "all_reduce", _same)]


def _drop_column_backward(mesh: Mesh) -> Patches:
    return [mock.patch.object(linear, "all_reduce_async", _same_async)]


def _drop_row_forward(mesh: Mesh) -> Patches:
    return [mock.patch.object(linear, "all_reduce", _same)]


def _stale_gather(mesh: Mesh) -> Patches:
    def gather(tensor: torch.Tensor, axis: Any) -> comm.Pending:
        return comm.Pending(tensor.repeat(axis.size, 1))

    return [mock.patch.object(linear, "all_gather_async", gather)]


def _local_softmax(mesh: Mesh) -> Patches:
    return [mock.patch.object(cross_entropy, "all_reduce", _same)]


def _count_padding(mesh: Mesh) -> Patches:
    original = cross_entropy.cross_entropy_sum

    def with_padding(logits: torch.Tensor, labels: torch.Tensor, vocab: int, axis: Any) -> torch.Tensor:
        return original(logits, labels, logits.shape[1] * axis.size, axis)

    return [mock.patch("hexad.model.transformer.cross_entropy_sum", with_padding)]


def _drop_embedding_reduction(mesh: Mesh) -> Patches:
    return [mock.patch.object(embedding, "all_reduce", _same)]


def _overwrite_gradients(mesh: Mesh) -> Patches:
    original = slot.GradientSlot._contributed

    def contributed(self: slot.GradientSlot) -> None:
        original(self)
        self._fresh = True

    return [mock.patch.object(slot.GradientSlot, "_contributed", contributed)]


def _ignore_documents(mesh: Mesh) -> Patches:
    original = Transformer.loss_sum

    def joined(self: Transformer, tokens: Any, labels: Any, documents: Any = None) -> torch.Tensor:
        return original(self, tokens, labels, None)

    return [mock.patch.object(Transformer, "loss_sum", joined)]


def _seed_per_rank(mesh: Mesh) -> Patches:
    original = engine.initialise

    def initialise(model: Any, seed: int) -> None:
        original(model, seed + mesh.tensor.rank)

    return [mock.patch.object(engine, "initialise", initialise)]


# name -> (patches, index of the variant, data, tensor, sequence) of a case that must fail under it
MUTATIONS: dict[str, tuple[Callable[[Mesh], Patches], int, int, int, bool]] = {
    "drop the data reduction": (_drop_data_reduction, 0, 2, 1, True),
    "average over data ranks instead of summing": (_average_over_data, 0, 2, 1, True),
    "reduce a bucket one microbatch early": (_reduce_before_complete, 2, 2, 1, True),
    "count replicated parameters once per tensor rank in the norm": (_double_count_norm, 0, 1, 2, False),
    "clip by this rank's norm": (_local_norm, 0, 1, 2, False),
    "divide by this rank's targets": (_local_mean_loss, 0, 2, 1, True),
    "leave norm gradients partial in sequence parallel": (_keep_partial_gradients, 0, 1, 2, True),
    "leave QK-norm gradients partial": (_keep_partial_gradients, 5, 1, 2, False),
    "drop the column-parallel backward reduction": (_drop_column_backward, 0, 1, 2, False),
    "drop the row-parallel forward reduction": (_drop_row_forward, 0, 1, 2, False),
    "use this rank's tokens only for weight gradients": (_stale_gather, 0, 1, 2, True),
    "normalise the softmax over this rank's vocabulary": (_local_softmax, 0, 1, 2, False),
    "let padded vocabulary into the softmax": (_count_padding, 0, 1, 1, True),
    "drop the embedding's reduction": (_drop_embedding_reduction, 0, 1, 2, False),
    "overwrite gradients instead of accumulating": (_overwrite_gradients, 2, 2, 1, True),
    "ignore document boundaries": (_ignore_documents, 1, 1, 2, True),
    "initialise each tensor rank with a seed of its own": (_seed_per_rank, 0, 1, 2, False),
}


@contextmanager
def applied(name: str, mesh: Mesh) -> Iterator[None]:
    """Run with the code broken."""
    patches = MUTATIONS[name][0](mesh)
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
