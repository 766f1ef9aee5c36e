"""``import deepspeed`` in scripts and libraries that cannot be changed: the modules that they import, and the
package that they look for, by Python's import and metadata protocols."""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from hexad.config import HexadError

from .unsupported import UNSUPPORTED, refused_name

_WHERE = {
    "accelerator": "accelerator",
    "checkpoint.utils": "utils",
    "checkpointing": "checkpointing",
    "comm": "comm",
    "compression.helper": "helpers",
    "constants": "constants",
    "launcher.runner": "constants",
    "moe.utils": "helpers",
    "ops.adam": "ops",
    "pipe": "pipe",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.config": "entry",
    "runtime.dataloader": "data",
    "runtime.engine": "engine",
    "runtime.lr_schedules": "lr_schedules",
    "runtime.pipe.engine": "pipe_engine",
    "runtime.pipe.module": "pipe",
    "runtime.pipe.topology": "groups",
    "runtime.utils": "helpers",
    "runtime.zero": "zero",
    "runtime.zero.offload_config": "zero",
    "runtime.zero.partition_parameters": "zero",
    "utils": "utils",
    "utils.groups": "groups",
    "utils.logging": "utils",
    "zero": "zero",
}
"""Module of DeepSpeed -> module of this package."""


class _Found(Distribution):
    """The installed package that libraries look for before they import it."""

    def read_text(self, filename: str) -> str | None:
        from . import __version__

        lines = ("Metadata-Version: 2.1", "Name: deepspeed", f"Version: {__version__}", "")
        return "\n".join(lines) if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(DistributionFinder):
    """Finds :class:`_Found`; modules are found in ``sys.modules``."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> None:
        """Find no module: see the class."""

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[Distribution]:
        """The distribution ``deepspeed``, where it or any is asked for."""
        return [_Found()] if context.name in (None, "deepspeed") else []


def install(package: ModuleType) -> None:
    """See :func:`hexad.compat.deepspeed.install`.

    Raises:
        HexadError: the deepspeed package has been imported.
    """
    if sys.modules.get("deepspeed", package) is not package:
        raise HexadError("install: the deepspeed package has been imported already; call install() before")
    try:
        metadata("deepspeed")
    except PackageNotFoundError:
        sys.meta_path.append(_Finder())
    sys.modules["deepspeed"] = package
    for name, module in _WHERE.items():
        parent, path = _parent(package, name)
        target = import_module(f"{package.__name__}.{module}")
        if isinstance(sys.modules.get(path), ModuleType):
            continue
        sys.modules[path] = target
        if parent is not package:
            setattr(parent, name.rpartition(".")[2], target)
    for name in UNSUPPORTED:
        parent, _ = _parent(package, name)
        setattr(parent, name.rpartition(".")[2], refused_name(name))


def _parent(package: ModuleType, name: str) -> tuple[ModuleType, str]:
    """The package that a dotted name below ``deepspeed`` belongs to, made where needed, and the full name."""
    parent, path = package, "deepspeed"
    *packages, last = name.split(".")
    for part in packages:
        path = f"{path}.{part}"
        parent = _package(path, part, parent)
    return parent, f"{path}.{last}"


def _package(path: str, name: str, parent: ModuleType) -> ModuleType:
    """A package that contains only modules."""
    if path not in sys.modules:
        package = ModuleType(path, "Part of DeepSpeed's API over Hexad.")
        package.__path__ = []
        sys.modules[path] = package
        setattr(parent, name, package)
    return sys.modules[path]
