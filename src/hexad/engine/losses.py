"""Losses and heads of a user's own on the configured model, in every layout.

A loss is called on the ranks of the last stage with :class:`Outputs`, which knows where the tokens, the
features and the vocabulary are. What it returns is *this rank's part of a sum*: the sum over the data and
context ranks is divided by the divisor and differentiated. Tensor ranks all return the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hexad.config import HexadError
from hexad.dataset.load.microbatch import Microbatch
from hexad.model.transformer import Transformer
from hexad.parallel.tensor import regions
from hexad.parallel.tensor.loss import cross_entropy
from hexad.topology.mesh import Mesh

Loss = Callable[["Outputs", Microbatch], Tensor]
"""A scalar, given the model's outputs of a microbatch, and that (what the rank holds of it)."""


class Outputs:
    """Outputs of the last stage for a microbatch.

    Args:
        stage: the last one.
        hidden: its normalised hidden states, ``[tokens (/ tensor ranks in sequence parallel), hidden]``.
        microbatch: what this rank holds of it.
        mesh: of the run.
    """

    def __init__(self, stage: Transformer, hidden: Tensor, microbatch: Microbatch, mesh: Mesh) -> None:
        self._stage, self._hidden, self._microbatch, self._mesh = stage, hidden, microbatch, mesh

    def hidden(self) -> Tensor:
        """``[tokens, hidden]``: the normalised hidden states of this rank's tokens, the same on all tensor
        ranks, for a head that each of them computes."""
        if not self._stage.shard.sequence:
            return self._hidden
        return regions.mapped(self._hidden, self._mesh.tensor, regions.gather_first, regions.slice_first)

    def local_logits(self) -> Tensor:
        """``[tokens, columns]``: logits of this tensor rank's part of the vocabulary, padding included."""
        return self._stage.logits(self._hidden)

    def logits(self) -> Tensor:
        """``[tokens, vocab]``: all logits, gathered over the tensor ranks. Large: prefer
        :meth:`log_probabilities` where it is enough."""
        return regions.gathered_last(self.local_logits(), self._mesh.tensor)[:, : self._stage.vocab]

    def log_probabilities(self, labels: Tensor | None = None) -> Tensor:
        """``[tokens]`` in at least float32: of each token's label, 0 where it is -100; of several tensor
        ranks none holds all logits.

        Args:
            labels: int64 ``[tokens]`` or of the microbatch's shape; by default the microbatch's.
        """
        targets = self._microbatch.labels if labels is None else labels
        stage, axis = self._stage, self._mesh.tensor
        losses = cross_entropy(self.local_logits(), targets.flatten(), stage.vocab, axis, stage.shard.exact)
        return 0.0 - losses  # of a certain token 0.0, not -0.0, as where tokens are sampled

    def whole(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens, ``[tokens, ...]``, with those of all context ranks: ``[sequences,
        length, ...]``, in order. What is computed from them is the same on all context ranks, and counts
        once by :meth:`once`."""
        axis, microbatch = self._mesh.context, self._microbatch
        shape = microbatch.sequences, microbatch.length, *values.shape[1:]
        if axis.size == 1:
            return values.reshape(shape)
        assert microbatch.numbers is not None
        numbers = regions.gather_first(microbatch.numbers, axis)
        gathered = regions.mapped(values, axis, regions.gather_first, regions.scatter_sum_first)
        return gathered[numbers.argsort()].view(shape)

    def once(self, loss: Tensor) -> Tensor:
        """A loss that all context ranks have computed alike, as one rank's part of the sum."""
        return loss / self._mesh.context.size


class OwnLoss(nn.Module):
    """A user's loss, as a part of the last stage: its parameters are trained with the model's.

    Args:
        loss: a function, or a module.
        mesh: of the run.
    """

    def __init__(self, loss: Loss | nn.Module, mesh: Mesh) -> None:
        super().__init__()
        if isinstance(loss, type) or not callable(loss):
            raise HexadError(
                f"loss: found {loss!r}, expected a function of outputs and microbatch, or a module"
            )
        self.loss: Any = loss  # a module is registered
        self.mesh = mesh

    def forward(self, stage: Transformer, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        """This rank's part of the loss.

        Raises:
            HexadError: the function returns no scalar.
        """
        value = self.loss(Outputs(stage, hidden, microbatch, self.mesh), microbatch)
        if not isinstance(value, Tensor) or value.dim():
            actual = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            raise HexadError(f"loss: found {actual}, expected a scalar tensor: a sum over the rank's tokens")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise HexadError(
                "loss: found a tensor without a graph; compute it from the outputs, with autograd"
            )
        return value
