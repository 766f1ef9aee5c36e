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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from hexad.config import HexadError
from hexad.parallel.sharding import declared_parameters

from .recorder import LAYERS, Composites, LayerStyles, OperationRecorder, RecordedOperation, tried
from .sizes import Gradient, Misfit

log = logging.getLogger("hexad")

NAMES, CHOICES = 8, 48
"""Names of attributes that may be numbers of heads or features, and sets of them that are tried."""
PRIMES = (7, 5, 11, 3, 13, 17, 19, 23, 29, 31, 37, 41)
"""Sizes of the batch and numbers of tokens."""
WIDEST = 3
"""Numbers of features that are tried for hidden states."""
OTHERS = 3
"""Arguments of a forward pass besides the first one that are guessed."""
Attributes = Mapping[tuple[str, str], int]
"""Path and attribute of a module -> this rank's number."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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

    def __init__(self, module: nn.Module, plan: LayerStyles, path: str, device: torch.device) -> None:
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

    def _attributes(self, arguments: Arguments, calls: list[RecordedOperation]) -> Attributes:
        """The smallest set of numbers with which the divided module computes a rank's part.

        Raises:
            HexadError: there is none; the message is that of the set that gets furthest.
        """
        errors: list[tuple[int, HexadError]] = []
        for attributes in itertools.islice(self._choices(), CHOICES):
            recorder = OperationRecorder(self._plan, calls)
            try:
                self._compare(recorder, arguments, attributes)
            except HexadError as error:
                errors.append((recorder.place, error))
            else:
                return attributes
        raise max(errors, key=lambda pair: pair[0])[1]

    def _choices(self) -> Iterator[Attributes]:
        """Sets of numbers that may have to be divided, by name, from none to all: numbers of heads, features
        or groups divide the size of a divided dim of a layer in the same module."""
        numbers: dict[str, dict[tuple[str, str], int]] = {}
        for parent, sizes in self._divided_sizes().items():
            for inner, module in self._module.get_submodule(parent).named_modules():
                path = ".".join(filter(None, (parent, inner)))
                of_user = not type(module).__module__.startswith("torch.nn.")
                for name, value in vars(module).items() if of_user else ():
                    is_number = type(value) is int and value > 0 and value % self._plan.ranks == 0
                    if is_number and any(size % value == 0 for size in sizes):
                        numbers.setdefault(name, {})[path, name] = value // self._plan.ranks
        names = list(numbers)[:NAMES]
        for count in range(len(names) + 1):
            for chosen in itertools.combinations(names, count):
                yield {key: value for name in chosen for key, value in numbers[name].items()}

    def _divided_sizes(self) -> dict[str, set[int]]:
        """Sizes of the divided dims of a module's layers, by the module's path."""
        sizes: dict[str, set[int]] = {}
        for path, style in self._plan.styles.items():
            layer = self._module.get_submodule(path)
            for parts, name in zip(LAYERS[style], ("in_features", "out_features")):
                if parts:
                    sizes.setdefault(path.rpartition(".")[0], set()).add(getattr(layer, name))
        return sizes

    def _calls(self, arguments: Arguments) -> list[RecordedOperation] | Exception:
        """The operations of the undivided module; an error if it cannot be called so."""
        recorder = OperationRecorder(self._plan)
        try:
            self._run(_on_meta(self._module), recorder, arguments)
        except Exception as error:  # whatever a module raises
            return error
        return recorder.calls

    def _compare(self, recorder: OperationRecorder, arguments: Arguments, attributes: Attributes) -> None:
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

    def _run(self, module: nn.Module, recorder: OperationRecorder, arguments: Arguments) -> Any:
        """Call a copy with fake tensors."""
        for path in self._plan.styles:
            layer = module.get_submodule(path)
            vars(layer).update(recorder=recorder, path=path)
            layer.__class__ = tried(type(layer))  # type: ignore[arg-type]
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
            with recorder, Composites(recorder):
                return module(*args, **kwargs)

    # How a module may be called

    def _guesses(self) -> Iterator[Arguments]:
        """Arguments by the module's signature and its first layers: token ids, or hidden states."""
        try:
            parameters = inspect.signature(self._module.forward).parameters
        except (TypeError, ValueError):
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
    except (TypeError, ValueError):
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
    result = memo[id(module)] = type(module).__new__(type(module))
    for key, value in vars(module).items():
        if isinstance(value, dict):
            copies = {name: _copied(inner, memo) for name, inner in value.items()}
            value = type(value)(copies) if type(value) in (dict, OrderedDict) else copy.copy(value)
        elif isinstance(value, list | set):
            value = copy.copy(value)
        vars(result)[key] = _copied(value, memo)
    return result


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
        """The fake of a tensor; any other value unchanged."""
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
