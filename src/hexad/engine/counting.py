"""The microbatches of a step, checked on every rank, and what all ranks together have of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Sized
from concurrent.futures import Future
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hexad.comm import merging, wait_for
from hexad.config import Config, HexadError
from hexad.config.model import ModelSettings
from hexad.dataset.load.microbatch import Microbatch
from hexad.parallel.context.slice import Slicing
from hexad.topology.mesh import Mesh

_PRIME = (1 << 61) - 1


class Counts(NamedTuple):
    """Counts of a step over all ranks.

    Attributes:
        targets: positions that have a target.
        pairs: pairs of tokens of one document.
        fewest, most: microbatches of a rank.
        longest: tokens of a rank's part of a microbatch, at the most.
        problem: what is wrong with a rank's microbatches, in words; None if all are right.
        agreement: see :meth:`Counting._agreement`.
    """

    targets: int
    pairs: int
    fewest: int
    most: int
    longest: int
    problem: str | None = None
    agreement: int = 0

    def plus(self, other: Counts) -> Counts:
        """Merge the counts of two groups of ranks."""
        fewest, most = min(self.fewest, other.fewest), max(self.most, other.most)
        targets, pairs = self.targets + other.targets, self.pairs + other.pairs
        agreement = (self.agreement + other.agreement) % _PRIME
        longest, problem = max(self.longest, other.longest), self.problem or other.problem
        return Counts(targets, pairs, fewest, most, longest, problem, agreement)


class _StartedCount(NamedTuple):
    """Microbatches, what this rank holds of them, and what all ranks have, which is being counted."""

    microbatches: Sequence[Microbatch]
    parts: list[Microbatch]
    counts: Future[Counts]


class Counting:
    """Checks microbatches and counts what all ranks have of them, on the hosts: no device is waited for.

    Attributes:
        vocab: of the model.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.vocab = int(config.model.vocab)
        self._slicing = Slicing.of(config.parallel, config.model)
        self._background = mesh.background("counts")
        self._announced: _StartedCount | None = None

    def announce(self, microbatches: Sequence[Microbatch]) -> None:
        """Start counting what the next step's microbatches have, while this one runs; all ranks together.
        :meth:`counted` continues with the same list."""
        self.settle()  # what was announced before uses the same messages
        self._announced = self._start(microbatches)

    def settle(self) -> None:
        """Wait for counts that :meth:`announce` has started."""
        if self._announced is not None:
            wait_for(self.mesh.world, self._announced.counts.result)

    def counted(self, microbatches: Sequence[Microbatch]) -> tuple[list[Microbatch], Counts]:
        """(what this rank holds of a training step's microbatches, on the device; what all ranks have).

        Raises:
            HexadError: see :meth:`_result`.
        """
        _, parts, counts = self._begun(microbatches)
        placed = [part.to(self.mesh.device) for part in parts]
        # Every rank reads the counts before any waits for another stage, so that all refuse them alike.
        return placed, self._result(counts, equal=True)

    def counted_apart(
        self, microbatches: Sequence[Microbatch], equal: bool
    ) -> tuple[list[Microbatch], Counts]:
        """The parts and counts of microbatches that are evaluated (:meth:`counted`), on the host; announced
        ones stay announced. All ranks must have ``equal`` numbers of them, or may have different ones."""
        self.settle()
        _, parts, counts = self._start(microbatches)
        return parts, self._result(counts, equal)

    def _begun(self, microbatches: Sequence[Microbatch]) -> _StartedCount:
        """The counts of these microbatches, started here unless they were announced."""
        announced, self._announced = self._announced, None
        if announced is None or announced.microbatches is microbatches:
            return announced or self._start(microbatches)
        wait_for(self.mesh.world, announced.counts.result)  # of others: the next would use its messages
        return self._start(microbatches)

    def _start(self, microbatches: Sequence[Microbatch]) -> _StartedCount:
        """Start counting what all ranks have, and return this rank's part of its microbatches. It runs on the
        hosts and does not wait for the device."""
        number = len(microbatches) if isinstance(microbatches, Sized) else 0
        parts: list[Microbatch] = []
        try:
            _check_microbatches(microbatches)
            parts = [self.part(microbatch) for microbatch in microbatches]
            problem = next((text for text in map(self._problem, parts) if text is not None), None)
        except HexadError as error:
            problem = str(error)
        targets = pairs = 0
        if self.mesh.tensor.rank == self.mesh.pipeline.rank == 0:  # others have the same tokens
            targets = sum(m.targets() for m in parts)
            pairs = sum(m.pairs() for m in parts) if self.mesh.context.rank == 0 else 0
        longest = max((part.tokens.numel() for part in parts), default=0)
        counts = Counts(targets, pairs, number, number, longest, problem, self._agreement(parts))
        return _StartedCount(microbatches, parts, merging(counts, self._background, Counts.plus))

    def _result(self, counting: Future[Counts], equal: bool) -> Counts:
        """The counts that :meth:`_start` began, the same on all ranks.

        Raises:
            HexadError: any rank's microbatches are wrong, or have ids outside the vocabulary; tensor, context
                and pipeline ranks of a data rank have others than each other; if they have to be ``equal``,
                different numbers of microbatches.
        """
        counts = wait_for(self.mesh.world, counting.result)
        if counts.problem is not None:
            raise HexadError(counts.problem)
        if counts.agreement % _PRIME:
            raise HexadError(
                "ranks of one data rank were given different numbers, lengths or documents of microbatches, "
                "or experts on some ranks only; tensor, context and pipeline ranks need the same, or context "
                "ranks their parts of these"
            )
        if equal and counts.fewest != counts.most:
            raise HexadError(
                f"ranks were given different numbers of microbatches in one step: {counts.fewest} to "
                f"{counts.most}; all need the same number"
            )
        return counts

    def _agreement(self, parts: Sequence[Microbatch]) -> int:
        """A number whose sum over all ranks is 0 modulo :data:`_PRIME` if, and but for chance only if, the
        ranks of each data rank have microbatches of the same lengths and documents, all with experts, or
        with their weights, or all without."""
        data = self.mesh.data
        shapes = [
            (p.sequences, p.length, p.documents, p.experts is None, p.expert_weights is None) for p in parts
        ]
        digest = hashlib.blake2b(repr((data.rank, shapes)).encode(), digest_size=8).digest()
        others = self.mesh.layout.world // data.size - 1
        first = self.mesh.tensor.rank == self.mesh.context.rank == self.mesh.pipeline.rank == 0
        return int.from_bytes(digest, "little") * (others if first else -1) % _PRIME

    def part(self, microbatch: Microbatch) -> Microbatch:
        """This rank's part of a microbatch, which is complete or already divided by the loader.

        Raises:
            HexadError: tensors of other shapes or formats, document offsets that do not fit, experts that the
                model does not have, a length that does not divide by the context ranks, or the part of
                another rank.
        """
        _check_tensors(microbatch)
        _check_experts(microbatch, self.config.model)
        if microbatch.documents is not None:
            _check_documents(microbatch.documents, microbatch.sequences, microbatch.length)
        if microbatch.slice is not None:
            self._check_part(microbatch)
            return microbatch
        if microbatch.length % self._slicing.ranks:
            raise HexadError(
                f"Microbatch.tokens: found sequences of {microbatch.length} tokens, expected a multiple of "
                f"parallel.context {self._slicing.ranks}"
            )
        return microbatch.part(self._slicing, self.mesh.context.rank)

    def _check_part(self, microbatch: Microbatch) -> None:
        slice_, numbers, rank = microbatch.slice, microbatch.numbers, self.mesh.context.rank
        assert slice_ is not None
        division = self._slicing.divided(microbatch.sequences, microbatch.length, microbatch.documents)
        first, last = division.runs[rank][0][0], division.runs[rank][-1][1] - 1
        if slice_ != division or numbers is None or (int(numbers[0]), int(numbers[-1])) != (first, last):
            raise HexadError(
                f"Microbatch.slice: found the part of another context rank than {rank}, or of another "
                "division; pass whole microbatches, or those of a loader with context_rank=mesh.context.rank"
            )
        shape = tuple(microbatch.tokens.shape)
        if shape != (1, division.share):
            raise HexadError(
                f"Microbatch.tokens: found shape {shape}, expected (1, {division.share}) of a part"
            )

    def _problem(self, microbatch: Microbatch) -> str | None:
        """A text that names what is wrong with the ids of a microbatch; None if nothing is."""
        for name, ids, lowest in (("token", microbatch.tokens, 0), ("label", microbatch.labels, -100)):
            low, high = (int(x) for x in ids.aminmax())
            if low < lowest or high >= self.vocab or (lowest and -100 < low < 0):
                bad = high if high >= self.vocab else low
                return (
                    f"{name} id {bad} is outside the model's vocabulary of {self.vocab} (model.vocab); set "
                    "data.tokenizer (or model.vocab) to what the data was built with"
                )
        return None


def _check_tensors(microbatch: Microbatch) -> None:
    tokens, labels = microbatch.tokens, microbatch.labels
    for name, tensor in (("tokens", tokens), ("labels", labels)):
        if not isinstance(tensor, Tensor):
            raise HexadError(f"Microbatch.{name}: found {type(tensor).__name__}, expected a tensor of int64")
        if tensor.dim() != 2 or not tensor.numel() or tensor.dtype != torch.int64:
            description = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
            raise HexadError(
                f"Microbatch.{name}: found {description}, expected int64 of shape [sequences, length]"
            )
    if labels.shape != tokens.shape:
        raise HexadError(
            f"Microbatch.labels: found shape {tuple(labels.shape)}, expected that of the tokens, "
            f"{tuple(tokens.shape)}: the label of position i is the token at i + 1"
        )


def _check_experts(microbatch: Microbatch, model: ModelSettings) -> None:
    """Refuse imposed experts that the model's routers could not have chosen."""
    experts, weights, moe = microbatch.experts, microbatch.expert_weights, model.moe
    if experts is None:
        if weights is not None:
            raise HexadError("Microbatch.expert_weights: found weights without Microbatch.experts")
        return
    if moe is None or not model.expert_layers:
        raise HexadError("Microbatch.experts: found experts, but the model has none (model.moe)")
    shape = (*microbatch.tokens.shape, len(model.expert_layers), moe.top_k)
    named = "sequences, tokens, layers with experts, model.moe.top_k"
    formats = {"experts": (torch.int64,), "expert_weights": (torch.float32, torch.float64)}
    for name, values in (("experts", experts), ("expert_weights", weights)):
        if values is None:
            continue
        kind = " or ".join(str(dtype).removeprefix("torch.") for dtype in formats[name])
        fits = isinstance(values, Tensor) and tuple(values.shape) == shape
        if not fits or values.dtype not in formats[name]:
            actual = (
                f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else values
            )
            actual = str(actual).removeprefix("torch.")
            raise HexadError(
                f"Microbatch.{name}: found {actual:.80}, expected {kind} of shape {shape}: {named}"
            )
    if weights is not None and not weights[experts >= 0].isfinite().all():
        raise HexadError("Microbatch.expert_weights: found a weight that is not finite")
    low, high = (int(bound) for bound in experts.aminmax()) if experts.numel() else (0, 0)
    if low < -1 or high >= moe.experts:
        bad = high if high >= moe.experts else low
        expected = f"0 to {moe.experts - 1}, or -1 throughout where the router is to choose"
        raise HexadError(f"Microbatch.experts: found the expert {bad}, expected {expected}")
    ordered, imposed = experts.sort(-1).values, experts >= 0
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any() or (imposed.any(-1) != imposed.all(-1)).any():
        raise HexadError("Microbatch.experts: found a token with an expert twice, or with -1 beside others")


def _check_documents(documents: tuple[int, ...], sequences: int, length: int) -> None:
    """Refuse offsets that miss the start of a sequence: attention would cross it unnoticed."""
    total = sequences * length
    starts = set(range(0, total, length))
    ascending = all(a < b for a, b in pairwise(documents))
    if not ascending or documents[-1] != total or documents[0] != 0 or not starts <= set(documents):
        raise HexadError(
            f"Microbatch.documents: found {documents}, expected rising offsets from 0 to {total} with each "
            f"sequence's start ({length} tokens each) among them"
        )


def _check_microbatches(microbatches: object) -> None:
    """Refuse what is not a list of microbatches.

    Raises:
        HexadError: naming the first that is something else.
    """
    if not isinstance(microbatches, Sequence):
        raise HexadError(f"microbatches: found {type(microbatches).__name__}, expected a list of Microbatch")
    if not microbatches:
        raise HexadError("found no microbatch on a rank; every rank needs at least one")
    for number, microbatch in enumerate(microbatches):
        if not isinstance(microbatch, Microbatch):
            kind = type(microbatch).__name__
            raise HexadError(f"microbatches[{number}]: found {kind}, expected Microbatch(tokens, labels)")
