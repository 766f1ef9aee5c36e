"""A training run: data, steps, metrics, evaluation, checkpoints, resuming, graceful stops."""

import logging
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import torch

from hexad.checkpoint.kept_tokenizer import training_templates
from hexad.comm import CommError, merged, streams
from hexad.config import AgreedError, Config, ConfigError, HexadError, blaming
from hexad.config.schema import prefixes
from hexad.dataset.built import Identity, identities
from hexad.dataset.files import write_durably
from hexad.dataset.load.loader import DataLoader, loader_from_config
from hexad.dataset.text.tokenizer import load_tokenizer
from hexad.engine.engine import Engine
from hexad.engine.evaluation import ValidationSets, total
from hexad.engine.experts import Reports
from hexad.engine.faults import StepResult
from hexad.engine.modules import dtype_line
from hexad.launching.environment import environment
from hexad.launching.launch import Run, launch, naming_operators
from hexad.launching.rendezvous import wait_idle
from hexad.launching.stop import SAVE_FAILED, StopRequest
from hexad.model.transformer import DTYPES
from hexad.optim.schedule import cut_short
from hexad.parallel.pipeline.simulate import TIMELINE
from hexad.planning import check_vocab, working_layout
from hexad.planning.costs import flops_per_token
from hexad.planning.machine import check_packages
from hexad.topology.cluster import peak_flops
from hexad.topology.mesh import Mesh

from .callbacks import Callback, Outcome, checked_callbacks
from .pace import Pace, collected_by_step
from .profile import StepProfile, timeline_text
from .record import EXPERT_LAYERS, Metrics, MetricsRecorder
from .rundir import open_run_directory
from .saves import Saves

log = logging.getLogger("hexad")


def train(config: Config, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Train as configured, in the world this process belongs to; ``callbacks`` are called on all ranks.

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
        if idle := here.world - members:
            log.info("%d of %d ranks train, %d idle (faults.idle_ranks)", members, here.world, idle)
        if about_dtype := dtype_line(config, run.resolved.config, run.mesh):
            log.info("%s", about_dtype)
        # Each host counts its own restarts: one that rejoined has made none.
        restart = merged(here.restart, run.mesh.world, max)
        if restart and config.checkpoint.resume == "never":  # that was meant for the first start
            run = run.resuming()
        trainer = Trainer(run, callbacks)
        stack.push(trainer.leave)
        if restart:
            log.info("restart %d of %d: resuming after step %d", restart, here.restarts, trainer.engine.step)
        return trainer.run_steps()


class Trainer:
    """The state of a run on one rank, of which callbacks see a :class:`~.callbacks.TrainerState`."""

    def __init__(self, run: Run, callbacks: Sequence[Callback] = ()) -> None:
        self.run, self._callbacks = run, checked_callbacks(callbacks)
        self.mesh = mesh = run.mesh
        self.config = config = run.resolved.config
        self.first = mesh.rank == 0
        # What can fail on one rank alone (files) runs under agreed, without collectives inside.
        self.loader, self.validation = run.agreed(self._opened)
        data = run.agreed(self._data_identities)
        run.identical("data", [sampled for sampled, _ in data.values()])
        if config.checkpoint.asynchronous or config.memory.offload != "none":
            streams.of(mesh.device).try_pinning()
        self.engine = self._make_engine()
        self.saves = Saves(run, self.engine, data)
        # Per token, without attention and with that of complete sequences; linear in between.
        self.flops = [flops_per_token(config.model, config.data.sequence, part) for part in (0.0, 1.0)]
        self.peak = peak_flops(mesh.device, DTYPES[config.precision.dtype])
        self.saves.begin()
        run.agreed(self._prepare_data)
        self.pace = Pace(mesh)
        self.engine.after_passes = self._passes_started
        directory = Path(config.run.dir)
        self.profile = StepProfile(config.log.profile, directory, mesh.rank, mesh.device, run.agreed)
        self._recovery: str | None = None
        self._untrained = self._without_target = 0  # samples since the last step with a target; steps
        self._stopping = StopRequest(mesh)

    def _opened(self) -> tuple[DataLoader, ValidationSets | None]:
        """The data; before, what else this machine must have."""
        if self.first:
            check_packages(self.config)
        return _open_data(self.config, self.mesh)

    def _data_identities(self) -> Mapping[str, Identity]:
        """Identities of the data that the run reads, by prefix: the same on all ranks."""
        config = self.config
        validation = config.data.validation_sets.values() if config.validate_.every else ()
        return identities(name for data in (config.data.train, *validation) for name in prefixes(data))

    def _make_engine(self) -> Engine:
        return Engine(self.run.resolved, self.mesh, initialise=False)

    def _passes_started(self) -> None:
        """The step's last backward pass has been started: the host has time for the next step."""
        self.pace.computed()
        self._announce()

    def _announce(self) -> None:
        """Let the ranks agree meanwhile on what the next step's microbatches have."""
        if self.engine.step + 1 < self.config.run.steps:
            with suppress(HexadError, OSError):  # raised where the data is needed
                self.engine.announce(self.loader.ahead())

    def _prepare_data(self) -> None:
        """Build or load the indexes of large data before the first step."""
        self.loader.prepare(self.engine.samples)
        if self.validation is not None:
            self.validation.prepare()

    def _write_timeline(self, text: str) -> None:
        """Write the timeline to ``run.dir``, on the first rank only."""
        if not self.first:
            return
        path = Path(self.config.run.dir) / TIMELINE
        try:
            write_durably(path, text)
        except OSError as error:
            raise ConfigError("run.dir", f"cannot write {path}: {error.strerror}") from None

    def leave(self, _: object, error: BaseException | None, __: object) -> None:
        """Stop reading ahead and finish the save in progress, unless peers it needs are lost."""
        self.loader.close()
        if self.validation is not None:
            self.validation.close()
        if isinstance(error, CommError):
            return
        try:
            self.saves.close()
            if error is None or isinstance(error, AgreedError):
                self.pace.close()  # all ranks do
                self.engine.workload.settle()
        except HexadError as failed:
            if error is None:
                raise
            log.warning("%s", failed)  # what ends the run is another error

    def run_steps(self) -> Outcome:
        """Train up to ``run.steps``, or until a stop signal."""
        config, engine = self.config, self.engine
        # Agreed, because files may fail on the one rank that writes.
        recorder = self.run.agreed(
            lambda: MetricsRecorder(config, engine.step) if self.first else nullcontext()
        )
        steps = config.run.steps
        self._report_settings()
        with recorder as sink, self._stopping as stop, collected_by_step() as collect:
            self._notify("on_start")
            while engine.step < steps and not self._impatient():
                collect(engine.step)
                # While the step runs; callbacks may ask to stop after it.
                asking = None if self._callbacks else stop.ask(self.saves.checkpointer.failed())
                result, metrics = self._step()
                action, best = self._action(result, metrics), False
                if action == "roll_back":
                    self._roll_back(metrics)
                    if sink is not None:
                        sink.rewind(engine.step)
                else:
                    best = self._validate(metrics)
                    if sink is not None and self._log_due(metrics):
                        sink.write(metrics)
                    self._notify("on_step", metrics)
                if action == "stop":
                    raise AgreedError(self._advice(result, metrics))
                every = config.log.check_replicas
                if every and engine.step % every == 0:
                    engine.check_replicas()
                signal = stop.answer(asking or stop.ask(self.saves.checkpointer.failed()))
                if signal == SAVE_FAILED:
                    self.saves.checkpointer.wait()
                    signal = None  # one that arrived meanwhile is handled after the next step
                last = bool(signal) or engine.step == steps or self._impatient()
                interval = config.checkpoint.every
                if action != "roll_back" and (last or best or (interval and engine.step % interval == 0)):
                    self.saves.save("signal" if signal else "schedule", last)
                    self._notify("on_checkpoint", engine.step)
                if signal:
                    break
            else:
                signal = None
            self.profile.finish()
            self.saves.checkpointer.wait()  # a signal must not cut the last save short
        if signal:  # after the progress bar has ended
            log.info("%s: saved step %d and stopped; the same command resumes", signal, engine.step)
        elif self._impatient() and engine.step < steps:
            signal = "patience"
            lowest = "".join(f", {loss:.4f} after step {at}" for loss, at in self.saves.evaluations.best[:1])
            text = "validate.patience: ended after step %d, %d evaluations without a lower loss%s"
            log.info(text, engine.step, self.saves.evaluations.since, lowest)
        self._report_memory()
        if self._without_target > 1:
            log.info("%d steps without a target changed nothing", self._without_target)
        outcome = Outcome(engine.step, signal)
        self._notify("on_end", outcome)
        return outcome

    def _report_settings(self) -> None:
        """Log settings without effect in so many steps, and that there is nothing to do."""
        config = self.config
        steps, warmup = config.run.steps, config.lr_schedule.warmup
        if warmup >= steps:
            log.info("lr_schedule.warmup %d is not over by run.steps %d", warmup, steps)
        elif cut_short(config.lr_schedule, config.complete_steps):
            text = (
                "the decay of the learning rate ends at step %d, after run.steps %d (lr_schedule.decay_steps)"
            )
            log.info(text, config.lr_schedule.decay_steps, steps)
        profiled = config.log.profile.start if config.log.profile else 0
        for name, step in (("timeline", config.log.timeline), ("profile.start", profiled)):
            if step > steps:
                log.info("log.%s %d is after run.steps %d", name, step, steps)
        if self.engine.step >= steps:
            log.info("nothing to do: run.steps is %d; set a larger number to continue", steps)
        elif self._impatient():
            text = "nothing to do: validate.patience is %d; set a larger number to continue"
            log.info(text, config.validate_.patience)

    def _report_memory(self) -> None:
        """Log the most memory that any rank's GPU has used; all ranks together."""
        if self.mesh.device.type != "cuda":
            return
        memory = _memory(self.mesh.device)
        most = merged(memory, self.mesh.world, lambda a, b: {name: max(a[name], b[name]) for name in a})
        allocated, reserved = most["peak_memory_bytes"] / 2**30, most["reserved_memory_bytes"] / 2**30
        log.info("memory of a rank at most: %.1f GiB allocated, %.1f GiB reserved", allocated, reserved)
        if most["allocator_retries"]:
            text = (
                "memory was short: a rank's allocator had to free what it kept %d times, and waited for the "
                "GPU each time; leave it more room (hexad show memory)"
            )
            log.warning(text, most["allocator_retries"])

    def _notify(self, event: str, *facts: object) -> None:
        """Call a method of every callback, in their order."""
        for callback in self._callbacks:
            getattr(callback, event)(self, *facts)

    def stop(self) -> None:
        """End the run after the step in progress, with a checkpoint; on any rank."""
        self._stopping.request()

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
        manifest = self.saves.roll_back()
        if manifest is None:
            raise AgreedError(f"{metrics['fault']}; no checkpoint to roll back to yet (checkpoint.every)")
        self._recovery = (
            f"{metrics['fault']}: rolled back to step {manifest.step}, skipping samples {manifest.samples} "
            f"to {self.engine.samples - 1}"
        )
        log.warning(self._recovery)

    def _log_due(self, metrics: Metrics) -> bool:
        due = metrics["step"] % self.config.log.every == 0 or metrics["step"] == self.config.run.steps
        return due or metrics["skipped"] or "fault" in metrics or "validation_loss" in metrics

    def _step(self) -> tuple[StepResult, Metrics]:
        before = self.mesh.sent_bytes()
        record = self.engine.step + 1 == self.config.log.timeline
        with self.profile.step(self.engine.step + 1), naming_operators():
            begin, consumed = time.perf_counter(), self.engine.samples
            self.pace.begin()
            result = self.engine.train_step(self.loader.step(self.engine.samples), record)
            seconds = time.perf_counter() - begin
            slowest = self.pace.slowest()  # of the step before, which is known by now
            self.pace.end()
        sent = self.mesh.sent_bytes()
        if record and result.targets:
            text = timeline_text(self.engine)
            self.run.agreed(lambda: self._write_timeline(text))
        self._count_targets(result, self.engine.samples - consumed)
        traffic = {name: sent[name] - before[name] for name in sent}
        metrics = self._metrics(result, seconds, self.engine.samples - consumed, traffic)
        return result, {**metrics, "slowest": slowest}

    def _count_targets(self, result: StepResult, samples: int) -> None:
        """Report a step without a target, the first time.

        Raises:
            AgreedError: no step of an epoch has had one.
        """
        self._untrained = 0 if result.targets else self._untrained + samples
        if result.targets:
            return
        self._without_target += 1
        if self._without_target == 1:
            text = (
                "step %d: no token of its samples has a target (a loss mask, or isolated documents of one "
                "token): nothing is updated; such steps have skipped: true and loss: null in metrics.jsonl"
            )
            log.warning(text, result.step)
        if self._untrained >= self.loader.every_sample:
            raise AgreedError(
                f"data.train: none of {self._untrained} samples, a complete epoch and more, has a target; "
                "see how many tokens are trained (hexad data inspect), and data.packing, data.documents and "
                "data.sequence, which make samples of documents"
            )

    def _metrics(self, result: StepResult, seconds: float, batch: int, sent: dict[str, int]) -> Metrics:
        sequence = self.config.data.sequence
        rate = batch * sequence / seconds
        # MFU: training FLOPs per token x tokens/s / (peak FLOP/s of all ranks); see planning/costs.py.
        mfu = None
        if self.peak is not None and result.targets:
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
            **_memory(self.mesh.device),
            "comm_bytes": sent,
            "skipped": result.skipped,
            **({"loss_scale": result.loss_scale} if self.engine.scaler.active else {}),
            **({"auxiliary": dict(result.auxiliary)} if result.auxiliary else {}),
            **_experts(result.experts),
        }

    def _impatient(self) -> bool:
        """Whether ``validate.patience`` evaluations have not lowered the loss."""
        patience = self.config.validate_.patience
        return bool(patience) and self.saves.evaluations.since >= patience

    def _validate(self, metrics: Metrics) -> bool:
        """Add ``validation_loss`` to the metrics of a step after which evaluation is due, and of several sets
        each one's; returns whether the checkpoint of this step is one of the best, which are kept."""
        if self.validation is None or self.engine.step % self.config.validate_.every:
            return False
        scores = self.validation.scores(self.engine, self.config.validate_.batches)
        metrics["validation_loss"] = total(scores).loss
        self._notify("on_evaluation", scores)
        if isinstance(self.config.data.validation, dict):
            metrics["validation_losses"] = {name: score.loss for name, score in scores.items()}
        if not total(scores).tokens:
            log.warning("step %d: no token that was evaluated has a target: no loss", self.engine.step)
            return False
        best = self.saves.evaluations.add(metrics["validation_loss"], self.engine.step)
        return best and bool(self.config.checkpoint.keep_best)


def _open_data(config: Config, mesh: Mesh) -> tuple[DataLoader, ValidationSets | None]:
    with blaming("data.tokenizer"):
        tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocab(config, tokenizer.vocab_size)
    place = (mesh.data.rank, mesh.data.size)
    training = loader_from_config(config, *place, tokenizer, context_rank=mesh.context.rank)
    training_templates(config)  # several are refused before the model is made
    if not config.validate_.every:
        return training, None
    return training, ValidationSets(config, mesh, tokenizer)


def _experts(loads: Reports) -> Metrics:
    """The metrics of experts: of all layers together, and of each."""
    if not loads:
        return {}
    layers = loads.values()
    whole = {
        "imbalance": max(load.imbalance for load in layers),
        "entropy": sum(load.entropy for load in layers) / len(layers),
        "dropped": sum(load.dropped for load in layers),
    }
    by_layer = {str(number): load.as_tree() for number, load in loads.items()}
    return {"experts": whole, EXPERT_LAYERS: by_layer}


def _memory(device: torch.device) -> dict[str, int]:
    """The most memory that this rank has used so far, in bytes: allocated on a GPU, resident on a CPU. For a
    GPU also the most that PyTorch's allocator has reserved, and how often it had to free what it kept."""
    if device.type != "cuda":
        return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    facts = torch.cuda.memory_stats(device)
    return {
        "peak_memory_bytes": facts["allocated_bytes.all.peak"],
        "reserved_memory_bytes": facts["reserved_bytes.all.peak"],
        "allocator_retries": facts["num_alloc_retries"],
    }
