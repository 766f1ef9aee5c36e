"""Parameter counts and arithmetic per token of a model, without building it. What its settings leave to its
preset or family is filled in."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from hexad.config import ConfigError
from hexad.config.model import ModelSettings
from hexad.model.configuration import complete_model
from hexad.model.families import family, presets
from hexad.model.inventory import ModelInventory
from hexad.parallel.inventory import Execution, Product


class Flops(NamedTuple):
    """Arithmetic per token, in FLOPs, by the pipeline's actions."""

    forward: float
    """``F``."""
    backward: float
    """``B``: the gradient of the input."""
    weight: float
    """``W``: the gradient of the weights."""

    @property
    def total(self) -> float:
        """Forward, input-gradient and weight-gradient FLOPs together."""
        return self.forward + self.backward + self.weight

    @classmethod
    def of(cls, products: list[Product], tokens: int) -> Flops:
        """The work per token of a microbatch's products."""
        sums = [sum(p.flops for p in products if p.action == action) for action in ("F", "B", "W")]
        return cls(*(total / tokens for total in sums))


class ModelFlops(NamedTuple):
    """Arithmetic per token of what a pipeline's stages are made of; the embedding multiplies nothing."""

    layers: tuple[Flops, ...]
    """Every layer."""
    head: Flops
    """The output head, part of the last stage."""


def parameter_count(model: ModelSettings, sequence: int | None = None) -> int:
    """Exact number of the model's parameters: unpadded vocabulary, a tied embedding counted once, adapters
    left out.

    Args:
        model: the architecture.
        sequence: ``data.sequence``, for ``max_positions: auto``.

    Raises:
        ConfigError: ``model.vocab`` or a needed ``model.max_positions`` is still ``auto``.
    """
    weights = _inventory(model, sequence).weights()
    return sum(prod(weight.shape) for weight in weights.values())


def active_count(model: ModelSettings) -> int:
    """Number of parameters that one token is computed with: all, but of a layer's experts as many as it
    passes; otherwise :func:`parameter_count`."""
    whole = _inventory(model, None)
    moe, total = whole.settings.moe, 0
    for weight in whole.weights().values():
        share = (moe.top_k, moe.experts) if moe is not None and weight.grid == "expert" else (1, 1)
        total += prod(weight.shape) * share[0] // share[1]
    return total


def trained_count(model: ModelSettings) -> int:
    """Number of the model's trained parameters, counted as by :func:`parameter_count`. Adapters are among
    them, and routers' biases if ``moe.bias_rate`` changes them."""
    whole = _inventory(model, None)
    moe = whole.settings.moe
    by_loads = moe is not None and moe.bias_rate > 0
    weights = [*whole.weights().values(), *whole.adapters().values()]
    return sum(prod(weight.shape) for weight in weights if not weight.frozen or (weight.wide and by_loads))


def flops_per_token(model: ModelSettings, sequence: int, attended: float = 1.0) -> float:
    """Training arithmetic per token in FLOPs: forward and backward, nothing recomputed.

    ``6 * P + 6 * layers * heads * head_dim * sequence``. P are the weights a token is multiplied by: the
    output head counts, the embedding look-up, biases and norms do not; a multiplication and an addition are
    two operations, and the backward pass costs twice the forward pass. The second term is attention's two
    products (scores and weighted values), ``12 * layers * heads * head_dim * sequence`` in PaLM's appendix B
    (arXiv 2204.02311) and in Megatron-LM, halved here because a causal mask leaves half of the scores.

    Args:
        model: the architecture.
        sequence: tokens per sample.
        attended: factor of the second term: where documents are isolated, the sum of the squares of their
            lengths over the square of the sequence's.
    """
    whole = _inventory(model, sequence)
    products = whole.stage(range(whole.settings.layers)).products(Execution(1, sequence, attended=attended))
    return sum(product.flops for product in products if not product.again) / sequence


def layer_costs(model: ModelSettings, sequence: int) -> ModelFlops:
    """Arithmetic per token of every layer and of the output head.

    A matrix product costs the same in ``F``, ``B`` and ``W``: 2 FLOPs per weight. The output head's three are
    all in ``F``, where the loss and its gradients are computed slice by slice. Attention computes its scores
    again in ``B``, so that the sum over the model is larger than :func:`flops_per_token`, which leaves out
    what is recomputed. Norms, activation functions and the loss count as 0. Frozen weights have no ``W``, and
    leading layers in which nothing is trained no ``B`` either. All tokens of a sample are attended to (one
    document).

    Raises:
        ConfigError: ``model.vocab`` is still ``auto``.
    """
    return _layer_costs(model.model_dump_json(), sequence)


@lru_cache(maxsize=8)
def _layer_costs(model_json: str, sequence: int) -> ModelFlops:
    """Costs of layers (:func:`layer_costs`) of a model as text: settings may hold lists."""
    model = ModelSettings.model_validate_json(model_json)
    run = Execution(1, sequence)
    stage = _inventory(model, sequence).stage(range(model.layers))
    assert stage.head is not None
    head = Flops.of(stage.head.products(run), run.tokens)
    layers = [(block, number >= stage.unreached) for number, block in enumerate(stage.blocks)]
    works = {
        (block, reached): Flops.of([p for p in block.products(run) if reached or p.action == "F"], run.tokens)
        for block, reached in set(layers)
    }
    return ModelFlops(tuple(works[layer] for layer in layers), head)


def _inventory(model: ModelSettings, sequence: int | None) -> ModelInventory:
    model = complete_model(model, sequence)
    for name in ("vocab", "max_positions"):
        needed = name == "vocab" or not ModelInventory(model).rotary
        if needed and getattr(model, name) == "auto":
            raise ConfigError(f"model.{name}", "found auto: set a number, or resolve the configuration first")
    return ModelInventory(model)


def preset_table() -> list[dict[str, Any]]:
    """The name, family, exact numbers of parameters and sizes of every preset, family after family.

    ``active``: parameters that one token is computed with. ``experts``, ``top_k`` and ``expert_ffn_hidden``
    are None without experts. ``context``: tokens of the longest sequence that it was published for; None if
    not stated.
    """
    rows = []
    for name in presets():
        model = complete_model(ModelSettings(preset=name))
        sizes = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
        moe = model.moe
        of_experts = {
            "experts": moe.experts if moe else None,
            "top_k": moe.top_k if moe else None,
            "expert_ffn_hidden": int(moe.ffn_hidden) if moe else None,
        }
        rows.append(
            {
                "name": name,
                "family": model.family,
                "parameters": parameter_count(model),
                "active": active_count(model),
                **{size: int(getattr(model, size)) for size in sizes},
                **of_experts,
                "context": family(model.family).context(name),
            }
        )
    return rows
