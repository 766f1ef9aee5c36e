"""Exchanges of tokens by DeepEP (the package ``deep_ep``), which sends a token to a rank once, however many
of its experts are there."""

from __future__ import annotations

from functools import cached_property, partial
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hexad.topology.mesh import Axis

from .collectives import on_stream


class Arrival(NamedTuple):
    """Tokens that a rank's experts were sent.

    Attributes:
        x: ``[tokens, hidden]``; with a static size, those beyond the last one have no meaning.
        experts: int64 ``[tokens, top_k]``, numbers on this rank; -1 of others, and of tokens beyond the last.
        weights: ``[tokens, top_k]``.
        pairs: of tokens and experts of this rank; None where the host does not wait for it.
        handle: DeepEP's, of the way there and back.
    """

    x: Tensor
    experts: Tensor
    weights: Tensor
    pairs: int | None
    handle: Any


class DeepEp:
    """DeepEP's buffer of an axis's ranks, used by all their exchanges in turn."""

    def __init__(self, axis: Axis) -> None:
        self._axis, self._module = axis, import_module("deep_ep")
        self._buffer: Any = None
        self._row = 0

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, count: int, most: int | None) -> Arrival:
        """Send tokens to the ranks of their experts.

        Args:
            x: ``[tokens, hidden]``.
            experts: int64 ``[tokens, top_k]``, -1 of pairs that are not sent.
            weights: ``[tokens, top_k]``.
            count: of all experts.
            most: tokens of the rank that has most, if the host shall not wait; it does where DeepEP cannot do
                without: between hosts, and in old versions.
        """
        buffer = self._made(x)
        experts = experts.to(getattr(self._module, "topk_idx_t", torch.int64)).contiguous()

        def action() -> Arrival:
            per_rank, per_host, per_expert, present, _ = buffer.get_dispatch_layout(experts, count)
            static = {}
            if most is not None and per_host is None and self._sizes:
                static["num_worst_tokens"] = most * self._axis.size
            arrived, numbers, values, counts, handle, _ = buffer.dispatch(
                x.contiguous(),
                topk_idx=experts,
                topk_weights=weights.contiguous(),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_host,
                is_token_in_rank=present,
                num_tokens_per_expert=per_expert,
                **static,
            )
            return Arrival(arrived, numbers.long(), values, None if static else sum(counts), handle)

        pair = experts.element_size() + weights.element_size()
        return on_stream("all_to_all", self._axis, self._away(x, experts, pair), action)

    def again(self, x: Tensor, experts: Tensor, handle: Any) -> Tensor:
        """Send other rows the same way, without weights."""
        action = partial(self._made(x).dispatch, x.contiguous(), handle=handle)
        result: Tensor = on_stream("all_to_all", self._axis, self._away(x, experts), action)[0]
        return result

    def combine(
        self, x: Tensor, experts: Tensor, handle: Any, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The sums of each token's rows over the ranks that it was sent to, and those of its weights.

        Args:
            x: ``[tokens that arrived, hidden]``.
            experts: of the tokens that were sent.
            handle: of their way.
            weights: ``[tokens that arrived, top_k]``.
        """
        action = partial(self._made(x).combine, x.contiguous(), handle, topk_weights=weights)
        sent = self._away(x, experts, 0 if weights is None else weights.element_size())
        sums, of_weights, _ = on_stream("all_to_all", self._axis, sent, action)
        return sums, of_weights

    @cached_property
    def _sizes(self) -> bool:
        """Whether this version can do without the host waiting for the number of tokens."""
        return "num_worst_tokens" in signature(self._module.Buffer.dispatch).parameters

    def _away(self, x: Tensor, experts: Tensor, pair: int = 0) -> int:
        """Bytes that leave this rank with an even load: a token and its pairs, at most once for each rank."""
        (tokens, top_k), size = experts.shape, self._axis.size
        row = x.shape[1] * x.element_size() + top_k * pair
        return tokens * min(top_k, size) * (size - 1) // size * row

    def _made(self, x: Tensor) -> Any:
        """The buffer, of the size that DeepEP suggests; all ranks of the axis make it together."""
        row, size = x.shape[1] * max(x.element_size(), 2), self._axis.size
        if row > self._row:
            kind = self._module.Buffer
            suggestions = kind.get_dispatch_config(size), kind.get_combine_config(size)
            sizes = (
                max(suggestion.get_nvl_buffer_size_hint(row, size) for suggestion in suggestions),
                max(suggestion.get_rdma_buffer_size_hint(row, size) for suggestion in suggestions),
            )
            self._buffer, self._row = kind(self._axis.group, *sizes), row
        return self._buffer
