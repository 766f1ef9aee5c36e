"""Lightning's precision plugins, with gradients in an engine: clipping by the norm of all ranks, and
gradients shown to hooks and to loss scalers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from typing import Any, Protocol

from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from hexad.config import HexadError

from .module import has_engine
from .training import ModuleTraining

_OTHERS = BitsandbytesPrecision, DeepSpeedPrecision, FSDPPrecision, TransformerEnginePrecision, XLAPrecision
"""Plugins of other strategies or other kernels."""


class Fit(Protocol):
    """What a plugin asks of its strategy.

    Attributes:
        in_fit: what the fit trains with; None outside a fit.
        reads_gradients: hooks read gradients before a step.
    """

    reads_gradients: bool

    @property
    def in_fit(self) -> ModuleTraining | None: ...

    def clip_by_norm(self, norm: float) -> None:
        """Clip the next step by the norm of all ranks' gradient."""

    def backward_ended(self) -> None:
        """A backward pass has ended; hooks that may read gradients follow."""


class EnginePrecision(Precision):
    """A precision plugin of any class, whose gradients are an engine's.

    Attributes:
        fit: of the strategy.
    """

    fit: Fit

    def __reduce__(self) -> Any:
        """Processes that Lightning spawns get a plugin by the class that this one's has been made of."""
        return _unfilled, (type(self).__bases__[1],), self.__dict__

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert a module's format, but not of one whose engine has its parameters."""
        return module if has_engine(module) else super().convert_module(module)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Add to the gradients of the step, and show them where hooks follow that read them."""
        super().backward(tensor, model, optimizer, *args, **kwargs)
        self.fit.backward_ended()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Make a step, before which the gradients are shown to hooks that read them, and to a loss scaler."""
        training = self.fit.in_fit
        scaler = self.scaler if isinstance(self, MixedPrecision) else None

        def with_gradients() -> Any:
            result = closure()
            if training is not None and scaler is not None:
                training.agree_on_overflow()
            if training is not None and self.fit.reads_gradients:
                training.show(1 / scaler.get_scale() if scaler is not None else 1.0)
            return result

        result = super().optimizer_step(optimizer, model=model, closure=with_gradients, **kwargs)
        if training is not None:
            training.forget_overflow()
        return result

    def main_params(self, optimizer: Optimizer) -> Iterator[Any]:
        """Tensors whose gradients may be changed elementwise."""
        training = self.fit.in_fit
        return iter(()) if training is None else training.main_parameters()

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm of the whole gradient, in the step."""
        self.fit.clip_by_norm(float(clip_val))


def adapted(plugin: Precision, fit: Fit) -> EnginePrecision:
    """A plugin like the given one, with the gradients of a strategy's engine.

    Raises:
        HexadError: it belongs to another strategy.
    """
    if isinstance(plugin, _OTHERS):
        raise HexadError(
            f"HexadStrategy: found the plugin {type(plugin).__name__}, which belongs to another strategy or "
            "other kernels; use Trainer(precision=...) with one of 32-true, 64-true, bf16-true, 16-true, "
            "bf16-mixed, 16-mixed"
        )
    if isinstance(plugin, EnginePrecision):
        result = plugin
    else:
        copied: Any = copy(plugin)
        copied.__class__ = adapted_class(type(plugin))  # type: ignore[arg-type]
        result = copied
    result.fit = fit
    return result


@cache
def adapted_class(kind: type[Precision]) -> type[EnginePrecision]:
    """The class of an adapted plugin; checkpoints name a plugin's state by its class."""
    body = {"__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (EnginePrecision, kind), body)


def _unfilled(kind: type[Precision]) -> EnginePrecision:
    engine_class = adapted_class(kind)  # type: ignore[arg-type]
    return engine_class.__new__(engine_class)
