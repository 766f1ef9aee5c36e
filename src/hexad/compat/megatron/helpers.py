"""Small functions and modules of Megatron-Core that scripts and user-defined layers call."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from hexad.config import HexadError

from .transformer import ModuleSpec


def get_torch_version() -> Version:
    """The version of PyTorch."""
    return Version(torch.__version__)


def get_te_version() -> Version:
    """0.0.0: Transformer Engine is not used."""
    return Version("0.0.0")


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether PyTorch is of this version, or a later one."""
    wanted = Version(version)
    return get_torch_version() >= wanted if check_equality else get_torch_version() > wanted


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Never: Transformer Engine is not used."""
    return False


is_fa_min_version = is_te_min_version


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Refuse numbers that do not divide.

    Raises:
        HexadError: ``denominator`` does not divide ``numerator``.
    """
    if numerator % denominator:
        raise HexadError(f"divide: found {numerator}, which {denominator} does not divide")


def divide(numerator: int, denominator: int) -> int:
    """The quotient of numbers that divide.

    Raises:
        HexadError: they do not.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """The tensor, detached unless ``keep_graph``: memory of views is released by Hexad's schedules."""
    return inp if keep_graph else inp.detach().requires_grad_(requires_grad)


def flatten_batch_for_packed_sequences(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch, which has no packed sequences.

    Raises:
        HexadError: it has.
    """
    if batch.get("cu_seqlens") is not None:
        raise HexadError(
            "cu_seqlens: found packed sequences; documents are isolated by --reset-position-ids and its "
            "companions"
        )
    return batch


def mtp_on_this_rank(*_: Any, **__: Any) -> bool:
    """Never: only the next token is predicted."""
    return False


def get_mtp_ranks(*_: Any, **__: Any) -> list[int]:
    """None: only the next token is predicted."""
    return []


def compile_helpers() -> None:
    """No-op: nothing is compiled."""


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """The function, and no store: a run restarts through its launcher (see ``docs/faults.md``)."""
    return pretrain, None


class IdentityOp(nn.Module):
    """Returns its input; any arguments of its constructor are accepted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        """The input."""
        return x


class IdentityFuncOp(IdentityOp):
    """Returns a function that returns its input."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """The identity."""
        return super().forward


def get_module(spec: Any, **_: Any) -> Any:
    """The class or function that a :class:`ModuleSpec` names."""
    return spec.module if isinstance(spec, ModuleSpec) else spec


def build_module(spec: Any, *arguments: Any, **named: Any) -> Any:
    """The module that a :class:`ModuleSpec`, or a class, describes: called with its ``params``, and with
    ``submodules`` where it has any. A function is returned as it is."""
    module = get_module(spec)
    if not isinstance(module, type):
        return module
    params = dict(getattr(spec, "params", None) or {})
    if isinstance(spec, ModuleSpec) and spec.submodules is not None:
        params["submodules"] = spec.submodules
    return module(*arguments, **params, **named)


# Functions of layers


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """Draws a tensor from N(0, sigma)."""
    return partial(nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(
    sigma: float, num_layers: int, multiplier: float = 2.0
) -> Callable[[Tensor], Tensor]:
    """Draws a tensor from N(0, sigma / sqrt(2 x layers))."""
    return partial(nn.init.normal_, mean=0.0, std=sigma / math.sqrt(multiplier * num_layers))


def get_linear_layer(
    rows: int, columns: int, init_method: Callable[[Tensor], Any], gather_params_on_init: bool = False
) -> nn.Linear:
    """A linear layer with weights of ``init_method`` and a bias of zeros."""
    layer = nn.Linear(rows, columns)
    with torch.no_grad():
        init_method(layer.weight)
        layer.bias.zero_()
    return layer


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Fill masked scores with -10000, in place."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def openai_gelu(x: Tensor) -> Tensor:
    """GELU by the tanh approximation."""
    return nn.functional.gelu(x, approximate="tanh")


gelu_impl = openai_gelu


def erf_gelu(x: Tensor) -> Tensor:
    """GELU by the error function, with the package's rounded root of 2."""
    return x * 0.5 * (torch.erf(x / 1.41421).to(x) + 1.0)


def squared_relu(x: Tensor) -> Tensor:
    """The square of ReLU."""
    return nn.functional.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """GELU by a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool
) -> Tensor:
    """``residual`` plus the dropout of a layer's result and bias."""
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    return residual + nn.functional.dropout(x, p=prob, training=training)


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[[Any, Tensor, float], Tensor]:
    """:func:`bias_dropout_add` for training or evaluation; ``fused`` has no effect."""
    return partial(bias_dropout_add, training=training)
