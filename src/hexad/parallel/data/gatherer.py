"""Parameters gathered from the data ranks that hold a shard of them.

In ZeRO 1 and 2 every bucket is gathered once per step: its gathering starts as soon as its shard has been
updated, and the next forward pass waits for it where it first needs it. In ZeRO 3 matrices are there only
while their layer computes; the next layer's are gathered meanwhile (FSDP: Zhao et al., arXiv 2304.11277).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from hexad.comm import Pending, all_gather_async
from hexad.comm.memory import memory_of

from ..sharding import Provide, not_gathered
from .buckets import Bucket, BufferPool, Shardings
from .ordering import Gathering


class ParameterGatherer:
    """Gathers parameters before a module runs.

    Args:
        stages: of this rank, by number; the modules get hooks.
        buckets: with all their parameters.
        sharding: among which ranks to gather.
        pool: buffers for parameters that come and go.
        hooks: wait for parameters where modules need them; otherwise whoever calls these calls :meth:`settle`
            before (compiled modules, whose graphs hooks would break). Not in ZeRO 3.
        views: autograd may save views of weights for the backward pass; our own layers save parameters.

    Attributes:
        absent: what is read of parameters that are not gathered; by default an error.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        buckets: Sequence[Bucket],
        sharding: Shardings,
        pool: BufferPool,
        hooks: bool = True,
        views: bool = False,
    ) -> None:
        self._buckets, self._sharding, self._pool, self._views = buckets, sharding, pool, views
        self._gathering: dict[int, Pending] = {}
        self._users: Counter[int] = Counter()  # uses of acquire() that have not ended
        self.absent: Provide = not_gathered
        self._hooks: list[RemovableHandle] = []
        for number, bucket in enumerate(buckets):
            bucket.provide = partial(self._provide, number)
        if not hooks or all(bucket.plan.resident and bucket.plan.shards == 1 for bucket in buckets):
            return
        for stage in stages.values():
            self._hook(stage)

    def publish(self, bucket: Bucket) -> None:
        """Hand the bucket's new master values to all ranks that need them."""
        number = self._buckets.index(bucket)
        self._arrive(number)
        if not bucket.plan.resident:
            self._drop(bucket)
        bucket.publish()
        shards = self._sharding[bucket.traits.grid].shards
        if bucket.plan.resident and shards.size > 1:
            self._gathering[number] = all_gather_async(bucket.source, shards, out=bucket.whole)
            bucket.guard()  # reading a parameter meanwhile waits for it
        elif self._users[number]:
            self.fetch(number)

    def acquire(self, bucket: Bucket) -> None:
        """Gather a bucket's complete values, which stay until as many calls of :meth:`release`; all ranks
        that hold shards together."""
        number = self._buckets.index(bucket)
        self._users[number] += 1
        self.fetch(number)
        self._arrive(number)

    def release(self, bucket: Bucket) -> None:
        """End one use that began with :meth:`acquire`. The buffer is not used again: those who have read the
        values may hold views of it."""
        number = self._buckets.index(bucket)
        self._users[number] -= 1
        if not self._users[number] and not bucket.plan.resident and bucket.whole is not None:
            bucket.detach()

    def settle(self) -> None:
        """Wait for everything that is being gathered."""
        for number in list(self._gathering):
            self._renew(number)

    def release_frozen(self) -> None:
        """Give up frozen values that do not stay: nothing publishes them. The last layer of a backward pass,
        whose input needs no gradient, cannot tell when that is over."""
        for number, bucket in enumerate(self._buckets):
            if bucket.plan.frozen:
                self._renew(number)

    def _renew(self, number: int) -> None:
        """Forget values that are there, or on their way, but do not stay."""
        self._arrive(number)
        if not self._buckets[number].plan.resident:
            self.free(number)

    # As Gathering decides

    def fetch(self, number: int) -> None:
        """Start gathering a bucket, if it is not here."""
        bucket = self._buckets[number]
        if bucket.whole is None and number not in self._gathering:
            buffer = self._pool.take(bucket, bucket.members[0].parameter.dtype)
            shard = bucket.shard(buffer).copy_(bucket.source)
            shards = self._sharding[bucket.traits.grid].shards
            self._gathering[number] = all_gather_async(shard, shards, out=buffer)

    def free(self, number: int) -> None:
        """Give up a bucket's values, if they are here and :meth:`acquire` does not hold them."""
        if not self._users[number]:
            self._drop(self._buckets[number])

    def _drop(self, bucket: Bucket) -> None:
        if bucket.whole is not None:
            self._pool.give(bucket, bucket.detach())

    def _arrive(self, number: int) -> None:
        pending = self._gathering.pop(number, None)
        if pending is not None:
            whole = pending.wait()
            if self._buckets[number].plan.resident:
                self._buckets[number].unguard()
            else:
                self._buckets[number].attach(whole)

    def _provide(self, number: int, parameter: Tensor) -> Tensor:
        """A parameter once its values have arrived; :attr:`absent` decides about those of ZeRO 3 that
        :meth:`acquire` does not hold, except that of the head in the backward pass of a user's loss, which
        reads it again."""
        bucket = self._buckets[number]
        if not bucket.plan.resident and not self._users[number]:
            if not bucket.plan.outside_layers or torch._C._current_graph_task_id() < 0:
                return self.absent(parameter)
            self.fetch(number)
        self._arrive(number)
        return parameter

    def unhook(self) -> None:
        """Leave the modules without hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _hook(self, stage: nn.Module) -> None:
        """Make the stage's units fetch, wait for and release their buckets."""
        owner = {member.parameter: n for n, bucket in enumerate(self._buckets) for member in bucket.members}
        units = stage_units(stage)
        needed = [list(dict.fromkeys(owner[p] for p in parameters if p in owner)) for _, parameters in units]
        order = Gathering(needed, [bucket.plan for bucket in self._buckets], self)
        for unit, (module, _) in enumerate(units):
            releases, layer = bool(order.absent[unit]), order.layers[unit]
            enter = self._entering(order, unit, needed[unit], releases and layer)
            self._hooks.append(module.register_forward_pre_hook(enter))
            if releases:
                leave = self._leaving(order, unit, needed[unit], layer)
                self._hooks.append(module.register_forward_hook(leave))
            has_tensor = any(self._buckets[number].members[0].given for number in order.absent[unit])
            if releases and (self._views or has_tensor):
                self._save_places(module, order.absent[unit])

    def _entering(self, order: Gathering, unit: int, needed: Sequence[int], layer: bool) -> Any:
        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            order.enter(unit)
            for number in needed:
                self._arrive(number)
            if layer and arguments and isinstance(arguments[0], Tensor) and arguments[0].requires_grad:
                # When the gradient of the input is there, the layer's own backward is over.
                arguments[0].register_hook(lambda _: order.leave(unit))

        return enter

    def _leaving(self, order: Gathering, unit: int, needed: Sequence[int], layer: bool) -> Any:
        def turn(_: Tensor) -> None:
            order.turn(unit)
            for number in needed:
                self._arrive(number)

        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            order.leave(unit)
            for tensor in _tensors(output) if layer else ():
                if tensor.requires_grad:
                    tensor.register_hook(turn)

        return leave

    def _save_places(self, module: nn.Module, absent: Sequence[int]) -> None:
        """Make autograd save places in buckets in place of weights, while the module runs.

        What it saves by itself, such as the transpose of a linear layer's weight, is a view of a buffer that
        holds other weights before the backward pass comes.
        """
        running: list[saved_tensors_hooks] = []

        def pack(tensor: Tensor) -> Any:
            for number in absent:
                whole = self._buckets[number].whole
                if whole is not None and _shares_memory(tensor, whole):
                    return number, tensor.shape, tensor.stride(), tensor.storage_offset()
            return tensor

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            number, *place = saved
            self.fetch(number)
            self._arrive(number)
            whole = self._buckets[number].whole
            assert whole is not None
            return whole.as_strided(*place)

        def begin(*_: Any) -> None:
            running.append(saved_tensors_hooks(pack, unpack))
            running[-1].__enter__()

        def end(*_: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        self._hooks += [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end, prepend=True, always_call=True),
        ]


def _shares_memory(tensor: Tensor, whole: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.dtype != whole.dtype:
        return False
    return memory_of(tensor) == memory_of(whole)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns; those in other objects are ignored."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping) or is_dataclass(value):
        members = value if isinstance(value, Mapping) else vars(value)
        yield from _tensors(list(members.values()))


_NEVER_CALLED = (nn.ModuleDict, nn.ModuleList)
_CONTAINERS = (*_NEVER_CALLED, nn.Sequential)


def stage_units(stage: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """The parts of a stage whose parameters are needed together, in the order of the forward pass, each with
    its parameters: the elements of its containers (layers), and the modules beside them."""
    parameters = [*stage.parameters(recurse=False), *external(stage)]
    units: list[tuple[nn.Module, list[nn.Parameter]]] = []
    for child in stage.children():
        if isinstance(child, _CONTAINERS):
            units += _elements(child)
        elif isinstance(child, nn.ParameterList | nn.ParameterDict):
            parameters += child.parameters()
        elif any(isinstance(module, _CONTAINERS) for module in child.modules()):
            units += stage_units(child)
        else:
            units.append((child, _needed(child)))
    return [(stage, parameters), *units] if parameters else units


def _elements(container: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    for element in container.children():
        if isinstance(element, _NEVER_CALLED):
            yield from _elements(element)
        else:
            yield element, _needed(element)


def external(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of other modules that a module has declared to use, as ``external_parameters``."""
    return list(getattr(module, "external_parameters", ()))


def _needed(module: nn.Module) -> list[nn.Parameter]:
    used = (parameter for submodule in module.modules() for parameter in external(submodule))
    return list(dict.fromkeys([*module.parameters(), *used]))
