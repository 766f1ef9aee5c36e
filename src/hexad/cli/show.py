"""``hexad show``: layouts, schedules, memory, context ranks and runs, in the terminal or as files.

Nothing here imports torch, and matplotlib is imported for ``--output`` only: ``--json`` starts fast.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import isfinite
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NamedTuple

import click
from rich.console import Console, RenderableType

from hexad.config import Config, ConfigError, HexadError, blaming, did_you_mean
from hexad.model.configuration import load_config
from hexad.parallel.pipeline.schedule import Schedule, read_schedule, write_schedule
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.parallel.pipeline.simulate import TIMELINE, Costs, simulate
from hexad.parallel.pipeline.validate import validate
from hexad.planning import Resolved, planned_layout, resolve, smallest_world
from hexad.planning.memory import MemoryPlan, largest, per_pipeline_rank, predict
from hexad.planning.serving import serving_plans
from hexad.planning.stages import stage_costs
from hexad.show.context import Division, context_figure, context_json, context_text
from hexad.show.experts import experts_figure, experts_json, experts_text, read_loads
from hexad.show.figure import save_figure
from hexad.show.layout import layout_figure, layout_json, layout_text
from hexad.show.memory import (
    Device,
    memory_figure,
    memory_json,
    memory_text,
    memory_title,
    needed,
    serving_json,
    serving_text,
    verdict,
)
from hexad.show.run import read_metrics, run_figure, run_text, summary
from hexad.show.schedule import Chart, read_timeline, schedule_figure, schedule_text
from hexad.topology.devices import named_gpu, named_gpus
from hexad.topology.layout import Layout

from .options import json_option, print_json, split_settings
from .plan import job_options, planned_by

Times = tuple[float, ...]
"""Duration of F, B and W of one microbatch in all stages of a rank, and of a message."""
_DEFAULT_TIMES: Times = (1.0, 1.0, 1.0, 0.0)


class Choice(NamedTuple):
    """The charts to draw, an addition to the title, and the step of a run if it was measured."""

    charts: list[Chart]
    note: str = ""
    step: int | None = None

    def as_tree(self) -> dict[str, Any]:
        """One schedule's tree, or the content of a run's ``timeline.json``."""
        if self.step is None:
            return self.charts[0].timeline.as_tree()
        return {"step": self.step, **{chart.label: chart.timeline.as_tree() for chart in self.charts}}


def chosen(settings: tuple[str, ...], options: dict[str, Any]) -> Choice:
    """The schedule of a command line: its arguments, and the options given by their names in Python.

    Raises:
        HexadError: one of them is malformed, or they contradict each other.
    """
    times = _times(options["costs"]) if "costs" in options else None
    path, overrides = split_settings("show schedule", settings)
    if "file" in options:
        file = options["file"]
        if settings:
            raise HexadError(f"--file: found '{file}' beside {settings[0]}; give one of them")
        _refuse(options, f"--file {file}", "file", "costs")
        schedule = read_schedule(file)
        with blaming(f"--file: {file}"):
            validate(schedule)
        return Choice([_with_times(schedule, times or _DEFAULT_TIMES)])
    if not settings:
        times = times or _DEFAULT_TIMES
        return Choice([_with_times(_from_options(options, times), times)])
    _refuse(options, path or "the configuration", "costs")
    if path is None or not Path(path).is_dir():
        return Choice([_from_config(load_config(path, overrides), times)])
    if overrides:
        raise HexadError(f"show schedule: found overrides of the run {path}; give a configuration file")
    timeline, config = Path(path) / TIMELINE, Path(path) / "config.yaml"
    if timeline.is_file():
        _refuse(options, f"{timeline}")
        step, charts = read_timeline(timeline)
        return Choice(charts, f", step {step:,}", step)
    if not config.is_file():
        raise HexadError(f"{path}: found neither {TIMELINE} nor config.yaml; is it the run.dir of a run?")
    return Choice([_from_config(load_config(config), times)], " (as configured)")


def _refuse(options: dict[str, Any], source: str, *allowed: str) -> None:
    """Refuse options that contradict ``source``."""
    for name in sorted(options.keys() - set(allowed)):
        option, value = f"--{name.replace('_', '-')}", options[name]
        raise HexadError(f"{option}: found {value}, but {source} determines the schedule; leave it out")


def _from_options(options: dict[str, Any], times: Times) -> Schedule:
    name, pipeline = options.get("schedule", "1f1b"), options.get("pipeline", 4)
    if "memory" in options and name != "auto":
        raise HexadError(f"--memory: found {options['memory']:g}; it applies only to --schedule auto")
    with blaming("--schedule"):
        return build_schedule(
            name,
            pipeline,
            options.get("microbatches", 2 * pipeline),
            options.get("virtual_stages", 2 if name == "interleaved" else 1),
            group=options.get("group"),
            costs=lambda placement: _equal(placement, times),
            memory=options.get("memory"),
        )


def _with_times(schedule: Schedule, times: Times) -> Chart:
    basis = "F {:g}, B {:g}, W {:g} per rank and microbatch, message {:g}".format(*times)
    return Chart(simulate(schedule, _equal(schedule.placement, times)), basis=basis)


def _equal(placement: tuple[int, ...], times: Times) -> Costs:
    """Costs that divide a rank's times equally among its stages."""
    stages = Counter(placement)
    parts = tuple(1 / stages[rank] for rank in placement)
    forward, backward, weight = (tuple(time * part for part in parts) for time in times[:3])
    return Costs(forward, backward, weight, transfer=times[3], activation=parts)


def _times(text: str) -> Times:
    try:
        times = tuple(float(part) for part in text.split(","))
        if len(times) == 4 and all(isfinite(time) and time >= 0 for time in times) and any(times[:3]):
            return times
    except ValueError:
        pass
    raise HexadError(
        f"--costs: found '{text}', expected F,B,W,P2P such as 1,1,1,0.1: times from 0, F, B or W above 0"
    )


def _from_config(config: Config, times: Times | None) -> Chart:
    """The schedule that the trainer would run."""
    resolved = resolve(config, planned_layout(config))
    plan = resolved.plan
    if times:
        return _with_times(plan.schedule, times)
    flops = stage_costs(resolved.config, plan.layers, plan.schedule.pipeline)
    unit = sum(flops.forward) / plan.schedule.pipeline
    passes = (flops.forward, flops.backward, flops.weight)
    forward, backward, weight = (tuple(time / unit for time in times) for times in passes)
    costs = Costs(forward, backward, weight, activation=flops.activation)
    return Chart(simulate(plan.schedule, costs), basis="times proportional to FLOPs, mean F of a rank 1")


_MOST = 256
"""Context ranks: what each receives of each is computed, a few seconds' work."""


def divided(settings: tuple[str, ...], lengths: str | None, microbatch: int | None) -> Division:
    """A microbatch of a configuration file with overrides, divided among its context ranks.

    Its documents have the ``lengths`` given, or are those of a ``microbatch`` of the run's data.

    Raises:
        HexadError: the settings are refused, there is one context rank, or documents are not known.
    """
    path, overrides = split_settings("show context", settings)
    if path is None:
        raise HexadError("show context: found no configuration file; give one")
    config = load_config(path, overrides)
    resolved = resolve(config, planned_layout(config))
    config = resolved.config
    if config.parallel.context == 1:
        raise ConfigError(
            "parallel.context", "found 1, one rank holds all tokens; expected 2 or more: parallel.context=4"
        )
    if config.parallel.context > _MOST:
        raise ConfigError(
            "parallel.context",
            f"found {config.parallel.context}, but show context draws at most {_MOST} ranks",
        )
    documents, source = _documents(resolved, lengths, microbatch)
    return Division.of(resolved, documents, source)


def _documents(
    resolved: Resolved, lengths: str | None, microbatch: int | None
) -> tuple[tuple[int, ...] | None, str]:
    """(Where documents begin, and the total, or None where they are joined; where this is from)."""
    config = resolved.config
    if config.data.documents == "join":
        for option, given in (("--lengths", lengths), ("--microbatch", microbatch)):
            if given is not None:
                raise HexadError(
                    f"{option}: found {given} with data.documents join, where attention crosses documents; "
                    "leave it out, or set data.documents=isolate"
                )
        return None, ""
    if lengths is not None:
        if microbatch is not None:
            raise HexadError(f"--microbatch: found {microbatch} beside --lengths; give one of them")
        return _from_lengths(lengths, config.batch.micro, config.data.sequence), "--lengths"
    if config.data.train is None:
        raise HexadError(
            "data.train: found null with data.documents isolate; set it, or give the lengths of documents: "
            "--lengths 300,1200,700"
        )
    return _from_data(config, microbatch or 0), f"microbatch {microbatch or 0:,} of data.train"


def _from_lengths(text: str, sequences: int, length: int) -> tuple[int, ...]:
    """Documents one after the other, cut where a sequence ends; the last one fills the rest."""
    total = sequences * length
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise HexadError(f"--lengths: found '{text}', expected numbers of tokens from 1 such as 300,1200,700")
    if sum(sizes) > total:
        raise HexadError(
            f"--lengths: found {sum(sizes):,} tokens, but a microbatch has {total:,} (batch.micro x "
            "data.sequence); give fewer, or change these"
        )
    return tuple(sorted({*range(0, total + 1, length), *accumulate(sizes)}))


def _from_data(config: Config, microbatch: int) -> tuple[int, ...]:
    """The documents of a microbatch of data rank 0.

    Steps of one microbatch hold the same samples as larger ones, so that no more than needed is read.
    """
    from hexad.dataset.load.loader import loader_from_config  # torch
    from hexad.dataset.text.tokenizer import load_tokenizer

    samples = config.batch.micro * int(config.parallel.data)
    batch = config.batch.model_copy(update={"global_": samples, "ramp": None})
    config = config.model_copy(update={"batch": batch})
    tokenizer = load_tokenizer(config.data.tokenizer)
    with loader_from_config(config, 0, int(config.parallel.data), tokenizer) as loader:
        (read,) = loader.step(microbatch * samples)
    assert read.documents is not None
    return read.documents


def planned(
    settings: tuple[str, ...], world: int | None, rank: int | None, device: Device | None
) -> tuple[Resolved, MemoryPlan, list[MemoryPlan]]:
    """A configuration file with overrides, resolved in the smallest world if none is given; the plan of a
    global ``rank``, by default of one that needs the most; and plans by pipeline coordinate.

    Raises:
        HexadError: the settings are refused, or there is no such rank.
    """
    path, overrides = split_settings("show memory", settings)
    if path is None:
        raise HexadError("show memory: found no configuration file; give one")
    gpu = None if device is None else device.gpu
    if gpu is not None:
        overrides += ["run.device=cuda"]  # planned for the GPU that is named
    config = load_config(path, overrides)
    if device is not None and gpu is not None and config.precision.dtype == "fp8" and not gpu.fp8:
        raise ConfigError(
            "precision.dtype", f"found fp8, but {device.name} has no fp8 matrix units; use auto, bf16 or fp16"
        )
    layout = planned_layout(config, world)
    if rank is not None and not 0 <= rank < layout.world:
        raise HexadError(f"--rank: found {rank}, expected 0 to {layout.world - 1}")
    resolved = resolve(config, layout, bf16=None if gpu is None else gpu.bf16)
    ranks = per_pipeline_rank(resolved)
    return resolved, largest(ranks) if rank is None else predict(resolved, rank), ranks


def device_of(text: str) -> Device:
    """A GPU by name or by the path of a hardware file, or a size such as ``80GB``.

    Raises:
        HexadError: it is neither.
    """
    from hexad.checkpoint.hugging_face.files import parse_size

    if text.endswith((".yaml", ".yml")):
        word = text
    else:
        word = "-".join(text.lower().replace("_", " ").replace("-", " ").split())
    if (known := named_gpu(word)) is not None:
        gpu, usable = known
        return Device(word, usable, gpu)
    if text[:1].isdigit() and not text.isdigit():
        return Device(text, parse_size(text, "--device"))
    names = named_gpus()
    hint = did_you_mean(word, names) or f"; known: {', '.join(names)}"
    raise HexadError(f"--device: found '{text}', expected a GPU or a size such as 80GB{hint}")


def _check_ending(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    if path is not None and not path.lower().endswith((".png", ".svg", ".html")):
        raise HexadError(f"--output: found '{path}', expected a name that ends in .png, .svg or .html")
    return path


_output_option = click.option(
    "--output",
    metavar="FILE",
    callback=_check_ending,
    help="Draw into FILE.png, FILE.svg or FILE.html instead of the terminal.",
)
_POSITIVE = click.IntRange(min=1)
_ABOVE_ZERO = click.FloatRange(min=0, min_open=True)


@click.group()
def show() -> None:
    """Draw a layout, a pipeline schedule, predicted memory, a plan, context ranks, a run or its profile."""


@show.command("layout")
@click.argument("settings", metavar="[RUN.YAML] [KEY=VALUE]...", nargs=-1)
@click.option("--world", type=int, help="Number of ranks. Default: the fewest that the degrees need.")
@click.option("--tensor", help="Tensor-parallel degree.")
@click.option("--context", help="Context-parallel degree.")
@click.option("--pipeline", help="Pipeline-parallel degree.")
@click.option("--expert", help="Expert-parallel degree.")
@click.option("--expert-tensor", help="Tensor-parallel degree inside each expert.")
@click.option("--data", help="Data-parallel degree, or auto (world / (tensor * context * pipeline)).")
@click.option("--order", help="Rank order, fastest first, such as tensor-context-expert-data-pipeline.")
@json_option
@_output_option
def layout_command(
    settings: tuple[str, ...], world: int | None, as_json: bool, output: str | None, **degrees: str | None
) -> None:
    """Show which ranks form which groups.

    Degrees come from options or from a run's configuration; options override the configuration.
    """
    path, overrides = split_settings("show layout", settings)
    overrides += [f"parallel.{name}={value}" for name, value in degrees.items() if value is not None]
    config = load_config(path, overrides)
    layout = Layout.from_settings(config.parallel, smallest_world(config) if world is None else world)
    figure = partial(layout_figure, layout)
    _present(as_json, output, partial(layout_json, layout), figure, partial(layout_text, layout))


@show.command("schedule")
@click.argument("settings", metavar="[RUN_DIR|RUN.YAML] [KEY=VALUE]...", nargs=-1)
@click.option("--pipeline", type=click.IntRange(1, 1024), help="Pipeline ranks. Default: 4.")
@click.option("--microbatches", type=_POSITIVE, help="Microbatches of a step. Default: twice the ranks.")
@click.option("--schedule", help="Name of a schedule, as for parallel.schedule. Default: 1f1b.")
@click.option("--virtual-stages", type=_POSITIVE, help="Stages per rank. Default: 1, interleaved 2.")
@click.option("--group", type=_POSITIVE, help="interleaved: microbatches per group. Default: the ranks.")
@click.option(
    "--memory", type=_ABOVE_ZERO, help="auto: most activations, in microbatches of a rank's stages."
)
@click.option(
    "--costs",
    metavar="F,B,W,P2P",
    help="Time of one microbatch in all stages of a rank, and of one message. Default: 1,1,1,0, or with a "
    "configuration the FLOPs of its stages.",
)
@click.option("--file", metavar="FILE.json", help="Draw a schedule that --save or --json wrote.")
@click.option("--save", metavar="FILE.json", help="Write the schedule to a file, for parallel.schedule.")
@json_option
@_output_option
def schedule_command(
    settings: tuple[str, ...], save: str | None, as_json: bool, output: str | None, **options: Any
) -> None:
    """Show the actions of every pipeline rank over time.

    The schedule comes from options, from a file, from a run's configuration, or from a run's directory, which
    shows one step as planned and as measured. A configuration without parallel.data is shown in the smallest
    world that its degrees allow.
    """
    if save is not None and not save.endswith(".json"):
        raise HexadError(f"--save: found '{save}', expected a name that ends in .json")
    with Console(stderr=True).status("Building the schedule"):  # up to a million passes: half a minute
        choice = chosen(settings, {name: value for name, value in options.items() if value is not None})
    if save:
        write_schedule(choice.charts[0].timeline.schedule, save)
        click.echo(f"wrote {save}", err=True)
    if as_json or output or not save:
        _present(
            as_json,
            output,
            choice.as_tree,
            partial(schedule_figure, choice.charts, choice.note),
            partial(schedule_text, choice.charts, get_terminal_size().columns, choice.note),
        )


@show.command("memory")
@click.argument("settings", metavar="RUN.YAML [KEY=VALUE]...", nargs=-1)
@click.option("--rank", type=int, help="Global rank. Default: one that needs the most memory.")
@click.option("--world", type=int, help="Number of ranks. Default: the fewest that the run's degrees need.")
@click.option(
    "--device",
    metavar="NAME|SIZE",
    help="Say whether the run fits: a GPU such as h100 or a100-40gb, or a size such as 80GB.",
)
@click.option(
    "--serve", is_flag=True, help="Of generation: weights, a step, and the tokens of cache that fit --device."
)
@json_option
@_output_option
def memory_command(
    settings: tuple[str, ...],
    rank: int | None,
    world: int | None,
    device: str | None,
    serve: bool,
    as_json: bool,
    output: str | None,
) -> None:
    """Show how many bytes a run will need on a rank, by component, without starting it.

    With --device, whether the rank that needs the most fits into the device's memory; the exit status is 0
    either way. With --serve, what generation needs, what tokens cost, and how many tokens of key/value cache
    fit.
    """
    target = None if device is None else device_of(device)
    if serve:
        if output is not None or rank is not None:
            raise HexadError("--serve: found --output or --rank, which it does not have; remove them")
        served = planned(settings, world, None, target)[0]
        plans = serving_plans(served, None if target is None else target.capacity)
        if as_json:
            print_json(serving_json(plans, target))
        else:
            Console(highlight=False).print(serving_text(served, plans, target))
        return
    resolved, plan, ranks = planned(settings, world, rank, target)
    tree = partial(memory_json, resolved, plan, ranks, target)
    need = None if target is None else needed(resolved, ranks, target)
    figure = partial(memory_figure, ranks, memory_title(resolved), target, need)
    _present(as_json, output, tree, figure, partial(memory_text, resolved, plan, ranks, target))
    if output and target is not None and need is not None and not as_json:
        click.echo(verdict(need, target), err=True)


@show.command("plan")
@job_options
@click.option("--layout", metavar="LAYOUT", help="Draw this one, such as tensor=8,pipeline=4,zero=1.")
@click.option("--top", type=_POSITIVE, default=10, show_default=True, help="Layouts to list.")
@click.option("--output", metavar="FILE.html", required=True, help="The page.")
def plan_command(
    settings: tuple[str, ...], layout: str | None, top: int, output: str, **options: Any
) -> None:
    """Write a plan as one page, without files beside it: the fastest layouts, memory against speed, and of
    the best one, or of --layout, where the step goes, memory by rank, the step in time, and ranks."""
    from hexad.planning.plan import explained
    from hexad.show.plan_page import plan_page

    if not output.lower().endswith((".html", ".htm")):
        raise HexadError(f"--output: found '{output}', expected a name that ends in .html")
    result = planned_by(settings, options, top)
    page = plan_page(result, result.layouts[0] if layout is None else explained(result, layout))
    try:
        Path(output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise HexadError(f"--output: '{output}' cannot be written: {error.strerror}") from None


@show.command("context")
@click.argument("settings", metavar="RUN.YAML [KEY=VALUE]...", nargs=-1)
@click.option(
    "--microbatch",
    type=click.IntRange(0, 2**31),
    help="Isolated documents: which microbatch of data.train, of data rank 0, from the run's beginning. "
    "Default: 0.",
)
@click.option(
    "--lengths",
    metavar="TOKENS,...",
    help="Isolated documents: their lengths, instead of those of data.train. They are cut where a sequence "
    "ends, and one more fills the rest of the microbatch.",
)
@json_option
@_output_option
def context_command(
    settings: tuple[str, ...], microbatch: int | None, lengths: str | None, as_json: bool, output: str | None
) -> None:
    """Show which context rank holds which tokens of a microbatch, its attention work, and what it receives.

    Without starting the run. Work and messages of the other values of parallel.context_balance are shown for
    comparison.
    """
    division = divided(settings, lengths, microbatch)
    figure, text = partial(context_figure, division), partial(context_text, division)
    _present(as_json, output, partial(context_json, division), figure, text)


@show.command("run")
@click.argument("directory", metavar="DIR")
@click.option(
    "--reference",
    "references",
    metavar="NAME=NATS",
    multiple=True,
    help="Draw a horizontal line in the loss panel, such as 'unigram entropy=7.1'. May be repeated.",
)
@json_option
@_output_option
def run_command(directory: str, references: tuple[str, ...], as_json: bool, output: str | None) -> None:
    """Show a run's loss, speed and communication from its metrics.jsonl."""
    lines = dict(_reference(text) for text in references)
    metrics = read_metrics(directory)
    figure = partial(run_figure, metrics, lines)
    _present(as_json, output, partial(summary, metrics), figure, partial(run_text, metrics))


@show.command("experts")
@click.argument("directory", metavar="RUN_DIR")
@json_option
@_output_option
def experts_command(directory: str, as_json: bool, output: str | None) -> None:
    """Show how a run's experts were loaded, by layer, from its experts.jsonl."""
    loads = read_loads(directory)
    figure = partial(experts_figure, loads)
    _present(as_json, output, partial(experts_json, loads), figure, partial(experts_text, loads))


@show.command("trace")
@click.argument("directory", metavar="RUN_DIR")
@json_option
def trace_command(directory: str, as_json: bool) -> None:
    """Show what each rank did in the steps that log.profile named: compute, communication that nothing hid,
    idle."""
    from hexad.show.trace import read_traces, trace_json, trace_text  # numpy

    ranks = read_traces(directory)
    _present(as_json, None, partial(trace_json, ranks), lambda: None, partial(trace_text, ranks))


def _present(
    as_json: bool,
    output: str | None,
    tree: Callable[[], Any],
    figure: Callable[[], Any],
    text: Callable[[], RenderableType],
) -> None:
    """Write the figure to ``output``, print the tree as JSON, or, without either, print the text."""
    if output:
        save_figure(figure(), output)
        click.echo(f"wrote {output}", err=True)
    if as_json:
        print_json(tree())
    elif not output:
        Console(highlight=False).print(text())


def _reference(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    with suppress(ValueError):
        if name.strip() and isfinite(float(value)):
            return name, float(value)
    raise HexadError(f"--reference: found '{text}', expected NAME=NATS such as 'unigram entropy=7.1'")
