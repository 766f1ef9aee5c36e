"""``deepspeed.utils.timer``: times by name."""

import time
from collections.abc import Sequence
from typing import Any

from hexad.config import HexadError

from .accelerator import get_accelerator
from .utils import ThroughputTimer, log_dist

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]

_GIB = 2**30


class _Timer:
    """A timer: the milliseconds of the intervals between :meth:`start` and :meth:`stop`."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._began, self._intervals = 0.0, list[float]()

    def start(self) -> None:
        """Begin an interval, when the device has done what it was asked for."""
        if self.started_:
            raise HexadError(f"timer {self.name_}: found it started already; stop it first")
        get_accelerator().synchronize()
        self._began, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the interval; the arguments are accepted without effect."""
        if not self.started_:
            raise HexadError(f"timer {self.name_}: found it stopped; start it first")
        get_accelerator().synchronize()
        self._intervals.append((time.perf_counter() - self._began) * 1000)
        self.started_ = False

    def reset(self) -> None:
        """Forget all intervals."""
        self.started_ = False
        self._intervals.clear()

    def elapsed(self, reset: bool = True) -> float:
        """The sum of all intervals; one that has begun continues."""
        running = self.started_
        if running:
            self.stop()
        total = sum(self._intervals)
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        """The mean of the intervals, without a tenth of them at each end."""
        self.elapsed(reset=False)
        cut = int(len(self._intervals) * 0.1)
        kept = sorted(self._intervals)[cut : len(self._intervals) - cut]
        return sum(kept) / len(kept) if kept else 0.0


class SynchronizedWallClockTimer:
    """Timers by name: ``timers("forward").start()``."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, Any] = {}

    def get_timers(self) -> dict[str, Any]:
        """The timers by their names."""
        return self.timers

    def __call__(self, name: str) -> Any:
        """The timer of a name."""
        return self.timers.setdefault(name, self.Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """The device's memory, in words."""
        names = ("memory_allocated", "max_memory_allocated", "memory_cached", "max_memory_cached")
        figures = (f"{name}: {getattr(get_accelerator(), name)() / _GIB:.4f} GB" for name in names)
        return " | " + " | ".join(figures)

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of some timers, divided by ``normalizer``."""
        known = [name for name in names if name in self.timers]
        times = [f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known]
        log_dist(" | ".join(["time (ms)", *times]), ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The mean of some timers, in microseconds, divided by ``normalizer``."""
        known = [name for name in names if name in self.timers]
        return {name: self.timers[name].mean() * 1000.0 / normalizer for name in known}


class _NoTimer:
    """A timer that measures nothing."""

    def start(self) -> None:
        """No effect."""

    stop = reset = start

    def elapsed(self, **_: Any) -> float:
        """Zero."""
        return 0.0

    def mean(self) -> float:
        """Zero."""
        return 0.0


class NoopTimer(SynchronizedWallClockTimer):
    """Timers that measure nothing."""

    Timer = _NoTimer  # type: ignore[assignment]

    def __call__(self, name: str) -> Any:
        """A timer."""
        return _NoTimer()
