"""``import SYSTEM`` in scripts and libraries that cannot be changed: the modules that they import, and the
package that they look for, by Python's import and metadata protocols; and the run of such a script."""

import runpy
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, metadata
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hexad.config import HexadError, one_line

from .absent import explained


class _Found(Distribution):
    """The installed package that libraries look for before they import it."""

    def __init__(self, name: str, version: str) -> None:
        self._name, self._version = name, version

    def read_text(self, filename: str) -> str | None:
        lines = ("Metadata-Version: 2.1", f"Name: {self._name}", f"Version: {self._version}", "")
        return "\n".join(lines) if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class Finder(DistributionFinder):
    """Finds a distribution; modules are found in ``sys.modules``."""

    def __init__(self, name: str, version: str) -> None:
        self._name, self._version = name, version

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Find no module: see the class."""

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[Distribution]:
        """The distribution, where it or any is asked for."""
        return [_Found(self._name, self._version)] if context.name in (None, self._name) else []


def announce(name: str, version: str) -> None:
    """Let libraries find a distribution of this name, unless one is installed."""
    try:
        metadata(name)
    except PackageNotFoundError:
        sys.meta_path.append(Finder(name, version))


class _Refused(type):
    """The class of :func:`refused_name`: attributes are refused too, when they are used. Whoever asks for the
    signature is about to call it, perhaps in another process, where its name means nothing."""

    full: str
    why: str

    @property
    def __signature__(cls) -> Any:
        if "full" not in vars(cls):  # a class of the script, which inherits from it
            raise AttributeError("__signature__")
        raise HexadError(f"{cls.full}: not supported: {cls.why}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{cls.full} is not supported and has no {name!r}")
        return refused_name(f"{cls.full}.{name}", cls.why)


def refused_name(full: str, why: str) -> type:
    """A class in place of a name that Hexad lacks, whose call is an error that says what to do instead;
    ``isinstance``, annotations and base classes can name it."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise HexadError(f"{full}: not supported: {why}")

    body = {"__new__": refuse, "__doc__": f"Not supported: {why}.", "full": full, "why": why}
    return _Refused(full.rpartition(".")[2], (), body)


def install(
    package: ModuleType,
    system: str,
    where: Mapping[str, str],
    unsupported: Mapping[str, str],
    names: Mapping[str, str] | None = None,
    modules: Iterable[str] = (),
    constants: Mapping[str, Any] | None = None,
) -> None:
    """Make ``import SYSTEM`` import a package of this one in this process.

    Args:
        package: in place of the system.
        system: the name that scripts import.
        where: module below the system -> module of the package; an empty one is the package itself.
        unsupported: names below the system that can be imported -> what to do instead of using them; names
            that the package has are left as they are.
        names: names in modules of the system that the package has no module for -> its module with that name.
        modules: modules of the system that can be imported; each also has the names of the others, which it
            may import from them.
        constants: names below the system -> their values.

    Raises:
        HexadError: the system's package has been imported.
    """
    if sys.modules.get(system, package) is not package:
        raise HexadError(f"install: the {system} package has been imported already; call install() before")
    sys.modules[system] = package
    for name, module in where.items():
        parent, path = _parent(package, system, name)
        target = import_module(f"{package.__name__}.{module}") if module else package
        if isinstance(sys.modules.get(path), ModuleType):
            continue
        sys.modules[path] = target
        _set(parent, package, name.rpartition(".")[2], target)
    for name, module in (names or {}).items():
        parent, _ = _parent(package, system, name)
        last = name.rpartition(".")[2]
        setattr(parent, last, getattr(import_module(f"{package.__name__}.{module}"), last))
    created = [_parent(package, system, f"{name}.")[0] for name in modules]
    for name, value in (constants or {}).items():
        _complete(package, system, name, value)
    for name, why in unsupported.items():
        _complete(package, system, name, refused_name(f"{system}.{name}", why))
    collected = _Collected(system, [*unsupported, *(constants or {})])
    for part in created:
        if not part.__name__.startswith(package.__name__):
            part.__getattr__ = partial(collected.find, part.__name__)  # type: ignore[method-assign]


class _Collected:
    """The names of all modules below a system: its modules import some from each other."""

    def __init__(self, system: str, names: Iterable[str]) -> None:
        self._modules: dict[str, list[str]] = {}
        for name in names:
            module, _, last = f"{system}.{name}".rpartition(".")
            self._modules.setdefault(last, []).append(module)

    def find(self, module: str, name: str) -> Any:
        """A name that a module may have imported from another one; one that is not refused, if there is any.

        Raises:
            AttributeError: no module has it.
        """
        if name.startswith("_") or name not in self._modules:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        values = [getattr(sys.modules[other], name) for other in self._modules[name]]
        return next((value for value in values if not isinstance(value, _Refused)), values[0])


def _complete(package: ModuleType, system: str, name: str, value: Any) -> None:
    """Add a name below the system, unless there is one; a function hides a module of its name, which can be
    imported all the same."""
    parent, _ = _parent(package, system, name)
    last = name.rpartition(".")[2]
    known = getattr(parent, last, None)
    hidden = isinstance(known, ModuleType) and not known.__name__.startswith(package.__name__)
    if hidden or not hasattr(parent, last):
        setattr(parent, last, value)


def _set(parent: ModuleType, package: ModuleType, name: str, module: ModuleType) -> None:
    """Make a module an attribute of its parent; a module of the package keeps what it uses by this name."""
    if not parent.__name__.startswith(package.__name__) or not hasattr(parent, name):
        setattr(parent, name, module)


def _parent(package: ModuleType, system: str, name: str) -> tuple[ModuleType, str]:
    """The package that a dotted name below the system belongs to, made where needed, and the full name."""
    parent, path = package, system
    *packages, last = name.split(".")
    for part in packages:
        path = f"{path}.{part}"
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path, f"Part of the API of {system} over Hexad.")
            sys.modules[path].__path__ = []
            _set(parent, package, part, sys.modules[path])
        parent = sys.modules[path]
    return parent, f"{path}.{last}"


def run_script(
    install: Callable[[], None], command: Sequence[str], system: str, as_module: bool = False
) -> None:
    """Run a script, or a module by name, as Python's command line does, after ``install()``; ``command`` has
    its arguments too. What Hexad refuses, and what only the script's own version of the ``system`` has,
    ends it with one line, which says where in the script."""
    install()
    sys.argv = list(command)
    try:
        if as_module:
            sys.path.insert(0, "")
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            runpy.run_path(command[0], run_name="__main__")
    except (HexadError, AttributeError, ImportError, TypeError) as error:
        problem = one_line(error) if isinstance(error, HexadError) else explained(error, system)
        if problem is None:
            raise
        place = _place(error.__traceback__)
        print(f"hexad: error: {problem}{place}", file=sys.stderr, flush=True)
        sys.exit(2)


def _place(trace: TracebackType | None) -> str:
    """The last line of a script that an error has passed, or of a library where there is none of a script;
    empty if there is neither."""
    package = str(Path(__file__).parents[2])
    passed = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith((package, "<")) and not frame.filename.endswith("runpy.py")
    ]
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    of_script = [frame for frame in passed if not frame.filename.startswith(libraries)]
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in (of_script or passed)[-1:])
