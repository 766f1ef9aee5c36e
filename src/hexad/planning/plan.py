"""The plan of a job: its fastest layouts on a cluster, and where their time and memory go. No torch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from hexad.config import Config, ConfigError, HexadError, apply_overrides, did_you_mean
from hexad.model.configuration import build_config, load_config
from hexad.topology.devices import Gpu, named_gpu
from hexad.topology.hardware import hardware_names, load_hardware
from hexad.topology.layout import Layout

from .costs import flops_per_token
from .device_memory import device_memory
from .job import Job
from .links import Cluster
from .memory import largest, per_pipeline_rank
from .resolve import resolve, tensor_chunks, with_dtype
from .search import Candidate, Point, Search
from .step_time import Predictor


@dataclass(frozen=True)
class PlannedCluster:
    """The GPUs that are planned for.

    Attributes:
        name: of the kind of GPU.
        gpu: its published facts.
        capacity: bytes of its memory that programs can use.
        cluster: how many there are, and their times.
    """

    name: str
    gpu: Gpu
    capacity: int
    cluster: Cluster


def read_cluster(text: str) -> PlannedCluster:
    """The cluster that a text such as ``h100:1024`` or ``my-gpu.yaml:64`` names.

    Raises:
        HexadError: it is of another form, or no known GPU.
    """
    word, _, number = text.rpartition(":")
    if not (word and number.isascii() and number.isdigit() and int(number)):
        raise HexadError(
            f"``cluster``: found '{text}', expected a GPU and how many there are, such as h100:1024"
        )
    path = word.endswith((".yaml", ".yml"))
    name = word if path else "-".join(word.lower().replace("_", " ").replace("-", " ").split())
    known = named_gpu(name)
    if known is None:
        names = hardware_names()
        hint = did_you_mean(name, names) or f"; known: {', '.join(names)}, or the path of a hardware file"
        raise HexadError(f"``cluster``: found '{word}', which is no known GPU{hint}")
    kind = (
        name
        if path
        else next(
            kind
            for kind in sorted(hardware_names(), key=len, reverse=True)
            if name == kind or name.startswith(f"{kind}-")
        )
    )
    return PlannedCluster(name, known[0], known[1], Cluster(load_hardware(kind), int(number)))


def planned_config(
    model: str | Path | None, overrides: Iterable[str], cluster: PlannedCluster | None
) -> Config:
    """The configuration of a job: of a preset or a file, with overrides, for a cluster's GPUs.

    Raises:
        HexadError: the settings are refused, or there is no model.
    """
    settings = list(overrides)
    path = None
    if model is not None and str(model).endswith((".yaml", ".yml")):
        path = model
    elif model is not None:
        settings.insert(0, f"model.preset={model}")
    else:
        raise HexadError("plan: found no model; give a configuration file, or --model with a preset")
    if cluster is not None:
        device = "cpu" if cluster.gpu.vendor == "cpu" else "cuda"
        for setting in settings:
            key, _, value = setting.partition("=")
            if key.strip() == "run.device" and value.strip() not in ("auto", device):
                raise ConfigError(
                    "run.device", f"found {value}, but {cluster.name} is {device}; leave it out"
                )
        settings.append(f"run.device={device}")
    config = load_config(path, settings)
    lacking = cluster is not None and cluster.gpu.vendor != "cpu" and not cluster.gpu.bf16
    if cluster is not None and lacking and config.precision.dtype == "bf16":
        raise ConfigError(
            "precision.dtype",
            f"found bf16, but {cluster.name} does not compute it in hardware; use auto, fp16 or fp32",
        )
    if cluster is not None and config.precision.dtype == "fp8" and not cluster.gpu.fp8:
        raise ConfigError(
            "precision.dtype", f"found fp8, but {cluster.name} has no fp8 matrix units; use auto or bf16"
        )
    return config


@dataclass(frozen=True)
class Breakdown:
    """The time of a step by cause, on the pipeline rank that computes longest.

    Attributes:
        seconds: of the step, by cause; the sum is the step.
        mfu: model FLOPs utilization, see :attr:`Plan.convention`.
    """

    seconds: dict[str, float]
    mfu: float


@dataclass(frozen=True)
class Plan:
    """The fastest layouts of a job.

    Attributes:
        config: of the job; layouts differ from it in what is searched.
        cluster: where it is to run.
        layouts: fastest first.
        rejected: layouts that are not possible, by reason.
        evaluated: layouts of a pipeline that were evaluated exactly.
        seconds: that the search took.
        points: layouts that the search looked at.
    """

    config: Config
    cluster: PlannedCluster
    layouts: list[Candidate]
    rejected: dict[str, int]
    evaluated: int
    seconds: float
    points: list[Point] = field(default_factory=list, repr=False)

    @property
    def convention(self) -> str:
        """How MFU is counted."""
        peak = self._peak / 1e12
        return (
            "MFU: matrix products of the model, forward and backward, causal attention halved, nothing "
            f"recomputed, over {f'{peak:,.0f}' if peak >= 10 else f'{peak:.2g}'} TFLOP/s"
        )

    @property
    def _peak(self) -> float:
        gpu = self.cluster.gpu  # a CPU's formats differ in speed, and most jobs have 32 bits
        return gpu.single if gpu.vendor == "cpu" and self.config.precision.width == 4 else gpu.half

    @cached_property
    def _flops(self) -> float:
        """FLOPs of a token."""
        return flops_per_token(self.config.model, self.config.data.sequence)

    def rate(self, candidate: Candidate) -> float:
        """Tokens per second and GPU."""
        return candidate.job.tokens / candidate.step.total / self.cluster.cluster.gpus

    def mfu(self, candidate: Candidate) -> float:
        """Model FLOPs utilization."""
        return self.rate(candidate) * self._flops / self._peak

    def fits(self, candidate: Candidate) -> bool:
        """Whether its rank that needs the most fits."""
        return candidate.device.total <= self.cluster.capacity

    def breakdown(self, candidate: Candidate) -> Breakdown:
        """The time of a step by cause: what products would take at the published peak, what they take longer,
        and everything else."""
        step, schedule = candidate.step, candidate.job.schedule
        ranks = []
        for actions in schedule.ranks:
            times = [step.actions[action.stage, action.kind] for action in actions]
            ranks.append((sum(time.seconds for time in times), times))
        busy, times = max(ranks, key=lambda rank: rank[0])
        ideal = self.mfu(candidate) * step.total
        parts: dict[str, float] = {"model FLOPs at the peak": ideal}
        products = again = host = 0.0
        passes: dict[str, float] = {}
        exposed: dict[str, float] = {}
        for action in times:
            again += action.again
            host += max(0.0, action.host - action.device)
            for kind, seconds in action.computed.items():
                if kind in ("product", "attention"):
                    products += seconds
                else:
                    passes["functions"] = passes.get("functions", 0.0) + seconds
            for axis, seconds in action.exposed.items():
                exposed[f"waiting: {axis}"] = exposed.get(f"waiting: {axis}", 0.0) + seconds
        computed = products + passes.get("functions", 0.0)
        rest = busy - computed - host - sum(exposed.values())
        parts["products and attention below the peak"] = products - again - ideal
        parts["recomputed"] = again
        parts |= passes
        parts |= dict(sorted(exposed.items()))
        parts["slower beside messages"] = rest
        parts["host"] = host
        parts["pipeline bubble"] = step.timeline.makespan - busy
        parts["reduction of gradients"] = step.reduction
        parts["update"] = step.update
        parts["gather of weights"] = step.weights
        parts["other"] = step.besides
        whole = step.total - sum(parts.values())
        parts["other"] += whole
        return Breakdown(
            {name: value for name, value in parts.items() if abs(value) > 1e-9}, ideal / step.total
        )

    def settings(self, candidate: Candidate) -> dict[str, Any]:
        """The settings in which a layout differs from the job's, by key."""
        settings: dict[str, Any] = {}
        ours, theirs = self.config, candidate.resolved.config
        for group in ("parallel", "batch", "memory"):
            before = getattr(ours, group).model_dump(mode="json", by_alias=True)
            for name, value in getattr(theirs, group).model_dump(mode="json", by_alias=True).items():
                if value != before[name] and (group, name) not in _RESOLVED:
                    settings[f"{group}.{name}"] = value
        chunks = theirs.parallel.tensor_chunks
        if ours.parallel.tensor_chunks == "auto" and chunks != tensor_chunks(
            theirs, candidate.resolved.layout
        ):
            settings["parallel.tensor_chunks"] = chunks
        return settings

    def tree(self, candidate: Candidate) -> dict[str, Any]:
        """A layout as JSON values."""
        memory, device = candidate.memory, candidate.device
        return {
            "settings": self.settings(candidate),
            "degrees": {**candidate.resolved.layout.degrees},
            "step_seconds": candidate.step.total,
            "tokens_per_second_per_gpu": self.rate(candidate),
            "mfu": self.mfu(candidate),
            "bubble": candidate.step.timeline.bubble,
            "seconds": self.breakdown(candidate).seconds,
            "memory": {**memory.as_tree(), **device._asdict(), "device_total": device.total},
            "capacity": self.cluster.capacity,
            "margin": self.cluster.capacity - device.total,
            "fits": self.fits(candidate),
        }

    def as_tree(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "model": self.config.model.preset or self.config.model.family,
            "cluster": {"gpu": self.cluster.name, "gpus": self.cluster.cluster.gpus},
            "sequence": self.config.data.sequence,
            "global_batch": self.config.batch.global_,
            "convention": self.convention,
            "layouts": [self.tree(candidate) for candidate in self.layouts],
            "rejected": self.rejected,
            "evaluated": self.evaluated,
            "search_seconds": self.seconds,
        }

    def run_yaml(self, candidate: Candidate) -> str:
        """A configuration file that trains so."""
        tree: dict[str, Any] = self.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if self.config.model.preset is not None:
            tree["model"] = {"preset": self.config.model.preset}
        for key, value in self.settings(candidate).items():
            group, _, name = key.partition(".")
            tree.setdefault(group, {})[name] = value
        tree.get("parallel", {}).pop("data", None)
        return yaml.safe_dump(tree, sort_keys=False, width=110)


_RESOLVED = {("parallel", name) for name in ("data", "bucket_mb", "context_balance", "context_ulysses")} | {
    ("parallel", "tensor_chunks"),
    ("parallel", "schedule_group"),
}
"""Settings that ``auto`` resolves to the same values again."""


def plan(
    model: str | Path,
    cluster: str,
    *,
    sequence: int | None = None,
    global_batch: int | None = None,
    precision: str | None = None,
    fix: Iterable[str] = (),
    overrides: Iterable[str] = (),
    top: int = 10,
) -> Plan:
    """Find the fastest layouts of a model on a cluster.

    Args:
        model: a preset (``llama3-70b``), or the path of a configuration file.
        cluster: the GPUs: ``h100:1024``, or ``my-gpu.yaml:64`` with a hardware file of your own.
        sequence: tokens of a sequence; by default ``data.sequence`` of the file.
        global_batch: sequences of a step; by default ``batch.global`` of the file.
        precision: ``precision.dtype``.
        fix: settings that are not searched, ``parallel.tensor=8`` style.
        overrides: other settings.
        top: how many layouts to return at the most; 0 to search none (see :func:`explained`).

    Raises:
        HexadError: anything the user can fix; also where no layout fits.
    """
    fixed, target = list(fix), read_cluster(cluster)
    numbers = {"data.sequence": sequence, "batch.global": global_batch, "precision.dtype": precision}
    settings = [f"{key}={value}" for key, value in numbers.items() if value is not None]
    config = planned_config(model, [*overrides, *settings, *fixed], target)
    config = _complete(config, target)
    keys = frozenset(text.partition("=")[0].strip() for text in fixed)
    begin = time.perf_counter()
    search = Search(config, target.cluster, target.capacity, keys)
    layouts = search.best(top) if top else []
    seconds = time.perf_counter() - begin
    if top and not layouts:
        refused = sum(count for reason, count in search.rejected.items() if reason.startswith("divisibility"))
        if refused > search.rejected["memory"] and search.choices.refused is not None:
            raise search.choices.refused
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in search.rejected.most_common())
        fix = "use more GPUs" if search.rejected["memory"] else "fix less, or use another number of GPUs"
        raise HexadError(f"plan: no layout of {cluster} is possible ({reasons}); {fix}")
    rejected, points = dict(search.rejected), search.points
    return Plan(config, target, layouts, rejected, search.pipelines, seconds, points)


def explained(plan: Plan, layout: str) -> Candidate:
    """A layout of the user's, ``tensor=8,pipeline=4,zero=1`` style, evaluated; ``file`` for the job's own.

    Raises:
        HexadError: it is not possible.
    """
    parts = re.split(r",(?![^\[]*\])", layout)  # not at those of a list
    own = layout.strip() == OWN_LAYOUT
    overrides = [] if own else [_setting(part) for part in parts if part.strip()]
    tree = plan.config.model_dump(mode="json", by_alias=True)
    apply_overrides(tree, overrides)
    config = build_config(tree)
    resolved = resolve(config, Layout.from_settings(config.parallel, plan.cluster.cluster.gpus))
    job = Job.of(resolved)
    memory = largest(per_pipeline_rank(resolved))
    device = device_memory(memory.total, resolved)
    return Candidate(resolved, job, Predictor(job, plan.cluster.cluster).step, memory, device)


OWN_LAYOUT = "file"
"""In place of a layout: the one that the configuration has."""
SHORT_NAMES = {
    "micro": "batch.micro",
    "recompute": "memory.recompute",
    "offload": "memory.offload",
    "recompute_layers": "memory.recompute_layers",
    "recompute_parts": "memory.recompute_parts",
}
"""Names of settings of other groups in the layouts that :func:`explained` takes."""


def _setting(text: str) -> str:
    """``tensor=8`` as ``parallel.tensor=8``."""
    key, equals, value = text.strip().partition("=")
    if not equals:
        raise HexadError(f"layout: found '{text}', expected settings such as tensor=8,pipeline=4,zero=1")
    key = key if "." in key else SHORT_NAMES.get(key, f"parallel.{key}")
    return f"{key}={value}"


def _complete(config: Config, target: PlannedCluster) -> Config:
    """The configuration with a number for every ``auto`` that no layout depends on."""
    if config.model.vocab == "auto":
        raise ConfigError("model.vocab", "found auto; set a number: no tokenizer is read to plan")
    return with_dtype(config, target.gpu.bf16)


def compared(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Two layouts' trees side by side: (name, value, value) of figures and seconds."""
    names = [*first["seconds"], *(name for name in second["seconds"] if name not in first["seconds"])]
    rows: list[tuple[str, Any, Any]] = [
        (name, first[name], second[name])
        for name in ("step_seconds", "tokens_per_second_per_gpu", "mfu", "bubble")
    ]
    rows += [(name, first["seconds"].get(name, 0.0), second["seconds"].get(name, 0.0)) for name in names]
    return [*rows, ("memory", first["memory"]["device_total"], second["memory"]["device_total"])]
