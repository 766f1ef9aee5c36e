"""NeMo 2's data samplers: which samples of a data set are a data rank's microbatches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from hexad.config import ConfigError, HexadError
from hexad.config.schema import BatchSettings
from hexad.topology.mesh import Axis

from ..lightning.data import StepLoader, alike


class DataSampler:
    """The base class of data samplers; :class:`MegatronDataSampler` is the only one that is supported."""


class MegatronDataSampler(DataSampler):
    """Megatron-LM's division of steps among data ranks, for the loaders of a data module.

    Args:
        seq_len: tokens of a sample.
        micro_batch_size: samples of a microbatch and data rank.
        global_batch_size: samples of a step, of all data ranks.
        rampup_batch_size: ``[start, increment, samples]``: smaller steps at first, ``batch.ramp``.
        dataloader_type: ``single``, in the data's order; ``cyclic``, shuffled anew in each pass; ``batch``,
            where data ranks take turns inside a step.
        init_consumed_samples: samples to leave out at first.
        init_global_step: has no effect: a resumed run counts its steps.
        output_log: log ``consumed_samples`` and ``global_batch_size``.
        decoder_seq_len: None.

    Raises:
        HexadError: sizes that do not fit, or a type that is not known.
    """

    def __init__(
        self,
        seq_len: int,
        micro_batch_size: int = 4,
        global_batch_size: int = 8,
        rampup_batch_size: Sequence[int] | None = None,
        dataloader_type: Literal["single", "cyclic", "batch"] | None = "single",
        init_consumed_samples: int = 0,
        init_global_step: int = 0,
        output_log: bool = True,
        decoder_seq_len: int | None = None,
    ) -> None:
        if dataloader_type not in (None, "single", "cyclic", "batch"):
            raise HexadError(
                f"MegatronDataSampler: found dataloader_type={dataloader_type!r}, expected single, cyclic or "
                "batch"
            )
        if decoder_seq_len is not None:
            raise HexadError(f"MegatronDataSampler: found decoder_seq_len={decoder_seq_len}; leave it out")
        self.seq_len, self.output_log = seq_len, output_log
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.rampup_batch_size, self.dataloader_type = rampup_batch_size, dataloader_type
        self.init_consumed_samples, self.init_global_step = init_consumed_samples, init_global_step

    @property
    def batch(self) -> BatchSettings:
        """The group ``batch``."""
        names = {"batch.micro": "micro_batch_size", "batch.global": "global_batch_size"}
        names["batch.ramp"] = "rampup_batch_size"
        try:
            return BatchSettings.model_validate(self.settings)
        except ValueError as error:
            first = error.errors()[0] if hasattr(error, "errors") else {"loc": ("",), "msg": str(error)}
            field = names.get(f"batch.{first['loc'][0]}", str(first["loc"][0]))
            raise ConfigError(f"MegatronDataSampler.{field}", str(first["msg"])) from None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that :attr:`batch` is made of."""
        ramp = self.rampup_batch_size
        settings: dict[str, Any] = {"micro": self.micro_batch_size, "global": self.global_batch_size}
        return settings if ramp is None else {**settings, "ramp": list(ramp)}

    def check(self, ranks: int) -> None:
        """Refuse steps that do not divide into microbatches of so many data ranks.

        Raises:
            HexadError: naming the size.
        """
        whole = self.micro_batch_size * ranks
        for size in self.batch.sizes:
            if size % whole:
                name = "global_batch_size" if size == self.global_batch_size else "rampup_batch_size"
                raise HexadError(
                    f"MegatronDataSampler: found {name} with {size}, expected a multiple of micro_batch_size "
                    f"{self.micro_batch_size} x {ranks} data ranks, {whole}"
                )

    def training(self, loader: Any, data: Axis, consumed: Callable[[], int], done: int = 0) -> StepLoader:
        """The loader of a fit: an item is the list of this data rank's microbatches of a step. Steps are
        complete; a pass over the data leaves out what makes none.

        Args:
            loader: of a map-style data set; its sampler is replaced.
            data: the data ranks.
            consumed: returns the samples that the run has consumed.
            done: steps of the first pass that were made before.

        Raises:
            HexadError: an iterable data set, or one with less samples than a step.
        """
        samples, batch = _map_style(loader), self.batch
        if samples < batch.global_:
            raise HexadError(
                f"train_dataloader: found {samples} samples, less than a step of {batch.global_}"
            )

        def steps() -> Iterator[list[Any]]:
            epoch, begin, sizes = self._place(samples, consumed())
            order = self._order(samples, epoch)
            ends = list(accumulate(sizes, initial=begin))
            parts = (part for step in pairwise(ends) for part in self._parts(range(*step), data))
            ready = iter(alike(loader, _Once([order[i] for i in part] for part in parts)))
            for size in sizes:
                yield list(islice(ready, size // (self.micro_batch_size * data.size)))

        return StepLoader(steps, done + len(self._place(samples, consumed())[2]))

    def evaluation(self, loader: Any, data: Axis, stages: int, complete: bool) -> StepLoader:
        """The loader of an evaluation, whose steps are ``global_batch_size``; unless ``complete``, the last
        may have less.

        Args:
            loader: of a map-style data set; its sampler is replaced.
            data: the data ranks.
            stages: of the pipeline.
            complete: leave out the samples that make no step.

        Raises:
            HexadError: an iterable data set; one with less samples than a complete step; or samples that do
                not divide, where ranks or stages exchange whole microbatches.
        """
        samples, size = _map_style(loader), self.global_batch_size
        if complete and samples < size:
            raise HexadError(
                f"MegatronDataSampler: found {samples} samples to evaluate, less than a step of {size}"
            )
        whole = self.micro_batch_size * data.size
        if not complete and samples % whole and data.size * stages > 1:
            raise HexadError(
                f"MegatronDataSampler: found {samples} samples to predict, expected a multiple of "
                f"micro_batch_size {self.micro_batch_size} x {data.size} data ranks, {whole}; use one data "
                "rank and one stage, or other sizes"
            )
        end = samples - samples % size if complete else samples
        parts = [self._parts(range(first, min(first + size, end)), data) for first in range(0, end, size)]
        batches = [list(part) for step in parts for part in step]

        def steps() -> Iterator[list[Any]]:
            ready = iter(alike(loader, batches))
            for step in parts:
                yield list(islice(ready, len(step)))

        return StepLoader(steps, len(parts))

    def _place(self, samples: int, consumed: int) -> tuple[int, int, list[int]]:
        """Where a run is after so many samples: the pass over the data, the samples of it that were consumed,
        and the sizes of the steps that are left of it."""
        batch, epoch, begin, done = self.batch, 0, self.init_consumed_samples % samples, 0
        while True:
            size = batch.size(done)
            if begin + size > samples:
                epoch, begin = epoch + 1, 0
            if done >= consumed:
                break
            begin, done = begin + size, done + size
        first, sizes = begin, []
        while first + batch.size(done) <= samples:
            sizes.append(batch.size(done))
            first, done = first + sizes[-1], done + sizes[-1]
        return epoch, begin, sizes

    def _order(self, samples: int, epoch: int) -> Sequence[int]:
        """The samples' numbers in a pass over the data."""
        if self.dataloader_type != "cyclic":
            return range(samples)
        return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()

    def _parts(self, step: range, data: Axis) -> list[Sequence[int]]:
        """The places of a data rank's microbatches in a step."""
        micro = self.micro_batch_size
        if self.dataloader_type == "batch":
            samples = step[data.rank :: data.size]
            return [samples[first : first + micro] for first in range(0, len(samples), micro)]
        firsts = range(step.start + data.rank * micro, step.stop, data.size * micro)
        return [range(first, min(first + micro, step.stop)) for first in firsts]


class _Once:
    """Batches that are made as they are read, once."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def _map_style(loader: Any) -> int:
    """The number of samples of a loader's data set."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        kind = type(loader).__name__ if not isinstance(loader, DataLoader) else "an iterable data set"
        raise HexadError(
            f"MegatronDataSampler: found {kind}, expected a torch.utils.data.DataLoader of a data set with a "
            "length and samples"
        )
    dataset: Any = loader.dataset
    return len(dataset)
