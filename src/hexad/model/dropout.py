"""Dropout that depends on what is dropped, never on who computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draws:
    """What a microbatch's random numbers are drawn from.

    Attributes:
        seed: of the run.
        step: of the engine, counted from 0.
        sequence: number of the microbatch's first sequence in the step's global batch.
    """

    seed: int
    step: int
    sequence: int
