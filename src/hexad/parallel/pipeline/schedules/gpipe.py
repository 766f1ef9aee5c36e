"""All forwards, then all backwards."""

from __future__ import annotations

from ..schedule import Action, Schedule, looped


def gpipe(pipeline: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """GPipe (Huang et al., arXiv 1811.06965), breadth-first where a rank has several stages.

    A rank runs every microbatch through one of its stages before the next stage, and backward in the opposite
    order (Lamy-Poirier, arXiv 2211.05953). It holds the activations of the complete step:
    ``microbatches * virtual_stages``.
    """
    placement = looped(pipeline, virtual_stages)
    numbers = range(microbatches)
    ranks = []
    for rank in range(pipeline):
        stages = range(rank, len(placement), pipeline)
        forwards = [Action("F", stage, number) for stage in stages for number in numbers]
        backwards = [Action("BW", stage, number) for stage in reversed(stages) for number in numbers]
        ranks.append((*forwards, *backwards))
    return Schedule("gpipe", microbatches, placement, tuple(ranks))
