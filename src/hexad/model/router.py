"""The choice of experts for each token and their weights; balancing losses and counts."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexad.comm import all_gather, all_reduce
from hexad.config.model import MoeSettings
from hexad.parallel.arithmetic import Arithmetic
from hexad.parallel.contributions import applied, weight_gradient
from hexad.parallel.sharding import Shard, ShardedModule

from . import exact_ops
from .positions import Geometry
from .replay import Chosen, with_weights
from .routing_inventory import RouterSpec


class Routing(NamedTuple):
    """The experts of a rank's tokens.

    Attributes:
        experts: int64 ``[tokens, top_k]``, the likeliest first; the number of all experts for a pair that is
            dropped, and for rows that are no tokens.
        weights: float32 at least, ``[tokens, top_k]``.
        complete: every pair has an expert.
        losses: by name, this rank's parts; see :meth:`hexad.model.auxiliary.Auxiliary.attach`.
        counts: float64, see :meth:`Router._counts`; None outside of training.
    """

    experts: Tensor
    weights: Tensor
    complete: bool
    losses: Mapping[str, Tensor] = {}
    counts: Tensor | None = None


class TokenRows(NamedTuple):
    """The tokens that the rows of a rank stand for.

    Attributes:
        numbers: int64 ``[tokens]``, in the microbatch; rows behind these are no tokens.
        first: the number of the first among the tokens of this rank's context rank.
        most: rows of any rank at the same time.
    """

    numbers: Tensor
    first: int
    most: int

    @property
    def tokens(self) -> int:
        """Rows that are tokens."""
        return len(self.numbers)


_SMALL = 1e-20
"""Added to what weights are divided by."""


def _widened_product(total: Tensor, gradient: Tensor, inputs: Tensor, fresh: bool) -> None:
    """Add ``gradient.T @ inputs`` to a total, or overwrite it, in the format of the gradient."""
    product = gradient.t() @ inputs.to(gradient.dtype)
    if fresh:
        total.copy_(product)
    else:
        total.add_(product)


class _Logits(torch.autograd.Function):
    """``x W^T`` in a wider format than that of both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: torch.dtype, arithmetic: Arithmetic) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.wide = weight, wide
        return arithmetic.widened_product(x, weight.detach(), wide)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (gradient @ ctx.weight.detach().to(ctx.wide)).to(x.dtype)
        return grad_x, weight_gradient(ctx.weight, gradient, x, add=_widened_product), None, None


def logits(x: Tensor, weight: Tensor, wide: torch.dtype, arithmetic: Arithmetic) -> Tensor:
    """``[rows, hidden]``, ``[outputs, hidden]`` -> ``x W^T`` in a wider format than that of both."""
    result: Tensor = applied(_Logits, x, weight, wide, arithmetic)
    return result


def ordered(scores: Tensor, count: int) -> Tensor:
    """int64 ``[tokens, count]``: the places of each row's largest scores, in descending order; of equal ones
    the first place, on every device."""
    # A copy: a view would keep the places of all scores for the backward pass.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def in_best_groups(scores: Tensor, settings: MoeSettings) -> Tensor:
    """Scores ``[tokens, experts]``, -inf outside of each token's best groups (DeepSeek-V2, section 2.1.2)."""
    if settings.groups == settings.top_groups:
        return scores
    grouped = scores.unflatten(1, (settings.groups, -1))
    if settings.score == "sigmoid":
        of_groups = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    else:
        of_groups = grouped.amax(-1)
    best = ordered(of_groups, settings.top_groups)
    numbers = torch.arange(settings.groups, device=scores.device)
    inside = (best[..., None] == numbers).any(1)
    return grouped.masked_fill(~inside[..., None], -torch.inf).flatten(1)


class Router(ShardedModule):
    """Chooses experts. Scores are computed in float32 at least, whatever the model's format.

    Args:
        inventory: what it holds.
        shard: of every layer.
        layer: its number.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, inventory: RouterSpec, shard: Shard, layer: int) -> None:
        super().__init__(shard)
        self.declare(*inventory.parameters)
        if not inventory.settings.biased:
            self.bias = None
        self.settings, self.layer = inventory.settings, layer
        self.experts = inventory.settings.experts

    def forward(self, x: Tensor, where: Geometry, rows: TokenRows) -> Routing:
        """The experts of ``x [rows, hidden]``."""
        settings, exactly = self.settings, self.shard.exact
        raw = logits(x, self.weight, self.shard.wide, self.shard.arithmetic.unrounded)
        if settings.score == "sigmoid":
            scores = exact_ops.sigmoid(raw) if exactly else raw.sigmoid()
        else:
            scores = self._softmax(raw)
        imposed = self._imposed(where, rows, len(x))
        with torch.no_grad():
            likeliest = self._chosen(raw if settings.score == "topk_softmax" else scores, rows)
            if imposed is not None:
                likeliest = torch.where(imposed.experts[:, :1] < 0, likeliest, imposed.experts)
            experts, dropped = self._within_capacity(likeliest, where, rows)
            if rows.tokens < len(x):
                experts = F.pad(experts[: rows.tokens], (0, 0, 0, len(x) - rows.tokens), value=self.experts)
        weights = self._weights(raw, scores, likeliest)
        if imposed is not None:
            weights = with_weights(weights, imposed)
        elif where.replay is not None:
            where.replay.keep(self.layer, likeliest, weights)
        routing = Routing(experts, weights, dropped is None and rows.tokens == len(x))
        if where.auxiliary is None:
            return routing
        tokens = slice(rows.tokens)
        share = scores[tokens]
        if settings.score == "sigmoid":
            share = share / share.sum(-1, keepdim=True)
        losses = self._losses(raw[tokens], share, likeliest[tokens], where, rows)
        counts = self._counts(share.detach(), likeliest[tokens], dropped)
        return routing._replace(losses=losses, counts=counts)

    def _imposed(self, where: Geometry, rows: TokenRows, count: int) -> Chosen | None:
        """The experts that are imposed on ``count`` rows."""
        if where.replay is None:
            return None
        return where.replay.imposed(self.layer, rows.first, rows.tokens, count)

    def _softmax(self, logits: Tensor) -> Tensor:
        return exact_ops.softmax(logits) if self.shard.exact else logits.softmax(-1)

    def _chosen(self, scores: Tensor, rows: TokenRows) -> Tensor:
        """int64 ``[rows, top_k]``: the experts with the largest scores."""
        settings = self.settings
        if settings.forced:
            pairs = rows.numbers[:, None] * settings.top_k + torch.arange(
                settings.top_k, device=scores.device
            )
            return F.pad(pairs, (0, 0, 0, len(scores) - len(pairs))) % self.experts
        if self.bias is not None:
            scores = scores + self.bias
        return ordered(in_best_groups(scores, settings), settings.top_k)

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """``[rows, top_k]``: the weights of the chosen experts."""
        settings = self.settings
        if settings.score == "topk_softmax":
            return self._softmax(logits.gather(1, experts)) * settings.scale
        weights = scores.gather(1, experts)
        if settings.normalise and settings.top_k > 1:
            total = weights[:, :1]
            for place in range(1, settings.top_k):  # one after the other: in one order on every device
                total = total + weights[:, place : place + 1]
            weights = weights / (total + _SMALL)
        return weights if settings.scale == 1 else weights * settings.scale

    def _within_capacity(
        self, experts: Tensor, where: Geometry, rows: TokenRows
    ) -> tuple[Tensor, Tensor | None]:
        """Experts, those of pairs beyond an expert's capacity replaced by :attr:`experts`; and how many
        pairs of this rank these are. The first tokens of the microbatch, on whatever rank, have
        precedence. In generation, and with what that has chosen, nothing is dropped."""
        factor = self.settings.capacity_factor
        if factor is None or where.cache is not None or where.replay is not None:
            return experts, None
        tokens = where.spans.tokens
        most = ceil(min(factor * tokens * self.settings.top_k / self.experts, tokens))
        numbers = F.pad(rows.numbers, (0, len(experts) - rows.tokens), value=where.spans.tokens)
        padded = experts.clone()
        padded[rows.tokens :] = self.experts
        every = torch.cat((padded, numbers[:, None]), 1)
        for axis in (self.shard.tensor, self.shard.context):
            every = all_gather(every, axis)
        of_tokens, numbers_of = every[:, :-1], every[:, -1]
        order = numbers_of.argsort(stable=True)
        ids, pairs = of_tokens[order].flatten().sort(stable=True)
        first = torch.searchsorted(ids, ids)
        fits = torch.empty_like(ids, dtype=torch.bool)
        fits[pairs] = torch.arange(len(ids), device=ids.device) - first < most
        kept = torch.where(fits.view_as(of_tokens), of_tokens[order], self.experts)
        mine = kept[torch.searchsorted(numbers_of[order].contiguous(), rows.numbers)]
        dropped = (mine == self.experts).sum()
        padded[: rows.tokens] = mine
        return padded, dropped

    def _losses(
        self, logits: Tensor, share: Tensor, experts: Tensor, where: Geometry, rows: TokenRows
    ) -> dict[str, Tensor]:
        """This rank's parts of the losses, by name, of its tokens; ``share [tokens, experts]`` adds up to 1
        for every token."""
        settings, tokens, losses = self.settings, where.spans.tokens, dict[str, Tensor]()
        if settings.aux_loss:
            losses["balance"] = settings.aux_loss * self._balance(share, experts, where, rows)
        if settings.z_loss:
            losses["z"] = settings.z_loss * logits.logsumexp(-1).square().sum() / tokens
        return losses

    def _balance(self, share: Tensor, experts: Tensor, where: Geometry, rows: TokenRows) -> Tensor:
        """Experts times the sum of load times mean share, over what ``balance`` says."""
        settings, spans = self.settings, where.spans
        if settings.balance == "step":
            assert where.auxiliary is not None and where.auxiliary.loads is not None
            load = where.auxiliary.loads[self.layer].to(share.dtype)
            return self.experts * (load * share.sum(0)).sum() / spans.tokens
        groups = spans.sequences if settings.balance == "sequence" else 1
        length = spans.tokens // groups
        of = (rows.numbers // length == torch.arange(groups, device=share.device)[:, None]).to(share.dtype)
        chosen = torch.zeros_like(share).scatter_(1, experts, 1.0)  # a token's experts differ
        loads = of @ chosen
        for axis in (self.shard.tensor, self.shard.context):
            loads = all_reduce(loads, axis)
        # The mean over sequences, of which this rank has parts.
        return self.experts * (loads * (of @ share)).sum() / (settings.top_k * length * length * groups)

    def _counts(self, share: Tensor, experts: Tensor, dropped: Tensor | None) -> Tensor:
        """float64 ``[experts + 3]``: this rank's pairs of each expert, the sum of its tokens' entropies, its
        pairs that were dropped, and (0 so far) that found no place in a buffer."""
        ones = torch.ones((), dtype=torch.int64, device=experts.device).expand(experts.numel())
        loads = ones.new_zeros(self.experts).scatter_add_(0, experts.flatten(), ones)
        entropy = -torch.special.xlogy(share, share).sum()
        rest = torch.stack(
            (entropy.double(), loads.new_zeros(()) if dropped is None else dropped, loads.new_zeros(()))
        )
        return torch.cat((loads.double(), rest))
