"""Parameters of this rank: allocated from what an inventory declares, and found again in a module.

Initialisation, buckets, gradient norms, checkpoints and tests read the declarations; nothing is inferred
from a tensor's shape.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hexad.config import HexadError
from hexad.topology.mesh import Axis, ExpertRanks

from .arithmetic import Arithmetic, arithmetic_of
from .inventory import AxisPositions, Parameter, Position, Weight
from .normal import fill_normal
from .rectangle import Rectangle


@dataclass(frozen=True)
class Shard:
    """The shard of every layer that this rank holds.

    Attributes:
        axes: by name; one that is missing has size 1.
        sequence: activations between the parallel layers are divided over tokens (sequence parallel).
        dtype: of parameters and activations.
        device: of both.
        deferred: parameters have no memory of their own: an engine puts them into its buckets, so that a
            rank that keeps only its shard never holds a complete model.
        fp8: linear layers multiply in 8 bits, see :attr:`arithmetic` and :mod:`hexad.parallel.tensor.fp8`.
        fp8_weight_gradients: where they do, their weights' gradients too.
        exact: results do not depend on the layout or the batch, see :attr:`arithmetic` and
            :mod:`hexad.parallel.exact`.
        compiled: pointwise functions are compiled, see :mod:`hexad.parallel.pointwise`.
        chunks: of tokens, see ``parallel.tensor_chunks``.
        method: how attention reaches the keys of other ranks of the ``ring`` axis, see
            :class:`hexad.parallel.context.attention.KeyExchange`.
        expert_ranks: see :attr:`experts`; None where every rank has all experts.
        arithmetic: how linear layers compute their products; it follows from the others.
    """

    axes: Mapping[str, Axis] = field(default_factory=dict)
    sequence: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    deferred: bool = False
    fp8: bool = False
    fp8_weight_gradients: bool = False
    exact: bool = False
    compiled: bool = False
    chunks: int = 1
    method: Literal["ring", "all_gather"] = "ring"
    expert_ranks: ExpertRanks | None = None
    arithmetic: Arithmetic = field(init=False)

    def __post_init__(self) -> None:
        chosen = arithmetic_of(self.exact, self.fp8, self.fp8_weight_gradients, self.compiled)
        object.__setattr__(self, "arithmetic", chosen)

    @property
    def tensor(self) -> Axis:
        """The tensor axis."""
        return self.axes.get("tensor") or Axis("tensor")

    @property
    def context(self) -> Axis:
        """The context axis, the product of ``ring`` and ``ulysses``."""
        return self.axes.get("context") or Axis("context")

    @property
    def ring(self) -> Axis:
        """Context ranks that exchange keys and values."""
        return self.axes.get("ring") or Axis("context")

    @property
    def ulysses(self) -> Axis:
        """Context ranks that exchange heads for tokens."""
        return self.axes.get("ulysses") or Axis("context")

    @property
    def experts(self) -> ExpertRanks:
        """The ranks among which the experts of a layer are divided."""
        return self.expert_ranks or ExpertRanks()

    @property
    def positions(self) -> AxisPositions:
        """This rank's place along every axis."""
        parts = {part.name: part for axis in self.axes.values() for part in axis.parts}
        return {name: Position(axis.rank, axis.size) for name, axis in {**self.axes, **parts}.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a module are on the same ranks."""
        return self

    @property
    def wide(self) -> torch.dtype:
        """The format of master values and of routers' scores: float32 at least."""
        return torch.promote_types(self.dtype, torch.float32)

    def parameter(self, shape: tuple[int, ...], wide: bool = False) -> nn.Parameter:
        """An uninitialised parameter; ``wide``: in the format of master values."""
        dtype = self.wide if wide else self.dtype
        if self.deferred:
            return nn.Parameter(absent(torch.Size(shape), dtype, self.device))
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device))


def absent(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for values that are not on this rank: an expanded NaN placeholder of ``shape``."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


Provide = Callable[[Tensor], Tensor]
"""Returns what is read in place of a parameter whose values are not here, or raises an error."""


class Guarded(nn.Parameter):
    """The class of a parameter while its values are not here, or on their way: whatever reads them reads what
    :data:`Provide` returns. Its shape, format and gradient can be read as usual."""

    provide: Provide
    usual: type[nn.Parameter]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function not in _without_values():
            args, kwargs = tree_map(_provided, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        values = self.provide(self)  # itself, if the values have arrived: then it has its usual class again
        copy = self.usual(values, self.requires_grad) if values is not self else deepcopy(self, memo)
        memo[id(self)] = copy
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.shape)}, not gathered"


def not_gathered(parameter: Tensor) -> Tensor:
    """The :data:`Provide` of parameters whose values only an engine can gather.

    Raises:
        HexadError: always.
    """
    raise HexadError(
        f"parameter of shape {tuple(parameter.shape)}: its values are sharded over ranks (parallel.zero 3) "
        "and not gathered; read them inside engine.gathered(), or call engine.state_dict(), on all ranks"
    )


def _provided(value: Any) -> Any:
    return value.provide(value) if isinstance(value, Guarded) else value


@cache
def _without_values() -> frozenset[Any]:
    """Functions that can be called with a parameter whose values are not here."""
    kind: Any = Tensor
    facts = (
        "device dtype grad_fn is_cpu is_cuda is_leaf is_meta is_quantized is_sparse itemsize layout nbytes"
    )
    read = f"{facts} ndim requires_grad shape grad".split()
    called = "dim element_size is_complex is_floating_point ndimension nelement numel requires_grad_ size"
    hooks = "register_hook register_post_accumulate_grad_hook retain_grad __len__"
    methods = [getattr(kind, name) for name in f"{called} {hooks}".split()]
    written = [kind.requires_grad.__set__, kind.grad.__set__, kind.grad.__delete__]
    functions = [torch.numel, torch.is_floating_point, torch.is_complex]
    return frozenset([getattr(kind, name).__get__ for name in read] + methods + written + functions)


@cache
def _guarded(kind: type[nn.Parameter]) -> type[Guarded]:
    """The class of a parameter whose values are not here."""
    return type(f"Guarded{kind.__name__}", (Guarded, kind), {"usual": kind})


def guard(parameter: nn.Parameter, provide: Provide) -> None:
    """Let ``provide`` decide what is read of a parameter, until :func:`unguard`."""
    if not issubclass(type(parameter), Guarded):  # isinstance() of parameters' classes is slow
        guarded: Any = parameter
        guarded.__class__, guarded.provide = _guarded(type(parameter)), provide


def unguard(parameter: nn.Parameter) -> None:
    """Make a parameter's values readable."""
    if issubclass(type(parameter), Guarded):
        parameter.__class__ = parameter.usual  # type: ignore[attr-defined]


class ShardedModule(nn.Module):
    """A module that declares how its parameters are sharded."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.shard = shard
        self.declarations: dict[str, Parameter] = {}

    def declare(self, *declarations: Parameter) -> None:
        """Allocate this rank's shard of each, registered under the last part of its name."""
        for declaration in declarations:
            name = declaration.name.rpartition(".")[2]
            shape = declaration.local_shape(self.shard.positions)
            parameter = self.shard.parameter(shape, declaration.weights[0].wide)
            parameter.requires_grad = not declaration.frozen
            self.register_parameter(name, parameter)
            self.declarations[name] = declaration


def wide_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The module's own parameters that keep the format of master values."""
    declarations = module.declarations.items() if isinstance(module, ShardedModule) else ()
    return [getattr(module, name) for name, declared in declarations if declared.weights[0].wide]


@dataclass(frozen=True)
class Declared:
    """A parameter found in a module.

    Attributes:
        parameter: this rank's tensor.
        declaration: what it holds.
        positions: this rank's place along the axes that divide it.
        uses: how many modules use it, and each contribute to its gradient.
        plain: no module has declared it.
    """

    parameter: nn.Parameter
    declaration: Parameter
    positions: AxisPositions
    uses: int = 1
    plain: bool = False

    @property
    def pieces(self) -> list[tuple[int, Rectangle, Weight]]:
        """(first row in the tensor, rectangle, weight) of everything it holds."""
        return self.declaration.pieces(self.positions)

    @property
    def given(self) -> bool:
        """Whether its values are those that a user's module came with; autograd adds up its gradient."""
        return self.declaration.weights[0].given


def declared_parameters(*stages: nn.Module) -> list[Declared]:
    """Every parameter of the stages once, in order of registration.

    A parameter that no module declares counts as replicated: every rank holds all of it, and computes its
    complete gradient.
    """
    declared: dict[nn.Parameter, Declared] = {}
    last: dict[nn.Parameter, nn.Module] = {}  # the stage where it was found
    for stage, (path, module) in ((root, named) for root in stages for named in root.named_modules()):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in declared:
                # Of a given one autograd adds up what it computes for all uses in a stage.
                if not declared[parameter].given or last[parameter] is not stage:
                    declared[parameter] = replace(declared[parameter], uses=declared[parameter].uses + 1)
            elif isinstance(module, ShardedModule) and name in module.declarations:
                declaration = _placed(module.declarations[name], path)
                if declaration.weights[0].given:
                    declaration = _frozen(declaration, not parameter.requires_grad)
                declared[parameter] = Declared(parameter, declaration, module.shard.positions)
            else:
                declaration = _replicated(f"{path}.{name}".removeprefix("."), parameter)
                declared[parameter] = Declared(parameter, declaration, {}, plain=True)
            last[parameter] = stage
    return list(declared.values())


def _placed(declaration: Parameter, path: str) -> Parameter:
    """A declaration whose name is that of the attribute alone is named by where its module is: the module did
    not know that when it was made."""
    if "." in declaration.name or not path:
        return declaration
    unit = _unit(path)
    weights = (replace(weight, name=f"{path}.{weight.name}", unit=unit) for weight in declaration.weights)
    return replace(declaration, name=f"{path}.{declaration.name}", weights=tuple(weights))


def freeze(*modules: nn.Module) -> None:
    """Declare that nothing of some modules is trained."""
    for module in chain.from_iterable(module.modules() for module in modules):
        if isinstance(module, ShardedModule):
            for name, declaration in module.declarations.items():
                module.declarations[name] = _frozen(declaration)
        module.requires_grad_(False)


def _frozen(declaration: Parameter, frozen: bool = True) -> Parameter:
    weights = tuple(replace(weight, frozen=frozen) for weight in declaration.weights)
    return replace(declaration, weights=weights)


def stage_parameters(stages: Mapping[int, nn.Module]) -> list[tuple[int, Declared]]:
    """The declared parameters (:func:`declared_parameters`), each with the number of the first stage that
    holds it."""
    owners = {parameter: n for n, stage in [*stages.items()][::-1] for parameter in stage.parameters()}
    return [(owners[declared.parameter], declared) for declared in declared_parameters(*stages.values())]


def _replicated(name: str, parameter: nn.Parameter) -> Parameter:
    """The declaration of a plain module's parameter: vectors get no weight decay. Megatron-LM's mark
    ``sequence_parallel`` says that its gradient is that of this rank's tokens."""
    shape, unit = tuple(parameter.shape) or (1,), _unit(name.rpartition(".")[0])
    partial = frozenset({"tensor"} if getattr(parameter, "sequence_parallel", False) else ())
    weight = Weight(name, shape, {}, partial, decay=parameter.dim() > 1, unit=unit, given=True)
    return Parameter(name, (weight,))


def _unit(path: str) -> str:
    """The unit with which the weights of the module at ``path`` are gathered: the elements of a list of
    modules one by one."""
    parts = path.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


@torch.no_grad()
def initialise(parameters: Iterable[Declared], seed: int) -> None:
    """Fill parameters from (seed, global name) alone; see :func:`fill_initial`."""
    for declared in parameters:
        declared.parameter.zero_()
        for start, rectangle, weight in declared.pieces:
            fill_initial(declared.parameter.narrow(0, start, rectangle.sizes[0]), rectangle, weight, seed)


@torch.no_grad()
def fill_initial(values: Tensor, rectangle: Rectangle, weight: Weight, seed: int) -> None:
    """Set part of a weight to its initial values: all layouts and devices agree bit for bit."""
    if weight.std == 0.0:
        values.fill_(weight.fill)
    else:
        fill_normal(values, rectangle, weight.std, seed)
