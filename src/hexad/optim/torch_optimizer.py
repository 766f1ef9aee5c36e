"""A user's ``torch.optim`` optimizer on buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hexad.config import HexadError
from hexad.parallel.data.buckets import Bucket

from .optimizer import Publish, Rule
from .schedule import LearningRates

ELEMENTWISE = tuple("ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split())
"""Optimizers of ``torch.optim`` that treat every element by itself: a shard of a flat bucket is as good as a
parameter."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of :data:`ELEMENTWISE`, or a class derived from one that declares itself
    ``elementwise``."""
    if getattr(optimizer, "elementwise", False):
        return True
    return type(optimizer).__name__ in ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim.")


class TorchOptimizer(Rule):
    """Updates this rank's shard of every bucket with a ``torch.optim.Optimizer``.

    The optimizer's groups keep their settings, which whoever holds the optimizer may change between steps
    (learning-rate schedulers do); their parameters are replaced by master values. Elementwise optimizers are
    given flat shards of buckets. Others (LAMB, Muon, Adafactor) need complete parameters, which a rank has
    where nothing is sharded: they are given these one by one. Where buckets are sharded, they are given flat
    shards, which is not what they compute on one rank; whoever creates this decides whether that is allowed.

    Args:
        optimizer: whose groups list the parameters that are trained.
        buckets: their ``traits.group`` is the number of the group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        self.optimizer, self.buckets = optimizer, buckets
        flat = is_elementwise(optimizer) or any(bucket.plan.shards > 1 for bucket in buckets)
        self._tensors = [_given(bucket, flat) for bucket in buckets]
        optimizer.state.clear()
        for number, group in enumerate(optimizer.param_groups):
            members = [member for member in zip(buckets, self._tensors) if member[0].traits.group == number]
            group["params"] = [tensor for _, member in members for _, tensor in member]
            if _fusible(optimizer, group):
                group["fused"] = True  # fewer passes over memory; the same numbers but for rounding

    @property
    def rate(self) -> float:  # type: ignore[override]
        """The learning rate of the first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def update(
        self,
        gradients: Iterator[Tensor],
        rates: LearningRates | None,
        factor: float | Tensor,
        publish: Publish,
    ) -> None:
        """Elementwise optimizers bucket by bucket, so that one is gathered while the next is updated; others
        all at once: they may have numbers of their own, which a step advances."""
        assert rates is None, "the optimizer's groups hold the learning rate"
        waiting = []
        for bucket_tensors in self._tensors:
            for _, tensor in bucket_tensors:
                tensor.grad = None  # that show_gradients has set: a step updates what has a gradient
        for bucket, bucket_tensors, gradient in zip(self.buckets, self._tensors, gradients):
            if factor != 1:
                gradient.mul_(factor)
            _give_gradients(bucket, bucket_tensors, gradient)
            waiting.append((bucket, bucket_tensors))
            if self._by_bucket:
                self._step(waiting, publish)
        if waiting:
            self._step(waiting, publish)

    def show_gradients(self) -> None:
        """Set ``grad`` of the tensors in the optimizer's groups to this rank's shard of the gradients, as
        :meth:`update` does, for what changes gradients elementwise before it."""
        for bucket, bucket_tensors in zip(self.buckets, self._tensors):
            _give_gradients(bucket, bucket_tensors, bucket.gradient)

    @property
    def _by_bucket(self) -> bool:
        hooks = self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks
        return is_elementwise(self.optimizer) and not hooks

    def _step(self, waiting: list[tuple[Bucket, BucketTensors]], publish: Publish) -> None:
        """Update what has gradients, which ``waiting`` lists."""
        self.optimizer.step()
        for _, bucket_tensors in waiting:
            for _, tensor in bucket_tensors:
                tensor.grad = None
        for bucket, _ in waiting:
            publish(bucket)
        waiting.clear()

    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """State as large as the values, by name; none before the first step or :meth:`make_state`."""
        bucket_tensors, states = self._tensors[self.buckets.index(bucket)], self.optimizer.state
        as_large = (
            key
            for _, tensor in bucket_tensors
            for key, value in states[tensor].items()
            if _alike(value, tensor)
        )
        for key in dict.fromkeys(as_large):  # in order of appearance
            flat = torch.zeros_like(bucket.master)
            for member, tensor in bucket_tensors:
                if member is None:
                    flat = states[tensor][key]
                else:  # what a checkpoint overwrites is what the optimizer reads
                    view = bucket.view(flat, member).view(tensor.shape)
                    states[tensor][key] = view.copy_(states[tensor].get(key, view))
            yield f"optimizer.{key}", flat

    def make_state(self, kinds: Iterable[str]) -> None:
        """Make the state that a checkpoint holds, where the optimizer has not made it yet; forget all where
        it holds none, as before the first update.

        Args:
            kinds: names as of :meth:`state`.
        """
        keys = [kind.removeprefix("optimizer.") for kind in kinds]
        if not keys:
            self.optimizer.state.clear()
        for bucket_tensors in self._tensors:
            for _, tensor in bucket_tensors:
                for key in keys:
                    self.optimizer.state[tensor].setdefault(key, torch.zeros_like(tensor))

    def numbers(self) -> dict[str, Any]:
        """The groups' settings, and what the optimizer counts, such as its steps.

        Raises:
            HexadError: the optimizer keeps something that a checkpoint cannot hold.
        """
        groups = [
            {
                key: number
                for key, value in group.items()
                if key != "params" and _plain(number := _number(value))
            }
            for group in self.optimizer.param_groups
        ]
        counts: dict[str, Any] = {}
        for bucket_tensors in self._tensors:
            for _, tensor in bucket_tensors:
                for key, value in self.optimizer.state[tensor].items():
                    if not _alike(value, tensor):
                        counts[key] = self._count(key, value)
        return {"type": type(self.optimizer).__name__, "groups": groups, "counts": counts}

    def check(self, numbers: Mapping[str, Any]) -> None:
        """Refuse to resume with :meth:`numbers` of another optimizer; Adam and AdamW keep the same state.

        Raises:
            HexadError: they are those of another one.
        """
        kind = type(self.optimizer).__name__
        saved = numbers.get("type", kind)
        if saved != kind and {saved, kind} != {"Adam", "AdamW"}:
            raise HexadError(
                f"optimizer: found the state of {saved} in the checkpoint, but this is {kind}; use {saved}, "
                "or load the weights alone (load_optimizer_states=False)"
            )

    def _count(self, key: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1:
            return {"tensor": value.item()} | ({"shape": list(value.shape)} if value.dim() else {})
        if _plain(value):
            return value
        raise HexadError(
            f"optimizer: {type(self.optimizer).__name__} keeps {key}, a {type(value).__name__}, which a "
            "checkpoint cannot hold; it holds numbers, and tensors of the parameters' shape"
        )

    def restored(self, updates: int, numbers: Mapping[str, Any]) -> None:
        for group, saved in zip(self.optimizer.param_groups, numbers.get("groups", ())):
            for key, value in saved.items():
                known = group.get(key)
                if isinstance(known, Tensor):
                    known.fill_(value)
                elif key != "fused":
                    group[key] = tuple(value) if isinstance(known, tuple) else value
        for group in self.optimizer.param_groups:
            for tensor in group["params"]:
                for key, value in numbers.get("counts", {}).items():
                    if isinstance(value, Mapping):
                        where = tensor.device if group.get("fused") or group.get("capturable") else "cpu"
                        shape = value.get("shape", [])
                        value = torch.full(shape, value["tensor"], dtype=torch.float32, device=where)
                    self.optimizer.state[tensor][key] = value


BucketTensors = list[tuple[int | None, Tensor]]
"""The tensors of a bucket that an optimizer updates: its members by number, or all as one."""


def _given(bucket: Bucket, flat: bool) -> BucketTensors:
    """The tensors of a bucket for the optimizer: one flat shard, or a view of each member."""
    if flat:
        return [(None, bucket.master)]
    views = [bucket.view(bucket.master, member) for member in range(len(bucket.members))]
    # State of a single number would be taken for a count of steps.
    return [(member, view if view.dim() else view.view(1)) for member, view in enumerate(views)]


def _give_gradients(bucket: Bucket, bucket_tensors: BucketTensors, gradient: Tensor) -> None:
    for member, tensor in bucket_tensors:
        tensor.grad = gradient if member is None else bucket.view(gradient, member).view(tensor.shape)


def _alike(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == tensor.shape


def _number(value: Any) -> Any:
    """A tensor's number; else the value itself."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _plain(value: Any) -> bool:
    """Whether JSON holds it."""
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _fusible(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether PyTorch's fused kernel can replace the default, where the user has left the choice."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or group.get("fused") is not None:
        return False
    if group.get("foreach") or group.get("capturable") or group.get("differentiable"):
        return False
    if isinstance(group.get("lr"), Tensor):
        return False
    return all(tensor.is_floating_point() for tensor in group["params"])
