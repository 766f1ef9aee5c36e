"""Users' linear layers and embeddings as tensor-parallel ones.

A module stays what it is, with its name, attributes and hooks: its parameters become this rank's shards, and
its class one that computes with them (:func:`convert`), which is also a subclass of the class that it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hexad.comm import all_gather
from hexad.config import HexadError
from hexad.parallel.contributions import attached
from hexad.parallel.inventory import Parameter, Position
from hexad.parallel.sharding import Shard, ShardedModule
from hexad.parallel.tensor import regions
from hexad.parallel.tensor.embedding import embed
from hexad.parallel.tensor.linear import column_linear, row_linear
from hexad.topology.mesh import Mesh

Module = TypeVar("Module", bound=nn.Module)


class Converted(ShardedModule):
    """A user's module, some of whose parameters are shards. Its ``state_dict`` is that of the whole module,
    which all tensor ranks gather together, and ``load_state_dict`` takes that one.

    Attributes:
        mesh: of the run.
    """

    mesh: Mesh

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for weight, parts in self._by_weight().items() if not keep_vars else ():
            for name in parts:
                destination.pop(f"{prefix}{name}", None)
            destination[f"{prefix}{weight}"] = self._complete(parts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for weight, parts in self._by_weight().items():
            whole = state_dict.get(f"{prefix}{weight}")
            rectangle = next(iter(parts.values())).pieces(self.shard.positions)[0][1]
            if whole is not None and tuple(whole.shape) == rectangle.shape:
                state_dict |= {f"{prefix}{name}": self._part(whole, name, parts[name]) for name in parts}
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
        """This rank's part of a whole tensor."""
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
    own: Any = type(module)
    module.__class__ = _class(own, kind)


@cache
def _class(own: type[Any], kind: type[Any]) -> type[Any]:
    if issubclass(kind, own):
        return kind
    return type(f"{kind.__name__}_{own.__name__}", (own, kind), {"__module__": __name__})


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
    if weights[0].partial:
        sum_gradient(parameter, module.shard)


def sum_gradient(parameter: nn.Parameter, shard: Shard) -> None:
    """Sum the gradient of a parameter, of which each tensor rank computes a part, in a plain loop; an engine
    does so once per step."""

    def hook(gradient: Tensor) -> Tensor:
        return gradient if attached(parameter) else regions.total(gradient, shard.tensor)

    if parameter.requires_grad:
        parameter.register_hook(hook)


def _in_common_format(x: Tensor, *weights: Tensor | None) -> tuple[AbstractContextManager[Any], list[Any]]:
    """Under autocast: the operands in its format, and a context without it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:  # which autocast leaves as it is
        return nullcontext(), [x, *weights]
    dtype = torch.get_autocast_dtype(kind)
    cast = [None if tensor is None else tensor.to(dtype) for tensor in (x, *weights)]
    return torch.autocast(kind, enabled=False), cast


def _rows(x: Tensor, sequence: bool) -> Tensor:
    """``[..., h]`` -> ``[tokens, h]``; in sequence parallel ``[batch, tokens, h]``, by position first: the
    ranks' tokens are runs of positions."""
    if sequence:
        if x.dim() != 3:
            raise HexadError(
                f"sequence_parallel: found an input of shape {tuple(x.shape)}; expected three dims"
            )
        x = x.transpose(0, 1)
    return x.reshape(-1, x.shape[-1]).contiguous()


def _restored(y: Tensor, shape: torch.Size, sequence: bool) -> Tensor:
    """The inverse of :func:`_rows` for an input of this shape; in sequence parallel there may be another
    number of positions."""
    if sequence:
        return y.unflatten(0, (-1, shape[0])).transpose(0, 1)
    return y.reshape(*shape[:-1], y.shape[-1])


class ColumnLinear(Converted, nn.Linear):
    """``y = x W^T + b``, of which each tensor rank computes some of the outputs.

    Attributes:
        gathers: every rank gets all outputs.
    """

    gathers: bool

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in_features]`` -> ``[..., out_features (/ size)]``; in sequence parallel ``[batch, tokens /
        size, in_features]`` -> ``[batch, tokens, ...]``."""
        plain, (x, weight, bias) = _in_common_format(input, self.weight, self.bias)
        sequence = self.shard.sequence
        with plain:
            y = column_linear(_rows(x, sequence), weight, bias, self.shard)
            y = _restored(y, input.shape, sequence)
            return (
                regions.gathered_last(y, self.shard.tensor)[..., : self.out_features] if self.gathers else y
            )


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
        weights = [self.weight, self.weight_1] if self.second else [self.weight]
        plain, (x, bias, *weights) = _in_common_format(input, self.bias, *weights)
        sequence = self.shard.sequence
        with plain:
            inputs = x.chunk(len(weights), dim=-1)
            if self.splits:
                inputs = tuple(regions.split_last(part, self.shard.tensor) for part in inputs)
            parts = [row_linear(_rows(x, sequence), w, self.shard) for x, w in zip(inputs, weights)]
            y = _restored(sum(parts[1:], start=parts[0]), input.shape, sequence)
            return y if bias is None else y + bias


class RowEmbedding(Converted, nn.Embedding):
    """A table whose rows are divided over the tensor ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., embedding_dim]``; in sequence parallel ``[batch, tokens]`` -> ``[batch,
        tokens / size, embedding_dim]``."""
        sequence = self.shard.sequence
        tokens = input.t() if sequence else input
        y = embed(tokens.flatten(), self.weight, self.shard)
        y = y.unflatten(0, (-1, *tokens.shape[1:])) if tokens.dim() else y[0]
        y = y.transpose(0, 1) if sequence else y
        return self._without_padding(input, y)

    def _without_padding(self, input: Tensor, y: Tensor) -> Tensor:
        """No gradient for the padding's row."""
        if self.padding_idx is None or not y.requires_grad:
            return y
        padding = input == self.padding_idx
        if self.shard.sequence:
            padding = padding.chunk(self.shard.tensor.size, dim=1)[self.shard.tensor.rank]
        return torch.where(padding[..., None], y.detach(), y)


class ColumnEmbedding(Converted, nn.Embedding):
    """A table whose columns are divided over the tensor ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., embedding_dim]``."""
        y = F.embedding(input, self.weight, self.padding_idx)
        return regions.gathered_last(y, self.shard.tensor)
