"""NeMo 2's language models: Hexad's, as a recipe describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from hexad.comm import agreed
from hexad.config import HexadError
from hexad.engine.engine import Engine
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from ..lightning.module import HexadModule
from ..megatron.settings import OptimizerConfig
from . import configs
from .configs import *  # noqa: F403  # NeMo's modules of models have the configurations too
from .configs import SIZES, GPTConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config
from .optim import MegatronOptimizerModule, OptimizerModule
from .tokenizers import TokenizerSpec

__all__ = [
    "PEFT_STR2CLS",
    "GPTModel",
    "LlamaModel",
    "LlamaNemotronModel",
    "LoRA",
    "MistralModel",
    "Phi3Model",
    "Qwen2Model",
    "Qwen3Model",
]
__all__ += [name for name in vars(configs) if "Config" in name]

_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron-Core's layers -> those of ``transformers``' Llama, which ``model.lora.targets`` knows."""


@dataclass
class LoRA:
    """Low-rank adapters, ``model.lora``.

    Attributes:
        target_modules: of Megatron-Core's layers ``linear_qkv``, ``linear_proj``, ``linear_fc1`` and
            ``linear_fc2``.
        dim, alpha, dropout: ``rank``, ``alpha`` and ``dropout``.
        dropout_position: ``pre``.
        lora_A_init_method, lora_B_init_method, lora_dtype: ``xavier``, ``zero`` and None.
        a2a_experimental, dropout_recompute: accepted without effect.
    """

    target_modules: list[str] = field(default_factory=lambda: list(_TARGETS))
    dim: int = 32
    alpha: float = 32
    dropout: float = 0.0
    dropout_position: str = "pre"
    lora_A_init_method: str = "xavier"
    lora_B_init_method: str = "zero"
    a2a_experimental: bool = False
    lora_dtype: torch.dtype | None = None
    dropout_recompute: bool = False

    def settings(self) -> dict[str, Any]:
        """The group ``model.lora``.

        Raises:
            HexadError: other layers, initial values or formats, or another place of the dropout.
        """
        only = {"lora_A_init_method": "xavier", "lora_B_init_method": "zero", "lora_dtype": None}
        for name, value in only.items():
            if getattr(self, name) != value:
                raise HexadError(
                    f"LoRA: found {name}={getattr(self, name)!r}, expected {value!r}: leave it out"
                )
        wrong = [name for name in self.target_modules if name not in _TARGETS]
        if wrong or (self.dropout and self.dropout_position != "pre"):
            wrong_value = (
                f"target_modules {wrong[0]!r}" if wrong else f"dropout_position {self.dropout_position!r}"
            )
            raise HexadError(f"LoRA: found {wrong_value}; use pre, and of {', '.join(_TARGETS)}")
        targets: Any = "all"
        if set(self.target_modules) != set(_TARGETS):
            targets = [name for module in self.target_modules for name in _TARGETS[module]]
        return {"rank": self.dim, "alpha": float(self.alpha), "dropout": self.dropout, "targets": targets}


PEFT_STR2CLS = {"lora": LoRA, "LoRA": LoRA}
"""Adapters by name."""


def default_optimizer() -> MegatronOptimizerModule:
    """The optimizer of a model without one."""
    return MegatronOptimizerModule(OptimizerConfig(lr=1e-4, use_distributed_optimizer=True))


class GPTModel(HexadModule):
    """A language model, trained by :class:`Trainer` with :class:`MegatronStrategy`, in any layout.

    Args:
        config: of the architecture.
        optim: of the training; by default AdamW with the rate 1e-4.
        tokenizer: of the data, unless a data module has its own.
        model_transform: adapters.
        model_context_managers: none.

    Attributes:
        family: ``model.family``; None: the one that ``config`` describes.
    """

    family: str | None = None

    def __init__(
        self,
        config: GPTConfig,
        optim: OptimizerModule | None = None,
        tokenizer: TokenizerSpec | None = None,
        model_transform: LoRA | None = None,
        model_context_managers: Sequence[Any] | None = None,
    ) -> None:
        super().__init__({})
        if model_context_managers:
            raise HexadError(
                f"{type(self).__name__}: found model_context_managers; they are not supported: leave them out"
            )
        if not isinstance(config, GPTConfig):
            raise HexadError(
                f"{type(self).__name__}: found config={type(config).__name__}, expected a GPTConfig, such as "
                "llm.Llama3Config8B()"
            )
        self.architecture, self.tokenizer, self.model_transform = config, tokenizer, model_transform
        self.optim: Any = optim or default_optimizer()
        self.weights: str | None = None  # that a run begins with
        self.files: list[Callable[[], None]] = []

    def layout(self, ranks: int, named: Mapping[str, Any]) -> Layout:
        """The layout of so many ranks.

        Raises:
            HexadError: no trainer has given the settings of a recipe.
        """
        if not self.files:
            raise HexadError(
                f"{type(self).__name__}: found Lightning's Trainer; use hexad.compat.nemo.Trainer"
            )
        return super().layout(ranks, named)

    def make_engine(self, mesh: Mesh, training: bool, optimizer: Any) -> Engine:
        """An engine of the model, once the files of its data and tokenizer are there."""

        def write() -> None:
            for file in self.files:
                file()

        agreed(write, mesh.world)
        return super().make_engine(mesh, training, optimizer)

    def training_step(self, dataloader_iter: Any) -> Any:
        """One step by the pipeline's schedule; its loss, norm and progress are logged."""
        microbatches, _, _ = next(dataloader_iter)
        result = self.train_step(microbatches)
        engine = self._made()
        known: Mapping[str, float] = {
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "global_step": float(engine.step - 1),
            "consumed_samples": float(engine.samples),
            "global_batch_size": float(self.config.batch.size(engine.samples)),
        }
        if result.targets:
            self.log("reduced_train_loss", result.loss, prog_bar=True, batch_size=1)
        self.log_dict(dict(known), batch_size=1)
        return torch.tensor(result.loss, dtype=torch.float64)


class LlamaModel(GPTModel):
    """Llama."""

    def __init__(self, config: GPTConfig | None = None, *positional: Any, **others: Any) -> None:
        super().__init__(LlamaConfig() if config is None else config, *positional, **others)


class LlamaNemotronModel(LlamaModel):
    """Llama Nemotron."""


class MistralModel(GPTModel):
    """Mistral."""

    family = "mistral"

    def __init__(self, config: GPTConfig | None = None, *positional: Any, **others: Any) -> None:
        super().__init__(SIZES["MistralConfig7B"]() if config is None else config, *positional, **others)


class Phi3Model(GPTModel):
    """Phi 3."""

    family = "phi3"

    def __init__(self, config: GPTConfig | None = None, *positional: Any, **others: Any) -> None:
        super().__init__(Phi3Config() if config is None else config, *positional, **others)


class Qwen2Model(GPTModel):
    """Qwen 2."""

    def __init__(self, config: GPTConfig | None = None, *positional: Any, **others: Any) -> None:
        super().__init__(Qwen2Config() if config is None else config, *positional, **others)


class Qwen3Model(GPTModel):
    """Qwen 3, its dense sizes."""

    def __init__(self, config: GPTConfig | None = None, *positional: Any, **others: Any) -> None:
        super().__init__(Qwen3Config() if config is None else config, *positional, **others)


def activation(config: GPTConfig) -> str:
    """The name of an activation function.

    Raises:
        HexadError: no family has it.
    """
    names = {functional.gelu: "gelu", functional.silu: "silu"}
    name = names.get(config.activation_func)
    if name is None or config.gated_linear_unit != (name == "silu"):
        gate = "with" if config.gated_linear_unit else "without"
        activation = name or getattr(config.activation_func, "__name__", "another function")
        raise HexadError(
            f"GPTConfig.activation_func: found {activation} {gate} gated_linear_unit; use "
            "torch.nn.functional.gelu without, or silu with it"
        )
    return name
