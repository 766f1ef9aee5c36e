"""A user's model made tensor-parallel, by a plan of its modules' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hexad.comm import agreed, all_reduce, broadcast
from hexad.config import HexadError
from hexad.parallel.inventory import Parameter, Weight
from hexad.parallel.sharding import Shard, ShardedModule, declared_parameters
from hexad.parallel.tensor import regions
from hexad.topology.mesh import Mesh

from . import layers
from .recorder import LAYERS, LayerStyles
from .styles import Entry, entries
from .trial import Attributes, Trial, set_attributes, tops

Module = TypeVar("Module", bound=nn.Module)
HALVES = 2
"""Parts of a packed layer."""
MISSING = {kind: {"**.mlp.act_fn": "partial"} for kind in ("apertus", "apertus1p5_text")}
"""Entries that the plans of ``transformers`` leave out, by type of model: parameters of an activation
function, of which each rank sees its features."""


def parallelize(module: Module, mesh: Mesh, plan: Mapping[str, str] | None = None) -> Module:
    """Divide a model over the tensor ranks of a mesh, in place; all ranks call this together.

    Each module that the plan names keeps its place, name and attributes, and computes with this rank's shard
    of its weights; what it sends and sums is in its forward and backward pass. So the model trains in a plain
    loop (``.grad`` of every parameter is complete for what the rank holds), in an :class:`hexad.Engine`, and
    under the interfaces. ``state_dict`` and checkpoints are those of the undivided model. Numbers of heads
    and features that are attributes of the modules around become those of a rank, where the model needs it.

    Args:
        module: a model of linear layers and embeddings, the same on all ranks: the values are those of the
            first tensor rank. On ``meta`` it gets no values.
        mesh: of the run; its tensor ranks.
        plan: pattern of names -> style, see :mod:`hexad.conversion.styles`; by default that of a
            ``transformers`` model (``model.tp_plan``).

    Returns:
        the same module.

    Raises:
        HexadError: a plan that the model does not fit, or a forward pass that does not compute with a rank's
            part of heads and features, the same on all ranks, before anything is changed; where the arguments
            of the model are not known, at its first call.
    """
    if not isinstance(mesh, Mesh):
        raise HexadError(f"mesh: found {mesh!r}, expected a hexad.Mesh")
    work = agreed(lambda: _Work.of(module, _entries(module, plan), mesh), mesh.world)
    if mesh.tensor.size == 1:
        return module if any(p.is_meta for p in module.parameters()) else module.to(mesh.device)
    if not any(parameter.is_meta for parameter in module.parameters()):
        for tensor in (*module.parameters(), *module.buffers()):
            values = tensor.data.to(mesh.device).contiguous()
            if values.numel():
                broadcast(values.view(-1).view(torch.uint8), mesh.tensor)
            tensor.data = values
    work.carry_out()
    for path, trial in work.trials:
        trial.at_first_call(module.get_submodule(path))
    return module


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Clip the gradients of a divided model in a plain loop, as ``torch.nn.utils.clip_grad_norm_`` does for
    an undivided one; all tensor ranks together. An engine clips by itself.

    Args:
        module: of :func:`parallelize`; any other module is clipped alone.
        max_norm: of all gradients, those of all shards included.

    Returns:
        the norm before, float32 or wider.
    """
    mesh = mesh_of(module)
    squares: list[list[Tensor]] = [[], []]
    gradients = []
    for declared in declared_parameters(module):
        gradient = declared.parameter.grad
        if gradient is not None:
            gradients.append(gradient)
            wide = torch.promote_types(gradient.dtype, torch.float32)
            divided = bool(declared.declaration.traits(declared.positions).divided)
            squares[divided].append(torch.linalg.vector_norm(gradient, dtype=wide).square())
    if not gradients:
        return torch.zeros(())
    zero = torch.zeros_like((squares[0] + squares[1])[0])
    whole, parts = (torch.stack([zero, *values]).sum() for values in squares)
    norm = (whole + (parts if mesh is None else all_reduce(parts, mesh.tensor))).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def mesh_of(module: nn.Module) -> Mesh | None:
    """The mesh over whose tensor ranks a model has been divided; None if it has not been."""
    return next((part.mesh for part in module.modules() if isinstance(part, layers.Converted)), None)


def _own_plan(module: nn.Module) -> Mapping[str, str]:
    plan: Mapping[str, str] | None = getattr(module, "tp_plan", None)
    if not plan:
        raise HexadError(
            f"plan: found none, and {type(module).__name__} carries no plan of its own (tp_plan); pass "
            "plan={'layers.*.up': 'column', 'layers.*.down': 'row', ...}"
        )
    kind = str(getattr(getattr(module, "config", None), "model_type", ""))
    return {**plan, **MISSING.get(kind, {})}


def _entries(module: nn.Module, plan: Mapping[str, str] | None) -> list[Entry]:
    """The entries of a plan, or of the model's own plan, one for each module and parameter that it names."""
    if not (plan is None or isinstance(plan, Mapping)):
        raise HexadError(
            f"plan: found {plan!r}, expected a mapping of names to styles, or None for the model's"
        )
    styles = plan if plan is not None else _own_plan(module)
    names = [name for name, _ in (*module.named_modules(), *module.named_parameters()) if name]
    chosen = entries(styles, names, strict=plan is not None)
    if not chosen:
        raise HexadError(
            f"plan: found none for {type(module).__name__}; pass plan={{'layers.*.up': 'column', ...}}"
        )
    return chosen


@dataclass(frozen=True)
class _Work:
    """The checked changes to a model's modules.

    Attributes:
        module: the model.
        chosen: the plan's entries.
        mesh: of the run.
        shard: of this rank.
        inputs: of all layers.
        attributes: of modules that have numbers of heads or features: those of this rank.
        trials: of modules that are tried when they are called, with their paths.
    """

    module: nn.Module
    chosen: list[Entry]
    mesh: Mesh
    shard: Shard
    inputs: layers.SharedInput
    attributes: Attributes = field(default_factory=dict)
    trials: Sequence[tuple[str, Trial]] = ()

    @classmethod
    def of(cls, module: nn.Module, chosen: list[Entry], mesh: Mesh) -> _Work:
        """Check the plan against the model.

        Raises:
            HexadError: they do not fit.
        """
        if mesh_of(module) is not None:
            raise HexadError(
                "parallelize: found a model that is divided already; give one plan for all of it"
            )
        if mesh.context.size > 1:
            raise HexadError(
                f"mesh: found {mesh.context.size} context ranks, of whose tokens a user's attention would "
                "see its own; use tensor, pipeline and data ranks"
            )
        in_sequence = any(entry.style == "sequence_parallel" for entry in chosen)
        if in_sequence:
            _check_sequence(module, chosen)
        sequence = in_sequence and mesh.tensor.size > 1
        first = next(module.parameters()).dtype
        shard = Shard({"tensor": mesh.tensor}, sequence, first, mesh.device)
        work = cls(module, _with_ties(module, chosen), mesh, shard, layers.SharedInput(shard))
        for entry in work.chosen:
            work._check(entry)
        _check_sharing(module, work.chosen)
        return work._tried() if work.ranks > 1 else work

    def _tried(self) -> _Work:
        """These changes with the attributes and trials that a pass without values determines.

        Raises:
            HexadError: a rank would not compute its part of what one process computes.
        """
        attributes: dict[tuple[str, str], int] = {}
        later = []
        for path in tops(self.module, [entry.name for entry in self.chosen]):
            trial = self._trial(path)
            numbers = trial.attributes()
            if numbers is None:
                later.append((path, trial))
            for (inner, name), number in (numbers or {}).items():
                attributes[".".join(filter(None, (path, inner))), name] = number
        return replace(self, attributes=attributes, trials=later)

    def _trial(self, path: str) -> Trial:
        """The trial of a module inside the model, or of the model (an empty path)."""
        top, prefix = self.module.get_submodule(path), f"{path}." if path else ""
        chosen = [
            Entry(entry.name.removeprefix(prefix), entry.style)
            for entry in self.chosen
            if entry.name.startswith(prefix)
        ]
        computed = [entry for entry in chosen if entry.style != "all_reduce"]

        def divide(copy: nn.Module) -> None:
            replace(self, module=copy, chosen=computed, inputs=layers.SharedInput(self.shard)).carry_out()

        styles = {
            entry.name: entry.style
            for entry in chosen
            if entry.style in LAYERS and not _owner(top, entry.name)
        }
        device = self.mesh.device
        return Trial(top, LayerStyles(styles, self.ranks, self.shard.sequence, divide), path, device)

    @property
    def ranks(self) -> int:
        return self.shard.tensor.size

    # What does not fit

    def _check(self, entry: Entry) -> None:
        if entry.style in ("replicate", "local_params", "all_reduce"):
            return
        if (owner := _owner(self.module, entry.name)) is not None:
            self._check_parameter(entry, *owner)
            return
        layer = self.module.get_submodule(entry.name)
        taken = [name for name in layers.ATTRIBUTES if hasattr(layer, name)]
        if taken:
            raise _error(entry, f"found an attribute {taken[0]!r}", "which a divided module needs: rename it")
        if entry.style in ("replicated_with_grad_allreduce", "sequence_parallel"):
            if not layer._parameters and next(layer.parameters(), None) is not None:
                raise _error(
                    entry, f"found {type(layer).__name__} without parameters", "name what is inside it"
                )
            return
        kind = nn.Embedding if "embedding" in entry.style else nn.Linear
        if not isinstance(layer, kind) or not _computes_as(layer, kind):
            raise _error(entry, f"found {type(layer).__name__}", f"expected torch.nn.{kind.__name__}")
        if "weight" not in layer._parameters:
            raise _error(entry, "found a weight that is computed", "remove the parametrisation")
        parent = self.module.get_submodule(entry.name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            raise _error(entry, "found part of a MultiheadAttention", "which reads its weights itself")
        if (
            next(layer.buffers(recurse=False), None) is not None
            and layer._buffers.keys() - layer._non_persistent_buffers_set
        ):
            raise _error(entry, "found a layer with buffers", "which would not be saved")
        if isinstance(layer, nn.Linear):
            self._check_linear(entry, layer, parent)
        else:
            self._check_embedding(entry, layer)

    def _check_parameter(self, entry: Entry, owner: nn.Module, name: str) -> None:
        parameter = owner.get_parameter(name)
        if isinstance(owner, nn.Linear | nn.Embedding):
            raise _error(entry, "found a layer's parameter", "name the layer")
        if entry.style not in ("colwise", "rowwise", "replicated_with_grad_allreduce"):
            raise _error(entry, "found a parameter", "a parameter may be colwise, rowwise or partial")
        dim = _dim_of(entry, parameter)
        if dim is not None and parameter.shape[dim] % self.ranks:
            raise self._divides_not(entry, parameter.shape[dim], "elements")

    def _check_linear(self, entry: Entry, layer: nn.Linear, parent: nn.Module) -> None:
        columns = "colwise" in entry.style
        size, what = (layer.out_features, "outputs") if columns else (layer.in_features, "inputs")
        parts = self.ranks * (HALVES if entry.style.startswith("packed") else 1)
        if size % parts and entry.style != "colwise_gather_output":
            raise self._divides_not(entry, size, what)
        width = getattr(parent, "head_dim", getattr(parent, "head_size", None))
        if entry.style == "colwise" and isinstance(width, int) and width > 0:
            width *= 3 if entry.name.endswith(".query_key_value") else 1  # of one head after the other
            heads, rest = divmod(size, width)
            if not rest and heads % self.ranks:
                raise self._divides_not(entry, heads, f"heads of {width} features")

    def _check_embedding(self, entry: Entry, layer: Any) -> None:
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise _error(entry, f"found {option}", "which a divided table does not have")
        if entry.style == "embedding_colwise" and layer.embedding_dim % self.ranks:
            raise self._divides_not(entry, layer.embedding_dim, "columns")

    def _divides_not(self, entry: Entry, size: int, what: str) -> HexadError:
        return _error(
            entry,
            f"found {size} {what}, which do not divide by {self.ranks} tensor ranks",
            "use another tensor degree, or leave the layer out of the plan",
        )

    # What is done

    def carry_out(self) -> None:
        set_attributes(self.module, self.attributes)
        done: dict[Tensor, Parameter] = {}
        for entry in self.chosen:
            owner = _owner(self.module, entry.name)
            if owner is not None:
                self._convert_parameter(entry, *owner, done)
            elif entry.style == "all_reduce":
                self.module.get_submodule(entry.name).register_forward_hook(self._sum)
            elif entry.style not in ("replicate", "local_params"):
                self._convert(entry, self.module.get_submodule(entry.name), done)

    def _become(self, module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
        layers.convert(module, kind, self.shard, mesh=self.mesh, inputs=self.inputs, **attributes)

    def _sum(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return regions.summed(output, self.shard.tensor)

    def _convert(self, entry: Entry, layer: Any, done: dict[Tensor, Parameter]) -> None:
        style = entry.style
        bias = getattr(layer, "bias", None) is not None
        if "embedding" in style:
            rows = style == "embedding_rowwise"
            self._become(layer, layers.RowEmbedding if rows else layers.ColumnEmbedding)
            divided = {"tensor": 0 if rows else 1}
            table = _whole("weight", layer.weight, divided, pads=rows)
            layers.declare(layer, "weight", table, layer.weight.data, done)
        elif "colwise" in style:
            packed, gathers = style == "packed_colwise", style == "colwise_gather_output"
            self._become(layer, layers.ColumnLinear, gathers=gathers)
            for name in ("weight", "bias") if bias else ("weight",):
                whole = getattr(layer, name)
                declaration = (
                    _row_halves(name, whole) if packed else _whole(name, whole, {"tensor": 0}, gathers)
                )
                layers.declare(layer, name, declaration, whole.data, done)
        elif "rowwise" in style:
            self._convert_rows(entry, layer, bias, done)
        else:
            self._become(layer, layers.Converted)
            for name, parameter in list(layer.named_parameters(recurse=False)):
                layers.declare(layer, name, _whole(name, parameter, {}, partial=True), parameter.data, done)

    def _convert_rows(self, entry: Entry, layer: Any, bias: bool, done: dict[Tensor, Parameter]) -> None:
        second = entry.style == "packed_rowwise"
        splits = entry.style == "rowwise_split_input"
        self._become(layer, layers.RowLinear, splits=splits, second=second)
        if second:
            whole = layer.weight.data
            for name, part in zip(("weight", "weight_1"), _column_halves(whole)):
                layers.declare(layer, name, part, whole, done)
        else:
            matrix = _whole("weight", layer.weight, {"tensor": 1})
            layers.declare(layer, "weight", matrix, layer.weight.data, done)
        if bias:
            # In sequence parallel a rank sees the outputs of its own tokens.
            bias_parts = _whole("bias", layer.bias, {}, partial=self.shard.sequence)
            layers.declare(layer, "bias", bias_parts, layer.bias.data, done)

    def _convert_parameter(self, entry: Entry, owner: Any, name: str, done: dict[Tensor, Parameter]) -> None:
        if not isinstance(owner, ShardedModule):
            self._become(owner, layers.Converted)
        parameter = owner.get_parameter(name)
        dim = _dim_of(entry, parameter)
        divided = {} if dim is None else {"tensor": dim}
        declaration = _whole(name, parameter, divided, partial=dim is None)
        layers.declare(owner, name, declaration, parameter.data, done)


def _whole(
    name: str, tensor: Tensor, divided: Mapping[str, int], pads: bool = False, partial: bool = False
) -> Parameter:
    """A parameter that holds a rank's shard of one tensor; ``pads``: shards of dim 0 may be uneven."""
    axes = frozenset({"tensor"} if partial else ())
    return Parameter(name, (Weight(name, tuple(tensor.shape), divided, axes, multiple=int(pads)),))


def _row_halves(name: str, tensor: Tensor) -> Parameter:
    """A parameter that holds a rank's shards of both halves of a tensor's rows."""
    rows, *others = tensor.shape
    shape, zeros = (rows // HALVES, *others), (0,) * len(others)
    halves = [((number * shape[0], *zeros), tuple(tensor.shape)) for number in range(HALVES)]
    return Parameter(name, tuple(Weight(name, shape, {"tensor": 0}, within=half) for half in halves))


def _column_halves(tensor: Tensor) -> list[Parameter]:
    """The parameters ``weight`` and ``weight_1``, with a rank's shard of each half of a matrix's columns."""
    rows, columns = tensor.shape
    shape = (rows, columns // HALVES)
    halves = [((0, number * shape[1]), (rows, columns)) for number in range(HALVES)]
    weights = [Weight("weight", shape, {"tensor": 1}, within=half) for half in halves]
    return [Parameter(name, (weight,)) for name, weight in zip(("weight", "weight_1"), weights)]


def _dim_of(entry: Entry, parameter: Tensor) -> int | None:
    """The dim along which a plan divides a parameter that is no layer's; None if it does not."""
    dims = {"colwise": max(parameter.dim() - 2, 0), "rowwise": parameter.dim() - 1}
    return dims.get(entry.style)


def _error(entry: Entry, actual: str, expected: str) -> HexadError:
    return HexadError(f"plan: {entry.name} is {entry.style}: {actual}; {expected}")


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module that has the parameter of this name, and its own name there; None for a module's name."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    return (owner, attribute) if attribute in owner._parameters else None


def _computes_as(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer's forward pass is that of ``kind``, or calls it (``super().forward``) and computes
    nothing with its weight."""
    for base in type(layer).__mro__:
        if base is kind:
            return True
        code = getattr(vars(base).get("forward"), "__code__", None)
        if code is None and "forward" not in vars(base):
            continue
        if code is None or "forward" not in code.co_names or "__class__" not in code.co_freevars:
            return False
        if kind is nn.Linear and {"weight", "bias"} & {*code.co_names}:
            return False
    return False


def _check_sequence(module: nn.Module, chosen: Iterable[Entry]) -> None:
    """Refuse plans by which some parameters would see a rank's tokens, and others all of them, unsaid."""
    styles = {entry.name: entry for entry in chosen}
    for entry in styles.values():
        if entry.style in ("embedding_colwise", "rowwise_split_input"):
            raise _error(
                entry, "found with sequence_parallel", "its input or output has all tokens: use vocab, row"
            )
    if not any(entry.style == "embedding_rowwise" for entry in styles.values()):
        raise HexadError(
            "plan: found sequence_parallel without an embedding; give the embedding 'vocab', which divides "
            "the tokens"
        )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in styles and name.rpartition(".")[0] not in styles:
            raise HexadError(
                f"plan: found sequence_parallel and nothing for {name}; give its module 'sequence' where it "
                "is used for a rank's tokens, or 'replicate' where it is used for all of them"
            )


def _holders(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The names of the modules that have each parameter."""
    holders: dict[nn.Parameter, list[str]] = {}
    for path, owner in module.named_modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(path)
    return holders


def _with_ties(module: nn.Module, chosen: list[Entry]) -> list[Entry]:
    """The entries, where a head shares its weight with the embedding: both are divided by rows, or, where the
    embedding cannot be, neither is."""
    styles = {entry.name: entry for entry in chosen}
    holders = _holders(module)
    for name, entry in list(styles.items()):
        if entry.style != "colwise_gather_output":
            continue
        weight = getattr(module.get_submodule(name), "weight", None)
        for other in holders.get(weight, []) if isinstance(weight, nn.Parameter) else ():
            embedding = module.get_submodule(other)
            if other in styles or not isinstance(embedding, nn.Embedding):
                continue
            if _computes_as(embedding, nn.Embedding):
                styles[other] = Entry(other, "embedding_rowwise")
            else:
                styles.pop(name, None)
    return list(styles.values())


def _check_sharing(module: nn.Module, chosen: Iterable[Entry]) -> None:
    """Refuse a plan that divides a weight for some of its modules only."""
    rows = {"colwise_gather_output", "embedding_rowwise"}
    styles = {entry.name: entry for entry in chosen}
    for parameter, paths in _holders(module).items():
        divided = [path for path in paths if path in styles and styles[path].style not in ("replicate",)]
        if len(paths) < 2 or not divided or parameter.dim() < 2:
            continue
        others = [path for path in paths if path not in styles or styles[path].style not in rows]
        if others:
            entry = styles[divided[0]]
            raise _error(
                entry,
                f"found a weight that {others[0]} shares",
                "divide both by rows (vocab for the embedding, column_gather for the head), or neither",
            )
