"""Alternating forwards and backwards, with one stage per rank or several."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from ..schedule import Action, Schedule, looped


def one_forward_one_backward(pipeline: int, microbatches: int) -> Schedule:
    """1F1B, also called PipeDream-Flush (Narayanan et al., arXiv 2006.09503).

    Rank ``r`` of ``p`` runs ``p - r - 1`` forwards ahead, and so holds at most ``p - r`` activations.
    """
    ranks = []
    for rank in range(pipeline):
        forwards = [Action("F", rank, number) for number in range(microbatches)]
        backwards = [Action("BW", rank, number) for number in range(microbatches)]
        ranks.append(in_turns(forwards, backwards, pipeline - rank - 1))
    return Schedule("1f1b", microbatches, looped(pipeline, 1), tuple(ranks))


def interleaved(pipeline: int, microbatches: int, virtual_stages: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473); with one stage per rank it is 1F1B.

    Microbatches run in groups, each group through all of a rank's stages. Rank ``r`` of ``p`` runs
    ``2 * (p - r - 1) + (v - 1) * group`` forwards ahead. If the groups do not divide the microbatches, the
    remainder is spread over them: a small group at the end would make every rank wait once per stage.

    Args:
        pipeline: ranks ``p``.
        microbatches: any number from 1.
        virtual_stages: stages per rank, ``v``.
        group: microbatches of one group, from 1. The default, the number of ranks, is the smallest that keeps
            all ranks busy; a larger one leaves more time for messages and holds more activations.
    """
    if virtual_stages == 1:
        return replace(one_forward_one_backward(pipeline, microbatches), name="interleaved")
    groups = _groups(microbatches, pipeline if group is None else group)
    smallest, largest = len(groups[0]), len(groups[-1])
    ranks = []
    for rank in range(pipeline):
        order = [
            (stage, number)
            for numbers in groups
            for stage in range(rank, pipeline * virtual_stages, pipeline)
            for number in numbers
        ]
        forwards = [Action("F", stage, number) for stage, number in order]
        last = (virtual_stages - 1) * pipeline + 2 * rank
        backwards = [Action("BW", last - stage, number) for stage, number in order]
        # With groups of fewer microbatches than ranks, the first rank must be ahead of the last by less than
        # two groups: otherwise they would deadlock, each waiting for an action one group away.
        ahead = max(2 * (pipeline - rank - 1), 2 * (pipeline - smallest) - 1)
        ranks.append(in_turns(forwards, backwards, ahead + (virtual_stages - 1) * largest))
    return Schedule("interleaved", microbatches, looped(pipeline, virtual_stages), tuple(ranks))


def _groups(microbatches: int, size: int) -> list[range]:
    """Microbatches in groups of at least ``size`` (or all, if they are fewer), ascending and even."""
    count = max(microbatches // size, 1)
    small, larger = divmod(microbatches, count)
    lengths = [small] * (count - larger) + [small + 1] * larger
    return [range(begin, begin + length) for begin, length in zip(accumulate(lengths, initial=0), lengths)]


def in_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """``ahead`` forwards, then alternating forwards and backwards, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    turns = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return (*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :])
