"""Pointwise functions, each compiled by itself into as few kernels as it can be (``run.compile: pointwise``).

Compiled are the forward and the backward half of a function, both plain functions of tensors. What connects
them stays ordinary code: autograd functions that save what they say they save, contribute gradients to
buckets and call collectives. So compiled functions work in every layout, and keep the same bytes as others.

A call of ``torch.compile``'s function takes the host three to four times as long as the generated code: the
frame is evaluated, guards are checked. Calls like an earlier one go to that one's generated code directly.
"""

import os
import shutil
import sysconfig
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

Function = Callable[..., Any]


_BY_RULE = {"deterministic": True, "triton.autotune_pointwise": False}


def compiler_options() -> dict[str, Any] | None:
    """Settings of Inductor for one compilation. Where only deterministic algorithms are allowed, no kernel or
    launch configuration is chosen by its time: AdamW's second moment rounds differently in two of them. From
    PyTorch 2.13 on Inductor's settings hold in the thread that made them, but backward functions are compiled
    in autograd's."""
    return _BY_RULE if torch.are_deterministic_algorithms_enabled() else None


def maybe_compiled(function: Function, compiled: bool) -> Function:
    """``function``, or what it is compiled to."""
    return _compiled(function) if compiled else function


class Fusing(TorchDispatchMode):
    """A mode that sees a compiled function as one operator, in place of generated code that it could not
    look into."""

    @abstractmethod
    def fused(self, function: Function, arguments: tuple[Any, ...]) -> Any:
        """The result of the function."""


@cache
def _compiled(function: Function) -> Function:
    return _Compiled(function)


_CALLS = 256  # of different shapes or numbers, for which a function keeps the way to their code


class _Call(NamedTuple):
    """The generated code that served a call, and how its arguments and results are arranged.

    Attributes:
        code: takes tensors and numbers, returns tensors.
        arguments: of the code: places among the call's tensors, followed by ``numbers``.
        numbers: sizes, and floating point numbers (as tensors without dims).
        results: places among the code's; of a function that returns one tensor, its place, or None of one
            that returns nothing.
        state: global state of PyTorch that the code was generated for: grad mode, determinism, autocast, ...
        writes: the function writes to arguments, or may do so (under ``inference_mode``).
    """

    code: Callable[..., Sequence[Tensor]]
    arguments: Sequence[int]
    numbers: Sequence[Any]
    results: Sequence[int] | int | None
    state: GlobalStateGuard
    writes: bool

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        inputs = [*tensors, *self.numbers]
        outputs = self.code(*[inputs[place] for place in self.arguments])
        if self.results is None:
            return None
        if isinstance(self.results, int):
            return outputs[self.results]
        return tuple([outputs[place] for place in self.results])


class _Run(NamedTuple):
    code: Callable[..., Sequence[Tensor]]
    arguments: Sequence[Any]
    results: Sequence[Any]


class _Compiled:
    """A compiled function of tensors and constants, also in tuples and lists.

    Which code serves a call is decided by ``torch.compile`` and its guards. Of a call without gradients, the
    code is kept under the complete description of its arguments, so that an equal call needs no guards, also
    under ``inference_mode``.
    Always guarded are calls that have the same tensor twice, that write to arguments some of which share
    memory, or whose arguments are no plain tensors.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._guarded = torch.compile(function, backend=self._generate)
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._thread = threading.local()

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():  # part of a larger graph
            return self._guarded(*arguments)
        if torch._C._len_torch_dispatch_stack():  # a mode sees operators
            mode = _get_current_dispatch_mode()
            if isinstance(mode, Fusing):
                return mode.fused(self._function, arguments)
            return self._guarded(*arguments)
        tensors: list[Tensor] = []
        description: list[Any] = []
        if (
            not _describe(arguments, tensors, description)
            or len(set(map(id, tensors))) < len(tensors)
            or torch._C._len_torch_function_stack()
        ):
            return self._guarded(*arguments)
        key = tuple(description)
        call = self._calls.get(key)
        if call is not None and call.state.check() and not (call.writes and _share_memory(tensors)):
            return call(tensors)
        return self._first(arguments, tensors, key)

    def _generate(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Generate a graph's code: the backend of ``torch.compile``."""
        from torch._dynamo import lookup_backend  # slow to import

        inductor: Callable[..., Any] = lookup_backend("inductor")
        code = inductor(graph, examples, config_patches=compiler_options())

        def run(*arguments: Any) -> Any:
            results = code(*arguments)
            runs = getattr(self._thread, "runs", None)
            if runs is not None:
                runs.append(_Run(code, arguments, results))
            return results

        return run

    def _first(self, arguments: Sequence[Any], tensors: list[Tensor], key: tuple[Any, ...]) -> Any:
        """Call the function by its guards; keep what served the call."""
        if torch.is_grad_enabled():
            return self._guarded(*arguments)
        counted = not any(tensor.is_inference() for tensor in tensors)  # others have no versions
        versions = [tensor._version for tensor in tensors] if counted else None
        runs: list[_Run] = []
        self._thread.runs = runs
        try:
            result = self._guarded(*arguments)
        finally:
            self._thread.runs = None
        writes = versions is None or versions != [tensor._version for tensor in tensors]
        if len(runs) != 1 or (writes and _share_memory(tensors)):
            return result
        call = _arranged(runs[0], tensors, result, writes)
        if call is not None:
            if len(self._calls) >= _CALLS:
                self._calls.clear()
            self._calls[key] = call
        return result


def _describe(values: Sequence[Any], tensors: list[Tensor], description: list[Any]) -> bool:
    """Append the tensors among some arguments, and all that code may depend on; whether that is possible."""
    for value in values:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
            description += (value.dtype, value.device, value.shape, value.stride(), value.is_inference())
        elif kind is tuple or kind is list:
            description += (kind, len(value))
            if not _describe(value, tensors, description):
                return False
        elif kind is float:
            description.append(value.hex())  # 0.0 equals -0.0
        elif value is None or kind in (int, bool, torch.dtype):
            description += (kind, value)  # 1 equals True
        else:
            return False
    return True


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether some tensors have a storage in common."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors)


def _arranged(run: _Run, tensors: Sequence[Tensor], result: Any, writes: bool) -> _Call | None:
    """How a run's arguments come from ``tensors`` and its results make up ``result``; None where they do
    not."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    arguments: list[int] = []
    numbers: list[Any] = []
    for value in run.arguments:
        place = places.get(id(value))
        if place is None:
            if isinstance(value, Tensor) and value.dim():
                return None
            place = len(tensors) + len(numbers)
            numbers.append(value)
        arguments.append(place)
    place_of = {id(value): place for place, value in enumerate(run.results)}
    results: Any
    if isinstance(result, tuple):
        results = [place_of.get(id(value)) for value in result]
        known = None not in results
    else:
        results = place_of.get(id(result))
        known = result is None or results is not None
    if not known:
        return None
    return _Call(run.code, arguments, numbers, results, GlobalStateGuard(), writes)


def widened(x: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return x.float() if x.dtype.itemsize == 2 else x


@cache
def missing_compiler(device: torch.device) -> str | None:
    """The requirement of ``torch.compile`` for code of the device that this machine does not meet; None if it
    meets all."""
    if device.type == "cpu":
        compiler = any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"))
        return None if compiler else "a C++ compiler (g++ or clang++)"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton"
        # Triton compiles what starts a kernel, in C, when it is first used; where CC is set, by nothing else.
        if not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"])):
            return "a C compiler (gcc or clang, or what CC names)"
        headers = Path(sysconfig.get_path("include"), "Python.h")
        return None if headers.exists() else f"Python's headers ({headers}; python3-dev)"
    return None
