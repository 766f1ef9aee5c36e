"""Activations that are recomputed in the backward pass instead of kept.

A layer is wrapped from outside (:meth:`Recompute.wrap`); its code does not know. Selective recompute concerns
functions that are cheap, marked with :func:`recomputable`; full recompute repeats the layer's forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hexad.config.schema import MemorySettings

from .block_inventory import Recomputed

Function = TypeVar("Function", bound=Callable[..., Tensor])


class Last(Protocol):
    """What makes a layer's result, and leaves out what nothing else needs while that is not used: when the
    layer's forward pass is repeated."""

    unused: bool


@dataclass(frozen=True)
class Recompute:
    """What the layers of a stage recompute (Korthikanti et al., arXiv 2205.05198, section 5).

    Attributes:
        kind: ``full``: everything but the layer's input (Chen et al., arXiv 1604.06174). ``selective``: what
            costs neither a matrix product nor communication: normalised and activated values, rotated
            queries and keys.
        layers: how many layers of the stage, from its first on; None for all.
    """

    kind: Recomputed = "none"
    layers: int | None = None

    @classmethod
    def from_settings(cls, settings: MemorySettings) -> Recompute:
        """As ``memory.recompute`` and ``memory.recompute_layers`` say."""
        layers = settings.recompute_layers
        return cls(settings.recompute, None if layers == "all" else layers)

    def wrap(self, position: int, layer: nn.Module, last: Last) -> nn.Module:
        """The stage's layer number ``position``, which recomputes from now on where it is one of those;
        ``last`` makes the layer's result."""
        if self.kind != "none" and (self.layers is None or position < self.layers):
            wrapped = _selective(layer.forward) if self.kind == "selective" else _full(layer.forward, last)
            layer.forward = wrapped
        return layer


def _full(forward: Callable[..., Tensor], last: Last) -> Callable[..., Tensor]:
    def recomputing(x: Tensor, *rest: Any) -> Tensor:
        repeated = False

        def run(x: Tensor) -> Tensor:
            nonlocal repeated
            unused, repeated = repeated, True
            last.unused = unused
            try:
                return forward(x, *rest)
            finally:
                last.unused = False

        if not torch.is_grad_enabled():
            return forward(x, *rest)
        # Nothing here draws from a generator: dropout is a function of the element.
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)

    return recomputing


def _selective(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recomputing(*arguments: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        scope = _Selective()
        with scope:
            token = _SCOPE.set(scope)
            try:
                return forward(*arguments)
            finally:
                _SCOPE.reset(token)
                scope.close()

    return recomputing


def recomputable(function: Function) -> Function:
    """Mark a function whose result, in a layer that recomputes selectively, is not kept for the backward pass
    but computed again from its arguments, which are kept anyway.

    It must return the same values in the same memory layout, and be quick. A result that is a view of an
    argument is kept as any other tensor.
    """

    @wraps(function)
    def call(*arguments: Any) -> Tensor:
        scope = None if torch.compiler.is_compiling() else _SCOPE.get()
        if scope is None:
            return function(*arguments)
        token = _SCOPE.set(None)  # what it is made of is its own affair
        try:
            result = function(*arguments)
        finally:
            _SCOPE.reset(token)
        return recomputable_from(result, function, *arguments)

    return call  # type: ignore[return-value]


def recomputable_from(result: Tensor, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """``result``, of which as much holds as of what a :func:`recomputable` function returns."""
    scope = None if torch.compiler.is_compiling() else _SCOPE.get()
    if scope is not None:
        kept = tuple(
            argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments
        )
        scope.register(result, lambda: function(*kept), kept)
    return result


class _Selective(saved_tensors_hooks):
    """While inside, registered results are not kept for the backward pass. Whatever shares a result's memory,
    such as a slice, is cut from the recomputed one."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}
        super().__init__(self._pack, _unpack)

    def register(self, result: Tensor, compute: Callable[[], Tensor], kept: tuple[Any, ...]) -> None:
        """Recompute ``result`` by ``compute``, unless it lies in the memory of what is ``kept``."""
        storage = result.untyped_storage()
        address = storage.data_ptr()
        tensors = (tensor for tensor in kept if isinstance(tensor, Tensor))
        if all(tensor.untyped_storage().data_ptr() != address for tensor in tensors):
            self._sources[address] = _Source(compute, weakref.ref(storage))

    def close(self) -> None:
        """Forget what was registered: from now on it lives as long as the graph that needs it."""
        self._sources.clear()

    def _pack(self, saved: Tensor) -> Any:
        storage = saved.untyped_storage()
        source = self._sources.get(storage.data_ptr())
        if source is None or source.storage() is not storage:  # or other values at the same address
            return saved
        source.uses += 1
        return source, saved.shape, saved.stride(), saved.storage_offset()


# The layer that recomputes selectively, as far as the running thread is inside one.
_SCOPE: ContextVar[_Selective | None] = ContextVar("hexad.recompute", default=None)


class _Source:
    """Recomputes a tensor, and holds it until all that was cut from it has been asked for."""

    def __init__(self, compute: Callable[[], Tensor], storage: weakref.ref[Any]) -> None:
        self.uses = 0
        self.storage = storage
        self._compute = compute
        self._made: Tensor | None = None
        self._asked = 0

    def get(self) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made = self._compute()
        made = self._made
        self._asked += 1
        if self._asked % self.uses == 0:
            self._made = None
        return made


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    source, shape, stride, offset = packed
    return source.get().as_strided(shape, stride, offset)
