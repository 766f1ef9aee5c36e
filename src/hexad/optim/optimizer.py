"""The update of all buckets: the global gradient norm, clipping, and the rule by which values change, AdamW's
(Loshchilov and Hutter, arXiv 1711.05101) or another."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hexad.comm import Pending, all_reduce, streams
from hexad.config.schema import OptimizerSettings
from hexad.parallel.data.buckets import Bucket, Shardings
from hexad.parallel.inventory import Grid
from hexad.parallel.pointwise import maybe_compiled
from hexad.topology.mesh import Axis

from .schedule import MOMENTS, LearningRates

Publish = Callable[[Bucket], None]
"""Called with each bucket after its update, in the order of the forward pass."""


class Rule(ABC):
    """How master values change by their gradients, on this rank's shard of every bucket.

    Master values and state are where the buckets' master is: on the device, or in the host's memory.

    Attributes:
        rate: its own learning rate, of the first group; None where :meth:`update` is given rates.
        widens: it takes gradients in any format, and their factor on the device, for which the host does not
            wait.
    """

    rate: float | None = None
    widens = False

    @abstractmethod
    def update(
        self,
        gradients: Iterator[Tensor],
        rates: LearningRates | None,
        factor: float | Tensor,
        publish: Publish,
    ) -> None:
        """Update all buckets and publish each.

        Args:
            gradients: of each bucket, like its master unless it ``widens``; may be overwritten.
            rates: learning rates; None where the rule has its own.
            factor: what gradients are multiplied by. Where the rule ``widens``, a float64 scalar on the
                device; NaN leaves all values and state as they are.
            publish: called with each bucket after its update.
        """

    def made(self) -> None:  # noqa: B027  # most need no count
        """Count an update, once the host knows that it has changed something."""

    @abstractmethod
    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """(name in a checkpoint, values like the master's) of all that is kept of a bucket's parameters."""

    def numbers(self) -> dict[str, Any]:
        """Other numbers needed to resume, in JSON's types."""
        return {}

    @abstractmethod
    def restored(self, updates: int, numbers: Mapping[str, Any]) -> None:
        """Resume after ``updates`` updates, with :meth:`numbers`; :meth:`state` has been overwritten."""


class BucketOptimizer:
    """Norm, clipping and update of this rank's shard of every bucket.

    Args:
        buckets: of all trained parameters.
        rule: of the update.
        clip: largest gradient norm; 0 turns clipping off.
        sharding: which ranks hold other shards of a bucket, or copies of it.
        pipeline: the axis whose ranks hold other stages.
        norm: an empty tensor of the gradient norm's format, on the device.
        axes: of a step, over all of which the norm is one number.
        clip_epsilon: added to the norm that ``clip`` is divided by: 1e-6 in PyTorch's ``clip_grad_norm_``,
            DeepSpeed and Megatron-LM.

    Attributes:
        clip, clip_epsilon: the arguments; may be changed between steps.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        rule: Rule,
        clip: float,
        sharding: Shardings,
        pipeline: Axis,
        norm: Tensor,
        axes: Sequence[Axis],
        clip_epsilon: float = 0.0,
    ) -> None:
        self.buckets, self.rule = buckets, rule
        self.clip, self.clip_epsilon = clip, clip_epsilon
        self._norm, self._wide = norm, norm.dtype
        self.sharding, self.pipeline, self._axes = sharding, pipeline, axes
        self._arriving: list[Tensor] = []  # gradients in the host's memory
        self._numbers: dict[int, Tensor] = {}  # what the host reads of a step, by its length, in its memory

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the whole model's gradient, as a scalar tensor on the device.

        Each rank adds the squares of its shards. A shard with n copies adds 1/n of its squares on each of
        these n ranks: so it counts once, and a NaN on any rank reaches all. Groups of ranks may add up in
        different orders: the largest number counts, so that no replica is clipped by another one.
        """
        total = self._norm.new_zeros(1)
        for grid, sharding in self.sharding.items():
            part = self._norm.new_zeros(1)
            for copies, squares in sorted(self._squares(grid).items()):
                part += squares / copies
            for axis in (sharding.shards, *sharding.model):
                part = all_reduce(part, axis)
            total += part
        norm = all_reduce(total, self.pipeline)[0].sqrt()
        for axis in self._axes:
            norm = all_reduce(norm, axis, "max")
        return norm

    def _squares(self, grid: Grid) -> dict[int, Tensor]:
        """Number of copies of a shard -> sum of squares of the shards with so many copies."""
        gradients: dict[int, list[Tensor]] = {}
        for bucket in self.buckets:
            traits = bucket.traits
            if traits.grid == grid and not traits.copy:
                copies = prod(axis.size for axis in self.sharding[grid].copies(traits))
                gradients.setdefault(copies, []).append(bucket.gradient)
        return {
            copies: torch.stack(torch._foreach_norm(parts, 2, self._wide)).square_().sum()
            for copies, parts in gradients.items()
        }

    @torch.no_grad()
    def step(
        self,
        rates: LearningRates | None,
        scale: float,
        publish: Publish,
        veto: Pending | None = None,
        further: Tensor | None = None,
    ) -> tuple[float, bool, list[float]]:
        """Clip and update.

        Args:
            rates: learning rates; None where the rule has its own.
            scale: what the gradients are multiplied by (loss scaling).
            publish: called with each bucket after its update, in the order of the forward pass.
            veto: anything but 0 forbids the update; the same on all ranks.
            further: numbers on the device, ``[any]``.

        Returns:
            the norm before clipping; whether an update was made: a norm that is not finite, or a veto, leaves
            everything unchanged; and the further numbers. They are read together: the host waits once, and
            where the rule ``widens`` after it has asked for the update.
        """
        norm = self.gradient_norm().to(torch.float64) / scale
        forbidden = None if veto is None else veto.wait()
        factor = self._factor(norm, forbidden, scale)
        read = self.reading([norm, factor, *([] if further is None else [further])])
        streams.of(self._norm.device).join(streams.SAVING)
        if self.rule.widens:
            self.rule.update(self._on_master(), rates, factor, publish)
        total_norm, known, *others = read()
        if math.isnan(known):
            return total_norm, False, others
        if not self.rule.widens:
            self.rule.update(self._on_master(), rates, known, publish)
        self.rule.made()
        return total_norm, True, others

    def _factor(self, norm: Tensor, veto: Tensor | None, scale: float) -> Tensor:
        """The factor of gradients with this norm: a float64 scalar on the device. NaN if nothing may
        change."""
        factor = torch.full_like(norm, 1 / scale)
        if self.clip:
            bound = norm + self.clip_epsilon
            # Not clip / bound: torch multiplies by a reciprocal, which rounds twice.
            factor = torch.where(bound > self.clip, torch.full_like(bound, self.clip) / bound / scale, factor)
        allowed = norm.isfinite()
        if veto is not None:
            allowed &= (veto == 0).view(())
        return torch.where(allowed, factor, math.nan)

    def reading(self, parts: Sequence[Tensor]) -> Callable[[], list[float]]:
        """Start to read numbers of the device, ``[any]`` or scalars; returns how the host gets them."""
        numbers = torch.cat([part.to(torch.float64).view(-1) for part in parts])
        queue = streams.of(self._norm.device)
        if not queue.apart:
            return numbers.tolist
        if len(numbers) not in self._numbers:
            self._numbers[len(numbers)] = queue.pinned(torch.empty_like(numbers, device="cpu"))
        copy = self._numbers[len(numbers)].copy_(numbers, non_blocking=True)
        wait = queue.mark()

        def read() -> list[float]:
            wait()
            return copy.tolist()

        return read

    def _on_master(self) -> Iterator[Tensor]:
        """Every bucket's gradient in the master's format, where the master is.

        From a GPU to the host all copies are started at once, and each is waited for when its turn comes:
        the host updates one bucket while the next are on their way.
        """
        queue = streams.of(self._norm.device)
        if self.rule.widens:
            yield from (bucket.gradient for bucket in self.buckets)
            return
        # Without a copy where nothing changes; in another format one by one.
        gradients = (bucket.gradient.to(self._wide) for bucket in self.buckets)
        if not (queue.apart and any(bucket.offloaded for bucket in self.buckets)):
            yield from gradients
            return
        if not self._arriving:
            self._arriving = [queue.pinned(torch.empty_like(bucket.master)) for bucket in self.buckets]
        arriving: list[tuple[Tensor, Callable[[], object]]] = []
        for gradient, copy in zip(gradients, self._arriving):
            copy.copy_(gradient, non_blocking=True)
            arriving.append((copy, queue.mark()))
        for copy, wait in arriving:
            wait()
            yield copy


class AdamW(Rule):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) in PyTorch's fused kernel. It is called directly:
    ``torch.optim`` imports the compiler, which takes longer than torch. Compiled, it is one pass of our own
    that reads gradients in any format, writes none, and writes the copy in the model's format too; see
    :func:`~.schedule.update_bytes`.

    Buckets whose traits say so get weight decay; with ``decoupled_lr`` weights of the vocabulary have a rate
    of their own. ``device`` is that of the update where there is no bucket; ``compiled`` as in
    :mod:`hexad.parallel.pointwise`, where the state is on the device.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        settings: OptimizerSettings,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self.buckets, self.settings = buckets, settings
        self.widens = compiled and not any(bucket.offloaded for bucket in buckets)
        self._moments = [[torch.zeros_like(bucket.master) for _ in MOMENTS] for bucket in buckets]
        self._runs = [_runs(bucket, settings.decoupled_lr is not None) for bucket in buckets]
        self._device = buckets[0].master.device if buckets else device
        self._updates = 0  # made so far

    def update(
        self,
        gradients: Iterator[Tensor],
        rates: LearningRates | None,
        factor: float | Tensor,
        publish: Publish,
    ) -> None:
        """Bucket by bucket, so that a bucket can be gathered while the next is updated."""
        assert rates is not None, "AdamW has no learning rate of its own"
        if isinstance(factor, Tensor):
            self._update_compiled(gradients, rates, factor, publish)
        else:
            self._update_fused(gradients, rates, factor, publish)

    def made(self) -> None:
        self._updates += 1

    def _update_compiled(
        self, gradients: Iterator[Tensor], rates: LearningRates, factor: Tensor, publish: Publish
    ) -> None:
        update = maybe_compiled(_adamw_, True)
        constants: dict[tuple[float, float], Tensor] = {}
        for bucket, moments, runs, gradient in zip(self.buckets, self._moments, self._runs, gradients):
            copy = bucket.written_too()
            for run, decoupled in runs:
                tensors = (bucket.master, gradient, *moments)
                key = rates.decoupled if decoupled else rates.lr, self._decay(bucket)
                if key not in constants:
                    constants[key] = self._constants(*key, factor)
                part = None if copy is None else copy[run]
                betas, eps = tuple(self.settings.betas), self.settings.eps
                update(*(tensor[run] for tensor in tensors), part, constants[key], betas, eps)
            publish(bucket)

    def _decay(self, bucket: Bucket) -> float:
        return self.settings.weight_decay if bucket.traits.decay else 0.0

    def _constants(self, lr: float, decay: float, factor: Tensor) -> Tensor:
        """``[4]`` in the master's format, on the device: what gradients are multiplied by, what weights are,
        the step's length, the root of the correction of the second moment."""
        first, second = (1 - beta ** (self._updates + 1) for beta in self.settings.betas)
        numbers = torch.tensor((1 - lr * decay, lr / first, math.sqrt(second)), dtype=torch.float64)
        moved = streams.of(self._device).moved(numbers, self._device)
        return torch.cat([factor.view(1), moved]).to(self.buckets[0].master.dtype)

    def _update_fused(
        self, gradients: Iterator[Tensor], rates: LearningRates, factor: float, publish: Publish
    ) -> None:
        divisor = self._divisor(factor)
        updates = torch.full((), float(self._updates + 1), dtype=torch.float32, device=self._device)
        beta1, beta2 = self.settings.betas
        for bucket, (first, second), runs, gradient in zip(
            self.buckets, self._moments, self._runs, gradients
        ):
            if factor != 1 and divisor is None:
                gradient.mul_(factor)
            for run, decoupled in runs:
                torch._fused_adamw_(
                    [bucket.master[run]],
                    [gradient[run]],
                    [first[run]],
                    [second[run]],
                    [],
                    [updates],
                    lr=rates.decoupled if decoupled else rates.lr,
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=self._decay(bucket),
                    eps=self.settings.eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=divisor,
                )
            publish(bucket)

    def _divisor(self, factor: float) -> Tensor | None:
        """The divisor that AdamW's kernel applies to gradients as it reads them (``GradScaler``'s way): a
        float32. None where that is too narrow, and for a factor of 1: the kernel writes the quotients
        back."""
        if factor == 1 or any(bucket.master.dtype == torch.float64 for bucket in self.buckets[:1]):
            return None
        return torch.full((), 1 / factor, dtype=torch.float32, device=self._device)

    def restored(self, updates: int, numbers: Mapping[str, Any]) -> None:
        self._updates = updates

    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        for name, values in zip(MOMENTS, self._moments[self.buckets.index(bucket)]):
            yield f"optimizer.{name}", values


def _adamw_(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    constants: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Overwrite a run of master values ``[elements]``, their moments, and their ``copy`` in another format;
    ``constants``: see :meth:`AdamW._constants`. A factor that is NaN changes nothing."""
    factor, kept, length, root = constants.unbind()
    valid = ~factor.isnan()
    gradient = gradient.to(master.dtype) * factor
    new_first = first.lerp(gradient, 1 - betas[0])
    # One interpolation: ``b v + (1 - b) g^2`` contracts to other fused multiply-adds in other configurations.
    new_second = second.lerp(gradient * gradient, 1 - betas[1])
    new_master = master * kept - length * new_first / (new_second.sqrt() / root + eps)
    for values, new in ((first, new_first), (second, new_second), (master, new_master)):
        values.copy_(torch.where(valid, new, values))
    if copy is not None:
        copy.copy_(master)


def _runs(bucket: Bucket, decoupled: bool) -> list[tuple[slice, bool]]:
    """This rank's shard of a bucket in runs of one learning rate, and whether that is the vocabulary's; one
    run unless it is ``decoupled``."""
    size, at = bucket.high - bucket.low, 0
    runs: list[tuple[slice, bool]] = []
    for offset, member in zip(bucket.plan.offsets, bucket.members if decoupled else ()):
        if member.declaration.weights[0].vocabulary:
            ends = offset - bucket.low, offset + member.parameter.numel() - bucket.low
            low, high = (min(max(end, 0), size) for end in ends)
            runs += [(slice(at, low), False), (slice(low, high), True)]
            at = high
    return [run for run in (*runs, (slice(at, size), False)) if run[0].stop > run[0].start]
