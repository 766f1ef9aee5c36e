"""One rank's part of a step: receive the hidden states of the stage before, compute this stage, and pass the
result on, or on the last stage choose the next tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hexad.comm import Pending, all_gather, receive_async, send_async
from hexad.model.replay import Replay
from hexad.model.transformer import Transformer
from hexad.parallel.context.exchange import selected_rows
from hexad.topology.mesh import Axis

from .cache import StepCache
from .latent_memory import LatentMemory
from .paged_attention import Memory
from .requests import Logprob, RoutedExperts
from .sampler import Choice, Constraint, Sampler, log_probabilities
from .scheduler import Part, Step

_ROWS = 512
"""Of logits that exist at once, where a prompt's log-probabilities are computed."""


class Outcome(NamedTuple):
    """What a step has brought.

    Attributes:
        choices: the next token of a sequence, by its number.
        scores: the log-probabilities of a prompt's tokens, by the sequence's number and the position of the
            first of them less one.
        routing: the experts of a sequence's tokens in the layers of one stage, by its number and the position
            of the first token.
    """

    choices: dict[int, Choice]
    scores: dict[int, tuple[int, list[Logprob]]]
    routing: dict[int, tuple[int, RoutedExperts]]


class Worker:
    """Computes steps on one rank.

    Args:
        model: this rank's stage.
        memory: its cache, by layer.
        pipeline: the axis of the stages.
        constrain: makes the constraint of a grammar.
    """

    def __init__(
        self,
        model: Transformer,
        memory: Mapping[int, Memory | LatentMemory],
        pipeline: Axis,
        constrain: Callable[[str], Constraint] | None = None,
    ) -> None:
        self.model, self.memory, self.pipeline = model, memory, pipeline
        shard = model.shard
        self.first = shard.tensor.rank == 0 and shard.context.rank == 0
        self.sampler = Sampler(constrain, shard.exact) if model.inventory.last and self.first else None
        self._sending: deque[Pending] = deque(maxlen=pipeline.size)  # what is sent is kept

    @torch.inference_mode()
    def compute(self, step: Step) -> Outcome | None:
        """Compute a step; all ranks of a replica do this together, with the same steps in the same order.

        Returns:
            The outcome, on the rank that has the sampler; with the experts of tokens on the first rank of
            every stage. None on others.
        """
        if self.sampler is not None:
            for number, request in step.opened:
                self.sampler.open(number, request)
            for number in step.closed:
                self.sampler.close(number)
        if not step.parts:
            return None
        model, device = self.model, self.model.shard.device
        cache = StepCache(self.memory, step.parts, model.shard.context, device)
        replay = Replay(model.model.expert_layers) if any(part.routing for part in step.parts) else None
        hidden = model(cache.tokens, inputs=self._received(cache.share), cache=cache, replay=replay)
        if not model.inventory.last:
            self._send(hidden)
        routing = {} if replay is None else self._routing(replay, cache)
        if model.inventory.last:
            return self._outcome(hidden, cache, routing)
        return Outcome({}, {}, routing) if replay is not None and self.first else None

    def _routing(self, replay: Replay, cache: StepCache) -> dict[int, tuple[int, RoutedExperts]]:
        """The experts of this stage's layers, on the stage's first rank; all tensor and context ranks, among
        which tokens are divided, call this together."""
        shard, moe = self.model.shard, self.model.model.moe
        assert moe is not None, "no experts are asked for without any"
        kept = [chosen for _, chosen in sorted(replay.kept.items())]
        wholes: list[Tensor] = []
        for name, dtype in (("experts", torch.int32), ("weights", shard.wide)):
            whole = torch.empty((cache.total, 0, moe.top_k), dtype=dtype)  # a stage without experts
            if kept:
                rows = torch.stack([getattr(chosen, name) for chosen in kept], dim=1).to(dtype)
                rows = all_gather(rows.contiguous(), shard.tensor)[: cache.share]
                whole = all_gather(rows.contiguous(), shard.context)[: cache.total]
            wholes.append(whole)
        if not self.first:
            return {}
        sizes = [len(part.tokens) for part in cache.parts]
        arrays = zip(cache.parts, *(whole.cpu().split(sizes) for whole in wholes))
        # Copies: a view would hold those of the whole step, with the tokens of other texts.
        return {
            part.number: (part.begin, RoutedExperts(experts.numpy().copy(), weights.numpy().copy()))
            for part, experts, weights in arrays
            if part.routing
        }

    def _received(self, tokens: int) -> Tensor | None:
        """``[tokens, hidden]`` of the stage before; None on the first stage."""
        model = self.model
        if model.inventory.first:
            return None
        buffer = torch.empty(tokens, model.hidden, dtype=model.dtype, device=model.shard.device)
        return receive_async(buffer, self.pipeline, self.pipeline.rank - 1).wait()

    def _send(self, hidden: Tensor) -> None:
        """Send the hidden states to the next stage. Nothing waits until they are there: no more steps are
        under way than there are stages, so that those before have arrived."""
        self._sending.append(send_async(hidden.contiguous(), self.pipeline, self.pipeline.rank + 1))

    def _outcome(
        self, hidden: Tensor, cache: StepCache, routing: dict[int, tuple[int, RoutedExperts]]
    ) -> Outcome | None:
        ends = [*accumulate(len(part.tokens) for part in cache.parts)]
        drawing = [(part, end - 1) for part, end in zip(cache.parts, ends) if part.draws]
        scored = [(part, end - len(part.tokens)) for part, end in zip(cache.parts, ends) if part.targets]
        choices: dict[int, Choice] = {}
        if drawing:
            logits = self._logits(hidden, [row for _, row in drawing], cache)
            if self.sampler is not None:
                numbers = [part.number for part, _ in drawing]
                choices = dict(zip(numbers, self.sampler.choose(logits, numbers)))
        scores = {part.number: (part.begin, self._scores(hidden, part, row, cache)) for part, row in scored}
        return None if self.sampler is None else Outcome(choices, scores, routing)

    def _scores(self, hidden: Tensor, part: Part, first: int, cache: StepCache) -> list[Logprob]:
        """The log-probabilities of the tokens that follow a part's tokens in its prompt."""
        logprobs: list[Logprob] = []
        for begin in range(0, len(part.targets), _ROWS):
            targets = torch.tensor(part.targets[begin : begin + _ROWS], device=hidden.device)
            rows = range(first + begin, first + begin + len(targets))
            logits = self._logits(hidden, rows, cache)
            if self.sampler is not None:
                count = self.sampler.scoring(part.number)
                counts = [count] * len(targets)
                logprobs += log_probabilities(logits, targets, counts, self.sampler.exactly)
        return logprobs

    def _logits(self, hidden: Tensor, rows: Sequence[int], cache: StepCache) -> Tensor:
        """``[rows, vocab]`` logits of some of a step's tokens, without padding, in at least float32; all
        tensor and context ranks of the stage call this together."""
        context, wanted = self.model.shard.context, torch.tensor(rows, device=hidden.device)
        numbers = None
        if context.size > 1:
            numbers = torch.arange(cache.begin, cache.begin + cache.share, device=hidden.device)
        chosen = selected_rows(hidden, wanted, numbers, context)
        parts = all_gather(self.model.logits(chosen).contiguous(), self.model.shard.tensor)
        whole = parts.unflatten(0, (-1, len(chosen))).transpose(0, 1).flatten(1)[:, : self.model.vocab]
        return whole if whole.dtype == torch.float64 else whole.float()
