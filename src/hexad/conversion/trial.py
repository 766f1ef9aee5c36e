"""A trial pass of a model that is to be divided: would a rank compute its part of what one process computes?

Copies of the model, undivided and divided, compute with fake tensors, which have shapes and no values.
Operations are compared one by one (:mod:`.sizes`). Nothing is sent, and nothing depends on the rank.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hexad.config import HexadError
from hexad.parallel.sharding import declared_parameters

from . import layers
from .sizes import Gradient, Misfit, Operand, Operation, Parts, Shape

log = logging.getLogger("hexad")

HEADS = frozenset(
    "num_heads n_head n_heads nheads num_head nhead heads h nh num_attention_heads n_attention_heads "
    "num_key_value_heads num_kv_heads n_kv_heads n_kv_head n_local_heads n_local_kv_heads kv_heads "
    "num_query_heads num_q_heads n_query_heads".split()
)
"""Attributes that are numbers of heads, where a module has divided layers."""
PRIMES = (7, 5, 11, 3, 13, 17, 19, 23, 29, 31, 37, 41)
"""Sizes of the batch and numbers of tokens."""
WIDEST = 3
"""Numbers of features that are tried for hidden states."""
OTHERS = 3
"""Arguments of a forward pass besides the first one that are guessed."""
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

Attributes = Mapping[tuple[str, str], int]
"""Path and attribute of a module -> this rank's number."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Call(NamedTuple):
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


class Recorder(TorchDispatchMode):
    """Records what the undivided model computes, or compares the divided model with that.

    Args:
        plan: styles by layer, ranks and sequence parallel.
        reference: the calls of the undivided model; None to record them.

    Attributes:
        calls: of the undivided model.
        place: how many of them have been compared.
    """

    def __init__(self, plan: Plan, reference: list[Call] | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = [] if reference is None else reference
        self._compares, self._plan = reference is not None, plan
        self.place, self._paused = 0, False
        self._states: dict[Any, tuple[Parts, Gradient]] = {}
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
        """What the undivided model computes next."""
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
        schema = function._schema.arguments
        values = {argument.name: argument.default_value for argument in schema}
        values |= dict(zip(values, args)) | kwargs
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        if name in UNRECORDED:
            for tensor in results:
                self.mark(tensor, *self.state(tensors[0]))
            return
        name = "view" if name == "_unsafe_view" else name
        values = tree_map(lambda leaf: ... if isinstance(leaf, Tensor) else leaf, values)
        shapes = [_shape(tensor) for tensor in results]
        if not self._compares:
            self.calls.append(Call(name, [_shape(t) for t in tensors], shapes, values, results[0].dtype))
            return
        call = self._next(name)
        if len(call.operands) != len(tensors) or len(call.results) != len(shapes):
            expected = f"{len(call.operands)} to {len(call.results)}"
            raise Misfit(f"found {name} of {len(tensors)} tensors to {len(shapes)}, expected {expected}")
        operands = [self._operand(tensor, whole) for tensor, whole in zip(tensors, call.operands)]
        pointwise, pairs = torch.Tag.pointwise in function.tags, list(zip(call.results, shapes))
        operation = Operation(name, pointwise, operands, call.values, values, pairs, self._plan.ranks)
        for tensor, operand in zip(results, operation.results()):
            self.mark(tensor, operand.parts, operand.gradient)

    def _next(self, name: str) -> Call:
        if self.complete or self.calls[self.place].name != name:
            raise Misfit(f"found the operation {name}{self.expected() or ', expected none'}")
        self.place += 1
        return self.calls[self.place - 1]

    def state(self, tensor: Tensor) -> tuple[Parts, Gradient]:
        """The divided dims of a tensor, and its gradient."""
        return self._states.get(_key(tensor), ({}, "none"))

    def mark(self, tensor: Tensor, parts: Parts, gradient: Gradient) -> None:
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
        self._paused = True
        try:
            if self._compares:
                return self._divided(name, inputs)
            result = compute()
            self.calls.append(Call(name, [_shape(x) for x in inputs], [_shape(result)], {}, result.dtype))
            return result
        finally:
            self._paused = False

    def _divided(self, name: str, inputs: Sequence[Tensor]) -> Tensor:
        call, style = self._next(name), self._plan.styles[name]
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
        return result


def _shape(tensor: Tensor) -> Shape:
    return tuple(tensor.shape)


def _key(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


class _Tried:
    """A layer that the plan names, in a trial."""

    recorder: Recorder
    path: str

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As :meth:`Recorder.layer`."""
        compute = partial(super().forward, *args, **kwargs)  # type: ignore[misc]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return self.recorder.layer(self.path, compute, inputs)


@cache
def _tried(kind: Any) -> Any:
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
class Plan:
    """What a plan says of a module's layers.

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

    def of_layer(self, style: str, dims: int) -> tuple[Parts | None, Parts]:
        """Divided dims of the inputs and of the result, which has ``dims``; None: any."""
        if style == "all_reduce":
            return None, {}
        takes, returns = ({dims - 1: parts} if parts else {} for parts in LAYERS[style])
        tokens = {1: 1} if self.sequence else {}
        if style in ("rowwise", "packed_rowwise", "embedding_rowwise"):
            return takes, tokens
        return tokens, returns


class Trial:
    """A module that is to be divided, and its plan.

    Args:
        module: undivided; it is copied.
        plan: of its layers, by their paths in the module.
        path: of the module in the user's model.
        device: where it computes.

    Attributes:
        path: as above.
    """

    def __init__(self, module: nn.Module, plan: Plan, path: str, device: torch.device) -> None:
        self._module, self._plan, self.path, self._device = _on_meta(module), plan, path, device

    def attributes(self) -> Attributes | None:
        """Numbers of heads and features that a rank's modules need; None if the arguments are not known.

        Raises:
            HexadError: with none of them a rank would compute its part of what one process computes.
        """
        for arguments in self._guesses():
            calls = self._calls(arguments)
            if isinstance(calls, list):
                return self._attributes(arguments, calls)
        return None

    def at_first_call(self, module: nn.Module) -> None:
        """Do the same when the module is called, with the shapes of what it is called with."""

        def check(called: nn.Module, args: Any, kwargs: Any) -> None:
            called._forward_pre_hooks.pop(handle.id, None)  # of a copy of the module, too
            called._forward_pre_hooks_with_kwargs.pop(handle.id, None)
            arguments = tree_map(_empty, (args, kwargs))
            calls = self._calls(arguments)
            if not isinstance(calls, list):
                words = "parallelize: %s was not tried: found %s; compare its loss with that of one process"
                log.warning(words, self._named(""), _words(calls))
                return
            set_attributes(called, self._attributes(arguments, calls))

        handle = module.register_forward_pre_hook(check, with_kwargs=True)

    def _attributes(self, arguments: Arguments, calls: list[Call]) -> Attributes:
        """The first numbers with which the divided module computes a rank's part.

        Raises:
            HexadError: there are none; the message is that of the module that gets furthest.
        """
        errors: list[tuple[int, HexadError]] = []
        for heads, widths in ((False, False), (True, False), (True, True)):
            attributes = dict(self._numbers(heads, widths))
            recorder = Recorder(self._plan, calls)
            try:
                self._compare(recorder, arguments, attributes)
            except HexadError as error:
                errors.append((recorder.place, error))
            else:
                return attributes
        raise max(errors, key=lambda pair: pair[0])[1]

    def _numbers(self, heads: bool, widths: bool) -> Iterator[tuple[tuple[str, str], int]]:
        """Of modules that have divided layers: numbers of heads, and of the features that are divided."""
        sizes: dict[str, set[int]] = {}
        for path, style in self._plan.styles.items():
            layer = self._module.get_submodule(path)
            for parts, name in zip(LAYERS[style], ("in_features", "out_features")):
                sizes.setdefault(path.rpartition(".")[0], set()).update(
                    {getattr(layer, name)} if parts else ()
                )
        for path, known in sizes.items():
            for name, value in vars(self._module.get_submodule(path)).items():
                chosen = (heads and known and name in HEADS) or (
                    widths and type(value) is int and value in known
                )
                if chosen and type(value) is int and value % self._plan.ranks == 0:
                    yield (path, name), value // self._plan.ranks

    def _calls(self, arguments: Arguments) -> list[Call] | Exception:
        """What the undivided module computes; an error if it cannot be called so."""
        recorder = Recorder(self._plan)
        try:
            self._run(_on_meta(self._module), recorder, arguments)
        except Exception as error:  # whatever a module raises
            return error
        return recorder.calls

    def _compare(self, recorder: Recorder, arguments: Arguments, attributes: Attributes) -> None:
        """Compare the divided module with the calls that a recorder has.

        Raises:
            HexadError: they differ.
        """
        divided = _on_meta(self._module)
        try:
            self._plan.divide(divided)
            set_attributes(divided, attributes)
            result = self._run(divided, recorder, arguments)
            for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
                parts, gradient = recorder.state(tensor)
                if parts and not (self._plan.sequence and parts.keys() == {1}):
                    raise Misfit(
                        f"found a result of shape {list(tensor.shape)}, a rank's part, expected all of it"
                    )
                if gradient == "summed":
                    raise Misfit(
                        "found a 'partial' parameter, expected one that is used for a rank's own heads"
                    )
            if not recorder.complete:
                raise Misfit(f"found the end{recorder.expected()}")
        except Exception as error:  # whatever a module raises that one process does not raise
            words = str(error) if isinstance(error, Misfit) else f"found {_words(error)}{recorder.expected()}"
            raise HexadError(
                f"plan: {self._named(recorder.module)} would not compute a rank's part: {words}; leave its "
                "layers out of the plan"
            ) from None

    def _named(self, path: str) -> str:
        kind = type(self._module.get_submodule(path)).__name__
        name = ".".join(filter(None, (self.path, path)))
        return f"{name} ({kind})" if name else kind

    def _run(self, module: nn.Module, recorder: Recorder, arguments: Arguments) -> Any:
        """Call a copy with fake tensors."""
        for path in self._plan.styles:
            layer = module.get_submodule(path)
            vars(layer).update(recorder=recorder, path=path)
            layer.__class__ = _tried(type(layer))  # type: ignore[arg-type]
        summed = {id(d.parameter) for d in declared_parameters(module) if d.declaration.weights[0].partial}
        wholes = dict(self._module.named_parameters())
        with torch.no_grad(), _quiet(), FakeTensorMode():
            fakes = _Fakes(self._device)
            args, kwargs = tree_map(fakes.of, arguments)
            for tensor in tree_leaves(arguments):
                if isinstance(tensor, Tensor):
                    recorder.mark(fakes.of(tensor), {}, "whole" if tensor.requires_grad else "none")
            for name, parameter in module.named_parameters():
                whole = wholes.get(name, parameter)
                parts = {d: 1 for d, size in enumerate(whole.shape) if size != parameter.shape[d]}
                is_summed = id(parameter) in summed
                gradient: Gradient = "summed" if is_summed else "whole" if parameter.requires_grad else "none"
                recorder.mark(fakes.of(parameter), parts, "none" if parts else gradient)
            fakes.replace_all(module)
            recorder.watch(module)
            with recorder:
                return module(*args, **kwargs)

    # How a module may be called

    def _guesses(self) -> Iterator[Arguments]:
        """Arguments by the module's signature and its first layers: token ids, or hidden states."""
        try:
            parameters = inspect.signature(self._module.forward).parameters
        except ValueError:
            return
        batch, length = self._sizes()
        ids = torch.empty(batch, length, dtype=torch.int64, device="meta")
        tokens = {name: ids for name in ("input_ids", "decoder_input_ids") if name in parameters}
        if tokens:
            yield (), tokens | ({"use_cache": False} if "use_cache" in parameters else {})
            return
        named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = sum(p.default is p.empty for p in named)
        mask = torch.empty(length, length, dtype=torch.bool, device="meta")
        for first in self._inputs(ids):
            for others in itertools.product((first, mask, None), repeat=min(max(required - 1, 0), OTHERS)):
                yield (first, *others), {}

    def _inputs(self, ids: Tensor) -> Iterator[Tensor]:
        modules = list(self._module.modules())
        if any(isinstance(module, nn.Embedding) for module in modules):
            yield ids
        widths = [m.in_features if isinstance(m, nn.Linear) else _width(m) for m in modules]
        dtype = next((p.dtype for p in self._module.parameters() if p.is_floating_point()), torch.float32)
        for width in list(dict.fromkeys(filter(None, widths)))[:WIDEST]:
            for shape in ((*ids.shape, width), (len(ids), width)):
                yield torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def _sizes(self) -> tuple[int, int]:
        """A batch and a number of tokens that the ranks do not divide, and that are no weight's size."""
        ranks = self._plan.ranks
        known = {size for parameter in self._module.parameters() for size in parameter.shape}
        odd = [size for size in PRIMES if ranks % size]
        length, batch = (*(size for size in odd if size not in known), *odd)[:2]
        return batch, length * ranks if self._plan.sequence else length


def set_attributes(module: nn.Module, attributes: Attributes) -> None:
    """Give modules a rank's numbers of heads and features."""
    for (path, name), value in attributes.items():
        setattr(module.get_submodule(path), name, value)


def tops(module: nn.Module, planned: Iterable[str], path: str = "") -> Iterator[str]:
    """The paths of the modules to try: the model, or those inside it where its ``forward`` is missing or only
    passes its arguments on (wrappers)."""
    names = list(planned)
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except ValueError:
        parameters = []
    if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if any(other.startswith(f"{inner}.") for other in names):
                yield from tops(child, names, inner)
    else:
        yield path


def _words(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _width(module: nn.Module) -> int | None:
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if isinstance(shape, tuple) and shape else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without PyTorch's log of operations that fail: the trial reports them."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.disabled = before


def _empty(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)


def _on_meta(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy without values. Modules, parameters, buffers and containers are its own, all else is shared."""
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    made = memo[id(module)] = type(module).__new__(type(module))
    for key, value in vars(module).items():
        if isinstance(value, dict):
            copies = {name: _copied(inner, memo) for name, inner in value.items()}
            value = type(value)(copies) if type(value) in (dict, OrderedDict) else copy.copy(value)
        elif isinstance(value, list | set):
            value = copy.copy(value)
        vars(made)[key] = _copied(value, memo)
    return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return _on_meta(value, memo)
    if isinstance(value, nn.Parameter):
        empty = torch.empty_like(value.data, device="meta")
        return memo.setdefault(id(value), nn.Parameter(empty, value.requires_grad))
    return memo.setdefault(id(value), _empty(value)) if isinstance(value, Tensor) else value


class _Fakes:
    """Fake tensors in place of those on ``meta``, one for each.

    Args:
        device: that they seem to be on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._fakes: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """That of a tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._fakes:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
            if isinstance(value, nn.Parameter):
                fake = nn.Parameter(fake, value.requires_grad)
            self._fakes[id(value)] = value, fake  # the tensor is kept, so that no other one gets its id
        return self._fakes[id(value)][1]

    def replace_all(self, module: nn.Module) -> None:
        """Replace those of a module and of all inside it."""
        for part in module.modules():
            for store in (part._parameters, part._buffers, vars(part)):
                for name, value in store.items():
                    if isinstance(value, Tensor):
                        store[name] = self.of(value)
