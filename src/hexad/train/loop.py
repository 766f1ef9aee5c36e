"""A training run: data, steps, metrics, evaluation, checkpoints, resuming, graceful stops."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.directory import changed_settings, write_durably
from hexad.checkpoint.hugging_face import opened_model
from hexad.checkpoint.manifest import DamagedCheckpoint, Manifest
from hexad.comm import CommError, merged
from hexad.config import AgreedError, Config, ConfigError, HexadError, blaming, dump_config
from hexad.dataset.loader import DataLoader, loader_from_config
from hexad.dataset.sidecar import fingerprint
from hexad.dataset.tokenizer import load_tokenizer
from hexad.model.counts import flops_per_token, parameter_count
from hexad.model.sources import hugging_face_directory
from hexad.model.transformer import DTYPES
from hexad.parallel.pipeline.simulate import TIMELINE
from hexad.resolve import working_layout
from hexad.topology.cluster import peak_flops
from hexad.topology.mesh import Mesh

from .deterministic import naming_operators
from .engine import Engine
from .environment import environment
from .faults import StepResult
from .idle import wait_idle
from .launch import Run, launch
from .pace import Pace, collected_by_step
from .profile import StepProfile
from .record import Metrics, Recorder
from .rundir import open_run_directory
from .stop import SAVE_FAILED, StopRequest
from .timeline import timeline_text

log = logging.getLogger("hexad")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last step, and the signal that ended it early, if any."""

    step: int
    stopped_by: str | None


def train(config: Config) -> Outcome:
    """Train as configured, in the world this process belongs to.

    Raises:
        HexadError: anything the user can fix; the same on every rank.
    """
    here = environment()
    members = working_layout(config, here.world).world
    if here.rank >= members:
        wait_idle(config, here, members)
        return Outcome(0, None)
    with launch(config) as run, ExitStack() as stack:
        open_run_directory(config.run, run, stack)
        if members < here.world:
            log.info(
                "%d of %d ranks train, %d idle (faults.idle_ranks)",
                members,
                here.world,
                here.world - members,
            )
        # Each host counts its own restarts: one that rejoined has made none.
        restart = merged(here.restart, run.mesh.world, max)
        if restart and config.checkpoint.resume == "never":  # that was meant for the first start
            run = run.resuming()
        trainer = Trainer(run)
        stack.push(trainer.leave)
        if restart:
            log.info("restart %d of %d: resuming after step %d", restart, here.restarts, trainer.engine.step)
        return trainer.run_steps()


class Trainer:
    """The state of a run on one rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.mesh = mesh = run.mesh
        self.config = config = run.resolved.config
        self.first = mesh.rank == 0
        # What can fail on one rank alone (files) runs under agreed, without collectives inside.
        self.loader, self.validation = run.agreed(lambda: _open_data(config, mesh))
        run.identical("data", [fingerprint(prefix) for prefix in _prefixes(config)])
        self.engine = Engine(run.resolved, mesh, initialise=False)
        self.checkpointer = Checkpointer(config, mesh)
        # Per token, without attention and with that of complete sequences; linear in between.
        self.flops = [flops_per_token(config.model, config.data.sequence, part) for part in (0.0, 1.0)]
        self.peak = peak_flops(mesh.device, DTYPES[config.precision.dtype])
        self._resume(run)
        run.agreed(self._prepare_data)
        self.pace = Pace(mesh)
        self.engine.after_passes = self.pace.computed
        directory = Path(config.run.dir)
        self.profile = StepProfile(config.log.profile, directory, mesh.rank, mesh.device, run.agreed)
        self._recovery: str | None = None
        run.agreed(lambda: self._write("config.yaml", dump_config(self.config)))

    def _prepare_data(self) -> None:
        """Have the indexes of large data before the first step."""
        self.loader.prepare(self.engine.samples)
        if self.validation is not None:
            self.validation.prepare(0)

    def _write(self, name: str, text: str) -> None:
        """Write a file of ``run.dir``, on the first rank only."""
        if not self.first:
            return
        path = Path(self.config.run.dir) / name
        try:
            write_durably(path, text)
        except OSError as error:
            raise ConfigError("run.dir", f"cannot write {path}: {error.strerror}") from None

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop reading ahead and finish the save in progress, unless peers it needs are lost."""
        self.loader.close()
        if self.validation is not None:
            self.validation.close()
        if isinstance(error, CommError):
            return
        try:
            self.checkpointer.close()
            if error is None or isinstance(error, AgreedError):
                self.pace.close()  # all ranks do
        except HexadError as failed:
            if error is None:
                raise
            log.warning("%s", failed)  # what ends the run is another error

    def run_steps(self) -> Outcome:
        """Train up to ``run.steps``, or until a stop signal."""
        config, engine = self.config, self.engine
        # Agreed, because a package may be missing on the one rank that writes.
        recorder = self.run.agreed(lambda: Recorder(config, engine.step) if self.first else nullcontext())
        if config.lr_schedule.warmup >= config.run.steps:
            log.info(
                "lr_schedule.warmup %d is not over by run.steps %d",
                config.lr_schedule.warmup,
                config.run.steps,
            )
        profiled = config.log.profile.start if config.log.profile else 0
        for name, step in (("timeline", config.log.timeline), ("profile.start", profiled)):
            if step > config.run.steps:
                log.info("log.%s %d is after run.steps %d", name, step, config.run.steps)
        if engine.step >= config.run.steps:
            log.info("nothing to do: run.steps is %d; set a larger number to continue", config.run.steps)
        with recorder as sink, StopRequest(self.mesh) as stop, collected_by_step() as collect:
            while engine.step < config.run.steps:
                collect(engine.step)
                asking = stop.ask(self.checkpointer.failed())
                result, metrics = self._step()
                action = self._action(result, metrics)
                if action == "roll_back":
                    self._roll_back(metrics)
                    if sink is not None:
                        sink.rewind(engine.step)
                else:
                    self._validate(metrics)
                    if sink is not None and self._log_due(metrics):
                        sink.write(metrics)
                if action == "stop":
                    raise AgreedError(self._advice(result, metrics))
                every = config.log.check_replicas
                if every and engine.step % every == 0:
                    engine.check_replicas()
                signal = stop.answer(asking)
                if signal == SAVE_FAILED:
                    self.checkpointer.wait()
                    signal = None  # one that arrived meanwhile is handled after the next step
                if action != "roll_back" and self._save_due(engine.step, signal):
                    reason = "signal" if signal else "schedule"
                    last = bool(signal) or engine.step == config.run.steps
                    self.checkpointer.save(engine.chunks(), engine.progress(), reason, last)
                if signal:
                    self.profile.finish()
                    self.checkpointer.wait()
                    log.info("%s: saved step %d and stopped; the same command resumes", signal, engine.step)
                    return Outcome(engine.step, signal)
            self.profile.finish()
            self.checkpointer.wait()  # a signal must not cut the last save short
        return Outcome(engine.step, None)

    def _action(self, result: StepResult, metrics: Metrics) -> str | None:
        """The reaction to a faulty step (``stop``, ``skip``, ``roll_back``), recorded in its metrics;
        None for other steps."""
        guard = self.engine.guard
        if self._recovery is not None:
            metrics["fault"], self._recovery = self._recovery, None
        if result.fault is None:
            return None
        action = guard.action(result.fault)
        what = guard.describe(result.step, result.loss, result.fault, result.limit)
        if action != "stop" and guard.exhausted:
            what += f"; faults.most {guard.settings.most} consecutive faults came before it"
            action = "stop"
        metrics["fault"] = f"{metrics['fault']}; {what}" if "fault" in metrics else what
        if action == "skip":
            log.warning("%s: its update was skipped", what)
        return action

    def _advice(self, result: StepResult, metrics: Metrics) -> str:
        """Why a run cannot continue after a faulty step."""
        what = str(metrics["fault"])
        if self.engine.scaler.active and result.fault == "not_finite":
            what += f" at loss scale {result.loss_scale:g}, which cannot be lowered (precision.loss_scale)"
        return f"{what}; lower optimizer.lr, or resume from an earlier checkpoint with other data"

    def _roll_back(self, metrics: Metrics) -> None:
        """Load the newest checkpoint, and skip the data that has been read since it was saved.

        A run that is killed before its next checkpoint repeats the same fault and roll back.

        Raises:
            AgreedError: there is no checkpoint to roll back to.
        """
        engine, samples = self.engine, self.engine.samples
        self.checkpointer.wait()
        found = self._load_newest(self.checkpointer.newest)
        if found is None:
            raise AgreedError(f"{metrics['fault']}; no checkpoint to roll back to yet (checkpoint.every)")
        _, manifest = found
        engine.rolled_back(manifest.progress, samples)
        self._recovery = (
            f"{metrics['fault']}: rolled back to step {engine.step}, skipping samples {manifest.samples} "
            f"to {samples - 1}"
        )
        log.warning(self._recovery)

    def _log_due(self, metrics: Metrics) -> bool:
        due = metrics["step"] % self.config.log.every == 0 or metrics["step"] == self.config.run.steps
        return due or metrics["skipped"] or "fault" in metrics or "validation_loss" in metrics

    def _save_due(self, step: int, signal: str | None) -> bool:
        every = self.config.checkpoint.every
        return bool(signal) or step == self.config.run.steps or (every > 0 and step % every == 0)

    def _step(self) -> tuple[StepResult, Metrics]:
        """One step and its metrics."""
        before = self.mesh.sent_bytes()
        record = self.engine.step + 1 == self.config.log.timeline
        with self.profile.step(self.engine.step + 1), naming_operators():
            begin = time.perf_counter()
            self.pace.begin()
            result = self.engine.train_step(self.loader.step(self.engine.samples), record)
            seconds = time.perf_counter() - begin
            slowest = self.pace.slowest()  # of the step before, which is known by now
            self.pace.end()
        sent = self.mesh.sent_bytes()
        if record:
            text = timeline_text(self.engine)
            self.run.agreed(lambda: self._write(TIMELINE, text))
        metrics = self._metrics(result, seconds, {name: sent[name] - before[name] for name in sent})
        return result, {**metrics, "slowest": slowest}

    def _metrics(self, result: StepResult, seconds: float, sent: dict[str, int]) -> Metrics:
        batch, sequence = self.config.batch.global_, self.config.data.sequence
        rate = batch * sequence / seconds
        # MFU: training FLOPs per token x tokens/s / (peak FLOP/s of all ranks); see model/counts.py.
        mfu = None
        if self.peak is not None:
            none, complete = self.flops
            flops = none + (complete - none) * result.pairs / (batch * sequence**2)
            mfu = flops * rate / (self.peak * self.mesh.layout.world)
        return {
            "step": result.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "samples": self.engine.samples,
            "tokens": self.engine.samples * sequence,
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "mfu": mfu,
            "peak_memory_bytes": _peak_memory(self.mesh.device),
            "comm_bytes": sent,
            "skipped": result.skipped,
            **({"loss_scale": result.loss_scale} if self.engine.scaler.active else {}),
        }

    def _validate(self, metrics: Metrics) -> None:
        """Add ``validation_loss`` to the metrics of a step after which evaluation is due."""
        every, batches = self.config.validate_.every, self.config.validate_.batches
        if self.validation is None or self.engine.step % every:
            return
        loss_sum, targets = 0.0, 0
        for index in range(batches):
            batch = self.validation.step(index * self.config.batch.global_)
            batch_sum, batch_targets = self.engine.evaluate(batch)
            loss_sum, targets = loss_sum + batch_sum, targets + batch_targets
        metrics["validation_loss"] = loss_sum / max(targets, 1)

    def _load_newest(self, find: Callable[[], Path | None]) -> tuple[Path, Manifest] | None:
        """Load the checkpoint that ``find`` finds, renaming damaged ones if the settings allow it; None if
        there is none."""
        path = find()
        if path is None:
            return None
        try:
            return path, self.checkpointer.load(path, self.engine.chunks())
        except AgreedError as error:
            if not issubclass(error.kind, DamagedCheckpoint):
                raise
            self.checkpointer.set_aside(path, error)
        return self._load_newest(find)

    def _resume(self, run: Run) -> None:
        found = self._load_newest(self.checkpointer.find)
        if found is None:
            parameters = parameter_count(self.config.model)
            load = self.config.model.load
            if load is None:
                self.engine.initialise()
            else:
                self._load_weights(run)
            with_weights = f" with the weights of {load}" if load is not None else ""
            log.info("starting a new run%s: %s parameters", with_weights, f"{parameters:,}")
            return
        path, manifest = found
        self.engine.restored(manifest.progress)
        log.info("resuming from %s: step %d, %d samples", path, manifest.step, manifest.samples)
        for change in changed_settings(manifest.config, self.config):
            log.info("changed since: %s", change)

    def _load_weights(self, run: Run) -> None:
        """Load the weights that ``model.load`` names."""
        model = self.config.model
        directory = hugging_face_directory(str(model.load))
        with ExitStack() as stack, blaming("model.load"):
            if directory is None:
                self.checkpointer.load(self.checkpointer.source(), self.engine.weights())
                self.engine.publish()
                return
            source, identity = run.agreed(lambda: stack.enter_context(opened_model(directory, model)))
            run.identical("what model.load names", identity)
            self.engine.load_weights(source)


def _prefixes(config: Config) -> list[str]:
    """The training data's prefixes."""
    data = config.data.train
    return [data] if isinstance(data, str) else [prefix for _, prefix in data or []]


def _open_data(config: Config, mesh: Mesh) -> tuple[DataLoader, DataLoader | None]:
    """The loaders for training and validation."""
    with blaming("data.tokenizer"):
        tokenizer = load_tokenizer(config.data.tokenizer)
    if int(config.model.vocab) < tokenizer.vocab_size:
        raise ConfigError(
            "model.vocab",
            f"found {config.model.vocab}, less than the tokenizer's {tokenizer.vocab_size} "
            f"({config.data.tokenizer}); use auto or a larger number",
        )
    place = (mesh.data.rank, mesh.data.size)
    training = loader_from_config(config, *place, tokenizer)
    if not config.validate_.every:
        return training, None
    return training, loader_from_config(config, *place, tokenizer, "validation")


def _peak_memory(device: torch.device) -> int:
    """Largest memory this rank has used so far, in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
