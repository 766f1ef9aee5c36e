"""``deepspeed.utils.tensor_fragment``: master values, gradients and optimizer state of one parameter,
complete or this rank's part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hexad.comm import all_gather
from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.parallel.data.buckets import Bucket

from .zero import owner_of


class _Place(NamedTuple):
    """A trained parameter in its engine."""

    param: Tensor
    engine: Engine
    bucket: Bucket

    def full(self, shard: Tensor) -> Tensor:
        """The parameter's complete values in a tensor like its bucket's master."""
        shards = self.engine.sharding[self.bucket.traits.grid].shards
        flat = all_gather(shard.to(self.engine.mesh.device), shards)
        begin = self.bucket.offset_of(self.param)
        return flat[begin : begin + self.param.numel()].view(self.param.shape).clone()

    @torch.no_grad()
    def write(self, shard: Tensor, value: Tensor) -> None:
        """Write this rank's part of complete values to a tensor like the bucket's master."""
        if value.shape != self.param.shape:
            found = f"found shape {tuple(value.shape)} for a parameter of shape {tuple(self.param.shape)}"
            raise HexadError(f"value: {found}")
        begin, bucket = self.bucket.offset_of(self.param), self.bucket
        low, high = max(begin, bucket.low), min(begin + self.param.numel(), bucket.high)
        if low < high:
            part = value.reshape(-1)[low - begin : high - begin]
            shard[low - bucket.low : high - bucket.low].copy_(part)

    def local(self, shard: Tensor) -> Tensor:
        """This rank's elements of the parameter in a tensor like its bucket's master."""
        begin = self.bucket.offset_of(self.param) - self.bucket.low
        return shard[max(begin, 0) : max(begin + self.param.numel(), 0)]

    def state(self, name: str) -> Tensor:
        """A state of the optimizer.

        Raises:
            HexadError: it has none of this name, or not yet.
        """
        states = self.states()
        if name not in states:
            known = ", ".join(states) or "nothing before its first step"
            raise HexadError(f"optim_state_key: the optimizer has no {name!r}; it has {known}")
        return states[name]

    def states(self) -> dict[str, Tensor]:
        """The optimizer's state of the bucket, by DeepSpeed's names."""
        states = self.engine.optimizer.rule.state(self.bucket)
        return {name.removeprefix("optimizer."): values for name, values in states}

    def gradient(self) -> Tensor | None:
        """The bucket's reduced gradient, a sum over data ranks; None before a backward pass."""
        if not self.engine.gradients.contributed:
            return None
        self.engine.gradients.extend()
        return self.bucket.gradient


def _place(param: Tensor) -> _Place | None:
    owner = owner_of(param)
    return None if owner is None or owner[1].plan.frozen else _Place(param, *owner)


# Complete values: all ranks call these together


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The master values of a parameter; None of one that is not trained."""
    place = _place(param)
    return None if place is None else place.full(place.bucket.master)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the master values of a parameter, and with them its values."""
    if place := _place(param):
        place.write(place.bucket.master, value)
        place.engine.gatherer.publish(place.bucket)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The optimizer's state of a parameter, such as ``exp_avg``; None if there is none."""
    place = _place(param)
    state = None if place is None else place.states().get(optim_state_key)
    return None if place is None or state is None else place.full(state)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set the optimizer's state of a parameter.

    Raises:
        HexadError: the optimizer has no such state, or not yet.
    """
    if place := _place(param):
        place.write(place.state(optim_state_key), value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The gradient of a parameter, accumulated since the last step and averaged over data ranks; in fp16
    multiplied by the loss scale. None before a backward pass, or of a parameter that is not trained."""
    place = _place(param)
    gradient = None if place is None else place.gradient()
    if place is None or gradient is None:
        return None
    return place.full(gradient) / place.engine.mesh.data.size


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient of a parameter, as :func:`safe_get_full_grad` returns it.

    Raises:
        HexadError: before a backward pass.
    """
    if place := _place(param):
        gradient = place.gradient()
        if gradient is None:
            raise HexadError("safe_set_full_grad: found no gradient; call it between backward and step")
        place.write(gradient, value * place.engine.mesh.data.size)


# This rank's elements of the same, as ``ds_tensor`` has them of the values: flat, perhaps none


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's master values of a parameter; None of one that is not trained."""
    place = _place(param)
    return None if place is None else place.local(place.bucket.master)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set this rank's master values of a parameter, and with them the values."""
    if place := _place(param):
        place.local(place.bucket.master).copy_(value.reshape(-1))
        place.engine.gatherer.publish(place.bucket)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's optimizer state of a parameter, such as ``exp_avg``; None if there is none."""
    place = _place(param)
    state = None if place is None else place.states().get(optim_state_key)
    return None if place is None or state is None else place.local(state)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's optimizer state of a parameter.

    Raises:
        HexadError: the optimizer has no such state, or not yet.
    """
    if place := _place(param):
        place.local(place.state(optim_state_key)).copy_(value.reshape(-1))


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of :func:`safe_get_full_grad`."""
    place = _place(param)
    gradient = None if place is None else place.gradient()
    if place is None or gradient is None:
        return None
    return place.local(gradient) / place.engine.mesh.data.size


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Set this rank's part of a gradient, as :func:`safe_get_local_grad` returns it.

    Raises:
        HexadError: before a backward pass.
    """
    if place := _place(param):
        gradient = place.gradient()
        if gradient is None:
            raise HexadError("safe_set_local_grad: found no gradient; call it between backward and step")
        place.local(gradient).copy_(value.reshape(-1) * place.engine.mesh.data.size)
