"""Megatron-LM's ``get_forward_backward_func`` over Hexad's executor: any schedule."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hexad.config import Config, HexadError
from hexad.config.schema import MemorySettings
from hexad.engine.engine import Engine
from hexad.engine.workload import Boundary, Work
from hexad.model.transformer import DTYPES
from hexad.parallel.pipeline.schedule import Schedule
from hexad.planning import PipelinePlan
from hexad.topology.mesh import Mesh

from ..facade.foreign_names import check_arguments
from . import parallel_state
from .chunks import Chunks, ForwardStep, Step, compute_of
from .datasets import iterators_of
from .distributed import DistributedDataParallel
from .enums import ModelType
from .gpt import GPTWorkload, resolved_model
from .initialize import get_args
from .settings import MANNERS, DistributedDataParallelConfig
from .tables import ARGUMENTS


def setup_model(model_provider: Callable[..., nn.Module], forward_step: ForwardStep | None = None) -> Engine:
    """This rank's stages, with their gradients and optimizer; all ranks call this together.

    Args:
        model_provider: called with ``pre_process`` and ``post_process`` for every stage of this rank; returns
            a :class:`GPTModel`, or a module with its ``set_input_tensor`` whose hidden states have the same
            shape.
        forward_step: of complete steps; by default those of :func:`forward_backward` only.

    Raises:
        ConfigError: flags that do not fit each other.
    """
    resolved, mesh = resolved_model(), parallel_state.get_mesh()
    last = resolved.plan.schedule.stages - 1
    stages = build_stages(
        resolved.plan.schedule,
        mesh,
        lambda number: model_provider(pre_process=number == 0, post_process=number == last),
    )
    # GPTModel wraps its own layers in recompute; an engine does not know the layers of modules.
    config = resolved.config.model_copy(
        update={"memory": MemorySettings(offload=resolved.config.memory.offload)}
    )
    workload = ScriptWorkload(
        stages,
        mesh,
        config,
        plan=resolved.plan,
        boundary=lambda *_: empty_hidden(config, mesh),
        forward_step=forward_step,
    )
    return Engine(workload, mesh, initialise=False)


def get_model(
    model_provider_func: Callable[..., nn.Module],
    model_type: Any = None,
    wrap_with_ddp: bool = True,
    **others: Any,
) -> list[nn.Module]:
    """This rank's stages of the model of the flags, for a script with an optimizer of its own.

    Args:
        model_provider_func: see :func:`setup_model`.
        model_type: ``encoder_or_decoder``.
        wrap_with_ddp: wrap each in :class:`DistributedDataParallel`.
        others: Megatron-LM's, with their defaults.

    Raises:
        HexadError: a schedule whose stages are placed in another way than by 1F1B.
        ConfigError: flags that do not fit each other.
    """
    check_arguments("get_model", others, ARGUMENTS["get_model"])
    if model_type not in (None, ModelType.encoder_or_decoder):
        raise HexadError(f"get_model: found model type {model_type}; use ModelType.encoder_or_decoder")
    resolved, mesh = resolved_model(), parallel_state.get_mesh()
    schedule, args = resolved.plan.schedule, get_args()
    if any(rank != number % mesh.pipeline.size for number, rank in enumerate(schedule.placement)):
        name = resolved.config.parallel.schedule
        raise HexadError(
            f"get_model: found parallel.schedule {name}; use 1f1b or interleaved, or setup_model"
        )
    last = schedule.stages - 1
    stages = build_stages(
        schedule,
        mesh,
        lambda number: model_provider_func(pre_process=number == 0, post_process=number == last),
    )
    if not wrap_with_ddp:
        return list(stages.values())
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not args.grad_reduce_in_bf16,
        overlap_grad_reduce=args.overlap_grad_reduce,
        bucket_size=args.ddp_bucket_size,
    )
    return [
        DistributedDataParallel(getattr(stage, "config", None), settings, stage) for stage in stages.values()
    ]


def empty_hidden(config: Config, mesh: Mesh) -> Tensor:
    """An empty tensor like the hidden states that cross a stage boundary."""
    tokens = config.batch.micro * config.data.sequence
    rows = tokens // (mesh.tensor.size if config.parallel.sequence_parallel else 1)
    dtype = DTYPES[config.precision.dtype]
    return torch.empty((rows, config.model.hidden), dtype=dtype, device=mesh.device)


def build_stages(
    schedule: Schedule, mesh: Mesh, provider: Callable[[int], nn.Module]
) -> dict[int, nn.Module]:
    """This rank's stages, each made while ``parallel_state`` says that it is the current one.

    Args:
        schedule: which says what stages a rank has.
        mesh: of the current rank.
        provider: of the stage of a number.
    """
    numbers = schedule.stages_of(mesh.pipeline.rank)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(len(numbers) if len(numbers) > 1 else None)
    stages: dict[int, nn.Module] = {}
    for place, number in enumerate(numbers):
        parallel_state.set_virtual_pipeline_model_parallel_rank(place if len(numbers) > 1 else None)
        stages[number] = provider(number)
    return stages


class ScriptWorkload(GPTWorkload):
    """Stages whose passes are a script's ``forward_step``, as a run trains with them. A step's loss is the
    mean over microbatches, as in Megatron-LM.

    Args:
        stages, mesh, config, plan, boundary: see :class:`~hexad.engine.workload.ModuleWorkload`.
        forward_step: see :func:`forward_backward`, which calls that of each step where this is None.

    Attributes:
        reported: by the loss functions of the last passes, per microbatch, on the rank of the last stage.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: Mesh,
        config: Config,
        *,
        plan: PipelinePlan,
        boundary: Boundary,
        forward_step: ForwardStep | None = None,
    ) -> None:
        compute = compute_of(stages, plan.schedule.stages - 1)
        super().__init__(stages, mesh, config, plan=plan, compute=compute, boundary=boundary, manners=MANNERS)
        self._forward_step = forward_step
        self.reported: list[Any] = []

    def prepare(self, microbatches: Sequence[Any], step: int, divisor: int | None = None) -> Work:
        """The work of one step, whatever the ``divisor``: every token counts as a target."""
        count, config = len(microbatches), self.config
        sequences, total = count * config.batch.micro, count * self.mesh.gradient_axis().size
        targets = sequences * self.mesh.data.size * config.data.sequence
        tasks = self._tasks(microbatches)
        return Work(tasks, sequences, targets, targets * config.data.sequence, total, divisor=total)

    def prepare_evaluation(self, microbatches: Sequence[Any]) -> Work:
        """Prepare microbatches of an evaluation, like :meth:`prepare`."""
        return self.prepare(microbatches, 0)

    def _tasks(self, microbatches: Sequence[Any]) -> list[Step]:
        if self._forward_step is None:
            raise HexadError("the engine has no forward_step; call get_forward_backward_func()(...)")
        step = Step(self._forward_step, iterators_of(microbatches, list(self.stages(training=True))))
        self.reported = step.reported
        return [step] * len(microbatches)

    def evaluated(self, total: Tensor | None, work: Work) -> Tensor:
        """(sum of losses, what they are divided by) of what the loss functions have returned."""
        sums = work.tasks[0].sums if work.tasks else ()
        pairs = [(float(loss), float(count)) for loss, count in sums] or [(0.0, 0.0)]
        return torch.tensor(pairs, dtype=torch.float64, device=self.mesh.device).sum(0)


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """:func:`forward_backward`, which runs any schedule."""
    return forward_backward


def forward_backward(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Iterator[Any] | list[Iterator[Any]],
    model: Any,
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    forward_only: bool = False,
    **others: Any,
) -> list[Any]:
    """Forward and backward passes of one step.

    As in Megatron-LM, losses are averaged over microbatches, and loss functions return ``(loss, reported)``,
    or ``(sum, count, reported)``, whose quotient is the loss. With an engine they are averaged over data
    ranks too, and ``model.reduce()`` and ``model.update(lr)`` follow; with modules, ``finalize_model_grads``.

    Args:
        forward_step_func: ``forward_step(data_iterator, model)`` returns the output, and the loss function of
            the last stage's.
        data_iterator: of this rank's microbatches; a list of one per stage of this rank where it has several.
        model: from :func:`setup_model`; or a module, in a pipeline this rank's stage, or a list of these.
        num_microbatches: of this data rank.
        seq_length, micro_batch_size: with an engine those of the flags; in a pipeline of modules they say
            what stages send.
        forward_only: evaluate.
        others: Megatron-LM's, with their defaults or without effect.

    Returns:
        On the rank of the last stage what its loss function has reported, by microbatch; elsewhere nothing.

    Raises:
        HexadError: another ``model``, other shapes than those of the flags, or too few iterators.
    """
    check_arguments("forward_backward", others, ARGUMENTS["forward_backward"])
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if not isinstance(model, Engine):
        chunks = Chunks.of(model)
        step = _step_of(forward_step_func, iterators, sorted(chunks.stages))
        chunks.run(step, num_microbatches, (seq_length, micro_batch_size), forward_only)
        return step.reported
    arguments = get_args()
    for name, size in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size)):
        if size not in (None, getattr(arguments, name)):
            raise HexadError(f"{name}: found {size}, expected that of the flags, {getattr(arguments, name)}")
    step = _step_of(forward_step_func, iterators, sorted(model.stages))
    if forward_only:
        model.total_loss([step] * num_microbatches)
    else:
        model.begin(num_microbatches)
        data = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        model.accumulate([step] * num_microbatches, 1.0 / (num_microbatches * data))
    return step.reported


def _step_of(function: ForwardStep, iterators: Sequence[Any], stages: Sequence[int]) -> Step:
    """A call's functions and data.

    Raises:
        HexadError: another number of iterators than of stages.
    """
    if len(iterators) != len(stages):
        raise HexadError(
            f"data_iterator: found {len(iterators)} for {len(stages)} stages of this rank; pass a list of "
            "one for each"
        )
    return Step(function, dict(zip(stages, iterators)))


def get_num_microbatches() -> int:
    """Microbatches of a step and data rank.

    Raises:
        HexadError: with ``--rampup-batch-size``: a loop of the script's own does not say how many samples it
            has consumed.
    """
    arguments = get_args()
    if arguments.rampup_batch_size is not None:
        raise HexadError(
            "get_num_microbatches: batches grow (--rampup-batch-size); use pretrain(), or leave the flag out"
        )
    per_pass = arguments.micro_batch_size * arguments.data_parallel_size
    return int(arguments.global_batch_size // per_pass)
