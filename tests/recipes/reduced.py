"""Recipes made small enough for a few CPU ranks, all by the same rules."""

from typing import Any

from hexad.config import Config

RANKS = 4
_AXES = ("pipeline", "tensor", "context", "data")
"""In the order in which they get ranks: a recipe with more than two keeps the first two."""


def reduced(config: Config, ranks: int) -> tuple[list[str], int]:
    """Overrides that make a recipe small, and the number of ranks that they are for.

    Degrees become at most 2, as long as there are at most four ranks; schedule, ZeRO level, recompute,
    context method and what else the recipe says of its layout stay. The model keeps its family and every
    option of its preset, with two layers per stage, small widths and 16 experts. Sequences have 32 tokens.

    Args:
        config: of the recipe.
        ranks: of its cluster.
    """
    parallel = config.parallel
    inside = parallel.tensor * parallel.context
    wanted = {**parallel.model_dump(include={"pipeline", "tensor", "context"}), "data": ranks}
    wanted["data"] //= inside * parallel.pipeline
    degrees, world = dict.fromkeys(_AXES, 1), 1
    for axis in _AXES:
        if wanted[axis] > 1 and world < RANKS:
            degrees[axis], world = 2, 2 * world
    settings: dict[str, Any] = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    settings |= _experts(config, world // degrees["pipeline"])
    virtual = min(2, parallel.virtual_stages)
    stages = degrees["pipeline"] * (2 if parallel.schedule in ("zb_v", "dualpipe_v") else virtual)
    settings |= {"parallel.virtual_stages": virtual, **_model(config, 2 * stages)}
    if config.memory.recompute_layers != "all":
        settings["memory.recompute_layers"] = 1
    micro = min(2, config.batch.micro)
    samples = micro * degrees["data"] * 2 * degrees["pipeline"]
    settings |= {"batch.micro": micro, "batch.global": samples, "data.sequence": 32}
    if config.batch.ramp is not None:
        settings["batch.ramp"] = [samples // 2, samples // 2, samples]
    settings |= {"run.steps": 2, "run.device": "cpu", "data.tokenizer": "byte"}
    return [f"{name}={value}" for name, value in settings.items()], world


def _experts(config: Config, ranks: int) -> dict[str, Any]:
    """Degrees of the experts' grid, over the ranks of a stage."""
    settings: dict[str, Any] = {}
    for axis in ("expert_tensor", "expert"):
        degree = min(2, getattr(config.parallel, axis), ranks)
        settings[f"parallel.{axis}"] = degree
        ranks //= degree
    return settings


def _model(config: Config, layers: int) -> dict[str, Any]:
    """The sizes of the model."""
    model = config.model
    sizes = {"layers": layers, "hidden": 32, "heads": 8, "ffn_hidden": 64, "vocab": 320}
    if model.mla is None:
        sizes |= {"kv_heads": 8 if model.kv_heads == model.heads else 4, "head_dim": 8}
    else:
        sizes |= {"kv_heads": 8, "head_dim": 12}
        latent = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
        sizes |= {f"mla.{name}": size for name, size in latent.items()}
        sizes |= {"mla.q_rank": 16} if model.mla.q_rank is not None else {}
    if model.moe is not None:
        experts = {"experts": 16, "top_k": min(4, model.moe.top_k), "ffn_hidden": 16}
        sizes |= {f"moe.{name}": size for name, size in experts.items()}
        sizes |= {"moe.first_dense": 1} if model.moe.first_dense else {}
    return {f"model.{name}": size for name, size in sizes.items()}
