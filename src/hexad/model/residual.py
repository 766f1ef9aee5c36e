"""How a branch is added to the residual stream: dropped out, multiplied, and normalised for the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hexad.parallel.contributions import Dense, applied, contributed
from hexad.parallel.pointwise import maybe_compiled

from . import ops
from .dropout import Dropper, dropped
from .norms import Norm
from .recompute import recomputable_from


@dataclass(frozen=True)
class Residual:
    """One place of a layer at which a branch is added.

    Attributes:
        multiplier: of the branch.
        dropper: what is dropped of it.
        compiled: see :mod:`hexad.parallel.pointwise`.
        exact: see :mod:`hexad.parallel.exact`.
    """

    multiplier: float
    dropper: Dropper
    compiled: bool
    exact: bool = False

    def add(self, x: Tensor, branch: Tensor, rows: Tensor | None) -> Tensor:
        """``x`` plus the branch, both ``[tokens, hidden]``; ``rows``: dropout's keys, None for none."""
        if rows is not None and self._in_one:
            return applied(_Add, x, branch, rows, self)
        branch = branch if rows is None else self.dropper(branch, rows)
        if self.exact and self.multiplier != 1:  # whether alpha rounds once or twice depends on the place
            return x + branch * self.multiplier
        return torch.add(x, branch, alpha=self.multiplier)

    def add_and_normalise(
        self, x: Tensor, branch: Tensor, rows: Tensor | None, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """The sum that :meth:`add` returns, and its norm, both ``[tokens, hidden]``."""
        if not self._in_one:
            x = self.add(x, branch, rows)
            return x, norm(x)
        total, normed = applied(_AddNorm, x, branch, rows, self, norm.eps, *norm.vectors)
        return total, recomputable_from(norm.part, normed, norm.normalised, total)

    @property
    def _in_one(self) -> bool:
        return self.compiled and not torch.compiler.is_compiling()

    @property
    def constants(self) -> ScaleConstants:
        """Dropout's words and rate and the branch's multiplier, which the functions below take."""
        return self.dropper.words, self.dropper.rate, self.multiplier


ScaleConstants = tuple[Tensor, float, float]


def _scaled(branch: Tensor, rows: Tensor | None, words: Tensor, rate: float, multiplier: float) -> Tensor:
    """The scaled result of a branch ``[tokens, hidden]``; also, its gradient given the sum's."""
    branch = branch if rows is None else dropped(branch, rows, words, rate)
    return branch if multiplier == 1 else branch * multiplier


def _add(x: Tensor, branch: Tensor, *rest: Any) -> Tensor:
    return x + _scaled(branch, *rest)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, rows: Tensor, residual: Residual) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.residual = residual
        return maybe_compiled(_add, residual.compiled)(x, branch, rows, *residual.constants)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        backward = maybe_compiled(_scaled, ctx.residual.compiled)
        return gradient, backward(gradient, rows, *ctx.residual.constants), None, None


def _add_norm(
    layer: bool,
    x: Tensor,
    branch: Tensor,
    rows: Tensor | None,
    constants: ScaleConstants,
    vectors: Sequence[Tensor],
    eps: float,
) -> tuple[Tensor, ...]:
    """(sum ``[tokens, hidden]``, its norm, the norm's statistics ``[tokens, 1]``)."""
    total = _add(x, branch, rows, *constants)
    forward: Callable[..., Any] = ops.layer_forward if layer else ops.rms_forward
    return total, *forward(total, *vectors, eps)


def _add_norm_backward(
    layer: bool,
    grad_total: Tensor,
    gradient: Tensor,
    rows: Tensor | None,
    constants: ScaleConstants,
    total: Tensor,
    statistics: Sequence[Tensor],
    vectors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """(gradient of the stream ``[tokens, hidden]``, of the norm's ``vectors [hidden]``, of the branch
    where it is not the stream's)."""
    backward: Callable[..., Any] = ops.layer_backward if layer else ops.rms_backward
    grad_x, *grad_vectors = backward(gradient, total, *statistics, *vectors)
    grad_x = grad_x + grad_total
    if rows is None and constants[2] == 1:
        return grad_x, *grad_vectors
    return grad_x, *grad_vectors, _scaled(grad_x, rows, *constants)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        rows: Tensor | None,
        residual: Residual,
        eps: float,
        *vectors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        forward = maybe_compiled(_add_norm, residual.compiled)
        plain = [vector.detach() for vector in vectors]
        total, normed, *statistics = forward(
            len(vectors) == 2, x, branch, rows, residual.constants, plain, eps
        )
        ctx.save_for_backward(rows, total, *statistics)
        ctx.residual, ctx.vectors = residual, vectors
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, total, *statistics = ctx.saved_tensors
        residual, vectors = ctx.residual, ctx.vectors
        backward = maybe_compiled(_add_norm_backward, residual.compiled)
        plain = [vector.detach() for vector in vectors]
        grad_x, *rest = backward(
            len(vectors) == 2, grad_total, gradient, rows, residual.constants, total, statistics, plain
        )
        gradients = [contributed(vector, Dense(grad)) for vector, grad in zip(vectors, rest)]
        branch = rest[len(vectors)] if len(rest) > len(vectors) else grad_x
        return grad_x, branch, None, None, None, *gradients
