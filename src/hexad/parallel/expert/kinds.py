"""The ways of sending rows to experts on other ranks: what each needs, and where it is made. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pkgutil import resolve_name
from typing import Any, NamedTuple

from hexad.config import Config, ConfigError, alternatives
from hexad.config.model import DispatcherName


def _nothing(config: Config) -> Iterator[str]:
    """Every setting is supported."""
    return iter(())


@dataclass(frozen=True)
class DispatcherKind:
    """A value of ``model.moe.dispatcher``.

    Attributes:
        route: the function that makes its routes, called as
            :meth:`~hexad.parallel.expert.dispatch.Dispatcher.route` calls it.
        inexact: why its sums depend on the layout; None where those of ``precision.exact`` do not.
        needs: settings that it needs and that are others, in words.
        gpu: it needs a GPU of NVIDIA's.
        package: it needs a package of this name.
        library: the function that says what else of libraries it needs and this process lacks.
    """

    route: str
    inexact: str | None = None
    needs: Callable[[Config], Iterator[str]] = _nothing
    gpu: bool = False
    package: str | None = None
    library: str | None = None


def _common(config: Config) -> Iterator[str]:
    """Requirements of dispatchers for GPUs."""
    dtype, slices = config.precision.dtype, config.parallel.expert_tensor
    if config.run.device == "cpu":
        yield "a CUDA device, not run.device cpu"
    if dtype not in ("auto", "bf16", "fp8"):
        yield f"precision.dtype bf16 or fp8, not {dtype}"
    if slices > 1:
        yield f"parallel.expert_tensor 1, not {slices}"


class BufferBound(NamedTuple):
    """The bound on the rows of a rank's buffers of a static size.

    Attributes:
        allowance: rows, as a multiple of an even load.
        tokens: of the rank that has most.
        top_k: experts of a token.
        ranks: of the group.
        slices: of them, those that have a part of each expert.
        local: experts of a rank.
    """

    allowance: float
    tokens: int
    top_k: int
    ranks: int
    slices: int
    local: int

    @property
    def slots(self) -> int:
        """Rows that a rank may send to each other one (``alltoall``)."""
        even = self.tokens * self.top_k * self.slices / self.ranks
        return max(1, min(ceil(self.allowance * even), self.tokens * min(self.top_k, self.local)))

    @property
    def rows(self) -> int:
        """Rows of a rank's experts (``all_gather``)."""
        even = self.tokens * self.top_k * self.slices
        return min(ceil(self.allowance * even), self.ranks * self.tokens * min(self.top_k, self.local))


_MOST = 16
"""Ranks of a group, and experts of a rank: limits of PyTorch's operators on NVSHMEM."""


def _nvshmem(config: Config) -> Iterator[str]:
    yield from _common(config)
    moe, parallel = config.model.moe, config.parallel
    assert moe is not None
    if parallel.pipeline > 1:
        # Symmetric memory is allocated by all ranks together, which stages are not.
        yield f"parallel.pipeline 1, not {parallel.pipeline}"
    if parallel.expert > _MOST:
        yield f"parallel.expert {_MOST} or less, not {parallel.expert}"
    if moe.experts > _MOST * parallel.expert:
        yield f"{_MOST} experts of a rank or fewer, not {moe.experts // parallel.expert}"


_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Ranks of a group for which DeepEP has settings; more than 8 are on several hosts."""
_WITHIN, _BETWEEN = (16, 8176), (256, 7936)
"""The number of which ``model.hidden`` must be a multiple, and its largest value, within a host and between
hosts: a token must fit the shared memory of DeepEP's warps."""


def _deepep(config: Config) -> Iterator[str]:
    yield from _common(config)
    moe, ranks, hidden = config.model.moe, config.parallel.expert, config.model.hidden
    assert moe is not None
    if ranks not in _SIZES:
        yield f"parallel.expert {', '.join(map(str, _SIZES[:-1]))} or {_SIZES[-1]}, not {ranks}"
    unit, largest = _WITHIN if ranks <= 8 else _BETWEEN
    if hidden % unit or hidden > largest:
        yield f"model.hidden of a multiple of {unit} up to {largest:,}, not {hidden}"
    if moe.top_k > 32:
        yield f"model.moe.top_k 32 or less, not {moe.top_k}"


KINDS: dict[DispatcherName, DispatcherKind] = {
    "alltoall": DispatcherKind("hexad.parallel.expert.dispatch:Dispatcher.exchanged"),
    "all_gather": DispatcherKind(
        "hexad.parallel.expert.dispatch:Dispatcher.gathered", "it adds results rank by rank"
    ),
    "nvshmem": DispatcherKind(
        "hexad.parallel.expert.nvshmem:route",
        "there the host reads the counts",
        _nvshmem,
        gpu=True,
        library="hexad.comm.symmetric:missing",
    ),
    "deepep": DispatcherKind(
        "hexad.parallel.expert.deepep:route",
        "it adds results rank by rank",
        _deepep,
        gpu=True,
        package="deep_ep",
    ),
}
ANYWHERE = ("auto", *(name for name, kind in KINDS.items() if not kind.gpu))
"""The values that every machine supports."""


def unsupported(name: str, need: str) -> ConfigError:
    """A dispatcher needs what is not there."""
    return ConfigError(
        "model.moe.dispatcher", f"found {name}, which needs {need}; use {alternatives(ANYWHERE)}"
    )


def check_kind(name: DispatcherName, device: Any) -> None:
    """Refuse a dispatcher that this machine lacks something for.

    Args:
        name: of the dispatcher.
        device: of this rank.

    Raises:
        ConfigError: names what is missing.
    """
    if device.type == "meta":
        return
    check_host(name, device.type == "cuda")
    library = KINDS[name].library
    missing = None if library is None else resolve_name(library)()
    if missing is not None:
        raise unsupported(name, f"{missing} on this machine")


def check_host(name: DispatcherName, gpu: bool) -> None:
    """Refuse a dispatcher that this machine lacks something for, as far as is known without torch.

    Args:
        name: of the dispatcher.
        gpu: this host has a GPU.

    Raises:
        ConfigError: names what is missing.
    """
    kind, missing = KINDS[name], None
    if kind.gpu and not gpu:
        missing = "a CUDA device"
    elif kind.package is not None:
        spec = find_spec(kind.package)
        # A directory of that name in the working directory is a spec too, without a file.
        if spec is None or spec.origin is None:
            missing = f"the package {kind.package}"
    if missing is not None:
        raise unsupported(name, f"{missing} on this machine")
