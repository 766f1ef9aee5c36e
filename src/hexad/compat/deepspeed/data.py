"""The loader of ``training_data``, and microbatches in containers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hexad.config import HexadError
from hexad.topology.mesh import Axis


class Loader(DataLoader[Any]):
    """A rank's microbatches of a data set, in the same order in every epoch unless :meth:`set_epoch` is
    called, as in DeepSpeed."""

    _endless: Iterator[Any] | None = None

    @property
    def data_sampler(self) -> Any:
        """The sampler, under DeepSpeed's name."""
        return self.sampler

    def set_epoch(self, epoch: int) -> None:
        """Shuffle in another order, if the sampler shuffles."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def endless(self) -> Iterator[Any]:
        """An iterator over any number of epochs."""
        if self._endless is None:
            self._endless = iter(RepeatingLoader(self))
        return self._endless


DeepSpeedDataLoader = Loader
"""DeepSpeed's name: scripts ask whether a loader is one. An engine makes them (``deepspeed_io``)."""


class RepeatingLoader:
    """Restarts a loader when it is exhausted."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)


def loader_of(dataset: Any, data: Axis, shuffle: bool, **options: Any) -> Loader:
    """The loader of a rank's microbatches; the options are those of ``torch.utils.data.DataLoader``.

    Raises:
        HexadError: ``dataset`` is neither map-style nor iterable.
    """
    if not isinstance(dataset, IterableDataset) and not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise HexadError(
            f"training_data: found a {type(dataset).__name__}, expected a data set with a length and "
            "numbered samples, or a torch.utils.data.IterableDataset; pass loaders to train_batch"
        )
    if options["sampler"] is None and not isinstance(dataset, IterableDataset):
        options["sampler"] = DistributedSampler(dataset, data.size, data.rank, shuffle)
    return Loader(dataset, **options)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A container like ``value`` with what the function returns for each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(item, function) for key, item in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def cast_tensors(value: Any, to: torch.dtype | torch.device) -> Any:
    """Tensors in containers on a device, or floating-point ones in a format."""
    any_kind = isinstance(to, torch.device)
    return map_tensors(value, lambda x: x.to(to) if any_kind or x.is_floating_point() else x)
