"""``safe_get_full_*`` and ``safe_set_full_*``: complete master values, gradients and optimizer state of one
parameter, whatever is sharded. All ranks call these together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hexad.comm import all_gather
from hexad.config import HexadError

from ..facade.gathered import owner_of

if TYPE_CHECKING:
    from hexad.engine.engine import Engine
    from hexad.parallel.data.buckets import Bucket


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The master values of a parameter; None of one that is not trained."""
    return None if (owner := _owner(param)) is None else _full(owner, param, owner[1].master)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the master values of a parameter, and with them its values."""
    if (owner := _owner(param)) is not None:
        _set(owner, param, owner[1].master, value)
        owner[0].gatherer.publish(owner[1])


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The optimizer's state of a parameter, such as ``exp_avg``; None if there is none."""
    owner = _owner(param)
    state = None if owner is None else _state(owner, optim_state_key)
    return None if owner is None or state is None else _full(owner, param, state)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set the optimizer's state of a parameter.

    Raises:
        HexadError: the optimizer has no such state, or not yet.
    """
    if (owner := _owner(param)) is not None:
        if (state := _state(owner, optim_state_key)) is None:
            raise HexadError(
                f"safe_set_full_optimizer_state: the optimizer has no {optim_state_key!r}; it has "
                f"{', '.join(_states(owner)) or 'nothing before its first step'}"
            )
        _set(owner, param, state, value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The gradient of a parameter, accumulated since the last step and averaged over data ranks; in fp16
    multiplied by the loss scale. None before a backward pass, or of a parameter that is not trained."""
    if (owner := _owner(param)) is None or not owner[0].gradients.contributed:
        return None
    engine, bucket = owner
    engine.gradients.extend()
    return _full(owner, param, bucket.gradient) / engine.mesh.data.size


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient of a parameter, as :func:`safe_get_full_grad` returns it.

    Raises:
        HexadError: before a backward pass.
    """
    if (owner := _owner(param)) is None:
        return
    engine, bucket = owner
    if not engine.gradients.contributed:
        raise HexadError("safe_set_full_grad: found no gradient; call it between backward and step")
    engine.gradients.extend()
    _set(owner, param, bucket.gradient, value * engine.mesh.data.size)


Owner = tuple["Engine", "Bucket"]


def _owner(param: Tensor) -> Owner | None:
    owner = owner_of(param)
    return None if owner is None or owner[1].plan.frozen else owner


def _full(owner: Owner, param: Tensor, shard: Tensor) -> Tensor:
    """The complete values of a parameter in a tensor like its bucket's master."""
    engine, bucket = owner
    flat = all_gather(shard.to(engine.mesh.device), engine.sharding[bucket.traits.grid].shards)
    begin = bucket.offset_of(param)
    return flat[begin : begin + param.numel()].view(param.shape).clone()


@torch.no_grad()
def _set(owner: Owner, param: Tensor, shard: Tensor, value: Tensor) -> None:
    """Write this rank's part of a parameter's complete values to a tensor like its bucket's master."""
    bucket = owner[1]
    if value.shape != param.shape:
        raise HexadError(
            f"value: found shape {tuple(value.shape)} for a parameter of shape {tuple(param.shape)}"
        )
    begin = bucket.offset_of(param)
    low, high = max(begin, bucket.low), min(begin + param.numel(), bucket.high)
    if low < high:
        shard[low - bucket.low : high - bucket.low].copy_(value.reshape(-1)[low - begin : high - begin])


def _states(owner: Owner) -> dict[str, Tensor]:
    states = owner[0].optimizer.rule.state(owner[1])
    return {name.removeprefix("optimizer."): values for name, values in states}


def _state(owner: Owner, key: str) -> Tensor | None:
    return _states(owner).get(key)
