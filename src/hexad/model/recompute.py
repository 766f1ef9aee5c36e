"""Activations that are recomputed in the backward pass instead of kept.

A layer is wrapped from outside (:func:`recomputing`). Its code marks by :func:`recomputable` what makes each
part of it, see :data:`~hexad.model.recompute_inventory.Part`; the layer itself does not know which parts are
recomputed. Full recompute repeats the layer's forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hexad.comm.memory import memory_of

from .recompute_inventory import RecomputedPart, RecomputedParts

Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])
"""A tensor, or several that are views of the same memory."""


class Last(Protocol):
    """The last operation of a layer. It is left out when the layer's forward pass is repeated only for the
    values before it."""

    unused: bool


def recomputing(layer: nn.Module, parts: RecomputedParts, last: Last) -> nn.Module:
    """The layer, which recomputes these parts from now on; ``last`` makes its result."""
    if "layer" in parts:
        layer.forward = _full(layer.forward, last)
    elif parts:
        layer.forward = _selective(layer.forward, parts)
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
        # Nothing here draws from a generator: dropout is a function of the element. Formats and devices are
        # not compared, which takes the host time: no layer chooses them anew.
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none")

    return recomputing


def _selective(forward: Callable[..., Tensor], parts: RecomputedParts) -> Callable[..., Tensor]:
    def recomputing(*arguments: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        scope = _Selective(parts)
        with scope:
            token = _SCOPE.set(scope)
            try:
                return forward(*arguments)
            finally:
                _SCOPE.reset(token)
                scope.close()

    return recomputing


def recomputable(part: RecomputedPart, function: Callable[..., Result], *arguments: Any) -> Result:
    """``function(*arguments)``. In a layer that recomputes the part, the result is not kept for the backward
    pass but computed again from the arguments, which are kept, or recomputed themselves.

    The function must return the same values in the same memory layout. A result that is a view of an argument
    is kept as any other tensor. Parameters are not among the arguments: in ZeRO 3 they are in other memory
    when the function is repeated.
    """
    scope = _scope_of(part)
    if scope is None:
        return function(*arguments)
    token = _SCOPE.set(None)  # its parts are private
    try:
        result = function(*arguments)
    finally:
        _SCOPE.reset(token)
    scope.register(result, function, arguments)
    return result


def recomputable_from(
    part: RecomputedPart, result: Tensor, function: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    """``result``, which ``function(*arguments)`` would return: the same conditions as for the result of a
    :func:`recomputable` function."""
    scope = _scope_of(part)
    if scope is not None:
        scope.register(result, function, arguments)
    return result


def _scope_of(part: RecomputedPart) -> _Selective | None:
    """The running layer's scope, if the layer recomputes this part."""
    scope = None if torch.compiler.is_compiling() else _SCOPE.get()
    return scope if scope is not None and part in scope.parts else None


class _Selective(saved_tensors_hooks):
    """While inside, registered results are not kept for the backward pass. Whatever shares a result's memory,
    such as a slice, is cut from the recomputed one.

    Attributes:
        parts: that are recomputed.
    """

    def __init__(self, parts: RecomputedParts) -> None:
        self.parts = parts
        self._sources: dict[int, _RecomputedTensor] = {}
        super().__init__(self._pack, _unpack)

    def register(
        self, result: Tensor | tuple[Tensor, ...], function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        """Recompute ``result`` by ``function``, unless it lies in the memory of an argument."""
        storage = (result if isinstance(result, Tensor) else result[0]).untyped_storage()
        memory = storage._cdata
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if all(memory_of(tensor) != memory for tensor in tensors):
            self._sources[memory] = _RecomputedTensor(function, arguments, weakref.ref(storage))

    def close(self) -> None:
        """Forget what was registered: from now on it lives as long as the graph that needs it."""
        self._sources.clear()

    def _pack(self, saved: Tensor) -> Any:
        storage = saved.untyped_storage()
        source = self._sources.get(storage._cdata)
        if source is None or source.storage() is not storage:  # or other values at the same address
            # A result's graph holds the function that made it, and the function holds the result: if no
            # backward pass reaches them, neither is ever released.
            return saved.detach()
        source.use(self._pack)
        return source, saved.shape, saved.stride(), saved.storage_offset()


# The layer that recomputes parts of it, as far as the running thread is inside one.
_SCOPE: ContextVar[_Selective | None] = ContextVar("hexad.recompute", default=None)


class _RecomputedTensor:
    """Recomputes a tensor, and holds it until all that was cut from it has been asked for.

    Attributes:
        storage: the memory of the result in the forward pass.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], storage: weakref.ref[Any]
    ) -> None:
        self.storage = storage
        self._function = function
        self._arguments = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        self._uses = self._asked = 0
        self._result: Tensor | None = None

    def use(self, pack: Callable[[Tensor], Any]) -> None:
        """Count one tensor that is cut from it. The first use keeps the arguments, as ``pack`` says: those
        that are recomputed themselves are not held."""
        if self._uses == 0:
            self._arguments = [
                _PackedArgument(pack(a)) if isinstance(a, Tensor) else a for a in self._arguments
            ]
        self._uses += 1

    def get(self) -> Tensor:
        """The tensor, of the memory layout that it had in the forward pass."""
        if self._result is None:
            arguments = [a.get() if isinstance(a, _PackedArgument) else a for a in self._arguments]
            with torch.no_grad():
                result = self._function(*arguments)
            self._result = result if isinstance(result, Tensor) else result[0]
        tensor = self._result
        self._asked += 1
        if self._asked % self._uses == 0:
            self._result = None
        return tensor


class _PackedArgument:
    def __init__(self, packed: Any) -> None:
        self._packed = packed

    def get(self) -> Tensor:
        """The argument, recomputed if it is not kept."""
        return _unpack(self._packed)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    source, shape, stride, offset = packed
    return source.get().as_strided(shape, stride, offset)
