"""Code that families with experts share: how ``model.moe`` reads and is written in ``config.json``."""

from typing import Any

from hexad.config.model import ModelSettings, MoeSettings

from .family import ConfigFile


def softmax_weights(norm_topk: bool, top_k: int) -> dict[str, Any]:
    """Settings of weights by a softmax over all experts; ``norm_topk``: divided by the sum of the weights
    of the chosen ones, which for one expert makes them 1."""
    if norm_topk and top_k == 1:
        return {"score": "topk_softmax"}
    return {"score": "softmax_topk", "normalise": norm_topk}


def normalised(moe: MoeSettings) -> bool:
    """Whether the weights of a token's experts add up to 1, or to ``scale``."""
    return moe.score == "topk_softmax" or (moe.normalise and moe.top_k > 1)


def chosen_by_softmax(model: ModelSettings) -> bool:
    """Whether a model has experts that are weighted by a softmax, without groups, a scale or shared
    experts."""
    moe = model.moe
    return (
        moe is not None
        and not moe.biased
        and not moe.shared_experts
        and moe.groups == moe.top_groups
        and moe.scale == 1
        and not moe.forced
    )


def whole_numbers(keys: ConfigFile, key: str) -> list[int]:
    """A list of whole numbers from 0; null is an empty one."""
    values = keys.raw.get(key)
    if values is None:
        return []
    if not isinstance(values, list) or not all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    ):
        raise keys.problem(key, "expected a list of whole numbers from 0")
    return values
