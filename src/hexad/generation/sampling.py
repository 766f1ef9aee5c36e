"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from hexad.config import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: choose among the k likeliest; 0 means all.
        top_p: choose among the fewest likeliest whose probabilities reach this sum (Holtzman et al.,
            arXiv 1904.09751).
        seed: of the draws.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise ConfigError("--temperature", f"found {self.temperature}, expected a number from 0")
        if self.top_k < 0:
            raise ConfigError("--top-k", f"found {self.top_k}, expected 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError("--top-p", f"found {self.top_p}, expected a number above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("--seed", f"found {self.seed}, expected 0 to 2^63 - 1")


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[sequences]`` next tokens from ``[sequences, vocab]`` logits on the CPU."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.double() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, places = probabilities.sort(dim=-1, descending=True)
        # A token stays if those before it do not reach top_p yet; the likeliest always stays.
        ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= sampling.top_p, 0.0)
        probabilities = torch.zeros_like(ordered).scatter_(-1, places, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
