"""What a step of a language model is made of: checked microbatches, target counts, dropout keys, and what a
stage computes of them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hexad.comm import Pending, all_reduce, all_reduce_async, merging, wait_for
from hexad.config import Config, ConfigError, HexadError
from hexad.config.model import ModelSettings
from hexad.config.schema import RunSettings
from hexad.dataset.load.microbatch import Microbatch
from hexad.model.auxiliary import Auxiliary
from hexad.model.dropout import DropoutKey
from hexad.model.inventory import ModelInventory
from hexad.model.replay import Replay
from hexad.model.transformer import DTYPES, Transformer, make_shard
from hexad.parallel.context.slice import Slicing
from hexad.parallel.pointwise import missing_compiler
from hexad.parallel.sharding import Shard
from hexad.topology.mesh import Mesh

from .experts import Loads, Reports

log = logging.getLogger(__name__)

_PRIME = (1 << 61) - 1


@dataclass(frozen=True)
class Task:
    """One microbatch, and what stages need besides to compute with it.

    Attributes:
        microbatch: on the device.
        key: of dropout; None for evaluation.
        auxiliary: where layers add losses of their own; None where none do.
    """

    microbatch: Microbatch
    key: DropoutKey | None = None
    auxiliary: Auxiliary | None = None


@dataclass(frozen=True)
class Work:
    """What a rank computes in one training step.

    Attributes:
        tasks: of its data rank, in order.
        sequences: of these.
        targets: positions of the global batch that have a target, or what the caller divides by; 0: there is
            nothing to learn from.
        pairs: pairs of tokens of one document in the global batch.
        divisor: see :meth:`LanguageModel.divisor`.
        auxiliary: sums of the layers' own losses; None where there are none.
    """

    tasks: Sequence[Task]
    sequences: int
    targets: int
    pairs: int
    divisor: int
    auxiliary: Auxiliary | None


class Counts(NamedTuple):
    """What a step has, over all ranks.

    Attributes:
        targets: positions that have a target.
        pairs: pairs of tokens of one document.
        fewest, most: microbatches of a rank.
        longest: tokens of a rank's part of a microbatch, at the most.
        problem: what is wrong with a rank's microbatches, in words; None if all are right.
        agreement: see :meth:`LanguageModel._agreement`.
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


def training_shard(config: Config, mesh: Mesh) -> Shard:
    """Which shard of every layer this rank holds for training, and how."""
    dtype = config.precision.dtype
    shard = make_shard(config.parallel, mesh, DTYPES[dtype])
    return replace(
        shard,
        deferred=True,
        fp8=dtype == "fp8",
        fp8_weight_gradients=config.precision.fp8_weight_gradients,
        exact=config.precision.exact,
        compiled=compiles(config.run, mesh.device) and not config.precision.exact,
    )


def compiles(run: RunSettings, device: torch.device) -> bool:
    """Whether pointwise functions are compiled on the device.

    Raises:
        ConfigError: they are to be, and the machine lacks what that needs.
    """
    if run.compile == "none" or (run.compile == "auto" and device.type == "cpu"):
        return False
    missing = missing_compiler(device)
    if missing is not None and run.compile != "auto":
        fix = "install it, or use none"
        raise ConfigError("run.compile", f"found {run.compile}, which needs {missing} on this machine; {fix}")
    if missing is not None:
        _say_not_compiled(missing)
    return missing is None


@cache
def _say_not_compiled(missing: str) -> None:
    log.warning("run.compile auto: functions are not compiled: this machine lacks %s", missing)


def compute(stage: nn.Module, task: Task, inputs: Tensor | None, scale: float | None) -> Tensor:
    """A stage's hidden states of a microbatch; the last stage's sum of token losses."""
    assert isinstance(stage, Transformer)
    microbatch, auxiliary = task.microbatch, task.auxiliary
    if auxiliary is not None and scale is not None:
        auxiliary = auxiliary.scaled(scale)
    replay = None
    if microbatch.experts is not None:
        imposed = (microbatch.experts, microbatch.expert_weights)
        experts, weights = (None if values is None else values.flatten(0, 1) for values in imposed)
        replay = Replay(stage.model.expert_layers, experts, weights)
    passed: dict[str, Any] = {"inputs": inputs, "key": task.key, "auxiliary": auxiliary, "replay": replay}
    if stage.head is None:
        return stage(microbatch.tokens, microbatch.spans, **passed)
    if stage.loss is not None:
        hidden = stage(microbatch.tokens, microbatch.spans, **passed)
        own: Tensor = stage.loss(stage, hidden, microbatch)
        return own
    return stage.loss_sum(microbatch.tokens, microbatch.labels, microbatch.spans, scale=scale, **passed)


class _Counting(NamedTuple):
    """Microbatches, what this rank holds of them, and what all ranks have, which is being counted."""

    microbatches: Sequence[Microbatch]
    parts: list[Microbatch]
    counts: Future[Counts]


class LanguageModel:
    """From one rank's microbatches to what its stages compute: checks, counts, dropout keys, divisors.

    Attributes:
        shard: which shard of every layer this rank holds, and how.
        axis: ranks that have other tokens.
        losses: names of the layers' own losses, the same on all ranks.
        loads: of experts; None without.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.shard = training_shard(config, mesh)
        self.axis = mesh.gradient_axis()
        self._counting = mesh.background("counts")
        self._announced: _Counting | None = None
        self.vocab = int(config.model.vocab)
        self.slicing = Slicing.of(config.parallel, config.model)
        self.losses = ModelInventory(config.model).losses
        self.loads = Loads(config.model, mesh.device) if config.model.expert_layers else None

    def part(self, microbatch: Microbatch) -> Microbatch:
        """What this rank holds of a microbatch, which is given whole or as the loader divides it.

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
        if microbatch.length % self.slicing.ranks:
            raise HexadError(
                f"Microbatch.tokens: found sequences of {microbatch.length} tokens, expected a multiple of "
                f"parallel.context {self.slicing.ranks}"
            )
        return microbatch.part(self.slicing, self.mesh.context.rank)

    def _check_part(self, microbatch: Microbatch) -> None:
        slice_, numbers, rank = microbatch.slice, microbatch.numbers, self.mesh.context.rank
        assert slice_ is not None
        wanted = self.slicing.divided(microbatch.sequences, microbatch.length, microbatch.documents)
        first, last = wanted.runs[rank][0][0], wanted.runs[rank][-1][1] - 1
        if slice_ != wanted or numbers is None or (int(numbers[0]), int(numbers[-1])) != (first, last):
            raise HexadError(
                f"Microbatch.slice: found the part of another context rank than {rank}, or of another "
                "division; pass whole microbatches, or those of a loader with context_rank=mesh.context.rank"
            )
        shape = tuple(microbatch.tokens.shape)
        if shape != (1, wanted.share):
            raise HexadError(
                f"Microbatch.tokens: found shape {shape}, expected (1, {wanted.share}) of a part"
            )

    def boundary(self, task: Task, stage: int) -> Tensor:
        """An empty tensor for the hidden states that any stage but the last computes of a microbatch."""
        shard = self.shard
        rows = task.microbatch.tokens.numel() // (shard.tensor.size if shard.sequence else 1)
        return torch.empty((rows, self.config.model.hidden), dtype=shard.dtype, device=shard.device)

    def _problem(self, microbatch: Microbatch) -> str | None:
        """What is wrong with the ids of a microbatch."""
        for name, ids, lowest in (("token", microbatch.tokens, 0), ("label", microbatch.labels, -100)):
            low, high = (int(x) for x in ids.aminmax())
            if low < lowest or high >= self.vocab or (lowest and -100 < low < 0):
                bad = high if high >= self.vocab else low
                return (
                    f"{name} id {bad} is outside the model's vocabulary of {self.vocab} (model.vocab); set "
                    "data.tokenizer (or model.vocab) to what the data was built with"
                )
        return None

    def prepare(self, microbatches: Sequence[Microbatch], step: int, divisor: int | None = None) -> Work:
        """The work of one training step, after ``step`` others; all ranks together. ``divisor`` takes the
        place of the number of targets.

        Raises:
            HexadError: as :meth:`_counted`, or another ``divisor``.
        """
        _, parts, counting = self._begun(microbatches)
        placed = [part.to(self.mesh.device) for part in parts]
        # Every rank reads the counts before any waits for another stage, so that all refuse them alike.
        counts = self._counted(counting, equal=True)
        targets, pairs = counts.targets, counts.pairs
        placed = [replace(part, most=counts.longest) for part in placed]
        if divisor is not None and (not isinstance(divisor, int) or divisor < 1):
            raise HexadError(f"divisor: found {divisor!r}, expected a number of 1 or more")
        targets = targets if divisor is None else divisor
        auxiliary = self._auxiliary(targets, len(placed))
        tasks = [Task(part, self._key(step, index, part), auxiliary) for index, part in enumerate(placed)]
        sequences = sum(part.sequences for part in parts)
        return Work(tasks, sequences, targets, pairs, self.divisor(targets), auxiliary)

    def divisor(self, targets: int) -> int:
        """What losses are divided by before the backward pass.

        That is the global number of targets. In fp16 it is a microbatch's number of tokens, and gradients are
        divided by the rest in float32: a small probability over millions of targets would underflow.
        """
        if self.config.precision.dtype != "fp16":
            return targets
        return min(targets, self.config.batch.micro * self.config.data.sequence)

    def prepare_evaluation(self, microbatches: Sequence[Microbatch]) -> tuple[list[Task], int]:
        """(what this rank evaluates, its targets); all ranks together. In ZeRO 3, which gathers weights for
        each microbatch, and where experts are divided, all ranks have as many.

        Raises:
            HexadError: as :meth:`_counted`.
        """
        self.settle()
        _, parts, counting = self._count(microbatches)
        parallel = self.config.parallel
        divided = self.loads is not None and parallel.expert * parallel.expert_tensor > 1
        most = self._counted(counting, equal=parallel.zero == 3 or divided).longest
        targets = sum(part.targets() for part in parts)
        return [Task(replace(part.to(self.mesh.device), most=most)) for part in parts], targets

    def _auxiliary(self, targets: int, microbatches: int) -> Auxiliary | None:
        """Sums of the layers' own losses, scaled by the divisor of the token losses times that of a mean over
        all microbatches, and their counts."""
        names, loads = self.losses, self.loads
        if not names and loads is None:
            return None
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        scale = targets / (microbatches * self.mesh.data.size)
        if loads is None:
            return Auxiliary(names, sums, scale)
        return Auxiliary(names, sums, scale, loads.empty(), loads.shares)

    def start_summing(self, total: Tensor | None, auxiliary: Auxiliary | None) -> Pending:
        """Start summing, over the ranks that have other tokens, the token losses (None but on the rank of the
        last stage), the layers' own and their counts: float64 ``[1 + losses + counts]``."""
        sums = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        if total is not None:
            sums[0] = total
        if auxiliary is not None:
            counts = () if auxiliary.counts is None else (auxiliary.counts.flatten(),)
            parts = torch.cat((auxiliary.sums, *counts))
            sums = torch.cat((sums, all_reduce(parts, self.mesh.tensor)))
        return all_reduce_async(sums, self.axis)

    def means(self, sums: Sequence[float], microbatches: int) -> dict[str, float]:
        """The layers' own losses by name, given their sums over all ranks, and each data rank's number of
        microbatches."""
        return {name: total / (microbatches * self.mesh.data.size) for name, total in zip(self.losses, sums)}

    def counts(self, sums: Tensor) -> Tensor | None:
        """What layers counted, of all ranks, in the sums of :meth:`start_summing`; None where none counts."""
        return None if self.loads is None else self.loads.shaped(sums[1 + len(self.losses) :])

    def veto(self, counts: Tensor, veto: Pending | None) -> Pending | None:
        """Forbid the update also where rows found no place in a buffer; see :meth:`BucketOptimizer.step`."""
        if self.loads is None or self.mesh.device.type == "cpu":  # where buffers are as large as they must be
            return veto
        missed = (self.loads.missed(counts) > 0).to(torch.int32)
        return Pending(missed if veto is None else missed + veto.wait())

    def report(self, sums: Sequence[float]) -> Reports:
        """The loads of experts, by layer, in the same sums.

        Raises:
            HexadError: rows found no place in a buffer.
        """
        return {} if self.loads is None else self.loads.report(sums[1 + len(self.losses) :])

    def announce(self, microbatches: Sequence[Microbatch]) -> None:
        """Start counting what the next step's microbatches have, while this one runs; all ranks together.
        :meth:`prepare` continues with the same list."""
        self.settle()  # what was announced before uses the same messages
        self._announced = self._count(microbatches)

    def settle(self) -> None:
        """Wait for counts that :meth:`announce` has started."""
        if self._announced is not None:
            wait_for(self.mesh.world, self._announced.counts.result)

    def _begun(self, microbatches: Sequence[Microbatch]) -> _Counting:
        """The counts of these microbatches, started here unless they were announced."""
        announced, self._announced = self._announced, None
        if announced is None or announced.microbatches is microbatches:
            return announced or self._count(microbatches)
        wait_for(self.mesh.world, announced.counts.result)  # of others: the next would use its messages
        return self._count(microbatches)

    def _count(self, microbatches: Sequence[Microbatch]) -> _Counting:
        """What this rank holds of its microbatches, and the start of counting what all ranks were given. On
        the hosts: the device is not waited for."""
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
        return _Counting(microbatches, parts, merging(counts, self._counting, Counts.plus))

    def _counted(self, counting: Future[Counts], equal: bool) -> Counts:
        """What :meth:`_count` has found, the same on all ranks.

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

    def _key(self, step: int, index: int, microbatch: Microbatch) -> DropoutKey:
        """The dropout key of this data rank's microbatch number ``index``: data ranks take turns."""
        first = (index * self.mesh.data.size + self.mesh.data.rank) * microbatch.sequences
        return DropoutKey(self.config.run.seed, step, first)


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
            found = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else values
            found = str(found).removeprefix("torch.")
            raise HexadError(
                f"Microbatch.{name}: found {found:.80}, expected {kind} of shape {shape}: {named}"
            )
    if weights is not None and not weights[experts >= 0].isfinite().all():
        raise HexadError("Microbatch.expert_weights: found a weight that is not finite")
    low, high = (int(bound) for bound in experts.aminmax()) if experts.numel() else (0, 0)
    if low < -1 or high >= moe.experts:
        bad = high if high >= moe.experts else low
        expected = f"0 to {moe.experts - 1}, or -1 throughout where the router is to choose"
        raise HexadError(f"Microbatch.experts: found the expert {bad}, expected {expected}")
    ordered, given = experts.sort(-1).values, experts >= 0
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any() or (given.any(-1) != given.all(-1)).any():
        raise HexadError("Microbatch.experts: found a token with an expert twice, or with -1 beside others")


def _check_documents(documents: tuple[int, ...], sequences: int, length: int) -> None:
    """Offsets that miss the start of a sequence would let attention reach across sequences in silence."""
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
