"""The operations of a model: those of the undivided one are recorded, those of the divided one compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import layers
from .sizes import DividedDims, Gradient, Misfit, Operand, Shape, ShardedOperation

UNRECORDED = frozenset("clone detach alias lift_fresh _to_copy contiguous".split())
"""Operations that return the same elements, and that may be left out where a tensor is contiguous."""
LAYERS = {
    "colwise": (0, 1),
    "packed_colwise": (0, 2),
    "colwise_gather_output": (0, 0),
    "rowwise": (1, 0),
    "packed_rowwise": (2, 0),
    "rowwise_split_input": (0, 0),
    "embedding_rowwise": (0, 0),
    "embedding_colwise": (0, 0),
    "all_reduce": (0, 0),
}
"""Style of a layer -> parts of the features that it takes and returns; 0: all ranks have all of them. What
``all_reduce`` takes is not looked at."""


class RecordedOperation(NamedTuple):
    """An operation of the undivided model.

    Attributes:
        name: of the operation, or the path of a layer that the plan names.
        operands, results: shapes.
        values: other arguments.
        dtype: of the first result.
    """

    name: str
    operands: list[Shape]
    results: list[Shape]
    values: dict[str, Any]
    dtype: torch.dtype


class OperationRecorder(TorchDispatchMode):
    """Records what the undivided model computes, or compares the divided model with that.

    Args:
        plan: styles by layer, ranks and sequence parallel.
        reference: the calls of the undivided model; None to record them.

    Attributes:
        calls: of the undivided model.
        place: how many of them have been compared.
    """

    def __init__(self, plan: LayerStyles, reference: list[RecordedOperation] | None = None) -> None:
        super().__init__()
        self.calls: list[RecordedOperation] = [] if reference is None else reference
        self._compares, self._plan = reference is not None, plan
        self.place, self._paused = 0, False
        self._states: dict[Any, tuple[DividedDims, Gradient]] = {}
        self._alive: list[Tensor] = []
        self._modules: list[str] = [""]

    @property
    def module(self) -> str:
        """The path of the module that computes."""
        return self._modules[-1]

    @property
    def complete(self) -> bool:
        """All calls have been compared."""
        return self.place == len(self.calls)

    def expected(self) -> str:
        """The next operation of the undivided model."""
        call = None if self.complete else self.calls[self.place]
        return (
            "" if call is None else f", expected shape {list(call.results[0])} of {call.name} or a part of it"
        )

    def watch(self, module: nn.Module) -> None:
        """Follow a model from module to module."""
        for name, part in module.named_modules():
            part.register_forward_pre_hook(partial(self._begin, name))
            part.register_forward_hook(self._end)

    def _begin(self, name: str, *_: Any) -> None:
        self._modules.append(name)

    def _end(self, *_: Any) -> None:
        self._modules.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if results and not self._paused:
            self._record(function, args, kwargs or {}, results)
        return result

    def _record(self, function: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        name = function.overloadpacket.__name__
        values = {argument.name: argument.default_value for argument in function._schema.arguments}
        values |= dict(zip(values, args)) | kwargs
        if name in UNRECORDED:
            for tensor in results:
                self.mark(tensor, *self.state(args[0]))
            return
        pointwise = torch.Tag.pointwise in function.tags
        self._add("view" if name == "_unsafe_view" else name, values, results, pointwise)

    def _add(
        self, name: str, values: dict[str, Any], results: Sequence[Tensor], pointwise: bool = False
    ) -> None:
        """Record a call, or compare it with that of the undivided model."""
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        values = tree_map(lambda leaf: ... if isinstance(leaf, Tensor) else leaf, values)
        shapes = [_shape(tensor) for tensor in results]
        if not self._compares:
            self.calls.append(
                RecordedOperation(name, [_shape(t) for t in tensors], shapes, values, results[0].dtype)
            )
            return
        call = self._expect(name)
        if len(call.operands) != len(tensors) or len(call.results) != len(shapes):
            expected = f"{len(call.operands)} to {len(call.results)}"
            raise Misfit(f"found {name} of {len(tensors)} tensors to {len(shapes)}, expected {expected}")
        operands = [self._operand(tensor, whole) for tensor, whole in zip(tensors, call.operands)]
        pairs = list(zip(call.results, shapes))
        operation = ShardedOperation(name, pointwise, operands, call.values, values, pairs, self._plan.ranks)
        for tensor, operand in zip(results, operation.results()):
            self.mark(tensor, operand.parts, operand.gradient)
        self.place += 1

    def composite(self, name: str, values: dict[str, Any], compute: Callable[[], Tensor]) -> Tensor:
        """The result of several operations, recorded as one."""
        with self._pause():
            result = compute()
        self._add(name, values, [result])
        return result

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Record nothing."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _expect(self, name: str) -> RecordedOperation:
        """The call of the undivided model in this place.

        Raises:
            Misfit: it is another one.
        """
        if self.complete or self.calls[self.place].name != name:
            raise Misfit(f"found the operation {name}{self.expected() or ', expected none'}")
        return self.calls[self.place]

    def state(self, tensor: Tensor) -> tuple[DividedDims, Gradient]:
        """The divided dims of a tensor, and its gradient."""
        return self._states.get(_key(tensor), ({}, "none"))

    def mark(self, tensor: Tensor, parts: DividedDims, gradient: Gradient) -> None:
        """Record them; the tensor is kept, so that no other one gets its address."""
        self._alive.append(tensor)
        self._states[_key(tensor)] = parts, gradient

    def _operand(self, tensor: Tensor, whole: Shape) -> Operand:
        parts, gradient = self.state(tensor)
        local = _shape(tensor)
        if not parts and local != whole:
            raise Misfit(f"found shape {list(local)}, expected {list(whole)}")
        return Operand(whole, local, parts, gradient)

    def layer(self, name: str, compute: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """The result of a layer that the plan names: in the divided model only its shape."""
        with self._pause():
            if self._compares:
                return self._divided(name, inputs)
            result = compute()
            self.calls.append(
                RecordedOperation(name, [_shape(x) for x in inputs], [_shape(result)], {}, result.dtype)
            )
            return result

    def _divided(self, name: str, inputs: Sequence[Tensor]) -> Tensor:
        call, style = self._expect(name), self._plan.styles[name]
        (whole,) = call.results
        takes, returns = self._plan.of_layer(style, len(whole))
        for x, shape in zip(inputs, call.operands):
            parts, gradient = self.state(x)
            if takes is not None and (parts != takes or gradient == "summed"):
                part = "a rank's part of " if takes else ""
                raise Misfit(f"found an input of shape {list(x.shape)}, expected {part}{list(shape)}")
        local = [size // self._plan.ranks if dim in returns else size for dim, size in enumerate(whole)]
        result = torch.empty(local, dtype=call.dtype, device=inputs[0].device)
        self.mark(result, returns, "none" if returns else "whole")
        self.place += 1
        return result


def _shape(tensor: Tensor) -> Shape:
    return tuple(tensor.shape)


def _key(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


class Composites(TorchFunctionMode):
    """Leaves to a recorder, as one operation, what consists of different ones by the sizes of dims."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(function, *args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            values = dict(zip(_ATTENTION, args)) | (kwargs or {})
            return self._recorder.composite("scaled_dot_product_attention", values, call)
        if function is torch.einsum and isinstance(args[0], str) and "->" in args[0] and "." not in args[0]:
            return self._recorder.composite("einsum", {"equation": args[0], "operands": args[1:]}, call)
        return call()


_ATTENTION = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()


class _Tried:
    """A layer that the plan names, in a trial."""

    recorder: OperationRecorder
    path: str

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer, and compare its result by :meth:`OperationRecorder.layer`."""
        compute = partial(super().forward, *args, **kwargs)  # type: ignore[misc]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return self.recorder.layer(self.path, compute, inputs)


@cache
def tried(kind: Any) -> Any:
    """The class of a layer in a trial: what a subclass adds to that of ``torch.nn`` is computed."""
    known = next((base for base in kind.__mro__ if base in _KINDS), kind)
    return layers.class_of(kind, type(f"Tried{known.__name__}", (_Tried, known), {}))


_KINDS = (
    layers.ColumnLinear,
    layers.RowLinear,
    layers.RowEmbedding,
    layers.ColumnEmbedding,
    nn.Linear,
    nn.Embedding,
)


@dataclass(frozen=True)
class LayerStyles:
    """The styles that a plan gives to a module's layers.

    Attributes:
        styles: by path, those of :data:`LAYERS`.
        ranks: of the tensor axis.
        sequence: sequence parallel.
        divide: divides a copy of the module.
    """

    styles: Mapping[str, str]
    ranks: int
    sequence: bool
    divide: Callable[[nn.Module], None]

    def of_layer(self, style: str, dims: int) -> tuple[DividedDims | None, DividedDims]:
        """Divided dims of the inputs and of the result, which has ``dims``; None: any."""
        if style == "all_reduce":
            return None, {}
        takes, returns = ({dims - 1: parts} if parts else {} for parts in LAYERS[style])
        tokens = {1: 1} if self.sequence else {}
        if style in ("rowwise", "packed_rowwise", "embedding_rowwise"):
            return takes, tokens
        return tokens, returns
