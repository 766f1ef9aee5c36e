"""Resolves what depends on world and tokenizer: ``auto`` becomes a number."""

from dataclasses import dataclass
from typing import Any

from hexad.config import Config, ConfigError, blaming
from hexad.config.schema import DataSettings, ParallelSettings, prefixes
from hexad.model.configuration import complete_model
from hexad.optim.schedule import decay_steps
from hexad.parallel.context.slice import largest_group
from hexad.parallel.tensor.linear_inventory import forward_chunks
from hexad.topology.devices import cpu_has_bf16
from hexad.topology.layout import Layout

from .checks import check_config
from .degree_checks import heads_of_rank
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


def resolve(config: Config, layout: Layout, vocab: int | None = None, bf16: bool | None = None) -> Resolved:
    """Resolve a configuration for a layout, and check that everything fits together.

    Resolving again changes nothing.

    Args:
        config: as the user gave it. What knows the devices of all ranks resolves ``precision.dtype`` before
            (:func:`with_dtype`).
        layout: of the world.
        vocab: the tokenizer's vocabulary size; by default the tokenizer is read where ``model.vocab`` is
            ``auto``.
        bf16: whether the device that is planned for computes bf16 in hardware; by default
            :func:`planned_bf16`.

    Raises:
        ConfigError: naming the setting that does not fit, the value found and the fix.
    """
    model = complete_model(config.model, config.data.sequence)
    config = config.model_copy(update={"model": model, "data": resolved_data(config)})
    check_config(config, layout)
    config = with_dtype(config, planned_bf16(config) if bf16 is None else bf16)
    if model.vocab == "auto":
        model = model.model_copy(update={"vocab": _tokenizer_vocab(config) if vocab is None else vocab})
    elif vocab is not None:
        check_vocab(config, vocab)
    schedule = config.lr_schedule
    lr_schedule = schedule.model_copy(update={"decay_steps": decay_steps(schedule, config.complete_steps)})
    parallel = resolved_parallel(config, layout)
    if parallel.tensor_chunks == "auto":
        parallel = parallel.model_copy(update={"tensor_chunks": tensor_chunks(config, layout)})
    update = {"model": model, "lr_schedule": lr_schedule, "parallel": parallel}
    config = config.model_copy(update=update)
    plan = pipeline_plan(config, layout)
    _check_plan(config, plan)
    return Resolved(config, layout, plan)


def check_vocab(config: Config, size: int) -> None:
    """Refuse a ``model.vocab`` below the ``size`` of the tokenizer's vocabulary.

    Raises:
        ConfigError: naming both.
    """
    if int(config.model.vocab) < size:
        raise ConfigError(
            "model.vocab",
            f"found {config.model.vocab}, less than the tokenizer's {size} ({config.data.tokenizer}); use "
            "auto or a larger number",
        )


def resolved_data(config: Config) -> DataSettings:
    """The ``data`` settings with ``documents: isolate`` where samples are of whole documents, as of data with
    a loss mask; and with the run's copy of a tokenizer that is gone."""
    settings = config.data
    resolved: dict[str, Any] = {}
    if settings.tokenizer != "byte":
        from hexad.checkpoint.kept_tokenizer import tokenizer_of_run

        resolved["tokenizer"] = tokenizer_of_run(config)
    if settings.packing == "whole" or (settings.packing == "auto" and _masked(settings)):
        resolved["documents"] = "isolate"
    return settings.model_copy(update=resolved)


def _masked(settings: DataSettings) -> bool:
    """Whether any data has a loss mask."""
    sources = (settings.train, *settings.validation_sets.values())
    all_prefixes = [prefix for source in sources for prefix in prefixes(source)]
    if not all_prefixes:  # where none is read, commands start without numpy
        return False
    from hexad.dataset.masks import mask_path

    return any(mask_path(prefix).is_file() for prefix in all_prefixes)


def planned_bf16(config: Config) -> bool:
    """Whether the device that a run is planned for is assumed to compute bf16 in hardware: a GPU does; with
    ``run.device: cpu`` it is this host's CPU."""
    return config.run.device != "cpu" or cpu_has_bf16()


def with_dtype(config: Config, bf16: bool) -> Config:
    """The configuration without ``precision.dtype: auto``; ``bf16``: whether the devices of all ranks compute
    it in hardware."""
    if config.precision.dtype != "auto":
        return config
    precision = config.precision.model_copy(update={"dtype": "bf16" if bf16 else "fp32"})
    return config.model_copy(update={"precision": precision})


def _resolved_context(config: Config) -> dict[str, Any]:
    """Numbers and names for ``auto``; settings of a method or a degree that is not used stay as they are."""
    settings = config.parallel
    resolved: dict[str, Any] = {}
    if settings.context == 1:
        return resolved
    if settings.context_method == "ulysses_ring" and settings.context_ulysses == "auto":
        heads = heads_of_rank(config.model, settings.tensor)
        resolved["context_ulysses"] = largest_group(settings.context, *heads)
    if settings.context_balance == "auto":
        if settings.context_method == "ulysses":
            resolved["context_balance"] = "none"
        else:
            resolved["context_balance"] = "work" if config.data.documents == "isolate" else "zigzag"
    return resolved


def resolved_parallel(config: Config, layout: Layout) -> ParallelSettings:
    """The ``parallel`` settings with degrees and limits; those of schedules other than the one chosen stay as
    they are."""
    settings = config.parallel
    resolved: dict[str, Any] = {"data": layout.data, **_resolved_context(config)}
    if settings.schedule == "interleaved" and settings.schedule_group == "auto":
        resolved["schedule_group"] = layout.pipeline
    if settings.bucket_mb == "auto":
        resolved["bucket_mb"] = max(25.0, 4.0 * layout.gradient_ranks)
    return settings.model_copy(update=resolved)


def tensor_chunks(config: Config, layout: Layout) -> int:
    """Chunks of a tensor-parallel layer's forward pass, by the bytes of a microbatch's residual stream; one
    in fp8, whose layers multiply all tokens at once."""
    if layout.tensor == 1 or config.precision.dtype == "fp8":
        return 1
    tokens = config.batch.micro * config.data.sequence // layout.context
    return forward_chunks(tokens * config.model.hidden * config.precision.width)


def _tokenizer_vocab(config: Config) -> int:
    from hexad.dataset.text.tokenizer import load_tokenizer

    with blaming("data.tokenizer"):
        return load_tokenizer(config.data.tokenizer).vocab_size


def _check_plan(config: Config, plan: PipelinePlan) -> None:
    """Refuse what does not fit the stages and the schedule."""
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
