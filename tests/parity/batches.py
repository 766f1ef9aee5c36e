"""The data of parity: random samples, the same in every layout, dealt to the data ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hexad.config.model import ModelSettings
from hexad.dataset.load.microbatch import IGNORED, Microbatch

if TYPE_CHECKING:
    from .harness import Case


def global_batch(case: Case, step: int) -> list[Microbatch]:
    """The step's samples, one per row-sized microbatch, whatever the layout."""
    config = case.config()
    length, vocab = config.data.sequence, int(config.model.vocab)
    generator = np.random.default_rng(100 + step)
    samples = []
    for index in range(config.batch.global_):
        tokens = generator.integers(0, vocab, length + 1)
        labels = tokens[1:].copy()
        # Sample 0 loses most of its targets: ranks then differ much in their number.
        labels[generator.random(length) < case.variant.masked * (2.0 if index == 0 else 0.7)] = IGNORED
        documents = None
        if case.variant.documents == "isolate":
            cuts = sorted({0, *generator.integers(1, length, index % 4 * (length // 12)).tolist()})
            documents = (*cuts, length)
        sample = Microbatch(torch.tensor(tokens[None, :-1]), torch.tensor(labels[None]), documents)
        samples.append(_with_experts(case.variant.imposed, sample, config.model, generator))
    return samples


def _with_experts(
    imposed: str, sample: Microbatch, model: ModelSettings, generator: np.random.Generator
) -> Microbatch:
    """The sample with random experts, and weights of these, imposed on most of its tokens."""
    if not imposed:
        return sample
    assert model.moe is not None
    shape = *sample.tokens.shape, len(model.expert_layers), model.moe.experts
    experts = torch.tensor(generator.random(shape)).argsort(-1)[..., : model.moe.top_k]
    experts[torch.tensor(generator.random(shape[:-1])) < 0.2] = -1
    weights = torch.tensor(generator.random(experts.shape)) if imposed == "weights" else None
    return replace(sample, experts=experts, expert_weights=weights)


def microbatches(case: Case, step: int, data_rank: int) -> list[Microbatch]:
    """The microbatches of one data rank, in the loader's order."""
    samples, micro = global_batch(case, step), case.variant.micro
    stride = micro * case.data
    return [
        _join(samples[start + data_rank * micro : start + (data_rank + 1) * micro])
        for start in range(0, len(samples), stride)
    ]


def _join(rows: list[Microbatch]) -> Microbatch:
    documents: list[int] = []
    for index, row in enumerate(rows):
        if row.documents is not None:
            documents += [index * row.tokens.shape[1] + start for start in row.documents[:-1]]
    total = sum(row.tokens.numel() for row in rows)
    tokens, labels, experts, weights = (
        torch.cat([getattr(row, name) for row in rows]) if getattr(rows[0], name) is not None else None
        for name in ("tokens", "labels", "experts", "expert_weights")
    )
    assert tokens is not None and labels is not None
    boundaries = (*documents, total) if documents else None
    return Microbatch(tokens, labels, boundaries, experts=experts, expert_weights=weights)
