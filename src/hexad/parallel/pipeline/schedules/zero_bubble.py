"""ZB-H1 and ZB-H2: weight gradients fill a rank's waiting time (Qi et al., arXiv 2401.10241)."""

from __future__ import annotations

from ..schedule import Action, Schedule, looped


def zb_h1(pipeline: int, microbatches: int) -> Schedule:
    """As many forwards ahead as 1F1B. Every rank holds up to ``p`` activations, like 1F1B's first rank."""
    return _handcrafted("zb_h1", pipeline, microbatches, 1)


def zb_h2(pipeline: int, microbatches: int) -> Schedule:
    """Twice as many forwards ahead, for no bubble where F, B and W take equally long.

    Every rank holds up to ``2 * p - 1`` activations.
    """
    return _handcrafted("zb_h2", pipeline, microbatches, 2)


def _handcrafted(name: str, pipeline: int, microbatches: int, depth: int) -> Schedule:
    """Rank ``r`` runs ``depth * (p - r - 1)`` forwards ahead and defers ``depth * r`` weight gradients.

    Deferring them makes the gradients of the inputs, for which previous ranks wait, available earlier. They
    are computed at the end, while previous ranks still run their backwards.
    """
    ranks = [
        _order(rank, microbatches, depth * (pipeline - rank - 1), depth * rank) for rank in range(pipeline)
    ]
    return Schedule(name, microbatches, looped(pipeline, 1), tuple(ranks))


def _order(stage: int, microbatches: int, ahead: int, debt: int) -> tuple[Action, ...]:
    ahead = min(ahead, microbatches)
    actions = [Action("F", stage, number) for number in range(ahead)]
    weights = 0
    for backward in range(microbatches):
        forward = ahead + backward
        if forward < microbatches:
            actions.append(Action("F", stage, forward))
        actions.append(Action("B", stage, backward))
        if backward + 1 - weights > debt or forward >= microbatches:
            actions.append(Action("W", stage, weights))
            weights += 1
    actions += [Action("W", stage, number) for number in range(weights, microbatches)]
    return tuple(actions)
