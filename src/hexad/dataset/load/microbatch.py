"""Microbatches, which the loader passes to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hexad.comm import streams
from hexad.config import HexadError
from hexad.parallel.context.exchange import numbers_of
from hexad.parallel.context.slice import Slice, Slicing
from hexad.parallel.context.spans import Spans
from hexad.parallel.tensor.loss import IGNORED


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of one data rank, or the part of it that a context rank holds.

    Attributes:
        tokens: int64 ``[sequences, sequence]``, input token ids; ``[1, tokens]`` of a part.
        labels: int64, as large, the target at each position (already shifted: the label of position ``i`` is
            the token at ``i + 1``), or ``IGNORED``.
        documents: None where each sequence is one document; else the start offsets of all documents in
            the flattened ``[sequences * sequence]`` tokens, in order, beginning with 0 and ending with the
            total (``cu_seqlens``), of a part too. Every sequence's start is among them. Attention and
            positions are then confined to each document.
        slice: of a part, which context rank holds which tokens; else None.
        numbers: of a part, int64 ``[tokens]``: the tokens' places in the flattened microbatch.
        most: tokens that any rank holds of its microbatch at the same time; None: as many as this one.
        extras: further values of the tokens, by name, for a loss of one's own: ``[sequences, sequence,
            ...]``; ``[1, tokens, ...]`` of a part.
        experts: int64 ``[sequences, sequence, layers with experts, top_k]``: the experts that tokens pass in
            place of those that routers choose; -1 throughout a layer's where the router is to choose. None:
            routers choose all.
        expert_weights: float32 or float64, as large: their weights; None: the routers' weights of these. The
            gradient that the router receives is in both cases that of its own weights.
    """

    tokens: Tensor
    labels: Tensor
    documents: tuple[int, ...] | None = None
    slice: Slice | None = None
    numbers: Tensor | None = None
    most: int | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    experts: Tensor | None = None
    expert_weights: Tensor | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences of the whole microbatch."""
        return self.tokens.shape[0] if self.slice is None else self.slice.sequences

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.tokens.shape[1] if self.slice is None else self.slice.length

    @cached_property
    def spans(self) -> Spans:
        """Its sequences or documents, the same object for all stages."""
        total = self.sequences * self.length
        return Spans(total, self.sequences, self.documents, self.slice, self.numbers, self.most)

    @classmethod
    def of_sequences(
        cls,
        sequences: Sequence[Sequence[int]],
        multiple: int = 1,
        given: Sequence[int] | None = None,
        extras: Mapping[str, Sequence[Sequence[float]]] | None = None,
        experts: Sequence[Any] | None = None,
        expert_weights: Sequence[Any] | None = None,
    ) -> Microbatch:
        """Sequences of any lengths as documents of one, with padding behind them.

        Args:
            sequences: ids of each, at least one.
            multiple: of which the number of tokens is one, see
                :attr:`hexad.config.schema.ParallelSettings.token_multiple`.
            given: how many of each are not predicted; by default the first.
            extras: float32 values of each token that is predicted, by name; 0 of others.
            experts: of each sequence an array ``[ids - 1, layers with experts, top_k]``, see the class: those
                of all tokens but the last.
            expert_weights: of each, as large.

        Raises:
            HexadError: a sequence without ids, or with other numbers of ids than the others say.
        """
        given = [1] * len(sequences) if given is None else given
        _check_sequences(sequences, given, extras or {})
        ends = [0, *accumulate(len(ids) - 1 for ids in sequences)]
        padding = -ends[-1] % multiple if ends[-1] else multiple
        tokens = [token for ids in sequences for token in ids[:-1]] + [0] * padding
        labels: list[int] = []
        for ids, count in zip(sequences, given, strict=True):
            labels += [IGNORED] * (count - 1) + [*ids[count:]]
        values: dict[str, Tensor] = {}
        for name, rows in (extras or {}).items():
            parts = zip(rows, given, strict=True)
            row = [value for numbers, count in parts for value in [*[0.0] * (count - 1), *numbers]]
            values[name] = torch.tensor([row + [0.0] * padding], dtype=torch.float32)
        labels += [IGNORED] * padding
        documents = tuple(dict.fromkeys([*ends, len(tokens)]))
        return cls(
            torch.tensor([tokens]),
            torch.tensor([labels]),
            documents,
            extras=values,
            experts=_joined("experts", experts, sequences, padding, -1),
            expert_weights=_joined("expert_weights", expert_weights, sequences, padding, 0.0),
        )

    def targets(self) -> int:
        """Number of positions that have a target; of a part, of its own."""
        return int((self.labels != IGNORED).sum())

    def pairs(self) -> int:
        """Pairs of tokens of one document: the sum of the squares of the documents' lengths."""
        if self.documents is None:
            return self.sequences * self.length**2
        return sum((end - begin) ** 2 for begin, end in pairwise(self.documents))

    def part(self, slicing: Slicing, rank: int) -> Microbatch:
        """The part of this whole microbatch that a context rank holds; all of it where there is one rank."""
        if slicing.ranks == 1:
            return self
        divided = slicing.divided(self.sequences, self.length, self.documents)
        numbers = numbers_of(divided, rank)
        tokens, labels = (tensor.flatten()[numbers][None] for tensor in (self.tokens, self.labels))
        extras = {name: values.flatten(0, 1)[numbers][None] for name, values in self.extras.items()}
        experts, weights = (
            None if values is None else values.flatten(0, 1)[numbers][None]
            for values in (self.experts, self.expert_weights)
        )
        part = replace(self, tokens=tokens, labels=labels, slice=divided, numbers=numbers, extras=extras)
        return replace(part, experts=experts, expert_weights=weights)

    def without_targets_from(self, sequence: int) -> Microbatch:
        """Drop the targets of all sequences from this one on."""
        numbers = torch.arange(self.tokens.numel()) if self.numbers is None else self.numbers
        late = (numbers >= sequence * self.length).view(self.labels.shape)
        return replace(self, labels=self.labels.masked_fill(late, IGNORED))

    def to(self, device: torch.device) -> Microbatch:
        """This microbatch on ``device``."""
        moved = streams.of(device).moved
        numbers = None if self.numbers is None else moved(self.numbers, device)
        tokens, labels = moved(self.tokens, device), moved(self.labels, device)
        extras = {name: moved(values, device) for name, values in self.extras.items()}
        experts, weights = (
            None if values is None else moved(values, device)
            for values in (self.experts, self.expert_weights)
        )
        there = replace(self, tokens=tokens, labels=labels, numbers=numbers, extras=extras)
        return replace(there, experts=experts, expert_weights=weights)


def _joined(
    name: str, arrays: Sequence[Any] | None, sequences: Sequence[Sequence[int]], padding: int, fill: float
) -> Tensor | None:
    """``[1, tokens, ...]``: the values of the tokens of all sequences, one after the other, and of padding.

    Raises:
        HexadError: other numbers of arrays or of tokens than the sequences have.
    """
    if arrays is None:
        return None
    if not isinstance(arrays, Sequence) or isinstance(arrays, str):
        raise HexadError(f"{name}: found {arrays!r:.60}, expected an array of each sequence")
    if len(arrays) != len(sequences):
        raise HexadError(f"{name}: found {len(arrays)} values for {len(sequences)} sequences")
    tensors: list[Tensor] = []
    for number, (ids, array) in enumerate(zip(sequences, arrays), 1):
        try:
            values = array if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array))
        except (TypeError, ValueError):  # not of numbers, or ragged
            values = None
        columns = None if values is None or values.dim() != 3 else values.shape[1:]
        if values is None or columns is None or len(values) != len(ids) - 1:
            actual = type(array).__name__ if values is None else f"shape {tuple(values.shape)}"
            expected = f"an array [{len(ids) - 1}, layers with experts, top_k], of all tokens but the last"
            raise HexadError(f"{name} of sequence {number}: found {actual}, expected {expected}")
        if values.is_floating_point() != isinstance(fill, float):
            expected = "fractions" if isinstance(fill, float) else "whole numbers"
            raise HexadError(f"{name} of sequence {number}: found {values.dtype}, expected {expected}")
        if tensors and columns != tensors[0].shape[1:]:
            first = tuple(tensors[0].shape[1:])
            raise HexadError(
                f"{name} of sequence {number}: found {tuple(columns)}, but the first has {first}"
            )
        tensors.append(values if values.is_floating_point() else values.long())
    whole = torch.cat(tensors)
    return torch.cat((whole, whole.new_full((padding, *whole.shape[1:]), fill)))[None]


def _check_sequences(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    extras: Mapping[str, Sequence[Sequence[float]]],
) -> None:
    """Check that sequences, and the tensors that describe them, have matching lengths."""
    for name, values in {"given": prompt_lengths, **extras}.items():
        if len(values) != len(sequences):
            raise HexadError(f"{name}: found {len(values)} values for {len(sequences)} sequences")
    for number, (ids, count) in enumerate(zip(sequences, prompt_lengths), 1):
        if not 1 <= count <= len(ids):
            raise HexadError(f"sequence {number}: found {count} of {len(ids)} ids given, expected 1 or more")
        for name, rows in extras.items():
            if (values_count := len(rows[number - 1])) != (predicted := len(ids) - count):
                values = f"found {values_count} values for {predicted} predicted tokens"
                raise HexadError(f"{name} of sequence {number}: {values}")
