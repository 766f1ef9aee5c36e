"""Packages that can be called: ``hexad.train`` is both the package and the function."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package whose call is that of the function of its name in :mod:`hexad.api`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(import_module("hexad.api"), self.__name__.rpartition(".")[2])(*arguments, **options)


def make_callable(name: str) -> None:
    """Let a package that is being imported be called."""
    sys.modules[name].__class__ = _CallablePackage
