"""Every kind of model of ``transformers`` that carries a plan of tensor parallelism, at a small size."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hexad.conversion.styles import EXPERTS

SIZES = {
    "vocab_size": 62,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_IN_SECTIONS = {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
OTHERS: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "Cosmos3EdgeTextConfig": {"rope_parameters": _IN_SECTIONS},
    "EmbeddingGemma2TextConfig": {"num_global_key_value_heads": 2, "global_head_dim": 8},
    "EsmcConfig": {"num_key_value_heads": 4},
    "Glm4vTextConfig": {"rope_parameters": _IN_SECTIONS},
    "GlmImageTextConfig": {"rope_parameters": _IN_SECTIONS},
    "GlmOcrTextConfig": {"rope_parameters": _IN_SECTIONS},
    "Gemma3nTextConfig": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 62,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "NeoMMEConfig": {"head_dim": 16, "hidden_size": 64},
    "PaddleOCRTextConfig": {"rope_parameters": _IN_SECTIONS},
    "Phi4MultimodalConfig": {"vision_config": {"num_hidden_layers": 1}, "audio_config": {"num_blocks": 1}},
    "Qwen2VLTextConfig": {"rope_parameters": _IN_SECTIONS},
    "Qwen2_5OmniTextConfig": {"rope_parameters": _IN_SECTIONS},
    "Qwen2_5_VLTextConfig": {"rope_parameters": _IN_SECTIONS},
}
"""Sizes that some models need besides."""
LARGEST = 10_000_000
"""Parameters: models that ignore the sizes are not built."""


class Kind(NamedTuple):
    """A configuration with a plan.

    Attributes:
        folder: of ``transformers.models``.
        name: of the configuration's class.
    """

    folder: str
    name: str

    @property
    def config_class(self) -> Any:
        """The configuration's class."""
        return getattr(
            importlib.import_module(f"transformers.models.{self.folder}.configuration_{self.folder}"),
            self.name,
        )

    @property
    def plan(self) -> dict[str, str]:
        """Of the base model."""
        return dict(self.config_class.base_model_tp_plan)

    @property
    def of_experts(self) -> list[str]:
        """Its styles for experts or latent attention."""
        return sorted(EXPERTS & set(self.plan.values()))

    @property
    def model_class(self) -> Any:
        """A causal language model of the configuration, or the base model.

        Raises:
            LookupError: there is none.
        """
        try:
            module = importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}")
        except ModuleNotFoundError as error:
            raise LookupError(f"no module {error.name}") from None
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and value.__module__ == module.__name__
            and getattr(value, "config_class", None) is self.config_class
            and "PreTrained" not in value.__name__
        ]
        for suffix in ("ForCausalLM", "LMHeadModel", "Model", "Encoder"):
            for value in classes:
                if value.__name__.endswith(suffix):
                    return value
        raise LookupError("no model of this configuration alone")

    def build(self, seed: int = 0, **settings: Any) -> nn.Module:
        """A model with random weights, in float64, without dropout.

        Raises:
            LookupError: it cannot be made small.
        """
        model_class, config = self.model_class, self._config(settings)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > LARGEST:
            raise LookupError(f"{size} parameters at these sizes")
        torch.manual_seed(seed)
        model: nn.Module = model_class(config).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(noise * 0.2 + (parameter.dim() == 1))
        return model.train()

    def _config(self, settings: dict[str, Any]) -> Any:
        known = set(signature(self.config_class.__init__).parameters)
        known |= set(getattr(self.config_class, "__dataclass_fields__", {}))
        given = {key: value for key, value in SIZES.items() if key in known}
        config = self.config_class(**(given | OTHERS.get(self.name, {}) | settings))
        for key, value in vars(config).items():
            if "dropout" in key and isinstance(value, float):
                setattr(config, key, 0.0)
        config.use_cache = False
        config._attn_implementation = "eager"
        return config


def kinds() -> Iterator[Kind]:
    """All of the installed version."""
    import transformers

    for folder in sorted(info.name for info in pkgutil.iter_modules(transformers.models.__path__)):
        name = f"transformers.models.{folder}.configuration_{folder}"
        with warnings.catch_warnings(action="ignore"):
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == name
            if own and getattr(value, "base_model_tp_plan", None):
                yield Kind(folder, value.__name__)


def tokens_of(batch: int = 2, length: int = 7) -> Tensor:
    """Token ids of one batch."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, SIZES["vocab_size"] - 2, (batch, length), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of a language model; of a base model a sum of its outputs."""
    output = model(input_ids=tokens)
    logits = getattr(output, "logits", None)
    if logits is None:
        hidden: Tensor = output.last_hidden_state
        return hidden.square().mean() + 0.1 * hidden[..., :3].sum()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten() % logits.shape[-1])


RATE = 0.02
"""Of the weights' change in a step of :func:`trained`."""
LOW_RATE = 0.002
"""That of the sweep over all models. With :data:`RATE` the gradients of Dory grow by a factor of 1,000 within
three steps, and with them what is rounding in the first."""


class Wide(TorchFunctionMode):
    """Whatever a model asks to be computed in float32 is computed in float64, so that rounding does not hide
    differences."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if function is Tensor.float else function
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*wide, **named)


def trained(model: nn.Module, wide: bool = True, rate: float = RATE) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps of a plain loop, and the weights in the end; ``wide``: see :class:`Wide`, which
    is not in force in backward passes; ``rate``: of the weights' change."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=rate), []
    for _ in range(3):
        with Wide() if wide else nullcontext():
            loss = loss_of(model, tokens_of())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()
