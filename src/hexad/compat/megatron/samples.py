"""Megatron-Core's map-style data sets: documents joined and cut, in its order, which NumPy draws."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hexad.config import HexadError
from hexad.dataset.indexed import IndexedDataset

from .masks import masks_and_positions

_LAST_EPOCH = 0.80
"""Part of an epoch below which the samples of the last one are shuffled by themselves."""


class Split(Enum):
    """The parts of a data set."""

    train = 0
    valid = 1
    test = 2


class Documents(Protocol):
    """The documents of a data set."""

    lengths: NDArray[np.int64]

    def read(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Tokens ``begin`` to ``end - 1`` of a document."""
        ...


class IndexedDocuments:
    """The documents of ``.bin`` and ``.idx`` files.

    Args:
        prefix: of the files.
    """

    def __init__(self, prefix: str) -> None:
        self._data = IndexedDataset(prefix)
        self.lengths = self._data.tokens_in(np.arange(len(self._data)))

    def read(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """See :class:`Documents`."""
        return self._data[document][begin:end]


class MockDocuments:
    """Megatron-Core's synthetic documents: numbers that count up, and the end of a document.

    Args:
        tokenizer: with ``vocab_size`` and ``eod``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._vocab, self._eod = int(tokenizer.vocab_size), tokenizer.eod
        drawn = np.random.default_rng(seed=0).integers(1, 4096, size=100_000, dtype=np.int32)
        self.lengths = drawn.astype(np.int64)

    def read(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """See :class:`Documents`."""
        tokens = (np.arange(begin, end) + 1) % self._vocab
        if end == self.lengths[document]:
            tokens[-1] = self._eod
        return tokens


class GPTDatasetConfig(SimpleNamespace):
    """The settings of a data set under Megatron-LM's names."""


class GPTDataset(Dataset[dict[str, Tensor]]):
    """Samples of ``sequence_length`` tokens from documents in a random order, joined and cut. With flags the
    class only names the data of ``--data-path`` for :class:`BlendedMegatronDatasetBuilder`.

    Args:
        indexed_dataset: the documents.
        dataset_path: not used.
        indexed_indices: numbers of the documents of this part.
        num_samples: at least so many, of as many epochs as needed; None: those of one epoch.
        index_split: not used.
        config: ``sequence_length``, ``random_seed``, ``tokenizer``, ``reset_position_ids``,
            ``reset_attention_mask``, ``eod_mask_loss`` and ``create_attention_mask``.

    Raises:
        HexadError: too few tokens for a sample, or settings that are missing.
    """

    def __init__(
        self,
        indexed_dataset: Documents,
        dataset_path: str | None,
        indexed_indices: NDArray[Any],
        num_samples: int | None,
        index_split: Any,
        config: Any,
    ) -> None:
        self.config, self._data = config, indexed_dataset
        documents = np.asarray(indexed_indices, dtype=np.int32)
        length, per_epoch = config.sequence_length, int(indexed_dataset.lengths[documents].sum())
        if per_epoch <= length:
            raise HexadError(
                f"{type(self).__name__}: found {per_epoch} tokens in {len(documents)} documents, expected "
                f"more than sequence_length {length}; give more data, or another split"
            )
        epochs = 1 if num_samples is None else max(1, -(-(num_samples * length + 1) // per_epoch))
        before = ((epochs - 1) * per_epoch - 1) // length  # samples of all epochs but the last
        last = (num_samples or 0) - before
        apart = epochs > 1 and last < int(_LAST_EPOCH * ((per_epoch - 1) // length))
        draw = np.random.RandomState(config.random_seed)
        self._order = _document_order(documents, epochs, draw, apart)
        self._ends = np.cumsum(indexed_dataset.lengths[self._order])
        total = (epochs * per_epoch - 1) // length
        self._shuffled = _shuffled(before if apart else total, total, draw)

    def __len__(self) -> int:
        return len(self._shuffled)

    def __getitem__(self, number: int | None) -> dict[str, Tensor]:
        """A sample; None: one without a loss, as of padding."""
        length = self.config.sequence_length
        begin = int(self._shuffled[number or 0]) * length
        text = torch.from_numpy(self._read(begin, begin + length + 1))
        sample = {"tokens": text[:-1].contiguous(), "labels": text[1:].contiguous()}
        return {**sample, **self._beside(sample["tokens"], number is None)}

    def _read(self, begin: int, end: int) -> NDArray[np.int64]:
        """Tokens of the joined documents."""
        first, last = np.searchsorted(self._ends, (begin, end - 1), side="right")
        parts = []
        for place in range(first, last + 1):
            document = int(self._order[place])
            start = int(self._ends[place] - self._data.lengths[document])
            stop = min(end, int(self._ends[place]))
            parts.append(self._data.read(document, max(begin - start, 0), stop - start))
        return np.concatenate(parts).astype(np.int64)

    def _beside(self, tokens: Tensor, padding: bool) -> dict[str, Tensor]:
        """Masks and positions of a sample."""
        config = self.config
        options = [bool(getattr(config, name, False)) for name in _OPTIONS]
        mask, losses, positions = masks_and_positions(tokens[None], config.tokenizer.eod, *options)
        beside = {"loss_mask": losses[0] * (not padding), "position_ids": positions[0]}
        creates = getattr(config, "create_attention_mask", True)
        return {**beside, **({"attention_mask": mask[0]} if creates else {})}


_OPTIONS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


class MockGPTDataset(GPTDataset):
    """Samples of :class:`MockDocuments`. With flags the class only names the data of ``--mock-data``."""


def _document_order(
    documents: NDArray[np.int32], epochs: int, draw: np.random.RandomState, apart: bool
) -> NDArray[np.int32]:
    """The documents of all epochs in a random order; of the last epoch by themselves if that is ``apart``."""
    if apart:
        first = _document_order(documents, epochs - 1, draw, False)
        return np.concatenate([first, _document_order(documents, 1, draw, False)])
    order = np.tile(documents, epochs)
    draw.shuffle(order)
    return order


def _shuffled(first: int, total: int, draw: np.random.RandomState) -> NDArray[np.uint32]:
    """Numbers of samples in a random order: the first ones, and those after these."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(0, first, dtype=dtype)]
    if first < total:
        parts.append(np.arange(first, total, dtype=dtype))
    for part in parts:
        draw.shuffle(part)
    return np.concatenate(parts)


def split_bounds(split: str) -> list[tuple[float, float] | None]:
    """The fractions between which the three parts of a split are, such as of ``99,1,0``; None: no such part.

    Raises:
        HexadError: it has no numbers, or too many.
    """
    numbers = [float(text) for text in re.findall(r"[.0-9]+", split)]
    if not 0 < len(numbers) <= len(Split) or not sum(numbers):
        raise HexadError(f"GPTDatasetConfig: found split {split!r}, expected up to three numbers: 99,1,0")
    numbers += [0.0] * (len(Split) - len(numbers))
    ends = np.cumsum([0.0, *(number / sum(numbers) for number in numbers)]).tolist()
    return [(low, high) if low < high else None for low, high in pairwise(ends)]


class BlendedDataset(Dataset[dict[str, Any]]):
    """Samples of several data sets in proportion to weights, in Megatron-Core's order; each also has the
    number of its data set, ``dataset_id``.

    Args:
        datasets: which are sampled.
        weights: of each.
        size: of the blend; None: as many of each as its weight says.
        config: not used.
    """

    def __init__(
        self, datasets: Sequence[GPTDataset], weights: Sequence[float], size: int | None, config: Any = None
    ) -> None:
        self.datasets, total = list(datasets), float(sum(weights))
        limits = [int(weight) for weight in weights] if size is None else None
        shares = [weight / total for weight in weights]
        self._sources, self._places = _blended(shares, int(total) if size is None else size, limits)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, number: int) -> dict[str, Any]:
        source = int(self._sources[number])
        return {"dataset_id": source, **self.datasets[source][int(self._places[number])]}


def _blended(
    shares: Sequence[float], size: int, limits: Sequence[int] | None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The data set of every sample, and the sample's number in it: always of the data set that is furthest
    behind its share, and has not reached its limit."""
    sources, places = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    counts, open_sets = [0] * len(shares), list(range(len(shares)))
    for sample in range(size):
        due = max(sample, 1)
        chosen = max(open_sets, key=lambda number: shares[number] * due - counts[number])
        sources[sample], places[sample] = chosen, counts[chosen]
        counts[chosen] += 1
        if limits is not None and counts[chosen] == limits[chosen]:
            open_sets.remove(chosen)
    return sources, places


Blend = tuple[Sequence[str], Sequence[float] | None]
"""Prefixes, and weights, of a blend."""


def build_datasets(
    cls: Any, sizes: Sequence[int | None], is_built_on_rank: Callable[[], bool], config: Any
) -> list[Any]:
    """The data sets for training, validation and testing; None where a part is empty, or not of this rank.

    Raises:
        HexadError: another class than :class:`GPTDataset` and :class:`MockGPTDataset`, weights without a
            number of samples, or settings that are missing.
    """
    missing = [name for name in ("random_seed", "sequence_length", "tokenizer") if not hasattr(config, name)]
    if missing:
        raise HexadError(f"GPTDatasetConfig: found no {missing[0]}; give it")
    if not (isinstance(cls, type) and issubclass(cls, GPTDataset)):
        name = getattr(cls, "__name__", cls)
        raise HexadError(f"BlendedMegatronDatasetBuilder: found {name!r}; pass GPTDataset or MockGPTDataset")
    separate = getattr(config, "blend_per_split", None)
    blends: list[Blend | None] = [getattr(config, "blend", None) or None] * len(Split)
    if separate is not None and any(separate):
        blends = list(separate)
        split = [None if blend is None else (0.0, 1.0) for blend in blends]
        blends = [blend and (blend[0], None if len(blend[0]) == 1 else blend[1]) for blend in blends]
    else:
        split = split_bounds((blends[0] and getattr(config, "split", None)) or "1,1,1")
    if not is_built_on_rank():
        return [None] * len(Split)
    sources: dict[str | None, Documents] = {}

    def part_of(prefix: str | None, part: Split, size: int | None) -> GPTDataset:
        """A part of one data set."""
        bounds = split[part.value]
        assert bounds is not None
        if prefix not in sources:
            sources[prefix] = MockDocuments(config.tokenizer) if prefix is None else IndexedDocuments(prefix)
        count = len(sources[prefix].lengths)
        chosen = np.arange(round(bounds[0] * count), round(bounds[1] * count), dtype=np.int32)
        dataset: GPTDataset = cls(sources[prefix], prefix, chosen, size, part, config)
        return dataset

    return [
        None if bounds is None else _of_blend(blend, part, size, config, part_of)
        for part, blend, bounds, size in zip(Split, blends, split, sizes)
    ]


def _of_blend(
    blend: Blend | None,
    part: Split,
    size: int | None,
    config: Any,
    part_of: Callable[[str | None, Split, int | None], GPTDataset],
) -> Dataset[Any]:
    """The data set of one part: of synthetic documents without a blend, of one prefix, or a blend."""
    if blend is None:
        return part_of(None, part, size)
    prefixes, weights = list(blend[0]), blend[1]
    if len(prefixes) == 1 and weights is None:
        return part_of(prefixes[0], part, size)
    if weights is None:  # in proportion to their samples
        datasets = [part_of(prefix, part, None) for prefix in prefixes]
        lengths = [len(dataset) for dataset in datasets]
        return BlendedDataset(datasets, lengths, None if size is None else min(size, sum(lengths)))
    if size is None:
        raise HexadError(
            f"GPTDatasetConfig: found weights of a blend without a number of samples for {part.name}; give "
            "the builder one, or leave out the weights"
        )
    shares = [weight / sum(weights) for weight in weights]
    counts = [math.ceil(size * share) for share in shares]
    surplus = 1 + getattr(config, "mid_level_dataset_surplus", 0.005)
    datasets = [part_of(prefix, part, math.ceil(n * surplus)) for prefix, n in zip(prefixes, counts)]
    return BlendedDataset(datasets, shares, sum(counts))
