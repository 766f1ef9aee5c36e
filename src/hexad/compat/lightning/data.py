"""Loaders of a trainer: training resumes after the samples consumed, evaluation counts every sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cache
from itertools import islice
from math import ceil
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from hexad.config import HexadError


def batches_done(trainer: Trainer) -> int:
    """The batches of the epoch that were consumed; 0 after the last."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    done: int = progress.current.ready
    return 0 if progress.is_last_batch or done >= trainer.num_training_batches else done


class StepLoader:
    """What an iterator yields, an item for each step.

    Args:
        steps: makes the iterator; it knows its place by itself, so that a trainer resumes anywhere.
        length: items of an epoch, those included that were consumed before.
    """

    def __init__(self, steps: Callable[[], Iterator[Any]], length: int) -> None:
        self._steps, self._length = steps, length

    def __iter__(self) -> Iterator[Any]:
        return self._steps()

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: by having this the loader is one that resumes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No-op."""


class ResumableLoader(DataLoader[Any]):
    """A loader that Lightning saves and restores by the samples that were consumed, of all data ranks.

    Map-style data are not loaded again; an iterable data set, which shards itself, is read up to that place.

    Attributes:
        ranks: data ranks.
        done: returns the batches of the epoch that were consumed.
    """

    ranks: int
    done: Callable[[], int]
    _begin = 0

    def __iter__(self) -> Any:
        """This rank's batches, from where :meth:`load_state_dict` says on the first time."""
        # A generator: the sampler is read when its epoch has been set.
        begin, self._begin = self._begin, 0
        yield from self._from(begin) if begin else super().__iter__()

    def _from(self, begin: int) -> Iterator[Any]:
        if isinstance(self.dataset, IterableDataset):
            return islice(super().__iter__(), begin, None)
        return iter(alike(self, _Rest(self.batch_sampler, begin)))

    @property
    def _step(self) -> int | None:
        """Samples of a batch of all ranks; None where batches differ."""
        size = getattr(self.batch_sampler, "batch_size", None) or self.batch_size
        return size * self.ranks if isinstance(size, int) else None

    def state_dict(self) -> dict[str, Any]:
        """Samples of the epoch that were consumed, and those of a step; batches where their sizes differ."""
        return {"consumed": self.done() * (self._step or 1), "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the epoch after the samples consumed.

        Raises:
            HexadError: it was saved by steps of other sizes: Lightning counts steps.
        """
        if state["step"] != self._step and state["consumed"]:
            raise HexadError(
                f"train_dataloader: found {self._step} samples in a step of all ranks, but the checkpoint, "
                f"saved within an epoch, has {state['step']}; use as many, or a checkpoint from the end of "
                "an epoch"
            )
        self._begin = state["consumed"] // (self._step or 1)


class _Rest:
    """The batches of a sampler after the first ones."""

    def __init__(self, batches: Any, begin: int) -> None:
        self._batches, self._begin = batches, begin

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._batches), self._begin, None)


def alike(loader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """A loader with the options of another, of other batches."""
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
        )
    }
    return DataLoader(loader.dataset, batch_sampler=batches, **options)


@cache
def _resumable(kind: type[DataLoader[Any]]) -> type[ResumableLoader]:
    return type(kind.__name__, (ResumableLoader, kind), {})


def resumable(loader: object, ranks: int, done: Callable[[], int]) -> object:
    """A loader as a :class:`ResumableLoader`; what is none, or saves its place itself, as it is."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
        return loader
    result: Any = copy(loader)
    result.__class__ = _resumable(type(loader))  # type: ignore[arg-type]
    result.ranks, result.done = ranks, done
    return result


def unrepeated(loader: object) -> object:
    """A loader of evaluation whose ranks get every sample once, in equally many batches.

    ``DistributedSampler``, which Lightning adds, repeats samples where ranks would have different numbers. A
    loader that has another sampler, or too few samples for that, stays as it is.
    """
    if type(loader) is not DataLoader or loader.drop_last or loader.batch_size is None:
        return loader
    sampler = loader.sampler
    if type(sampler) is not DistributedSampler or sampler.shuffle or sampler.drop_last:
        return loader
    samples: Any = sampler.dataset
    batches = even_batches(len(samples), sampler.num_replicas, sampler.rank, loader.batch_size)
    return loader if batches is None else alike(loader, _Batches(batches))


class _Batches(BatchSampler):
    """Given batches of indices."""

    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        super().__init__(SequentialSampler(range(len(batches))), max(map(len, batches)), False)
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self._batches])

    def __len__(self) -> int:
        return len(self._batches)


def even_batches(samples: int, ranks: int, rank: int, size: int) -> list[range] | None:
    """A rank's batches of consecutive samples' indices: ranks take turns, as in ``DistributedSampler``, and
    have equally many batches.

    Args:
        samples: of the data set.
        ranks, rank: data ranks, and this one's number.
        size: of a batch; some are smaller.

    Returns:
        None where a rank would have fewer samples than batches.
    """
    count = ceil(ceil(samples / ranks) / size)
    places = range(rank, samples, ranks)
    if samples // ranks < count or not count:
        return None
    batches = [places[begin : begin + size] for begin in range(0, len(places), size)]
    if len(batches) < count:  # others have one sample more
        last = batches.pop()
        batches += [last[:-1], last[-1:]]
    return batches
