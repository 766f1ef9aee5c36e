"""This rank's microbatches of any step: a pure function of the settings and the samples consumed so far.

Samples are numbered over the whole run. The step that begins at ``consumed`` takes the samples from
``consumed`` on, as many in every layout; row ``i`` of microbatch ``m`` of data rank ``r`` is sample
``consumed + m * micro * data_size + r * micro + i``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hexad.config import Config
from hexad.config.errors import ConfigError, blaming
from hexad.parallel.context.slice import Slicing
from hexad.parallel.tensor.loss import IGNORED

from ..built import check_targets, open_built
from ..text.tokenizer import Tokenizer, bos_ids
from .microbatch import Microbatch
from .order import Blend
from .samples import OrderSettings, Samples, Source
from .whole_samples import Packing, TooLong, WholeSamples, source_of

log = logging.getLogger("hexad")

Data = str | Sequence[tuple[float, str]]

_AT_ONCE = 1 << 20
"""Tokens read at once."""
_AHEAD = 1 << 14
"""Samples ahead whose sources' indexes are made at the start."""


class DataLoader:
    """Microbatches of one data rank. Its only state is the number of samples consumed.

    While a step computes, a thread reads the next one.

    Args:
        data: a prefix, or a blend ``[[weight, prefix], ...]``.
        sequence: inputs per sample, in tokens.
        part: which documents of each data set to take (begin, end, as fractions); None: all.
        documents: ``join``, or ``isolate``: positions whose target lies in the next document get no label,
            and microbatches contain the offsets of documents.
        packing: ``cut`` documents into samples, take ``whole`` ones, which isolates them, or ``auto``: whole
            ones of data with a loss mask.
        too_long: what to do with documents that are longer than a sample of whole ones.
        micro: samples per microbatch.
        global_batch: samples per step, over all data ranks.
        size: samples of the step that begins after so many; by default always ``global_batch``.
        seed: of the order of documents and samples.
        data_rank, data_size: this rank's place on the data axis, and its degree.
        slicing: how context ranks divide microbatches.
        context_rank: this rank's place among them; None for whole microbatches.
        vocab: refuse data whose sidecar records an id not below this. Without a sidecar ids are checked as
            they are read, by the engine.
        eod: the run's end-of-document token; data known to be built with another is refused. None: unchecked.
        bos: the ids before each document in this run; data known to be built with others is refused. None:
            unchecked.
        cache_dir: where to keep the indexes of very large data if its own directory cannot be written.
        patience: seconds to wait for another process that writes such an index.
        setting: the setting that ``data`` is from, for messages.

    Raises:
        ConfigError: the data cannot be used (the message names the reason), or the batch cannot be divided.
    """

    def __init__(
        self,
        data: Data,
        *,
        sequence: int,
        part: tuple[float, float] | None = None,
        documents: Literal["join", "isolate"] = "join",
        packing: Packing = "auto",
        too_long: TooLong = "refuse",
        micro: int,
        global_batch: int,
        size: Callable[[int], int] | None = None,
        seed: int,
        data_rank: int = 0,
        data_size: int = 1,
        slicing: Slicing = Slicing(),  # noqa: B008 (frozen)
        context_rank: int | None = None,
        vocab: int | None = None,
        eod: int | None = None,
        bos: Sequence[int] | None = None,
        cache_dir: str | Path | None = None,
        patience: float = 600.0,
        setting: str = "data.train",
    ) -> None:
        if global_batch % (micro * data_size):
            raise ConfigError(
                "batch.global",
                f"{global_batch} is not divisible by batch.micro {micro} x {data_size} data ranks; "
                f"expected a multiple of {micro * data_size}",
            )
        blend = [(1.0, data)] if isinstance(data, str) else list(data)
        if not blend:
            raise ConfigError(setting, "an empty blend; give a prefix or [[weight, prefix], ...]")
        self.sequence, self._setting = sequence, setting
        self.micro, self.global_batch = micro, global_batch
        self._size = size or (lambda _: global_batch)
        self.data_rank, self.data_size = data_rank, data_size
        self._slicing, self._context_rank = slicing, context_rank
        self._blend = Blend([weight for weight, _ in blend])
        self._sources: list[Source] = []
        with blaming(setting):
            opened = [open_built(prefix, vocab, eod, bos, part) for _, prefix in blend]
            check_targets(opened)
            for number, dataset in enumerate(opened):
                order = OrderSettings(seed=seed, source=number, cache_dir=cache_dir, patience=patience)
                source = source_of(dataset, packing, sequence, too_long, **order)
                self._sources.append(source)
                if isinstance(source, WholeSamples):
                    _report(setting, source)
        self._isolates = documents == "isolate"
        self._offsets = self._isolates or any(source.isolated for source in self._sources)
        # One worker: reads are in order, and a source's caches need no lock.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hexad-data")
        self._ahead: tuple[int, Future[list[Microbatch]]] | None = None

    @property
    def samples(self) -> int:
        """Samples of one epoch; of a blend, as many as it takes to read one of its sources once."""
        period, shares = self._blend.period, self._blend.shares
        return min(source.per_epoch * period // share for source, share in zip(self._sources, shares))

    @property
    def every_sample(self) -> int:
        """Consecutive samples among which there is a complete epoch of each source, wherever they begin."""
        pairs = zip(self._sources, self._blend.shares)
        return self._blend.period * max(-(-2 * source.per_epoch // share) + 1 for source, share in pairs)

    def microbatches(self, samples_consumed: int) -> int:
        """Microbatches of a data rank in the step that begins there."""
        return self._size(samples_consumed) // (self.micro * self.data_size)

    def prepare(self, samples_consumed: int) -> None:
        """Build or load the indexes needed from this sample on: of large data one process writes them. Others
        are made when they are first needed.

        Raises:
            ConfigError: an index is damaged, cannot be stored, or is not completed in time.
        """
        sources, numbers = self._blend.locate(samples_consumed + np.arange(max(self.global_batch, _AHEAD)))
        for number, source in enumerate(self._sources):
            source_numbers = numbers[sources == number]
            if len(source_numbers):
                with blaming(self._setting):
                    self._reader.submit(source.prepare, int(source_numbers[0])).result()

    def step(self, samples_consumed: int) -> list[Microbatch]:
        """This rank's microbatches of the step that begins at ``samples_consumed``; on the CPU.

        Steps may be requested in any order; the following one is read ahead.

        Raises:
            HexadError, OSError: the data can no longer be read (also when reading ahead failed).
        """
        if self._ahead is not None and self._ahead[0] == samples_consumed:
            future = self._ahead[1]
        else:
            if self._ahead is not None:
                self._ahead[1].cancel()
            future = self._reader.submit(self._read, samples_consumed)
        following = samples_consumed + self._size(samples_consumed)
        self._ahead = (following, self._reader.submit(self._read, following))
        return future.result()

    def ahead(self) -> list[Microbatch]:
        """The microbatches of the step after the one that was requested last; the list that :meth:`step` will
        return.

        Raises:
            HexadError, OSError: as :meth:`step`.
        """
        assert self._ahead is not None, "no step was requested"
        return self._ahead[1].result()

    def _read(self, consumed: int) -> list[Microbatch]:
        stride = self.micro * self.data_size
        rows = consumed + self.data_rank * self.micro + np.arange(self.micro)
        starts = stride * np.arange(self.microbatches(consumed))
        # Several microbatches at once: most of the time per call does not depend on the amount.
        at_once = max(1, _AT_ONCE // (self.micro * (self.sequence + 1)))
        return [
            microbatch
            for group in (starts[at : at + at_once] for at in range(0, len(starts), at_once))
            for microbatch in self._microbatches((group[:, None] + rows).reshape(-1))
        ]

    def _microbatches(self, samples: NDArray[np.int64]) -> Iterator[Microbatch]:
        tokens, begins, trained = self._samples(samples)
        inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if trained is not None:
            labels[~trained[:, 1:]] = IGNORED
        if self._offsets:
            labels[begins[:, 1:]] = IGNORED
            begins[:, 0] = True
        for at in range(0, len(samples), self.micro):
            rows, offsets = slice(at, at + self.micro), None
            if self._offsets:
                offsets = (*map(int, np.flatnonzero(begins[rows, :-1])), inputs[rows].size)
            whole = Microbatch(torch.from_numpy(inputs[rows]), torch.from_numpy(labels[rows]), offsets)
            yield whole if self._context_rank is None else whole.part(self._slicing, self._context_rank)

    def _samples(self, samples: NDArray[np.int64]) -> Samples:
        """Samples of the blend; documents begin where they are isolated."""
        sources, numbers = self._blend.locate(samples)

        def read(number: int, rows: NDArray[np.int64]) -> Samples:
            source = self._sources[number]
            part = source.read(numbers[rows])
            return part._replace(begins=part.begins & (self._isolates or source.isolated))

        return Samples.gather(sources, read)

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _report(setting: str, source: WholeSamples) -> None:
    facts = source.facts
    log.info(
        f"{setting}: {source.data.prefix}: {facts.documents:,} documents in {facts.samples:,} samples per "
        f"epoch, {100 * facts.efficiency:.1f} % of their positions; the longest has {facts.longest:,} tokens"
    )
    if facts.too_long:
        log.warning(
            f"{setting}: {facts.too_long:,} documents are longer than data.sequence {facts.sequence}: "
            f"{facts.too_long - facts.left_out:,} truncated, {facts.left_out:,} skipped (data.too_long "
            f"{source.too_long})"
        )


VALIDATION_SEED = 1234
"""Seed of the order of data for validation and evaluation, whatever ``run.seed`` is, so that scores
compare."""


def loader_from_config(
    config: Config,
    data_rank: int,
    data_size: int,
    tokenizer: Tokenizer,
    which: str = "train",
    context_rank: int | None = None,
) -> DataLoader:
    """The loader that a configuration describes.

    Args:
        config: resolved; uses ``data``, ``batch``, ``run.seed`` (for ``train``), ``run.dir``,
            ``model.vocab``, and what divides tokens among context ranks.
        data_rank, data_size: this rank's place on the data axis, and its degree.
        tokenizer: of ``data.tokenizer``; its vocabulary is the model's where ``model.vocab`` is ``auto``.
        which: ``train``, ``validation``, or ``validation.NAME`` of several sets.
        context_rank: this rank's place on the context axis, to get what it holds of each microbatch; None
            for whole ones, of which the engine takes that.

    Raises:
        ConfigError: the setting is null, or as for :class:`DataLoader`.
    """
    sets = config.data.validation_sets
    data = config.data.train if which == "train" else sets.get(which.removeprefix("validation."))
    if data is None:
        raise ConfigError(
            f"data.{which}", "found null, expected a .bin/.idx prefix or [[weight, prefix], ...]"
        )
    return DataLoader(
        data,
        sequence=config.data.sequence,
        part=config.data.part(which == "train"),
        documents=config.data.documents,
        packing=config.data.packing,
        too_long=config.data.too_long,
        micro=config.batch.micro,
        global_batch=config.batch.global_,
        size=config.batch.size if which == "train" else None,
        seed=config.run.seed if which == "train" else VALIDATION_SEED,
        data_rank=data_rank,
        data_size=data_size,
        slicing=Slicing.of(config.parallel, config.model),
        context_rank=context_rank,
        vocab=int(config.model.vocab),
        eod=tokenizer.eod,
        bos=bos_ids(tokenizer, config.data.bos),
        cache_dir=Path(config.run.dir) / "index-cache",
        patience=config.run.timeout,
        setting=f"data.{which}",
    )
