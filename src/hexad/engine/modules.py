"""Facts that all ranks know of an engine's modules: grids, ties, names, the number format that all devices
compute, and the values of plain modules that no optimizer updates.

Plain modules are replicated over all ranks of their stage. Parameters and buffers begin with the values of
the first of these ranks; checkpoints hold them (buffers, if they are persistent). During training, buffers
are not synchronised. Parameters that do not require gradients when the engine is made stay as they are,
complete on every rank at any ``parallel.zero``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from operator import itemgetter, or_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hexad.checkpoint.tensor_file import Chunk, dtype_name
from hexad.comm import agreed, broadcast, merged
from hexad.config import Config, HexadError
from hexad.parallel.inventory import Grid, Position
from hexad.parallel.rectangle import Rectangle
from hexad.parallel.sharding import Declared, ShardedModule, stage_parameters
from hexad.planning import with_dtype
from hexad.topology.cluster import device_name, has_bf16
from hexad.topology.mesh import Axis, Mesh


def with_common_dtype(config: Config, mesh: Mesh) -> Config:
    """The configuration with bf16 for ``precision.dtype: auto`` if every rank's device computes it in
    hardware, else fp32. All ranks call this together."""
    if config.precision.dtype != "auto":
        return config
    return with_dtype(config, merged(has_bf16(mesh.device), mesh.world, lambda first, other: first and other))


def dtype_line(configured: Config, resolved: Config, mesh: Mesh) -> str | None:
    """The line that reports a run's format at the start: the value of ``auto``, or that this rank's device
    computes 16 bits in software; None where there is nothing to say."""
    dtype, device = resolved.precision.dtype, device_name(mesh.device)
    if configured.precision.dtype == "auto":
        if dtype == "bf16":
            return f"precision.dtype auto: bf16, which {device} computes in hardware"
        lacks = device if not has_bf16(mesh.device) else "the device of another rank"
        return f"precision.dtype auto: fp32, because {lacks} does not compute bf16 in hardware"
    if dtype == "bf16" and not has_bf16(mesh.device):
        return f"precision.dtype bf16: {device} does not compute it in hardware; fp32 is faster here"
    return None


@dataclass(frozen=True)
class Untrained:
    """A plain module's buffer or frozen parameter: every rank that holds the stage has all of it.

    Attributes:
        stage: number of the pipeline stage.
        name: in checkpoints.
        module, attribute: where it is found; a module may replace its buffers.
        persistent: it belongs to the module's state.
    """

    stage: int
    name: str
    module: nn.Module
    attribute: str
    persistent: bool = True

    @property
    def tensor(self) -> Tensor:
        """The current values."""
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


class Tie(NamedTuple):
    """The tie of a user's parameter to those of other stages.

    Attributes:
        name: of what they have in common.
        copy: this is not the first of these stages.
        weight: of the tensor in checkpoints, where the stages have other names for it.
    """

    name: str
    copy: bool
    weight: str = ""


Ties = Mapping[nn.Parameter, Tie]
"""Users' parameters that several stages have alike."""

Entries = list[tuple[str, str]]
"""Name and description of everything that a stage's plain modules hold."""


class Facts(NamedTuple):
    """Facts about all stages that every rank must know.

    Attributes:
        grids: of their weights.
        ties: (what it has in common with other stages, number of the stage) of their parameters.
        trains: a parameter is trained.
    """

    grids: frozenset[Grid] = frozenset()
    ties: frozenset[tuple[str, int]] = frozenset()
    trains: bool = False

    def plus(self, other: Facts) -> Facts:
        """The facts of both."""
        return Facts(self.grids | other.grids, self.ties | other.ties, self.trains or other.trains)


@dataclass(frozen=True)
class Modules:
    """The modules of a rank's stages, and the facts about other ranks' that it needs to create the same
    process groups.

    Attributes:
        held: this rank's parameters that are updated, and declared ones that are frozen, each with the number
            of its stage.
        untrained: this rank's plain values that are not updated.
        grids: of all ranks' weights, in order.
        ties: name of what stages have in common -> these stages, of all ranks.
        copies: the axes whose ranks hold the same plain values.
        device: of this rank.
    """

    held: list[tuple[int, Declared]]
    untrained: list[Untrained]
    grids: list[Grid]
    ties: dict[str, list[int]]
    copies: tuple[Axis, ...]
    device: torch.device

    @classmethod
    def agreed(
        cls,
        stages: Mapping[int, nn.Module],
        placement: Sequence[int],
        mesh: Mesh,
        training: bool = True,
        groups: Sequence[Mapping[str, Any]] | None = None,
        ties: Ties = MappingProxyType({}),
        known: Facts | None = None,
    ) -> Modules:
        """Find them; all ranks of the mesh call this together.

        Plain values are named as in their stage, and ``stages.<number>.`` goes before all their names where
        two stages would use the same one.

        Args:
            stages: of this rank, by number.
            placement: the pipeline rank of every stage.
            mesh: of the run.
            training: refuse stages in which nothing is trained.
            groups: of a ``torch.optim`` optimizer; a parameter's bucket keeps the number of its group.
            ties: plain parameters of several stages.
            known: of other ranks' stages, where these do not exist (a dry run).

        Raises:
            HexadError: other stages than the plan's, parameters that cannot be trained, or plain modules that
                differ on the ranks of a stage; the same on all ranks.
        """
        everything = [
            (stage, _tied(placed(declared, mesh.tensor), ties))
            for stage, declared in stage_parameters(stages)
        ]
        untrained = _untrained(
            stages, {declared.parameter for _, declared in everything if not declared.plain}
        )
        parameters = [
            (stage, declared)
            for stage, declared in everything
            if declared.parameter.requires_grad or not declared.plain
        ]
        agreed(lambda: _check(stages, placement, mesh.pipeline, everything), mesh.world)
        if groups is not None:
            parameters = agreed(lambda: _grouped(parameters, groups), mesh.world)
        local_facts = Facts(
            frozenset(declared.declaration.weights[0].grid for _, declared in parameters),
            frozenset((d.declaration.tied, stage) for stage, d in parameters if d.declaration.tied),
            any(declared.parameter.requires_grad for _, declared in parameters),
        )
        facts = merged(local_facts if known is None else local_facts.plus(known), mesh.world, Facts.plus)
        tied = sorted(facts.ties)
        stages_of = {name: [number for other, number in tied if other == name] for name, _ in tied}
        if training and not facts.trains:
            raise HexadError("stages: found no parameter that requires a gradient; there is nothing to train")
        if _names_collide(_entries(stages, parameters, untrained), mesh.world):
            parameters = [
                (n, _renamed(declared, n) if declared.plain else declared) for n, declared in parameters
            ]
            untrained = [replace(value, name=f"stages.{value.stage}.{value.name}") for value in untrained]
        copies = (mesh.gradient_axis(), *mesh.model_axes())
        return cls(parameters, untrained, sorted(facts.grids), stages_of, copies, mesh.device)

    def broadcast(self, tensors: Iterable[Tensor], *axes: Axis) -> None:
        """Give plain tensors the values they have on the first rank of their stage, as in PyTorch's DDP; or
        of other axes."""
        axes = axes or self.copies
        for tensor in tensors:
            values = tensor.data.to(self.device).contiguous()
            for axis in axes if values.numel() else ():
                broadcast(values.view(-1).view(torch.uint8), axis)  # as bytes, so in any format
            tensor.data = values

    def broadcast_ties(self, ties: Mapping[str, Axis]) -> None:
        """Give users' parameters that stages have in common the values of the first of these stages."""
        for name in sorted(ties):  # in one order on all ranks, whatever that of their stages is
            copies = (
                declared for _, declared in self.held if declared.given and declared.declaration.tied == name
            )
            self.broadcast((declared.parameter for declared in copies), ties[name])

    def broadcast_untrained(self, dtype: torch.dtype) -> None:
        """Broadcast what is not trained (:meth:`broadcast`); frozen parameters are given the model's
        ``dtype``, buffers keep theirs."""
        for tensor in (value.tensor for value in self.untrained):
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
            self.broadcast([tensor])

    def chunks(self) -> list[Chunk]:
        """Untrained values as a checkpoint holds them, complex ones as pairs of real numbers. Data ranks may
        have different ones, as of running averages: the first rank's are saved."""
        chunks, first = [], not any(axis.rank for axis in self.copies)
        for value in self.untrained:
            values = value.tensor.detach()
            values = torch.view_as_real(values) if values.is_complex() else values
            values = values if values.dim() else values.unsqueeze(0)
            if value.persistent and values.numel():
                rectangle = Rectangle.whole(f"model.{value.name}", tuple(values.shape))
                chunks.append(Chunk(rectangle, values, (0, 1) if first else None))
        return chunks


def _untrained(stages: Mapping[int, nn.Module], declared: set[nn.Parameter]) -> list[Untrained]:
    """The plain values of the stages that no optimizer updates, each once: none of the ``declared`` ones."""
    untrained: dict[Tensor, Untrained] = {}
    for number, stage in stages.items():
        for path, module in stage.named_modules():
            sharded = isinstance(module, ShardedModule)
            parameters = {
                name: parameter
                for name, parameter in module.named_parameters(recurse=False)
                if not parameter.requires_grad and parameter not in declared
            }
            buffers = {} if sharded else dict(module.named_buffers(recurse=False))
            for name, tensor in {**parameters, **buffers}.items():
                kept = name not in module._non_persistent_buffers_set
                where = f"{path}.{name}".removeprefix(".")
                untrained.setdefault(tensor, Untrained(number, where, module, name, kept))
    return list(untrained.values())


def _check(
    stages: Mapping[int, nn.Module],
    placement: Sequence[int],
    pipeline: Axis,
    parameters: Sequence[tuple[int, Declared]],
) -> None:
    """Refuse stages that this rank cannot train."""
    expected = [number for number, rank in enumerate(placement) if rank == pipeline.rank]
    if sorted(stages) != expected or max(placement) >= pipeline.size:
        raise HexadError(
            f"stages: found numbers {sorted(stages)} on pipeline rank {pipeline.rank} of {pipeline.size}, "
            f"but the plan has {expected} of {len(placement)} stages there; pass these, or another plan"
        )
    for _, declared in parameters:
        name, parameter = declared.declaration.name, declared.parameter
        if not declared.plain and parameter.requires_grad == declared.declaration.frozen:
            raise HexadError(
                f"{name}: found requires_grad {parameter.requires_grad}, but it is declared with frozen "
                f"{declared.declaration.frozen}; declare it as it is trained (Weight.frozen, model.train)"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise HexadError(
                f"{name}: found {parameter.dtype}; train its real and imaginary part as two parameters"
            )


def placed(declared: Declared, tensor: Axis) -> Declared:
    """A plain parameter with this rank's place among the tensor ranks that compute parts of its gradient."""
    if not declared.plain or not declared.declaration.weights[0].partial:
        return declared
    return replace(declared, positions={"tensor": Position(tensor.rank, tensor.size)})


def _tied(declared: Declared, ties: Ties) -> Declared:
    """Give a parameter that other stages have too the unit, and so the bucket, that these stages share."""
    if declared.parameter not in ties:
        return declared
    name, copy, tensor = ties[declared.parameter]
    weights = tuple(
        replace(weight, unit=name, name=tensor or weight.name) for weight in declared.declaration.weights
    )
    return replace(declared, declaration=replace(declared.declaration, weights=weights, tied=name, copy=copy))


def _grouped(
    parameters: Sequence[tuple[int, Declared]], groups: Sequence[Mapping[str, Any]]
) -> list[tuple[int, Declared]]:
    """Number the trained parameters by the optimizer's group that has them."""
    numbers = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
    grouped = []
    for stage, declared in parameters:
        declaration = declared.declaration
        if not declaration.frozen:
            if declared.parameter not in numbers:
                raise HexadError(
                    f"optimizer: found no group with {declaration.name}, which requires a gradient; add it, "
                    "or set requires_grad to False"
                )
            group = numbers[declared.parameter]
            weights = tuple(replace(weight, group=group) for weight in declaration.weights)
            declared = replace(declared, declaration=replace(declaration, weights=weights))
        grouped.append((stage, declared))
    return grouped


def _entries(
    stages: Mapping[int, nn.Module],
    parameters: Sequence[tuple[int, Declared]],
    untrained: Sequence[Untrained],
) -> dict[int, Entries]:
    """The entries of every stage: its plain parameters and those untrained values that checkpoints hold."""
    entries: dict[int, Entries] = {number: [] for number in stages}
    for number, declared in parameters:
        if declared.plain and not declared.declaration.copy:
            entries[number].append((declared.declaration.name, _description(declared.parameter)))
    for value in untrained:
        if value.persistent:
            entries[value.stage].append((value.name, _description(value.tensor)))
    return entries


def _description(tensor: Tensor) -> str:
    trained = "a trained" if tensor.requires_grad else "an untrained"
    return f"{trained} {dtype_name(tensor.dtype)} tensor of shape {tuple(tensor.shape)}"


def _names_collide(stages: Mapping[int, Entries], world: Axis) -> bool:
    """Whether two stages use one name, given this rank's entries; all ranks together. Hashes are compared,
    and entries sent by one rank of each stage only.

    Raises:
        HexadError: ranks hold other plain values of the same stage.
    """
    hashes = {(n, sha256(repr(entries).encode()).digest()): world.rank for n, entries in stages.items()}
    # The lowest rank with each kind of entries of a stage: the first dictionary is that of lower ranks.
    lowest = merged(hashes, world, lambda a, b: b | a)
    ranks: dict[int, list[int]] = {}
    for (number, _), rank in sorted(lowest.items(), key=itemgetter(1)):
        ranks.setdefault(number, []).append(rank)
    differing = [(others[0], number) for number, (_, *others) in ranks.items() if others]
    if differing:
        rank, number = min(differing)
        other = ranks[number][0]
        shown = {world.rank: stages[number]} if world.rank in (other, rank) else {}
        both = merged(shown, world, or_)
        raise HexadError(_difference(number, other, both[other], rank, both[rank]))
    shown = {n: entries for n, entries in stages.items() if entries and ranks[n][0] == world.rank}
    counts = Counter(name for entries in merged(shown, world, or_).values() for name, _ in entries)
    return any(count > 1 for count in counts.values())


def _difference(number: int, other: int, known: Entries, rank: int, entries: Entries) -> str:
    """How the entries of two ranks for one stage differ."""
    there, here = next(
        pair for pair in zip_longest(known, entries, fillvalue=("nothing", "")) if pair[0] != pair[1]
    )
    return (
        f"stages: found {' '.join(here).strip()} on rank {rank} where rank {other} has "
        f"{' '.join(there).strip()} (stage {number}); plain modules are the same on all "
        "ranks of a stage: declare what is sharded (ShardedModule)"
    )


def _renamed(declared: Declared, stage: int) -> Declared:
    """A plain parameter whose name begins with the stage."""
    name = f"stages.{stage}.{declared.declaration.name}"
    weights = tuple(replace(weight, name=name) for weight in declared.declaration.weights)
    return replace(declared, declaration=replace(declared.declaration, name=name, weights=weights))
