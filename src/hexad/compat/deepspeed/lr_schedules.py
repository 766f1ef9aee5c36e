"""DeepSpeed's learning-rate schedules, which set the rate of every group of an optimizer. No torch.

A schedule is at iteration -1 before its first step, so that the first update has the rate that is set when
the schedule is created, and the second one that of iteration 0.
"""

import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger("hexad")


class LRSchedule(ABC):
    """The base class of all schedules.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or what wraps one as ``optimizer.optimizer``.
        last_batch_iteration: number of the last iteration; -1 before the first one, which sets
            the first rate.

    Raises:
        TypeError: it is no optimizer.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = _torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rate of every group at ``last_batch_iteration``."""

    def get_last_lr(self) -> list[float]:
        """The rate of every group that was set last."""
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next iteration, or of the one named."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """The number of the last iteration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates):
            if hasattr(group["lr"], "fill_"):  # a tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _per_group(self, value: Any, name: str) -> list[Any]:
        """A value for every group: one for all, or a list of them."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * groups
        if len(value) != groups:
            raise ValueError(f"expected {groups} values for {name}, got {len(value)}")
        return list(value)


def _torch_optimizer(optimizer: Any) -> Any:
    torch = sys.modules.get("torch")  # not imported here: launch lines are translated without it
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if torch is not None and isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer")


class _WarmupSchedule(LRSchedule):
    """A schedule that begins with warm-up."""

    total_num_steps: float = math.inf

    def _set_warmup(self, steps: int, kind: str) -> None:
        """Set the number of steps and the kind of warm-up."""
        if not isinstance(steps, int) or steps <= 0:
            raise ValueError(f"warmup_num_steps must be a positive integer, got {steps}")
        if kind not in ("log", "linear"):
            log.warning("scheduler.params.warmup_type: found %r, expected log or linear; log is used", kind)
            kind = "log"
        self.warmup_num_steps, self.warmup_type = max(2, steps), kind
        if self.total_num_steps < self.warmup_num_steps:
            text = "scheduler.params.total_num_steps %d is less than warmup_num_steps %d"
            log.warning(text, self.total_num_steps, self.warmup_num_steps)

    def _part(self, iteration: int) -> float:
        """The position between the smallest and the largest rate, from 0 to 1."""
        if iteration >= self.warmup_num_steps:
            return self._after(iteration)
        if self.warmup_type == "log":
            return math.log(iteration + 1) / math.log(self.warmup_num_steps)
        return iteration / self.warmup_num_steps

    def _after(self, iteration: int) -> float:
        """The position after warm-up."""
        return 1.0


class WarmupLR(_WarmupSchedule):
    """Warm-up from ``warmup_min_lr`` to ``warmup_max_lr`` over ``warmup_num_steps`` iterations, logarithmic
    (``warmup_type: log``) or ``linear``, then constant."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self._set_warmup(warmup_num_steps, warmup_type)
        if last_batch_iteration == -1:
            self._set(self.min_lrs)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        part = self._part(self.last_batch_iteration)
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs)]


class WarmupDecayLR(WarmupLR):
    """Warm-up as in :class:`WarmupLR`, then linear decay to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _after(self, iteration: int) -> float:
        left = (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, left)


class WarmupCosineLR(_WarmupSchedule):
    """Warm-up of a factor of the groups' own rates from ``warmup_min_ratio`` to 1, then cosine decay
    (Loshchilov & Hutter, arXiv 1608.03983) to ``cos_min_ratio`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps, self.cos_min_ratio = total_num_steps, cos_min_ratio
        self.warmup_min_ratio = warmup_min_ratio
        self._set_warmup(warmup_num_steps, warmup_type)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr_ratio(self) -> float:
        """The factor at ``last_batch_iteration``."""
        iteration, low = self.last_batch_iteration, self.warmup_min_ratio
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            return low + (1.0 - low) * self._part(iteration)
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * self._part(iteration))

    def _after(self, iteration: int) -> float:
        warmup = self.warmup_num_steps
        done = min(1.0, (iteration - warmup + 1) / max(1, self.total_num_steps - warmup))
        return (1 + math.cos(math.pi * done)) / 2

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class LRRangeTest(LRSchedule):
    """Rates that rise from ``lr_range_test_min_lr`` (Smith, arXiv 1803.09820)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        size = lr_range_test_step_size
        if not isinstance(size, int) or size <= 0:
            raise ValueError(f"lr_range_test_step_size must be a positive integer, got {size}")
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * factor for rate in self.min_lr]


class OneCycle(LRSchedule):
    """One rise and fall of the rate, inversely of the first beta, then decay (Smith, arXiv 1803.09820)."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first, second = float(cycle_first_step_size), cycle_second_step_size
        self.first_step_size, self.second_step_size = first, first if second is None else float(second)
        if self.first_step_size <= 0 or self.second_step_size < 0:
            raise ValueError(
                "cycle_first_step_size must be positive and cycle_second_step_size non-negative, got "
                f"{cycle_first_step_size} and {cycle_second_step_size}"
            )
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        stairs = cycle_second_stair_count
        self.stairs = cycle_first_stair_count, cycle_first_stair_count if stairs is None else stairs
        self.decay_step_size = decay_step_size
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            name = type(self.optimizer).__name__
            log.warning("scheduler.params.cycle_momentum: %s has no betas; its momentum stays", name)
        if self.cycle_momentum:
            self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
            self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
            if last_batch_iteration == -1:
                self._set_moms(self.min_moms)

    def get_lr(self) -> list[float]:
        after = self._after()
        if after is None:
            part = self._part()
            return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs)]
        return [low / (1 + self.decay_lr_rate * after) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of every group; None where they stay."""
        if not self.cycle_momentum:
            return None
        after = self._after()
        if after is None:
            part = self._part()
            firsts = [high - (high - low) * part for low, high in zip(self.min_moms, self.max_moms)]
        else:
            firsts = [high * (1 + self.decay_mom_rate * after) for high in self.max_moms]
        return [(first, 0.99) for first in firsts]

    def step(self, batch_iteration: int | None = None) -> None:
        """Set the rates and betas of the next iteration, or of the one named."""
        super().step(batch_iteration)
        moms = self.get_mom()
        if moms is not None:
            self._set_moms([first for first, _ in moms])

    def _set_moms(self, firsts: Sequence[float]) -> None:
        for group, first in zip(self.optimizer.param_groups, firsts):
            group["betas"] = (first, 0.99)

    def _after(self) -> float | None:
        """The number of decay intervals since the cycle; None within it."""
        if self.last_batch_iteration < self.total_size:
            return None
        if not self.decay_step_size:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def _part(self) -> float:
        """The position between the smallest and the largest rate, from 0 to 1."""
        iteration = (self.last_batch_iteration + 1) % self.total_size
        if iteration <= self.first_step_size:
            place, size, stairs = iteration, self.first_step_size, self.stairs[0]
        else:
            place, size, stairs = self.total_size - iteration, self.second_step_size, self.stairs[1]
        return math.floor(place * stairs / size) / stairs if stairs else place / size


SCHEDULES: dict[str, type[LRSchedule]] = {
    schedule.__name__: schedule
    for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""DeepSpeed's schedules, by the name in ``scheduler.type``; any other name is one of torch's."""

VALID_LR_SCHEDULES = list(SCHEDULES)
"""The names of DeepSpeed's schedules."""
