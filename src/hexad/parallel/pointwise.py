"""Pointwise functions, each compiled by itself into as few kernels as it can be (``run.compile: pointwise``).

Compiled are the forward and the backward half of a function, both plain functions of tensors. What connects
them stays ordinary code: autograd functions that save what they say they save, contribute gradients to
buckets and call collectives. So compiled functions work in every layout, and keep the same bytes as others.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def maybe_compiled(function: Function, compiled: bool) -> Function:
    """``function``, or what it is compiled to."""
    return _compiled(function) if compiled else function


@cache
def _compiled(function: Function) -> Function:
    return torch.compile(function)


def widened(x: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return x.float() if x.dtype.itemsize == 2 else x


@cache
def missing_compiler(device: torch.device) -> str | None:
    """What ``torch.compile`` lacks on this machine to generate code for the device; None if nothing."""
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
