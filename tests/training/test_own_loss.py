"""Losses and heads of a user's own on the configured model: every layout computes what one process does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hexad import Engine, HexadError, Layout, Mesh, Microbatch
from hexad.engine.losses import Outputs
from hexad.planning import resolve

from ..layers import CPU
from ..pool import Pool
from ..small import config_of, microbatch_of, random_tokens

SEQUENCES, LENGTH, STEPS = 8, 16, 2
MODEL = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn_hidden": 48, "vocab": 61}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor": 2, "sequence": False}),
    "sequence, data, zero 3": (4, {"tensor": 2, "sequence": True, "data": 2, "zero": 3}),
    "context": (2, {"context": 2}),
    "context, sequence": (4, {"context": 2, "tensor": 2, "sequence": True}),
    "pipeline, zero 1": (4, {"pipeline": 2, "data": 2, "zero": 1, "schedule": "zb_h1"}),
    "pipeline, context, tensor": (8, {"pipeline": 2, "context": 2, "tensor": 2, "schedule": "1f1b"}),
}


def likelihood(outputs: Outputs, microbatch: Microbatch) -> Tensor:
    """The model's own loss."""
    return -outputs.log_probabilities().sum()


def distilled(outputs: Outputs, microbatch: Microbatch) -> Tensor:
    """Cross-entropy with a distribution, from complete logits, and a weight for every token."""
    logits = outputs.logits()
    targets = torch.linspace(-1, 1, logits.shape[1], dtype=logits.dtype).softmax(0)
    losses = -(F.log_softmax(logits, 1) * targets).sum(1)
    return (losses * microbatch.extras["weight"].flatten()).sum()


def preference(outputs: Outputs, microbatch: Microbatch) -> Tensor:
    """Of neighbouring sequences the first is preferred (Rafailov et al., arXiv 2305.18290, without the
    reference), and of all tokens their likelihood counts a little."""
    tokens = outputs.log_probabilities()
    sequences = outputs.whole(tokens).sum(1)
    return outputs.once(-F.logsigmoid(sequences[0::2] - sequences[1::2]).sum()) - 0.01 * tokens.sum()


class Reward(nn.Module):
    """A head with parameters: the last token's value is the mean of the targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.value = nn.Linear(32, 1)

    def forward(self, outputs: Outputs, microbatch: Microbatch) -> Tensor:
        values = outputs.whole(self.value(outputs.hidden()).squeeze(1))[:, -1]
        wanted = outputs.whole(microbatch.extras["weight"].flatten()).mean(1)
        return outputs.once(F.mse_loss(values, wanted, reduction="sum"))


LOSSES = {"likelihood": likelihood, "distilled": distilled, "preference": preference, "reward": Reward}


def batches_of(step: int) -> list[Microbatch]:
    tokens = random_tokens(MODEL["vocab"], SEQUENCES, LENGTH, step)
    tokens[1, 3] = tokens[2, 5]
    weights = torch.rand(
        SEQUENCES, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )
    batches = []
    for rows, weight in zip(tokens.split(2), weights.split(2)):
        batch = microbatch_of(rows)
        batch.labels[0, :2] = -100
        batches.append(replace(batch, extras={"weight": weight}))
    return batches


def steps(kind: str | None, parallel: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms; without a kind of the model's own loss."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = config_of(
        model=MODEL,
        data={"sequence": LENGTH},
        batch={"micro": 2, "global": SEQUENCES},
        precision={"dtype": "fp64"},
        parallel=parallel,
        optimizer={"lr": 0.01},
    )
    mesh = Mesh.create(Layout.from_settings(config.parallel, world), CPU)
    made = None if kind is None else LOSSES[kind]
    loss = Reward().double() if made is Reward else made
    engine = Engine(resolve(config, mesh.layout), mesh, loss=loss)
    losses, norms = [], []
    for step in range(STEPS):
        mine = batches_of(step)[mesh.data.rank :: mesh.data.size]
        result = engine.train_step(mine, divisor=None if kind in (None, "likelihood") else 7)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms


def test_the_models_own_loss_by_hand() -> None:
    losses, norms = steps("likelihood", {})
    assert (losses, norms) == (
        pytest.approx(steps(None, {})[0], rel=1e-12),
        pytest.approx(steps(None, {})[1], rel=1e-11),
    )


FIRST = {
    "tensor": "distilled",
    "sequence, data, zero 3": "preference",
    "context": "reward",
    "pipeline, zero 1": "likelihood",
}
"""Tried every time; all others are slow."""


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=() if FIRST.get(layout) == kind else pytest.mark.slow)
        for layout in LAYOUTS
        for kind in LOSSES
    ],
)
def test_layouts_agree(kind: str, layout: str, pool: Pool) -> None:
    losses, norms = steps(kind, {})
    world, parallel = LAYOUTS[layout]
    for given in pool.run(world, steps, kind, parallel):
        assert given[0] == pytest.approx(losses, rel=1e-11)
        assert given[1] == pytest.approx(norms, rel=1e-9)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    LOSSES["wrong"] = lambda outputs, _: outputs.log_probabilities()
    with pytest.raises(HexadError, match=r"^loss: found shape \(32,\), expected a scalar"):
        steps("wrong", {})
    del LOSSES["wrong"]
