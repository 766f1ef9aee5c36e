"""Users' linear layers and embeddings as tensor-parallel ones.

A module stays what it is, with its name, attributes and hooks: its parameters become this rank's shards, and
its class one that computes with them (:func:`convert`), which is also a subclass of the class that it had.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexad.comm import all_gather
from hexad.parallel.contributions import attached
from hexad.parallel.inventory import Parameter, Position
from hexad.parallel.sharding import Shard, ShardedModule
from hexad.parallel.tensor import regions
from hexad.topology.mesh import Axis, Mesh

ATTRIBUTES = ("shard", "declarations", "mesh", "inputs", "gathers", "splits", "second")
"""Attributes that sharded modules have in addition to their original ones."""


class Converted(ShardedModule):
    """A user's module, some of whose parameters are shards. Its ``state_dict`` is that of the whole module,
    which all tensor ranks gather together, and ``load_state_dict`` takes that one.

    Attributes:
        mesh: of the run.
        inputs: of all layers of the model.
    """

    mesh: Mesh
    inputs: SharedInput

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. In a plain loop, also sum the gradients of which each tensor rank has a part."""
        for name, declaration in self.declarations.items():
            parameter = self._parameters[name] if declaration.weights[0].partial else None
            if parameter is not None and parameter.requires_grad and not hasattr(parameter, "sums_gradient"):
                sum_gradient(parameter, self.shard)
        return super().__call__(*args, **kwargs)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for weight, parts in self._by_weight().items() if not keep_vars else ():
            for name in parts:
                destination.pop(f"{prefix}{name}", None)
            destination[f"{prefix}{weight}"] = self._complete(parts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        errors: list[str] = others[-1]
        for weight, parts in self._by_weight().items():
            key = f"{prefix}{weight}"
            whole = state_dict.get(key)
            if whole is None:
                continue
            rectangle = next(iter(parts.values())).pieces(self.shard.positions)[0][1]
            if tuple(whole.shape) == rectangle.shape:
                state_dict |= {f"{prefix}{name}": self._part(whole, name, parts[name]) for name in parts}
            else:
                errors.append(f"{key}: found shape {tuple(whole.shape)}, the model has {rectangle.shape}")
                state_dict |= {f"{prefix}{name}": self.get_parameter(name) for name in parts}
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _by_weight(self) -> dict[str, dict[str, Parameter]]:
        """Name of each whole tensor -> the parameters that hold parts of it."""
        weights: dict[str, dict[str, Parameter]] = {}
        for name, declaration in self.declarations.items():
            weights.setdefault(declaration.weights[0].name, {})[name] = declaration
        return weights

    def _complete(self, parts: Mapping[str, Parameter]) -> Tensor:
        """A whole tensor, gathered from the ranks."""
        axis, whole = self.shard.tensor, None
        for name, declaration in parts.items():
            values = self.get_parameter(name).detach()
            if not self._divided(declaration):
                return values
            shards = all_gather(values.contiguous()[None], axis)
            for rank, shard in enumerate(shards):
                for start, rectangle, _ in declaration.pieces({"tensor": Position(rank, axis.size)}):
                    whole = values.new_empty(rectangle.shape) if whole is None else whole
                    part = shard.narrow(0, start, rectangle.sizes[0])
                    whole[rectangle.slices] = part[tuple(map(slice, rectangle.sizes))]
        assert whole is not None
        return whole

    def _divided(self, declaration: Parameter) -> bool:
        return "tensor" in declaration.weights[0].divided

    def _part(self, whole: Tensor, name: str, declaration: Parameter) -> Tensor:
        part = torch.zeros_like(self.get_parameter(name), dtype=whole.dtype, device=whole.device)
        return fill(part, whole, declaration, self.shard)


@torch.no_grad()
def fill(part: Tensor, whole: Tensor, declaration: Parameter, shard: Shard) -> Tensor:
    """Set this rank's part of a parameter, in place, from the whole tensor; returns it. Padding stays."""
    for start, rectangle, _ in declaration.pieces(shard.positions):
        rows = part.narrow(0, start, rectangle.sizes[0])
        rows[tuple(map(slice, rectangle.sizes))] = whole[rectangle.slices]
    return part


def convert(module: nn.Module, kind: Any, shard: Shard, **attributes: Any) -> None:
    """Give a module another class, in place: ``kind``, and a subclass of its own class where that is not the
    one that ``kind`` replaces."""
    vars(module).update(shard=shard, declarations={}, **attributes)
    original: Any = type(module)
    module.__class__ = class_of(original, kind)


@cache
def class_of(base: type[Any], kind: type[Any]) -> type[Any]:
    """``kind``, or a subclass of a module's own class whose base class computes as ``kind``."""
    if issubclass(kind, base):
        return kind
    return type(f"{kind.__name__}_{base.__name__}", (base, kind), {"__module__": __name__})


def declare(
    module: nn.Module, name: str, declaration: Parameter, whole: Tensor, done: dict[Tensor, Parameter]
) -> None:
    """Give a parameter of a converted module this rank's shard; optimizers that have it keep it.

    Args:
        module: see :func:`convert`.
        name: of the parameter; one that the module lacks is made.
        declaration: of what the rank holds; its weights have the name of the whole tensor.
        whole: the values of which it is a shard.
        done: the parameters that have theirs, with what they hold: several modules may share one.
    """
    assert isinstance(module, ShardedModule)
    if name not in module._parameters:
        trained = module.get_parameter(declaration.weights[0].name).requires_grad
        module.register_parameter(name, nn.Parameter(torch.empty_like(whole), trained))
    parameter = module.get_parameter(name)
    if parameter in done:
        module.declarations[name] = done[parameter]
        return
    weights = tuple(
        replace(weight, decay=whole.dim() > 1, given=True, frozen=not parameter.requires_grad)
        for weight in declaration.weights
    )
    done[parameter] = module.declarations[name] = declaration = replace(declaration, weights=weights)
    if weights[0].divided:
        shape = declaration.local_shape(module.shard.positions)
        part = torch.zeros(shape, dtype=whole.dtype, device=whole.device)
        parameter.data = part if whole.is_meta else fill(part, whole, declaration, module.shard)


def sum_gradient(parameter: nn.Parameter, shard: Shard) -> None:
    """Sum the gradient of a parameter, of which each tensor rank computes a part, in a plain loop; an engine
    does so once per step."""
    reference = weakref.ref(parameter)

    def hook(gradient: Tensor) -> Tensor:
        known = reference()
        return gradient if known is None or attached(known) else regions.total(gradient, shard.tensor)

    parameter.register_hook(hook)
    parameter.sums_gradient = True  # type: ignore[attr-defined]  # copies of it lack this, and the hook


class SharedInput:
    """The input of linear layers that are called with one tensor, one after the other (queries, keys and
    values; gate and up): made ready once, so that its gradient is summed, and in sequence parallel its tokens
    are gathered, once.

    Args:
        shard: of this rank.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def ready(self, x: Tensor) -> Tensor:
        """All tokens of ``x``, the same on all ranks, whose gradient is a sum over them."""
        axis, recorded = self._shard.tensor, torch.is_grad_enabled() and x.requires_grad
        if not recorded or torch.compiler.is_compiling():
            return self._whole(x, axis)
        last = self._last
        if last is None or last[0]() is not x or last[1] != x._version:
            complete = self._whole(x, axis)
            complete.register_hook(self._forget)  # the backward pass needs no further copy
            self._last = last = weakref.ref(x), x._version, complete
        return last[2]

    def _whole(self, x: Tensor, axis: Axis) -> Tensor:
        return regions.gathered_tokens(x, axis) if self._shard.sequence else regions.copied(x, axis)

    def _forget(self, _: Tensor) -> None:
        self._last = None


class ColumnLinear(Converted, nn.Linear):
    """``y = x W^T + b``, of which each tensor rank computes some of the outputs.

    Attributes:
        gathers: every rank gets all outputs.
    """

    gathers: bool

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` -> ``[..., out_features (/ size)]``; in sequence parallel ``[batch, tokens /
        size, in_features]`` -> ``[batch, tokens, ...]``."""
        y = F.linear(self.inputs.ready(input), self.weight, self.bias)
        return regions.gathered_last(y, self.shard.tensor)[..., : self.out_features] if self.gathers else y


class RowLinear(Converted, nn.Linear):
    """``y = x W^T + b``, to which each tensor rank adds what comes from some of the inputs.

    Attributes:
        splits: the input is whole, and a rank takes its part.
        second: the weight is in two parameters, of which each has some of the columns of one half.
    """

    splits: bool
    second: bool
    weight_1: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features (/ size)]`` -> ``[..., out_features]``; in sequence parallel ``[batch, tokens,
        ...]`` -> ``[batch, tokens / size, out_features]``."""
        axis = self.shard.tensor
        weights = [self.weight, self.weight_1] if self.second else [self.weight]
        inputs = input.chunk(len(weights), dim=-1)
        if self.splits:
            inputs = tuple(regions.split_last(part, axis) for part in inputs)
        first, *others = (F.linear(part, weight) for part, weight in zip(inputs, weights))
        partial = sum(others, start=first)
        y = regions.summed_tokens(partial, axis) if self.shard.sequence else regions.summed(partial, axis)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # autocast computes in fewer bits


class RowEmbedding(Converted, nn.Embedding):
    """A table whose rows are divided over the tensor ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., embedding_dim]``; in sequence parallel ``[batch, tokens]`` -> ``[batch,
        tokens / size, embedding_dim]``."""
        axis, count = self.shard.tensor, len(self.weight)
        first = axis.rank * count
        if input.device.type == "cpu" and input.numel():  # a GPU's kernel would have to be waited for
            low, high = (int(number) for number in input.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"found the index {low if low < 0 else high} in a table of {self.num_embeddings}"
                )
        rows = input - first
        elsewhere = (rows < 0) | (rows >= count)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < count else None
        partial = F.embedding(rows.masked_fill(elsewhere, 0), self.weight, padding)
        partial = partial.masked_fill(elsewhere[..., None], 0)
        return regions.summed_tokens(partial, axis) if self.shard.sequence else regions.summed(partial, axis)


class ColumnEmbedding(Converted, nn.Embedding):
    """A table whose columns are divided over the tensor ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., embedding_dim]``."""
        y = F.embedding(input, self.weight, self.padding_idx)
        return regions.gathered_last(y, self.shard.tensor)
