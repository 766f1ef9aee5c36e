"""DeepSpeed's pipeline: a list of layers, divided into stages, over Hexad's schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hexad.config import HexadError
from hexad.config.errors import did_you_mean
from hexad.conversion.stages import LayerStage
from hexad.engine.modules import Tie, Ties
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.planning import PipelinePlan
from hexad.topology.layout import Layout

from ..facade import world
from ..facade.optimizer import trained
from . import checkpointing
from .groups import stages_of

Layer = Callable[[Any], Any]


class LayerSpec:
    """A layer that is built on the rank that needs it: ``typename(*args, **kwargs)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise HexadError(f"LayerSpec: found {typename!r}, expected a class of torch.nn.Module")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        """Build the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"LayerSpec({self.typename.__name__})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares all its parameters with the others of the same key.

    Args:
        key: of the layers that share.
        typename, module_args, module_kwargs: see :class:`LayerSpec`.
        forward_fn: what this one computes, given the shared module and the input; by default the module.
        tied_weight_attr: accepted; all parameters are shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipeStage(LayerStage):
    """Consecutive layers, under their numbers in the list; those with a key are under ``tied_modules``."""

    def __init__(self, owner: PipelineModule, numbers: range) -> None:
        super().__init__(numbers)
        self._owner = [owner]  # in a list: the owner is no part of the stage
        self.tied_modules = nn.ModuleDict()

    def forward(self, x: Any) -> Any:
        """The result of all layers; a tuple is passed on as it is."""
        owner, count = self._owner[0], len(self.functions)
        interval = owner.activation_checkpoint_interval
        for begin in range(0, count, interval or count or 1):
            end = min(begin + (interval or count), count)
            if interval and torch.is_grad_enabled() and owner.recomputes(self.functions[begin:end]):
                x = owner.activation_checkpoint_func(partial(self._run, begin, end), x)
            else:
                x = self._run(begin, end, x)
        return x

    def _run(self, begin: int, end: int, x: Any) -> Any:
        for function in self.functions[begin:end]:
            x = function(x)
        return x


class Use(nn.Module):
    """A function of a shared module, as a module: with ZeRO 3 weights are gathered while a module runs."""

    def __init__(self, shared: nn.Module, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.shared, self.function = shared, function

    def forward(self, x: Any) -> Any:
        """Call the function on the module and ``x``."""
        return self.function(self.shared, x)


class PipelineModule(nn.Module):
    """A model as a list of layers, of which this rank holds those of its stages.

    The values of a layer do not depend on how the list is divided: every rank builds all layers in order
    and keeps its own; with ``seed_layers`` it builds its own only.

    Args:
        layers: layer specifications, modules or functions.
        num_stages: pipeline ranks; the other factor of the world size are data ranks.
        topology: in place of ``num_stages``: with ``get_dim("pipe")``.
        loss_fn: the loss of the last layer's result and the labels; by default that result is the loss.
        seed_layers: seed the generator before each layer is built, with ``base_seed`` plus its number.
        seed_fn: in place of ``torch.manual_seed``.
        base_seed: see ``seed_layers``.
        partition_method: ``parameters`` (the stage with most has as few as possible), ``uniform`` (numbers of
            layers), or ``type:REGEX`` (numbers of layers whose class matches).
        activation_checkpoint_interval: layers that are recomputed together in the backward pass; 0 for none.
        activation_checkpoint_func: the function that recomputes them.
        checkpointable_layers: names of classes that may be recomputed; by default all that have parameters.
        schedule: of the pipeline, a name of ``parallel.schedule`` but ``auto``.
        virtual_stages: stages of a rank, for ``interleaved``.
        dynamic_shape: accepted: shapes may change from step to step.

    Attributes:
        stages: of this rank, by number; ``own_stages`` has them by integers.
        parts: the layers of every stage.
        plan: of the pipeline.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        schedule: str = "1f1b",
        virtual_stages: int = 1,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise HexadError("PipelineModule: found neither num_stages nor topology; pass one of them")
        interval = activation_checkpoint_interval
        if not isinstance(interval, int) or interval < 0:
            raise HexadError(f"activation_checkpoint_interval: found {interval!r}, expected 0 or more")
        if schedule == "auto":
            raise HexadError("schedule: found auto, which is not for lists of layers; name one, such as 1f1b")
        if not isinstance(layers, Iterable):
            raise HexadError(f"layers: found a {type(layers).__name__}, expected a list of layers")
        self.specs, self.loss_fn = list(layers), loss_fn
        for number, layer in enumerate(self.specs):
            if not isinstance(layer, LayerSpec) and not callable(layer):
                raise HexadError(f"layers[{number}]: found {layer!r}, expected a LayerSpec or a function")
        self.activation_checkpoint_interval = interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.num_stages = stages_of(topology) if num_stages is None else num_stages
        self.schedule, self.virtual_stages = schedule, virtual_stages
        device = world.join()
        self._check_world()
        self.mesh = world.mesh_of(device, self.num_stages)
        self.stage_id = self.mesh.pipeline.rank
        planned = build_schedule(schedule, self.num_stages, self.num_stages, virtual_stages)
        self.parts = self._partition(partition_method, planned.stages)
        self.plan = PipelinePlan(planned, self.parts)
        seed = (seed_fn or torch.manual_seed, base_seed) if seed_layers else None
        self.own_stages = {n: PipeStage(self, self.parts[n]) for n in planned.stages_of(self.stage_id)}
        self.stages = nn.ModuleDict({str(number): stage for number, stage in self.own_stages.items()})
        self._check_ties()
        self._build(seed)
        self.to(device)

    def _check_world(self) -> None:
        ranks = world.world_size()
        if not isinstance(self.num_stages, int) or self.num_stages < 1 or ranks % self.num_stages:
            fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise HexadError(
                f"num_stages: found {self.num_stages!r} in a world of {ranks} ranks; use one of "
                f"{', '.join(map(str, fitting))}"
            )

    # Stages

    def _partition(self, method: str, stages: int) -> tuple[range, ...]:
        count = len(self.specs)
        if count < stages:
            raise HexadError(f"PipelineModule: found {count} layers for {stages} stages; use fewer stages")
        kind, _, pattern = method.partition(":")
        if kind.lower() == "uniform":
            return uniform(count, stages)
        if kind.lower() in ("parameters", "type"):
            weights = self._counts() if kind.lower() == "parameters" else self._matching(pattern)
            return balanced(weights, stages)
        known = ("parameters", "uniform", "type:REGEX")
        raise HexadError(
            f"partition_method: found {method!r}{did_you_mean(method, known)}; expected one of "
            f"{', '.join(known)}"
        )

    def _counts(self) -> list[int]:
        """The number of trained parameters of every layer."""
        counts = []
        for spec in self.specs:
            with torch.device("meta"):
                layer = spec.build() if isinstance(spec, LayerSpec) else spec
            counts.append(sum(p.numel() for p in trained(layer)) if isinstance(layer, nn.Module) else 0)
        return counts

    def _matching(self, pattern: str) -> list[int]:
        """1 for every layer whose class matches, 0 for others."""
        try:
            re.compile(pattern)
        except re.error as error:
            raise HexadError(f"partition_method: found {pattern!r}, no regular expression: {error}") from None
        matches = [int(bool(re.search(pattern, _name(spec), re.IGNORECASE))) for spec in self.specs]
        if not any(matches):
            names = ", ".join(sorted({_name(spec) for spec in self.specs}))
            raise HexadError(f"partition_method: found no layer that matches {pattern!r}; there are {names}")
        return matches

    def _check_ties(self) -> None:
        """Refuse, on all ranks, layers whose untrained values several ranks would save."""
        holders = self._holders()
        for spec in self.specs:
            if not isinstance(spec, TiedLayerSpec) or len(set(holders[spec.key])) == 1:
                continue
            with torch.device("meta"):
                layer = spec.build()
            untrained = [name for name, p in layer.named_parameters() if not p.requires_grad]
            untrained += [name for name, _ in layer.named_buffers()]
            if untrained:
                raise HexadError(
                    f"TiedLayerSpec {spec.key!r}: found {untrained[0]}, which is not trained, in a layer "
                    "that several pipeline ranks share; move it to a layer that is not tied"
                )

    def _build(self, seed: tuple[Callable[[int], Any], int] | None) -> None:
        """Build this rank's layers."""
        mine = {number: stage for stage in self.own_stages.values() for number in stage.numbers}
        keys = {spec.key for spec in map(self.specs.__getitem__, mine) if isinstance(spec, TiedLayerSpec)}
        tied: dict[str | None, Any] = {}  # by key; None for those of other ranks
        for number, spec in enumerate(self.specs):
            stage, key = mine.get(number), spec.key if isinstance(spec, TiedLayerSpec) else None
            if stage is None and (seed is not None or not isinstance(spec, LayerSpec)):
                continue
            if seed is not None:
                seed[0](seed[1] + number)
            if key in tied:
                layer = tied[key]
            else:
                layer = spec.build() if isinstance(spec, LayerSpec) else spec
            if key is not None:
                tied[key] = layer if key in keys else None
            if stage is None:
                continue
            if key is not None:
                stage.tied_modules[key] = layer
                layer = layer if spec.forward_fn is None else Use(layer, spec.forward_fn)
            if isinstance(layer, nn.Module) and layer is not tied.get(key):
                stage.add_module(str(number), layer)
            stage.functions.append(layer)

    def _holders(self) -> dict[str, list[int]]:
        """The pipeline ranks of each tied layer's stages, by key."""
        ranks: dict[str, list[int]] = {}
        for rank, part in zip(self.plan.schedule.placement, self.parts):
            for spec in (self.specs[number] for number in part):
                if isinstance(spec, TiedLayerSpec):
                    ranks.setdefault(spec.key, []).append(rank)
        return ranks

    def ties(self) -> Ties:
        """Parameters of this rank that stages of other ranks share."""
        holders = self._holders()
        return {
            parameter: Tie(f"tied_modules.{key}", ranks[0] != self.stage_id)
            for stage in self.own_stages.values()
            for key, module in stage.tied_modules.items()
            if len(set(ranks := holders[key])) > 1
            for parameter in module.parameters()
        }

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set the number of layers that are recomputed together; 0 for none."""
        self.activation_checkpoint_interval = interval

    def recomputes(self, functions: Sequence[Layer]) -> bool:
        """Whether some layers are recomputed together."""
        modules = [function for function in functions if isinstance(function, nn.Module)]
        if self.checkpointable_layers is not None:
            return all(type(module).__name__ in self.checkpointable_layers for module in modules)
        return any(next(module.parameters(), None) is not None for module in modules)

    def topology(self) -> Layout:
        """The layout of the ranks."""
        return self.mesh.layout

    def forward(self, x: Any) -> Any:
        """The result of this rank's layers, where it has all of them.

        Raises:
            HexadError: it has not.
        """
        if self.num_stages > 1:
            raise HexadError(
                "PipelineModule: a rank has only some of the layers; call engine.train_batch or eval_batch"
            )
        for stage in self.own_stages.values():
            x = stage(x)
        return x


def _name(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", "")


def uniform(count: int, stages: int) -> tuple[range, ...]:
    """Runs of as many layers, the first ones of one more."""
    size, longer = divmod(count, stages)
    bounds = [stage * size + min(stage, longer) for stage in range(stages + 1)]
    return tuple(range(low, high) for low, high in pairwise(bounds))


def balanced(weights: Sequence[int], stages: int) -> tuple[range, ...]:
    """DeepSpeed's division into runs of at least one layer: for each number of layers and stages the run that
    differs least in weight from those before it, which need not be the best of all. Random numbers (dropout)
    depend on the rank that computes a layer."""
    count = len(weights)
    if count <= stages:
        return uniform(count, stages)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=float))])
    heaviest, lightest = np.full((2, count + 1, stages + 1), np.inf)
    begin = np.zeros((count + 1, stages + 1), dtype=int)
    heaviest[0, 0] = 0
    for end in range(1, count + 1):
        for stage in range(1, min(end, stages) + 1):
            run = total[end] - total[:end]
            most = np.maximum(heaviest[:end, stage - 1], run)
            least = np.minimum(lightest[:end, stage - 1], run)
            spread = most - least
            best = end - 1 - int(np.argmin(spread[::-1]))  # the last of equals
            heaviest[end, stage], lightest[end, stage], begin[end, stage] = most[best], least[best], best
    bounds = [count]
    for stage in range(stages, 0, -1):
        bounds.insert(0, int(begin[bounds[0], stage]))
    return tuple(range(low, high) for low, high in pairwise(bounds))
