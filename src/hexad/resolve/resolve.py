"""Where what depends on world and tokenizer is resolved: ``auto`` becomes a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hexad.config import Config, ConfigError, blaming
from hexad.config.schema import ParallelSettings
from hexad.model.configuration import complete_model
from hexad.optim.learning_rate import decay_steps
from hexad.topology.layout import Layout

from .checks import check_config
from .stages import PipelinePlan, pipeline_plan


@dataclass(frozen=True)
class Resolved:
    """A configuration that is ready to run.

    Attributes:
        config: with a number for every ``auto`` that the run uses. ``parallel.schedule: auto`` and its
            ``schedule_memory`` stay: the name of a search and its default limit, whose result is in ``plan``.
        layout: of the world.
        plan: the pipeline's stages and schedule.
    """

    config: Config
    layout: Layout
    plan: PipelinePlan


def resolve(config: Config, layout: Layout, vocab: int | None = None) -> Resolved:
    """Resolve a configuration for a layout, and check that everything fits together.

    Resolving again changes nothing.

    Args:
        config: as the user gave it.
        layout: of the world.
        vocab: the tokenizer's vocabulary size; by default the tokenizer is read where ``model.vocab`` is
            ``auto``.

    Raises:
        ConfigError: naming the setting that does not fit, the value found and the fix.
    """
    model = complete_model(config.model, config.data.sequence)
    config = config.model_copy(update={"model": model})
    check_config(config, layout)
    if model.vocab == "auto":
        model = model.model_copy(update={"vocab": _tokenizer_vocab(config) if vocab is None else vocab})
    elif vocab is not None and model.vocab < vocab:
        raise ConfigError(
            "model.vocab",
            f"found {model.vocab}, less than the tokenizer's {vocab} ({config.data.tokenizer}); "
            "use auto or a larger number",
        )
    schedule = config.lr_schedule
    lr_schedule = schedule.model_copy(update={"decay_steps": decay_steps(schedule, config.run.steps)})
    update = {"model": model, "lr_schedule": lr_schedule, "parallel": resolved_parallel(config, layout)}
    config = config.model_copy(update=update)
    plan = pipeline_plan(config, layout)
    _check_plan(config, plan)
    return Resolved(config, layout, plan)


def resolved_parallel(config: Config, layout: Layout) -> ParallelSettings:
    """With degrees and limits; those of schedules other than the one chosen stay as they are."""
    settings = config.parallel
    found: dict[str, Any] = {"data": layout.data}
    if settings.schedule == "interleaved" and settings.schedule_group == "auto":
        found["schedule_group"] = layout.pipeline
    if settings.bucket_mb == "auto":
        found["bucket_mb"] = max(25.0, 4.0 * int(layout.data))
    return settings.model_copy(update=found)


def _tokenizer_vocab(config: Config) -> int:
    from hexad.dataset.tokenizer import load_tokenizer

    with blaming("data.tokenizer"):
        return load_tokenizer(config.data.tokenizer).vocab_size


def _check_plan(config: Config, plan: PipelinePlan) -> None:
    """What can be said only once the stages and the schedule are known."""
    layers, largest = config.memory.recompute_layers, max(map(len, plan.layers))
    if layers != "all" and layers > largest:
        raise ConfigError(
            "memory.recompute_layers",
            f"found {layers}, but no stage has more than {largest} of the model's {config.model.layers} "
            "layers; use all or a smaller number",
        )
    if config.run.compile == "full" and plan.schedule.split_backward:
        raise ConfigError(
            "run.compile",
            f"found full with parallel.schedule {config.parallel.schedule}, which defers weight gradients; "
            "use gpipe, 1f1b or interleaved, or pointwise",
        )
