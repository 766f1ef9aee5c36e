"""A model with its gradients and optimizer on one rank; the parts of a step: accumulate, reduce, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hexad.comm import Pending, all_reduce, all_reduce_async
from hexad.config import Config, HexadError
from hexad.optim.schedule import LearningRates, LossScaler, learning_rates
from hexad.parallel.pipeline.executor import Executor, MessageBuffers
from hexad.parallel.pipeline.schedule import forward_schedule
from hexad.planning import PipelinePlan, Resolved, resolve, training_schedule
from hexad.topology.mesh import Mesh

from .faults import Fault, FaultGuard, StepResult
from .language import LanguageModel
from .losses import Loss
from .modules import Ties, with_common_dtype
from .state import Heap, State
from .workload import Boundary, Compute, ModuleWorkload, Work, Workload


class Engine(State):
    """A workload with its gradients and optimizer on this rank.

    ``Engine(config, mesh)`` builds the language model that a configuration describes,
    for which :meth:`train_step` is a whole step. Other modules come as ``Engine(stages, mesh, config)``:
    declared ones (:class:`~hexad.parallel.sharding.ShardedModule`) or plain modules, whose parameters count
    as replicated, see :mod:`hexad.engine.modules`. A custom loop calls the parts of a step:
    :meth:`begin`, :meth:`accumulate` (or its own backward passes), :meth:`reduce`, :meth:`update`.

    Args:
        stages: a configuration; or this rank's pipeline stages by number, or the module that is the only one;
            or a :class:`~hexad.engine.workload.Workload`, which says everything that is special about a step.
        mesh: from :func:`hexad.launch`.
        config: settings of everything but the model, where ``stages`` are modules.
        plan: of the pipeline; by default one stage per rank, ``parallel.schedule`` as configured.
        compute: what a stage computes of a microbatch; by default ``stage(microbatch)``, a loss.
        boundary: given a microbatch and the number of a stage, makes an empty tensor like the stage's result;
            by default a forward pass finds it, once for each new shape of a microbatch.
        training: False for evaluation only: there are no gradients, no optimizer state and no master values.
        optimizer: of ``torch.optim``, whose groups list the parameters that are trained, and keep their
            settings and learning rates, or a function of this rank's stages, by number, that returns one;
            AdamW with ``config.optimizer`` by default, also where the function returns None.
        ties: users' parameters that several stages have alike, see :data:`hexad.engine.modules.Ties`.
        loss: in place of the configured model's, a function or a module (whose parameters are trained), see
            :mod:`hexad.engine.losses`.
        initialise: draw the initial values of declared parameters; False where :meth:`restored` or
            :meth:`load_weights` follows, or :meth:`hexad.training.saves.Saves.begin`.

    Attributes:
        workload: what is trained, and what is special about its steps.
        stages: of this rank, by number.
        step: steps made so far.
        updates: those of them that were not skipped.
        samples: sequences consumed so far.
        scaler: of the loss.
        guard: of the losses that count.
        after_passes: called in :meth:`train_step` after the last backward pass has been started.

    Raises:
        ConfigError: settings that do not fit each other or the mesh.
        HexadError: modules without ``config``, or not the same on all ranks of a stage.
    """

    def __init__(
        self,
        stages: Workload | Config | Resolved | nn.Module | Mapping[int, nn.Module],
        mesh: Mesh,
        config: Config | None = None,
        *,
        plan: PipelinePlan | None = None,
        compute: Compute | None = None,
        boundary: Boundary | None = None,
        initialise: bool = True,
        training: bool = True,
        optimizer: torch.optim.Optimizer | Callable[[Mapping[int, nn.Module]], Any] | None = None,
        ties: Ties | None = None,
        loss: Loss | nn.Module | None = None,
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise HexadError(f"mesh: found {mesh!r}, expected that of hexad.launch")
        if isinstance(stages, Config | Resolved):
            stages = self._language_model(stages, mesh, loss)
        elif loss is not None:
            raise HexadError("loss: found one with modules of your own; pass it as compute=")
        elif not isinstance(stages, Workload):
            modules = {"plan": plan, "compute": compute, "boundary": boundary, "ties": ties}
            stages = ModuleWorkload(stages, mesh, config, **modules)  # type: ignore[arg-type]
        super().__init__(stages, training, optimizer)
        self.step = self.updates = self.samples = 0
        self._length = self.config.complete_steps
        if initialise:
            self.initialise()
        self.scaler = LossScaler(self.config.precision, self.workload.manners.scale_delay)
        self.guard = FaultGuard(self.config.faults)
        self.after_passes: Callable[[], None] | None = None
        self._begun = 0
        self._reduced = False  # there are gradients for an update
        self._heap = Heap() if self.mesh.device.type == "cpu" else None
        self._recorded: tuple[float, list[tuple[float, float]]] | None = None
        self._executors: dict[tuple[bool, int], Executor[Any]] = {}
        self._messages = MessageBuffers(self.mesh.device)

    def _language_model(
        self, config: Config | Resolved, mesh: Mesh, loss: Loss | nn.Module | None
    ) -> LanguageModel:
        if isinstance(config, Config):
            config = resolve(with_common_dtype(config, mesh), mesh.layout)
        return LanguageModel(config, mesh, loss)

    @property
    def _full(self) -> bool:
        """Whether blocks are compiled as a whole."""
        return self.config.run.compile == "full"

    # The parts of a step

    def begin(self, microbatches: int | None) -> None:
        """Start accumulating the gradients of this many microbatches: of :meth:`accumulate`, or of backward
        passes of the caller's own, each of a loss already divided by what it is averaged over in the whole
        global batch, and multiplied by ``engine.scaler.scale`` (1 except in fp16).
        With None their number is open: gradients are then reduced by :meth:`reduce` only, not meanwhile, and
        kept until then at any ``parallel.zero``."""
        if microbatches is not None and microbatches < 1:
            raise HexadError(f"begin: found {microbatches} microbatches, expected at least 1")
        if self._full:
            self.gatherer.settle()
        self._begun, self._reduced = microbatches or 0, False
        self.gradients.begin(microbatches)

    def extend(self) -> None:
        """Allow another backward pass than :meth:`begin` was called with; all ranks together, before it. Its
        gradients are reduced by themselves."""
        self.gradients.extend()

    def accumulate(
        self, microbatches: Sequence[Any], scale: float = 1.0, record: bool = False
    ) -> Tensor | None:
        """Run forward and backward passes of this data rank's microbatches by the pipeline's schedule.

        Call :meth:`begin` before. All pipeline ranks pass the same microbatches.

        Args:
            microbatches: what ``compute`` takes.
            scale: what the sum of all losses is multiplied by before it is differentiated; the loss scale
                of fp16 comes on top.
            record: time the pipeline's actions, see :meth:`recorded`.

        Returns:
            float64 sum of the losses on the rank of the last stage; None on others.

        Raises:
            HexadError: no microbatch, or more than :meth:`begin` was called with.
        """
        if not 0 < len(microbatches) <= self._begun:
            raise HexadError(
                f"accumulate: found {len(microbatches)} microbatches, but {self._begun} are left of those "
                "that begin was called with; call begin before each step, with all its microbatches"
            )
        self._begun -= len(microbatches)
        executor = self._executor(len(microbatches), training=True)
        total = executor.run(self.workload.tasks(microbatches), scale * self.scaler.scale, record)
        if record:
            self._recorded = (executor.began, executor.times)
        return total

    def total_loss(self, microbatches: Sequence[Any]) -> Tensor | None:
        """The sum of this data rank's losses, without gradients: float64 on the rank of the last stage, None
        on others. All pipeline ranks pass the same microbatches; in ZeRO 3 all ranks as many."""
        if self._full:
            self.gatherer.settle()
        return self._executor(len(microbatches), training=False).run(self.workload.tasks(microbatches))

    def on_all_stages(self, total: Tensor | None) -> Tensor:
        """What :meth:`accumulate` or :meth:`total_loss` returned on the rank of the last stage, on all
        pipeline ranks: float64; all of them call this together."""
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device) if total is None else total
        return all_reduce(loss, self.mesh.pipeline)

    def reduce(self) -> None:
        """Wait until gradients are summed over data and context ranks, and sum those that are partial.

        Raises:
            HexadError: before all backward passes that :meth:`begin` was called with.
        """
        missing = self.gradients.missing
        if missing:
            raise HexadError(
                f"reduce: found {missing} backward passes less than begin was called with; call begin with "
                "their number, or None"
            )
        self._begun, self._reduced = 0, True
        self.gradients.finish()
        self.gatherer.release_frozen()

    def update(
        self,
        lr: float | None,
        veto: Pending | None = None,
        divisor: float = 1.0,
        decoupled_lr: float | None = None,
    ) -> float:
        """Clip and update; returns the gradient norm before clipping.

        Args:
            lr: learning rate; None with an optimizer of ``torch.optim``, which has its own.
            veto: anything but 0 forbids the update; the same on all ranks.
            divisor: what the losses have not been divided by yet.
            decoupled_lr: learning rate of the embedding and the output head, with ``optimizer.decoupled_lr``.

        A norm that is not finite, or a veto, leaves everything unchanged but the loss scale.

        Raises:
            HexadError: without :meth:`reduce` since the last update, or an invalid rate.
        """
        if not self._reduced:
            raise HexadError("update: found no reduced gradients; call begin, accumulate and reduce before")
        rated = self.optimizer.rule.rate is not None
        if rated != (lr is None) or not (lr is None or (isinstance(lr, int | float) and 0 <= lr < math.inf)):
            expected = "None: the optimizer's groups have rates" if rated else "a number that is not negative"
            raise HexadError(f"update: found lr {lr!r}, expected {expected}")
        set_apart = self.config.optimizer.decoupled_lr is not None and not rated
        if set_apart != (decoupled_lr is not None) or not 0 <= (decoupled_lr or 0) < math.inf:
            expected = "a number that is not negative" if set_apart else "None without optimizer.decoupled_lr"
            raise HexadError(f"update: found decoupled_lr {decoupled_lr}, expected {expected}")
        rates = None if lr is None else LearningRates(lr, lr if decoupled_lr is None else decoupled_lr)
        return self._update(rates, veto, divisor)[0]

    def _update(
        self, rates: LearningRates | None, veto: Pending | None, divisor: float, further: Tensor | None = None
    ) -> tuple[float, bool, list[float]]:
        """Run :meth:`update`; returns the result of :meth:`BucketOptimizer.step`."""
        self._reduced = False
        scale = self.scaler.scale * divisor
        norm, updated, numbers = self.optimizer.step(rates, scale, self.gatherer.publish, veto, further)
        self.scaler.update(not math.isfinite(norm))
        self.step += 1
        self.updates += updated
        if self._heap is not None:
            self._heap.step_ended()
        return norm, updated, numbers

    def train_step(
        self, microbatches: Sequence[Any], record: bool = False, divisor: int | None = None
    ) -> StepResult:
        """Accumulate this data rank's microbatches, reduce, clip and update.

        Every rank of the mesh calls this together with the same number of microbatches; tensor and pipeline
        ranks of one data rank pass the same ones, and context ranks too, or what each of them holds of these.
        Microbatch ``i`` of data rank ``r`` of ``D`` holds the sequences from number ``(i * D + r) * rows`` on
        of the global batch, as the loader hands them out: dropout is keyed by that number. With ``record``
        the pipeline's actions are timed, see :meth:`recorded`. ``divisor`` is what the sum of all ranks'
        losses is divided by, the same on all ranks; by default the number of targets in the global batch.

        A global batch without a target makes a step that changes nothing but the numbers of steps and
        samples: weights, optimizer state, loss scale and the record of losses stay as they are.

        Raises:
            HexadError: no microbatch, different numbers of microbatches, others on the ranks of one data
                rank, or token ids outside the vocabulary.
        """
        return self.start_step(microbatches, record, divisor)()

    def start_step(
        self, microbatches: Sequence[Any], record: bool = False, divisor: int | None = None
    ) -> Callable[[], StepResult]:
        """The part of :meth:`train_step` up to the reduced gradients; returns a function that does the
        rest."""
        if self.mesh.trace is not None:
            self.mesh.trace.step = self.step + 1
        work = self.workload.prepare(microbatches, self.step, divisor)
        if not work.total:  # on all ranks
            if self.after_passes is not None:
                self.after_passes()
            return partial(self._finish_without_target, work)
        self.begin(len(work.tasks))
        total = self.accumulate(work.tasks, 1.0 / work.divisor, record)
        if self.after_passes is not None:
            self.after_passes()
        sums = self.workload.start_summing(total, work)
        self.reduce()
        return partial(self._finish_step, work, sums)

    def _finish_step(self, work: Work, sums: Pending) -> StepResult:
        """Clip and update with reduced gradients, given what :meth:`Workload.start_summing` sums."""
        workload, sequences = self.workload, work.sequences * self.mesh.data.size
        sums = all_reduce_async(sums.wait(), self.mesh.pipeline)
        rate = self.optimizer.rule.rate  # of an optimizer with its own
        rates = self._rates(sequences) if rate is None else None
        limit, scale = self.guard.limit, self.scaler.scale
        veto = None if limit is None else self._veto(sums, limit * work.total)
        totals = sums.wait()
        veto = workload.veto(totals, veto)
        norm, updated, numbers = self._update(rates, veto, work.total / work.divisor, totals)
        if updated:
            workload.updated(totals, self.stages)
        self.samples += sequences
        loss, fault = numbers[0] / work.total, self._fault(norm, updated)
        reported = workload.report(numbers, work)
        self.guard.record(self.step, loss, updated, fault)
        lr = rate if rates is None else rates.lr
        assert lr is not None
        return StepResult(
            *(self.step, loss, norm, lr, work.targets, work.pairs, not updated, scale, fault, limit),
            **reported,
        )

    def _finish_without_target(self, work: Work) -> StepResult:
        """Count a step that has nothing to learn from."""
        rate, sequences = self.optimizer.rule.rate, work.sequences * self.mesh.data.size
        lr = self._rates(sequences).lr if rate is None else rate
        self.step += 1
        self.samples += sequences
        scale, limit = self.scaler.scale, self.guard.limit
        return StepResult(self.step, math.nan, 0.0, lr, 0, work.pairs, True, scale, None, limit)

    def announce(self, microbatches: Sequence[Any]) -> None:
        """Agree on what the next step's microbatches have, while this step runs; all ranks together.

        ``train_step`` does not wait for the hosts of other ranks if it is then called with the same list.
        What is wrong with the microbatches is raised there.
        """
        self.workload.announce(microbatches)

    def _rates(self, sequences: int) -> LearningRates:
        """The learning rates of the next step, which has so many sequences."""
        config = self.config
        ramps = config.batch.ramp is not None
        step = (self.samples + sequences) / config.batch.global_ if ramps else self.step + 1
        return learning_rates(config.optimizer, config.lr_schedule, self._length, step)

    def _fault(self, norm: float, updated: bool) -> Fault | None:
        """The fault of a step with this gradient norm."""
        if math.isfinite(norm):
            return None if updated else "spike"
        return "not_finite" if self.scaler.exhausted else None

    def _veto(self, losses: Pending, limit: float) -> Pending:
        """Start asking whether any rank finds the sum of the token losses above a limit: over one axis after
        the other, which needs no process group of all ranks."""
        mesh, verdict = self.mesh, Pending((losses.wait()[0] > limit).to(torch.int32))
        for axis in (mesh.tensor, mesh.pipeline, mesh.gradient_axis()):
            verdict = all_reduce_async(verdict.wait(), axis, "max")
        return verdict

    def evaluate(self, microbatches: Sequence[Any]) -> tuple[float, int]:
        """(sum of token losses in nats, number of targets) over data and context ranks; changes nothing.

        Raises:
            HexadError: no microbatch, token ids outside the vocabulary, or others on the ranks of one data
                rank; in ZeRO 3, which gathers weights for each microbatch, different numbers of them.
        """
        work = self.workload.prepare_evaluation(microbatches)
        result = self.workload.evaluated(self.total_loss(work.tasks), work)
        result = all_reduce(all_reduce(result, self.mesh.gradient_axis()), self.mesh.pipeline)
        loss_sum, count = result.tolist()
        return loss_sum, int(count)

    # Progress

    def progress(self) -> dict[str, Any]:
        """Progress that a checkpoint keeps beside :meth:`chunks`, in JSON's types."""
        return {
            "step": self.step,
            "updates": self.updates,
            "samples": self.samples,
            "loss_scale": self.scaler.state(),
            "faults": self.guard.state(),
            **({"optimizer": numbers} if (numbers := self.optimizer.rule.numbers()) else {}),
            **self.workload.progress(),
        }

    def restored(self, progress: Mapping[str, Any]) -> None:
        """Resume from :meth:`progress`, after :meth:`chunks` have been overwritten."""
        self.restore_counts(progress)
        self.updates = progress.get("updates", self.step)
        self.scaler.restore(progress.get("loss_scale", {}))
        self.guard.restore(progress.get("faults", {}))
        self.optimizer.rule.restored(self.updates, progress.get("optimizer", {}))
        self.publish()

    def restore_counts(self, progress: Mapping[str, Any]) -> None:
        """Continue counting from :meth:`progress`, with the optimizer as it is."""
        self.step, self.samples = progress["step"], progress["samples"]
        self.workload.restore(progress)

    def rolled_back(self, progress: Mapping[str, Any], samples: int) -> None:
        """Restore the state (:meth:`restored`), but continue with the data from ``samples`` on; faults since
        then still count."""
        streak = self.guard.streak
        self.restored(progress)
        self.guard.streak, self.samples = streak, samples

    # The pipeline

    @property
    def peak_activations(self) -> int:
        """Most pairs of stage and microbatch that this rank has held at once."""
        return max((executor.peak_activations for executor in self._executors.values()), default=0)

    def recorded(self) -> tuple[float, list[tuple[float, float]]]:
        """The start of the last recorded step, in seconds since the epoch, and (start, end) of each of this
        rank's actions, in seconds since then."""
        assert self._recorded is not None, "no step was recorded"
        return self._recorded

    def _executor(self, microbatches: int, training: bool) -> Executor[Any]:
        """The executor for this many microbatches, made when it is first needed."""
        key = (training, microbatches)
        if key not in self._executors:
            if training:
                schedule = training_schedule(self.config, self.plan, microbatches)
            else:
                schedule = forward_schedule(self.plan.schedule.placement, microbatches)
            compute = self.workload.compute
            stages = {number: partial(compute, stage) for number, stage in self.stages.items()}
            axis, device = self.mesh.pipeline, self.mesh.device
            self._executors[key] = Executor(
                schedule,
                stages,
                axis,
                self.workload.boundary,
                self.gradients,
                device,
                self._messages,
                self.plan.costs,
            )
        return self._executors[key]
