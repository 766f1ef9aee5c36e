"""Lists of layers in pipeline stages: which stage has which layers, and what a stage computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hexad.config import HexadError
from hexad.parallel.pipeline.partition import LayerCosts, partition

StageLoss = Callable[[Any, Any], Tensor]
"""The loss, given the model's output and the microbatch."""

Split = Literal["cost", "even"] | Sequence[int]
"""Numbers of layers of the stages, or how they are found: by numbers of parameters, or evenly."""


class LayerStage(nn.Module):
    """Consecutive layers of a list, called one after the other.

    Attributes:
        numbers: of the layers, in the list of all stages.
        functions: the layers, in order: modules or functions.
    """

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.numbers = numbers
        self.functions: list[Callable[[Any], Any]] = []

    @classmethod
    def of(cls, layers: Sequence[nn.Module], numbers: range) -> LayerStage:
        """A stage of some layers of a list, named ``layers.NUMBER``."""
        stage = cls(numbers)
        stage.functions += [layers[number] for number in numbers]
        stage.layers = nn.ModuleDict({str(number): layers[number] for number in numbers})
        return stage

    def forward(self, x: Any) -> Any:
        """The last layer's result."""
        for function in self.functions:
            x = function(x)
        return x


def divided(
    layers: Sequence[nn.Module], path: str, split: Split, stages: int, after: Iterable[nn.Module] = ()
) -> tuple[range, ...]:
    """The numbers of every stage's layers.

    Args:
        layers: of all stages, in order; one may be there several times.
        path: of the list, for messages.
        split: how they are divided.
        stages: how many there are.
        after: further modules of the last stage.

    Raises:
        HexadError: a stage without layers, or weights that layers of two stages share.
    """
    head = float(sum(map(elements, after)))
    costs = LayerCosts(0.0, tuple(float(elements(layer)) for layer in layers), head)
    parts = partition(split, len(layers), stages, costs)
    stage_of: dict[nn.Parameter, int] = {}
    for stage, part in enumerate(parts):
        for number in part:
            for name, parameter in layers[number].named_parameters():
                if stage_of.setdefault(parameter, stage) != stage:
                    raise HexadError(
                        f"layers: found {path}.{number}.{name}, which a layer of another stage shares; "
                        "put both into one stage (split), or use no pipeline"
                    )
    if min(map(len, parts)) == 0:
        raise HexadError(f"split: found {[len(part) for part in parts]}, expected a layer for every stage")
    return parts


def elements(module: nn.Module) -> int:
    """The number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def free(parameters: Iterable[nn.Parameter], stages: Iterable[nn.Module]) -> None:
    """Free the memory of parameters that no stage of this rank has."""
    kept = {parameter for stage in stages for parameter in stage.parameters()}
    for parameter in set(parameters) - kept:
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def call(stage: nn.Module, batch: Any) -> Any:
    """A module's result of a microbatch: a dictionary of its arguments, a tuple of them, or the only one."""
    if isinstance(batch, Mapping):
        return stage(**batch)
    return stage(*batch) if isinstance(batch, tuple) else stage(batch)


def loss_of(output: Any, batch: Any, loss: StageLoss | None) -> Tensor:
    """The loss of a model's output: by the function, or ``output.loss``, or the output itself.

    Raises:
        HexadError: it is no scalar.
    """
    value = loss(output, batch) if loss is not None else getattr(output, "loss", output)
    if not isinstance(value, Tensor) or value.dim():
        actual = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise HexadError(f"loss: found {actual}, expected a scalar; pass loss=, or labels in the microbatch")
    return value
