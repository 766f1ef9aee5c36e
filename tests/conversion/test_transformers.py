"""Models of ``transformers`` divided by the plans that they carry, against one process."""

import os

import pytest
import torch
import torch.distributed as dist

from hexad import HexadError, Layout, Mesh, parallelize

from ..layers import CPU
from ..pool import Pool
from .small_models import RATE, Kind, loss_of, tokens_of, trained

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

USUAL = {
    "llama": "LlamaConfig",
    "qwen3": "Qwen3Config",
    "gemma3": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
    "granite": "GraniteConfig",
    "gpt_neox": "GPTNeoXConfig",
    "mistral": "MistralConfig",
    "cohere": "CohereConfig",
}
EVERY_TIME = ("gemma3", "phi3", "gpt_neox")
"""A plan with norms of heads, one with packed weights, one with biases; all others are slow."""


def divided(kind: Kind, rate: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A plain loop on as many tensor ranks as there are."""
    world = dist.get_world_size()
    model = parallelize(kind.build(), Mesh.create(Layout(world=world, tensor=world), CPU))
    return trained(model, rate=rate)


def largest_difference(kind: Kind, world: int, pool: Pool, rate: float = RATE) -> tuple[float, float]:
    """Of losses, relative, and of weights after the steps, against one process."""
    losses, weights = trained(kind.build(), rate=rate)
    results = pool.run(world, divided, kind, rate)
    of_losses = max(abs(a - b) / abs(b) for given, _ in results for a, b in zip(given, losses))
    of_weights = 0.0
    for _, state in results:
        assert state.keys() == weights.keys()
        for name, values in weights.items():
            of_weights = max(of_weights, float((state[name] - values).abs().max()) if values.numel() else 0.0)
    return of_losses, of_weights


@pytest.mark.parametrize(
    "folder",
    [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in USUAL],
)
def test_usual_models(folder: str, pool: Pool) -> None:
    losses, weights = largest_difference(Kind(folder, USUAL[folder]), 2, pool)
    assert losses < 1e-12
    assert weights < 1e-12


def collectives(kind: Kind) -> dict[str, int]:
    """Of one step."""
    world = dist.get_world_size()
    mesh = Mesh.create(Layout(world=world, tensor=world), CPU)
    model = parallelize(kind.build(num_hidden_layers=3), mesh)
    mesh.tensor.calls.clear()
    loss_of(model, tokens_of()).backward()
    return dict(mesh.tensor.calls)


def test_layers_with_one_input_send_once(pool: Pool) -> None:
    """Forward the embedding and two sums per layer, backward one for queries, keys and values, one for gate
    and up, one for the head; its logits are gathered once."""
    for calls in pool.run(2, collectives, Kind("llama", USUAL["llama"])):
        assert calls == {"all_reduce": 1 + 2 * 3 + 2 * 3 + 1, "all_gather": 1}


def refusal(kind: Kind) -> str:
    world = dist.get_world_size()
    with pytest.raises(HexadError) as caught:
        parallelize(kind.build(), Mesh.create(Layout(world=world, tensor=world), CPU))
    return str(caught.value)


@pytest.mark.parametrize(
    ("folder", "world", "message"),
    [
        ("gpt_neox", 3, "query_key_value is colwise: found 4 heads of 24 features, which do not divide by 3"),
        ("esmc", 2, "plan: layers.0.self_attn.q_norm (EsmcLayerNorm) would not compute a rank's part"),
        ("llama", 4, "k_proj is colwise: found 2 heads of 8 features, which do not divide by 4 tensor ranks"),
    ],
)
def test_plans_that_a_model_does_not_fit_are_refused(
    folder: str, world: int, message: str, pool: Pool
) -> None:
    for said in pool.run(world, refusal, Kind(folder, USUAL.get(folder, "EsmcConfig"))):
        assert message in said


def recomputed(reentrant: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    world = dist.get_world_size()
    model = parallelize(
        Kind("llama", USUAL["llama"]).build(), Mesh.create(Layout(world=world, tensor=world), CPU)
    )
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return trained(model, wide=False)


@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradient_checkpointing(reentrant: bool, pool: Pool) -> None:
    """The norms of the model are in float32; what a rank leaves out would change the weights by 1e-3."""
    losses, weights = trained(Kind("llama", USUAL["llama"]).build(), wide=False)
    for given, state in pool.run(2, recomputed, reentrant):
        assert given == pytest.approx(losses, rel=1e-6)
        for name, values in weights.items():
            torch.testing.assert_close(state[name], values, rtol=1e-6, atol=1e-7)
