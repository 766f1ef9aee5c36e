"""Megatron-Core's optimizer and its schedule, over the buckets of wrapped modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from hexad.config import ConfigError, HexadError
from hexad.config.load import Wording
from hexad.config.schema import OptimizerSettings
from hexad.optim.optimizer import AdamW, BucketOptimizer
from hexad.optim.schedule import LearningRates
from hexad.parallel.data.buckets import Bucket, BufferPool
from hexad.parallel.data.gatherer import ParameterGatherer

from ..facade.foreign_names import check_arguments
from .dist_checkpointing import ShardedTensor
from .distributed import DistributedDataParallel, shardings, wrapped_chunks
from .settings import MANNERS, check_update
from .tables import ARGUMENTS

_KEPT = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "num_steps")


def get_megatron_optimizer(
    config: Any, model_chunks: Sequence[Any], *_: Any, **others: Any
) -> MegatronOptimizer:
    """The optimizer of this rank's stages; all ranks together.

    Args:
        config: ``OptimizerConfig``.
        model_chunks: modules in :class:`DistributedDataParallel`.
        others: Megatron-Core's, with their defaults or without effect.

    Raises:
        HexadError: modules that are not wrapped, or settings without an equivalent.
    """
    check_arguments("get_megatron_optimizer", others, ARGUMENTS["get_megatron_optimizer"])
    chunks = wrapped_chunks("get_megatron_optimizer", model_chunks)
    check_update(config)
    here = {"optimizer": "adam", "fp16": False, "decoupled_lr": None, "optimizer_cpu_offload": False}
    for name, value in here.items():
        setting = getattr(config, name, value)
        if setting != value:
            raise HexadError(
                f"OptimizerConfig.{name}: found {setting}, which is not supported here; use {value}"
            )
    return MegatronOptimizer(config, chunks)


_NAMES = {
    "betas[0]": "adam_beta1",
    "betas[1]": "adam_beta2",
    "eps": "adam_eps",
    "weight_decay": "weight_decay",
    "clip": "clip_grad",
}
"""Setting of Hexad's -> of ``OptimizerConfig``."""


def _settings_of(config: Any) -> OptimizerSettings:
    """The settings of AdamW.

    Raises:
        ConfigError: a value that is out of range.
    """
    try:
        return OptimizerSettings(
            lr=1.0,  # not used: steps have the rate of the group
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            clip=config.clip_grad,
        )
    except ValidationError as error:
        problem = Wording().readable(error, OptimizerSettings)
        name = _NAMES.get(problem.field, problem.field)
        raise ConfigError(f"OptimizerConfig.{name}", problem.problem) from None


class MegatronOptimizer:
    """AdamW over the buckets of wrapped modules, with clipping by the norm of all ranks' gradients.

    Args:
        config: ``OptimizerConfig``, of which ``use_distributed_optimizer`` shards the state over data ranks.
        chunks: this rank's stages.

    Attributes:
        param_groups: one, whose ``lr`` and ``weight_decay`` a schedule may change; vectors have no decay.
    """

    def __init__(self, config: Any, chunks: list[DistributedDataParallel]) -> None:
        settings = _settings_of(config)
        self.config, self.model_chunks = config, chunks
        self.mesh = mesh = chunks[0].mesh
        distributed = [config, *(chunk.ddp_config for chunk in chunks)]
        zero = int(any(getattr(settings, "use_distributed_optimizer", False) for settings in distributed))
        grids = {grid for chunk in chunks for grid in chunk.grids}
        self._sharding = shardings(grids, mesh, zero)
        self._gatherers: list[ParameterGatherer] = []
        for chunk in chunks:
            chunk.shard(self._sharding, zero)
            pool = BufferPool(mesh.device)
            self._gatherers.append(
                ParameterGatherer({0: chunk.module}, chunk.buckets, self._sharding, pool, hooks=False)
            )
        self._buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
        self._rule = AdamW(self._buckets, settings, mesh.device)
        norm = torch.empty(0, dtype=chunks[0].formats.master, device=mesh.device)
        axes = mesh.tensor, mesh.pipeline, mesh.gradient_axis()
        self._optimizer = BucketOptimizer(
            self._buckets,
            self._rule,
            config.clip_grad,
            self._sharding,
            mesh.pipeline,
            norm,
            axes,
            MANNERS.clip_epsilon,
        )
        self.updates = 0
        rates = {"max_lr": config.lr, "min_lr": config.min_lr}
        self.param_groups: list[dict[str, Any]] = [
            {
                "params": [declared.parameter for bucket in self._buckets for declared in bucket.members],
                "lr": config.lr,
                "weight_decay": config.weight_decay,
                "wd_mult": 1.0,
                "default_config": True,
                **{name: rate for name, rate in rates.items() if rate is not None},
            }
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    def step(self) -> tuple[bool, float, None]:
        """Clip and update with the reduced gradients, all ranks together; returns whether an update was made,
        the norm before clipping, and None for the number of zeros.

        Raises:
            HexadError: no gradients, or some that have not been reduced; no learning rate.
        """
        if any(chunk.accumulating for chunk in self.model_chunks):
            raise HexadError(
                "optimizer.step: found gradients that are not reduced; call finalize_model_grads"
            )
        if not all(chunk.has_gradients for chunk in self.model_chunks):
            raise HexadError(
                "optimizer.step: found no gradients since zero_grad; run forward and backward passes before"
            )
        group = self.param_groups[0]
        lr, decay = group["lr"], group["weight_decay"]
        if lr is None:
            raise HexadError("OptimizerConfig.lr: found None; give it, or use OptimizerParamScheduler")
        if not isinstance(lr, int | float) or not 0 <= lr < math.inf:
            raise HexadError(f"OptimizerConfig.lr: found {lr!r}, expected a number of at least 0")
        self._rule.settings = self._rule.settings.model_copy(update={"weight_decay": float(decay)})
        norm, updated, _ = self._optimizer.step(LearningRates(float(lr), float(lr)), 1.0, self._publish)
        self._settle()
        self.updates += updated
        return updated, norm, None

    def _publish(self, bucket: Bucket) -> None:
        for chunk, gatherer in zip(self.model_chunks, self._gatherers):
            if bucket in chunk.buckets:
                gatherer.publish(bucket)

    def _settle(self) -> None:
        for gatherer in self._gatherers:
            gatherer.settle()
        for group in self.param_groups:
            for parameter in group["params"]:
                vars(parameter).pop("derived", None)

    @torch.no_grad()
    def reload_model_params(self, *_: Any, **__: Any) -> None:
        """Take the values that the script has given the modules' parameters."""
        for bucket in self._buckets:
            bucket.adopt()

    def get_grad_norm(self) -> float:
        """The norm of the reduced gradients."""
        return float(self._optimizer.gradient_norm())

    def get_loss_scale(self) -> Tensor:
        """1: losses are not scaled."""
        return torch.ones(1, device=self.mesh.device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss: it is not scaled."""
        return loss

    # State

    def _state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(kind, bucket, this rank's shard) of master values and moments."""
        for bucket in self._buckets:
            yield "optimizer.master", bucket, bucket.master
            for kind, values in self._rule.state(bucket):
                yield kind, bucket, values

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """The state for ``dist_checkpointing``: master values and moments in any layout, and counters."""
        state: dict[str, Any] = {}
        for kind, bucket, values in self._state():
            traits = bucket.traits
            holder = None if traits.copy else self._sharding[traits.grid].holder(traits)
            for rectangle, part in bucket.pieces(values):
                key = f"{kind}.{rectangle.name}{list(rectangle.offset)}"
                named = rectangle.named(f"{kind}.{rectangle.name}")
                state[key] = ShardedTensor(key, part, ((0, named),), holder)
        return {"state": state, **self._counters()}

    def _counters(self) -> dict[str, Any]:
        groups = [{name: value for name, value in g.items() if name != "params"} for g in self.param_groups]
        return {"updates": self.updates, "param_groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state."""
        state = self.sharded_state_dict()
        return {**state, "state": {name: tensor.data.clone() for name, tensor in state["state"].items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``dist_checkpointing.load`` has returned for :meth:`sharded_state_dict`, or what
        :meth:`state_dict` has in the same layout."""
        for name, tensor in self.sharded_state_dict()["state"].items():
            tensor.data.copy_(state_dict["state"][name])
        self.updates = state_dict["updates"]
        self._rule.restored(self.updates, {})
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            group.update(saved)
        for bucket in self._buckets:
            self._publish(bucket)
        self._settle()


def _wsd(style: str | None) -> Callable[[float], float]:
    """The factor of the decay of WSD, of the part that is over."""
    styles: dict[str | None, Callable[[float], float]] = {
        "linear": lambda part: 1.0 - part,
        "cosine": _cosine,
        "exponential": lambda part: 2.0 * 0.5**part - 1.0,
        "minus_sqrt": lambda part: 1.0 - math.sqrt(part),
    }
    if style not in styles:
        raise HexadError(
            f"lr_wsd_decay_style: found {style!r}, expected one of {', '.join(map(str, styles))}"
        )
    return styles[style]


def _cosine(part: float) -> float:
    return 0.5 * (math.cos(math.pi * part) + 1.0)


class OptimizerParamScheduler:
    """Megatron-Core's schedule of learning rate and weight decay, counted in whatever :meth:`step` is called
    with.

    Args:
        optimizer: with ``param_groups``.
        init_lr, max_lr, min_lr: at the beginning of the warm-up, at its end, and of the decay's.
        lr_warmup_steps, lr_decay_steps: lengths; the decay's includes the warm-up.
        lr_decay_style: ``constant``, ``linear``, ``cosine``, ``inverse-square-root`` or ``WSD``.
        start_wd, end_wd, wd_incr_steps, wd_incr_style: of the weight decay: ``constant``, ``linear`` or
            ``cosine``.
        wsd_decay_steps, lr_wsd_decay_style: of the decay of WSD.
        use_checkpoint_opt_param_scheduler: :meth:`load_state_dict` sets rates and lengths too.
        override_opt_param_scheduler: it sets none.

    Raises:
        HexadError: rates or lengths that do not fit, or an unknown style.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        styles = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
        if lr_decay_style not in styles or wd_incr_style not in styles[:3]:
            raise HexadError(
                f"OptimizerParamScheduler: found {lr_decay_style!r} and {wd_incr_style!r}; styles of the "
                f"rate are {', '.join(styles)}, of the weight decay {', '.join(styles[:3])}"
            )
        if not (0 <= min_lr <= max_lr and init_lr <= max_lr and 0 <= lr_warmup_steps < lr_decay_steps):
            raise HexadError(
                f"OptimizerParamScheduler: found rates {init_lr}, {max_lr}, {min_lr} and {lr_warmup_steps} "
                f"of {lr_decay_steps} steps of warm-up; expected min_lr and init_lr of at most max_lr, "
                "and less warm-up than decay"
            )
        if not 0 <= start_wd <= end_wd or (wd_incr_style == "constant" and start_wd != end_wd):
            raise HexadError(
                f"OptimizerParamScheduler: found weight decay from {start_wd} to {end_wd} with wd_incr_style "
                f"{wd_incr_style!r}; expected numbers that do not fall, equal ones with 'constant'"
            )
        if wd_incr_style != "constant" and wd_incr_steps < 1:
            raise HexadError(
                f"OptimizerParamScheduler: found wd_incr_steps {wd_incr_steps}, expected at least 1"
            )
        if use_checkpoint_opt_param_scheduler and override_opt_param_scheduler:
            raise HexadError(
                "OptimizerParamScheduler: found override_opt_param_scheduler with "
                "use_checkpoint_opt_param_scheduler; pass False for one of them"
            )
        if lr_decay_style == "WSD" and not wsd_decay_steps:
            raise HexadError("OptimizerParamScheduler: found WSD without wsd_decay_steps; give it")
        self.optimizer, self.init_lr, self.max_lr, self.min_lr = optimizer, init_lr, float(max_lr), min_lr
        self.lr_warmup_steps, self.lr_decay_steps, self.lr_decay_style = (
            lr_warmup_steps,
            lr_decay_steps,
            lr_decay_style,
        )
        self.start_wd, self.end_wd = start_wd, end_wd
        self.wd_incr_steps, self.wd_incr_style = wd_incr_steps, wd_incr_style
        self.wsd_decay_steps = wsd_decay_steps
        self._wsd = _wsd(lr_wsd_decay_style or "linear")
        self._adopts, self._overrides = use_checkpoint_opt_param_scheduler, override_opt_param_scheduler
        self.num_steps = 0
        self.step(0)

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """The current learning rate of a group, which may have a ``max_lr`` and ``min_lr`` of its own."""
        highest, lowest = param_group.get("max_lr", self.max_lr), param_group.get("min_lr", self.min_lr)
        steps, warmup = self.num_steps, self.lr_warmup_steps
        if warmup and steps <= warmup:
            return float(self.init_lr + (highest - self.init_lr) * steps / warmup)
        if self.lr_decay_style == "constant":
            return float(highest)
        if steps > self.lr_decay_steps:
            return float(lowest)
        if self.lr_decay_style == "inverse-square-root":
            return float(max(lowest, highest * math.sqrt(max(warmup, 1) / max(steps, 1))))
        part = (steps - warmup) / (self.lr_decay_steps - warmup)
        factor = _cosine(part) if self.lr_decay_style == "cosine" else 1.0 - part
        if self.lr_decay_style == "WSD":
            length = self.wsd_decay_steps or 1
            over = steps - (self.lr_decay_steps - length)
            factor = 1.0 if over <= 0 else self._wsd(over / length)
        return float(lowest + factor * (highest - lowest))

    def get_wd(self, param_group: Mapping[str, Any] | None = None) -> float:
        """The current weight decay."""
        group = param_group or {}
        start, end = group.get("start_wd", self.start_wd), group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return float(end)
        part = self.num_steps / self.wd_incr_steps
        return float(start + (end - start) * (part if self.wd_incr_style == "linear" else _cosine(1 - part)))

    def step(self, increment: int) -> None:
        """Count, and set the rates and decays of all groups."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Counter, rates and lengths."""
        names = (*_KEPT, "lr_decay_style", "start_wd", "end_wd", "wd_incr_style", "wd_incr_steps")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            HexadError: other rates or lengths, unless one of the options says which to use.
        """
        for name in () if self._overrides else sorted(self.state_dict().keys() & state_dict.keys()):
            value, saved = getattr(self, name), state_dict[name]
            if name != "num_steps" and value != saved and not self._adopts:
                raise HexadError(
                    f"OptimizerParamScheduler: found {name} {value}, but {saved} in the checkpoint; make "
                    "them equal, or pass use_checkpoint_opt_param_scheduler or override_opt_param_scheduler"
                )
            setattr(self, name, saved)
        self.num_steps = 0
        self.step(state_dict["num_steps"])
