"""One rank's part of a batch: receive the hidden states of the stage before, compute this stage, and send the
result on, or on the last stage choose the next tokens."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from hexad.comm import Pending, all_gather, receive_async, send_async
from hexad.model.replay import Replay
from hexad.model.transformer import Transformer
from hexad.parallel.context.exchange import selected_rows
from hexad.topology.mesh import Axis

from .batch import TokenBatch, TokenSpan
from .cache import BatchCache
from .latent_memory import LatentMemory
from .paged_attention import KeyValueMemory
from .requests import Logprob, RequestUpdate, RoutedExperts
from .sampler import Constraint, Sampler, log_probabilities
from .sequence import Sequence

_ROWS = 512
"""Rows of logits that exist at once, where a prompt's log-probabilities are computed."""


class Worker:
    """Computes batches on one rank.

    Args:
        model: this rank's stage.
        memory: its cache, by layer.
        pipeline: the axis of the stages.
        constrain: makes the constraint of a grammar.
    """

    def __init__(
        self,
        model: Transformer,
        memory: Mapping[int, KeyValueMemory | LatentMemory],
        pipeline: Axis,
        constrain: Callable[[str], Constraint] | None = None,
    ) -> None:
        self.model, self.memory, self.pipeline = model, memory, pipeline
        shard = model.shard
        self.first = shard.tensor.rank == 0 and shard.context.rank == 0
        self.sampler = Sampler(constrain, shard.exact) if model.inventory.last and self.first else None
        self._sequences: dict[int, Sequence] = {}  # where the sampler is
        self._sending: deque[Pending] = deque(maxlen=pipeline.size)  # what is sent is kept

    @torch.inference_mode()
    def compute_batch(self, batch: TokenBatch) -> list[RequestUpdate] | None:
        """Compute a batch; all ranks of a replica do this together, with the same batches in the same order.

        Returns:
            The sequences' updates, on the rank that has the sampler; with the experts of tokens on the first
            rank of every stage. None on others.
        """
        if self.sampler is not None:
            for sequence in batch.begun:
                self.sampler.begin(sequence)
                self._sequences[sequence.number] = sequence
            for number in batch.ended:
                self._sequences.pop(number, None)
        model, device = self.model, self.model.shard.device
        cache = BatchCache(self.memory, batch, model.shard.context, device)
        routed = any(span.routing for span in batch.spans)
        replay = Replay(model.model.expert_layers) if routed else None
        hidden = model(cache.tokens, inputs=self._received(cache.share), cache=cache, replay=replay)
        updates: dict[int, RequestUpdate] = {}
        if model.inventory.last:
            updates = self._updates(hidden, cache)
        else:
            self._send(hidden)
        if replay is not None:
            for number, experts in self._routing(replay, cache).items():
                updates.setdefault(number, RequestUpdate(number)).routing = experts
        return [*updates.values()] if self.sampler is not None or (routed and self.first) else None

    def forget(self) -> None:
        """Forget all sequences: no others follow those that are under way."""
        self._sequences.clear()

    def _routing(self, replay: Replay, cache: BatchCache) -> dict[int, RoutedExperts]:
        """The experts of spans in this stage's layers, by the number of the sequence, on the stage's first
        rank; all tensor and context ranks, among which tokens are divided, call this together."""
        shard, moe = self.model.shard, self.model.model.moe
        assert moe is not None, "no experts are asked for without any"
        kept = [chosen for _, chosen in sorted(replay.kept.items())]
        gathered: list[Tensor] = []
        for name, dtype in (("experts", torch.int32), ("weights", shard.wide)):
            values = torch.empty((cache.total, 0, moe.top_k), dtype=dtype)  # a stage without experts
            if kept:
                rows = torch.stack([getattr(chosen, name) for chosen in kept], dim=1).to(dtype)
                rows = all_gather(rows.contiguous(), shard.tensor)[: cache.share]
                values = all_gather(rows.contiguous(), shard.context)[: cache.total]
            gathered.append(values)
        if not self.first:
            return {}
        sizes = [len(span.tokens) for span in cache.batch.spans]
        arrays = zip(cache.batch.spans, *(values.cpu().split(sizes) for values in gathered))
        # Copies: a view would hold those of the whole batch, with the tokens of other texts.
        return {
            span.number: RoutedExperts(experts.numpy().copy(), weights.numpy().copy())
            for span, experts, weights in arrays
            if span.routing
        }

    def _received(self, tokens: int) -> Tensor | None:
        """``[tokens, hidden]`` of the stage before; None on the first stage."""
        model = self.model
        if model.inventory.first:
            return None
        buffer = torch.empty(tokens, model.hidden, dtype=model.dtype, device=model.shard.device)
        return receive_async(buffer, self.pipeline, self.pipeline.rank - 1).wait()

    def _send(self, hidden: Tensor) -> None:
        """Send the hidden states to the next stage. Nothing waits until they are there: no more batches
        are under way than there are stages, so that those before have arrived."""
        self._sending.append(send_async(hidden.contiguous(), self.pipeline, self.pipeline.rank + 1))

    def _updates(self, hidden: Tensor, cache: BatchCache) -> dict[int, RequestUpdate]:
        """The chosen tokens and the log-probabilities of prompts, by the number of the sequence, where the
        sampler is; all tensor and context ranks of the last stage call this together."""
        ends = [*accumulate(len(span.tokens) for span in cache.batch.spans)]
        last = [(span, end - 1) for span, end in zip(cache.batch.spans, ends) if span.last]
        updates: dict[int, RequestUpdate] = {}
        if last:
            logits = self._logits(hidden, [row for _, row in last], cache)
            if self.sampler is not None:
                sequences = [self._sequences[span.number] for span, _ in last]
                updates = {update.number: update for update in self.sampler.choose(logits, sequences)}
        for span, end in zip(cache.batch.spans, ends):
            if span.targets:
                logprobs = self._prompt_logprobs(hidden, span, end - len(span.tokens), cache)
                updates.setdefault(span.number, RequestUpdate(span.number)).prompt_logprobs = logprobs
        return updates

    def _prompt_logprobs(
        self, hidden: Tensor, span: TokenSpan, first: int, cache: BatchCache
    ) -> tuple[Logprob, ...]:
        """The log-probabilities of the tokens that follow a span's tokens in its prompt."""
        logprobs: list[Logprob] = []
        for begin in range(0, len(span.targets), _ROWS):
            targets = torch.tensor(span.targets[begin : begin + _ROWS], device=hidden.device)
            rows = range(first + begin, first + begin + len(targets))
            logits = self._logits(hidden, rows, cache)
            if self.sampler is not None:
                count = self._sequences[span.number].request.sampling.prompt_logprobs
                counts = [count] * len(targets)
                logprobs += log_probabilities(logits, targets, counts, self.sampler.exactly)
        return tuple(logprobs)

    def _logits(self, hidden: Tensor, rows: abc.Sequence[int], cache: BatchCache) -> Tensor:
        """``[rows, vocab]`` logits of some of a batch's tokens, without padding, in at least float32; all
        tensor and context ranks of the stage call this together."""
        context, places = self.model.shard.context, torch.tensor(rows, device=hidden.device)
        numbers = None
        if context.size > 1:
            numbers = torch.arange(cache.begin, cache.begin + cache.share, device=hidden.device)
        chosen = selected_rows(hidden, places, numbers, context)
        shards = all_gather(self.model.logits(chosen).contiguous(), self.model.shard.tensor)
        logits = shards.unflatten(0, (-1, len(chosen))).transpose(0, 1).flatten(1)[:, : self.model.vocab]
        return logits if logits.dtype == torch.float64 else logits.float()
