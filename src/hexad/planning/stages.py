"""A run's stages and schedule, from its configuration alone: no torch, so that it can be checked at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hexad.config import Config, ConfigError, blaming, counted
from hexad.model.inventory import ModelInventory
from hexad.parallel.pipeline.partition import LayerCosts, partition
from hexad.parallel.pipeline.schedule import Schedule, read_schedule
from hexad.parallel.pipeline.schedules import MOST_PASSES, build_schedule, stages_per_rank
from hexad.parallel.pipeline.schedules.auto import search
from hexad.parallel.pipeline.simulate import Costs, peak_memory
from hexad.parallel.pipeline.validate import validate
from hexad.topology.layout import Layout

from .costs import layer_costs


@dataclass(frozen=True)
class PipelinePlan:
    """The layers and the schedule of every pipeline rank.

    Attributes:
        schedule: of a training step as configured; valid.
        layers: of every stage.
        costs: of every stage, by which messages are ordered; None where they are not known.
    """

    schedule: Schedule
    layers: tuple[range, ...]
    costs: Costs | None = None


def pipeline_plan(config: Config, layout: Layout) -> PipelinePlan:
    """The stages and the schedule of a run.

    Layers are weighed by their arithmetic.

    Raises:
        ConfigError: settings that do not fit each other.
    """
    microbatches = config.batch.global_ // (config.batch.micro * int(layout.data))
    schedule = _schedule(config, layout.pipeline, max(1, microbatches))
    layers = stage_layers(config, schedule.stages)
    trained_from = ModelInventory(config.model).trained_from(layers)
    costs = stage_costs(config, layers, layout.pipeline)
    return PipelinePlan(replace(schedule, trained_from=trained_from), layers, costs)


def plan_of_modules(config: Config, layout: Layout) -> PipelinePlan:
    """The schedule of stages that are not described by ``model``, one per pipeline rank.

    Raises:
        ConfigError: a schedule that needs several stages per rank, or costs of layers.
    """
    settings = config.parallel
    if settings.schedule == "auto" or settings.virtual_stages > 1 or settings.schedule.endswith(".json"):
        raise ConfigError(
            "parallel.schedule",
            f"found {settings.schedule} with virtual_stages {settings.virtual_stages}; modules of your own "
            "run one stage per rank: name a schedule such as 1f1b, or give a plan",
        )
    schedule = _by_name(config, layout.pipeline, layout.pipeline)
    return PipelinePlan(schedule, (range(0),) * schedule.stages)


def training_schedule(config: Config, plan: PipelinePlan, microbatches: int) -> Schedule:
    """The plan's schedule for another number of microbatches, on the same stages; of fewer, one whose ranks
    hold no more than by the plan.

    Raises:
        ConfigError: a larger number than a schedule from a file has.
    """
    planned, name = plan.schedule, config.parallel.schedule
    if microbatches == planned.microbatches:
        return planned
    fewer = microbatches < planned.microbatches
    if fewer and (name == "auto" or name.endswith(".json")):  # no search in the middle of a run
        return planned.first(microbatches)
    if name.endswith(".json"):
        raise ConfigError(
            "parallel.schedule",
            f"{name} has {planned.microbatches} microbatches, found {microbatches} in a step",
        )
    other = _by_name(config, planned.pipeline, microbatches, planned.placement)
    costs = plan.costs or Costs.uniform(planned.stages)
    peaks, most = peak_memory(other, costs), peak_memory(planned, costs)
    if fewer and any(more > limit for more, limit in zip(peaks, most)):
        return planned.first(microbatches)
    return replace(other, trained_from=planned.trained_from)


def stage_layers(config: Config, stages: int) -> tuple[range, ...]:
    """The layers of each stage according to ``parallel.split``.

    Raises:
        ConfigError: they cannot be divided so.
    """
    layers, work = config.model.layers, layer_costs(config.model, config.data.sequence)
    per_layer = tuple(layer.total for layer in work.layers)
    return partition(config.parallel.split, layers, stages, LayerCosts(0.0, per_layer, work.head.total))


def stage_costs(config: Config, layers: Sequence[range], pipeline: int) -> Costs:
    """Costs of every stage: FLOPs per token for time, the share of a rank's layers for activations."""
    work = layer_costs(config.model, config.data.sequence)
    final = len(layers) - 1
    per_rank = sum(map(len, layers)) / pipeline

    def total(kind: str) -> tuple[float, ...]:
        return tuple(
            sum(getattr(work.layers[number], kind) for number in part)
            + (getattr(work.head, kind) if stage == final else 0.0)
            for stage, part in enumerate(layers)
        )

    activation = tuple(len(part) / per_rank for part in layers)
    return Costs(total("forward"), total("backward"), total("weight"), activation=activation)


def _schedule(config: Config, pipeline: int, microbatches: int) -> Schedule:
    settings = config.parallel
    name, virtual = settings.schedule, settings.virtual_stages
    if name.endswith(".json"):
        return _from_file(config, pipeline, microbatches)
    with blaming("parallel.virtual_stages"):
        per_rank = stages_per_rank(name, virtual)
    stages = pipeline * per_rank
    stage_layers(config, stages)  # too few layers are refused before a long schedule is made
    if microbatches * stages > MOST_PASSES:
        most = max(MOST_PASSES // stages, 1) * (config.batch.global_ // microbatches)
        raise ConfigError(
            "batch.global",
            f"found {config.batch.global_}, which makes {microbatches} microbatches in a step on "
            f"{counted(stages, 'stage')}, more than {MOST_PASSES} in all; raise batch.micro or the data "
            f"degree, or use at most {most}",
        )
    return _by_name(config, pipeline, microbatches)


def _by_name(
    config: Config, pipeline: int, microbatches: int, placement: tuple[int, ...] | None = None
) -> Schedule:
    settings = config.parallel
    name, virtual = settings.schedule, settings.virtual_stages

    def costs_of(placement: tuple[int, ...]) -> Costs | None:
        try:
            layers = stage_layers(config, len(placement))
        except ConfigError:
            if len(placement) == pipeline * virtual:
                raise
            return None  # too few layers for this many stages
        return stage_costs(config, layers, pipeline)

    group = None if settings.schedule_group == "auto" else settings.schedule_group
    memory = None if settings.schedule_memory == "auto" else settings.schedule_memory
    if name == "auto":
        among = None if placement is None else (placement,)
        with blaming("parallel.schedule_memory"):
            return search(pipeline, microbatches, virtual, costs_of, memory, among=among)
    with blaming("parallel.schedule"):
        return build_schedule(name, pipeline, microbatches, virtual, group=group)


def _from_file(config: Config, pipeline: int, microbatches: int) -> Schedule:
    """The user's own schedule, which must fit the run exactly."""
    path, virtual = config.parallel.schedule, config.parallel.virtual_stages
    with blaming("parallel.schedule"):
        schedule = read_schedule(path)
        with blaming(f"parallel.schedule: {path}"):
            validate(schedule)
    if schedule.pipeline != pipeline:
        raise ConfigError(
            "parallel.pipeline",
            f"found {pipeline}, but {path} is a schedule of {schedule.pipeline} ranks; "
            f"use {schedule.pipeline}",
        )
    if schedule.microbatches != microbatches:
        size = config.batch.global_ // microbatches * schedule.microbatches
        raise ConfigError(
            "batch.global",
            f"found {config.batch.global_}, which makes {microbatches} microbatches, but {path} is a "
            f"schedule of {schedule.microbatches}; use {size}",
        )
    if virtual != 1 and schedule.stages != virtual * pipeline:
        raise ConfigError(
            "parallel.virtual_stages",
            f"found {virtual}, but {path} has {schedule.stages} stages in all; leave it out",
        )
    return schedule
