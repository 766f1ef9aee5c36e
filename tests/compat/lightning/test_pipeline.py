"""LightningModules that list their layers, in pipeline stages: the numbers of DDPStrategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ...pool import Pool, RankError
from .program import launched, recorder, trainer_of

pytest.importorskip("lightning")

LENGTH, WIDTH = 5, 12


class Embedding(nn.Embedding):
    """Tokens, each with its place."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + torch.linspace(-1, 1, LENGTH, dtype=self.weight.dtype)[:, None]


class Residual(nn.Module):
    """A layer of features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(self.norm(x))).cumsum(1))
        return x + y * (1.0 if self.training else 0.5)  # evaluation differs, as with dropout


def layers_of() -> nn.ModuleList:
    return nn.ModuleList([Embedding(30, WIDTH), *(Residual() for _ in range(4)), nn.Linear(WIDTH, 30)])


def loss_of(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def optimizer_of(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plain(LightningModule):
    """The layers in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers_of()

    def _loss(self, batch: Any) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return loss_of(x, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def staged(microbatches: int, kind: str = "") -> Any:
    """The layers in stages."""
    import hexad
    from hexad.compat.lightning import PipelineModule

    class Staged(PipelineModule):
        def __init__(self) -> None:
            super().__init__(microbatches)
            self.layers = layers_of()

        def pipeline_layers(self) -> Any:
            mesh = self.trainer.strategy.mesh
            if mesh.tensor.size > 1:
                hexad.parallelize(self.layers, mesh, {"*.up": "column", "*.down": "row"})
            return self.layers

        def loss(self, output: Tensor, batch: Any) -> Tensor:
            return loss_of(output, batch)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    if kind == "boundary":
        Staged.boundary = lambda self, batch: (len(batch[0]), LENGTH, WIDTH)  # type: ignore[method-assign]
    return Staged()


def fitted(
    given: dict[str, Any] | None,
    samples: int,
    options: dict[str, Any] | None = None,
    load: str | None = None,
    save: str | None = None,
    kind: str = "",
) -> dict[str, Any]:
    """Fit, and validate; ``given`` are arguments of the strategy, None is DDPStrategy."""
    from lightning.pytorch.strategies import DDPStrategy

    from hexad.compat.lightning import HexadStrategy

    with launched():
        torch.manual_seed(3)
        module = Plain() if given is None else staged(3, kind)
        strategy = DDPStrategy() if given is None else HexadStrategy(**given)
        record, draw = recorder(), torch.Generator().manual_seed(1)
        tokens = torch.randint(30, (18, LENGTH + 1), generator=draw)
        data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        common = {"max_epochs": 2, "precision": "64-true", "gradient_clip_val": 0.5, "callbacks": [record]}
        trainer = trainer_of(strategy, **{**common, **(options or {})})
        held_out = DataLoader(data, samples)
        trainer.fit(module, DataLoader(data, samples, shuffle=True), held_out, ckpt_path=load)
        if save is not None:
            trainer.save_checkpoint(save)
        tested = trainer.validate(module, held_out, ckpt_path=save, verbose=False)[0]
        return {
            "losses": record.losses,
            "rates": record.rates,
            "metrics": [one["val_loss"] for one in record.metrics],
            "validated": tested["val_loss"],
        }


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    assert found["rates"] == expected["rates"]
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert found["validated"] == pytest.approx(expected["validated"], rel=1e-6)


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one rank": (1, 1, {}),
    "pipeline, zero 1": (2, 1, {"pipeline_model_parallel_size": 2, "zero": 1}),
    "data, zero 3": (4, 2, {"pipeline_model_parallel_size": 2, "zero": 3, "schedule": "zb_h1"}),
    "tensor": (4, 1, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "interleaved": (
        2,
        1,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "schedule": "interleaved",
        },
    ),
}
"""Ranks, data ranks, and arguments of the strategy."""
EVERY_TIME = ("data, zero 3",)


@pytest.mark.parametrize(
    "case", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_equal_to_ddp(pool: Pool, case: str) -> None:
    """Three microbatches of seven samples, and of the four that are left."""
    ranks, data, given = LAYOUTS[case]
    theirs = pool.run(data, fitted, None, 7)
    for rank, found in enumerate(pool.run(ranks, fitted, given, 7)):
        place = rank // given.get("tensor_model_parallel_size", 1) % data
        assert_alike(found, theirs[place])


def test_a_boundary_that_is_named_changes_nothing(pool: Pool) -> None:
    _, _, two = LAYOUTS["pipeline, zero 1"]
    found, named = (pool.run(2, fitted, two, 7, None, None, None, kind) for kind in ("", "boundary"))
    assert found == named


def test_checkpoints(pool: Pool, tmp_path: Path) -> None:
    """Saved by two stages, resumed by one, and by four ranks."""
    whole = pool.run(1, fitted, None, 6)[0]
    path = str(tmp_path / "saved.ckpt")
    two = {"pipeline_model_parallel_size": 2, "zero": 1}
    begun = pool.run(2, fitted, two, 6, {"max_epochs": 1}, None, path)[1]
    assert begun["validated"] == begun["metrics"][-1]
    for ranks, given in ((1, {}), (2, {**two, "zero": 3})):
        ended = pool.run(ranks, fitted, given, 6, {}, path)[0]
        assert ended["losses"] == pytest.approx(whole["losses"][3:], rel=1e-9)
        assert ended["rates"] == whole["rates"][3:]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "accumulation": ({}, {"accumulate_grad_batches": 2}, "", "found accumulate_grad_batches=2"),
    "clipping": ({}, {"gradient_clip_algorithm": "value"}, "", "found gradient_clip_algorithm='value'"),
    "mixed": ({}, {"precision": "bf16-mixed"}, "", "found precision='bf16-mixed'"),
    "context": ({"context_parallel_size": 2}, {}, "", "found context_parallel_size=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(pool: Pool, case: str) -> None:
    given, options, kind, message = REFUSED[case]
    with pytest.raises(RankError, match=f"HexadError: .*{message}"):
        pool.run(2, fitted, given, 6, options, None, None, kind)
