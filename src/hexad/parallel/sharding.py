"""How each parameter relates to the model's global tensors: declared where it is made, never inferred.

A parallel layer registers its parameters with :meth:`ShardedModule.declare`. Initialisation, flat buffers,
gradient norms, checkpoints and tests all read these declarations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from hexad.topology.mesh import Axis

_BLOCK_ROWS = 256


@dataclass(frozen=True)
class Placement:
    """Where and how a layer holds its share.

    Attributes:
        axis: the tensor axis.
        sequence: activations between the parallel layers are divided over tokens (sequence parallel).
        dtype: of parameters and activations.
        device: of both.
        deferred: parameters have no memory of their own: an engine puts them into its buckets, so that a
            model need never exist whole on a rank that keeps only a share of it.
        fp8: linear layers multiply in 8 bits, see :mod:`hexad.parallel.tensor.fp8`.
    """

    axis: Axis
    sequence: bool
    dtype: torch.dtype
    device: torch.device
    deferred: bool = False
    fp8: bool = False

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter."""
        if self.deferred:
            return nn.Parameter(absent(torch.Size(shape), self.dtype, self.device))
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


def absent(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Stands for values that are not on this rank: one NaN that looks like a tensor of ``shape``.

    Whoever computes with it by mistake gets NaN, not stale numbers.
    """
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


@dataclass(frozen=True)
class Piece:
    """A rectangle of one global tensor inside a local parameter.

    Attributes:
        name: of the global tensor; in a declaration relative to the module, from
            :func:`declared_parameters` fully qualified.
        shape: global shape (without padding).
        offset: where this rank's rectangle begins in the global tensor.
        sizes: the rectangle's shape; zero rows where padding has left this rank nothing.
        start: first row of the rectangle in the local parameter.
        std: standard deviation of its initial values; 0 means the constant ``fill``.
        fill: initial value where ``std`` is 0.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0
    std: float = 0.0
    fill: float = 0.0

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of ``parameter`` (or of anything of its shape) that holds this piece."""
        return parameter.narrow(0, self.start, self.sizes[0])

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of the global tensor that this piece holds.

        Raises:
            ValueError: ``whole`` has another shape.
        """
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"{self.name}: found shape {tuple(whole.shape)}, expected {self.shape}")
        for dim, (offset, size) in enumerate(zip(self.offset, self.sizes)):
            whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
        return whole


@dataclass(frozen=True)
class Declaration:
    """What a parameter is.

    Attributes:
        pieces: the global tensors it holds parts of. Fused projections have several.
        sharded: divided over the tensor axis; otherwise every tensor rank holds the same values.
        partial: not sharded, but each tensor rank computes only part of the gradient, so that the parts must
            be summed over the tensor axis.
        decay: whether weight decay applies.
        tied: another pipeline rank holds the same values for another use (a tied embedding), so that the
            gradients of both must be summed.
        copy: the second one of such a pair, which the gradient norm leaves out.
    """

    pieces: tuple[Piece, ...]
    sharded: bool
    partial: bool
    decay: bool
    tied: bool = False
    copy: bool = False


class ShardedModule(nn.Module):
    """A module that declares how its parameters are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.declarations: dict[str, Declaration] = {}

    def declare(self, name: str, parameter: nn.Parameter, declaration: Declaration) -> None:
        """Register ``parameter`` as ``self.<name>`` with its declaration."""
        self.register_parameter(name, parameter)
        self.declarations[name] = declaration


def replicated(
    name: str,
    shape: tuple[int, ...],
    *,
    partial: bool,
    decay: bool = False,
    std: float = 0.0,
    fill: float = 0.0,
) -> Declaration:
    """Declare a parameter that every tensor rank holds whole."""
    piece = Piece(name, shape, (0,) * len(shape), shape, std=std, fill=fill)
    return Declaration((piece,), sharded=False, partial=partial, decay=decay)


@dataclass(frozen=True)
class DeclaredParameter:
    """A parameter found in a model: its first name, itself, its declaration, and how many modules use it."""

    name: str
    parameter: nn.Parameter
    declaration: Declaration
    uses: int


def declared_parameters(*models: nn.Module) -> list[DeclaredParameter]:
    """Every parameter of the models (stages) once, in order of registration, pieces fully qualified.

    A piece name that begins with a dot is relative to the module's parent: ``attention.qkv`` with the piece
    ``.q.weight`` is ``attention.q.weight``.

    Raises:
        TypeError: a parameter that no module declares.
    """
    found: dict[nn.Parameter, DeclaredParameter] = {}
    for path, module in chain.from_iterable(model.named_modules() for model in models):
        for name, parameter in module.named_parameters(recurse=False):
            declaration = getattr(module, "declarations", {}).get(name)
            if parameter in found:
                known = found[parameter]
                found[parameter] = DeclaredParameter(known.name, parameter, known.declaration, known.uses + 1)
                continue
            if declaration is None:
                raise TypeError(f"parameter {path}.{name} does not declare how it is sharded")
            pieces = tuple(_qualified(piece, path) for piece in declaration.pieces)
            full = replace(declaration, pieces=pieces)
            found[parameter] = DeclaredParameter(f"{path}.{name}", parameter, full, 1)
    return list(found.values())


def _qualified(piece: Piece, path: str) -> Piece:
    if piece.name.startswith("."):
        name = (path.rpartition(".")[0] + piece.name).removeprefix(".")
    else:
        name = f"{path}.{piece.name}"
    return replace(piece, name=name)


@torch.no_grad()
def initialise(parameters: Iterable[DeclaredParameter], seed: int) -> None:
    """Fill parameters from (seed, global name) alone.

    All layouts and devices agree bit for bit. Values are drawn on the CPU in float32, in blocks of rows that
    each have a generator of their own: a rank draws only the blocks that it holds rows of.
    """
    for declared in parameters:
        declared.parameter.zero_()
        for piece in declared.declaration.pieces:
            local = piece.local(declared.parameter)
            if piece.std == 0.0:
                local.fill_(piece.fill)
                continue
            for first, block in _blocks(piece, seed):
                rows = local.narrow(0, first, block.shape[0])
                rows.copy_(block)


def _blocks(piece: Piece, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first local row, values) of each block of rows that the piece holds."""
    begin, end = piece.offset[0], piece.offset[0] + piece.sizes[0]
    columns = slice(piece.offset[1], piece.offset[1] + piece.sizes[1])
    for block in range(begin // _BLOCK_ROWS, -(-end // _BLOCK_ROWS)):
        top = block * _BLOCK_ROWS
        rows = min(_BLOCK_ROWS, piece.shape[0] - top)
        digest = hashlib.blake2b(f"{seed}/{piece.name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(rows, piece.shape[1]).normal_(0.0, piece.std, generator=generator)
        low, high = max(begin, top), min(end, top + rows)
        yield low - begin, values[low - top : high - top, columns]


@torch.no_grad()
def load_global(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Fill every parameter with its slices of whole global tensors, given by name.

    Raises:
        KeyError: a tensor is missing. ValueError: one has another shape.
    """
    for declared in declared_parameters(model):
        declared.parameter.zero_()
        for piece in declared.declaration.pieces:
            piece.local(declared.parameter).copy_(piece.slice_of(tensors[piece.name]))
