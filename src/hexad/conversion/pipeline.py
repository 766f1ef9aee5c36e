"""A user's model in pipeline stages: its forward pass as it is written, in parts.

Each stage is a copy of the model that has only its own layers. Where the list of layers begins, it takes what
the stage before has computed; where its layers end, it stops. What the model does besides (masks, positions)
is done in every stage. So nothing must be known of the model but which of its modules come before the list
and which after: what ``transformers`` models say in ``pp_plan``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hexad.config import Config, HexadError
from hexad.engine.engine import Engine
from hexad.engine.modules import Tie
from hexad.engine.workload import USUAL, Manners, ModuleWorkload
from hexad.parallel.pipeline.partition import LayerCosts, partition
from hexad.parallel.pipeline.schedules import build_schedule
from hexad.planning import PipelinePlan
from hexad.topology.mesh import Mesh

Loss = Callable[[Any, Any], Tensor]
"""The loss, given the model's output and the microbatch."""


@dataclass
class _Here:
    """What a stage computes with, while it runs.

    Attributes:
        last: the stage is the last one.
        message: the result of the stage before; None in the first one.
    """

    last: bool
    message: Tensor | None = None


class _Reached(Exception):
    """The layers of the stage have been computed."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result


class _Stub(nn.Module):
    """In the place of a module that another stage has; its plain attributes are here."""

    def __init__(self, module: nn.Module, here: _Here) -> None:
        super().__init__()
        known = vars(nn.Module()).keys()
        vars(self).update({key: value for key, value in vars(module).items() if key not in known})
        self.here = here


class _Before(_Stub):
    """In the place of a module before the layers: its result is used by nothing but layers, the first of
    which takes something else."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """NaN like what crosses the stages' boundaries: what used it would be wrong."""
        assert self.here.message is not None
        return torch.full_like(self.here.message, torch.nan, requires_grad=False)


class _Skipped(_Stub):
    """In the place of an earlier stage's layer."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """What it is given: the stage's first layer takes something else."""
        return hidden_states


class _End(_Stub):
    """In the place of what follows the stage's layers."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Stop the forward pass.

        Raises:
            _Reached: always.
        """
        raise _Reached(hidden_states)


@dataclass(frozen=True)
class PipelinedModel:
    """A model's stages on this rank.

    Attributes:
        stages: by number.
        plan: of the pipeline.
        mesh: of the run.
        ties: parameters that the first and the last stage have in common.
        schedule, virtual_stages: as given to :func:`pipeline`.
        compute: what a stage computes of a microbatch; see :class:`hexad.Engine`.
        boundary: makes an empty tensor like what crosses boundaries; see :class:`hexad.Engine`.
    """

    stages: Mapping[int, nn.Module]
    plan: PipelinePlan
    mesh: Mesh
    ties: Mapping[nn.Parameter, Tie]
    schedule: str
    virtual_stages: int
    compute: Any = field(repr=False)
    boundary: Any = field(repr=False)

    def engine(
        self,
        config: Config,
        optimizer: torch.optim.Optimizer | Callable[[Mapping[int, nn.Module]], Any] | None = None,
        training: bool = True,
        manners: Manners = USUAL,
    ) -> Engine:
        """An engine of these stages, with the values that the model came with.

        Args:
            config: settings of everything but the model and the schedule.
            optimizer: of ``torch.optim``, made of :meth:`parameters`, or a function, as of
                :class:`hexad.Engine`; AdamW by default.
            training: False for evaluation only.
            manners: of an update.
        """
        settings = {"schedule": self.schedule, "virtual_stages": self.virtual_stages}
        parallel = config.parallel.model_copy(update=settings)
        workload = ModuleWorkload(
            self.stages,
            self.mesh,
            config.model_copy(update={"parallel": parallel}),
            plan=self.plan,
            compute=self.compute,
            boundary=self.boundary,
            ties=self.ties,
            manners=manners,
        )
        return Engine(workload, self.mesh, training=training, optimizer=optimizer, initialise=False)

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank's stages, each once."""
        return list(dict.fromkeys(p for stage in self.stages.values() for p in stage.parameters()))

    def train(self, mode: bool = True) -> None:
        """Set the stages to training, or to evaluation."""
        for stage in self.stages.values():
            stage.train(mode)


def pipeline(
    module: nn.Module | Sequence[nn.Module],
    mesh: Mesh,
    *,
    layers: str | None = None,
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    loss: Loss | None = None,
    boundary: Callable[[Any], tuple[int, ...]] | None = None,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    split: Literal["cost", "even"] | Sequence[int] = "cost",
) -> PipelinedModel:
    """Divide a model into the stages of a mesh's pipeline ranks.

    The model is used up: layers of other ranks give up their memory. Make it tensor-parallel before
    (:func:`hexad.parallelize`).

    Args:
        module: a model with a list of layers, each of which takes and returns one tensor first, the same on
            all ranks; or the layers themselves, in a list.
        mesh: of the run; its pipeline ranks.
        layers: the path of the list (``nn.ModuleList`` or ``nn.Sequential``); by default what ``pp_plan`` of
            a ``transformers`` model says.
        before: the paths of modules that the first stage has: embeddings. As ``layers``.
        after: the paths of modules that the last stage has: final norm, head. As ``layers``.
        loss: of the model's output and the microbatch; by default ``output.loss``, or the output itself.
        boundary: the shape of the tensor that crosses boundaries, given a microbatch; by default ``[*shape of
            input_ids, config.hidden_size]``.
        schedule: a name of ``parallel.schedule`` but ``auto``.
        virtual_stages: stages of a rank.
        split: numbers of layers of the stages, or how they are found: by numbers of parameters, or evenly.

    Returns:
        the stages; ``.engine(config)`` trains them. A microbatch is a dictionary of the model's arguments, a
        tuple of them, or the only one.

    Raises:
        HexadError: the modules' places are not known or do not fit.
    """
    _check(mesh, schedule)
    model = _Model.of(module, layers, before, after)
    ranks = mesh.pipeline.size
    planned = build_schedule(schedule, ranks, ranks, virtual_stages)
    parts = model.parts(split, planned.stages)
    own = planned.stages_of(mesh.pipeline.rank)
    heres = {number: _Here(number == planned.stages - 1) for number in own}
    stages = {number: model.stage(parts, number, heres[number]) for number in own}
    ties = model.ties(planned.placement, mesh.pipeline.rank)
    model.give_up(stages.values())
    of_stages = {stage: heres[number] for number, stage in stages.items()}

    def compute(stage: nn.Module, batch: Any, message: Tensor | None, _: float | None) -> Tensor:
        return _computed(stage, of_stages[stage], batch, message, loss)

    def empty(batch: Any, _: int) -> Tensor:
        kind = next(p.dtype for stage in stages.values() for p in stage.parameters() if p.is_floating_point())
        shape = boundary(batch) if boundary is not None else _shape(model.module, batch)
        return torch.empty(shape, dtype=kind, device=mesh.device)

    plan = PipelinePlan(planned, parts)
    return PipelinedModel(stages, plan, mesh, ties, schedule, virtual_stages, compute, empty)


class _Listed(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        """The last one's result."""
        for layer in self.layers:
            x = layer(x)
        return x


def _own_plan(module: nn.Module) -> tuple[str, list[str], list[str]]:
    """The list of layers, what is before it and what is after it, by ``pp_plan``."""
    plan: Mapping[str, Any] = getattr(module, "pp_plan", None) or {}
    present = [name for name in plan if _has(module, name)]
    lists = [name for name in present if isinstance(module.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1:
        raise HexadError(
            f"layers: found no plan of {type(module).__name__} (pp_plan) with one list of layers; pass "
            "layers='path.of.the.list', before=['embedding', ...], after=['norm', 'head']"
        )
    given, wanted = plan[lists[0]]
    if list(wanted) != list(given)[:1]:
        raise HexadError(
            f"layers: found {lists[0]} with results {list(wanted)}; expected one, as their input"
        )
    base = lists[0].rpartition(".")[0]
    order = [name for name in present if name.rpartition(".")[0] == base]
    order += [name for name in present if name not in order]  # those of the model around the base model
    place = order.index(lists[0])
    return lists[0], order[:place], order[place + 1 :]


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def _check(mesh: Mesh, schedule: str) -> None:
    """Refuse ranks and schedules that a user's model cannot have.

    Raises:
        HexadError: naming the argument.
    """
    if mesh.context.size > 1:
        raise HexadError(
            f"mesh: found {mesh.context.size} context ranks, of whose tokens a user's attention would see "
            "its own; use tensor, pipeline and data ranks"
        )
    if schedule == "auto":
        raise HexadError("schedule: found auto, which needs costs of layers; name one, such as 1f1b")


def _computed(stage: nn.Module, here: _Here, batch: Any, message: Tensor | None, loss: Loss | None) -> Tensor:
    """What a stage makes of a microbatch and the result of the stage before: the result of its layers, or in
    the last one the loss."""
    here.message = message
    try:
        output = _call(stage, batch)
    except _Reached as reached:
        return reached.result
    finally:
        here.message = None
    assert here.last, "only the last stage runs to its end"
    return _loss(output, batch, loss)


def _call(stage: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return stage(**batch)
    return stage(*batch) if isinstance(batch, tuple) else stage(batch)


def _loss(output: Any, batch: Any, loss: Loss | None) -> Tensor:
    value = loss(output, batch) if loss is not None else getattr(output, "loss", output)
    if not isinstance(value, Tensor) or value.dim():
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise HexadError(f"loss: found {found}, expected a scalar; pass loss=, or labels in the microbatch")
    return value


def _shape(module: nn.Module, batch: Any) -> tuple[int, ...]:
    """Of the hidden states of a microbatch's tokens."""
    width = getattr(getattr(module, "config", None), "hidden_size", None)
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else next(iter(values))
    if width is None or not isinstance(tokens, Tensor):
        raise HexadError("boundary: found none; pass boundary=lambda batch: (shape of what layers return)")
    return (*tokens.shape, width)


@dataclass(frozen=True)
class _Model:
    """A model whose modules' places are known.

    Attributes:
        module: the model.
        layers: path of the list of layers.
        before, after: paths of the other modules with parameters.
    """

    module: nn.Module
    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    @classmethod
    def of(
        cls,
        module: nn.Module | Sequence[nn.Module],
        layers: str | None,
        before: Iterable[str],
        after: Iterable[str],
    ) -> _Model:
        """The arguments of :func:`pipeline`, and what the model says itself.

        Raises:
            HexadError: there is no list of layers.
        """
        if not isinstance(module, nn.Module):
            module, layers = _Listed(module), "layers"
        if layers is None:
            layers, before, after = _own_plan(module)
        if not _has(module, layers):
            raise HexadError(
                f"layers: found {layers!r}, expected the path of a list in {type(module).__name__}"
            )
        listed = module.get_submodule(layers)
        if not isinstance(listed, nn.ModuleList | nn.Sequential):
            raise HexadError(
                f"layers: found {type(listed).__name__} at {layers!r}, expected a ModuleList or Sequential"
            )
        places = ((names,) if isinstance(names, str) else tuple(names) for names in (before, after))
        return cls(module, layers, *places)

    def __post_init__(self) -> None:
        known = (self.layers, *self.before, *self.after)
        for name in known:
            if not _has(self.module, name):
                raise HexadError(f"pipeline: found no module {name!r} in {type(self.module).__name__}")
        for name, _ in self.module.named_parameters():
            if not any(name.startswith(f"{path}.") for path in known):
                raise HexadError(
                    f"pipeline: found the parameter {name}, which is neither in the layers nor before or "
                    "after them; pass before=[...] and after=[...]"
                )

    @property
    def _listed(self) -> list[nn.Module]:
        """The layers, in order; one may be there several times."""
        return [
            layer for layer in self.module.get_submodule(self.layers)._modules.values() if layer is not None
        ]

    def parts(self, split: Literal["cost", "even"] | Sequence[int], stages: int) -> tuple[range, ...]:
        """The layers of every stage.

        Raises:
            HexadError: a stage without layers, or weights that layers of two stages share.
        """
        parts = partition(split, len(self._listed), stages, self._costs())
        self._check_sharing(parts)
        if min(map(len, parts)) == 0:
            raise HexadError(
                f"split: found {[len(part) for part in parts]}, expected a layer for every stage"
            )
        return parts

    def _check_sharing(self, parts: Sequence[range]) -> None:
        stages: dict[nn.Parameter, int] = {}
        held = [(number, index) for number, part in enumerate(parts) for index in part]
        for number, index in held:
            for name, parameter in self._listed[index].named_parameters():
                if stages.setdefault(parameter, number) != number:
                    raise HexadError(
                        f"layers: found {self.layers}.{index}.{name}, which a layer of another stage shares; "
                        "put both into one stage (split), or use no pipeline"
                    )

    def _costs(self) -> LayerCosts:
        """By parameters."""
        weights = [float(_elements(layer)) for layer in self._listed]
        head = sum(_elements(self.module.get_submodule(name)) for name in self.after)
        return LayerCosts(0.0, tuple(weights), float(head))

    def stage(self, parts: Sequence[range], number: int, here: _Here) -> nn.Module:
        """The copy of the model that computes one stage's layers, besides what is not its own."""
        own, last = parts[number], number == len(parts) - 1
        replaced: dict[str, nn.Module] = {}
        for index, layer in enumerate(self._listed):
            kind = _Skipped if index < own.start else _End
            if index not in own:
                replaced[f"{self.layers}.{index}"] = kind(layer, here)
        for name in self.before if number else ():
            replaced[name] = _Before(self.module.get_submodule(name), here)
        for name in self.after if not last else ():
            replaced[name] = _End(self.module.get_submodule(name), here)
        stage = _copied(self.module, replaced)
        if number:
            first = stage.get_submodule(self.layers)[own.start]  # type: ignore[index]
            first.register_forward_pre_hook(_taking(here), with_kwargs=True)
        for index in own:
            stage.get_submodule(f"{self.layers}.{index}").register_forward_hook(_one_tensor)
        return stage

    def ties(self, placement: Sequence[int], rank: int) -> dict[nn.Parameter, Tie]:
        """Parameters that the first and the last stage have in common, where they are on two ranks."""
        if placement[0] == placement[-1]:
            return {}
        first = {p: f"{name}.{own}" for name in self.before for own, p in _named(self.module, name)}
        shared = {p: first[p] for name in self.after for _, p in _named(self.module, name) if p in first}
        if rank not in (placement[0], placement[-1]):
            return {}
        return {p: Tie(name, rank != placement[0], name) for p, name in shared.items()}

    def give_up(self, stages: Iterable[nn.Module]) -> None:
        """Free the memory of parameters that no stage of this rank has."""
        kept = {parameter for stage in stages for parameter in stage.parameters()}
        for parameter in set(self.module.parameters()) - kept:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _named(module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    return list(module.get_submodule(name).named_parameters())


def _copied(module: nn.Module, replaced: Mapping[str, nn.Module], path: str = "") -> nn.Module:
    """A copy of a module in which some of those inside it are replaced; it shares all others."""
    made = copy.copy(module)
    for key, value in vars(module).items():
        if key.startswith("_") and isinstance(value, dict | set):
            vars(made)[key] = copy.copy(value)  # hooks too: those of one copy are not the other's
    for name, child in module._modules.items():
        inner = f"{path}{name}"
        if inner in replaced:
            made._modules[name] = replaced[inner]
        elif child is not None and any(other.startswith(f"{inner}.") for other in replaced):
            made._modules[name] = _copied(child, replaced, f"{inner}.")
    return made


def _taking(here: _Here) -> Any:
    """A hook by which the first layer of a stage takes what the stage before has computed.

    Raises:
        HexadError: the model recomputes its layers, so that the graph does not begin with the message.
    """

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        message = here.message
        if message is None or (message.requires_grad and not torch.is_grad_enabled()):
            raise HexadError(
                "pipeline: found torch.utils.checkpoint around the layers of a model; use it inside the "
                "layers, or the gradient checkpointing of transformers"
            )
        if args:
            return (message, *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: message}

    return take


def _one_tensor(layer: nn.Module, _: Any, output: Any) -> None:
    """Refuse a layer whose result cannot cross a boundary."""
    if not isinstance(output, Tensor):
        raise HexadError(
            f"layers: found {type(output).__name__} as the result of {type(layer).__name__}, expected one "
            "tensor"
        )
