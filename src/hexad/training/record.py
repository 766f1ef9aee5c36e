"""The records of each step: metrics.jsonl, TensorBoard, Weights & Biases, the progress line."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hexad.config import Config, HexadError, json_text

Metrics = dict[str, Any]
log = logging.getLogger("hexad")


class Sink(Protocol):
    """Takes the metrics of logged steps, on one rank."""

    def write(self, metrics: Metrics) -> None:
        """Record one step."""
        ...

    def rewind(self, last_step: int) -> None:
        """Remove steps after ``last_step``, which will be repeated, if the sink can."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


EXPERT_LAYERS = "expert_layers"
"""The metric that has a file of its own: loads of every expert, which may be many numbers."""


class StepsFile:
    """One JSON object per logged step: ``metrics.jsonl``, or ``experts.jsonl``.

    Lines of steps after ``last_step`` (of a run that died, about to be repeated) are removed. Lines that
    cannot be written, as on a full disk, wait in memory for the next step, so that training continues.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._file = path.open("a+b", buffering=0)
        self.rewind(last_step)

    def write(self, metrics: Metrics) -> None:
        self._waiting.append(json_text(metrics).encode() + b"\n")
        self._flush()

    def _flush(self) -> None:
        content = b"".join(self._waiting)
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            if len(self._waiting) == 1:
                text = "%s: cannot be written: %s; training continues; the lines are written once they can be"
                log.warning(text, self._path, error.strerror)
        else:
            self._waiting.clear()

    def rewind(self, last_step: int) -> None:
        self._waiting = [line for line in self._waiting if _step(line) <= last_step]
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        while lines and _step(lines[-1]) > last_step:
            lines.pop()
        self._file.truncate(sum(map(len, lines)))  # needs no space, unlike another file

    def close(self) -> None:
        self._flush()
        if self._waiting:
            log.warning("%s: the last %d steps are missing", self._path, len(self._waiting))
        self._file.close()


def _step(line: bytes) -> float:
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")  # truncated by a kill


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = str(path)
        self._writer = SummaryWriter(self._directory)

    def write(self, metrics: Metrics) -> None:
        for name, value in flat(metrics).items():
            self._writer.add_scalar(name, value, metrics["step"])

    def rewind(self, last_step: int) -> None:
        self._writer.close()
        self._writer = type(self._writer)(self._directory, purge_step=last_step + 1)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Metrics for Weights & Biases."""

    def __init__(self, project: str, config: Config) -> None:
        import wandb

        self._run = wandb.init(
            project=project, dir=config.run.dir, config=config.model_dump(mode="json", by_alias=True)
        )

    def write(self, metrics: Metrics) -> None:
        self._run.log(flat(metrics), step=metrics["step"])

    def rewind(self, last_step: int) -> None:
        """No-op: steps of Weights & Biases only increase, so that the first values stay."""

    def close(self) -> None:
        self._run.finish()


def flat(metrics: Metrics) -> dict[str, float]:
    """Numbers only, nested names joined by a slash."""
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            result |= {f"{name}/{inner}": float(number) for inner, number in value.items()}
        elif isinstance(value, int | float) and name != "step":
            result[name] = float(value)
    return result


class ProgressLine:
    """A live line on a terminal; elsewhere a plain line every few seconds."""

    _PLAIN_SECONDS = 10.0

    def __init__(self, steps: int, done: int) -> None:
        self._console = Console(stderr=True)
        self._steps = steps
        self._last = 0.0
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file or a pipe belongs there
        )
        self._task = self._progress.add_task("", total=steps, completed=done, text="")
        self._progress.start()

    def write(self, metrics: Metrics) -> None:
        text = f"loss {metrics['loss']:.4f}  {metrics['tokens_per_second']:,.0f} tokens/s"
        if metrics.get("validation_loss") is not None:
            text += f"  validation {metrics['validation_loss']:.4f}"
        self._progress.update(self._task, completed=metrics["step"], text=text)
        now = time.monotonic()
        last = metrics["step"] == self._steps
        if not self._console.is_terminal and (last or now - self._last > self._PLAIN_SECONDS):
            self._last = now
            left = timedelta(seconds=round((self._steps - metrics["step"]) * metrics["step_seconds"]))
            print(
                f"step {metrics['step']}/{self._steps}  {text}  {left} left",
                file=sys.stderr,
                flush=True,
            )

    def rewind(self, last_step: int) -> None:
        self._progress.update(self._task, completed=last_step)

    def close(self) -> None:
        self._progress.stop()


class MetricsRecorder:
    """All sinks of a run, on the rank that writes. Used as a context manager."""

    def __init__(self, config: Config, last_step: int) -> None:
        directory = Path(config.run.dir)
        try:
            self._sinks: list[Sink] = [StepsFile(directory / "metrics.jsonl", last_step)]
            self._experts: StepsFile | None = None
            if config.model.moe is not None:
                self._experts = StepsFile(directory / "experts.jsonl", last_step)
        except OSError as error:
            raise HexadError(f"run.dir: {error.filename}: cannot be written: {error.strerror}") from None
        if config.log.tensorboard:
            self._sinks.append(TensorBoard(directory / "tensorboard"))
        if config.log.wandb is not None:
            self._sinks.append(WeightsAndBiases(config.log.wandb, config))
        self._sinks.append(ProgressLine(config.run.steps, last_step))

    def write(self, metrics: Metrics) -> None:
        """Write one step's metrics to every sink."""
        metrics = dict(metrics)
        layers = metrics.pop(EXPERT_LAYERS, None)
        for sink in self._sinks:
            sink.write(metrics)
        if self._experts is not None and layers is not None:
            self._experts.write({"step": metrics["step"], "layers": layers})

    def rewind(self, last_step: int) -> None:
        """Remove steps after ``last_step`` in every sink that can."""
        for sink in (*self._sinks, *([self._experts] if self._experts else [])):
            sink.rewind(last_step)

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in (*([self._experts] if self._experts else []), *reversed(self._sinks)):
            sink.close()
