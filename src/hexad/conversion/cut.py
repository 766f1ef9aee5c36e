"""A model's forward pass, as it is written, cut into pipeline stages.

Each stage is a copy of the model that has only its own layers. Where the list of layers begins, it takes what
the stage before has computed; where its layers end, it stops. What the model does besides (masks, positions)
is done in every stage. So nothing must be known of the model but which of its modules come before the list
and which after: what ``transformers`` models say in ``pp_plan``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hexad.config import HexadError
from hexad.engine.modules import Tie

from .stages import Split, StageLoss, call, divided, loss_of


@dataclass
class _Here:
    """The state of a running stage that its modules read.

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
    """Stands in for a module that another stage has; its plain attributes are here."""

    def __init__(self, module: nn.Module, here: _Here) -> None:
        super().__init__()
        known = vars(nn.Module()).keys()
        vars(self).update({key: value for key, value in vars(module).items() if key not in known})
        self.here = here


class _Before(_Stub):
    """Stands in for a module before the layers: its result is used by nothing but layers, the first of which
    takes something else."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """NaN like what crosses the stages' boundaries: what used it would be wrong."""
        assert self.here.message is not None
        return torch.full_like(self.here.message, torch.nan, requires_grad=False)


class _Skipped(_Stub):
    """Stands in for an earlier stage's layer."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The input, unchanged: the stage's first layer takes something else."""
        return hidden_states


class _End(_Stub):
    """Stands in for the modules that follow the stage's layers."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Stop the forward pass.

        Raises:
            _Reached: always.
        """
        raise _Reached(hidden_states)


@dataclass(frozen=True)
class CutModel:
    """A model whose modules' places are known, to be cut into stages.

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
        module: nn.Module,
        layers: str | None,
        before: Iterable[str],
        after: Iterable[str],
    ) -> CutModel:
        """The arguments of :func:`~hexad.conversion.pipeline.pipeline`, and what the model says itself.

        Raises:
            HexadError: there is no list of layers.
        """
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

    def parts(self, split: Split, stages: int) -> tuple[range, ...]:
        """The layers of every stage, see :func:`~hexad.conversion.stages.divided`."""
        after = [self.module.get_submodule(name) for name in self.after]
        return divided(self._listed, self.layers, split, stages, after)

    def stage(
        self, parts: Sequence[range], number: int, loss: StageLoss | None
    ) -> tuple[nn.Module, Callable[[Any, Any], Any]]:
        """(the copy of the model that computes one stage's layers, besides what is not its own; what that
        passes on, of the last one the loss, of a microbatch and the result of the stage before)."""
        part, last = parts[number], number == len(parts) - 1
        here = _Here(last)
        replaced: dict[str, nn.Module] = {}
        for index, layer in enumerate(self._listed):
            kind = _Skipped if index < part.start else _End
            if index not in part:
                replaced[f"{self.layers}.{index}"] = kind(layer, here)
        for name in self.before if number else ():
            replaced[name] = _Before(self.module.get_submodule(name), here)
        for name in self.after if not last else ():
            replaced[name] = _End(self.module.get_submodule(name), here)
        stage = _copied(self.module, replaced)
        if number:
            first = stage.get_submodule(self.layers)[part.start]  # type: ignore[index]
            first.register_forward_pre_hook(_taking(here), with_kwargs=True)
        for index in part:
            stage.get_submodule(f"{self.layers}.{index}").register_forward_hook(_one_tensor)
        return stage, partial(_passed, stage, here, loss)

    def ties(self, placement: Sequence[int], rank: int) -> dict[nn.Parameter, Tie]:
        """Parameters that the first and the last stage have in common, where they are on two ranks."""
        if placement[0] == placement[-1]:
            return {}
        first = {p: f"{name}.{path}" for name in self.before for path, p in _named(self.module, name)}
        shared = {p: first[p] for name in self.after for _, p in _named(self.module, name) if p in first}
        if rank not in (placement[0], placement[-1]):
            return {}
        return {p: Tie(name, rank != placement[0], name) for p, name in shared.items()}


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
    inputs, results = plan[lists[0]]
    if list(results) != list(inputs)[:1]:
        raise HexadError(
            f"layers: found {lists[0]} with results {list(results)}; expected one, as their input"
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


def _passed(
    stage: nn.Module, here: _Here, loss: StageLoss | None, batch: Any, message: Tensor | None
) -> Tensor:
    """Run a stage on a microbatch and the result of the stage before; returns the result of its layers, or in
    the last stage the loss."""
    here.message = message
    try:
        output = call(stage, batch)
    except _Reached as reached:
        return reached.result
    finally:
        here.message = None
    assert here.last, "only the last stage runs to its end"
    return loss_of(output, batch, loss)


def _named(module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
    return list(module.get_submodule(name).named_parameters())


def _copied(module: nn.Module, replaced: Mapping[str, nn.Module], path: str = "") -> nn.Module:
    """A copy of a module in which some of those inside it are replaced; it shares all others."""
    copied = copy.copy(module)
    for key, value in vars(module).items():
        if key.startswith("_") and isinstance(value, dict | set):
            vars(copied)[key] = copy.copy(value)  # hooks too: those of one copy are not the other's
    for name, child in module._modules.items():
        inner = f"{path}{name}"
        if inner in replaced:
            copied._modules[name] = replaced[inner]
        elif child is not None and any(other.startswith(f"{inner}.") for other in replaced):
            copied._modules[name] = _copied(child, replaced, f"{inner}.")
    return copied


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
