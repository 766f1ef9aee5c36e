"""``megatron.training``: ``pretrain``, and what scripts call in their ``forward_step``."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hexad.config import HexadError
from hexad.dataset.built import Identity
from hexad.engine.engine import Engine
from hexad.launching.environment import environment
from hexad.launching.launch import Run
from hexad.planning import Resolved
from hexad.training.loop import Trainer
from hexad.training.rundir import open_run_directory

from ..facade.foreign_names import check_arguments
from . import parallel_state
from .arguments import ExtraArguments
from .chunks import ForwardStep
from .datasets import (  # noqa: F401
    FlagsData,
    ScriptData,
    ScriptValidation,
    get_blend_and_blend_per_split,
    get_ltor_masks_and_position_ids,
    text_of,
)
from .distributed import unwrapped
from .gpt import GPTModel, GPTModelPipe, resolved_model
from .initialize import (  # noqa: F401
    get_args,
    get_tokenizer,
    initialize_megatron,
    parse_and_validate_args,
    parse_args,
    seed_generators,
    validate_args,
)
from .schedules import get_model, get_num_microbatches, setup_model  # noqa: F401
from .tables import ARGUMENTS
from .tensor_parallel import send_batch
from .transformer import ModelType, TransformerConfig, core_transformer_config_from_args

Provider = Callable[[Sequence[int]], Sequence[Any]]


@dataclass
class PretrainConfigContainer:
    """A script's settings, as ``pretrain`` takes them since Megatron-LM core_v0.18.

    Attributes:
        arguments: of :func:`parse_and_validate_args`.
        model: of :func:`gpt_config_from_args`.
    """

    arguments: Namespace
    model: Any = None


class GPTModelConfig(TransformerConfig):
    """The settings of a :class:`GPTModel`: those of the flags."""


def gpt_config_from_args(args: Namespace, model_config_cls: Any = GPTModelConfig) -> Any:
    """The settings of the model that the flags describe.

    Raises:
        HexadError: a class of the script's own.
    """
    if model_config_cls is not GPTModelConfig:
        name = getattr(model_config_cls, "__name__", model_config_cls)
        raise HexadError(
            f"gpt_config_from_args: found the class {name}; leave it out: the model is that of the flags"
        )
    return GPTModelConfig(**vars(core_transformer_config_from_args(args)))


def pretrain_cfg_container_from_args(args: Namespace, model_cfg: Any = None) -> PretrainConfigContainer:
    """The settings of the flags."""
    return PretrainConfigContainer(args, model_cfg)


def _of_flags(pre_process: bool, post_process: bool) -> nn.Module:
    """The model provider of scripts that pass settings instead of one."""
    return GPTModel(pre_process=pre_process, post_process=post_process)


def pretrain(*arguments: Any, **named: Any) -> None:
    """Train as the flags say, with a script's data and loss; see :func:`train_script` for arguments.

    Since Megatron-LM core_v0.18 the first argument is a :class:`PretrainConfigContainer`, and the model
    provider, if any, the fifth; before it they were data sets, model provider, model type and forward step,
    of which bigscience-workshop's Megatron-DeepSpeed leaves out the type.
    """
    if arguments and isinstance(arguments[0], PretrainConfigContainer):
        container, arguments = arguments[0], arguments[1:]
        names = ("train_valid_test_dataset_provider", "model_type", "forward_step_func", "model_provider")
        named = {**dict(zip(names, arguments)), **named, "parsed_args": container.arguments}
        named["model_provider"] = named.get("model_provider") or _of_flags
        arguments = arguments[len(names) :]
    elif len(arguments) == 3 and callable(arguments[2]):
        arguments = (*arguments[:2], ModelType.encoder_or_decoder, arguments[2])
    train_script(*arguments, **named)


def train_script(
    train_valid_test_dataset_provider: Provider,
    model_provider: Callable[..., nn.Module],
    model_type: ModelType,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Any = None,
    extra_args_provider: ExtraArguments | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    parsed_args: Namespace | None = None,
    data_post_process: Any = None,
    external_args: Mapping[str, Any] | None = None,
    **others: Any,
) -> None:
    """Train as the flags say, with a script's model, data and loss; metrics, checkpoints, validation and
    stops are those of ``hexad train``. All ranks call this together.

    Args:
        train_valid_test_dataset_provider: given numbers of samples, returns three data sets: what
            ``BlendedMegatronDatasetBuilder`` returns, or map-style ones of dictionaries; None for none.
        model_provider: see :func:`setup_model`.
        model_type: ``encoder_or_decoder``.
        forward_step_func: see :func:`get_forward_backward_func`.
        extra_args_provider, args_defaults: see :func:`initialize_megatron`.
        parsed_args: of :func:`parse_and_validate_args`.
        process_non_loss_data_func: refused.
        data_post_process: deepspeedai's Megatron-DeepSpeed passes it, for curricula, which are not supported;
            its models return the losses of experts too.
        external_args: values of arguments, of the same.
        others: Megatron-LM's, without effect.

    Raises:
        HexadError: anything the user can fix; the same on every rank.
    """
    if model_type is not ModelType.encoder_or_decoder:
        kind = getattr(model_type, "__name__", model_type)
        raise HexadError(f"pretrain: found model type {kind}; use ModelType.encoder_or_decoder")
    if process_non_loss_data_func is not None:
        raise HexadError("pretrain: found functions for other data than losses; leave them out")
    check_arguments("pretrain", others, ARGUMENTS["pretrain"])
    defaults = {**(args_defaults or {}), **(external_args or {})}
    initialize_megatron(extra_args_provider, defaults, parsed_args=parsed_args)
    step = _ForwardStep(forward_step_func)
    if data_post_process is not None:
        get_args().num_experts = get_args().num_experts or [1]
    engine = setup_model(model_provider, step)
    for stage in engine.stages.values():
        if isinstance(stage, GPTModel) and not isinstance(stage, GPTModelPipe):
            stage.returns_expert_losses = data_post_process is not None
    data = list(train_valid_test_dataset_provider(_samples()))
    step.as_text = isinstance(data[0], FlagsData) and data[0].as_text
    run = Run(parallel_state.get_mesh(), environment(), _validating(resolved_model(), data[1:2]))
    with ExitStack() as stack:
        open_run_directory(run.resolved.config.run, run, stack)
        trainer = _ScriptTrainer(run, engine, *data[:2])
        stack.push(trainer.leave)
        trainer.run_steps()


class _ForwardStep:
    """A script's forward step of a microbatch, or that of its :class:`GPTModelPipe`.

    Attributes:
        as_text: microbatches of the flags' data are in the form of Megatron-DeepSpeed.
    """

    def __init__(self, function: ForwardStep) -> None:
        self._function, self.as_text = function, False

    def __call__(self, iterator: Any, model: Any) -> Any:
        if self.as_text and iterator is not None:
            iterator = map(text_of, iterator)
        return model.step(iterator) if isinstance(model, GPTModelPipe) else self._function(iterator, model)


def _samples() -> tuple[int, int, int]:
    """Samples for training, validation and testing, as Megatron-LM counts them."""
    args = get_args()
    size = args.global_batch_size
    evaluations = args.train_iters // args.eval_interval + 1 if args.eval_interval else 0
    evaluated = args.eval_iters * size
    return args.train_samples or args.train_iters * size, evaluations * evaluated, evaluated


def _validating(resolved: Resolved, data_sets: Sequence[Any]) -> Resolved:
    """The settings, with evaluation where the script has a data set of its own for it."""
    args = get_args()
    if not args.eval_iters or all(data is None or isinstance(data, FlagsData) for data in data_sets):
        return resolved
    validate = resolved.config.validate_.model_copy(update={"every": args.eval_interval})
    config = resolved.config.model_copy(update={"validate_": validate})
    return replace(resolved, config=config)


class _ScriptTrainer(Trainer):
    """A run whose engine and data are a script's."""

    def __init__(self, run: Run, engine: Engine, training: Any, validation: Any) -> None:
        if training is None:
            raise HexadError("pretrain: found no data set for training; return one first")
        self._engine, self._training, self._validation = engine, training, validation
        super().__init__(run)

    def _make_engine(self) -> Engine:
        return self._engine

    def _announce(self) -> None:
        """No-op: what the script's losses are means of is counted as they are computed."""

    def _data_identities(self) -> Mapping[str, Identity]:
        return super()._data_identities() if isinstance(self._training, FlagsData) else {}

    def _opened(self) -> Any:
        validates = bool(self.config.validate_.every)
        own = self._validation is not None and not isinstance(self._validation, FlagsData)
        validation: Any = ScriptValidation(self._validation, self.mesh) if own and validates else None
        if not isinstance(self._training, FlagsData):
            return ScriptData(self._training, self.mesh), validation
        loader, of_flags = super()._opened()
        return loader, validation if own else of_flags


# In a forward step


def get_batch_on_this_tp_rank(data_iterator: Any, **_: Any) -> dict[str, Any]:
    """The next microbatch on this rank's device. Every rank has an iterator of its own, so that nothing is
    sent; a dictionary is that of the first tensor rank, which others receive."""
    if isinstance(data_iterator, dict):
        return send_batch(data_iterator)
    batch = next(data_iterator)
    device = parallel_state.get_mesh().device
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    known = {name: batch.get(name) for name in names}
    return {name: None if value is None else value.to(device) for name, value in {**known, **batch}.items()}


def get_batch_on_this_cp_rank(batch: dict[str, Any], **_: Any) -> dict[str, Any]:
    """The batch: scripts have one context rank (see :class:`GPTModel`)."""
    return batch


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Whether this rank has the first or the last stage."""
    first = parallel_state.is_pipeline_first_stage(False, vp_stage)
    return first or parallel_state.is_pipeline_last_stage(False, vp_stage)


def print_rank_0(message: Any) -> None:
    """Print on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def print_rank_last(message: Any) -> None:
    """Print on the last rank."""
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        print(message, flush=True)


def unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """The module in its wrappers; of a list each."""
    return unwrapped(model)


def get_attr_wrapped_model(model: Any, attr: str, **_: Any) -> Any:
    """An attribute of the model, unwrapped; None if it has none."""
    return getattr(unwrapped(model), attr, None)


def get_model_config(model: Any) -> Any:
    """The configuration of a model.

    Raises:
        HexadError: it has none.
    """
    config = getattr(unwrapped(model), "config", None)
    if config is None:
        raise HexadError(f"get_model_config: found a {type(model).__name__} without config; give it one")
    return config


def set_startup_timestamps(**_: Any) -> None:
    """No effect: ``metrics.jsonl`` has the times."""


class Timer:
    """Seconds between starts and stops."""

    def __init__(self) -> None:
        self._total = 0.0
        self._began: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start it."""
        self._began = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop it and add the time since :meth:`start`.

        Raises:
            HexadError: it has not been started.
        """
        if self._began is None:
            raise HexadError("timer: stopped, but not started; call start() before")
        self._total += time.perf_counter() - self._began
        self._began = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds so far; it runs on if it runs."""
        runs = self._began is not None
        if runs:
            self.stop()
        total = self._total
        if reset:
            self.reset()
        if runs:
            self.start()
        return total

    def active_time(self) -> float:
        """Seconds so far, without a reset."""
        return self.elapsed(reset=False)

    def reset(self) -> None:
        """Begin again with zero."""
        self._total, self._began = 0.0, None


class Timers:
    """Timers by name: ``timers("name", log_level=2).start()``."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        return self._timers.setdefault(name, Timer())

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print what some timers have measured, divided by ``normalizer``, on the first rank."""
        chosen = [name for name in names or self._timers if name in self._timers]
        times = {name: 1000 * self(name).elapsed(reset) / normalizer for name in chosen}
        print_rank_0(", ".join(f"{name}: {milliseconds:.2f} ms" for name, milliseconds in times.items()))

    def write(self, *_: Any, **__: Any) -> None:
        """No effect: ``metrics.jsonl`` has the times of steps."""


_timers = Timers()


def get_timers() -> Timers:
    """The timers of this process."""
    return _timers


class StragglerDetector:
    """``with stimer(bdata=True): ...``, without effect: see ``log.check_replicas`` and ``hexad show run``."""

    def __call__(self, bdata: bool = False) -> "StragglerDetector":
        return self

    def __enter__(self) -> "StragglerDetector":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class RerunStateMachine:
    """Checks results, without repeating what gave them."""

    def validate_result(
        self,
        result: Tensor,
        rejection_func: Callable[[Tensor], Any],
        message: str = "unexpected result",
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Refuse a result.

        Raises:
            HexadError: ``rejection_func`` rejects it, and it is ``fatal``.
        """
        if bool(rejection_func(result)):
            if fatal:
                raise HexadError(f"{message}; found {result!r}")
            print(f"hexad: {message}", file=sys.stderr)

    def is_unexpectedly_large(self, *_: Any, **__: Any) -> bool:
        """Never: see ``faults.spike``."""
        return False


def get_rerun_state_machine() -> RerunStateMachine:
    """What scripts validate losses with."""
    return RerunStateMachine()


def update_rotary_pos_emb(seq_length: int) -> None:
    """No-op: the model has its position embeddings."""


def cyclic_iter(iterable: Any) -> Iterator[Any]:
    """The elements again and again."""
    while True:
        yield from iterable


def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """The means of some losses over data ranks."""
    total = torch.cat([loss.clone().detach().view(1) for loss in losses])
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total / parallel_state.get_data_parallel_world_size()
